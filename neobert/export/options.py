"""Options of `neobert export gguf`, `onnx` and `openvino`. Imports neither torch nor
transformers."""

from dataclasses import dataclass

from ..common.arguments import Arguments, Options, option
from ..common.errors import UserError
from ..common.model_card import BASE_MODEL_HELP, LICENSE_HELP
from ..conversion.heads import HEADS


@dataclass(kw_only=True)
class ExportArguments(Arguments):
    """What is exported to what."""

    folder: str = option(
        help=(
            "Hub folder (config.json and safetensors), or a raw checkpoint, which is "
            "converted first"
        ),
        positional=True,
    )
    output: str = option(help="what to write", positional=True)
    head: str | None = option(
        None,
        "by default base for a folder of sentence-transformers, and otherwise what the weights are",
        choices=tuple(HEADS),
    )
    tokenizer: str | None = option(
        None, "folder; by default the model's own, then the BERT uncased tokenizer"
    )
    license: str | None = option(None, LICENSE_HELP)
    base_model: str | None = option(None, BASE_MODEL_HELP)


@dataclass(kw_only=True)
class GgufArguments(ExportArguments):
    """Options of GGUF."""

    dtype: str = option(
        "f16",
        "of the matrices; q5_0: the token embeddings are q4_0",
        choices=("f32", "f16", "q8_0", "q5_0"),
    )
    check: bool = option(
        False, "write nothing, but compare the file OUTPUT, whoever made it, with the model"
    )


@dataclass(kw_only=True)
class OnnxArguments(ExportArguments):
    """Options of ONNX."""

    precisions: list[str] = option(
        help="fp32, fp16 (for GPUs, WebGPU), int8 (for CPUs), q4 (smallest)",
        default_factory=lambda: ["fp32"],
        choices=("fp32", "fp16", "int8", "q4"),
    )
    token_type_ids: bool = option(
        False, "a third input, which is not read, for loaders that always feed BERT's three"
    )


@dataclass(kw_only=True)
class OpenvinoArguments(ExportArguments):
    """Options of OpenVINO."""

    precisions: list[str] = option(
        help="fp32; fp16 and int8, whose weights take a half and a quarter of the space",
        default_factory=lambda: ["fp32"],
        choices=("fp32", "fp16", "int8"),
    )


class Targets(dict):
    """{target: its `Options`}; as options of `neobert export` the help names the targets."""

    def help(self, argv=()):
        for target in self:
            if target in argv:
                return self[target].help()
        lines = [f"  {name:<9} {options.about}" for name, options in self.items()]
        usage = [
            "usage: neobert export TARGET FOLDER OUTPUT [--option value ...]",
            "       neobert export TARGET --help",
            "",
            "targets:",
        ]
        return "\n".join([*usage, *lines, "", "example:", f"  {self['gguf'].example}"])

    def read(self, argv):
        """The target that `argv` begins with, and its options."""
        target, *rest = argv or [None]
        if target not in self:
            given = "nothing was given" if target is None else f"{target!r} was given"
            raise UserError(f"the target must be one of {', '.join(self)}, but {given}")
        return target, *self[target].read(rest)


OPTIONS = {
    "export": Targets(
        gguf=Options(
            "neobert export gguf",
            "one file for llama.cpp and what is built on it",
            (GgufArguments,),
            "neobert export gguf examples/sentence-encoder runs/encoder.gguf",
        ),
        onnx=Options(
            "neobert export onnx",
            "a folder for ONNX Runtime, transformers.js, text-embeddings-inference",
            (OnnxArguments,),
            "neobert export onnx examples/sentence-encoder runs/onnx --precisions fp32 int8",
        ),
        openvino=Options(
            "neobert export openvino",
            "a folder for OpenVINO",
            (OpenvinoArguments,),
            "neobert export openvino examples/sentence-encoder runs/openvino",
        ),
    )
}
