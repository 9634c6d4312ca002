"""Convert a raw training checkpoint to a folder for the Hugging Face Hub.

    python convert_checkpoint.py CHECKPOINT OUTPUT

This script runs in a clone without an installation. The installed package has the same command:
`neobert convert CHECKPOINT OUTPUT`.
"""

import sys
from pathlib import Path


# The directory of this script contains the package; it comes first if another version is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from neobert.common.commands import guarded  # noqa: E402


def main() -> int:
    """Run the command. The libraries are imported here, so that Ctrl-C is reported in one line."""
    from neobert.conversion.command import main as convert

    return convert(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(guarded("convert_checkpoint.py", main))
