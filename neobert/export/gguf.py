"""Export to a GGUF file for llama.cpp and the tools that are based on it."""

import logging
from dataclasses import replace
from pathlib import Path

from ..common.errors import UserError
from ..common.files import check_file
from ..common.folders import check_disjoint, check_new, new_file
from ..conversion.heads import HEADS
from ..modeling_neobert import NeoBERTForMaskedLM
from .options import GgufOptions
from .source import SourceModel


logger = logging.getLogger("neobert.export")


def check_output(options: GgufOptions) -> None:
    """Check that OUTPUT is a new file, or with `--check` an existing one.

    Raises:
        UserError: If it is not.
    """
    output = options.model.output
    if options.format.check:
        check_file(output)
        return
    check_new(output, "OUTPUT")
    if Path(output).suffix != ".gguf":
        raise UserError(f"OUTPUT must be a file that ends in .gguf, got {output}.")
    check_disjoint(output, options.model.folder)


def export(source: SourceModel, options: GgufOptions) -> None:
    """Write the file and compare its values with the model before it appears.

    With `--check`, the existing file is only compared.

    Raises:
        UserError: If llama.cpp cannot run the model, or the values differ.
    """
    from .gguf_file import check_model, compare_tensors, new_writer, write_tensors

    if isinstance(source.model, NeoBERTForMaskedLM):
        logger.warning(
            "llama.cpp does not support the masked-LM decoder: the file contains the encoder only."
        )
        source = replace(source, head=HEADS["base"], model=source.model.model)

    # llama.cpp supports a pooling, but no Dense modules after it.
    pooling = source.pooling
    mode = pooling.mode if pooling else "mean"
    check_model(source.model, mode)
    if pooling and pooling.dense:
        raise UserError(
            "llama.cpp does not support Dense layers after pooling for NeoBERT. Use `neobert "
            "export onnx` or `neobert export openvino`."
        )
    if pooling and not pooling.include_prompt and any(source.prompts.values()):
        raise UserError(
            "llama.cpp includes prompts in the pooling, but this model excludes them. Use "
            "`neobert export onnx` or `neobert export openvino`."
        )

    for setting in source.client_settings():
        logger.warning("llama.cpp does not apply a setting of this model: %s", setting)

    # The writer collects the keys of the file, with which `--check` compares an existing file.
    dtype = options.format.dtype
    output = options.model.output
    writer = new_writer(
        source.model, source.tokenizer, mode, dtype, source.name, _card_metadata(source)
    )

    if options.format.check:
        error, is_rounding = compare_tensors(output, source.model, writer)
        if not is_rounding:
            raise UserError(f"{output} does not contain this model: {_describe_error(error)}.")
        print(f"{output} contains this model: {_describe_error(error)}")
        return

    # The file appears at OUTPUT after it has been read back and compared.
    with new_file(output) as file:
        write_tensors(writer, file.name, source.model, dtype)
        error, is_rounding = compare_tensors(file.name, source.model, writer)
        if not is_rounding:
            raise UserError(f"the file was discarded: {_describe_error(error)}.")
        size = Path(file.name).stat().st_size
    print(f"{output} ({dtype}, {size / 1e6:,.1f} MB): {_describe_error(error)}")


def _describe_error(error: float) -> str:
    """Return the largest error as a phrase for messages."""
    return f"largest error {error:.1e}, relative to the maximum of each tensor"


def _card_metadata(source: SourceModel) -> dict[str, str]:
    """Return license and base model with the keys of GGUF."""
    # general.license, general.license.name and general.license.link.
    keys = {
        f"general.{key.replace('_', '.')}": text
        for key, text in source.metadata.items()
        if key.startswith("license")
    }
    if "base_model" in source.metadata:
        address = f"https://huggingface.co/{source.metadata['base_model']}"
        keys["general.base_model.0.repo_url"] = address
    return keys
