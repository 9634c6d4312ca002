"""The proof: the written folder is loaded as a user loads it, in a fresh process, and its outputs
are compared with those of the source."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..common.errors import UserError, one_line


# Without the script's folder among those that are searched for modules.
_RUN = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def random_inputs(conversion):
    """Two sequences of random tokens, (2, L) with L up to 32 and padding in the second, or (1, 2,
    L) for multiple choice."""
    config, generator = conversion.config, torch.Generator().manual_seed(0)
    length = min(32, config.max_position_embeddings)
    ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 3 :] = 0
    if config.pad_token_id is not None:
        ids[mask == 0] = config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask}
    return (
        {name: value[None] for name, value in inputs.items()}
        if conversion.head.has_choices
        else inputs
    )


def _compared(outputs, conversion, inputs):
    """One vector of all outputs; of per-token ones at real tokens only."""
    mask = inputs["attention_mask"].bool()
    found = [outputs[name].float() for name in sorted(outputs)]
    real = [
        x[mask] if conversion.head.per_token and x.shape[:2] == mask.shape else x for x in found
    ]
    return torch.cat([x.flatten() for x in real])


def source_outputs(conversion, tensors):
    """What the model answers with the weights `tensors` in float32, as one vector."""
    inputs = random_inputs(conversion)
    with torch.no_grad():
        outputs = conversion.build(tensors)(**inputs)
    outputs = {name: value for name, value in outputs.items() if torch.is_tensor(value)}
    return _compared(outputs, conversion, inputs)


def _reload(folder, auto_class, inputs, outputs, scratch):
    """Runs `fresh_model.py`, which knows neither this package nor the network, in a process of its
    own."""
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
        is_told = lines and process.returncode > 0
        reason = lines[-1] if is_told else f"its process ended with {process.returncode}"
        reason = one_line(reason, 400)
        raise UserError(f"the converted folder does not load, so it was not kept: {reason}")


def verify(folder, conversion, expected, scratch):
    """Loads the folder with `AutoModel...from_pretrained(..., trust_remote_code=True)` in a fresh
    process and compares its outputs.

    Args:
        folder: what was written.
        conversion: Conversion.
        expected: `source_outputs` of the weights that were written.
        scratch: folder for what is needed on the way.
    Returns:
        the outputs of the folder, in float32.
    Raises:
        UserError: it does not load, or its outputs are not those of the source weights.
    """
    inputs = random_inputs(conversion)
    given = scratch / "inputs.safetensors"
    answered = scratch / "outputs.safetensors"
    save_file(inputs, given)
    _reload(folder, conversion.head.auto_class, given, answered, scratch)
    outputs = _compared(load_file(answered), conversion, inputs)
    difference = (
        (outputs - expected).abs().max().item() if outputs.shape == expected.shape else float("nan")
    )
    if not difference <= 1e-5 * max(expected.abs().max().item(), 1.0):
        raise UserError(
            f"the converted folder's outputs differ from the source's by {difference:.2e}, so it "
            "was not kept."
        )
    return outputs
