# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.engine`: serve a model over HTTP, as `specops serve` does."""

import sys

from specops.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
