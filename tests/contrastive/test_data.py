"""Tests of the data of contrastive training: samplers, datasets, instructions, and validation."""

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
    DistinctTextsBatchSampler,
    PairSource,
    SizeAlphaBatchSampler,
    build_example,
    check_batch,
    choose_validation_queries,
    load_source,
    lookup,
    reason_to_skip,
    with_negatives,
)
from neobert.contrastive.options import OPTIONS, read_sources
from neobert.embeddings.packed_encoder import load_sentence_transformer
from neobert.evaluation.retrieval import queries_from_rows


RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "contrastive.yaml"


def mixture(sizes, batch_size=4, **settings):
    """Return (batch sampler, datasets) of datasets with different texts.

    Args:
        sizes: Number of rows of each dataset.
        batch_size: Number of rows per batch.
        settings: Arguments of `SizeAlphaBatchSampler`.
    """
    parts = [
        Dataset.from_dict(
            {
                "anchor": [f"{k} a {i}" for i in range(n)],
                "positive": [f"{k} p {i}" for i in range(n)],
            }
        )
        for k, n in enumerate(sizes)
    ]
    samplers = [DistinctTextsBatchSampler(part, batch_size=batch_size, seed=3) for part in parts]
    return SizeAlphaBatchSampler(
        ConcatDataset(parts), batch_samplers=samplers, seed=3, **settings
    ), parts


def origins(sampler, sizes):
    """Return (index of the dataset of each batch, batches) of an epoch."""
    bounds = torch.tensor(sizes).cumsum(0)
    batches = list(sampler)
    dataset_sets = [
        set(torch.searchsorted(bounds, torch.tensor(batch), right=True).tolist())
        for batch in batches
    ]
    assert all(len(indices) == 1 for indices in dataset_sets), "a batch mixes datasets"
    return [indices.pop() for indices in dataset_sets], batches


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_sampling_is_proportional_to_size_power_alpha(alpha):
    """Datasets are sampled with probability proportional to size^alpha."""
    sizes = [900, 100, 3600]
    sampler, _ = mixture(sizes, alpha=alpha)

    dataset_indices = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        dataset_indices += origins(sampler, sizes)[0]
    assert len(dataset_indices) == 4 * 1150, (
        "an epoch must have as many batches as all datasets together"
    )

    weights = [size**alpha for size in sizes]
    counts = collections.Counter(dataset_indices)
    # The observed frequencies are within four standard errors of the probabilities.
    for index, weight in enumerate(weights):
        p = weight / sum(weights)
        error = (p * (1 - p) / len(dataset_indices)) ** 0.5
        assert counts[index] / len(dataset_indices) == pytest.approx(p, abs=4 * error)


def test_epochs_are_reproducible_and_differ():
    """An epoch has the same batches in every run, so that a run can be resumed."""
    sizes = [40, 40]
    mixture_sampler = mixture(sizes, alpha=0.5)[0]
    single_sampler, _ = mixture([40], alpha=0.5)

    dataset_orders = []
    row_orders = []
    for epoch in (0, 1):
        mixture_sampler.set_epoch(epoch)
        single_sampler.set_epoch(epoch)
        assert list(mixture_sampler) == list(mixture_sampler), "an epoch is not reproducible"
        dataset_orders.append(origins(mixture_sampler, sizes)[0])
        row_orders.append(list(single_sampler))

    assert dataset_orders[0] != dataset_orders[1], "two epochs have the same order of datasets"
    assert row_orders[0] != row_orders[1], "two epochs have the same order of rows"


def test_small_dataset_is_exhausted_before_it_repeats():
    """Each repetition of a small dataset contains all of its rows, in another order."""
    sizes = [200, 8]
    sampler, _ = mixture(sizes, alpha=0.0)
    dataset_indices, batches = origins(sampler, sizes)
    small = [row for index, batch in zip(dataset_indices, batches) if index == 1 for row in batch]
    assert len(small) > 16, "the small dataset was sampled too rarely to be repeated"
    rounds = [tuple(small[i : i + 8]) for i in range(0, len(small) - 7, 8)]
    assert all(sorted(part) == list(range(200, 208)) for part in rounds)
    assert len(set(rounds)) > 1, "every round has the same order"


