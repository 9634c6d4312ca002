"""Turns a raw training checkpoint into a folder for the Hugging Face Hub. Code in a checkpoint is
never run; the output is complete or absent."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import transformers

from ..common.errors import UserError, printable
from ..common.folders import apart, check_new, new_folder
from ..common.model_card import base_model, licence, read_card
from ..common.pooling import write_sentence_transformers
from .architecture import plan
from .config_files import find_config, read_config
from .hub_folder import usage_lines, write_config, write_model_card, write_weights
from .locate import open_checkpoint
from .options import OPTIONS
from .tokenizer import find_tokenizer, write_tokenizer
from .verify import source_outputs, verify


def convert(arguments):
    """Does what the parsed command line asks for.

    Args:
        arguments: ConvertArguments.
    Raises:
        UserError: anything refused, one sentence; nothing was written then.
    """
    output, pooled = arguments.output, arguments.sentence_transformers
    check_new(output, "OUTPUT")
    tokenizer = arguments.tokenizer if arguments.tokenizer != "none" else None
    given = (arguments.checkpoint, arguments.config, tokenizer)
    apart(output, *(path for path in given if path))

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.step)
    _say(f"{checkpoint.path}: {checkpoint.format}, {len(checkpoint.tensors)} tensors")
    if arguments.config:
        config_file, fields = arguments.config, read_config(arguments.config)
    else:
        config_file, fields = find_config(checkpoint.folders)
    conversion = plan(checkpoint.tensors, fields, arguments.head, arguments.dtype)
    source = "no configuration beside the checkpoint"
    if config_file:
        source = f"configuration from {Path(config_file).name}"
    notes = (*checkpoint.notes, source, *conversion.notes)
    for note in notes:
        _say(f"  {note}")
    conversion = replace(conversion, notes=(f"read from {checkpoint.format}", *notes))
    if pooled and conversion.head.option not in ("base", "masked-lm"):
        raise UserError(
            "--sentence-transformers goes with --head masked-lm or base, but the checkpoint's is "
            f"{conversion.head.option}."
        )
    tokenizer = find_tokenizer(arguments.tokenizer, checkpoint.folders)

    with (
        new_folder(output) as folder,
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
    ):
        config = conversion.config
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder, config.vocab_size, config.context_length)
        write_config(folder, conversion)
        if pooled:
            write_sentence_transformers(folder, config.hidden_size, config.context_length)
        written = conversion.written()
        rows = write_weights(folder, written, arguments.max_shard_size)
        name, card = Path(output).name, read_card(checkpoint.folders[0])
        known = {key: text for key, text in card.items() if key.startswith("base_model")}
        known |= licence(arguments.license, card) | base_model(arguments.base_model)
        write_model_card(folder, conversion, rows, name, tokenizer is not None, pooled, known)
        expected = source_outputs(conversion, written)
        exact = source_outputs(conversion, conversion.tensors) if conversion.rounds else expected
        outputs = verify(folder, conversion, expected, Path(scratch))

    _report(rows, conversion, outputs, expected, exact)
    _say("use it:")
    for line in usage_lines(output, conversion.head, tokenizer is not None, pooled):
        _say(f"  {line}")


def _say(line):
    """Prints a line that may hold a stranger's text."""
    print(printable(line), flush=True)


def _report(rows, conversion, outputs, expected, exact):
    """The table of what was written and how far its outputs are from the source's."""
    dtype = str(conversion.dtype).removeprefix("torch.")
    difference, rounding = ((outputs - other).abs().max().item() for other in (expected, exact))
    table = {
        "tensors": len(conversion.tensors),
        "parameters": f"{conversion.parameters:,}",
        "dtype": dtype,
        "bytes": f"{sum(row['bytes'] for row in rows):,}",
        **{f"sha256 {row['file']}": row["sha256"] for row in rows},
        "largest difference": f"{difference:.1e} (largest output {exact.abs().max().item():.3g})",
    }
    if conversion.rounds:
        table["with rounding"] = (
            f"{rounding:.1e} from the source weights before they were rounded to {dtype}"
        )
    width = max(map(len, table))
    for key, value in table.items():
        print(f"{key:<{width}}  {value}")


def main(argv=None):
    """`neobert convert`. Raises UserError for bad input, which the command line turns into one
    sentence and exit code 2."""
    (arguments,) = OPTIONS["convert"].read(sys.argv[1:] if argv is None else argv)
    verbosity = transformers.logging.get_verbosity()
    # What the library has to say about a stranger's configuration is not printed.
    transformers.logging.set_verbosity_error()
    try:
        convert(arguments)
    finally:
        transformers.logging.set_verbosity(verbosity)
    return 0
