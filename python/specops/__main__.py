# SPDX-License-Identifier: Apache-2.0
"""`python -m specops`: the command `specops`, where no console script is installed."""

import sys

from specops.cli import main

if __name__ == "__main__":
    sys.exit(main())
