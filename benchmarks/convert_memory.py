"""Peak memory and time of the converter on a checkpoint of the published size: 245,136,954 parameters, 980.5 MB in float32.

    python -m neobert.benchmarks.convert_memory --output results/convert_memory

Writes random weights as `state_dict.pt` and as the ZeRO-2 and ZeRO-3 files of two processes (float32 masters and two AdamW moments, in
DeepSpeed's layout), converts each with `neobert convert` (which also reloads the result in a second process), and samples the resident memory
of both processes. Fails if the sum exceeds 2.5 times the float32 size. Needs Linux, about 1.5 GB of memory and 5 GB of disk.
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from ..common.arguments import Arguments, option, read_arguments
from ..common.errors import UserError, guarded, one_line
from ..common.results import environment, markdown_table, write_result
from ..configuration_neobert import NeoBERTConfig
from ..modeling_neobert import NeoBERTForMaskedLM


LIMIT = 2.5
FORMATS = ("state_dict", "zero2", "zero3")


def random_weights(config):
    """{name: float32 tensor} of the masked LM, 245,136,954 numbers at the published size."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in NeoBERTForMaskedLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if "norm" in name else torch.empty(shape).uniform_(-0.02, 0.02, generator=generator)
        for name, shape in shapes.items()
    }


def write_checkpoint(folder, weights, form):
    """Writes a checkpoint in one of `FORMATS`."""
    if form == "state_dict":
        torch.save({f"module.{name}": value for name, value in weights.items()}, folder / "state_dict.pt")
        return
    stage = int(form.removeprefix("zero"))
    shapes = [{name: value.shape for name, value in weights.items()}]
    for rank in range(2):
        if stage == 3:  # every tensor cut in two
            flat = torch.cat([torch.nn.functional.pad(v.flatten(), (0, v.numel() % 2)).chunk(2)[rank] for v in weights.values()])
            module = {name: torch.empty(0, dtype=torch.bfloat16) for name in weights}
        else:  # one flat vector cut in two
            flat = torch.cat([value.flatten() for value in weights.values()])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % 4)).chunk(2)[rank].clone()
            module = {name: value.bfloat16() for name, value in weights.items()}
        groups = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        moments = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
        state = {"zero_stage": stage, "partition_count": 2, groups: [flat], "base_optimizer_state": {"state": {0: moments}}}
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save({"module": module, "param_shapes": shapes, "buffer_names": [], "shared_params": {}}, folder / name)


def _resident(pid):
    """Resident bytes of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def convert(checkpoint, output, dtype):
    """Runs the converter; returns its seconds, the largest resident bytes of it, of its child, and of both together, and what it printed."""
    command = [sys.executable, "-m", "neobert", "convert", str(checkpoint), str(output), "--dtype", dtype]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = {"together": 0, "converter": 0, "reload": 0}
    while process.poll() is None:
        own, child = _resident(process.pid), sum(map(_resident, _children(process.pid)))
        for name, value in (("together", own + child), ("converter", own), ("reload", child)):
            peak[name] = max(peak[name], value)
        time.sleep(0.01)
    out, err = process.communicate()
    if process.returncode:
        raise UserError(f"the conversion failed: {one_line(err[-500:], 500)}")
    return time.perf_counter() - start, peak, out


@dataclass
class ConvertMemoryArguments(Arguments):
    """Options of `python -m neobert.benchmarks.convert_memory`."""

    output: str = option("results/convert_memory", "path of the result without its ending")
    formats: list[str] = option(help="of the checkpoint", default_factory=lambda: list(FORMATS), choices=FORMATS)
    dtype: str = option("float32", "of the converted model", choices=("float32", "bfloat16", "float16"))
    layers: int = option(28, least=1)
    scratch: str | None = option(None, "folder for the checkpoints; by default the system's temporary one")


def main(argv=None):
    """Measures, writes and prints the table; returns 1 if the limit is exceeded."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = read_arguments((ConvertMemoryArguments,), argv, "python -m neobert.benchmarks.convert_memory", __doc__)
    weights = random_weights(NeoBERTConfig(num_hidden_layers=given.layers))
    size, rows, table = 4 * sum(value.numel() for value in weights.values()), [], []
    for form in tqdm(given.formats, desc="convert", disable=None):
        with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
            step = Path(scratch) / "run" / "100"
            step.mkdir(parents=True)
            write_checkpoint(step, weights, form)
            seconds, peak, printed = convert(step.parent, Path(scratch) / "out", given.dtype)
        proof = next(" ".join(line.split()) for line in printed.splitlines() if line.startswith("largest difference"))
        ratio = peak["together"] / size
        rows.append({"format": form, "seconds": seconds, "peak_over_float32_size": ratio, "peak_bytes": peak, "proof": proof})
        table.append([form, f"{seconds:.0f}", *(f"{peak[name] / 2**20:,.0f}" for name in peak), f"{ratio:.2f}", proof])
    header = ["format", "seconds", "peak MiB together", "converter", "reload", "times the float32 size", "proof"]
    text = f"{size / 1e6:,.1f} MB in float32; allowed: {LIMIT} times that.\n\n" + markdown_table(header, table)
    env = environment(dtype=given.dtype)
    print(write_result(given.output, "Peak memory of the converter", env, {"float32_bytes": size, "limit": LIMIT, "runs": rows}, text))
    return int(max(row["peak_over_float32_size"] for row in rows) > LIMIT)


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.convert_memory", main))
