"""`neobert tokenizer TEXTS... --output DIR --vocab-size N`: a WordPiece tokenizer from texts.

Its folder has the form of `tokenizer/`, with BERT's special tokens and ids, so that every engine
reads it that reads BERT's. `--extend BASE` keeps the pieces of BASE under their ids and adds those
that shorten the texts most. The texts are read once, their words are counted, and the tokenizers
library learns from the counts; the same texts give the same tokenizer.
"""

import json
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm.auto import tqdm

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed
from ..common.files import json_text, read_json, write_json, write_text
from ..common.folders import apart, check_new, new_folder
from ..common.held_out import is_held_out
from ..common.loading import load_tokenizer, save_tokenizer
from ..common.output import run_settings
from ..common.results import markdown_table
from .sources import load_rows, parse_sources
from .vocabulary_options import MULTIPLE, TOKENIZER_OPTIONS


REPORT = "tokenizer_report"
# BERT's: [PAD] is 0, [UNK], [CLS], [SEP] and [MASK] are 100 to 103.
SPECIAL = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONGEST_WORD = 100  # characters; WordPiece makes [UNK] of longer ones
HELD_OUT_CHARACTERS = 5_000_000
HELD_OUT_PERCENT = 2


# ------------------------------------------------------------------------------------------------
# reading


def read_texts(rows, limit, name):
    """What is between spaces in the texts, counted, and the texts that are held out, 2 % of them.

    Args:
        rows: {"text"} each.
        limit: characters that are read.
        name: of the texts, for messages.
    Returns:
        (Counter, list of texts, characters read).
    Raises:
        UserError: no row has text.
    """
    chunks, held_out, read, kept = Counter(), [], 0, 0
    with tqdm(desc="reading", unit=" characters", unit_scale=True) as bar:
        for row in rows:
            text = (row["text"] or "")[: limit - read]
            # A key of its own: the texts may be a training part that was split by their own keys.
            if kept < HELD_OUT_CHARACTERS and is_held_out(f"tokenizer {text}", HELD_OUT_PERCENT):
                held_out.append(text)
                kept += len(text)
            else:
                chunks.update(text.split())
            read += len(text)
            bar.update(len(text))
            if read >= limit:
                break
    if not chunks:  # of a few rows all may be held out
        chunks = Counter(word for text in held_out for word in text.split())
        held_out = []
    if not chunks:
        raise UserError(f"{name} has no text")
    if read >= limit:
        print(f"learnt from the first {read:,} characters (limit)", file=sys.stderr)
    return chunks, held_out, read


def count_words(chunks, backend):
    """Counter of the words as a tokenizer has them: normalised, and cut at punctuation.

    BERT's normalizer and pre-tokenizer look at single characters, so that each distinct chunk of
    text needs them once.
    """
    words = Counter()
    for chunk, count in chunks.items():
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(
            backend.normalizer.normalize_str(chunk)
        ):
            words[word] += count
    return words


def usable(words, least):
    """(words made of characters that occur at least `least` times, the alphabet): a rare character
    is not worth rows, and its word is [UNK] in any case.

    The alphabet is a sorted list of pieces: every character, and "##" with it where it is within a
    word.
    """
    counts = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    rare = {character for character, count in counts.items() if count < least}
    kept = {
        word: count
        for word, count in words.items()
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
    backend.train_from_iterator(_repeated(words), trainer)
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.get)


def _repeated(words, block=100_000):
    """Texts with every word as often as it was counted."""
    for word, count in sorted(words.items()):
        for done in range(0, count, block):
            yield f"{word} " * min(block, count - done)


