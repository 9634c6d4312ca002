"""`neobert tokenizer TEXTS... --output DIR --vocab-size N`: a WordPiece tokenizer from texts.

Its folder has the form of `tokenizer/`, with BERT's special tokens and ids, so that every engine
reads it that reads BERT's. `--extend BASE` keeps the pieces of BASE under their ids and adds those
that shorten the texts most. The texts are read once, their words are counted, and the tokenizers
library learns from the counts; the same texts give the same tokenizer.
"""

import json
import logging
import sys
from collections import Counter
from itertools import count, islice
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm.auto import tqdm

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed
from ..common.files import json_text, read_json, write_text
from ..common.folders import apart, check_new, new_folder
from ..common.loading import load_tokenizer, save_tokenizer
from ..common.results import markdown_table
from .options import MULTIPLE, OPTIONS
from .sources import load_rows, parse_sources


logger = logging.getLogger("neobert")

# BERT's: [PAD] is 0, [UNK], [CLS], [SEP] and [MASK] are 100 to 103.
SPECIAL = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONGEST_WORD = 100  # characters; WordPiece makes [UNK] of longer ones
HELD_OUT = 50  # every so many texts one is measured and not learnt from


# ------------------------------------------------------------------------------------------------
# reading


def count_words(rows, limit, backend):
    """(Counter of the words as a tokenizer has them, normalised and cut at punctuation; the texts
    that are held out).

    BERT's normalizer and pre-tokenizer look at single characters, so that each distinct chunk of
    text between spaces needs them once.

    Args:
        rows: {"text"} each.
        limit: characters that are read.
        backend: of the tokenizer.
    """
    chunks, held_out, read = Counter(), [], 0
    for number, row in enumerate(tqdm(rows, desc="reading", unit=" texts"), 1):
        text = (row["text"] or "")[: limit - read]
        read += len(text)
        if number % HELD_OUT:
            chunks.update(text.split())
        else:
            held_out.append(text)
        if read >= limit:
            break
    words = Counter()
    for chunk, times in chunks.items():
        normal = backend.normalizer.normalize_str(chunk)
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal):
            words[word] += times
    return words, held_out


def usable(words, least):
    """(words made of characters that occur at least `least` times, the alphabet): a rare character
    is not worth rows, and its word is [UNK] in any case.

    The alphabet is a sorted list of pieces: every character, and "##" with it where it is within a
    word.
    """
    counts = Counter()
    for word, times in words.items():
        for character in word:
            counts[character] += times
    rare = {character for character, times in counts.items() if times < least}
    kept = {
        word: times
        for word, times in words.items()
        if len(word) <= LONGEST_WORD and rare.isdisjoint(word)
    }
    within = {f"##{character}" for word in kept for character in word[1:]}
    return kept, sorted({character for word in kept for character in word}) + sorted(within)


# ------------------------------------------------------------------------------------------------
# learning


def learn(words, alphabet, size, least):
    """`size` pieces or fewer, the alphabet first, then merges in the order of their counts.

    Args:
        words: {word: count}.
        alphabet: as `usable` returns it.
        least: occurrences of a pair that is merged.
    """
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=least,
        # Their ids settle which of two equal merges is first: without them it differs by run.
        special_tokens=alphabet,
        limit_alphabet=len(alphabet),
        initial_alphabet=[piece for piece in alphabet if len(piece) == 1],
    )
    # Every word as often as it was counted, in pieces of at most 100,000 times.
    most = 100_000
    texts = (
        f"{word} " * min(most, times - done)
        for word, times in sorted(words.items())
        for done in range(0, times, most)
    )
    backend.train_from_iterator(texts, trainer)
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def most_useful(words, known, candidates, most):
    """The `most` candidates that save most pieces in the words, beside the `known` pieces.

    A candidate's worth is how often it is used when all of them are there, times the pieces that
    stand in its place without them.
    """
    before = _cutter(known)
    after = _cutter([*known, *candidates])
    used = Counter()
    for word, times in words.items():
        for token in after.tokenize(word):
            used[token.value] += times
    within = _cutter([piece.removeprefix("##") for piece in known if piece.startswith("##")], known)
    worth = {}
    for piece in candidates:
        cut = within.tokenize(piece[2:]) if piece.startswith("##") else before.tokenize(piece)
        worth[piece] = used[piece] * (len(cut) - 1)
    best = sorted(candidates, key=lambda piece: (-worth[piece], piece))
    return [piece for piece in best if worth[piece] > 0][:most]


def _cutter(starts, known=()):
    """WordPiece of these pieces; with `known`, of those of its pieces that are within words."""
    inner = [piece for piece in known if piece.startswith("##")]
    pieces = dict.fromkeys(["[UNK]", *starts, *inner])
    return models.WordPiece(
        {piece: number for number, piece in enumerate(pieces)},
        unk_token="[UNK]",
        max_input_chars_per_word=LONGEST_WORD,
    )


