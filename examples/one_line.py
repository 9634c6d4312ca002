"""How the examples end when something is wrong: in one line, as the commands of this repository do.
A copy of an example does without this file: it calls its `main()`.
"""

import os
import sys
from pathlib import Path


def run(main):
    """Calls main(); an error becomes one line and the exit code 1. NEOBERT_DEBUG=1 shows where."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("NEOBERT_DEBUG", "0") != "0":
            raise
        # The libraries' texts may have several lines; the reason may be in the cause (datasets).
        words = f"there is no column or key {error}" if isinstance(error, KeyError) else str(error)
        if error.__cause__ is not None:
            words = f"{words.partition(chr(10))[0]}: {error.__cause__}"
        line = words.strip().partition("\n")[0][:400] or type(error).__name__
        sys.exit(f"{Path(sys.argv[0]).name}: {line}")
