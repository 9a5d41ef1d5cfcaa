"""`python -m berth` is the command `berth`."""

import sys

from berth.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
