"""The proof of an export: its outputs on texts of many lengths are those of torch in float32, or it
is not kept."""

from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from ..common.errors import UserError


# English of several kinds, as it is written; longer texts are made of several of them.
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
# Tokens of the texts that are compared, special tokens apart: 1 and 2, around a power of two, and
# long ones.
_LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 62, 90, 127, 200)
_LONG = 510
# Outputs with fewer numbers a token have too few values for a cosine per token: one flattened
# vector per text is compared.
_FEW = 16


@dataclass(frozen=True)
class Agreement:
    """How near an engine is to torch.

    Attributes:
        token: worst cosine between the vectors (hidden states or masked-LM logits) of a real token;
            None where tokens have none.
        pooled: worst cosine between the vectors of a text: pooled as the folder says, else the mean
            of its real tokens; for heads, its logits.
    """

    token: float | None
    pooled: float

    def __str__(self):
        token = "" if self.token is None else f"worst token cosine {self.token:.6f}, "
        return f"{token}worst pooled cosine {self.pooled:.6f}"

    def check(self, what, token, pooled):
        """Raises UserError if a cosine is below its bound, or not a number."""
        for name, value, bound in (("token", self.token, token), ("pooled", self.pooled, pooled)):
            if value is not None and not value >= bound:
                raise UserError(
                    f"{what}: the worst {name} cosine to torch is {value:.6f}, below {bound}, so "
                    "it was not kept"
                )


@dataclass(frozen=True)
class Precision:
    """A precision of `--precisions`.

    Attributes:
        file: name of the model, as those who read the folder expect it.
        token, pooled: bounds of the worst cosines to torch.
    """

    file: str
    token: float
    pooled: float

    def prove(self, what, reference, run, written):
        """Compares what was written with torch and prints one line.

        Args:
            what: "fp16 in ONNX Runtime" for example.
            reference: Reference.
            run: as in `Reference.agreement`.
            written: name and size of the file, for the line.
        Returns:
            the entry of export.json.
        Raises:
            UserError: it is not near enough.
        """
        name, agreement = what.split()[0], reference.agreement(run, what)
        tqdm.write(f"{name:<5} {written}  {agreement}")
        agreement.check(what, self.token, self.pooled)
        return {"precision": name, "token": agreement.token, "pooled": agreement.pooled}


class Reference:
    """What torch answers, in float32, to texts of 3 to 512 tokens (or as many as the model takes),
    alone and in right-padded batches.

    Attributes:
        batches: list of (input_ids, attention_mask), int64 tensors (B, L).
    """

    def __init__(self, source):
        self._source = source
        self.batches = list(_batches(source))
        with torch.inference_mode():
            outputs = [self._source.model(ids, attention_mask=mask) for ids, mask in self.batches]
        self._expected = [
            {k: v.float() for k, v in found.items() if torch.is_tensor(v)} for found in outputs
        ]

    def agreement(self, run, what="comparing"):
        """Compares an engine with torch.

        Args:
            run: function of (input_ids, attention_mask), int64 tensors (B, L), that returns a
                mapping of output names to arrays or tensors: "last_hidden_state" (B, L, D) or
                "logits" or "start_logits" and "end_logits" as torch has them, and also
                "sentence_embedding" (B, D) where the engine pools itself.
            what: for the progress bar.
        """
        tokens, pooled, rows = [], [], []
        for (ids, mask), expected in zip(
            tqdm(self.batches, desc=what, leave=False, disable=None), self._expected
        ):
            given = {name: torch.as_tensor(value).float() for name, value in run(ids, mask).items()}
            for name, values in expected.items():
                _check_shape(what, name, given.get(name), values)
                if values.dim() == 2 and name == "logits":  # of texts
                    rows.append((given[name], values))
                    continue
                real = mask.bool()
                if values.dim() == 3 and values.shape[-1] >= _FEW:
                    tokens.append(_cosine(given[name][real], values[real]))
                if name == "last_hidden_state":
                    pooled += self._pooled(given, values, mask)
                else:
                    pooled += [
                        _cosine(a[m].flatten(), b[m].flatten())
                        for a, b, m in zip(given[name], values, real)
                    ]
        if rows:  # few numbers a text: all texts are one vector
            pooled.append(_cosine(*(torch.cat(side).flatten() for side in zip(*rows))))
        return Agreement(_worst(tokens) if tokens else None, _worst(pooled))

    def _pooled(self, given, hidden, mask):
        """Cosines of the pooled vectors: that of the engine itself if it has one, and the one that
        readers make of its hidden states."""
        pooling = self._source.pooling or _mean
        expected = pooling(hidden, mask)
        found = [_cosine(pooling(given["last_hidden_state"], mask), expected)]
        if "sentence_embedding" in given:
            found.append(_cosine(given["sentence_embedding"], expected))
        return found


def _mean(hidden, mask):
    """Mean of the real tokens, (B, D)."""
    mask = mask[..., None]
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1)


def _check_shape(what, name, given, expected):
    if given is None or given.shape != expected.shape:
        shape = "nothing" if given is None else f"{tuple(given.shape)}"
        raise UserError(
            f"{what}: the output {name} should be {tuple(expected.shape)}, but is {shape}, so it "
            "was not kept"
        )


def _cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def _worst(cosines):
    """The smallest of all, as a number; NaN if there is one."""
    return torch.cat([cosine.flatten() for cosine in cosines]).min().item()


def make_texts(source, lengths, first=0):
    """Token ids, with special tokens, of one text for each length (special tokens apart): sentences
    one after another, cut there.

    Args:
        source: Source.
        lengths: in tokens; longer than the model takes are left out.
        first: sentence to begin with, so that other texts can be had.
    """
    extra = source.tokenizer.num_special_tokens_to_add()
    for place, length in enumerate(lengths):
        if length + extra <= source.max_length:
            start = (first + place) % len(SENTENCES)
            # Every sentence has a token or more.
            text = " ".join(
                (SENTENCES[start:] + SENTENCES[:start]) * (length // len(SENTENCES) + 1)
            )
            yield source.tokenizer(text, truncation=True, max_length=length + extra)["input_ids"]


def padded(texts, padding):
    """(input_ids, attention_mask), int64 (B, L), of lists of ids, padded on the right."""
    mask = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    ids = torch.full_like(mask, padding)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    return ids, mask


def _batches(source):
    """The batches of `Reference`: lengths mixed, so that every batch has padding; then the longest
    text alone."""
    longest = min(_LONG, source.max_length - source.tokenizer.num_special_tokens_to_add())
    texts = list(make_texts(source, _LENGTHS))
    padding = source.config.pad_token_id or 0
    for start in range(2):
        yield padded(texts[start::2], padding)
    yield padded(list(make_texts(source, [longest], first=7)), padding)
