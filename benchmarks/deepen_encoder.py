"""Insert a block into a distilled encoder, and remove gates of its feed-forward layers.

    python -m benchmarks.deepen_encoder runs/student --texts texts.jsonl --position 2 --gates 512 \
        --output runs/deeper

The script inserts a copy of a block before the block. The output projections of the copy are zero,
so the deeper encoder has the same embeddings (LLaMA Pro, arXiv 2401.02415). Fewer gates make all
blocks cheaper. The script keeps the gates that best reproduce the output of a feed-forward layer on
the texts, and fits the down projection again by ridge regression. Continue the training of the
result with `neobert distill --init-from`.
"""

import copy
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import nn

from neobert.common.commands import guarded
from neobert.common.data import rows
from neobert.common.errors import UserError
from neobert.common.files import read_json, write_json
from neobert.common.folders import check_new
from neobert.common.options import OptionGroup, OptionParser, option
from neobert.common.packing import pack
from neobert.distillation.transfer import ridge
from neobert.embeddings.packed_encoder import load_sentence_transformer, token_batches


# Number of gates that are removed at once. The others are then ranked again.
GATES_PER_ROUND = 16
TOKENS_PER_BATCH = 8_192


@dataclass(frozen=True)
class DeepenOptions(OptionGroup):
    """Options of `python -m benchmarks.deepen_encoder`."""

    title = "Deeper encoder"

    encoder: str = option(help="Directory of a NeoBERT encoder.", positional=True, metavar="PATH")
    texts: str = option(help="File of texts, with the column text.", metavar="PATH")
    output: str = option(help="New directory for the deeper encoder.", metavar="PATH")
    position: Annotated[int, Meta(ge=0)] = option(
        2, "Index of the block before which a copy of it is inserted, counted from 0."
    )
    gates: Annotated[int, Meta(ge=1)] = option(
        512,
        "Number of gates of each feed-forward layer: a multiple of 8, at most that of the encoder.",
    )
    max_texts: Annotated[int, Meta(ge=1)] = option(3_000, "Maximum number of texts.")


@dataclass(frozen=True)
class _Options:
    deeper: DeepenOptions


PARSER = OptionParser(
    "python -m benchmarks.deepen_encoder",
    "Insert a block into a distilled encoder, and remove gates of its feed-forward layers.",
    _Options,
)


# ------------------------------------------------------------------------------------------------
# gates


@torch.inference_mode()
def feed_forward_inputs(model: Any, index: int, token_ids: list[list[int]]) -> torch.Tensor:
    """Return the inputs of the feed-forward layer of a block for texts, (T, D).

    Args:
        model: `NeoBERTModel`.
        index: Index of the block.
        token_ids: Token IDs of the texts.
    """
    inputs: list[torch.Tensor] = []
    feed_forward = model.transformer_encoder[index].ffn
    hook = feed_forward.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    try:
        lengths = [len(ids) for ids in token_ids]
        for rows_of_batch in token_batches(lengths, TOKENS_PER_BATCH, is_padded=False):
            model(**pack([token_ids[row] for row in rows_of_batch]))
    finally:
        hook.remove()
    return torch.cat(inputs)


