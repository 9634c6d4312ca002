"""Command `neobert convert`: convert a raw training checkpoint to a Hub folder.

Code in a checkpoint is never executed. The output appears complete or not at all.
"""

import logging
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import transformers

from ..common.errors import UserError, printable
from ..common.folders import check_disjoint, check_new, new_folder
from ..common.loading import dtype_name
from ..common.model_card import base_model_metadata, license_metadata, read_card
from ..common.options import convert as convert_values
from ..common.options import log_options
from .architecture import Conversion, plan
from .config_files import find_config, read_config
from .heads import HeadName
from .hub_folder import HubFolder, WeightFile
from .locate import Checkpoint, open_checkpoint
from .options import OPTIONS, CheckpointOptions, ConvertOptions, FolderOptions, WeightDtype
from .tokenizer import find_tokenizer
from .verify import Verification, verify_conversion


logger = logging.getLogger("neobert.conversion")
GroupT = TypeVar("GroupT", CheckpointOptions, FolderOptions)


def convert_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    config: str | Path | None = None,
    step: int | None = None,
    head: HeadName | None = None,
    tokenizer: str | Path | None = None,
    dtype: WeightDtype | None = None,
    sentence_transformers: bool = False,
    max_shard_size: str = "5GB",
    license: str | None = None,
    base_model: str | None = None,
) -> None:
    """Convert a raw training checkpoint to a folder for the Hugging Face Hub.

    Args:
        source: File, directory of a step, or directory of a run of DeepSpeed, FSDP,
            accelerate, Trainer, DDP or plain torch.
        output: Directory to write. It must not exist.
        config: File with the configuration; by default the one beside the weights.
        step: Step of a run; by default the latest.
        head: Type of the model's head; by default that of the checkpoint.
        tokenizer: Directory of the tokenizer, or "none".
        dtype: Precision of the weights: "float32", "bfloat16" or "float16".
        sentence_transformers: Whether to write modules.json with mean pooling.
        max_shard_size: Maximum size of a weight file.
        license: License of the weights, for the model card.
        base_model: Model on the Hub that the weights were trained from, for the model card.

    Raises:
        UserError: If the checkpoint cannot be converted. Nothing is written then.

    Example:
        >>> from neobert import convert_checkpoint
        >>> convert_checkpoint("examples/checkpoint", "runs/converted")  # doctest: +SKIP
    """
    checkpoint = _checked(
        CheckpointOptions,
        checkpoint=str(source),
        output=str(output),
        config=None if config is None else str(config),
        step=step,
        head=head,
        tokenizer=None if tokenizer is None else str(tokenizer),
    )
    folder = _checked(
        FolderOptions,
        dtype=dtype,
        sentence_transformers=sentence_transformers,
        max_shard_size=max_shard_size,
        license=license,
        base_model=base_model,
    )
    convert(ConvertOptions(checkpoint, folder))


def _checked(group: type[GroupT], **values: Any) -> GroupT:
    """Return options of a group. Their values are checked like those of the command line."""
    return group(**convert_values(values, get_type_hints(group, include_extras=True)))


