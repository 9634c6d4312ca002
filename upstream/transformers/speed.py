"""Compare the speed of the native class and this repository's model on padded batches.

The two models are timed alternately within one run.

    PYTHONPATH=upstream/transformers python upstream/transformers/speed.py --output results/native
"""

import argparse
import functools
from typing import Any

import torch

import native
import neobert
from neobert.common.environment import environment
from neobert.common.results import write_result
from neobert.common.tables import markdown_table
from neobert.throughput.models import draw_lengths
from neobert.throughput.timing import CLOCKS, between, in_turns, quartiles, ratio


# Number of texts by workload of `neobert throughput`: lognormal lengths, and no padding.
TEXTS = {"short": 32, "128": 8}


def padded_batch(name: str) -> dict[str, torch.Tensor]:
    """Return a workload as random token ids and their attention mask, of shape (B, L)."""
    lengths = torch.tensor(draw_lengths(name, TEXTS[name]))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1000, 30000, mask.shape) * mask, "attention_mask": mask}


@torch.no_grad()
def measure(layers: int, repeats: int) -> list[dict[str, Any]]:
    """Time both models on every workload.

    Args:
        layers: Number of layers of the published hidden size, with random weights.
        repeats: Number of timed passes.

    Returns:
        One row per workload with the seconds of all passes, and the ratio of the native class to this repository's
        model.
    """
    torch.manual_seed(0)
    library = native.load()
    models = {
        "native": library.NeoBertModel(library.NeoBertConfig(num_hidden_layers=layers)).eval(),
        "ours": neobert.NeoBERTModel(neobert.NeoBERTConfig(num_hidden_layers=layers)).eval(),
    }

    rows = []
    for name in TEXTS:
        batch = padded_batch(name)
        mask = batch["attention_mask"]
        calls = {key: functools.partial(model, **batch) for key, model in models.items()}

        # The first pass allocates memory and is not measured.
        in_turns(calls, 1)
        timings = in_turns(calls, repeats, clock=CLOCKS["processor"])
        seconds = {key: timing.seconds for key, timing in timings.items()}
        rows.append(
            {
                "set": name,
                "shape": list(mask.shape),
                "real": mask.float().mean().item(),
                "seconds": seconds,
                **ratio(seconds["native"], seconds["ours"]),
            }
        )
    return rows


def page(rows: list[dict[str, Any]], layers: int, repeats: int) -> str:
    """Return the result in markdown.

    Args:
        rows: Result of `measure`.
        layers: Number of layers.
        repeats: Number of timed passes.
    """
    lines = []
    for row in rows:
        batch_size, length = row["shape"]
        batch = f"{batch_size} x {length}, {row['real']:.0%} non-padding"
        seconds = [between(quartiles(row["seconds"][key]), ".2f") for key in ("native", "ours")]
        lines.append([row["set"], batch, *seconds, f"{row['ratio']:.2f} ({between(row['quartiles'], '.2f')})"])

    header = ["texts", "batch", "native, CPU s", "this repository, CPU s", "native / this repository"]
    return (
        f"Inference, {layers} layers of the published hidden size with random weights. Processor seconds of one "
        f"pass, quartiles over {repeats} passes; the last column is the median ratio of neighboring passes.\n\n"
        + markdown_table(header, lines)
    )


def main() -> None:
    """Run the comparison and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="results/native", help="Path of the result without its suffix.")
    parser.add_argument("--layers", type=int, default=4, help="Number of layers of the published hidden size.")
    parser.add_argument("--repeats", type=int, default=7, help="Number of timed passes.")
    options = parser.parse_args()

    # The processor time of one thread hardly depends on other processes.
    torch.set_num_threads(1)
    rows = measure(options.layers, options.repeats)

    text = page(rows, options.layers, options.repeats)
    machine = environment(dtype="float32", attention="sdpa", capability=torch.backends.cpu.get_cpu_capability())
    print(write_result(options.output, "The native class of transformers", machine, {"rows": rows}, text))


if __name__ == "__main__":
    main()