def test_processes_sample_from_the_same_dataset_per_step():
    """The batches of all processes in a step are from the same dataset."""
    sizes = [64, 64, 64]
    sampler, _ = mixture(sizes, alpha=0.5, num_processes=4)
    dataset_indices, batches = origins(sampler, sizes)
    assert len(batches) == len(sampler) == 48
    assert all(len(set(dataset_indices[i : i + 4])) == 1 for i in range(0, 48, 4))


def test_batch_texts_counts_every_column():
    """`batch_texts` counts all columns, except for the name of the dataset."""
    names = ("anchor", "positive", "negative_1", "negative_2", "dataset_name")
    data = Dataset.from_dict({name: [f"{name} {i}" for i in range(50)] for name in names})
    for texts, rows in ((24, 6), (3, 2)):
        sampler = DistinctTextsBatchSampler(data, batch_size=64, batch_texts=texts)
        assert sampler.batch_size == rows


def test_batches_of_all_sizes_are_sharded_across_processes():
    """Batches of all sizes reach the processes.

    accelerate drops batches whose size differs from the `batch_size` of the sampler, but datasets
    have batches of different sizes.
    """
    accelerate = pytest.importorskip("accelerate.data_loader")
    parts = [
        Dataset.from_dict(
            {name: [f"{k} {name} {i}" for i in range(40)] for name in ("anchor", "positive")}
        )
        for k in range(2)
    ]

    samplers = [
        DistinctTextsBatchSampler(part, batch_size=size) for part, size in zip(parts, (4, 5))
    ]
    sampler = SizeAlphaBatchSampler(
        ConcatDataset(parts), batch_samplers=samplers, alpha=0.0, num_processes=2
    )

    shards = [list(accelerate.BatchSamplerShard(sampler, 2, process)) for process in (0, 1)]

    assert {len(batch) for batch in sampler} == {4, 5}
    assert [batch for step in zip(*shards) for batch in step] == list(sampler)


def test_batch_without_enough_distinct_rows_is_refused():
    """A batch has no two rows with the same text.

    The positive of one row would otherwise be a negative of the other row. Here two rows have the
    same positive, so nine rows can form a batch, and ten cannot.
    """
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
def test_lookup(path):
    """Check that `lookup` finds the value at a path, or returns None."""
    row, expected = ROWS[path]
    assert lookup(row, path) == expected


def test_examples_have_equal_numbers_of_negatives():
    """All examples of a dataset have the same number of negatives."""
    source = PairSource(
        name="x", path="x", anchor="q", positive="pos.0", negatives=["neg"], max_negatives=3
    )
    row = {"q": "q", "pos": ["p"], "neg": ["n1", "n2", "n3", "n4"]}
    negatives = {"negative_1": "n1", "negative_2": "n2", "negative_3": "n3"}
    assert build_example(row, source, 3) == {"anchor": "q", "positive": "p", **negatives}

    # A shorter list is repeated.
    assert build_example({**row, "neg": ["n1", "n2"]}, source, 3)["negative_3"] == "n1"

    # Half of a surrogate pair cannot be stored.
    surrogates = {"q": "\ud83d", "pos": ["\ud83d"], "neg": ["\ud83d"]}
    assert set(build_example(surrogates, source, 3).values()) == {"\ufffd"}

    assert reason_to_skip(row, source, 3) is None
    assert reason_to_skip({**row, "neg": []}, source, 3) == "without negative"
    assert reason_to_skip({**row, "neg": []}, source, 0) is None
    assert reason_to_skip({**row, "pos": ["  "]}, source, 3) == "without positive"
    assert reason_to_skip({**row, "q": None}, source, 3) == "without anchor"


