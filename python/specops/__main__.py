# SPDX-License-Identifier: Apache-2.0
"""`python -m specops`: the `specops` command without the console script."""

import sys

from specops.cli import main

if __name__ == "__main__":
    sys.exit(main())
