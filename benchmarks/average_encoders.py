"""Average the weights of distilled encoders that were trained from one initial model.

    python -m benchmarks.average_encoders runs/student8 runs/student7 --output runs/average

`neobert distill` scales the channels of a saved student by powers of two (see
`quantization.smoothing`), which two students may choose differently. The channels of all encoders
are therefore scaled as those of the first one before the average, which does not change the
embeddings of any of them. The other files of the output are those of the first encoder.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from neobert.common.commands import guarded
from neobert.common.errors import UserError
from neobert.common.folders import check_new
from neobert.common.options import OptionGroup, OptionParser, option
from neobert.embeddings.packed_encoder import load_sentence_transformer
from neobert.quantization.smoothing import divide_inputs, linear_layers


@dataclass(frozen=True)
class AverageOptions(OptionGroup):
    """Options of `python -m benchmarks.average_encoders`."""

    title = "Average"

    encoders: list[str] = option(
        help="Directories of the encoders, at least two of the same shape.",
        positional=True,
        metavar="PATH",
    )
    output: str = option(help="New directory for the average.", metavar="PATH")


@dataclass(frozen=True)
class _Options:
    average: AverageOptions


PARSER = OptionParser(
    "python -m benchmarks.average_encoders",
    "Average the weights of distilled encoders that were trained from one initial model.",
    _Options,
)


@torch.no_grad()
def align_channels(encoder: SentenceTransformer, reference: SentenceTransformer) -> None:
    """Scale the channels of an encoder in place so that they have the scales of another encoder.

    The scales are powers of two, so the embeddings of the encoder do not change.

    Args:
        encoder: NeoBERT encoder.
        reference: Encoder whose weights are similar except for the scales of the channels.
    """
    blocks = encoder[0].auto_model.transformer_encoder
    for block, target in zip(blocks, reference[0].auto_model.transformer_encoder):
        # The divisors of `wo` and of the down projection also scale rows of the other two layers,
        # whose columns are therefore compared afterwards.
        for are_scaled in ((False, True, False, True), (True, False, True, False)):
            divisors = []
            layers = zip(linear_layers(block), linear_layers(target), are_scaled)
            for layer, target_layer, is_scaled in layers:
                ratio = target_layer.weight.norm(dim=0) / layer.weight.norm(dim=0)
                exponents = ratio.log2().round().nan_to_num(0.0, 0.0, 0.0)
                divisors.append((exponents * is_scaled).exp2())
            divide_inputs(block, divisors)


def average_encoders(folders: list[str], output: str) -> None:
    """Write the average of the weights of encoders.

    Args:
        folders: Directories of the encoders.
        output: Directory to write, a copy of the first encoder with other weights.

    Raises:
        UserError: If there are fewer than two encoders, or if their shapes differ.
    """
    if len(folders) < 2:
        raise UserError("at least two encoders are required.")
    check_new(output)
    encoders: list[Any] = [load_sentence_transformer(folder) for folder in folders]
    first, *others = encoders
    shapes = [
        {name: value.shape for name, value in encoder[0].auto_model.state_dict().items()}
        for encoder in encoders
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise UserError(f"the encoders must have the same shapes, got {', '.join(folders)}.")

    for encoder in others:
        align_channels(encoder, first)
    states = [encoder[0].auto_model.state_dict() for encoder in encoders]

    # Equal tensors, such as frozen token embeddings, keep their bits and their storage type.
    weights = load_file(Path(folders[0]) / "model.safetensors")
    for name, value in weights.items():
        values = [state[name] for state in states]
        if any(not torch.equal(values[0], other) for other in values[1:]):
            weights[name] = torch.stack(values).mean(dim=0).to(value.dtype)
    shutil.copytree(folders[0], output, dirs_exist_ok=True)
    save_file(weights, Path(output) / "model.safetensors", metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> int:
    """Write the average, and return the exit code."""
    options = PARSER.read(sys.argv[1:] if argv is None else argv).average
    average_encoders(options.encoders, options.output)
    print(f"{options.output}: average of {len(options.encoders)} encoders")
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.average_encoders", main))
