"""`neobert <command>`, the same as `python -m neobert <command>`: finds the command's module and runs its `main(argv)`."""

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
        module: whose `main(argv)` runs it.
        options: module whose `OPTIONS` has its --help; imports neither torch nor transformers.
        needs: the extra of setup.cfg and the modules that it brings, checked before the command's own imports.
    """

    topic: str
    about: str
    module: str
    options: str
    needs: tuple = ()


_TRAIN = ("train", "accelerate", "datasets")
_SENTENCES = ("eval", "sentence_transformers>=6", "datasets", "accelerate")
COMMANDS = {
    "encode": Command(
        "use a model", "embeddings of a corpus", "embeddings.encode", "embeddings.encode_options",
        ("eval", "sentence_transformers", "pyarrow"),
    ),
    "export": Command("use a model", "a Hub folder to GGUF, ONNX or OpenVINO", "export.command", "export.options"),
    "glue": Command(
        "train and measure", "GLUE fine-tuning and its table", "finetuning.glue", "finetuning.glue_options", ("eval", "accelerate", "sklearn"),
    ),
    "contrastive": Command(
        "train and measure", "contrastive fine-tuning to a sentence encoder", "embeddings.contrastive", "embeddings.contrastive_options", _SENTENCES,
    ),
    "distill": Command(
        "train and measure", "a small sentence encoder that learns another one's vectors", "embeddings.distill", "embeddings.distill_options",
        (*_SENTENCES, "scipy"),
    ),
    "retrieval": Command(
        "train and measure", "recall and MRR of an encoder on pairs", "embeddings.retrieval", "embeddings.retrieval_options",
        ("eval", "sentence_transformers", "datasets"),
    ),
    "mteb": Command(
        "train and measure", "MTEB evaluation and its table", "embeddings.mteb_evaluation", "embeddings.mteb_options",
        ("eval", "sentence_transformers", "mteb"),
    ),
    "convert": Command("pre-training", "a raw training checkpoint to a Hub folder", "convert_checkpoint", "conversion.options"),
    "pretrain": Command("pre-training", "masked-LM pre-training from a YAML recipe", "pretraining.pretrain", "pretraining.arguments", _TRAIN),
    "ablations": Command(
        "pre-training", "the paper's ladder M0 to M9 at a reduced size", "pretraining.ablations", "pretraining.ablation_options", _TRAIN,
    ),
    "pseudo-perplexity": Command(
        "pre-training", "pseudo-perplexity against text length", "pretraining.pseudo_perplexity", "pretraining.pseudo_perplexity_options",
    ),
    "throughput": Command(
        "benchmarks", "tokens a second against other encoders", "benchmarks.throughput", "benchmarks.throughput_options",
    ),
    "report": Command("benchmarks", "one page from results/", "benchmarks.report", "benchmarks.report"),
}  # fmt: skip


def usage():
    """The text of `neobert --help`."""
    width = max(map(len, COMMANDS))
    lines = ["usage: neobert <command> [arguments]", "       neobert <command> --help", "       neobert --version"]
    for topic, entries in itertools.groupby(COMMANDS.items(), lambda item: item[1].topic):
        lines += ["", f"{topic}:", *(f"  {name:<{width}}  {command.about}" for name, command in entries)]
    lines += ["", "example:", "  neobert encode texts.jsonl vectors.parquet --model examples/sentence-encoder"]
    return "\n".join(lines)


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
        return guarded("neobert", lambda: print(f"neobert {__version__}"))
    command, *arguments = argv
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
        print(f"neobert: there is no command {command!r}; {hint}", file=sys.stderr)
        return 2
    return guarded(f"neobert {command}", lambda: _run(COMMANDS[command], arguments))


def _run(command, arguments):
    """Runs a command, or prints its help, for which none of what it needs is imported."""
    if {"-h", "--help"} & set(arguments):
        print(importlib.import_module(f".{command.options}", __package__).OPTIONS.help(arguments))
        return 0
    if "--version" in arguments:
        print(f"neobert {__version__}")
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


if __name__ == "__main__":
    sys.exit(main())
