"""What uncased tokens cost named entities: the same small NeoBERT pre-trained and fine-tuned with an uncased and with a cased vocabulary.

    python -m neobert.benchmarks.named_entities --text wikigold.conll.txt

Both vocabularies are WordPiece of one size, learnt from the pre-training text (WordNet and GCIDE). Each seed pre-trains anew, then fine-tunes by
examples/named_entities.py. Articles of the tagged text go to its test set by their hash. What is finished is not run again.
"""

import hashlib
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from ..common.arguments import Arguments, option, read_arguments
from ..common.commands import guarded
from ..common.errors import UserError
from ..common.files import write_json, write_text
from ..common.loading import ROOT
from ..common.local_text import gcide_entries, wordnet_entries
from ..common.results import environment, markdown_table, mean_and_deviation, write_result
from ..pretraining import pretrain
from ..pretraining.ablation_data import some, train_tokenizer


KINDS = {"uncased": "wordpiece", "cased": "wordpiece-cased"}


@dataclass
class NamedEntityBenchmark(Arguments):
    """Options of `python -m neobert.benchmarks.named_entities`."""

    text: str = option(help="tagged text, a word and its tag (B-PER, I-PER, O, ...) a line, such as WikiGold (Balasuriya et al. 2009)")
    output: str = option("results/named_entities", "path of the result without its ending")
    work: str = option("runs/named_entities", "folder of the models")
    seeds: list[int] = option(default_factory=lambda: [1, 2, 3], least=0)
    hidden: int = option(128, "width of the model", least=16)
    layers: int = option(4, least=1)
    vocabulary: int = option(4096, "pieces", least=300)
    texts: int = option(40_000, "of the pre-training text, at most", least=100)
    steps: int = option(1000, "of pre-training, of 32 texts", least=2)
    epochs: float = option(10.0, "of fine-tuning", above=0)
    learning_rate: float = option(1e-3, "of fine-tuning", above=0)


def read_tagged(path):
    """Articles of [(words, tags) of a sentence], tags as IOB2: the first word of a name is B-, whatever the file does."""
    articles, sentence = [[]], []
    for number, line in enumerate([*Path(path).read_text(encoding="utf-8").splitlines(), ""], 1):
        fields = line.split()
        if fields and not line.startswith("-DOCSTART-"):
            if len(fields) < 2 or fields[-1] != "O" and fields[-1][:2] not in ("B-", "I-"):
                raise UserError(f"{path}, line {number}: a word and its tag are expected, but this is {line!r}")
            sentence.append((fields[0], fields[-1]))
            continue
        if sentence:
            tags = [tag for _, tag in sentence]
            begins = [tag[:2] == "I-" and before[2:] != tag[2:] for before, tag in zip(["O", *tags], tags)]
            articles[-1].append(([word for word, _ in sentence], [f"B-{t[2:]}" if new else t for t, new in zip(tags, begins)]))
            sentence = []
        if line.startswith("-DOCSTART-"):
            articles.append([])
    return [article for article in articles if article]


