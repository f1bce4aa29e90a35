"""`python -m mxfp4.cli`, for where the command is not on the path."""

import sys

from mxfp4.cli import main

if __name__ == "__main__":
    sys.exit(main())
