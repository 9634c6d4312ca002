"""Corpora, probe and tokenizers of the small ablation ladder, from English text that comes in
packages."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ..common import local_text
from ..common.files import write_text
from ..common.rows import read_rows


# {file of text: its columns}; probe, the last, has labels.
COLUMNS = {
    "curated": ["text"],
    "diverse": ["text"],
    "heldout": ["text"],
    "probe": ["text", "label"],
}
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(texts, kind, vocabulary, folder):
    """A tokenizer learnt from `texts`: "wordpiece" (uncased, as BERT's) or "bpe" (cased,
    byte-level, as LLaMA's in kind, 5 % larger)."""
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocabulary, special_tokens=_SPECIAL, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        size = max(vocabulary * 32064 // 30522, len(alphabet) + 100)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(str(folder))


def make_data(given, scale, folder):
    """Writes the corpora, the held-out text, the probe and the tokenizers under `folder`, where
    they are not there.

    Args:
        given: {name of `COLUMNS`: the user's own file, or None}.
        scale: `Scale`.
    Returns:
        {name of `COLUMNS`, "wordpiece", "bpe": path}.
    """
    paths = {
        name: Path(given[name]) if given[name] else folder / f"{name}.jsonl" for name in COLUMNS
    }
    paths.update(wordpiece=folder / "wordpiece", bpe=folder / "bpe")
    if not all(paths[name].is_file() for name in ("curated", "diverse", "heldout")):
        wordnet, gcide = ([], []), ([], [])  # (texts to train on, held-out texts)
        for parts, entries in (
            (wordnet, local_text.wordnet_entries),
            (gcide, local_text.gcide_entries),
        ):
            for row in entries():
                parts[local_text.is_held_out(row["id"])].append({"text": row["text"]})
        own = {
            "curated": some(wordnet[0], scale.corpus_texts),
            "diverse": some(wordnet[0] + gcide[0], scale.corpus_texts),
            "heldout": some(wordnet[1], 750) + some(gcide[1], 750),
        }
        for name, rows in own.items():
            if given[name] is None:
                _write(paths[name], rows)
    if not paths["probe"].is_file():
        _write(
            paths["probe"],
            [
                {name: row[name] for name in COLUMNS["probe"]}
                for row in local_text.sentiment_sentences("movie")
            ],
        )
    for kind in ("wordpiece", "bpe"):
        if not (paths[kind] / "tokenizer_config.json").is_file():
            texts = (row["text"] for _, row in read_rows(paths["diverse"], ["text"]))
            train_tokenizer(texts, kind, scale.vocabulary, paths[kind])
    return paths


def _write(path, rows):
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def some(rows, count):
    """At most `count` of the rows, always the same ones, in an order of their own."""
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:count]]
