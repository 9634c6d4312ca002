"""Tests of the data of contrastive training.

Batches are sampled from one dataset by size^alpha, no text is its own negative, rows and judgments
become pairs, the recipe is the paper's, instructions reach the tokens of the query alone, and
validation queries are not trained on.
"""

import collections
import json
from pathlib import Path

import pytest
import torch
import yaml
from helpers.jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

from datasets import Dataset
from helpers.contrastive_runs import arguments_for, make_model_folder, make_pairs, make_triplets  # noqa: F401
from torch.utils.data import ConcatDataset

from neobert.common.errors import UserError
from neobert.contrastive.command import build_mixture, build_trainer, parse
from neobert.contrastive.data import (
    PairSource,
    SizeAlphaBatchSampler,
    TextsBatchSampler,
    check_batch,
    choose_validation_queries,
    example,
    load_source,
    lookup,
    unusable,
)
from neobert.contrastive.options import read_sources
from neobert.embeddings.packed_encoder import load_sentence_transformer


RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "contrastive.yaml"


def mixture(sizes, batch_size=4, **settings):
    parts = [
        Dataset.from_dict(
            {
                "anchor": [f"{k} a {i}" for i in range(n)],
                "positive": [f"{k} p {i}" for i in range(n)],
            }
        )
        for k, n in enumerate(sizes)
    ]
    samplers = [TextsBatchSampler(part, batch_size=batch_size, seed=3) for part in parts]
    return SizeAlphaBatchSampler(
        ConcatDataset(parts), batch_samplers=samplers, seed=3, **settings
    ), parts


def origins(sampler, sizes):
    bounds = torch.tensor(sizes).cumsum(0)
    batches = list(sampler)
    owners = [
        set(torch.searchsorted(bounds, torch.tensor(batch), right=True).tolist())
        for batch in batches
    ]
    assert all(len(owner) == 1 for owner in owners), "a batch mixes data sets"
    return [owner.pop() for owner in owners], batches


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_batches_are_drawn_by_size_to_the_alpha(alpha):
    sizes = [900, 100, 3600]
    sampler, _ = mixture(sizes, alpha=alpha)
    drawn = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        drawn += origins(sampler, sizes)[0]
    assert len(drawn) == 4 * 1150, "an epoch has as many batches as the data sets together"
    weights = [size**alpha for size in sizes]
    counts = collections.Counter(drawn)
    for number, weight in enumerate(weights):
        p = weight / sum(weights)
        error = (p * (1 - p) / len(drawn)) ** 0.5
        assert counts[number] / len(drawn) == pytest.approx(p, abs=4 * error)


def test_an_epoch_repeats_exactly_and_the_next_differs():
    sizes = [40, 40]
    several, (single, _) = mixture(sizes, alpha=0.5)[0], mixture([40], alpha=0.5)
    drawn, rows = [], []
    for epoch in (0, 1):
        several.set_epoch(epoch)
        single.set_epoch(epoch)
        assert list(several) == list(several), "a run could not be resumed"
        drawn.append(origins(several, sizes)[0])
        rows.append(list(single))
    assert drawn[0] != drawn[1], "two epochs draw the data sets in the same order"
    assert rows[0] != rows[1], "two epochs go through a data set in the same order"


def test_a_small_data_set_is_gone_through_completely_before_it_repeats():
    sizes = [200, 8]
    sampler, _ = mixture(sizes, alpha=0.0)
    owners, batches = origins(sampler, sizes)
    small = [index for owner, batch in zip(owners, batches) if owner == 1 for index in batch]
    assert len(small) > 16, "the small data set was hardly drawn, so this test would be vacuous"
    rounds = [tuple(small[i : i + 8]) for i in range(0, len(small) - 7, 8)]
    assert all(sorted(part) == list(range(200, 208)) for part in rounds)
    assert len(set(rounds)) > 1, "every round has the same order"


def test_the_processes_of_a_step_share_a_data_set():
    sizes = [64, 64, 64]
    sampler, _ = mixture(sizes, alpha=0.5, group=4)
    owners, batches = origins(sampler, sizes)
    assert len(batches) == len(sampler) == 48
    assert all(len(set(owners[i : i + 4])) == 1 for i in range(0, 48, 4))


def test_batch_texts_counts_every_column():
    names = ("anchor", "positive", "negative_1", "negative_2", "dataset_name")
    data = Dataset.from_dict({name: [f"{name} {i}" for i in range(50)] for name in names})
    for texts, rows in ((24, 6), (3, 2)):  # the name of the data set is no text
        sampler = TextsBatchSampler(data, batch_size=64, batch_texts=texts)
        assert sampler.batch_size == rows


