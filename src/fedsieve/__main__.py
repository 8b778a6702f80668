"""`python -m fedsieve` is the command `fedsieve`."""

import sys

from fedsieve.cli import main

if __name__ == "__main__":
    sys.exit(main())
