"""Reference implementation of llama.cpp's architecture "neo-bert", in numpy and float32.

All settings and weights are read from a GGUF file. The code follows llama.cpp
(src/models/neo-bert.cpp, the RoPE of ggml and its WordPiece tokenizer) and not the code that writes
the file, so that a test with it can detect errors of the writer. The rows of attn_qkv are three
blocks of D rows, for q, k and v. The rows of ffn_up are two blocks, for the gate and the values.
"""

import unicodedata

import gguf
import numpy as np


class Engine:
    """Model of a GGUF file.

    Attributes:
        keys: Values of the keys by name, without the prefix "neo-bert.".
        pooling: Pooling of the file, a `gguf.PoolingType`.
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
        """Return a tensor in float32. GGUF lists its dimensions in reverse order."""
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(
            tuple(reversed(tensor.shape.tolist()))
        )

    # ------------------------------------------------------------------------------------------
    # Tokenizer

    def tokenize(self, text):
        """Return the token ids of a text, with special tokens.

        Each word is split into the longest tokens of the vocabulary, from left to right.
        """
        ids = [self.keys["tokenizer.ggml.bos_token_id"]]
        for word in self._words(text):
            ids += self._split_word(f"\u2581{word}")
        return [*ids, self.keys["tokenizer.ggml.seperator_token_id"]]

    def _words(self, text):
        """Return the normalized words of a text. Punctuation and ideographs are words."""
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

    def _split_word(self, word):
        """Return the token ids of a word."""
        ids = []
        start = 0
        while start < len(word):
            end = next(
                (end for end in range(len(word), start, -1) if word[start:end] in self._ids), None
            )
            if end is None:
                return [self.keys["tokenizer.ggml.unknown_token_id"]]
            ids.append(self._ids[word[start:end]])
            start = end
        return ids

    # ------------------------------------------------------------------------------------------
    # Forward pass

    def run(self, ids, mask):
        """Return the outputs for a padded batch.

        Args:
            ids: (B, L) token ids.
            mask: (B, L) attention mask.

        Returns:
            `logits` of a classifier. Of other models `last_hidden_state`, which is zero at padding,
            and `sentence_embedding` if the file has a pooling type.
        """
        texts = [row[row_mask].numpy() for row, row_mask in zip(ids, mask.bool())]
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
        """Return the hidden states after the last norm, (L, D) per array of token ids."""
        embedding = self._weight("token_embd.weight")
        states = [embedding[ids] for ids in texts]
        for i in range(self.keys["block_count"]):
            states = self._block(i, states)
        return [self._norm(x, self._weight("enc.output_norm.weight")) for x in states]

    def _block(self, i, states):
        """Return the hidden states of each text after block i."""
        names = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
        attn_norm, qkv, out, ffn_norm, up, down = (
            self._weight(f"blk.{i}.{name}.weight") for name in names
        )

        outputs = []
        for x in states:
            x = x + self._attend(self._norm(x, attn_norm) @ qkv.T) @ out.T
            inner = self._norm(x, ffn_norm) @ up.T
            assert inner.shape[-1] == 2 * self.keys["feed_forward_length"], (
                "llama.cpp does not load this shape of ffn_up"
            )
            gate, value = np.split(inner, 2, axis=1)
            outputs.append(x + (gate / (1.0 + np.exp(-gate)) * value) @ down.T)
        return outputs

    def _norm(self, x, weight):
        """Return the RMSNorm of hidden states."""
        epsilon = self.keys["attention.layer_norm_rms_epsilon"]
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + epsilon) * weight

    def _attend(self, qkv):
        """Return the attention output, (L, D), for q, k and v side by side, (L, 3 D)."""
        length = len(qkv)
        heads = self.keys["attention.head_count"]
        q, k, v = (
            matrix.reshape(length, heads, -1).swapaxes(0, 1) for matrix in np.split(qkv, 3, axis=1)
        )
        q, k = self._rotate(q), self._rotate(k)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1], dtype=np.float32)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (
            (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1).reshape(length, -1)
        )

    def _rotate(self, x):
        """Rotate adjacent pairs of (H, L, K) queries or keys, as `rope_yarn` of ggml."""
        length, head_dim = x.shape[1:]
        pairs = np.arange(head_dim // 2)
        base = self.keys["rope.freq_base"]
        scaling_type = self.keys.get("rope.scaling.type", "none")
        angles = np.outer(np.arange(length), base ** (-2.0 * pairs / head_dim))
        magnitude = 1.0

        if scaling_type != "none":
            factor = self.keys["rope.scaling.factor"]
            interpolated = angles / factor
            if scaling_type == "yarn":
                original_length = self.keys.get(
                    "rope.scaling.original_context_length", self.keys["context_length"]
                )
                # llama.cpp has keys for other values than 32 and 1, but reads them for other
                # architectures only.
                bounds = [
                    head_dim * np.log(original_length / (n * 2 * np.pi)) / (2 * np.log(base))
                    for n in (32, 1)
                ]
                low, high = max(0, np.floor(bounds[0])), min(head_dim - 1, np.ceil(bounds[1]))
                extrapolation = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
                interpolated = interpolated * (1 - extrapolation) + angles * extrapolation
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
        """Return the embedding of a text, (D,), from its hidden states, (L, D)."""
        types = gguf.PoolingType
        return {
            types.MEAN: lambda: states.mean(axis=0),
            types.CLS: lambda: states[0],
            types.LAST: lambda: states[-1],
        }[self.pooling]()

    def _classify(self, first_token):
        """Return the logits of a classifier from the hidden states of the first token."""
        dense = np.tanh(self._weight("cls.weight") @ first_token + self._weight("cls.bias"))
        return self._weight("cls.output.weight") @ dense + self._weight("cls.output.bias")
