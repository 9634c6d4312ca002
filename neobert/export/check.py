"""Comparison of an exported model with torch.

The outputs of the engine on texts of many lengths are compared with those of torch in float32. A
model that differs too much is discarded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError
from .source import SourceModel


# Function of input_ids and attention_mask, int64 tensors of shape (B, L), that returns the outputs
# of an engine by name, as arrays or tensors.
Runner = Callable[[torch.Tensor, torch.Tensor], Mapping[str, Any]]

# English sentences of several types: prose, questions, code, numbers and names with accents.
# Longer texts are composed of several of them.
SENTENCES = (
    "Rain.",
    "Where can I borrow books?",
    "A bird of prey with a hooked beak.",
    "The committee met again on Tuesday, and nothing was decided.",
    "Please restart the server after you have changed its configuration.",
    "She paid 42.50 for two tickets, a programme, and a small bag of peanuts!",
    "In 1912 the ship left Southampton with 2,224 people on board and sank four days later.",
    "def forward(self, x): return self.w3(silu(gate) * value)",
    "The quick brown fox jumps over the lazy dog.",
    "What a dreadful film; I would not watch it again if you paid me.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Dr. Alvarez's results (see Table 3) were confirmed by two independent laboratories in Kyoto "
    "and São Paulo.",
    "Interest rates rose by a quarter of a percentage point, which surprised most economists.",
    "Boil the potatoes for 20 minutes, drain them, and mash them with butter, milk and a pinch of "
    "salt.",
    "He had never seen the sea before, and he stood there for a long time without saying a word.",
    "Error 404: the page that you asked for does not exist on this server.",
)

# Lengths of the compared texts in tokens, without special tokens: very short ones, some around
# powers of two, and long ones.
_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 62, 90, 127, 200)
_LONG = 510
# An output with fewer values per token has no meaningful cosine per token. The values of a text are
# compared as one vector then.
_MIN_VALUES_PER_TOKEN = 16


@dataclass(frozen=True)
class EngineAgreement:
    """Similarity of an engine's outputs to those of torch.

    Attributes:
        token_cosine: Smallest cosine similarity of the vectors of a non-padding token (hidden
            states or masked-LM logits), or None if the outputs have no vectors per token.
        pooled_cosine: Smallest cosine similarity of the vectors of a text: the pooled hidden
            states, or the logits of a head. Without a pooling module the hidden states are
            averaged.
    """

    token_cosine: float | None
    pooled_cosine: float

    def __str__(self) -> str:
        """Return both similarities in words."""
        token = ""
        if self.token_cosine is not None:
            token = f"worst token cosine {self.token_cosine:.6f}, "
        return f"{token}worst pooled cosine {self.pooled_cosine:.6f}"

    def check(self, name: str, min_token_cosine: float, min_pooled_cosine: float) -> None:
        """Check that both similarities reach their bounds.

        Args:
            name: Name of the model, for the message.
            min_token_cosine: Lower bound of `token_cosine`.
            min_pooled_cosine: Lower bound of `pooled_cosine`.

        Raises:
            UserError: If a similarity is below its bound, or NaN.
        """
        bounds = (
            ("token", self.token_cosine, min_token_cosine),
            ("pooled", self.pooled_cosine, min_pooled_cosine),
        )
        for cosine_name, value, bound in bounds:
            # The comparison is also false if the value is NaN.
            if value is not None and not value >= bound:
                raise UserError(
                    f"{name}: the worst {cosine_name} cosine to torch must be at least {bound}, "
                    f"got {value:.6f}. The export was discarded."
                )


@dataclass(frozen=True)
class GraphFile:
    """Entry of export.json about an exported file.

    Attributes:
        precision: Value of `--precisions`.
        token_cosine: As in `EngineAgreement`.
        pooled_cosine: As in `EngineAgreement`.
        external_data: Whether the weights are in another file; None if the format has no such file.
    """

    precision: str
    token_cosine: float | None
    pooled_cosine: float
    external_data: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it is written."""
        entry: dict[str, Any] = {
            "precision": self.precision,
            "token": self.token_cosine,
            "pooled": self.pooled_cosine,
        }
        if self.external_data is not None:
            entry["external_data"] = self.external_data
        return entry


