"""Run `python -m neobert`, the same as the command `neobert`."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
