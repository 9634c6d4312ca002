"""One GGUF file for llama.cpp and what is built on it."""

from dataclasses import replace
from pathlib import Path

from ..common.errors import UserError
from ..common.files import check_file
from ..common.folders import apart, check_new, new_file
from ..conversion.heads import HEADS
from ..modeling_neobert import NeoBERTForMaskedLM


# Largest error of a number in a file of each dtype, as a part of the largest number of its tensor:
# half a step of float16's 11 bits, and of 127 steps whose size is in float16 itself. q4_0, in a
# file of q5_0, has 8 steps below zero and 7 above, so that a number may be cut by a whole one.
BOUNDS = {"f32": 0.0, "f16": 2.0**-11, "q8_0": 0.5 / 127 + 2.0**-11, "q5_0": 1 / 8 + 2.0**-11}


def check_output(arguments):
    """Raises UserError unless OUTPUT is a new name, or with --check a file."""
    if arguments.check:
        check_file(arguments.output)
        return
    check_new(arguments.output, "OUTPUT")
    if Path(arguments.output).suffix != ".gguf":
        raise UserError(
            f"OUTPUT is one file and must end in .gguf, but {arguments.output} was given"
        )
    apart(arguments.output, arguments.folder)


def export(source, arguments):
    """Writes the file and compares what it holds with the model before it gets its name; with
    --check compares only.

    Args:
        source: Source.
        arguments: GgufArguments.
    Raises:
        UserError: llama.cpp cannot run the model, or the file's numbers are not those of it.
    """
    from .gguf_file import check_model, largest_error, new_writer, write_tensors

    if isinstance(source.model, NeoBERTForMaskedLM):
        print("llama.cpp has no form for the masked-LM decoder: the file holds the backbone")
        source = replace(source, head=HEADS["base"], model=source.model.model)
    pooling = source.pooling
    mode = pooling.mode if pooling else "mean"
    check_model(source.model, mode)
    if pooling and pooling.dense:
        raise UserError(
            "llama.cpp has no Dense layer after pooling for NeoBERT; neobert export onnx and "
            "openvino carry it"
        )
    if pooling and not pooling.include_prompt and any(source.prompts.values()):
        raise UserError(
            "llama.cpp pools over prompts too, and this folder leaves them out; neobert export "
            "onnx and openvino carry it"
        )
    dtype, output = arguments.dtype, arguments.output
    writer = new_writer(source.model, source.tokenizer, mode, dtype, source.name, _known(source))
    if arguments.check:
        error = largest_error(output, source.model, writer)
        if not error <= max(BOUNDS.values()):
            raise UserError(f"{output} does not hold this model: {_in_words(error)}")
        print(f"{output} holds this model: {_in_words(error)}")
        return
    with new_file(output) as file:
        write_tensors(writer, file.name, source.model, dtype)
        error = largest_error(file.name, source.model, writer)
        if not error <= BOUNDS[dtype]:
            raise UserError(f"the file is not kept: {_in_words(error)}")
        size = Path(file.name).stat().st_size
    print(f"{output} ({dtype}, {size / 1e6:,.1f} MB): {_in_words(error)}")


def _in_words(error):
    return f"its numbers differ by {error:.1e} of the largest of their tensor at most"


def _known(source):
    """Licence and base model, as GGUF names them."""
    keys = {
        f"general.{key.replace('_', '.')}": text
        for key, text in source.known.items()
        if key.startswith("license")
    }
    if "base_model" in source.known:
        address = f"https://huggingface.co/{source.known['base_model']}"
        keys["general.base_model.0.repo_url"] = address
    return keys
