"""`python -m autopar`, as torchrun starts it."""

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
