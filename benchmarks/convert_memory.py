"""Peak memory and time of the converter on a checkpoint of the published size: 245,136,954 parameters, 980.5 MB in float32.

    python benchmarks/convert_memory.py --output results/convert_memory_<date>.json [--formats state_dict zero2] [--dtype float32]

Writes random weights as `state_dict.pt` and as the ZeRO-2 and ZeRO-3 files of two processes (float32 masters and two AdamW moments, in
DeepSpeed's layout), converts each with `python convert_checkpoint.py` (which also reloads the result in a second process), and samples the
resident memory of both processes. Fails if the sum exceeds 2.5 times the float32 size. Needs Linux, about 1.5 GB of memory and 5 GB of disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from write_distributed_checkpoints import import_package  # noqa: E402


LIMIT = 2.5


def random_weights(config):
    """{name: float32 tensor} of the masked LM, 245,136,954 numbers at the published size."""
    from neobert import NeoBERTForMaskedLM

    with torch.device("meta"):
        shapes = {name: value.shape for name, value in NeoBERTForMaskedLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape) if "norm" in name else torch.empty(shape).uniform_(-0.02, 0.02, generator=generator)
        for name, shape in shapes.items()
    }


def write_state_dict(folder, weights):
    torch.save({f"module.{name}": value for name, value in weights.items()}, folder / "state_dict.pt")


def _write_shard(folder, rank, stage, flat):
    state = {"zero_stage": stage, "partition_count": 2}
    state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = [flat]
    moments = {"exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
    state["base_optimizer_state"] = {"state": {0: moments}}
    torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def write_zero(folder, weights, stage):
    """Stage 2: one flat vector cut in two. Stage 3: every tensor cut in two."""
    shapes = [{name: value.shape for name, value in weights.items()}]
    for rank in range(2):
        if stage == 3:
            flat = torch.cat([torch.nn.functional.pad(v.flatten(), (0, v.numel() % 2)).chunk(2)[rank] for v in weights.values()])
            module = {name: torch.empty(0, dtype=torch.bfloat16) for name in weights}
        else:
            flat = torch.cat([value.flatten() for value in weights.values()])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % 4)).chunk(2)[rank].clone()
            module = {name: value.bfloat16() for name, value in weights.items()}
        _write_shard(folder, rank, stage, flat)
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save({"module": module, "param_shapes": shapes, "buffer_names": [], "shared_params": {}}, folder / name)


FORMATS = {
    "state_dict": write_state_dict,
    "zero2": lambda folder, weights: write_zero(folder, weights, 2),
    "zero3": lambda folder, weights: write_zero(folder, weights, 3),
}


def _memory(pid):
    """(resident, anonymous) bytes of a process; zeros once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "RssAnon"))}
    return values.get("VmRSS", 0), values.get("RssAnon", 0)


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def measure(arguments):
    """Runs the converter; returns its seconds and, over time, the largest memory of it and its child process together, in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "convert_checkpoint.py"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    peak = {"resident": 0, "anonymous": 0, "converter_resident": 0, "reload_resident": 0}
    while process.poll() is None:
        own, child = _memory(process.pid), [_memory(pid) for pid in _children(process.pid)]
        peak["resident"] = max(peak["resident"], own[0] + sum(memory[0] for memory in child))
        peak["anonymous"] = max(peak["anonymous"], own[1] + sum(memory[1] for memory in child))
        peak["converter_resident"] = max(peak["converter_resident"], own[0])
        peak["reload_resident"] = max([peak["reload_resident"], *(memory[0] for memory in child)])
        time.sleep(0.01)
    out, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"the conversion failed: {err.decode()[-2000:]}")
    return time.perf_counter() - start, peak, out.decode()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--scratch", help="folder for the checkpoints (default: the system's temporary one)")
    options = parser.parse_args(argv)
    import_package()
    from neobert import NeoBERTConfig
    from neobert.common.files import write_json
    from neobert.common.results import environment

    config = NeoBERTConfig(num_hidden_layers=options.layers)
    size, rows = None, []
    for name in options.formats:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            folder = Path(scratch) / "100"
            folder.mkdir()
            weights = random_weights(config)
            size = 4 * sum(value.numel() for value in weights.values())
            FORMATS[name](folder, weights)
            del weights
            seconds, peak, printed = measure([scratch, str(Path(scratch) / "out"), "--dtype", options.dtype])
        difference = next(line for line in printed.splitlines() if line.startswith("largest difference"))
        ratio = peak["resident"] / size
        rows.append({"format": name, "dtype": options.dtype, "seconds": round(seconds, 1), "peak_over_float32_size": round(ratio, 3)})
        rows[-1] |= {f"peak_{key}_bytes": value for key, value in peak.items()} | {"proof": " ".join(difference.split())}
        print(json.dumps(rows[-1]), flush=True)
    result = {"float32_bytes": size, "limit": LIMIT, "runs": rows, "environment": environment()}
    if options.output:
        write_json(options.output, result)
    worst = max(row["peak_over_float32_size"] for row in rows)
    print(f"largest peak: {worst} times the float32 size of {size / 1e6:.1f} MB (allowed: {LIMIT})")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