def test_every_batch_reaches_a_process_whatever_its_size():
    """accelerate drops batches of another size than the sampler's `batch_size`; data sets have
    batches of different sizes."""
    accelerate = pytest.importorskip("accelerate.data_loader")
    parts = [
        Dataset.from_dict(
            {name: [f"{k} {name} {i}" for i in range(40)] for name in ("anchor", "positive")}
        )
        for k in range(2)
    ]
    samplers = [TextsBatchSampler(part, batch_size=size) for part, size in zip(parts, (4, 5))]
    sampler = SizeAlphaBatchSampler(
        ConcatDataset(parts), batch_samplers=samplers, alpha=0.0, group=2
    )
    shards = [list(accelerate.BatchSamplerShard(sampler, 2, process)) for process in (0, 1)]
    assert {len(batch) for batch in sampler} == {4, 5}
    assert [batch for step in zip(*shards) for batch in step] == list(sampler)


def test_a_batch_that_cannot_be_found_is_refused():
    """Rows that share a text do not go together, or it would be its own row's negative."""
    positives = [f"a {max(i, 1)}" for i in range(10)]
    anchors = [f"question {i}" for i in range(10)]
    data = Dataset.from_dict({"anchor": anchors, "positive": positives})
    source = PairSource(name="faq", path="f")
    check_batch(source, data, 9)
    with pytest.raises(UserError, match=r"faq \(f\): cannot form a batch of 10 .* from 10 usable"):
        check_batch(source, data, 10)


ROWS = {
    "set.0": ({"set": ["a", "b"]}, "a"),
    "set.query": ({"set": {"query": "q", "neg": ["x"]}}, "q"),
    "pos_paras.0.text": ({"pos_paras": [{"text": "t"}]}, "t"),
    "neg_paras.*.text": ({"neg_paras": [{"text": "t"}, {"text": "u"}]}, ["t", "u"]),
    "pos.3": ({"pos": ["a"]}, None),
    "neg.*": ({"neg": "text"}, None),
}


@pytest.mark.parametrize("path", ROWS)
def test_a_path_leads_into_the_row(path):
    row, expected = ROWS[path]
    assert lookup(row, path) == expected


def test_rows_become_examples_with_as_many_negatives_each():
    source = PairSource(
        name="x", path="x", anchor="q", positive="pos.0", negatives=["neg"], max_negatives=3
    )
    row = {"q": "q", "pos": ["p"], "neg": ["n1", "n2", "n3", "n4"]}
    negatives = {"negative_1": "n1", "negative_2": "n2", "negative_3": "n3"}
    assert example(row, source, 3) == {"anchor": "q", "positive": "p", **negatives}
    # A shorter list is repeated.
    assert example({**row, "neg": ["n1", "n2"]}, source, 3)["negative_3"] == "n1"
    assert unusable(row, source, 3) is None
    assert unusable({**row, "neg": []}, source, 3) == "without negative"
    assert unusable({**row, "neg": []}, source, 0) is None
    assert unusable({**row, "pos": ["  "]}, source, 3) == "without positive"
    assert unusable({**row, "q": None}, source, 3) == "without anchor"


@pytest.mark.parametrize("place", ["file", "data set of the library"])
def test_rows_that_are_left_out_are_logged(tmp_path, caplog, place):
    """Low scores, no score, no text; the rest keeps its order, and at most `max_negatives`."""
    rows = [{"anchor": f"s{i}", "positive": f"t{i}", "score": i / 2} for i in range(12)]
    rows = [{**row, "neg": ["n1", "n2", "n3"]} for row in rows]
    rows[3]["score"], rows[9]["positive"] = None, " "
    path = write_jsonl(tmp_path / "sts.jsonl", rows)
    path = str(path if place == "file" else tmp_path)
    settings = {"above": {"score": 4}, "negatives": ["neg"], "max_negatives": 2}
    data = load_source(PairSource(name="sts", path=path, **settings))
    negatives = {"negative_1": "n1", "negative_2": "n2"}
    assert data[:]["anchor"] == ["s10", "s11"]
    assert data[0] == {"anchor": "s10", "positive": "t10", **negatives}
    message = "sts: 10 of 12 rows are left out: 9 with a score not above 4, 1 without positive."
    assert message in caplog.messages


