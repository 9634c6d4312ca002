"""Turns a raw training checkpoint into a folder for the Hugging Face Hub. Code in a checkpoint is
never run; the output is complete or absent."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import transformers

from ..common.cards import base_model, licence, read_card
from ..common.errors import UserError, printable
from ..common.outputs import check_apart, check_folder, check_replaceable, new_folder, recover
from ..common.pooling import write_sentence_transformers
from .architecture import check_values, plan
from .config_files import find_config, read_config
from .hub_folder import usage_lines, write_config, write_model_card, write_weights
from .locate import open_checkpoint
from .options import OPTIONS
from .push import check_push, push
from .tokenizer import find_tokenizer, write_tokenizer
from .verify import source_outputs, verify


def _check_output(output, given, force):
    """Refuses an output that exists (without --force), that another program wrote or the user
    changed, or that touches what is read."""
    check_apart(output, *(path for path in given if path and os.path.lexists(path)))
    check_folder(output, "OUTPUT")
    if output.exists() and any(output.iterdir()):
        check_replaceable(output, "convert")
        if not force:
            raise UserError(
                f"the output folder {output} exists; choose another one, or replace it with "
                "--force."
            )


def _check_space(parent, needed):
    existing = next(folder for folder in (parent, *parent.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"no space: {needed / 1e9:.2f} GB are needed at {parent}, but {free / 1e9:.2f} GB are "
            "free."
        )


def convert(arguments):
    """Does what the parsed command line asks for; returns the path of the folder.

    Args:
        arguments: ConvertArguments.
    Raises:
        UserError: anything refused, one sentence; nothing was written then.
    """
    output = Path(os.path.abspath(arguments.output))
    recover(output, "convert")
    tokenizer = arguments.tokenizer if arguments.tokenizer != "none" else None
    _check_output(output, [arguments.checkpoint, arguments.config, tokenizer], arguments.force)
    if arguments.push_to_hub:
        check_push(arguments.push_to_hub)

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.step)
    _say(f"{checkpoint.path}: {checkpoint.format}, {len(checkpoint.tensors)} tensors")
    path, given = (
        (arguments.config, read_config(arguments.config))
        if arguments.config
        else find_config(checkpoint.folders)
    )
    conversion = plan(checkpoint.tensors, given, arguments.head, arguments.dtype)
    source = (
        f"configuration from {Path(path).name}"
        if path
        else "no configuration beside the checkpoint"
    )
    conversion = replace(
        conversion,
        notes=(f"read from {checkpoint.format}", *checkpoint.notes, source, *conversion.notes),
    )
    for note in conversion.notes[1:]:
        _say(f"  {note}")
    pooled = arguments.sentence_transformers
    if pooled and conversion.head.option not in ("base", "masked-lm"):
        raise UserError(
            "--sentence-transformers goes with --head masked-lm or base, but the checkpoint's is "
            f"{conversion.head.option}."
        )
    tokenizer = find_tokenizer(arguments.tokenizer, checkpoint.folders)
    check_apart(output, checkpoint.path, *([path] if path else []))
    _check_space(output.parent, conversion.parameters * conversion.dtype.itemsize + 10_000_000)

    with (
        new_folder(output, "convert", replace=arguments.force) as folder,
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
    ):
        scratch = Path(scratch)
        if tokenizer is not None:
            config = conversion.config
            write_tokenizer(tokenizer, folder, config.vocab_size, config.context_length)
        check_values(conversion.tensors, conversion.dtype)
        write_config(folder, conversion)
        if pooled:
            write_sentence_transformers(
                folder, conversion.config.hidden_size, conversion.config.context_length
            )
        rows = write_weights(folder, conversion, arguments.shard_bytes)
        name, card = arguments.push_to_hub or output.name, read_card(checkpoint.folders[0])
        known = {key: text for key, text in card.items() if key.startswith("base_model")}
        known |= licence(arguments.license, card) | base_model(arguments.base_model)
        write_model_card(folder, conversion, rows, name, tokenizer is not None, pooled, known)
        expected = source_outputs(conversion, rounded=True)
        exact = source_outputs(conversion, rounded=False) if conversion.rounds else expected
        parameters = conversion.parameters
        # Unmaps the checkpoint before a second process loads the result.
        conversion.tensors.clear()
        checkpoint.tensors.clear()
        outputs = verify(folder, conversion, expected, scratch)

    _report(rows, conversion.dtype, parameters, outputs, expected, exact)
    _say("use it:")
    for line in usage_lines(arguments.output, conversion.head, tokenizer is not None, pooled):
        _say(f"  {line}")
    if arguments.push_to_hub:
        _say(
            f"uploading; if this is interrupted, later: hf upload {arguments.push_to_hub} {output}"
        )
        _say(
            "uploaded: "
            f"{push(output, arguments.push_to_hub, arguments.private, arguments.revision)}"
        )
    return output


def _say(line):
    """Prints a line that may hold a stranger's text."""
    print(printable(line), flush=True)


def _report(rows, dtype, parameters, outputs, expected, exact):
    """The table of what was written and how far its outputs are from the source's."""
    name = str(dtype).removeprefix("torch.")
    difference, rounding = ((outputs - other).abs().max().item() for other in (expected, exact))
    table = [
        ("tensors", f"{sum(row['tensors'] for row in rows)}"),
        ("parameters", f"{parameters:,}"),
        ("dtype", name),
    ]
    table += [
        ("bytes", f"{sum(row['bytes'] for row in rows):,}"),
        *((f"sha256 {row['file']}", row["sha256"]) for row in rows),
    ]
    table += [
        ("largest difference", f"{difference:.1e} (largest output {exact.abs().max().item():.3g})")
    ]
    if exact is not expected:
        table += [
            (
                "with rounding",
                f"{rounding:.1e} from the source weights before they were rounded to {name}",
            )
        ]
    width = max(len(key) for key, _ in table)
    for key, value in table:
        print(f"{key:<{width}}  {value}")


@contextlib.contextmanager
def _quiet_and_clean():
    """What the library has to say about a stranger's configuration is not printed; SIGTERM, as
    schedulers send it, leaves nothing behind."""

    def stop(*_):
        raise SystemExit(128 + signal.SIGTERM)

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if in_main_thread else None
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def main(argv=None):
    """`neobert convert`. Raises UserError for bad input, which the command line turns into one
    sentence and exit code 2."""
    (arguments,) = OPTIONS["convert"].read(sys.argv[1:] if argv is None else argv)
    with _quiet_and_clean():
        convert(arguments)
    return 0
