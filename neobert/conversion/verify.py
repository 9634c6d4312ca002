"""Verification of a converted folder.

The folder is loaded as a user loads it, in a fresh process, and its outputs are compared with those
of the source.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..common.errors import UserError, one_line
from .architecture import Conversion


# `runpy` keeps the directory of the script, which is in this package, out of the module path.
_RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
# Maximum difference of an output, relative to the largest output or to 1, whichever is larger.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Verification:
    """Outputs of a converted folder and of its source, as vectors in float32.

    Attributes:
        outputs: Outputs of the reloaded folder.
        expected: Outputs with the weights that were written.
        exact: Outputs with the weights of the checkpoint, before rounding.
    """

    outputs: torch.Tensor
    expected: torch.Tensor
    exact: torch.Tensor


def verify_conversion(folder: Path, conversion: Conversion, scratch: Path) -> Verification:
    """Compare a folder with the checkpoint that it was converted from, see `verify`."""
    expected = source_outputs(conversion, conversion.output_tensors())
    # With rounding, the report also states the difference to the weights before rounding.
    exact = expected
    if conversion.is_rounded:
        exact = source_outputs(conversion, conversion.tensors)
    return Verification(verify(folder, conversion, expected, scratch), expected, exact)


def random_inputs(conversion: Conversion) -> dict[str, torch.Tensor]:
    """Return two sequences of random tokens, with padding in the second.

    Returns:
        `input_ids` and `attention_mask`, int64 of shape (2, L) with L up to 32, or (1, 2, L) for
        multiple choice.
    """
    # The same seed in `source_outputs` and `verify`, so both models get the same inputs.
    config = conversion.config
    generator = torch.Generator().manual_seed(0)
    length = min(32, config.max_position_embeddings)
    input_ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, length - length // 3 :] = 0
    if config.pad_token_id is not None:
        input_ids[attention_mask == 0] = config.pad_token_id

    if conversion.head.has_choices:
        input_ids = input_ids[None]
        attention_mask = attention_mask[None]
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _flatten(
    outputs: Mapping[str, torch.Tensor], conversion: Conversion, inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return all outputs as one vector, without outputs at padding tokens."""
    mask = inputs["attention_mask"].bool()
    parts = []
    for name in sorted(outputs):
        output = outputs[name].float()
        if conversion.head.per_token and output.shape[:2] == mask.shape:
            output = output[mask]
        parts.append(output.flatten())
    return torch.cat(parts)


def source_outputs(conversion: Conversion, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the outputs of the model with these weights in float32, as one vector.

    Args:
        conversion: Model.
        tensors: Weights by name, those of the checkpoint or the rounded ones.
    """
    # float32 in both models: the difference then shows errors, and not the rounding of a dtype.
    inputs = random_inputs(conversion)
    with torch.no_grad():
        outputs = conversion.build(tensors)(**inputs)
    outputs = {name: value for name, value in outputs.items() if torch.is_tensor(value)}
    return _flatten(outputs, conversion, inputs)


def verify(
    folder: Path, conversion: Conversion, expected: torch.Tensor, scratch: Path
) -> torch.Tensor:
    """Load the folder with an Auto class in a fresh process and compare its outputs.

    Args:
        folder: Directory that was written.
        conversion: Model that was written.
        expected: Result of `source_outputs` for the weights that were written.
        scratch: Directory for temporary files.

    Returns:
        Outputs of the folder in float32, as one vector.

    Raises:
        UserError: If the folder does not load, or the outputs differ from those of the source.
    """
    inputs = random_inputs(conversion)
    inputs_file = scratch / "inputs.safetensors"
    outputs_file = scratch / "outputs.safetensors"
    save_file(inputs, inputs_file)
    _reload(folder, conversion.head.auto_class, inputs_file, outputs_file, scratch)

    outputs = _flatten(load_file(outputs_file), conversion, inputs)
    # Outputs of another shape differ, too: NaN fails the comparison below.
    difference = float("nan")
    if outputs.shape == expected.shape:
        difference = (outputs - expected).abs().max().item()
    # The comparison is also false if the difference is NaN.
    if not difference <= _TOLERANCE * max(expected.abs().max().item(), 1.0):
        raise UserError(
            f"the outputs of the converted folder differ from those of the source by "
            f"{difference:.2e}. The folder was discarded."
        )
    return outputs


def _reload(folder: Path, auto_class: str, inputs: Path, outputs: Path, scratch: Path) -> None:
    """Run `fresh_model.py` in another process, without this package and the network.

    Raises:
        UserError: If the process fails.
    """
    # With a separate cache of remote code, the user's cache is neither read nor changed.
    script = Path(__file__).with_name("fresh_model.py")
    environment = {
        **os.environ,
        "HF_MODULES_CACHE": str(scratch / "modules"),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
    }
    process = subprocess.run(
        [sys.executable, "-c", _RUN, script, folder, auto_class, inputs, outputs],
        env=environment,
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )

    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        reason = f"its process ended with {process.returncode}"
        # A process that a signal ended leaves no message about the reason.
        if lines and process.returncode > 0:
            # The last line of a traceback is the exception.
            reason = lines[-1]
        raise UserError(
            f"the converted folder does not load, so it was discarded: {one_line(reason, 400)}."
        )
