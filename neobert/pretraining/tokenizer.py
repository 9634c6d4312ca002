"""Command `neobert tokenizer`: train a WordPiece tokenizer.

The output directory has the format of `tokenizer/`, with the special tokens and ids of BERT, so
every engine that supports BERT's tokenizer can load it. `--extend BASE` keeps the tokens of
BASE under their ids and adds the tokens that shorten the texts most.

The texts are read once to count their words, and the tokenizers library trains on the counts. The
same texts always yield the same tokenizer.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..common.constants import TOKENIZER
from ..common.data import replace_surrogates
from ..common.errors import UserError, listed
from ..common.files import json_text, read_json, write_text
from ..common.folders import check_disjoint, new_folder
from ..common.loading import load_tokenizer, save_tokenizer, vocabulary_size
from ..common.options import log_options
from ..common.tables import markdown_table
from .sources import load_rows, parse_sources
from .tokenizer_options import PARSER, VOCABULARY_MULTIPLE, TokenizerOptions, VocabularyOptions


logger = logging.getLogger("neobert")

# Special tokens of BERT: the id of [PAD] is 0, those of [UNK], [CLS], [SEP] and [MASK] are 100 to
# 103.
SPECIAL_TOKENS = [
    "[PAD]",
    *(f"[unused{number}]" for number in range(99)),
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
]

# WordPiece replaces words of more characters by [UNK].
MAX_WORD_LENGTH = 100

# One text in this number is a validation text: the tokenizer is evaluated on it, and not trained.
VALIDATION_INTERVAL = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert tokenizer` and return the exit code."""
    options = PARSER.read(argv or [])
    log_options(options)
    print(train_tokenizer(options))
    return 0


def train_tokenizer(options: TokenizerOptions) -> str:
    """Train a tokenizer, write its directory, and compare it with another tokenizer.

    Returns:
        Markdown table of statistics on the validation texts: those of the new tokenizer and those
        of the tokenizer that it extends, or of the bundled one.

    Raises:
        UserError: If the texts contain no usable word, the vocabulary is smaller than the alphabet,
            `extend` is not a WordPiece tokenizer, or the output exists.
    """
    data = options.data
    sources = parse_sources(data.texts, data.split, data.column, "texts")
    check_disjoint(data.output, *(path for source in sources for path in source.paths))
    base_name = options.vocabulary.extend or str(TOKENIZER)

    # An unusable path is reported before the texts are read, which may take long.
    with new_folder(data.output) as folder:
        base = _load_wordpiece_tokenizer(base_name)
        evaluation_texts = _train(options, load_rows(sources), base, folder)

    statistics = tokenizer_statistics(load_tokenizer(data.output), evaluation_texts)
    base_statistics = tokenizer_statistics(base, evaluation_texts)
    header = ["", f"new ({Path(data.output).name})", f"compared with ({Path(base_name).name})"]
    cells = [[name, value, base_statistics[name]] for name, value in statistics.items()]
    return markdown_table(header, cells)


