"""Prepared datasets: texts that were tokenized once into a memory-mapped Arrow file.

A prepared dataset is a directory with `texts.arrow` (column input_ids: token ids without special
tokens, never truncated) and `prepared.json` (source, tokenizer and counts). The directory appears
complete or not at all.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset, IterableDataset, concatenate_datasets
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..common.data import replace_surrogates
from ..common.errors import UserError, one_line
from ..common.files import read_json, redacted, write_json
from ..common.folders import new_folder, remove_leftover
from ..common.identity import tokenizer_fingerprint
from ..common.loading import vocabulary_size
from ..common.output import differences
from .sources import Source, load_rows, source_key


# Number of rows that are tokenized together.
ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class TokenizedTexts:
    """Tokenized texts of one dataset, or of several weighted sources one after another.

    Attributes:
        rows: Dataset with the column input_ids, without special tokens.
        lengths: Number of tokens of each text including the two special tokens, (texts,) int32.
        sizes: Number of texts of each weighted source, (sources,); empty for a single dataset.
        sampling_weights: Sampling weights of the sources, which sum to 1; empty for a single
            dataset.
    """

    rows: Dataset
    lengths: np.ndarray
    sizes: tuple[int, ...] = ()
    sampling_weights: tuple[float, ...] = ()

    @classmethod
    def from_dataset(cls, rows: Dataset) -> "TokenizedTexts":
        """Return the texts of a dataset with the column input_ids."""
        # The lengths come from the offsets of the Arrow column, so no text is read.
        lengths = pyarrow.compute.list_value_length(rows.data.column("input_ids"))
        return cls(rows, lengths.to_numpy() + np.int32(2))

    @classmethod
    def concatenate(
        cls, sources: Sequence["TokenizedTexts"], sampling_weights: Sequence[float]
    ) -> "TokenizedTexts":
        """Concatenate tokenized sources, to be sampled with these weights.

        Args:
            sources: Texts of each source.
            sampling_weights: Sampling weights of the sources, which sum to 1.
        """
        return cls(
            rows=concatenate_datasets([source.rows for source in sources]),
            lengths=np.concatenate([source.lengths for source in sources]),
            sizes=tuple(len(source.lengths) for source in sources),
            sampling_weights=tuple(sampling_weights),
        )


def prepare_dataset(
    sources: Sequence[Source], path: str | Path, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Tokenize sources into a prepared dataset, unless it exists.

    Args:
        sources: Sources of the texts.
        path: Directory of the prepared dataset.
        tokenizer: Fast tokenizer.

    Returns:
        Content of prepared.json.

    Raises:
        UserError: If the directory contains a dataset of another source, a damaged one or other
            files, another process is preparing it, or no row contains text.
    """
    path = Path(path)
    key = redacted(_dataset_key(sources, tokenizer))
    if (path / "prepared.json").is_file():
        return _reuse(path, key)

    with new_folder(path) as folder:
        counts = _write_texts(folder / "texts.arrow", load_rows(sources), tokenizer, key["dataset"])
        if not counts["rows"]:
            raise UserError(f"the dataset {key['dataset']} has no rows.")
        if not counts["kept"]:
            raise UserError(
                f"none of the {counts['rows']} rows of the dataset {key['dataset']} contains text "
                f"in the column {sources[0].column!r}. Name the column with `--column`."
            )
        # prepared.json is the last file.
        summary = {**key, **counts}
        write_json(folder / "prepared.json", summary)
    return summary


