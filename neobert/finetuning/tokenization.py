"""Tokenization of rows with one or two texts, in groups of a limited size."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..embeddings.windows import text_groups


def tokenize_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[tuple[str, ...]],
    max_length: int,
    with_offsets: bool = False,
) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Tokenize rows in groups of a limited size.

    The encodings of a tokenizer take about 200 bytes per token, so those of all rows at once may
    not fit into the memory.

    Args:
        tokenizer: Tokenizer of the model.
        rows: One or two texts per row.
        max_length: Maximum sequence length in tokens.
        with_offsets: Whether to return the characters of each token as "offset_mapping".

    Yields:
        The truncated encodings of a group, {name: one list per row}, and the lengths of its rows
        before truncation.
    """
    for group in text_groups([sum(map(len, row)) for row in rows]):
        columns = [list(column) for column in zip(*rows[group])]
        # The texts are tokenized twice, because truncated encodings do not contain the complete
        # lengths.
        complete = tokenizer(*columns, truncation=False, verbose=False)["input_ids"]
        lengths = [len(ids) for ids in complete]
        encoded = tokenizer(
            *columns, truncation=True, max_length=max_length, return_offsets_mapping=with_offsets
        )
        yield dict(encoded), lengths