@dataclass(frozen=True)
class Precision:
    """Value of `--precisions`.

    Attributes:
        file: Name of the file, as the programs that read the folder expect it.
        min_token_cosine: Lower bound of the worst token cosine.
        min_pooled_cosine: Lower bound of the worst pooled cosine.
    """

    file: str
    min_token_cosine: float
    min_pooled_cosine: float

    def verify(
        self, name: str, engine: str, reference: "Reference", run: Runner, summary: str
    ) -> GraphFile:
        """Compare an exported model with torch, and print one line about it.

        Args:
            name: Name of the precision.
            engine: Name of the engine.
            reference: Outputs of torch.
            run: Function that runs the engine.
            summary: Name and size of the file, for the line.

        Returns:
            The entry of export.json.

        Raises:
            UserError: If the model differs too much.
        """
        # tqdm.write prints above the progress bar, which print would break.
        title = f"{name} in {engine}"
        agreement = reference.agreement(run, title)
        tqdm.write(f"{name:<5} {summary}  {agreement}")
        agreement.check(title, self.min_token_cosine, self.min_pooled_cosine)
        return GraphFile(name, agreement.token_cosine, agreement.pooled_cosine)


class Reference:
    """Outputs of torch in float32 for texts of 3 to 512 tokens, single and in right-padded batches.

    Texts that are longer than the model allows are left out.

    Attributes:
        batches: Pairs of input_ids and attention_mask, int64 tensors of shape (B, L).
    """

    def __init__(self, source: SourceModel) -> None:
        self._source = source
        self.batches = list(_batches(source))
        # Computed once: every precision of an export is compared with the same outputs.
        self._expected = []
        with torch.inference_mode():
            for input_ids, attention_mask in self.batches:
                outputs = source.model(input_ids, attention_mask=attention_mask)
                self._expected.append(
                    {name: x.float() for name, x in outputs.items() if torch.is_tensor(x)}
                )

    def agreement(self, run: Runner, title: str = "comparing") -> EngineAgreement:
        """Compare an engine with torch.

        Args:
            run: Function that runs the engine. It returns the outputs of torch:
                "last_hidden_state" (B, L, D), "logits", or "start_logits" and "end_logits"; also
                "sentence_embedding" (B, D) if the engine pools.
            title: Title of the progress bar, and name of the model in messages.

        Raises:
            UserError: If an output is missing, or has another shape.
        """
        tokens: list[torch.Tensor] = []
        pooled: list[torch.Tensor] = []
        actual_rows: list[torch.Tensor] = []
        expected_rows: list[torch.Tensor] = []
        progress = tqdm(self.batches, desc=title, leave=False, disable=None)
        for (input_ids, attention_mask), expected in zip(progress, self._expected):
            outputs = {
                name: torch.as_tensor(value).float()
                for name, value in run(input_ids, attention_mask).items()
            }
            # Outputs at padding tokens are undefined, so they are not compared.
            mask = attention_mask.bool()
            for name, values in expected.items():
                _check_shape(title, name, outputs.get(name), values)
                actual = outputs[name]
                if values.dim() == 2 and name == "logits":
                    # A text has few logits. Those of all texts are compared as one vector below.
                    actual_rows.append(actual)
                    expected_rows.append(values)
                    continue

                # Hidden states and masked-LM logits have a vector per token.
                if values.dim() == 3 and values.shape[-1] >= _MIN_VALUES_PER_TOKEN:
                    tokens.append(_cosine(actual[mask], values[mask]))
                # A text is compared by its embedding, or else by all values of its tokens.
                if name == "last_hidden_state":
                    pooled += self._pooled_cosines(outputs, values, attention_mask)
                else:
                    for x, y, row_mask in zip(actual, values, mask):
                        pooled.append(_cosine(x[row_mask].flatten(), y[row_mask].flatten()))

        if actual_rows:
            all_rows = torch.cat(actual_rows).flatten()
            pooled.append(_cosine(all_rows, torch.cat(expected_rows).flatten()))
        return EngineAgreement(_worst(tokens) if tokens else None, _worst(pooled))

    def _pooled_cosines(
        self, outputs: Mapping[str, torch.Tensor], hidden: torch.Tensor, mask: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the cosines of the pooled vectors.

        The hidden states of the engine are pooled here. If the engine pools, too, its own output is
        also compared.
        """
        # A model without a pooling module is often used with mean pooling.
        pooling = self._source.pooling or _mean
        expected = pooling(hidden, mask)
        cosines = [_cosine(pooling(outputs["last_hidden_state"], mask), expected)]
        if "sentence_embedding" in outputs:
            cosines.append(_cosine(outputs["sentence_embedding"], expected))
        return cosines


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the non-padding tokens, (B, L, D) -> (B, D)."""
    mask = mask[..., None]
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1)