def test_only_numbered_columns_are_negatives(tmp_path):
    """Columns such as `negative_id` and `negative_score` contain no negatives."""
    row = {"anchor": "a", "positive": "p", "negative": "n", "negative_1": "n1", "negative_12": "n2"}
    row |= {"negative_id": "id", "negative_score": 0.5, "negative_": "x", "my_negative": "y"}
    row |= {"negatives": "z", "negative_1_score": 0.5}
    path = str(write_jsonl(tmp_path / "a.jsonl", [row] * 2))

    source = with_negatives(PairSource(name="a", path=path))
    assert source.negatives == ["negative", "negative_1", "negative_12"]
    negatives = {"negative_1": "n", "negative_2": "n1", "negative_3": "n2"}
    assert load_source(source)[0] == {"anchor": "a", "positive": "p", **negatives}

    queries = queries_from_rows([row])
    assert queries.relevant == {"a": {"p"}}
    assert queries.texts == ["p", "n", "n1", "n2"]


@pytest.mark.parametrize("order", [1, -1])
def test_any_row_may_have_negatives(tmp_path, caplog, order):
    """The columns of negatives are those of all rows; a row without negatives is left out."""
    rows = [
        {"anchor": "a", "positive": "p"},
        {"anchor": "b", "positive": "q", "negative_1": "n"},
        {"anchor": "c", "positive": "r", "negative": "m"},
    ]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows[::order]))
    source = with_negatives(PairSource(name="a", path=path))
    assert sorted(source.negatives) == ["negative", "negative_1"]
    assert sorted(load_source(source)["negative_1"]) == ["m", "n"]
    assert "a: 1 of 3 rows are left out: 1 without negative." in caplog.messages


def test_missing_columns_are_reported(tmp_path):
    """Every row needs the anchor, and at least one row the negatives that a recipe names."""
    row = {"anchor": "a", "positive": "p"}
    path = str(write_jsonl(tmp_path / "a.jsonl", [row]))
    with pytest.raises(UserError, match="a.jsonl has no row with the column 'neg'"):
        load_source(PairSource(name="a", path=path, negatives=["neg.0"]))

    write_jsonl(tmp_path / "a.jsonl", [row, {"positive": "p"}])
    with pytest.raises(UserError, match="row 2: there is no column 'anchor'. Columns: positive"):
        load_source(PairSource(name="a", path=path))


@pytest.mark.parametrize("place", ["file", "data set of the library"])
def test_rows_that_are_left_out_are_logged(tmp_path, caplog, place):
    """Rows without a text or with a low or missing score are left out, and the counts are logged.

    The order of the other rows and at most `max_negatives` of their negatives are kept.
    """
    rows = [{"anchor": f"s{i}", "positive": f"t{i}", "score": i / 2} for i in range(12)]
    rows = [{**row, "neg": ["n1", "n2", "n3"]} for row in rows]
    rows[3]["score"] = None
    rows[9]["positive"] = " "

    path = write_jsonl(tmp_path / "sts.jsonl", rows)
    path = str(path if place == "file" else tmp_path)

    settings = {"above": {"score": 4}, "negatives": ["neg"], "max_negatives": 2}
    negatives = {"negative_1": "n1", "negative_2": "n2"}
    message = "sts: 10 of 12 rows are left out: 9 with a score not above 4, 1 without positive."

    # The second time, the data comes from the cache of the library.
    for _ in range(2):
        caplog.clear()
        data = load_source(PairSource(name="sts", path=path, **settings))
        assert data[:]["anchor"] == ["s10", "s11"]
        assert data[0] == {"anchor": "s10", "positive": "t10", **negatives}
        assert message in caplog.messages


