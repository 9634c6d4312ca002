"""How a tokenizer cuts text: the figures of `neobert tokenizer`, and what they say."""

import re
import unicodedata
from collections import Counter


_WORDS = re.compile(r"\w+")
_ROWS = (
    ("vocabulary", "vocabulary", "{:,}"),
    ("pieces_per_word", "pieces a word", "{:.3f}"),
    ("characters_per_token", "characters a token", "{:.3f}"),
    ("complete", "words kept complete", "{:.1%}"),
    ("unknown", "words that fall to [UNK]", "{:.2%}"),
)


def measure(tokenizer, texts):
    """Figures of a fast tokenizer on texts; a word is a run of letters, digits and underscores.

    Returns:
        dict: vocabulary, characters, words, tokens (punctuation among them), pieces_per_word ([UNK]
        is one piece), characters_per_token (spaces count), the shares `complete` and `unknown` of
        the words, and unknown_characters: {character: words that it makes [UNK]}.
    """
    words, tokens, characters = Counter(), 0, 0
    for start in range(0, len(texts), 1000):
        part = texts[start : start + 1000]
        words.update(word for text in part for word in _WORDS.findall(text))
        tokens += sum(map(len, _ids(tokenizer, part)))
        characters += sum(map(len, part))
    total, unk = max(1, words.total()), tokenizer.unk_token_id
    # Pieces of byte-level BPE tell words by the space before them.
    space = "" if type(tokenizer.backend_tokenizer.model).__name__ == "WordPiece" else " "
    pieces = complete = 0
    lost, unknown = Counter(), 0
    for word, ids in zip(words, _ids(tokenizer, [space + word for word in words])):
        pieces += len(ids) * words[word]
        if unk is not None and unk in ids:
            unknown += words[word]
            lost.update({character: words[word] for character in word})
        elif len(ids) == 1:
            complete += words[word]
    alone = dict(zip(lost, _ids(tokenizer, list(lost))))
    return {
        "vocabulary": len(tokenizer),
        "characters": characters,
        "words": words.total(),
        "tokens": tokens,
        "pieces_per_word": pieces / total,
        "characters_per_token": characters / max(1, tokens),
        "complete": complete / total,
        "unknown": unknown / total,
        "unknown_characters": {c: n for c, n in lost.most_common() if unk in alone[c]},
    }


def _ids(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def scripts(characters):
    """`Greek letters (\u03b1, \u03b2), CJK letters (\u6587)` of {character: count}, the most
    frequent first."""
    found = {}
    for character in characters:
        name = unicodedata.name(character, "unnamed").split()[0]
        name = name if name.isupper() and len(name) < 4 else name.title()
        kind = "letters" if character.isalpha() else "digits" if character.isnumeric() else "signs"
        found.setdefault(f"{name} {kind}", []).append(character)
    return ", ".join(f"{name} ({', '.join(them[:3])})" for name, them in list(found.items())[:4])


def readings(figures, name):
    """Sentences on what is lost."""
    share = figures["unknown"]
    if not share:
        return [f"{name}: no word falls to [UNK]."]
    because = (
        scripts(figures["unknown_characters"]) or "words of more than 100 characters, or signs"
    )
    return [f"{name}: {share:.2%} of words fall to [UNK]: {because}."]


def page(new, base, base_name, where):
    """The report in markdown.

    Args:
        new, base: as `measure` returns them.
        base_name: of the tokenizer that is compared with.
        where: one line on the text that was measured.
    """
    lines = [f"| | new | {base_name} |", "|---|---|---|"]
    lines += [
        f"| {words} | {form.format(new[name])} | {form.format(base[name])} |"
        for name, words, form in _ROWS
    ]
    ratio = new["tokens"] / max(1, base["tokens"])
    told = [f"A text takes {ratio:.2f} times the tokens that it takes with {base_name}."]
    told += readings(new, "New") + readings(base, base_name)
    return (
        "\n".join(["# Tokenizer", "", where, "", *lines, "", *(f"- {line}" for line in told)])
        + "\n"
    )