def _check_shape(
    title: str, name: str, actual: torch.Tensor | None, expected: torch.Tensor
) -> None:
    """Check that an engine returned an output of the right shape.

    Raises:
        UserError: If the output is missing, or has another shape.
    """
    if actual is None or actual.shape != expected.shape:
        shape = "nothing" if actual is None else f"{tuple(actual.shape)}"
        raise UserError(
            f"{title}: the output {name} must have the shape {tuple(expected.shape)}, got {shape}. "
            "The export was discarded."
        )


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarities of the last dimension in float64."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def _worst(cosines: Sequence[torch.Tensor]) -> float:
    """Return the smallest of all values, or NaN if one is NaN."""
    # Unlike min() of Python, that of torch propagates NaN.
    return torch.cat([cosine.flatten() for cosine in cosines]).min().item()


def make_texts(source: SourceModel, lengths: Sequence[int], first: int = 0) -> Iterator[list[int]]:
    """Yield the token ids of one text per length, with special tokens.

    Each text consists of consecutive sentences and is truncated to its length.

    Args:
        source: Model and tokenizer.
        lengths: Sequence lengths without special tokens. Lengths beyond the model's are skipped.
        first: Index of the first sentence of the first text.
    """
    extra = source.tokenizer.num_special_tokens_to_add()
    for index, length in enumerate(lengths):
        if length + extra > source.max_length:
            continue
        # Every text starts with another sentence, so equal lengths have different texts.
        start = (first + index) % len(SENTENCES)
        # Every sentence has at least one token, so this text has at least `length` tokens.
        rotated = SENTENCES[start:] + SENTENCES[:start]
        text = " ".join(rotated * (length // len(SENTENCES) + 1))
        yield source.tokenizer(text, truncation=True, max_length=length + extra)["input_ids"]


def pad_right(texts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lists of token ids as input_ids and attention_mask, int64 of shape (B, L)."""
    attention_mask = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    input_ids = torch.full_like(attention_mask, pad_id)
    for row, text in enumerate(texts):
        input_ids[row, : len(text)] = torch.tensor(text)
        attention_mask[row, : len(text)] = 1
    return input_ids, attention_mask


def _batches(source: SourceModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of `Reference`.

    The lengths are mixed, so every batch contains padding. The longest text is a batch of its
    own.
    """
    longest = min(_LONG, source.max_length - source.tokenizer.num_special_tokens_to_add())
    texts = list(make_texts(source, _LENGTHS))
    pad_id = source.config.pad_token_id or 0
    # Every second length is in the same batch, so each has both short and long texts.
    for start in range(2):
        yield pad_right(texts[start::2], pad_id)
    yield pad_right(list(make_texts(source, [longest], first=7)), pad_id)