def test_recipe_matches_the_paper():
    """The recipe has the datasets and the hyperparameters of the paper."""
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
    assert training.get_warmup_steps(2000) == 100, "the warmup must be a small part of the run"

    qrels = {source.path for source in sources.values() if source.qrels}
    assert qrels == {"mteb/fever", "mteb/msmarco"}
    named_in_the_paper = "ag-news med-mcqa npr yahoo-answers amazon-qa paq trivia-qa wikihow"
    assert {*named_in_the_paper.split()} <= sources.keys()
    assert len(sources["pubmed-qa"].negatives) == 20 and len(sources["gooaq"].negatives) == 5


# A row of each dataset of the recipe with the columns of its dataset card on the Hub. "A" is the
# anchor, "P" the positive, and "N" a negative.
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


def test_recipe_paths_match_dataset_columns(tmp_path):
    """The paths of the recipe find the anchors, positives and negatives of each dataset."""
    sources = {entry["name"]: entry for entry in yaml.safe_load(RECIPE.read_text())["datasets"]}
    # These two datasets have the layout of MTEB: queries, corpus and relevance judgments.
    assert sources.keys() - SHAPES.keys() == {"fever", "ms-marco"}

    for name, row in SHAPES.items():
        path = str(write_jsonl(tmp_path / f"{name}.jsonl", [row] * 3))
        data = load_source(PairSource.from_entry({**sources[name], "path": path}))
        count = len([column for column in data.column_names if column.startswith("negative_")])
        assert data[0] == {
            "anchor": "A",
            "positive": "P",
            **{f"negative_{i + 1}": "N" for i in range(count)},
        }, f"the columns of {name} are wrong"
        assert (count > 0) == ("N" in json.dumps(row)), f"{name} has {count} negatives"


def test_mteb_retrieval_layout_becomes_pairs(tmp_path):
    """Check MTEB's retrieval layout on the Hub: three subsets, joined by their ids."""
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
    # A judgment with the score 0 states that the document is not relevant.
    assert pairs == {("query 1", "Title 2 text 2"), ("query 2", "Title 1 text 1")}


def mixture_of(argv):
    """Return the mixture, the options and the training arguments of a command line."""
    options, training = parse(argv)
    sources = read_sources(options.data, options.instructions)
    return build_mixture(options, training, sources), options, training


def test_instructions_are_prepended_to_queries_only(model_folder, triplets, pairs, tmp_path):
    """Instructions are prepended to the queries, and not to the positives.

    The trainer of sentence-transformers adds the name of the dataset to each row if there are
    prompts. This column is the same in all rows, so a sampler that compares it would form batches
    of one row.
    """
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
    sampled_datasets = set()
    trainer = build_trainer(model, mixture, options.loss, training)
    for batch in trainer.get_train_dataloader():
        name = batch["dataset_name"]
        prefix = {"animals": "i : find the animal. q :", "things": "i : find the color. q :"}[name]
        anchor, positive = (
            model.tokenizer.decode(batch[f"{column}_input_ids"][0], skip_special_tokens=True)
            for column in ("anchor", "positive")
        )
        assert anchor.startswith(prefix) and "find the" not in positive
        assert len(batch["anchor_input_ids"]) == 8
        sampled_datasets.add(name)
    assert sampled_datasets == {"animals", "things"}, "a dataset was not sampled"


def test_empty_instruction_is_the_default():
    """`--instruction ""` is accepted, and means no instruction."""
    line = ["--pairs", "a.jsonl", "--model", "m", "--output", "o"]
    options = OPTIONS["contrastive"].read([*line, "--instruction", ""])
    assert options.instructions.instruction == ""
    assert options == OPTIONS["contrastive"].read(line)