def make_data(given):
    """Writes the text of the pre-training, both vocabularies, and the tagged sentences of training and test; returns the numbers of the two."""
    work, counts = Path(given.work), {"train": [], "test": []}
    for article in read_tagged(given.text):
        split = "test" if hashlib.sha1(json.dumps(article).encode()).digest()[0] < 64 else "train"
        counts[split] += [json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in article]
    for split, lines in counts.items():
        write_text(work / "tagged" / f"{split}.jsonl", "".join(lines))
    texts = some([row["text"] for entries in (wordnet_entries, gcide_entries) for row in entries()], given.texts)
    write_text(work / "text.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, kind in KINDS.items():
        if not (work / name / "tokenizer_config.json").is_file():
            train_tokenizer(texts, kind, given.vocabulary, work / name)
    return {split: len(lines) for split, lines in counts.items()}


def run_one(name, seed, given):
    """Entity F1 on the test set of one vocabulary and seed."""
    folder = Path(given.work) / f"{name}-{seed}"
    trainer = {
        "max_steps": given.steps, "learning_rate": 1.5e-3, "warmup_steps": given.steps // 10, "seed": seed, "report_to": "none",
        "logging_steps": 100, "save_steps": given.steps, "save_total_limit": 1, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    model = {
        "hidden_size": given.hidden, "num_hidden_layers": given.layers, "num_attention_heads": 4, "intermediate_size": 4 * given.hidden,
        "max_position_embeddings": 256,
    }  # fmt: skip
    recipe = {
        "model_config": model, "dataset": f"{given.work}/text.jsonl", "tokenizer": f"{given.work}/{name}", "column": "text", "max_length": 128,
        "texts_per_step": 32, "texts_per_batch": 32, "prepared": f"{given.work}/prepared-{name}", "output": str(folder), "trainer": trainer,
    }  # fmt: skip
    pretrain.execute(pretrain.run_of(recipe))
    path = ROOT / "examples" / "named_entities.py"
    spec = importlib.util.spec_from_file_location("named_entities", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = {
        "model": folder, "data": f"{given.work}/tagged", "output": f"{folder}-tagger", "epochs": given.epochs,
        "learning-rate": given.learning_rate, "seed": seed,
    }  # fmt: skip
    return example.main([piece for key, value in options.items() for piece in (f"--{key}", str(value))])["eval_f1"]


def page(given, scores, counts):
    """The result in markdown."""
    rows = []
    for name, found in scores.items():
        cells = [f"{100 * found[seed]:.1f}" for seed in given.seeds]
        rows.append([name, mean_and_deviation([100 * score for score in found.values()]), *cells])
    gains = [100 * (scores["cased"][seed] - scores["uncased"][seed]) for seed in given.seeds]
    rows.append(["cased over uncased", mean_and_deviation(gains, "+.1f"), *(f"{gain:+.1f}" for gain in gains)])
    return (
        f"Entity F1 (seqeval, exact spans and types) in percent, {Path(given.text).name}: {counts['train']:,} sentences to train on, "
        f"{counts['test']:,} of other articles to test. The model has {given.layers} layers of {given.hidden} and a WordPiece vocabulary of "
        f"{given.vocabulary:,}; {given.steps:,} steps of 32 texts of pre-training, {given.epochs:g} epochs of fine-tuning. Mean ± standard "
        f"deviation over {len(given.seeds)} seeds, which are of both. A model of this size knows hardly any name, so it leans on capitals "
        "more than a large one does.\n\n" + markdown_table(["vocabulary", "F1", *(f"seed {seed}" for seed in given.seeds)], rows)
    )


def main(argv=None):
    """Trains and measures, writes OUTPUT.json and .md; returns the exit code."""
    program = "python -m neobert.benchmarks.named_entities"
    (given,) = read_arguments([NamedEntityBenchmark], sys.argv[1:] if argv is None else argv, program, __doc__)
    counts, measured = make_data(given), Path(given.work) / "measured.json"
    settings = {key: value for key, value in asdict(given).items() if key not in ("output", "work", "seeds")}
    before = json.loads(measured.read_text()) if measured.is_file() else {"settings": settings, "f1": {name: {} for name in KINDS}}
    if before["settings"] != settings:
        raise UserError(f"{given.work} holds models with other settings; choose another --work")
    for seed in given.seeds:
        for name in KINDS:
            if str(seed) not in before["f1"][name]:
                before["f1"][name][str(seed)] = run_one(name, seed, given)
                write_json(measured, before)
    scores = {name: {seed: before["f1"][name][str(seed)] for seed in given.seeds} for name in KINDS}
    data = {"settings": settings, "sentences": counts, "f1": scores}
    text = page(given, scores, counts)
    print(write_result(given.output, "What uncased tokens cost named entities", environment(dtype="float32"), data, text))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("python -m neobert.benchmarks.named_entities", main))
