"""Compare the speed of the native class and this repository's model on padded batches.

The two models are timed alternately within one run.

    PYTHONPATH=upstream/transformers python upstream/transformers/speed.py --output results/native
"""

import argparse

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
def main() -> None:
    """Run the comparison and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="results/native", help="Path of the result without its suffix.")
    parser.add_argument("--layers", type=int, default=4, help="Number of layers of the published hidden size.")
    parser.add_argument("--repeats", type=int, default=7, help="Number of timed passes.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours = neobert.NeoBERTModel(neobert.NeoBERTConfig(num_hidden_layers=options.layers)).eval()
    library = native.load()
    theirs = library.NeoBertModel(library.NeoBertConfig(num_hidden_layers=options.layers)).eval()
    rows, data = [], []
    for name in TEXTS:
        batch = padded_batch(name)
        calls = {"native": lambda: theirs(**batch), "ours": lambda: ours(**batch)}  # noqa: B023
        in_turns(calls, 1)
        timings = in_turns(calls, options.repeats, clock=CLOCKS["processor"])
        seconds = {key: timing.seconds for key, timing in timings.items()}
        times, mask = ratio(seconds["native"], seconds["ours"]), batch["attention_mask"]
        row = {"set": name, "shape": list(mask.shape), "real": mask.float().mean().item(), "seconds": seconds, **times}
        data.append(row)
        spread = [between(quartiles(seconds[key]), ".2f") for key in ("native", "ours")]
        shape = f"{mask.shape[0]} x {mask.shape[1]}, {row['real']:.0%} real"
        rows.append([name, shape, *spread, f"{times['ratio']:.2f} ({between(times['quartiles'], '.2f')})"])
    header = ["texts", "batch", "native, CPU s", "this repository, CPU s", "times as long"]
    text = (
        f"Inference, {options.layers} layers of the published width with random weights. Processor seconds of one "
        f"pass, quartiles over {options.repeats}; the last column is the median of neighboring passes.\n\n"
        + markdown_table(header, rows)
    )
    machine = environment(dtype="float32", attention="sdpa", capability=torch.backends.cpu.get_cpu_capability())
    print(write_result(options.output, "The native class of transformers", machine, {"rows": data}, text))


if __name__ == "__main__":
    main()
