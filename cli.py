"""`neobert <command>`: finds the command's module, runs its main(argv), and turns bad input into one sentence and exit code 2."""

import importlib
import sys

from .common.errors import UserError


# command: (module, what it does)
COMMANDS = {
    "convert": ("convert_checkpoint", "raw training checkpoint to a Hub repository"),
    "pretrain": ("training.pretrain", "masked-LM pre-training from a YAML recipe"),
    "ablations": ("training.ablations", "the ladder M0 to M9 at a reduced size"),
    "glue": ("training.glue", "GLUE fine-tuning and its table"),
    "contrastive": ("training.contrastive", "contrastive fine-tuning to a sentence encoder"),
    "mteb": ("evaluation.mteb_evaluation", "MTEB evaluation and its table"),
    "pseudo-perplexity": ("evaluation.pseudo_perplexity", "pseudo-perplexity against length"),
    "throughput": ("evaluation.throughput", "tokens a second against other encoders"),
    "encode": ("evaluation.encode", "embeddings of a large corpus"),
    "report": ("evaluation.report", "one HTML page from results/"),
}


def usage():
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: neobert <command> [arguments]; neobert <command> --help", "", *lines])


def _leave_process_group():
    """Processes of torchrun leave their group before the interpreter ends, which threads of the group could abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def main(argv=None):
    """Runs one command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    command, *arguments = argv
    if command not in COMMANDS:
        print(f"neobert: there is no command {command!r}; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f".{COMMANDS[command][0]}", __package__)
        code = module.main(arguments) or 0
        _leave_process_group()
        return code
    except (UserError, ImportError) as error:
        print(f"neobert {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"neobert {command}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
