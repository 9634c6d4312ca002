"""One GGUF file for llama.cpp and what is built on it."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..common.arguments import option
from ..common.errors import UserError, listed
from ..common.files import check_apart, check_file, check_folder, new_path, remove_left_overs
from ..conversion.heads import HEADS
from ..modeling_neobert import NeoBERTForMaskedLM
from .check import SENTENCES, Reference
from .source import ExportArguments, Pooling


# Least cosine to torch, (token, pooled), of the numbers in a file of each dtype. The engine itself adds up to 1e-3: its attention is in float16.
BOUNDS = {"f32": (0.99999, 0.99999), "f16": (0.999, 0.999), "q8_0": (0.98, 0.99)}
# What a file of ours says of itself, so that --force replaces no other one.
MARK = ("neobert.command", "export gguf")


@dataclass
class Options(ExportArguments):
    """Options of `neobert export gguf`."""

    dtype: str = option("f16", "of the matrices", choices=tuple(BOUNDS))


def check_output(arguments):
    """Raises UserError unless OUT is a new name, or with --force a file that this command wrote."""
    output = Path(arguments.output)
    if output.suffix != ".gguf":
        raise UserError(f"OUT is one file and must end in .gguf, but {arguments.output} was given")
    check_apart(output, arguments.folder)
    check_folder(output.parent, "OUT")
    if not output.exists() and not output.is_symlink():
        return
    check_file(output)
    if not arguments.force:
        raise UserError(f"{output} exists; choose another name, or replace it with --force")
    from .gguf_engine import read_mark

    if read_mark(output, MARK[0]) != MARK[1]:
        raise UserError(f"{output} was not written by neobert {MARK[1]}, so it is not replaced; remove it yourself")


def export(source, reference, arguments):
    """Writes the file, compares what it holds with torch, and only then gives it its name."""
    from .gguf_engine import Engine
    from .gguf_file import check_model, write

    if isinstance(source.model, NeoBERTForMaskedLM):
        print("llama.cpp has no form for the masked-LM decoder: the file holds the backbone")
        source = replace(source, head=HEADS["base"], model=source.model.model)
        reference = Reference(source)
    pooling = source.pooling or Pooling()
    check_model(source.model, pooling.mode)
    if len(pooling.dense):
        raise UserError("llama.cpp has no Dense layer after pooling for NeoBERT; neobert export onnx and openvino carry it")
    if not pooling.include_prompt and any(source.prompts.values()):
        raise UserError("llama.cpp pools over prompts too, and this folder leaves them out; neobert export onnx and openvino carry it")
    output = Path(arguments.output)
    remove_left_overs(output.parent, output.name)
    with new_path(output) as path:
        write(path, source.model, source.tokenizer, pooling.mode, arguments.dtype, source.name, dict([MARK]))
        engine = Engine(path)
        _check_tokens(engine, source.tokenizer)
        agreement = reference.agreement(engine.run)
        agreement.check(f"{output.name} ({arguments.dtype})", *BOUNDS[arguments.dtype])
        check_output(arguments)
        size = path.stat().st_size
    print(f"{output} ({arguments.dtype}, {size / 1e6:,.1f} MB): {agreement}")


def _check_tokens(engine, tokenizer):
    """Raises UserError unless the words in the file give the tokenizer's ids."""
    wrong = [text for text in SENTENCES if engine.tokenize(text) != tokenizer(text)["input_ids"]]
    if wrong:
        raise UserError(f"llama.cpp would cut these texts into other tokens: {listed(wrong, 2)}; so the file was not kept")