def _reuse(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    """Return the content of prepared.json of a dataset whose source and tokenizer are unchanged.

    Args:
        path: Directory of the prepared dataset.
        key: Settings that identify the dataset of the run.

    Raises:
        UserError: If the directory contains a dataset of another source or tokenizer.
    """
    summary = _read_summary(path)
    if changes := differences({name: summary.get(name) for name in key}, key):
        raise UserError(
            f"{path} was prepared with other settings ({changes}). Choose another `--prepared`."
        )
    remove_leftover(path)
    return summary


def _write_texts(
    path: Path, rows: IterableDataset, tokenizer: PreTrainedTokenizerBase, name: str
) -> dict[str, int]:
    """Tokenize texts into an Arrow file.

    Args:
        path: File to write.
        rows: Rows with the column "text".
        tokenizer: Fast tokenizer.
        name: Name of the dataset, for the progress bar.

    Returns:
        "rows", the number of rows; "kept", the number of texts in the file; and "tokens", their
        number of tokens including the two special tokens of each text.
    """
    # Two bytes per token suffice for vocabularies of up to 65,536 tokens, and halve the size of the
    # file.
    id_type = pyarrow.uint16() if vocabulary_size(tokenizer) <= 2**16 else pyarrow.int32()
    schema = pyarrow.schema({"input_ids": pyarrow.list_(id_type)})
    row_count = 0
    text_count = 0
    token_count = 0

    with (
        _tokenizer_threads(),
        tqdm(desc=f"tokenizing {name}", unit=" rows") as progress,
        pyarrow.ipc.new_stream(path, schema) as writer,
    ):
        for batch in rows.iter(ROWS_AT_ONCE):
            # Empty texts, and texts without a token, are omitted.
            ids = [row for row in token_ids(tokenizer, filter(None, batch["text"])) if row]
            column = pyarrow.array(ids, schema.types[0])
            writer.write(pyarrow.record_batch([column], schema=schema))

            row_count += len(batch["text"])
            text_count += len(ids)
            token_count += sum(map(len, ids))
            progress.update(len(batch["text"]))
    return {"rows": row_count, "kept": text_count, "tokens": token_count + 2 * text_count}


@contextlib.contextmanager
def _tokenizer_threads() -> Iterator[None]:
    """Let the tokenizers library use several threads in this context.

    A process that forks while they are enabled, such as a DataLoader with workers, would wait
    forever for threads that do not exist in its child. They are therefore disabled again, also
    after an error.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def load_prepared(path: str | Path) -> TokenizedTexts:
    """Return the texts of a prepared dataset, memory-mapped.

    Raises:
        UserError: If the file of the texts is missing, or truncated, as after an incomplete copy.
    """
    file = Path(path) / "texts.arrow"
    expected = _read_summary(Path(path))["kept"]
    texts: TokenizedTexts | None = None
    try:
        texts = TokenizedTexts.from_dataset(Dataset.from_file(str(file)))
        reason = f"it contains {len(texts.lengths):,} of {expected:,} texts"
    # pyarrow raises several types of errors, and reads a file that ends between two batches.
    except (OSError, pyarrow.ArrowException) as error:
        reason = one_line(error)
    if texts is None or len(texts.lengths) != expected:
        raise UserError(
            f"{file} cannot be read: {reason}. Restore the file, or remove {path} to tokenize the "
            "texts again."
        )
    return texts


def _read_summary(path: Path) -> dict[str, Any]:
    """Return the content of prepared.json.

    Raises:
        UserError: If the file is damaged.
    """
    summary = read_json(path / "prepared.json")
    if not isinstance(summary, dict) or not {"dataset", "rows", "kept", "tokens"} <= {*summary}:
        raise UserError(
            f"{path / 'prepared.json'} must describe a prepared dataset, but it is damaged. Remove "
            f"{path} to tokenize the texts again."
        )
    return summary


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens and never truncated.

    Args:
        tokenizer: Fast tokenizer.
        texts: Texts, which may contain lone surrogates.
    """
    # Texts of files have no surrogates, but those of other datasets may.
    texts = [replace_surrogates(text) for text in texts]
    if not texts:
        return []

    # `verbose=False` disables the warning about texts beyond the context length.
    return tokenizer(
        texts,
        add_special_tokens=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


# ------------------------------------------------------------------------------------------------
# identity


def _dataset_key(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the settings in prepared.json that identify a prepared dataset."""
    return {
        **source_key(sources),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "vocab_size": len(tokenizer),
    }