def _train(
    options: TokenizerOptions,
    rows: Iterable[Mapping[str, Any]],
    base: PreTrainedTokenizerBase,
    folder: Path,
) -> Sequence[str]:
    """Train a tokenizer and write its files.

    Args:
        options: Options of the command.
        rows: Rows with the column "text".
        base: Tokenizer that the new one is based on.
        folder: Empty directory.

    Returns:
        Texts to evaluate the tokenizer on.

    Raises:
        UserError: If the texts contain no usable word, or the vocabulary is smaller than the
            alphabet.
    """
    data = options.data
    # The new tokenizer differs from the base in its vocabulary and its normalization alone.
    tokenizer_json = json.loads(base.backend_tokenizer.to_str())
    config_changes = {}
    if options.vocabulary.extend is None:
        lowercase = not options.normalization.cased
        strip_accents = options.normalization.strip_accents
        tokenizer_json["normalizer"] |= {"lowercase": lowercase, "strip_accents": strip_accents}
        config_changes = {"do_lower_case": lowercase, "strip_accents": strip_accents}

    # Words are normalized and split as the new tokenizer will do it, and words that it could not
    # represent are removed.
    backend = Tokenizer.from_str(json.dumps(tokenizer_json))
    all_words, validation_texts = count_words(rows, data.max_characters, backend)
    words, alphabet = filter_words(all_words, options.vocabulary.min_frequency)
    if not words:
        raise UserError(
            f"{listed(data.texts)} has no word of which every character occurs at least "
            f"{options.vocabulary.min_frequency} times. Pass more text, or decrease "
            "`--min-frequency`."
        )

    tokens = pad_vocabulary(build_vocabulary(words, alphabet, options.vocabulary, base))
    if len(tokens) < options.vocabulary.rounded_size:
        logger.warning(
            "The vocabulary has %s tokens, but %s were requested: %s distinct words contain no "
            "more subwords that occur at least %s times. Pass more text, or decrease "
            "`--min-frequency`.",
            f"{len(tokens):,}",
            f"{options.vocabulary.vocab_size:,}",
            f"{len(words):,}",
            options.vocabulary.min_frequency,
        )

    tokenizer_json["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    _write_tokenizer(folder, base, tokens, tokenizer_json, config_changes)

    # A corpus of fewer than 50 texts has no validation texts. Its words are used instead.
    return validation_texts or list(words)


def _load_wordpiece_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the new one is based on.

    Raises:
        UserError: If there is no such tokenizer, or it is not a WordPiece tokenizer.
    """
    tokenizer = load_tokenizer(name)
    model_type = type(tokenizer.backend_tokenizer.model).__name__
    if model_type != "WordPiece":
        raise UserError(
            f"`extend` must be a WordPiece tokenizer, got the {model_type} tokenizer {name}."
        )
    return tokenizer


def _write_tokenizer(
    folder: Path,
    base: PreTrainedTokenizerBase,
    tokens: Sequence[str],
    tokenizer_json: Mapping[str, Any],
    config_changes: Mapping[str, Any],
) -> None:
    """Write the files of the new tokenizer.

    The other files, such as the special tokens and the template of [CLS] and [SEP], are those of
    the base.

    Args:
        folder: Empty directory.
        base: Tokenizer that the new one is based on.
        tokens: Tokens of the new vocabulary in the order of their ids.
        tokenizer_json: Content of tokenizer.json.
        config_changes: Entries of tokenizer_config.json that differ from those of the base.
    """
    save_tokenizer(base, folder)
    config_path = folder / "tokenizer_config.json"
    # Entries such as `is_local` depend on where the base was loaded from.
    config = {name: value for name, value in read_json(config_path).items() if "local" not in name}
    write_text(config_path, json_text({**config, **config_changes}))
    write_text(folder / "tokenizer.json", json_text(tokenizer_json))
    write_text(folder / "vocab.txt", "".join(f"{token}\n" for token in tokens))


def tokenizer_statistics(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> dict[str, str]:
    """Return formatted statistics of a tokenizer on texts, {name: value}.

    The number of characters per token includes spaces.

    Args:
        tokenizer: Tokenizer to measure.
        texts: Texts to tokenize.
    """
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    token_count = max(1, sum(map(len, ids)))
    unknown_count = sum(row.count(tokenizer.unk_token_id) for row in ids)
    return {
        "vocabulary size": f"{len(tokenizer):,}",
        "characters per token": f"{sum(map(len, texts)) / token_count:.3f}",
        "percentage of [UNK]": f"{unknown_count / token_count:.3%}",
    }


# ------------------------------------------------------------------------------------------------
# words


def count_words(
    rows: Iterable[Mapping[str, str | None]], max_characters: int, backend: Tokenizer
) -> tuple[Counter[str], list[str]]:
    """Count the normalized words of texts, as the pre-tokenizer splits them.

    Args:
        rows: Rows with the column "text".
        max_characters: Maximum number of characters to read.
        backend: Tokenizer whose normalizer and pre-tokenizer are applied.

    Returns:
        Counts of the words of the training texts, and the validation texts, which are every 50th
        text.
    """
    # BERT's normalizer and pre-tokenizer depend on single characters alone, so it is sufficient to
    # apply them once to each distinct string between spaces.
    chunks: Counter[str] = Counter()
    validation_texts = []
    character_count = 0
    for number, row in enumerate(tqdm(rows, desc="reading", unit=" texts"), 1):
        text = replace_surrogates(row["text"] or "")[: max_characters - character_count]
        character_count += len(text)
        if number % VALIDATION_INTERVAL:
            chunks.update(text.split())
        else:
            validation_texts.append(text)
        if character_count >= max_characters:
            break

    # A tokenizer that is extended may have no normalizer or no pre-tokenizer.
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        normalized = backend.normalizer.normalize_str(chunk) if backend.normalizer else chunk
        if backend.pre_tokenizer is None:
            words[normalized] += count
            continue
        for word, _ in backend.pre_tokenizer.pre_tokenize_str(normalized):
            words[word] += count
    return words, validation_texts


def filter_words(words: Mapping[str, int], min_frequency: int) -> tuple[dict[str, int], list[str]]:
    """Remove words with rare characters, which the tokenizer will replace by [UNK].

    Args:
        words: Counts of the words.
        min_frequency: Minimum number of occurrences of every character of a word.

    Returns:
        Counts of the remaining words, and their alphabet: a sorted list of the tokens of a single
        character, followed by a sorted list of those within words, which start with "##".
    """
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count

    # WordPiece represents a word completely or not at all, so one rare character removes its word.
    rare = {character for character, count in characters.items() if count < min_frequency}
    kept = {
        word: count
        for word, count in words.items()
        if len(word) <= MAX_WORD_LENGTH and rare.isdisjoint(word)
    }

    # Every character also gets a token for the start of a word, as new texts may contain words that
    # start with it.
    initial = {character for word in kept for character in word}
    continuations = {f"##{character}" for word in kept for character in word[1:]}
    return kept, sorted(initial) + sorted(continuations)


# ------------------------------------------------------------------------------------------------
# vocabulary


def build_vocabulary(
    words: Mapping[str, int],
    alphabet: Sequence[str],
    options: VocabularyOptions,
    base: PreTrainedTokenizerBase,
) -> list[str]:
    """Return the tokens of the new vocabulary in the order of their ids.

    The vocabulary consists of BERT's special tokens and the trained tokens. With `extend`, it
    consists of the tokens of `base`, new characters, and the most useful new tokens.

    Args:
        words: Counts of the words.
        alphabet: Tokens of a single character, as `filter_words` returns them.
        options: Size of the vocabulary, minimum frequency of its tokens, and `extend`.
        base: Tokenizer to extend.

    Raises:
        UserError: If the vocabulary is too small for the alphabet, or the ids of `base` have gaps.
    """
    first_tokens = SPECIAL_TOKENS
    if options.extend is not None:
        first_tokens = _tokens_in_order(base, options.extend)

    # A character without a token would make [UNK] of every word that contains the character.
    existing = set(first_tokens)
    characters = [token for token in alphabet if token not in existing]
    required_size = len(first_tokens) + len(characters)
    if options.rounded_size < required_size:
        min_size = -(-required_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        raise UserError(
            f"`vocab_size` must be at least {min_size:,}, for {len(first_tokens):,} existing "
            f"tokens and the alphabet of the texts, got {options.vocab_size:,}. Increase "
            f"`--vocab-size`, or increase `--min-frequency` (now {options.min_frequency})."
        )

    if options.extend is None:
        max_size = options.rounded_size - len(first_tokens)
        return [*first_tokens, *train_wordpiece(words, alphabet, max_size, options.min_frequency)]

    # Train more tokens than there is room for, and select the most useful ones.
    max_new_tokens = options.rounded_size - required_size
    max_size = len(alphabet) + 3 * max_new_tokens
    trained = train_wordpiece(words, alphabet, max_size, options.min_frequency)
    tokens = [*first_tokens, *characters]
    existing = set(tokens)
    candidates = [token for token in trained if token not in existing]
    return [*tokens, *select_useful_tokens(words, tokens, candidates, max_new_tokens)]


def _tokens_in_order(tokenizer: PreTrainedTokenizerBase, name: str) -> list[str]:
    """Return the tokens of a tokenizer in the order of their ids.

    Raises:
        UserError: If the ids have gaps.
    """
    vocabulary = tokenizer.get_vocab()
    if vocabulary_size(tokenizer) > len(vocabulary):
        raise UserError(
            f"the ids of the tokenizer {name} must have no gaps, got {len(vocabulary):,} tokens "
            f"with ids up to {vocabulary_size(tokenizer) - 1:,}. Remove duplicate lines from its "
            "vocab.txt."
        )
    return sorted(vocabulary, key=vocabulary.__getitem__)


def train_wordpiece(
    words: Mapping[str, int], alphabet: Sequence[str], max_size: int, min_frequency: int
) -> list[str]:
    """Train a WordPiece vocabulary on word counts.

    Args:
        words: Counts of the words.
        alphabet: Tokens of a single character, as `filter_words` returns them.
        max_size: Maximum number of tokens.
        min_frequency: Minimum number of occurrences of a pair of tokens that is merged.

    Returns:
        The alphabet, followed by the merged tokens in the order of their frequency.
    """
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    # The words were split before. The trainer only separates them at the spaces.
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=max_size,
        min_frequency=min_frequency,
        # The ids of the tokens decide between two merges of equal frequency. Special tokens have
        # fixed ids; without them the result would differ between runs.
        special_tokens=list(alphabet),
        limit_alphabet=len(alphabet),
        initial_alphabet=[token for token in alphabet if len(token) == 1],
    )
    backend.train_from_iterator(_repeated_words(words), trainer)
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _repeated_words(words: Mapping[str, int], chunk_size: int = 100_000) -> Iterable[str]:
    """Yield each word as often as it was counted, in texts of at most `chunk_size` words."""
    # The trainer accepts texts and no counts. Sorted words make the result independent of the order
    # of the texts.
    for word, count in sorted(words.items()):
        for start in range(0, count, chunk_size):
            yield f"{word} " * min(chunk_size, count - start)


def select_useful_tokens(
    words: Mapping[str, int],
    vocabulary: Sequence[str],
    candidates: Sequence[str],
    max_tokens: int,
) -> list[str]:
    """Select the tokens that shorten the tokenized words most.

    The usefulness of a candidate is the number of times that it is used if all candidates are part
    of the vocabulary, multiplied by the number of tokens that it saves each time.

    Args:
        words: Counts of the words.
        vocabulary: Existing tokens.
        candidates: Tokens to select from.
        max_tokens: Maximum number of tokens to select.

    Returns:
        The selected tokens, the most useful first.
    """
    # Candidates compete: a long token takes occurrences from the short tokens it contains.
    uses: Counter[str] = Counter()
    extended_model = _wordpiece_model([*vocabulary, *candidates])
    for word, count in words.items():
        for token in extended_model.tokenize(word):
            uses[token.value] += count

    # A candidate that starts with "##" would be replaced by tokens that start with "##", too. This
    # model applies them at the start of its input.
    initial_model = _wordpiece_model(vocabulary)
    continuations = [token for token in vocabulary if token.startswith("##")]
    continuation_model = _wordpiece_model(
        [*(token.removeprefix("##") for token in continuations), *continuations]
    )

    usefulness = {}
    for candidate in candidates:
        if candidate.startswith("##"):
            replacement = continuation_model.tokenize(candidate.removeprefix("##"))
        else:
            replacement = initial_model.tokenize(candidate)
        usefulness[candidate] = uses[candidate] * (len(replacement) - 1)

    # Candidates that are equally useful are sorted by their text, so the result is
    # reproducible.
    best = sorted(candidates, key=lambda candidate: (-usefulness[candidate], candidate))
    return [candidate for candidate in best if usefulness[candidate] > 0][:max_tokens]


def _wordpiece_model(tokens: Iterable[str]) -> models.WordPiece:
    """Return a WordPiece model with [UNK] and these tokens; duplicates are ignored."""
    distinct = dict.fromkeys(["[UNK]", *tokens])
    return models.WordPiece(
        {token: number for number, token in enumerate(distinct)},
        unk_token="[UNK]",
        max_input_chars_per_word=MAX_WORD_LENGTH,
    )


def pad_vocabulary(tokens: Sequence[str]) -> list[str]:
    """Append unused tokens, [unused99], [unused100], ..., up to a multiple of 64 tokens."""
    padded = list(tokens)
    existing = set(tokens)
    # [unused0] to [unused98] are special tokens.
    number = 99
    while len(padded) % VOCABULARY_MULTIPLE:
        token = f"[unused{number}]"
        if token not in existing:
            padded.append(token)
        number += 1
    return padded
