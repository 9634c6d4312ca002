"""Classifiers that run on batches of a token budget: labels, values or entities of texts.

NeoBERT runs packed, without padding. Other models run on padded batches of texts of similar length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.data import replace_surrogates
from ..common.errors import UserError
from ..common.loading import (
    check_model,
    choose_device,
    default_batch_tokens,
    load_config,
    load_tokenizer,
    text_limit,
)
from ..common.packing import pack
from ..common.task_file import CLASSIFICATION, MULTI_LABEL, REGRESSION, TOKENS, read_task_file
from ..embeddings.cpu_forward import CpuClassifier, try_fast_forward
from ..embeddings.options import check_limit
from ..embeddings.packed_encoder import token_batches
from ..embeddings.windows import WindowSettings, text_windows
from ..encoding.manifest import Truncation
from ..finetuning.calibration import probabilities
from ..finetuning.tagging import (
    Bounds,
    find_entities,
    is_bio,
    join_words,
    predicted_tags,
    split_at_spaces,
    split_words,
    to_bio,
    token_positions,
)
from ..finetuning.text_tasks import TextTask
from ..finetuning.tokenization import tokenize_rows
from .loading import default_activation, default_length, load_classifier
from .options import PredictOptions


if TYPE_CHECKING:
    # transformers 4 spells it `PretrainedConfig`.
    from transformers import PreTrainedConfig

# Maximum sequence length of a model without any limit.
_UNLIMITED_LENGTH = 512
# Number of decimal digits of probabilities.
_DIGITS = 6


@dataclass(frozen=True)
class TaskRecord:
    """Content of task.json.

    Attributes:
        task: Task, with its labels and text columns.
        max_length: Maximum sequence length in tokens during training, None if it is unknown.
        temperature: Temperature of the calibration, by which logits are divided.
        is_inferred: Whether the model has no task.json, so that the record is inferred from
            config.json. That file does not contain whether the model classifies texts or pairs.
    """

    task: TextTask
    max_length: int | None
    temperature: float
    is_inferred: bool = False

    @classmethod
    def from_model(cls, model: str, trust_remote_code: bool = False) -> "TaskRecord":
        """Read task.json of a model, or infer the task of another classifier from config.json.

        Raises:
            UserError: If the model is not a classifier or cannot be loaded.
        """
        record = read_task_file(model)
        if record is not None:
            # Labels of the input are not read, so their columns do not matter.
            task = TextTask(
                name=record["task"],
                text_columns=tuple(record["text_columns"]),
                label_columns=(),
                labels=tuple(record["labels"]),
                bio=record["bio"],
                # Models of earlier versions do not have the key.
                has_spaces=record.get("has_spaces", False),
            )
            return cls(task, record["max_length"], record["temperature"])

        # Other classifiers have no task.json. Their configuration determines the task.
        config = load_config(model, trust_remote_code)
        return cls(_task_of_config(config, model), None, 1.0, is_inferred=True)

    @property
    def column_counts(self) -> tuple[int, ...]:
        """Possible numbers of text columns."""
        if self.is_inferred and self.task.name != TOKENS:
            return (1, 2)
        return (len(self.task.text_columns),)


def _task_of_config(config: "PreTrainedConfig", model: str) -> TextTask:
    """Return the task of a classifier that neobert finetune has not trained.

    Raises:
        UserError: If the model is not a classifier.
    """
    architectures = " ".join(config.architectures or [])
    # The keys of `id2label` are not always in order.
    names: dict[Any, str] = dict(config.id2label or {})
    labels = tuple(str(names[number]) for number in range(len(names)))

    if "ForTokenClassification" in architectures:
        return TextTask(TOKENS, ("text",), (), labels, is_bio(labels))
    if "ForSequenceClassification" not in architectures:
        raise UserError(
            f"`model` must be a classifier, got {model} with the architecture "
            f"{architectures or 'unknown'}. Train one with neobert finetune."
        )

    if config.problem_type == "multi_label_classification":
        return TextTask(MULTI_LABEL, ("text",), (), labels)
    # The single output without a problem type is the score of a reranker, which is a value, too.
    if config.problem_type == "regression" or len(labels) == 1:
        return TextTask(REGRESSION, ("text",), ())
    return TextTask(CLASSIFICATION, ("text",), (), labels)


@dataclass(frozen=True)
class WordSpan:
    """Neighboring words of a text in a sequence.

    Attributes:
        first: Index of the first word in the text.
        positions: (W,) index of the first token of each word in the sequence; -1 for a word without
            a token.
    """

    first: int
    positions: np.ndarray


@dataclass(frozen=True)
class Batch:
    """Tokenized sequences of texts: one per text, or several windows per text.

    Attributes:
        ids: Token ids of each sequence.
        types: Token types of each sequence, for models with segments.
        rows: Index of the text of each sequence.
        words: Words of each sequence, for token classification.
        truncation: Truncation statistics.
    """

    ids: list[np.ndarray]
    types: list[np.ndarray] | None
    rows: np.ndarray
    words: list[WordSpan] | None
    truncation: Truncation


class PackedClassifier:
    """Classifier, regression model or token classifier with the options of `neobert predict`.

    Args:
        options: Options of the command.
        record: Task of the model.

    Raises:
        UserError: If the model cannot be loaded or used with the options.
    """

    def __init__(self, options: PredictOptions, record: TaskRecord) -> None:
        name = options.model.model
        trust_remote_code = options.model.trust_remote_code
        check_model(name)

        self.task = record.task
        self.temperature = record.temperature
        self.device = choose_device(options.inference.device)
        self.batch_tokens = options.inference.batch_tokens or default_batch_tokens(self.device)
        self.tokenizer = load_tokenizer(name, trust_remote_code)
        self.model = load_classifier(
            name, self.task.name, options.inference.dtype, self.device, trust_remote_code
        )

        # NeoBERT takes batches without padding. Batches of other models are padded.
        self.packs = self.model.config.model_type == "neobert"
        self._forward = CpuClassifier.from_model(self.model)

        # An option may exceed the length in training, but not the limit of the model.
        max_length = options.long_texts.max_length
        check_limit("max_length", max_length, text_limit(self.model, self.tokenizer))
        default = default_length(self.model, self.tokenizer, record.max_length)
        self.max_length = max_length or default or _UNLIMITED_LENGTH

        self.windows: WindowSettings | None = None
        if options.long_texts.long_texts == "windows":
            self.windows = self._window_settings(options.long_texts.overlap)

        # Words are located by character offsets, which only tokenizers with a Rust backend have.
        if self.task.name == TOKENS and not self.tokenizer.is_fast:
            raise UserError(
                "entities require a tokenizer with character offsets (a tokenizer.json), got a "
                "tokenizer written in Python."
            )

    def _window_settings(self, overlap: int | None) -> WindowSettings:
        """Return the settings of windows that are as long as the model allows.

        Raises:
            UserError: If the tokenizer has no offsets, or the overlap is too large.
        """
        # Special tokens are added to every window, and count toward the maximum length.
        special = self.tokenizer.num_special_tokens_to_add()
        window = max(1, self.max_length - special)
        if overlap is not None and overlap >= window:
            raise UserError(
                f"`overlap` must be less than {window}, `--max-length` without the special tokens, "
                f"got {overlap}."
            )
        return WindowSettings.from_model(
            self.tokenizer, self.max_length, window=window, overlap=overlap
        )

    # --------------------------------------------------------------------------------------------
    # tokens

    def tokenize(self, texts: Sequence[tuple[str, ...]], words: Sequence[Bounds]) -> Batch:
        """Return the sequences of texts, with their truncation statistics.

        Args:
            texts: One or two texts per row.
            words: Bounds of the words of each text, for token classification.
        """
        if self.windows is not None:
            return self._windows([text for (text,) in texts], words)

        ids: list[np.ndarray] = []
        types: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        lengths: list[int] = []
        is_tagged = self.task.name == TOKENS
        groups = tokenize_rows(self.tokenizer, texts, self.max_length, with_offsets=is_tagged)
        for encoded, group_lengths in groups:
            lengths += group_lengths
            ids += [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]
            # NeoBERT has no segments, so only other models need token types.
            if not self.packs and "token_type_ids" in encoded:
                types += [np.asarray(row, dtype=np.int64) for row in encoded["token_type_ids"]]
            if is_tagged:
                offsets += [np.asarray(row, dtype=np.int64) for row in encoded["offset_mapping"]]

        # Words beyond the maximum length have the position -1.
        spans = None
        if is_tagged:
            spans = [
                WordSpan(0, token_positions(bounds, row)) for bounds, row in zip(words, offsets)
            ]

        kept = [len(row) for row in ids]
        truncation = Truncation.from_lengths(kept, lengths)
        return Batch(ids, types or None, np.arange(len(ids)), spans, truncation)

    def _windows(self, texts: list[str], words: Sequence[Bounds]) -> Batch:
        """Return the windows of texts, see `tokenize`."""
        assert self.windows is not None
        is_tagged = self.task.name == TOKENS
        lengths: list[int] = []
        windows = text_windows(
            self.tokenizer,
            self.max_length,
            texts,
            prompt="",
            settings=self.windows,
            lengths=lengths,
            with_offsets=is_tagged,
        )

        spans = None
        if windows.offsets is not None:
            assert windows.starts is not None and windows.ends is not None
            word_bounds = [np.asarray(row, dtype=np.int64).reshape(-1, 2) for row in words]
            spans = []
            bounds = zip(windows.rows, windows.starts, windows.ends, windows.offsets)
            for row, start, end, offsets in bounds:
                # Words do not overlap, so their starts and ends are sorted.
                first = int(np.searchsorted(word_bounds[row][:, 1], start, side="right"))
                stop = int(np.searchsorted(word_bounds[row][:, 0], end, side="left"))
                positions = token_positions(word_bounds[row][first:stop], offsets)
                spans.append(WordSpan(first, positions))

        # Windows contain all tokens of a text, so nothing is truncated.
        truncation = Truncation.from_lengths(lengths, lengths)
        return Batch(windows.tokens, None, windows.rows, spans, truncation)

    # --------------------------------------------------------------------------------------------
    # logits

    @torch.inference_mode()
    def logits(self, batch: Batch) -> list[np.ndarray]:
        """Return the logits of each sequence in float32.

        Returns:
            One array per sequence in the order of the batch: (C,) for C labels, and (L, C) for a
            token classifier and a sequence of L tokens.

        Raises:
            UserError: If a value is not finite.
        """
        outputs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(batch.ids)
        lengths = [len(ids) for ids in batch.ids]
        for index in token_batches(lengths, self.batch_tokens, is_padded=not self.packs):
            ids = [batch.ids[i] for i in index]
            if self.packs:
                logits = self._packed(ids)
            else:
                types = None if batch.types is None else [batch.types[i] for i in index]
                logits = self._padded(ids, types)

            # Batches are sorted by length. The index restores the order of the texts.
            for i, row in zip(index, logits):
                if not np.isfinite(row).all():
                    raise UserError(
                        "the logits must be finite, got infinite or NaN values. Use `--dtype "
                        "float32`, unless the weights are damaged."
                    )
                outputs[i] = row
        return outputs

    def _packed(self, ids: list[np.ndarray]) -> list[np.ndarray]:
        """Return the logits of one packed batch."""
        # The fast pass of the CPU takes precedence over the forward of the model.
        fast_logits = try_fast_forward(self._forward, ids)
        if fast_logits is not None:
            return list(fast_logits.float().numpy())

        logits = self.model(**pack(ids, self.device)).logits.float().cpu().numpy()
        if self.task.name != TOKENS:
            return list(logits)

        # A token classifier returns the logits of all sequences in one row.
        bounds = np.cumsum([len(row) for row in ids])[:-1]
        return np.split(logits[0], bounds)

    def _padded(self, ids: list[np.ndarray], types: list[np.ndarray] | None) -> list[np.ndarray]:
        """Return the logits of one padded batch."""
        # `pad` also returns the attention mask.
        features: dict[str, Any] = {"input_ids": [row.tolist() for row in ids]}
        if types is not None:
            features["token_type_ids"] = [row.tolist() for row in types]
        inputs = self.tokenizer.pad(features, return_tensors="pt").to(self.device)
        logits = self.model(**inputs).logits.float().cpu().numpy()
        if self.task.name != TOKENS:
            return list(logits)

        # The padding is removed from the side where the tokenizer has added it.
        if self.tokenizer.padding_side == "left":
            return [row[-len(tokens) :] for row, tokens in zip(logits, ids)]
        return [row[: len(tokens)] for row, tokens in zip(logits, ids)]

    # --------------------------------------------------------------------------------------------
    # predictions

    def predict(
        self, texts: Sequence[Any], all_probabilities: bool = False
    ) -> tuple[list[dict[str, Any]], Truncation, int]:
        """Return the predictions of texts.

        Args:
            texts: A text, a pair of texts, or a list of words for token classification, per row.
            all_probabilities: Whether to return the probability of each label.

        Returns:
            Columns of each row, see `output_columns`; truncation statistics; number of tokens.
        """
        if not texts:
            return [], Truncation(), 0

        words: list[Bounds] = []
        rows: list[tuple[str, ...]] = []
        for text in texts:
            if self.task.name != TOKENS:
                row = (text,) if isinstance(text, str) else tuple(text)
                rows.append(tuple(map(replace_surrogates, row)))
                continue

            # Entities consist of words. A text is split into words as in training, and a list of
            # words is joined to a text. Both have the bounds of each word in the text.
            if isinstance(text, str):
                split = split_at_spaces if self.task.has_spaces else split_words
                joined, bounds = text, split(text)
            else:
                joined, bounds = join_words(text)
            rows.append((replace_surrogates(joined),))
            words.append(bounds)

        batch = self.tokenize(rows, words)
        logits = self.logits(batch)
        if self.task.name == TOKENS:
            results = self._entities(texts, rows, words, batch, logits)
        else:
            # The logits of a text are the mean of those of its windows. `sums[rows] += ...` would
            # add only one window per text, because the indices repeat.
            sums = np.zeros((len(rows), logits[0].shape[-1]))
            np.add.at(sums, batch.rows, np.stack(logits))
            counts = np.bincount(batch.rows, minlength=len(rows))
            results = self._labels(sums / counts[:, None], all_probabilities)
        return results, batch.truncation, sum(map(len, batch.ids))

    def _labels(self, logits: np.ndarray, all_probabilities: bool) -> list[dict[str, Any]]:
        """Return the values or labels of texts from their logits, (N, C)."""
        if self.task.name == REGRESSION:
            values = logits[:, 0]
            if default_activation(self.model.config) == "sigmoid":
                values = probabilities(values, self.temperature, multi_label=True)
            # The text of a float32 has the fewest digits that identify it, also for small values.
            return [{"prediction": float(str(np.float32(value)))} for value in values]

        multi_label = self.task.name == MULTI_LABEL
        labels = self.task.labels
        results = []
        for row in probabilities(logits, self.temperature, multi_label).round(_DIGITS).tolist():
            result: dict[str, Any] = {}
            if multi_label:
                # Labels are independent: a text has all labels above 0.5, which may be none.
                indices = [index for index, value in enumerate(row) if value > 0.5]
                result["prediction"] = [labels[index] for index in indices]
                result["probability"] = [row[index] for index in indices]
            else:
                best = int(np.argmax(row))
                result["prediction"] = labels[best]
                result["probability"] = row[best]
            if all_probabilities:
                result.update((f"probability_{name}", value) for name, value in zip(labels, row))
            results.append(result)
        return results

    def _entities(
        self,
        texts: Sequence[Any],
        rows: Sequence[tuple[str, ...]],
        words: Sequence[Bounds],
        batch: Batch,
        logits: Sequence[np.ndarray],
    ) -> list[dict[str, Any]]:
        """Return the entities of texts.

        Each word has the label with the highest probability, and labels of neighboring words form
        entities.

        Args:
            texts: Texts, or lists of words.
            rows: The same texts, with the words of a list joined.
            words: Bounds of the words of each text.
            batch: Sequences of the texts.
            logits: Logits of each sequence, (L, C).
        """
        results = []
        all_logits, all_covered = self._word_logits(words, batch, logits)
        for text, (joined,), bounds, values, is_covered in zip(
            texts, rows, words, all_logits, all_covered
        ):
            scores = probabilities(values, self.temperature, multi_label=False)
            tags = predicted_tags(self.task.labels, scores, is_covered)

            entities = []
            # Models that were trained elsewhere may have tags of BIOES or BILOU.
            entity_tags = to_bio(tags) if self.task.bio else tags
            for entity in find_entities(entity_tags, bounds, self.task.bio):
                index = np.arange(entity.first, entity.stop)
                # The probability of an entity is the mean over its words.
                entities.append(
                    {
                        "start": entity.start,
                        "end": entity.end,
                        "label": entity.label,
                        "text": joined[entity.start : entity.end],
                        "probability": round(float(scores[index].max(axis=-1).mean()), _DIGITS),
                    }
                )

            result: dict[str, Any] = {"prediction": entities}
            # Only texts that consist of words have a column with one tag per word: lists, or words
            # separated by spaces. A word that was truncated has no tag, unless `O` is a label.
            if self.task.has_spaces or not isinstance(text, str):
                result["predicted_tags"] = [
                    tag if tag in self.task.labels else None for tag in tags
                ]
            results.append(result)
        return results

    def _word_logits(
        self, words: Sequence[Bounds], batch: Batch, logits: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the logits of the words of texts.

        A word in several windows gets the logits of the window in which it is most central.

        Args:
            words: Bounds of the words of each text.
            batch: Sequences of the texts.
            logits: Logits of each sequence, (L, C).

        Returns:
            Logits of the words of each text, (words, C), and whether a word has logits, (words,)
            bool: a word that was truncated has none.
        """
        assert batch.words is not None
        count = len(self.task.labels)
        word_logits = [np.zeros((len(bounds), count), np.float32) for bounds in words]
        # Distance of each word to the nearer end of its best window, in tokens.
        margins = [np.full(len(bounds), -1) for bounds in words]

        for row, span, values in zip(batch.rows, batch.words, logits):
            # A word near an end of the window has little context. A word without a token has the
            # distance -1 and never wins.
            positions = span.positions
            distances = np.minimum(positions, len(values) - 1 - positions)
            distances[positions < 0] = -1

            # Slices of arrays are views, so the arrays of the text are updated.
            covered = slice(span.first, span.first + len(positions))
            is_better = distances > margins[row][covered]
            word_logits[row][covered][is_better] = values[positions[is_better]]
            margins[row][covered][is_better] = distances[is_better]
        return word_logits, [margin >= 0 for margin in margins]