def choose_pieces(words, alphabet, options, base):
    """A list of pieces in the order of their ids: BERT's special tokens and what is learnt; with
    `extend` those of the tokenizer `base`, then new characters, then the most useful new pieces.

    Raises:
        UserError: the vocabulary has no room for the alphabet.
    """
    known = SPECIAL
    if options.extend is not None:
        known = sorted(base.get_vocab(), key=base.get_vocab().get)
    there = {*known}
    characters = [piece for piece in alphabet if piece not in there]
    needed = len(known) + len(characters)
    if options.rows < needed:
        least = -(-needed // MULTIPLE) * MULTIPLE
        raise UserError(
            f"vocab_size {options.vocab_size:,} is smaller than the alphabet of the texts and the "
            f"{len(known):,} pieces before it; give at least {least:,}, or a larger min_frequency "
            f"({options.min_frequency} now)"
        )
    if options.extend is None:
        size = options.rows - len(known)
        return [*known, *learn(words, alphabet, size, options.min_frequency)]
    free = options.rows - needed
    learnt = learn(words, alphabet, len(alphabet) + 3 * free, options.min_frequency)
    pieces = [*known, *characters]
    candidates = [piece for piece in learnt if piece not in {*pieces}]
    return [*pieces, *most_useful(words, pieces, candidates, free)]


def filled(pieces):
    """`pieces` with [unused99], [unused100], ... up to a multiple of 64."""
    names = (f"[unused{number}]" for number in count(99))
    spare = (name for name in names if name not in pieces)
    return [*pieces, *islice(spare, -len(pieces) % MULTIPLE)]


# ------------------------------------------------------------------------------------------------
# the command


def measure(tokenizer, texts):
    """Figures of a tokenizer on texts, {name: value}; a space is a character."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = max(1, sum(map(len, ids)))
    unknown = sum(row.count(tokenizer.unk_token_id) for row in ids)
    return {
        "vocabulary": f"{len(tokenizer):,}",
        "characters a token": f"{sum(map(len, texts)) / tokens:.3f}",
        "[UNK] among the tokens": f"{unknown / tokens:.3%}",
    }


def make_tokenizer(options):
    """Writes the tokenizer that `VocabularyOptions` ask for, and returns a table of how it cuts
    held-out text.

    Raises:
        UserError: no text, a vocabulary smaller than the alphabet, an EXTEND of another kind, an
            output that is there.
    """
    sources = parse_sources(options.texts, options.split, options.column)
    check_new(options.output)
    apart(options.output, *(path for source in sources for path in source.paths))
    base_name = options.extend or str(TOKENIZER)
    base = load_tokenizer(base_name)
    kind = type(base.backend_tokenizer.model).__name__
    if kind != "WordPiece":
        raise UserError(f"extend {base_name} cuts words by {kind}; a WordPiece tokenizer is needed")
    # What the new one is like but for its vocabulary.
    content, settings = json.loads(base.backend_tokenizer.to_str()), {}
    if options.extend is None:
        lower, strip = not options.cased, options.strip_accents
        settings = {"do_lower_case": lower, "strip_accents": strip}
        content["normalizer"] |= {"lowercase": lower, "strip_accents": strip}

    backend = Tokenizer.from_str(json.dumps(content))
    words, held_out = count_words(load_rows(sources), options.limit, backend)
    words, alphabet = usable(words, options.min_frequency)
    if not words:
        raise UserError(
            f"{listed(options.texts)} has no word of which every character occurs "
            f"{options.min_frequency} times; give more text, or a smaller min_frequency"
        )
    pieces = filled(choose_pieces(words, alphabet, options, base))
    if len(pieces) < options.rows:
        logger.warning(
            "The vocabulary has %s tokens, but %s were requested: %s distinct words contain no "
            "more subwords that occur at least %s times. Give more text, or a smaller "
            "`--min-frequency`.",
            f"{len(pieces):,}",
            f"{options.vocab_size:,}",
            f"{len(words):,}",
            options.min_frequency,
        )
    with new_folder(options.output) as folder:
        save_tokenizer(base, folder)
        path = folder / "tokenizer_config.json"
        saved = {name: value for name, value in read_json(path).items() if "local" not in name}
        write_text(path, json_text({**saved, **settings}))
        content["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
        write_text(folder / "tokenizer.json", json_text(content))
        write_text(folder / "vocab.txt", "".join(f"{piece}\n" for piece in pieces))
    new, old = (
        measure(tokenizer, held_out or list(words))
        for tokenizer in (load_tokenizer(options.output), base)
    )
    rows = [[name, new[name], old[name]] for name in new]
    names = [f"new ({Path(options.output).name})", f"compared with ({Path(base_name).name})"]
    return markdown_table(["", *names], rows)


def main(argv=None):
    """Entry point of `neobert tokenizer`; returns the exit code."""
    (options,) = OPTIONS["tokenizer"].read(list(sys.argv[1:] if argv is None else argv))
    print(make_tokenizer(options))
    return 0
