"""What every command does alike, `neobert X` and the scripts of benchmarks/: whatever goes wrong becomes one sentence and an exit code."""

import os
import sys
import traceback

from .errors import Stopped, UserError, one_line, printable


def guarded(name, run):
    """Runs a command and returns its exit code; whatever goes wrong becomes one sentence.

    Args:
        name: the command as messages name it.
        run: function without arguments; returns an exit code, or None for 0.
    """
    try:
        code = run() or 0
        _leave_process_group()
        return code
    except (UserError, ImportError) as error:
        message = str(error)
    except Stopped as stopped:
        _leave_process_group()
        if str(stopped):
            print(f"{name}: {stopped}", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    except Exception as error:
        message = f"unexpected {type(error).__name__}: {one_line(error)}; NEOBERT_DEBUG=1 shows where"
    if os.environ.get("NEOBERT_DEBUG"):
        traceback.print_exc()
    print(f"{name}: {printable(message)}", file=sys.stderr)
    return 2


def _leave_process_group():
    """Processes of torchrun leave their group before the interpreter ends, which threads of the group could abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