def test_the_recipe_of_the_paper():
    argv = [str(RECIPE), "--model", "m", "--output", "o", "--use_cpu", "true", "--bf16", "false"]
    options, training = parse(argv)
    sources = {source.name: source for source in read_sources(options.data, options.instructions)}
    assert options.data.validation_percent == 0
    assert len(sources) == 22 == len({source.instruction for source in sources.values()})
    assert all(source.instruction for source in sources.values())
    assert sources["sts12"].above == sources["sts-benchmark"].above == {"score": 4}
    assert (options.loss.temperature, options.loss.alpha, options.loss.batch_texts) == (
        0.07,
        0.5,
        128,
    )
    assert (options.encoder.pooling, training.max_steps) == ("mean", 2000)
    assert training.get_warmup_steps(2000) == 100, "a small part of the run, not all of it"
    qrels = {source.path for source in sources.values() if source.qrels}
    assert qrels == {"mteb/fever", "mteb/msmarco"}
    named_in_the_paper = "ag-news med-mcqa npr yahoo-answers amazon-qa paq trivia-qa wikihow"
    assert {*named_in_the_paper.split()} <= sources.keys()
    assert len(sources["pubmed-qa"].negatives) == 20 and len(sources["gooaq"].negatives) == 5


# A row of every data set of the recipe, in the columns that its card on the Hub documents: A
# anchor, P positive, N negatives.
SHAPES = {
    "ag-news": {"title": "A", "description": "P"},
    "all-nli": {"anchor": "A", "positive": "P", "negative": "N"},
    "amazon-qa": {"query": "A", "pos": ["P", "p"]},
    "concurrent-qa": {
        "question": "A",
        "pos_paras": [{"title": "", "text": "P"}],
        "neg_paras": [{"text": "N"}, {"text": "N"}],
    },
    "github-issues": {"anchor": "A", "positive": "P"},
    "gooaq": {"question": "A", "answer": "P", **{f"negative_{i}": "N" for i in range(1, 6)}},
    "med-mcqa": {
        "question": "A",
        "exp": "P",
        "cop": 1,
        "opa": "x",
        "opb": "x",
        "opc": "x",
        "opd": "x",
    },
    "npr": {"title": "A", "body": "P"},
    "paq": {"set": ["A", "P"]},
    "pubmed-qa": {"anchor": "A", "positive": "P", **{f"negative_{i}": "N" for i in range(1, 21)}},
    "qqp": {"set": {"query": "A", "pos": ["P"], "neg": ["N", "N"]}},
    "sentence-compression": {"set": ["P", "A"]},
    "stack-exchange-bodies": {"body1": "A", "body2": "P"},
    "stack-exchange-posts": {"post1": "A", "post2": "P"},
    "stack-overflow": {"query": "A", "positive": ["P"], "negative": ["N", "N"]},
    "sts12": {"sentence1": "A", "sentence2": "P", "score": 4.5},
    "sts-benchmark": {"sentence1": "A", "sentence2": "P", "score": 4.5},
    "trivia-qa": {"anchor": "A", "positive": "P", "negative": "N"},
    "wikihow": {"text": "A", "summary": "P"},
    "yahoo-answers": {"title": "A", "answer": "P"},
}


def test_every_data_set_of_the_recipe_gives_pairs(tmp_path):
    sources = {entry["name"]: entry for entry in yaml.safe_load(RECIPE.read_text())["datasets"]}
    # These two are read as queries, corpus and judgments.
    assert sources.keys() - SHAPES.keys() == {"fever", "ms-marco"}
    for name, row in SHAPES.items():
        path = str(write_jsonl(tmp_path / f"{name}.jsonl", [row] * 3))
        data = load_source(PairSource.from_entry({**sources[name], "path": path}))
        count = len([column for column in data.column_names if column.startswith("negative_")])
        assert data[0] == {
            "anchor": "A",
            "positive": "P",
            **{f"negative_{i + 1}": "N" for i in range(count)},
        }, f"{name} is read wrongly"
        assert (count > 0) == ("N" in json.dumps(row)), f"{name}: {count} negatives"


def test_judgments_queries_and_corpus_become_pairs(tmp_path):
    """MTEB's retrieval layout on the Hub: three subsets, joined by their ids."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}.jsonl\n"
            for name, split in (("default", "train"), ("queries", "queries"), ("corpus", "corpus"))
        )
        + "---\n"
    )
    judgments = [("q1", "d2", 1), ("q2", "d1", 1), ("q2", "d2", 0)]
    write_jsonl(
        tmp_path / "default.jsonl",
        [{"query-id": q, "corpus-id": d, "score": s} for q, d, s in judgments],
    )
    write_jsonl(
        tmp_path / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in (1, 2, 3)]
    )
    write_jsonl(
        tmp_path / "corpus.jsonl",
        [{"_id": f"d{i}", "title": f"Title {i}", "text": f"text {i}"} for i in (1, 2, 3)],
    )
    data = load_source(PairSource(name="fever", path=str(tmp_path), qrels=True))
    pairs = set(zip(data["anchor"], data["positive"]))
    # Judgments of 0 are not positives.
    assert pairs == {("query 1", "Title 2 text 2"), ("query 2", "Title 1 text 1")}


def mixture_of(argv):
    """Return the mixture, the options and the trainer's arguments of a command line."""
    options, training = parse(argv)
    sources = read_sources(options.data, options.instructions)
    return build_mixture(options, training, sources), options, training


