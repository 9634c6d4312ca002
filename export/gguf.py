"""One GGUF file for llama.cpp and what is built on it."""

from dataclasses import replace
from pathlib import Path

from ..common.errors import UserError, listed
from ..common.files import check_file, new_path, remove_left_overs
from ..common.outputs import check_apart, check_folder
from ..conversion.heads import HEADS
from ..modeling_neobert import NeoBERTForMaskedLM
from .check import SENTENCES, Reference
from .source import Pooling


# Least cosine to torch, (token, pooled), of the numbers in a file of each dtype. The engine itself
# adds up to 1e-3: its attention is in float16.
BOUNDS = {"f32": (0.99999, 0.99999), "f16": (0.999, 0.999), "q8_0": (0.98, 0.99)}
# What a file of ours says of itself, so that --force replaces no other one.
MARK = ("neobert.command", "export gguf")


def check_output(arguments):
    """Raises UserError unless OUTPUT is a new name, or with --force a file that this command wrote;
    with --check any GGUF file."""
    output = Path(arguments.output)
    if arguments.check:
        check_file(output)
        with output.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"{output} is not a GGUF file that can be read: it does not begin with the "
                    "word GGUF"
                )
        return
    if output.suffix != ".gguf":
        raise UserError(
            f"OUTPUT is one file and must end in .gguf, but {arguments.output} was given"
        )
    check_apart(output, arguments.folder)
    check_folder(output.parent, "OUTPUT")
    if not output.exists() and not output.is_symlink():
        return
    check_file(output)
    from .gguf_engine import read_mark

    if read_mark(output, MARK[0]) != MARK[1]:
        raise UserError(
            f"{output} was not written by neobert {MARK[1]}, so it is not replaced; remove it "
            "yourself"
        )
    if not arguments.force:
        raise UserError(f"{output} exists; choose another name, or replace it with --force")


def export(source, reference, arguments):
    """Writes the file, compares what it holds with torch, and only then gives it its name.

    Args:
        source: Source.
        reference: its Reference.
        arguments: Options.
    Raises:
        UserError: llama.cpp cannot run the model, or the file's numbers are not near enough to it.
    """
    from .gguf_file import check_model, write

    if isinstance(source.model, NeoBERTForMaskedLM):
        print("llama.cpp has no form for the masked-LM decoder: the file holds the backbone")
        source = replace(source, head=HEADS["base"], model=source.model.model)
        reference = Reference(source)
    output = Path(arguments.output)
    if arguments.check:
        _check_other(output, source, reference)
        return
    pooling = source.pooling or Pooling()
    check_model(source.model, pooling.mode)
    if len(pooling.dense):
        raise UserError(
            "llama.cpp has no Dense layer after pooling for NeoBERT; neobert export onnx and "
            "openvino carry it"
        )
    if not pooling.include_prompt and any(source.prompts.values()):
        raise UserError(
            "llama.cpp pools over prompts too, and this folder leaves them out; neobert export "
            "onnx and openvino carry it"
        )
    remove_left_overs(output.parent, output.name)
    with new_path(output) as path:
        write(
            path,
            source.model,
            source.tokenizer,
            pooling.mode,
            arguments.dtype,
            source.name,
            dict([MARK]) | _known(source),
        )
        agreement = _compare(path, source, reference, BOUNDS[arguments.dtype])
        check_output(arguments)
        size = path.stat().st_size
    print(f"{output} ({arguments.dtype}, {size / 1e6:,.1f} MB): {agreement}")


def _known(source):
    """Licence and base model, as GGUF names them."""
    keys = {
        f"general.{key.replace('_', '.')}": text
        for key, text in source.known.items()
        if key.startswith("license")
    }
    if "base_model" in source.known:
        keys["general.base_model.0.repo_url"] = (
            f"https://huggingface.co/{source.known['base_model']}"
        )
    return keys


def _compare(path, source, reference, bounds):
    """The Agreement of a new file with torch; UserError where it is below its bounds."""
    from .gguf_engine import Engine

    engine = Engine(path)
    agreement = reference.agreement(engine.run, "running the file")
    agreement.check("what llama.cpp computes of the file", *bounds)
    _check_tokens(engine, source.tokenizer)
    return agreement


def _check_other(path, source, reference):
    """Prints the cosine similarity of a file to the model; UserError if it is below the bounds of
    the lowest precision."""
    from .gguf_engine import Engine

    engine = Engine(path)
    agreement = reference.agreement(engine.run, "running the file")
    token, pooled = BOUNDS["q8_0"]
    if not agreement.pooled >= pooled or not (agreement.token is None or agreement.token >= token):
        raise UserError(f"{path} does not hold this model: {agreement}")
    _check_tokens(engine, source.tokenizer)
    print(f"{path} holds this model: {agreement}")


def _check_tokens(engine, tokenizer):
    """Raises UserError unless the words in the file give the tokenizer's ids."""
    wrong = [text for text in SENTENCES if engine.tokenize(text) != tokenizer(text)["input_ids"]]
    if wrong:
        raise UserError(
            "llama.cpp would cut these texts into other tokens than the model's: "
            f"{listed(wrong, 2)}"
        )
