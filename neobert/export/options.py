"""Options of `neobert export`. Imports neither torch nor transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from ..common.options import OptionGroup, OptionParser, option
from ..conversion.heads import HeadName


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Model to export, and path of the output."""

    title = "Model"

    folder: str = option(
        help="Model to export: a Hub folder (config.json and safetensors), or a raw checkpoint, "
        "which is converted first.",
        positional=True,
    )
    output: str = option(help="Output file or directory. It must not exist.", positional=True)
    head: HeadName | None = option(
        None,
        "Type of the model's head. By default base for a sentence-transformers model, else the "
        "head in the weights.",
    )
    tokenizer: str | None = option(
        None,
        "Directory of the tokenizer. By default that of the model, else the uncased tokenizer of "
        "BERT.",
        metavar="PATH",
    )


@dataclass(frozen=True)
class CardOptions(OptionGroup):
    """Metadata of the model card."""

    title = "Model card"

    license: str | None = option(None, LICENSE_HELP, metavar="NAME")
    base_model: str | None = option(None, BASE_MODEL_HELP, metavar="NAME")


@dataclass(frozen=True)
class GgufFormat(OptionGroup):
    """Format of a GGUF file."""

    title = "Format"

    dtype: Literal["f32", "f16", "q8_0", "q5_0"] = option(
        "f16", "Data type of the matrices. With q5_0, the token embeddings are stored as q4_0."
    )
    check: bool = option(
        False, "Compare the existing file OUTPUT with the model instead of writing it."
    )


@dataclass(frozen=True)
class OnnxFormat(OptionGroup):
    """Format of ONNX graphs."""

    title = "Format"

    precisions: list[Literal["fp32", "fp16", "int8", "q4"]] = option(
        default_factory=lambda: ["fp32"],
        help="Precisions to export: fp16 for GPUs and WebGPU, int8 for CPUs, q4 for the smallest "
        "files.",
    )
    token_type_ids: bool = option(
        False,
        "Add the input token_type_ids, which is ignored, for applications that always pass the "
        "three inputs of BERT.",
    )


@dataclass(frozen=True)
class OpenvinoFormat(OptionGroup):
    """Format of OpenVINO models."""

    title = "Format"

    precisions: list[Literal["fp32", "fp16", "int8"]] = option(
        default_factory=lambda: ["fp32"],
        help="Precisions to export. Weights take half the space of fp32 in fp16, and a quarter in "
        "int8.",
    )


@dataclass(frozen=True)
class GgufOptions:
    """Options of `neobert export gguf`."""

    model: ModelOptions
    format: GgufFormat = GgufFormat()
    card: CardOptions = CardOptions()


@dataclass(frozen=True)
class OnnxOptions:
    """Options of `neobert export onnx`."""

    model: ModelOptions
    format: OnnxFormat
    card: CardOptions = CardOptions()


@dataclass(frozen=True)
class OpenvinoOptions:
    """Options of `neobert export openvino`."""

    model: ModelOptions
    format: OpenvinoFormat
    card: CardOptions = CardOptions()


ExportOptions = GgufOptions | OnnxOptions | OpenvinoOptions


class Targets(dict[str, OptionParser]):
    """Parsers of the targets of `neobert export`, {target: parser}."""

    def help(self, argv: Sequence[str] = ()) -> str:
        """Return the help of the target in `argv`, or the list of the targets."""
        # `export TARGET --help` prints the options of one target.
        for target, parser in self.items():
            if target in argv:
                return parser.help()

        usage = [
            "usage: neobert export TARGET FOLDER OUTPUT [--option VALUE ...]",
            "       neobert export TARGET --help",
            "",
            "Targets:",
        ]
        lines = [f"  {name:<9} {parser.about}" for name, parser in self.items()]
        return "\n".join([*usage, *lines, "", "Example:", f"  {self['gguf'].example}"])

    def read(self, argv: Sequence[str]) -> tuple[str, ExportOptions]:
        """Return the target that `argv` starts with, and its options.

        Raises:
            UserError: If there is no such target, or an option is invalid.
        """
        if not argv or argv[0] not in self:
            value = repr(argv[0]) if argv else "nothing"
            raise UserError(f"TARGET must be one of {', '.join(self)}, got {value}.")
        return argv[0], self[argv[0]].read(argv[1:])


OPTIONS = {
    "export": Targets(
        gguf=OptionParser(
            "neobert export gguf",
            "Export to a GGUF file for llama.cpp and tools based on it.",
            GgufOptions,
            "neobert export gguf examples/sentence-encoder runs/encoder.gguf",
        ),
        onnx=OptionParser(
            "neobert export onnx",
            "Export to a directory for ONNX Runtime, transformers.js and Text Embeddings "
            "Inference.",
            OnnxOptions,
            "neobert export onnx examples/sentence-encoder runs/onnx --precisions fp32 int8",
        ),
        openvino=OptionParser(
            "neobert export openvino",
            "Export to a directory for OpenVINO.",
            OpenvinoOptions,
            "neobert export openvino examples/sentence-encoder runs/openvino",
        ),
    )
}
