"""Copy the model files of the repository root to their other locations (`make sync`).

The root contains the source. The copies in neobert/ (the package) and examples/sentence-encoder/
(the bundled encoder) are not symbolic links, because the Hub serves a symbolic link as a text file
with its target. SECURITY.md lists the digests of the model files, because every saved model folder
contains them.
"""

import hashlib
import re
import shutil
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
MODEL_FILES = ("configuration_neobert.py", "attention_neobert.py", "modeling_neobert.py")
COPIES = (ROOT / "neobert", ROOT / "examples" / "sentence-encoder")


def with_table(page: str) -> str:
    """Return the text of SECURITY.md with the current line counts and digests of the model files.

    Args:
        page: Text of SECURITY.md.
    """
    rows = ["| file | lines | sha256 |", "|---|---|---|"]
    for name in MODEL_FILES:
        data = (ROOT / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        rows.append(f"| `{name}` | {len(data.splitlines()):,} | `{digest}` |")
    return re.sub(
        r"(?<=\n\n)\| file \| lines.*?\n\n", "\n".join(rows) + "\n\n", page, flags=re.DOTALL
    )


def sync() -> None:
    """Write all copies of the model files and the table of SECURITY.md."""
    for folder in COPIES:
        for name in MODEL_FILES:
            shutil.copyfile(ROOT / name, folder / name)
    page = ROOT / "SECURITY.md"
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sync()