def test_instructions_reach_the_tokens_of_the_query_alone(model_folder, triplets, pairs, tmp_path):
    """The library's trainer gives every row the name of its data set then, a text that all rows
    share: it must not count, or a batch would be of one row."""
    entries = [
        {"name": "animals", "path": triplets, "instruction": "Find the animal."},
        {"name": "things", "path": pairs, "instruction": "Find the color."},
    ]
    recipe = tmp_path / "recipe.yaml"
    values = {"datasets": entries, "instruction_template": "I: {instruction} Q: "}
    recipe.write_text(yaml.safe_dump(values))
    mixture, options, training = mixture_of(
        [str(recipe), *arguments_for(model_folder, tmp_path / "out")]
    )
    animals = mixture.parts["animals"]
    assert animals.data.column_names == ["anchor", "positive", "negative_1"]
    model = load_sentence_transformer(str(model_folder), max_length=32)
    seen = set()
    trainer = build_trainer(model, mixture, options.loss, training)
    for batch in trainer.get_train_dataloader():
        name = batch["dataset_name"]
        asks = {"animals": "i : find the animal. q :", "things": "i : find the color. q :"}[name]
        anchor, positive = (
            model.tokenizer.decode(batch[f"{column}_input_ids"][0], skip_special_tokens=True)
            for column in ("anchor", "positive")
        )
        assert anchor.startswith(asks) and "find the" not in positive
        assert len(batch["anchor_input_ids"]) == 8
        seen.add(name)
    assert seen == {"animals", "things"}, "vacuous: a data set was never drawn"


def test_instructions_of_a_file(model_folder, triplets, pairs, tmp_path):
    texts = {"triplets": "Find the animal: its color.", "pairs": ""}
    path = tmp_path / "instructions.yaml"
    path.write_text(yaml.safe_dump(texts))
    options = ["--pairs", triplets, pairs, "--instruction", "ours", "--instructions", str(path)]
    argv = arguments_for(model_folder, tmp_path / "out", *options)
    prompts = mixture_of(argv)[0].prompts
    assert prompts == {"triplets": {"anchor": "Instruction: Find the animal: its color. Query: "}}
    path.write_text(yaml.safe_dump({"triplets": "x"}))
    message = "has no instruction for pairs. Add one for every dataset, '' for none."
    with pytest.raises(UserError, match=message):
        mixture_of(argv)


def test_a_file_that_changed_is_read_anew(tmp_path):
    """The library keeps what it made of a file."""
    path = tmp_path / "faq.csv"
    rows = "".join(f'"question, {i}",answer {i}\n' for i in range(9))
    path.write_text(f"anchor,positive\n{rows}")
    source = PairSource(name="faq", path=str(path))
    assert load_source(source)[3] == {"anchor": "question, 3", "positive": "answer 3"}
    path.write_text(path.read_text().replace("question, 3", "question, 99"))
    assert load_source(source)[3]["anchor"] == "question, 99"


@pytest.mark.parametrize(
    "count, percent, expected",
    [(199, 5, 0), (200, 5, 20), (200, 0, 0), (1000, 5, 50), (1000, 20, 200), (20_000, 5, 500)],
)
def test_the_number_of_validation_queries(count, percent, expected):
    questions = [f"question {i}" for i in range(count)]
    chosen = choose_validation_queries(questions * 2, percent)
    assert len(chosen) == expected and chosen <= set(questions)
    # The order of the file does not matter.
    assert choose_validation_queries(questions[::-1], percent) == chosen


def test_validation_queries_are_held_out_from_all_datasets(model_folder, tmp_path):
    for name, other in (("first", "x"), ("second", "y")):
        rows = [
            {"anchor": f"{'both' if i < 40 else other} {i}", "positive": f"{name} {i}"}
            for i in range(150)
        ]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("first", "second")]
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", *files)

    mixture = mixture_of(argv)[0]
    anchors = {text for part in mixture.parts.values() for text in part.data["anchor"]}
    validation = mixture.validation
    # 260 different queries: 5 % are 13, and at least 20 are held out.
    assert len(validation.relevant) == 20 and len(anchors) == 240
    assert not anchors & validation.relevant.keys()
    shared = [text for text in validation.relevant if text.startswith("both")]
    assert shared and all(len(validation.relevant[text]) == 2 for text in shared)
    assert set(validation.texts) == set().union(*validation.relevant.values())

    whole = mixture_of([*argv, "--validation-percent", "0"])[0]
    assert whole.validation is None
    assert [len(part.data) for part in whole.parts.values()] == [150, 150]
