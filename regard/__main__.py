"""`python -m regard`: the command line, as the script `regard` starts it."""

import sys

from regard.cli import main

if __name__ == "__main__":
    sys.exit(main())