def select_gates(activations: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    """Return the gates that reproduce the output of a feed-forward layer best, by elimination.

    Without gate j, the squared error of a least-squares fit increases by w_j^2 / (X^T X)^-1_jj,
    where w_j is the column of the gate in the down projection. The gates with the smallest increase
    are removed first.

    Args:
        activations: Activations X of all gates, (T, G).
        targets: Outputs of the layer, (T, D).
        count: Number of gates to keep.

    Returns:
        Indices of the gates, ascending, (count,).
    """
    products = activations.double().T @ activations.double()
    correlations = activations.double().T @ targets.double()
    # Gates that are never active would make the matrix singular.
    products.diagonal().add_(1e-4 * products.diagonal().mean())

    kept_gates = torch.arange(len(products))
    while len(kept_gates) > count:
        inverse = torch.linalg.inv(products[kept_gates][:, kept_gates])
        weights = inverse @ correlations[kept_gates]
        increase = weights.square().sum(1) / inverse.diagonal()
        removed = increase.argsort()[: min(GATES_PER_ROUND, len(kept_gates) - count)]
        is_kept = torch.ones(len(kept_gates), dtype=torch.bool)
        is_kept[removed] = False
        kept_gates = kept_gates[is_kept]
    return kept_gates


@torch.no_grad()
def remove_gates(feed_forward: Any, inputs: torch.Tensor, count: int) -> float:
    """Remove gates of a feed-forward layer in place.

    Args:
        feed_forward: SwiGLU layer.
        inputs: Inputs of the layer, (T, D).
        count: Number of gates to keep.

    Returns:
        Fraction of the variance of the output that the remaining gates do not explain.
    """
    gates, values = (inputs @ feed_forward.w12.weight.T).chunk(2, dim=-1)
    activations = nn.functional.silu(gates) * values
    targets = activations @ feed_forward.w3.weight.T

    kept_gates = select_gates(activations, targets, count)
    down = ridge(activations[:, kept_gates], targets)
    # The rows of w12 are those of the gates, followed by those of the values.
    kept_rows = torch.cat([kept_gates, kept_gates + activations.shape[1]])
    feed_forward.w12.weight = nn.Parameter(feed_forward.w12.weight[kept_rows].clone())
    feed_forward.w12.out_features = 2 * count
    feed_forward.w3.weight = nn.Parameter(down)
    feed_forward.w3.in_features = count

    error = targets - activations[:, kept_gates] @ down.T
    return float(error.square().sum() / (targets - targets.mean(0)).square().sum())


# ------------------------------------------------------------------------------------------------
# blocks


@torch.no_grad()
def insert_block(model: Any, position: int) -> None:
    """Insert a copy of a block before it. The copy adds nothing, so the model is unchanged."""
    block = copy.deepcopy(model.transformer_encoder[position])
    block.wo.weight.zero_()
    block.ffn.w3.weight.zero_()
    model.transformer_encoder.insert(position, block)


def deepen_encoder(options: DeepenOptions) -> list[float]:
    """Write a deeper encoder.

    Returns:
        The result of `remove_gates` for every block of the encoder.

    Raises:
        UserError: If the output exists, or the position or the number of gates is too large.
    """
    check_new(options.output)
    encoder: Any = load_sentence_transformer(options.encoder)
    model = encoder[0].auto_model
    blocks = model.transformer_encoder
    if options.position >= len(blocks):
        raise UserError(
            f"`position` must be at most {len(blocks) - 1}, the last block of the encoder, got "
            f"{options.position}."
        )
    count = blocks[0].ffn.w3.in_features
    # A NeoBERT rounds the number of gates to a multiple of 8.
    if options.gates > count or options.gates % 8:
        raise UserError(
            f"`gates` must be a multiple of 8 and at most {count}, those of the encoder, got "
            f"{options.gates}."
        )

    # Texts at equal distances represent all parts of the file.
    texts = [row["text"] for row in rows(options.texts, text_columns=["text"])]
    if not texts:
        raise UserError(f"`texts` must contain at least one text, got none in {options.texts}.")
    texts = texts[:: -(-len(texts) // options.max_texts)]
    token_ids = encoder.tokenizer(texts, truncation=True, max_length=encoder.max_seq_length)
    errors = []
    for index, block in enumerate(blocks):
        inputs = feed_forward_inputs(model, index, token_ids["input_ids"])
        errors.append(remove_gates(block.ffn, inputs, options.gates))
    insert_block(model, options.position)

    encoder.save(options.output)
    _write_shape(Path(options.encoder), Path(options.output), len(blocks), options.gates)
    return errors


def _write_shape(source: Path, output: Path, block_count: int, gates: int) -> None:
    """Write the configuration of the deeper encoder, with the code of the encoder."""
    config = read_json(source / "config.json")
    # SwiGLU has two thirds of `intermediate_size` as gates.
    shape = {"num_hidden_layers": block_count, "intermediate_size": gates * 3 // 2}
    write_json(output / "config.json", {**config, **shape})
    for path in source.glob("*.py"):
        shutil.copy(path, output)


def main(argv: list[str] | None = None) -> int:
    """Write the deeper encoder, and return the exit code."""
    options = PARSER.read(sys.argv[1:] if argv is None else argv).deeper
    for index, error in enumerate(deepen_encoder(options)):
        print(f"block {index}: {100 * error:.1f} % of the feed-forward output is unexplained")
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.deepen_encoder", main))
