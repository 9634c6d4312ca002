"""What llama.cpp computes of a GGUF file of its architecture neo-bert, in numpy and float32, from
the file alone.

Written after the engine's own graph (src/models/neo-bert.cpp, ggml's RoPE and its WordPiece
tokenizer), not after the writer: q, k and v are three blocks of D rows, w12 is two blocks of the
feed-forward's width.
"""

import unicodedata

import gguf
import numpy as np


class Engine:
    """A file, opened.

    Attributes:
        keys: {name without the architecture: value}.
        pooling: `gguf.PoolingType`.
    """

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        prefix = f"{reader.get_field('general.architecture').contents()}."
        assert prefix == "neo-bert.", prefix
        self.keys = {
            name.removeprefix(prefix): field.contents() for name, field in reader.fields.items()
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.pooling = gguf.PoolingType(self.keys.get("pooling_type", 0))
        self._ids = {word: i for i, word in enumerate(self.keys["tokenizer.ggml.tokens"])}

    def _weight(self, name):
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(
            tuple(reversed(tensor.shape.tolist()))
        )

    # ------------------------------------------------------------------------------------------
    # tokenizer

    def tokenize(self, text):
        """Token ids with special tokens: words in lower case and without accents, cut from the left
        into the longest pieces that there are."""
        ids = [self.keys["tokenizer.ggml.bos_token_id"]]
        for word in self._words(text):
            ids += self._pieces(f"\u2581{word}")
        return [*ids, self.keys["tokenizer.ggml.seperator_token_id"]]

    def _words(self, text):
        text = unicodedata.normalize("NFC", text)
        if self.keys.get("tokenizer.ggml.normalizer.strip_accents", True):
            text = "".join(
                c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn"
            )
        words = [""]
        for c in (
            text.lower() if self.keys.get("tokenizer.ggml.normalizer.lowercase", True) else text
        ):
            if c.isspace():
                words.append("")
            elif (
                unicodedata.category(c)[0] == "P"
                or (c.isascii() and not c.isalnum() and c.isprintable())
                or 0x4E00 <= ord(c) <= 0x9FFF
            ):
                words += [c, ""]
            elif unicodedata.category(c) not in ("Cc", "Cf"):
                words[-1] += c
        return filter(None, words)

    def _pieces(self, word):
        pieces, start = [], 0
        while start < len(word):
            end = next(
                (end for end in range(len(word), start, -1) if word[start:end] in self._ids), None
            )
            if end is None:
                return [self.keys["tokenizer.ggml.unknown_token_id"]]
            pieces.append(self._ids[word[start:end]])
            start = end
        return pieces

    # ------------------------------------------------------------------------------------------
    # forward

    def run(self, ids, mask):
        """What the file computes of (B, L) tensors: `last_hidden_state`, zero at padding, and
        `sentence_embedding`; of a classifier `logits`."""
        texts = [row[real].numpy() for row, real in zip(ids, mask.bool())]
        hidden = self.hidden(texts)
        if self.pooling == gguf.PoolingType.RANK:
            return {"logits": np.stack([self._classify(states[0]) for states in hidden])}
        padded = np.zeros((*ids.shape, hidden[0].shape[-1]), np.float32)
        for row, states in zip(padded, hidden):
            row[: len(states)] = states
        pooled = (
            {}
            if self.pooling == gguf.PoolingType.NONE
            else {"sentence_embedding": np.stack([self._pool(states) for states in hidden])}
        )
        return {"last_hidden_state": padded, **pooled}

    def hidden(self, texts):
        """Normed hidden states, (L, D) each, of arrays of token ids."""
        embedding = self._weight("token_embd.weight")
        states = [embedding[ids] for ids in texts]
        for i in range(self.keys["block_count"]):
            states = self._block(i, states)
        return [self._norm(x, self._weight("enc.output_norm.weight")) for x in states]

    def _block(self, i, states):
        names = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
        attn_norm, qkv, out, ffn_norm, up, down = (
            self._weight(f"blk.{i}.{name}.weight") for name in names
        )
        outputs = []
        for x in states:
            x = x + self._attend(self._norm(x, attn_norm) @ qkv.T) @ out.T
            both = self._norm(x, ffn_norm) @ up.T
            assert both.shape[-1] == 2 * self.keys["feed_forward_length"], "it does not load"
            gate, value = np.split(both, 2, axis=1)
            outputs.append(x + (gate / (1.0 + np.exp(-gate)) * value) @ down.T)
        return outputs

    def _norm(self, x, weight):
        epsilon = self.keys["attention.layer_norm_rms_epsilon"]
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon) * weight

    def _attend(self, qkv):
        """(L, 3 D) of three blocks to (L, D)."""
        length, heads = len(qkv), self.keys["attention.head_count"]
        q, k, v = (
            part.reshape(length, heads, -1).swapaxes(0, 1) for part in np.split(qkv, 3, axis=1)
        )
        q, k = self._rotate(q), self._rotate(k)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1], dtype=np.float32)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (
            (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(length, -1)
        )

    def _rotate(self, x):
        """(H, L, K) with adjacent pairs turned by their angles: ggml's `rope_yarn`."""
        length, head_dim = x.shape[1:]
        pairs = np.arange(head_dim // 2)
        base, kind = self.keys["rope.freq_base"], self.keys.get("rope.scaling.type", "none")
        angles = np.outer(np.arange(length), base ** (-2.0 * pairs / head_dim))
        magnitude = 1.0
        if kind != "none":
            factor = self.keys["rope.scaling.factor"]
            interpolated = angles / factor
            if kind == "yarn":
                trained = self.keys.get(
                    "rope.scaling.original_context_length", self.keys["context_length"]
                )
                # Keys for other numbers than 32 and 1 are read for other architectures alone.
                bounds = [
                    head_dim * np.log(trained / (n * 2 * np.pi)) / (2 * np.log(base))
                    for n in (32, 1)
                ]
                low, high = max(0, np.floor(bounds[0])), min(head_dim - 1, np.ceil(bounds[1]))
                kept = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
                interpolated = interpolated * (1 - kept) + angles * kept
                magnitude = self.keys.get("rope.scaling.attn_factor", 1.0) * (
                    1 + 0.1 * np.log(factor)
                )
            angles = interpolated
        cos, sin = (
            np.float32(magnitude) * function(angles).astype(np.float32)
            for function in (np.cos, np.sin)
        )
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def _pool(self, states):
        kinds = gguf.PoolingType
        return {
            kinds.MEAN: lambda: states.mean(axis=0),
            kinds.CLS: lambda: states[0],
            kinds.LAST: lambda: states[-1],
        }[self.pooling]()

    def _classify(self, first):
        dense = np.tanh(self._weight("cls.weight") @ first + self._weight("cls.bias"))
        return self._weight("cls.output.weight") @ dense + self._weight("cls.output.bias")