def most_useful(words, known, candidates, count):
    """The `count` candidates that save most pieces in the words, beside the `known` pieces.

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
    return [piece for piece in best if worth[piece] > 0][:count]


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
            f"vocab_size {options.vocab_size:,} is smaller than the alphabet of the texts, "
            f"{len(characters):,} pieces of one character, and the {len(known):,} pieces that are "
            f"there before them; give at least {least:,}, or a larger min_frequency "
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
    there, number = {*pieces}, 99
    pieces = list(pieces)
    while len(pieces) % MULTIPLE:
        if (name := f"[unused{number}]") not in there:
            pieces.append(name)
        number += 1
    return pieces


# ------------------------------------------------------------------------------------------------
# the command


def measure(tokenizer, texts):
    """Figures of a WordPiece tokenizer on texts; a word is a run of letters, digits and
    underscores, [UNK] is one piece, spaces count as characters.

    Returns:
        {name: value}; the shares are of the words.
    """

    def ids_of(texts):
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    words = Counter(word for text in texts for word in re.findall(r"\w+", text))
    total, pieces, complete, unknown = max(1, words.total()), 0, 0, 0
    for ids, count in zip(ids_of(list(words) or [""]), words.values()):
        pieces += count * len(ids)
        if tokenizer.unk_token_id in ids:
            unknown += count
        elif len(ids) == 1:
            complete += count
    tokens = max(1, sum(map(len, ids_of(texts))))
    return {
        "vocabulary": len(tokenizer),
        "pieces a word": pieces / total,
        "characters a token": sum(map(len, texts)) / tokens,
        "words kept complete": complete / total,
        "words that fall to [UNK]": unknown / total,
    }


def _checked(tokenizer, name):
    """The tokenizer that is extended, or UserError where it is none of BERT's kind."""
    backend = tokenizer.backend_tokenizer
    kind = type(backend.model).__name__
    if kind != "WordPiece" or None in (backend.normalizer, backend.pre_tokenizer):
        raise UserError(
            f"extend {name} cuts words by {kind}; a WordPiece tokenizer is needed, as BERT's"
        )
    if tokenizer.mask_token is None:
        raise UserError(f"extend {name} has no [MASK], which a masked LM needs")
    if sorted(tokenizer.get_vocab().values()) != list(range(len(tokenizer))):
        raise UserError(f"extend {name} has gaps or doubles among its ids")
    return tokenizer


def make_tokenizer(text, options):
    """Writes the tokenizer that `TextOptions` and `VocabularyOptions` ask for, and returns the page
    of its report.

    Raises:
        UserError: no text, a vocabulary smaller than the alphabet, an EXTEND of another kind, an
            output that is there.
    """
    sources = parse_sources(text.texts, text.subset, text.split, text.column)
    check_new(options.output)
    apart(options.output, *(path for source in sources for path in source.paths))
    base_name = options.extend or str(TOKENIZER)
    base = _checked(load_tokenizer(base_name, padding=False), base_name)
    # What the new one is like but for its vocabulary.
    content, settings = json.loads(base.backend_tokenizer.to_str()), {}
    if options.extend is None:
        lower, strip = not options.cased, options.strip_accents
        settings = {"do_lower_case": lower, "strip_accents": strip}
        content["normalizer"] |= {"lowercase": lower, "strip_accents": strip}

    chunks, held_out, read = read_texts(load_rows(sources), text.limit, listed(text.texts))
    words = count_words(chunks, Tokenizer.from_str(json.dumps(content)))
    words, alphabet = usable(words, options.min_frequency)
    if not words:
        raise UserError(
            f"{listed(text.texts)} has no word of which every character occurs "
            f"{options.min_frequency} times; give more text, or a smaller min_frequency"
        )
    pieces = filled(choose_pieces(words, alphabet, options, base))
    where = f"{sum(map(len, held_out)):,} characters in {len(held_out):,} held-out texts"
    if not held_out:
        held_out = list(islice(chunks, 100_000))
        where = "the distinct words of the text itself, of which no row was kept back"
    described = {"settings": run_settings(text, options), "characters": read, "words": len(words)}
    with new_folder(options.output) as folder:
        save_tokenizer(base, folder)
        path = folder / "tokenizer_config.json"
        saved = {name: value for name, value in read_json(path).items() if "local" not in name}
        write_text(path, json_text({**saved, **settings}))
        content["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
        write_text(folder / "tokenizer.json", json_text(content))
        write_text(folder / "vocab.txt", "".join(f"{piece}\n" for piece in pieces))
        described["new"] = measure(load_tokenizer(str(folder)), held_out)
        described["base"] = measure(base, held_out)
        rows = [
            [name, *(f"{value:,}" if name == "vocabulary" else f"{value:.3f}" for value in values)]
            for name, *values in zip(
                described["new"], described["new"].values(), described["base"].values()
            )
        ]
        table = markdown_table(["", "new", Path(base_name).name], rows)
        page = f"# Tokenizer\n\nMeasured on {where}.\n\n{table}"
        write_text(folder / f"{REPORT}.md", page)
        write_json(folder / f"{REPORT}.json", described)
    return page


def main(argv=None):
    """Entry point of `neobert tokenizer`; returns the exit code."""
    print(make_tokenizer(*TOKENIZER_OPTIONS.read(list(sys.argv[1:] if argv is None else argv))))
    return 0
