"""Command line of the package: the table of commands, `neobert --help`, and the dispatch."""

import difflib
import importlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .common import __version__
from .common.commands import guarded
from .common.errors import Stopped, require


@dataclass(frozen=True)
class Command:
    """Entry of the table of commands.

    Attributes:
        topic: Heading in `neobert --help`.
        about: Short description.
        module: Module whose `main(argv)` runs the command. The `options` module of the same
            subpackage provides `--help`, and imports neither torch nor transformers.
        requirements: Arguments of `require`: an extra of setup.cfg, and the modules that it
            installs. They are checked before the command is imported.
    """

    topic: str
    about: str
    module: str
    requirements: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Name of the subpackage that contains the command."""
        return self.module.partition(".")[0]


# Requirements that several commands share: an extra of setup.cfg, and modules.
_TRAIN = ("train", "accelerate", "datasets")
_SENTENCES = ("eval", "sentence_transformers>=6", "datasets", "accelerate")
COMMANDS = {
    "encode": Command(
        "Use a model",
        "Embed a corpus",
        "encoding.command",
        ("eval", "sentence_transformers", "pyarrow"),
    ),
    "serve": Command(
        "Use a model",
        "Serve embeddings, reranker scores and predictions over HTTP",
        "serving.command",
        ("serve", "fastapi", "uvicorn>=0.51", "prometheus_client", "sentence_transformers"),
    ),
    "predict": Command(
        "Use a model",
        "Predict labels, values or entities for a file of any size",
        "prediction.command",
        ("eval", "scipy", "pyarrow"),
    ),
    "export": Command(
        "Use a model", "Export a Hub folder to GGUF, ONNX or OpenVINO", "export.command"
    ),
    "finetune": Command(
        "Train and evaluate",
        "Fine-tune a classifier, regression model or tagger on your own rows",
        "finetuning.finetune",
        ("eval", "accelerate", "datasets", "sklearn", "scipy", "matplotlib"),
    ),
    "glue": Command(
        "Train and evaluate",
        "Fine-tune on GLUE and write its table",
        "finetuning.glue_command",
        ("eval", "accelerate", "datasets", "sklearn", "scipy"),
    ),
    "contrastive": Command(
        "Train and evaluate",
        "Fine-tune a sentence encoder with contrastive learning",
        "contrastive.command",
        _SENTENCES,
    ),
    "distill": Command(
        "Train and evaluate",
        "Distill a sentence encoder into a smaller one",
        "distillation.command",
        (*_SENTENCES, "scipy"),
    ),
    "retrieval": Command(
        "Train and evaluate",
        "Measure recall and MRR of an encoder on pairs",
        "evaluation.retrieval",
        ("eval", "sentence_transformers>=6", "datasets"),
    ),
    "mteb": Command(
        "Train and evaluate",
        "Evaluate an encoder on MTEB and write its table",
        "evaluation.mteb",
        ("eval", "sentence_transformers", "mteb"),
    ),
    "convert": Command(
        "Pre-train and convert",
        "Convert a raw training checkpoint to a Hub folder",
        "conversion.command",
    ),
    "tokenizer": Command(
        "Pre-train and convert",
        "Train a WordPiece tokenizer",
        "pretraining.tokenizer",
        ("train", "datasets"),
    ),
    "pretrain": Command(
        "Pre-train and convert",
        "Pre-train a masked language model from a YAML recipe",
        "pretraining.command",
        _TRAIN,
    ),
    "pseudo-perplexity": Command(
        "Pre-train and convert",
        "Measure pseudo-perplexity by text length",
        "pretraining.pseudo_perplexity",
        ("eval", "accelerate", "matplotlib"),
    ),
    "throughput": Command(
        "Benchmark", "Compare tokens per second with other encoders", "throughput.command"
    ),
}


def usage() -> str:
    """Return the text of `neobert --help`."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: neobert <command> [arguments]",
        "       neobert <command> --help",
        "       neobert --version",
    ]
    # The commands of a topic are consecutive in the table, as `groupby` requires.
    for topic, entries in itertools.groupby(COMMANDS.items(), lambda item: item[1].topic):
        lines += [
            "",
            f"{topic}:",
            *(f"  {name:<{width}}  {command.about}" for name, command in entries),
        ]
    lines += [
        "",
        "Example:",
        "  neobert encode texts.jsonl embeddings.parquet --model examples/sentence-encoder",
    ]
    return "\n".join(lines)


def _leave_process_group() -> None:
    """Leave the process group of torchrun, whose threads could abort the interpreter's exit."""
    # A command that has not imported torch has no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        # A thread of gloo releases the tensors of the last operation after the operation has ended,
        # and needs Python's lock for it. If the interpreter ends at that moment, the thread aborts
        # the process (pytorch#179291). `destroy_process_group` joins the threads unless a module
        # still refers to the group, as default arguments in DeepSpeed do.
        time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0, 2 after an error, 130 after an interrupt, or 143 after SIGTERM.
    """
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
        hint = f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(COMMANDS)}."
        print(f"neobert: there is no command {command!r}. {hint}", file=sys.stderr)
        return 2
    return guarded(f"neobert {command}", lambda: _run(command, arguments))


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run a command, or print its help without importing the dependencies of the command."""
    command = COMMANDS[name]
    # The options do not depend on torch, so the help is fast and needs no extra.
    if {"-h", "--help"} & set(arguments):
        options = importlib.import_module(f".{command.package}.options", __package__).OPTIONS[name]
        print(options.help(arguments))
        return 0

    # A missing package is reported before the imports, which take seconds.
    if command.requirements:
        require(*command.requirements)
    try:
        code = importlib.import_module(f".{command.module}", __package__).main(arguments)
    except Stopped:
        _leave_process_group()
        raise
    _leave_process_group()
    return code
