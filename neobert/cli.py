"""`neobert <command>`, the same as `python -m neobert <command>`: finds the command's module and
runs its `main(argv)`."""

import difflib
import importlib
import itertools
import sys
from dataclasses import dataclass

from .common import __version__
from .common.commands import guarded
from .common.errors import Stopped, require


@dataclass(frozen=True)
class Command:
    """A command of the table.

    Attributes:
        topic: heading of --help that it is under.
        about: what it does, in a few words.
        module: whose `main(argv)` runs it. The options module of its room has its --help, and
            imports neither torch nor transformers.
        needs: the extra of setup.cfg and the modules that it brings, checked before the command's
            own imports.
    """

    topic: str
    about: str
    module: str
    needs: tuple = ()

    @property
    def room(self):
        return self.module.partition(".")[0]


_TRAIN = ("train", "accelerate", "datasets")
_SENTENCES = ("eval", "sentence_transformers>=6", "datasets", "accelerate")
COMMANDS = {
    "encode": Command(
        "use a model",
        "embeddings of a corpus",
        "encoding.command",
        ("eval", "sentence_transformers", "pyarrow"),
    ),
    "export": Command("use a model", "a Hub folder to GGUF, ONNX or OpenVINO", "export.command"),
    "glue": Command(
        "train and measure",
        "GLUE fine-tuning and its table",
        "finetuning.command",
        ("eval", "accelerate", "datasets", "sklearn", "scipy"),
    ),
    "contrastive": Command(
        "train and measure",
        "contrastive fine-tuning to a sentence encoder",
        "contrastive.command",
        _SENTENCES,
    ),
    "distill": Command(
        "train and measure",
        "a small sentence encoder that learns another one's vectors",
        "distillation.command",
        (*_SENTENCES, "scipy"),
    ),
    "retrieval": Command(
        "train and measure",
        "recall and MRR of an encoder on pairs",
        "evaluation.retrieval",
        ("eval", "sentence_transformers>=6", "datasets"),
    ),
    "mteb": Command(
        "train and measure",
        "MTEB evaluation and its table",
        "evaluation.mteb",
        ("eval", "sentence_transformers", "mteb"),
    ),
    "convert": Command(
        "pre-training", "a raw training checkpoint to a Hub folder", "conversion.command"
    ),
    "tokenizer": Command(
        "pre-training",
        "a WordPiece tokenizer from texts",
        "pretraining.tokenizer",
        ("train", "datasets"),
    ),
    "pretrain": Command(
        "pre-training", "masked-LM pre-training from a YAML recipe", "pretraining.command", _TRAIN
    ),
    "pseudo-perplexity": Command(
        "pre-training",
        "pseudo-perplexity against text length",
        "pretraining.pseudo_perplexity",
        ("eval", "accelerate", "matplotlib"),
    ),
    "throughput": Command(
        "benchmarks", "tokens a second against other encoders", "throughput.command"
    ),
}


def usage():
    """The text of `neobert --help`."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: neobert <command> [arguments]",
        "       neobert <command> --help",
        "       neobert --version",
    ]
    for topic, entries in itertools.groupby(COMMANDS.items(), lambda item: item[1].topic):
        lines += [
            "",
            f"{topic}:",
            *(f"  {name:<{width}}  {command.about}" for name, command in entries),
        ]
    lines += [
        "",
        "example:",
        "  neobert encode texts.jsonl embeddings.parquet --model examples/sentence-encoder",
    ]
    return "\n".join(lines)


def _leave_process_group():
    """Processes of torchrun leave their group before the interpreter ends, which threads of the
    group could abort."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def main(argv=None):
    """Runs one command; returns its exit code: 0, 2 for anything that is one sentence on stderr,
    130 after an interrupt, 143 after SIGTERM."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    if argv[0] in ("-h", "--help", "help"):
        return guarded("neobert", lambda: print(usage()))
    if argv[0] in ("-V", "--version"):
        return guarded("neobert", lambda: print(f"neobert {__version__}"))
    command, *arguments = argv
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
        print(f"neobert: there is no command {command!r}; {hint}", file=sys.stderr)
        return 2
    return guarded(f"neobert {command}", lambda: _run(command, arguments))


def _run(name, arguments):
    """Runs a command, or prints its help, for which none of what it needs is imported."""
    command = COMMANDS[name]
    if {"-h", "--help"} & set(arguments):
        options = importlib.import_module(f".{command.room}.options", __package__).OPTIONS[name]
        print(options.help(arguments))
        return 0
    if command.needs:
        require(*command.needs)
    try:
        code = importlib.import_module(f".{command.module}", __package__).main(arguments)
    except Stopped:
        _leave_process_group()
        raise
    _leave_process_group()
    return code
