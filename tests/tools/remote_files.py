"""Writes the table of the remote code into SECURITY.md, and the code into the bundled encoder's
folder: python tests/tools/remote_files.py

The folder holds copies and not links, so that it can be copied, and cloned on Windows.
"""

import hashlib
import re
from pathlib import Path

from neobert.common.loading import CODE_FILES, copy_code


ROOT = Path(__file__).resolve().parents[2]
ENCODER = ROOT / "examples" / "sentence-encoder"


def with_table(page):
    """`page` with today's lines and digests of the files that travel with every saved folder."""
    rows = ["| file | lines | sha256 |", "|---|---|---|"]
    for name in CODE_FILES:
        data = (ROOT / name).read_bytes()
        rows.append(
            f"| `{name}` | {len(data.splitlines()):,} | `{hashlib.sha256(data).hexdigest()}` |"
        )
    return re.sub(
        r"(?<=\n\n)\| file \| lines.*?\n\n", "\n".join(rows) + "\n\n", page, flags=re.DOTALL
    )


if __name__ == "__main__":
    path = ROOT / "SECURITY.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
    copy_code(ENCODER)
