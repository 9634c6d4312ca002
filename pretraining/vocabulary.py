"""`neobert tokenizer TEXTS... --output DIR --vocab-size N`: a WordPiece tokenizer from texts.

Its folder has the form of `tokenizer/`, with BERT's special tokens and ids, so that every engine
reads it that reads BERT's. `--extend BASE` keeps the pieces of BASE under their ids and adds those
that shorten the texts most. The texts are read once, their words are counted, and the tokenizers
library learns from the counts; the same texts give the same tokenizer.
"""

import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm.auto import tqdm

from ..common.constants import TOKENIZER
from ..common.errors import UserError, listed
from ..common.files import json_text, read_json, write_text
from ..common.held_out import is_held_out
from ..common.loading import load_tokenizer, save_tokenizer
from ..common.outputs import check_apart, check_folder, new_folder
from ..common.runs import run_settings
from .sources import load_rows, parse_sources
from .vocabulary_options import MULTIPLE, TOKENIZER_OPTIONS
from .vocabulary_report import measure, page


REPORT = "tokenizer_report"
# BERT's: [PAD] is 0, [UNK], [CLS], [SEP] and [MASK] are 100 to 103.
SPECIAL = ["[PAD]", *(f"[unused{i}]" for i in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONGEST_WORD = 100  # characters; WordPiece makes [UNK] of longer ones
HELD_OUT_CHARACTERS = 5_000_000


# ------------------------------------------------------------------------------------------------
# reading


def read_texts(rows, limit, held_out):
    """What is between spaces in the texts, counted, and the texts that are held out.

    Args:
        rows: {"text"} each, None for a broken row.
        limit: characters that are read.
        held_out: whether a text is, as long as they have fewer than `HELD_OUT_CHARACTERS`.
    Returns:
        (Counter, list of texts, characters read).
    """
    chunks, kept, kept_characters, read = Counter(), [], 0, 0
    with tqdm(desc="reading", unit=" characters", unit_scale=True) as bar:
        for row in rows:
            text = (row["text"] or "")[: limit - read]
            if kept_characters < HELD_OUT_CHARACTERS and held_out(text):
                kept.append(text)
                kept_characters += len(text)
            else:
                chunks.update(text.split())
            read += len(text)
            bar.update(len(text))
            if read >= limit:
                break
    return chunks, kept, read


def _is_kept_back(text):
    # A key of its own: the texts may be a training part that was split by their own keys.
    return is_held_out(f"tokenizer {text}", 2)


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


def _check_size(arguments, needed, alphabet):
    if arguments.rows < needed + alphabet:
        least = -(-(needed + alphabet) // MULTIPLE) * MULTIPLE
        raise UserError(
            f"vocab_size {arguments.vocab_size:,} is smaller than the alphabet of the texts, "
            f"{alphabet:,} pieces of one character, and the {needed:,} pieces that are there "
            f"before them; give at least {least:,}, or a larger min_frequency "
            f"({arguments.min_frequency} now)"
        )


def new_vocabulary(words, alphabet, arguments):
    """A list of pieces, in the order of their ids: BERT's special tokens, then what is learnt."""
    _check_size(arguments, len(SPECIAL), len(alphabet))
    size = arguments.rows - len(SPECIAL)
    return [*SPECIAL, *learn(words, alphabet, size, arguments.min_frequency)]


def extended_vocabulary(words, alphabet, arguments, base):
    """As `new_vocabulary`: the pieces of the tokenizer `base`, then new characters, then the most
    useful new pieces."""
    known = sorted(base.get_vocab(), key=base.get_vocab().get)
    characters = [piece for piece in alphabet if piece not in base.get_vocab()]
    _check_size(arguments, len(known), len(characters))
    free = arguments.rows - len(known) - len(characters)
    learnt = learn(words, alphabet, len(alphabet) + 3 * free, arguments.min_frequency)
    pieces = {*known, *characters}
    candidates = [piece for piece in learnt if piece not in pieces]
    return [*known, *characters, *most_useful(words, [*known, *characters], candidates, free)]


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


@dataclass(frozen=True)
class _Form:
    """What a new tokenizer is like but for its vocabulary: the extended one, or the bundled one
    with the wanted normalizer."""

    tokenizer: object
    settings: dict  # of tokenizer_config.json
    content: dict  # of tokenizer.json

    @classmethod
    def of(cls, wanted):
        tokenizer = load_tokenizer(wanted.extend or str(TOKENIZER), padding=False)
        backend = tokenizer.backend_tokenizer
        kind = type(backend.model).__name__
        if kind != "WordPiece" or None in (backend.normalizer, backend.pre_tokenizer):
            raise UserError(
                f"extend {wanted.extend} cuts words by {kind}; a WordPiece tokenizer is needed, as "
                "BERT's"
            )
        if tokenizer.mask_token is None:
            raise UserError(f"extend {wanted.extend} has no [MASK], which a masked LM needs")
        if sorted(tokenizer.get_vocab().values()) != list(range(len(tokenizer))):
            raise UserError(f"extend {wanted.extend} has gaps or doubles among its ids")
        content, settings = json.loads(backend.to_str()), {}
        if wanted.extend is None:
            settings = {"do_lower_case": not wanted.cased, "strip_accents": wanted.strip_accents}
            content["normalizer"] |= {
                "lowercase": not wanted.cased,
                "strip_accents": wanted.strip_accents,
            }
        return cls(tokenizer, settings, content)

    @property
    def backend(self):
        """`tokenizers.Tokenizer`, with the old vocabulary."""
        return Tokenizer.from_str(json.dumps(self.content))

    def write(self, pieces, folder):
        """Puts the tokenizer with these pieces into a folder."""
        save_tokenizer(self.tokenizer, folder)
        path = folder / "tokenizer_config.json"
        found = {name: value for name, value in read_json(path).items() if "local" not in name}
        write_text(path, json_text({**found, **self.settings}))
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        model = {**self.content["model"], "vocab": vocabulary}
        write_text(folder / "tokenizer.json", json_text({**self.content, "model": model}))
        write_text(folder / "vocab.txt", "".join(f"{piece}\n" for piece in pieces))


def _check_output(text, wanted, sources):
    check_folder(wanted.output, "output")
    if os.path.isdir(wanted.output) and os.listdir(wanted.output):
        raise UserError(f"the output {wanted.output} is there already; choose another name")
    files = [path for source in sources for path in source.paths]
    names = [name for name in (wanted.extend, wanted.base) if name and os.path.exists(name)]
    check_apart(wanted.output, *files, *names)


def make_tokenizer(text, wanted):
    """Writes the tokenizer that `TextOptions` and `VocabularyOptions` ask for, and returns the page
    of its report.

    Raises:
        UserError: no text, a vocabulary smaller than the alphabet, an EXTEND of another kind, an
            output that is there.
    """
    where = (text.subset, text.split, text.column)
    sources = parse_sources(text.texts, *where)
    others = () if text.heldout is None else parse_sources(text.heldout, *where)
    _check_output(text, wanted, (*sources, *others))
    form = _Form.of(wanted)
    base_name = wanted.base or wanted.extend or str(TOKENIZER)
    base = load_tokenizer(base_name, padding=False)
    rows = load_rows(sources)
    kept_back = (lambda _: False) if others else _is_kept_back
    chunks, held_out, read = read_texts(rows, text.limit, kept_back)
    if others:
        rows = load_rows(others)
        held_out = read_texts(rows, HELD_OUT_CHARACTERS, lambda _: True)[1]
    for given, there in ((text.texts, chunks), (text.heldout, not others or any(held_out))):
        if not there:
            raise UserError(f"{listed([given] if isinstance(given, str) else given)} has no text")
    words, alphabet = usable(count_words(chunks, form.backend), wanted.min_frequency)
    if not words:
        raise UserError(
            f"{listed(text.texts)} has no word of which every character occurs "
            f"{wanted.min_frequency} times; give more text, or a smaller min_frequency"
        )
    pieces = (
        new_vocabulary(words, alphabet, wanted)
        if wanted.extend is None
        else extended_vocabulary(words, alphabet, wanted, form.tokenizer)
    )
    if read >= text.limit:
        print(f"learnt from the first {read:,} characters (limit)", file=sys.stderr)
    told = f"Held-out text: {sum(map(len, held_out)):,} characters in {len(held_out):,} texts."
    if not held_out:
        held_out = list(itertools.islice(chunks, 100_000))
        told = "No row was kept back of so few: measured on the distinct words of the text itself."
    content = {"settings": run_settings(text, wanted), "characters": read, "words": len(words)}
    with new_folder(wanted.output, REPORT, content=content) as folder:
        form.write(filled(pieces), folder)
        new = load_tokenizer(str(folder))
        content |= {"new": measure(new, held_out), "base": measure(base, held_out)}
        report = page(content["new"], content["base"], Path(base_name).name, told)
        write_text(folder / f"{REPORT}.md", report)
    return report


def main(argv=None):
    """Entry point of `neobert tokenizer`; returns the exit code."""
    print(make_tokenizer(*TOKENIZER_OPTIONS.read(list(sys.argv[1:] if argv is None else argv))))
    return 0
