"""What made the vectors of a file, in its metadata: vectors of two stamps are not to be
compared."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..common import __version__
from ..common.errors import UserError, shortened


STAMP = "neobert_vectors"  # key of a `Stamp` in the metadata of a part and of an output file


@dataclass(frozen=True)
class Stamp:
    """What made vectors.

    Attributes:
        model: name on the Hub, or of the folder.
        revision: commit on the Hub, None of a folder.
        digest: of `common.identity.model_digest`.
        pooling: "mean", "cls", or what the model has.
        normalized: whether the vectors have length 1.
        prompt: text before each text.
        max_length: tokens that the model reads at a time.
        long_texts: "cut", or of windows {"window", "overlap"}.
        dtype: of the model.
        output_dtype: of the numbers in the file.
        width: numbers of a vector.
        version: of neobert.
    """

    model: str
    revision: str | None
    digest: str
    pooling: str
    normalized: bool
    prompt: str
    max_length: int | None
    long_texts: str | dict
    dtype: str
    output_dtype: str
    width: int
    version: str = __version__

    @classmethod
    def of(cls, encoder, prompt, arguments, digest, windows=None):
        """The stamp of a run.

        Args:
            encoder: `PackedEncoder`.
            prompt: text before each text.
            arguments: `EncodeArguments`.
            digest: of the model that they name, of `common.identity.model_digest`.
            windows: `WindowSettings`, None where texts are cut.
        """
        folder = Path(arguments.model)
        config = getattr(encoder.sentence_transformer[0].auto_model, "config", None)
        return cls(
            model=folder.resolve().name if folder.exists() else arguments.model,
            revision=None if folder.exists() else getattr(config, "_commit_hash", None),
            digest=digest,
            pooling=encoder.pooling,
            normalized=arguments.normalize or encoder.normalizes,
            prompt=prompt,
            max_length=encoder.max_length,
            long_texts="cut" if windows is None else asdict(windows),
            dtype=arguments.dtype,
            output_dtype=arguments.output_dtype,
            width=encoder.width,
        )

    def text(self):
        """As it is in metadata."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, metadata):
        """The stamp in a file's metadata, {text: text}; None where there is none that can be
        read."""
        try:
            found = json.loads(metadata.get(STAMP, ""))
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None

    def check_same(self, other, place):
        """Raises UserError unless vectors of `other` may stand beside those of this stamp, which
        are in `place`. The name of the model and the version may differ."""
        named = "unknown" in (self.digest, other.digest)
        if self.digest != other.digest or (named and self.model != other.model):
            told = ("model", *(f"{stamp.model} ({stamp.digest})" for stamp in (self, other)))
        else:
            free = ("model", "revision", "version")
            pairs = zip(asdict(self).items(), asdict(other).values())
            differing = (
                (name.replace("_", " "), mine, theirs)
                for (name, mine), theirs in pairs
                if name not in free and mine != theirs
            )
            told = next(differing, None)
        if told is not None:
            name, before, now = told[0], *(shortened(repr(value), 200) for value in told[1:])
            raise UserError(
                f"{place} has vectors of {name} {before}, but {now} was given; give the same, or "
                "choose another output"
            )