def test_instructions_from_file(model_folder, triplets, pairs, tmp_path):
    """`--instructions` replaces `--instruction`; an empty text means no instruction."""
    instructions = {"triplets": "Find the animal: its color.", "pairs": ""}
    path = tmp_path / "instructions.yaml"
    path.write_text(yaml.safe_dump(instructions))

    options = ["--pairs", triplets, pairs, "--instruction", "ours", "--instructions", str(path)]
    argv = arguments_for(model_folder, tmp_path / "out", *options)
    prompts = mixture_of(argv)[0].prompts
    assert prompts == {"triplets": {"anchor": "Instruction: Find the animal: its color. Query: "}}

    path.write_text(yaml.safe_dump({"triplets": "x"}))
    message = "has no instruction for pairs. Add one for every dataset, '' for none."
    with pytest.raises(UserError, match=message):
        mixture_of(argv)


def test_changed_file_is_read_again(tmp_path):
    """The `datasets` library caches the rows of a file, also if the file changes."""
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
    validation_queries = choose_validation_queries(questions * 2, percent)
    assert len(validation_queries) == expected and validation_queries <= set(questions)
    # The result does not depend on the order of the queries.
    assert choose_validation_queries(questions[::-1], percent) == validation_queries


def test_validation_queries_are_held_out_from_all_datasets(model_folder, tmp_path):
    """A validation query is removed from all datasets, and keeps its positives of all of them."""
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

    # There are 260 distinct queries, of which 5 % are 13. The minimum is 20.
    assert len(validation.relevant) == 20 and len(anchors) == 240
    assert not anchors & validation.relevant.keys()
    shared = [text for text in validation.relevant if text.startswith("both")]
    assert shared and all(len(validation.relevant[text]) == 2 for text in shared)
    assert set(validation.texts) == set().union(*validation.relevant.values())

    complete = mixture_of([*argv, "--validation-percent", "0"])[0]
    assert complete.validation is None
    assert [len(part.data) for part in complete.parts.values()] == [150, 150]


def test_copies_of_validation_queries_are_not_trained_on(model_folder, tmp_path):
    """Copies of a validation query with other capital letters or spaces are not trained on."""
    pairs = [{"anchor": f"where is {i}", "positive": f"b {i}"} for i in range(300)]
    copies = [{**row, "anchor": row["anchor"].upper() + " "} for row in pairs]
    path = write_jsonl(tmp_path / "pairs.jsonl", [*pairs, *copies])
    mixture = mixture_of(arguments_for(model_folder, tmp_path / "out", "--pairs", str(path)))[0]
    anchors = {anchor.lower().strip() for anchor in mixture.parts["pairs"].data["anchor"]}
    queries = {query.lower().strip() for query in mixture.validation.relevant}
    assert len(queries) >= 20 and not anchors & queries

    # The same is true of the queries of a file.
    other = write_jsonl(tmp_path / "test.jsonl", [*copies[:1], {"anchor": "new", "positive": "x"}])
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", str(path))
    mixture = mixture_of([*argv, "--validation-file", str(other)])[0]
    assert mixture.validation.relevant.keys() == {"new"}


def test_reversed_pairs_of_validation_queries_are_not_trained_on(model_folder, tmp_path, caplog):
    """A validation query is no positive of the training data, such as in a reversed pair."""
    pairs = [{"anchor": f"a {i}", "positive": f"b {i}"} for i in range(150)]
    reverse = [{"anchor": row["positive"], "positive": row["anchor"]} for row in pairs]
    path = write_jsonl(tmp_path / "pairs.jsonl", [*pairs, *reverse])
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", str(path))
    caplog.set_level("INFO")

    mixture = mixture_of(argv)[0]
    data = mixture.parts["pairs"].data
    relevant = mixture.validation.relevant
    assert len(relevant) == 20
    assert not relevant.keys() & {*data["anchor"], *data["positive"]}

    # A pair is not trained on if one of its two texts is a validation query.
    pair_count = len({query.split()[1] for query in relevant})
    assert len(data) == 300 - 2 * pair_count
    message = f"pairs: {2 * pair_count - 20} rows whose positive is a validation query, or that"
    assert message in caplog.text
