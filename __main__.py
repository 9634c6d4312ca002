"""`neobert <command>`, the same as `python -m neobert <command>`: finds the command's module and runs its `main(argv)`."""

import difflib
import importlib
import sys

from .common.commands import guarded
from .common.errors import Stopped, require


# command: (module, (extra of setup.cfg, modules that it brings), what the command does)
COMMANDS = {
    "convert": ("convert_checkpoint", (), "raw training checkpoint to a Hub repository"),
    "export": ("export.command", (), "a Hub repository to GGUF, ONNX or OpenVINO"),
    "pretrain": ("pretraining.pretrain", ("train", "accelerate", "datasets"), "masked-LM pre-training from a YAML recipe"),
    "ablations": ("pretraining.ablations", ("train", "accelerate", "datasets"), "the ladder M0 to M9 at a reduced size"),
    "pseudo-perplexity": ("pretraining.pseudo_perplexity", (), "pseudo-perplexity against length"),
    "glue": ("finetuning.glue", ("eval", "accelerate", "sklearn"), "GLUE fine-tuning and its table"),
    "contrastive": (
        "embeddings.contrastive",
        ("eval", "sentence_transformers", "datasets", "accelerate"),
        "contrastive fine-tuning to a sentence encoder",
    ),
    "distill": (
        "embeddings.distill",
        ("eval", "sentence_transformers", "datasets", "accelerate"),
        "a sentence encoder that learns another one's vectors",
    ),
    "retrieval": ("embeddings.retrieval", ("eval", "sentence_transformers", "datasets"), "recall and MRR of an encoder on pairs"),
    "mteb": ("embeddings.mteb_evaluation", ("eval", "sentence_transformers", "mteb"), "MTEB evaluation and its table"),
    "encode": ("embeddings.encode", ("eval", "sentence_transformers", "pyarrow"), "embeddings of a large corpus"),
    "throughput": ("benchmarks.throughput", (), "tokens per second against other encoders"),
    "report": ("benchmarks.report", (), "one page from results/"),
}


def usage():
    """The text of `neobert --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join(["usage: neobert <command> [arguments]; neobert <command> --help; neobert --version", "", *lines])


def _leave_process_group():
    """Processes of torchrun leave their group before the interpreter ends, which threads of the group could abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def main(argv=None):
    """Runs one command; returns its exit code: 0, 2 for anything that is one sentence on stderr, 130 after an interrupt, 143 after SIGTERM."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    if argv[0] in ("-h", "--help", "help"):
        return guarded("neobert", lambda: print(usage()))
    if argv[0] in ("-V", "--version"):
        from . import __version__

        return guarded("neobert", lambda: print(f"neobert {__version__}"))
    command, *arguments = argv
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
        print(f"neobert: there is no command {command!r}; {hint}", file=sys.stderr)
        return 2
    module, needs, _ = COMMANDS[command]

    def run():
        if needs:
            require(*needs)
        try:
            code = importlib.import_module(f".{module}", __package__).main(arguments)
        except Stopped:
            _leave_process_group()
            raise
        _leave_process_group()
        return code

    return guarded(f"neobert {command}", run)


if __name__ == "__main__":
    sys.exit(main())
