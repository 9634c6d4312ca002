"""Manifest of an output of `neobert encode`: the model and the settings of its embeddings."""

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow

from ..common.errors import UserError, shortened


@dataclass(frozen=True)
class Truncation:
    """Truncation statistics.

    Attributes:
        texts: Number of texts that were truncated.
        tokens: Number of tokens that were removed.
        longest: Number of tokens of the longest text.
    """

    texts: int = 0
    tokens: int = 0
    longest: int = 0

    @classmethod
    def from_lengths(cls, kept: Sequence[int], lengths: Sequence[int]) -> "Truncation":
        """Return the statistics of texts.

        Args:
            kept: Number of tokens of each text after truncation.
            lengths: Number of tokens of each text before truncation.
        """
        removed = [length - count for count, length in zip(kept, lengths)]
        texts = sum(count > 0 for count in removed)
        return cls(texts, sum(removed), max(lengths, default=0))

    def __add__(self, other: "Truncation") -> "Truncation":
        longest = max(self.longest, other.longest)
        return Truncation(self.texts + other.texts, self.tokens + other.tokens, longest)


@dataclass(frozen=True)
class Manifest:
    """Model and settings of the embeddings of an output, in JSON types.

    Attributes:
        model: Name of the model's directory, or its name on the Hub.
        revision: Commit of a model of the Hub.
        digest: Digest of the weights, the configuration and the tokenizer.
        pooling: Name of the pooling.
        normalized: Whether the embeddings have unit length.
        prompt: Text before each text.
        max_length: Maximum number of tokens.
        long_texts: "truncate", or the window size and the overlap.
        dtype: Precision of the model.
        output_dtype: Precision of the stored embeddings.
        dimension: Embedding dimension.
        version: Version of this package.
        settings: Options that affect results; a resumed run must have the same ones.
        ranges: Minimum and maximum of each dimension for int8, which reconstruct the values.
        schema: Arrow schema of the parts, serialized, in base64.
    """

    model: str
    revision: str | None
    digest: str
    pooling: str
    normalized: bool
    prompt: str
    max_length: int | None
    long_texts: str | dict[str, int]
    dtype: str
    output_dtype: str
    dimension: int
    version: str
    settings: dict[str, Any]
    ranges: list[list[float]] | None
    schema: str

    @classmethod
    def from_json(cls, values: Any, path: str) -> "Manifest":
        """Return the manifest that `path` contains.

        Raises:
            UserError: If another version of this package wrote the manifest.
        """
        # The fields identify the format: a version with other fields has another one.
        names = {item.name for item in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise UserError(
                f"{path} must have been written by this version of neobert encode, got another "
                "format. Choose another output, or use the version that wrote it."
            )
        return cls(**values)

    def to_json(self) -> str:
        """Return the manifest as the text of a JSON file."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1)

    @property
    def arrow_schema(self) -> pyarrow.Schema:
        """Schema of the embedding files."""
        return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(self.schema)))

    def check_settings(self, settings: Mapping[str, Any], path: str) -> None:
        """Raise UserError unless the output at `path` has these settings."""
        # The message names the first difference. Long values are shortened.
        for name, value in settings.items():
            expected = self.settings.get(name)
            if expected != value:
                texts = [shortened(json.dumps(item), 200) for item in (expected, value)]
                raise UserError(
                    f"`{name}` must be {texts[0]} as in {path}, got {texts[1]}. Use the same "
                    "value, or choose another output."
                )

    def check_prompt(self, prompt: str, path: str) -> None:
        """Raise UserError unless the embeddings of the output at `path` have this prompt."""
        # The settings contain the options only, and not the default prompt of the model.
        if self.prompt != prompt:
            raise UserError(
                f"the prompt must be {self.prompt!r} as in {path}, got {prompt!r}. Choose another "
                "output."
            )


def encode_schema(schema: pyarrow.Schema) -> str:
    """Return an Arrow schema as base64 text."""
    return base64.b64encode(schema.serialize()).decode()