def convert(options: ConvertOptions, report: bool = True) -> None:
    """Run the conversion that the options describe.

    Args:
        options: Options of the command.
        report: Whether to print what was written, and how to load the model.

    Raises:
        UserError: If the checkpoint cannot be converted. Nothing is written then.
    """
    source = options.source
    output = source.output
    pooled = options.folder.sentence_transformers

    # Refuse a wrong output before the checkpoint is read, which may take minutes.
    check_new(output, "OUTPUT")
    tokenizer_path = source.tokenizer if source.tokenizer != "none" else None
    inputs = (source.checkpoint, source.config, tokenizer_path)
    check_disjoint(output, *(path for path in inputs if path))

    # Read the checkpoint and decide which model it contains.
    checkpoint = open_checkpoint(source.checkpoint, source.step)
    _log([f"{checkpoint.path}: {checkpoint.format}, {len(checkpoint.tensors)} tensors"])
    conversion = _plan(checkpoint, options)
    if pooled and conversion.head.option not in ("base", "masked-lm"):
        raise UserError(
            "`--sentence-transformers` needs a checkpoint with the head masked-lm or base, got "
            f"{conversion.head.option}."
        )
    hub_folder = HubFolder(
        conversion,
        tokenizer=find_tokenizer(source.tokenizer, checkpoint.folders),
        max_shard_size=options.folder.max_shard_size,
        sentence_transformers=pooled,
        metadata=_card_metadata(checkpoint, options.folder),
    )

    # The files of the verification are written beside the new folder and not into it, because they
    # must not become part of the output.
    with (
        new_folder(output) as folder,
        tempfile.TemporaryDirectory(dir=folder.parent) as scratch,
    ):
        files = hub_folder.write(folder, Path(output).name)

        # Load the folder in a fresh process and compare its outputs with those of the checkpoint.
        verification = verify_conversion(folder, conversion, Path(scratch))

    if not report:
        return
    _report(files, conversion, verification)
    _print("Load the model:")
    for line in hub_folder.usage_lines(output):
        _print(f"  {line}")


def _plan(checkpoint: Checkpoint, options: ConvertOptions) -> Conversion:
    """Read the configuration, decide what the checkpoint is converted to, and log the notes."""
    config_path = options.source.config
    if config_path:
        config_file: str | Path | None = config_path
        fields = read_config(config_path)
    else:
        config_file, fields = find_config(checkpoint.folders)
    conversion = plan(checkpoint.tensors, fields, options.source.head, options.folder.dtype)

    # The notes are logged now, and repeated in the model card.
    config_note = "no configuration beside the checkpoint"
    if config_file:
        config_note = f"configuration from {Path(config_file).name}"
    notes = (*checkpoint.notes, config_note, *conversion.notes)
    _log(f"  {note}" for note in notes)
    return replace(conversion, notes=(f"read from {checkpoint.format}", *notes))


def _card_metadata(checkpoint: Checkpoint, options: FolderOptions) -> dict[str, Any]:
    """Return license and base model for the model card.

    Options take precedence over the model card beside the checkpoint.
    """
    card = read_card(checkpoint.folders[0])
    metadata = {key: text for key, text in card.items() if key.startswith("base_model")}
    metadata |= license_metadata(options.license, card)
    metadata |= base_model_metadata(options.base_model)
    return metadata


def _log(lines: Iterable[str]) -> None:
    """Log lines that may contain text of an untrusted file."""
    for line in lines:
        logger.info("%s", printable(line))


def _print(line: str) -> None:
    """Print a line that may contain text of an untrusted file."""
    print(printable(line), flush=True)


def _report(
    files: Sequence[WeightFile], conversion: Conversion, verification: Verification
) -> None:
    """Print what was written, and how much the outputs differ from those of the checkpoint."""
    dtype = dtype_name(conversion.dtype)
    outputs = verification.outputs
    difference = (outputs - verification.expected).abs().max().item()
    largest = verification.exact.abs().max().item()

    table = {
        "tensors": f"{len(conversion.tensors)}",
        "parameters": f"{conversion.parameters:,}",
        "dtype": dtype,
        "bytes": f"{sum(file.size for file in files):,}",
    }
    for file in files:
        table[f"sha256 {file.name}"] = file.sha256
    table["largest difference"] = f"{difference:.1e} (largest output {largest:.3g})"
    if conversion.is_rounded:
        rounding = (outputs - verification.exact).abs().max().item()
        table["with rounding"] = (
            f"{rounding:.1e} from the source weights before they were rounded to {dtype}"
        )

    # The table is the result of the command, and goes to stdout; logs go to stderr.
    width = max(map(len, table))
    for key, value in table.items():
        print(f"{key:<{width}}  {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert convert` and return the exit code.

    Raises:
        UserError: If an option is invalid or the checkpoint cannot be converted.
    """
    options = OPTIONS["convert"].read(sys.argv[1:] if argv is None else argv)
    log_options(options)

    # Silence transformers' warnings about an untrusted configuration.
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        convert(options)
    finally:
        transformers.logging.set_verbosity(verbosity)
    return 0
