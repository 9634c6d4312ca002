"""Tests of `neobert mteb`: benchmarks, scores, tables, instructions, cached results, and errors."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch


pytest.importorskip("mteb")
pytest.importorskip("sentence_transformers")

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.results import BenchmarkResults, ModelResult, TaskResult
from mteb.types import PromptType
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from transformers import AutoTokenizer

from benchmarks import local_tasks
from benchmarks.local_text import is_held_out
from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common import loading
from neobert.common.errors import UserError
from neobert.common.published import MTEB, MTEB_TYPES
from neobert.embeddings.instructions import check_template
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.evaluation.mteb import (
    PackedModel,
    choose_tasks,
    fingerprint,
    main,
    resolve_instructions,
)
from neobert.evaluation.mteb_tables import averages, write_tables
from neobert.evaluation.options import BENCHMARKS, OPTIONS


WORDS = "red green blue black cat dog bird fish runs sleeps eats swims".split()
TEXTS = [f"{a} {b}" for a in WORDS[:4] for b in WORDS[4:8]]


def small_model(folder, tokenizer_dir, seed=1):
    """Save a small NeoBERT with random weights, and return its directory."""
    torch.manual_seed(seed)
    config = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    NeoBERTModel(NeoBERTConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer_dir):
    return small_model(tmp_path_factory.mktemp("encoder"), tokenizer_dir)


@pytest.fixture(scope="module")
def encoder(model_folder):
    return PackedEncoder(model_folder, dtype="float32", device="cpu")


def metadata(name, kind, score, prompt):
    """Return the metadata of a task.

    Args:
        name: Name of the task.
        kind: Type of the task.
        score: Name of the main score.
        prompt: Instruction, or instructions by type of the text.
    """
    return local_tasks._metadata(name, kind, "", score, prompt, "x/y", "https://example.org")


class TinyRetrieval(AbsTaskRetrieval):
    """Retrieval task with the layout of NanoBEIR."""

    metadata = metadata("TinyRetrieval", "Retrieval", "ndcg_at_10", {"query": "Find me."})
    relevant = {f"q{i}": {f"d{j}": 1 for j in range(i, i + 8, 3)} for i in range(8)}

    def load_data(self, **kwargs):
        queries, documents = ([f"{kind}{i}" for i in range(16)] for kind in "qd")
        split = {
            "queries": Dataset.from_dict({"id": queries[:8], "text": TEXTS[:8]}),
            "corpus": Dataset.from_dict({"id": documents, "title": [""] * 16, "text": TEXTS}),
            "relevant_docs": self.relevant,
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class OtherRetrieval(TinyRetrieval):
    """Task with the texts of `TinyRetrieval`."""

    metadata = TinyRetrieval.metadata.model_copy(update={"name": "OtherRetrieval"})


class BrokenRetrieval(TinyRetrieval):
    """Task whose data cannot be loaded."""

    metadata = TinyRetrieval.metadata.model_copy(update={"name": "BrokenRetrieval"})

    def load_data(self, **kwargs):
        raise ConnectionError("no network here")


class TinySTS(AbsTaskSTS):
    metadata = metadata("TinySTS", "STS", "cosine_spearman", "Find the same.")

    def load_data(self, **kwargs):
        columns = {"sentence1": TEXTS[:8], "sentence2": TEXTS[8:], "score": np.arange(8) / 8}
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


class TinyAggregate(AbsTaskAggregate):
    metadata = AggregateTaskMetadata(
        name="TinyAggregate",
        description="Mean of two retrieval tasks, as CQADupstack is of twelve.",
        tasks=[TinyRetrieval(), OtherRetrieval()],
        main_score="ndcg_at_10",
        type="Retrieval",
        eval_splits=["test"],
        bibtex_citation="",
    )


TASKS = (TinyRetrieval, TinySTS, BrokenRetrieval, TinyAggregate)


def mteb_options(model, **values):
    """Return the options of `neobert mteb` for a model."""
    argv = ["--model", model, "--output", "o"]
    for name, value in values.items():
        argv += [f"--{name}", value]
    return OPTIONS["mteb"].read(argv)


def run(model_folder, output, *tasks, name="tiny", **options):
    """Run `neobert mteb` on some of `TASKS`, and return its result."""
    argv = ["--model", model_folder, "--output", str(output), "--name", name, "--tasks", *tasks]
    for key, value in {"dtype": "float32", **options}.items():
        argv += [f"--{key}", value]
    assert main(argv, {task.metadata.name: [task()] for task in TASKS}) == 0
    return json.loads((output / f"{name}.json").read_text())


# Number of tasks per type, in the order of MTEB_TYPES.
COUNTS = {
    "MTEB(eng, v1)": (12, 11, 3, 4, 15, 10, 1),
    "MTEB(eng, v2)": (8, 8, 3, 2, 10, 9, 1),
    "NanoBEIR": (0, 0, 0, 0, 13, 0, 0),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_tasks_of_a_benchmark(name):
    """Check the number of tasks per type, and settings of single tasks."""
    tasks = {task.metadata.name: task for task in choose_tasks([name])}
    counts = Counter(task.metadata.type for task in tasks.values())
    assert tuple(counts[kind] for kind in MTEB_TYPES) == COUNTS[name]

    if name == "MTEB(eng, v1)":
        assert len(tasks["CQADupstackRetrieval"].tasks) == 12, "the task must combine 12 forums"
        assert list(tasks["MSMARCO"].eval_splits) == ["dev"]
    if name == "NanoBEIR":
        assert {task.metadata.main_score for task in tasks.values()} == {"ndcg_at_10"}


def subsets_and_splits(names):
    """Return {name: (subsets, splits)} of the tasks that are chosen for `--tasks`."""
    return {
        task.metadata.name: (list(task.hf_subsets), list(task.eval_splits))
        for task in choose_tasks(names)
    }


def test_a_single_task_has_the_definition_of_its_benchmark():
    """A single task has the subsets and splits of the English benchmarks, also next to them."""
    expected = {
        "STS17": (["en-en"], ["test"]),
        "STS22": (["en"], ["test"]),
        "MTOPDomainClassification": (["en"], ["test"]),
        "AmazonCounterfactualClassification": (["en"], ["test"]),
    }
    assert subsets_and_splits(expected) == expected
    benchmark = "MTEB(eng, v1)"
    assert subsets_and_splits([benchmark, *expected]) == subsets_and_splits([benchmark])

    # A task of no English benchmark is evaluated in English only, without pairs of languages.
    assert subsets_and_splits(["MLQARetrieval"])["MLQARetrieval"][0] == ["eng-eng"]
    with pytest.raises(UserError, match="got 'BUCC', which has no subset in English only"):
        choose_tasks(["BUCC"])


def test_a_single_task_does_not_change_another_benchmark():
    """A benchmark in another language keeps its definition of a task that is named with it."""
    german = subsets_and_splits(["MTEB(deu, v1)"])
    assert german["STS22"][0] != ["en"]
    assert subsets_and_splits(["STS22", "MTEB(deu, v1)"]) == german
    with pytest.raises(UserError, match="must not name benchmarks that define .* differently"):
        choose_tasks(["MTEB(deu, v1)", "MTEB(eng, v1)"])


def test_default_benchmark_is_the_current_one():
    """The default benchmark is the current English one, which is the first in `BENCHMARKS`."""
    assert mteb_options("m").evaluation.tasks == ["MTEB(eng, v2)"] == [*BENCHMARKS[:1]]


def result_of(task, score):
    """Return the result of a task in MTEB, with the same score for all its splits and subsets."""
    languages = task.metadata.hf_subsets_to_langscripts
    rows = [
        {"hf_subset": subset, "languages": languages[subset], "main_score": score}
        for subset in task.hf_subsets
    ]
    return TaskResult(
        task_name=task.metadata.name,
        dataset_revision="1",
        mteb_version="2",
        evaluation_time=0,
        scores={split: rows for split in task.eval_splits},
    )


@pytest.mark.parametrize("name", BENCHMARKS)
def test_means_match_the_mteb_leaderboard(name):
    """The means over tasks, over types, and per type equal those of the MTEB leaderboard."""
    benchmark = mteb.get_benchmark(name)
    scores = {task.metadata.name: i / 64 for i, task in enumerate(benchmark.tasks)}
    results = [result_of(task, scores[task.metadata.name]) for task in benchmark.tasks]
    model = ModelResult(model_name="a/b", model_revision="1", task_results=results)
    expected = benchmark.get_score(BenchmarkResults(model_results=[model]))["a/b"]

    types = {task.metadata.name: task.metadata.type for task in benchmark.tasks}
    means = averages(scores, types)
    assert means.pop("tasks") == pytest.approx(expected["Mean(Task)"])
    assert means.pop("types") == pytest.approx(expected["Mean(TaskType)"])
    assert means == pytest.approx({kind: expected[kind] for kind in set(types.values())})


def test_mean_is_none_if_a_score_is_missing():
    """A mean is None if a score is missing, because it would be that of other tasks."""
    types = {"a": "STS", "b": "STS", "c": "Retrieval"}
    means = averages({"a": 10.0, "b": None, "c": 60.0}, types)
    assert means == {"tasks": None, "types": None, "STS": None, "Retrieval": 60.0}


def test_published_means_match_published_scores():
    """The published mean is that of the published scores per type, weighted by tasks."""
    for name, values in MTEB.items():
        mean = np.dot(values[:7], COUNTS["MTEB(eng, v1)"]) / 56
        # The values are rounded, and seven of them are weighted by up to 15 / 56.
        assert mean == pytest.approx(values[7], abs=0.1), name


def test_benchmark_tables_contain_complete_runs_only(tmp_path):
    """A run is in the table of a benchmark only if it has all of its tasks."""
    settings = {"instructions": "mteb", "max_length": 48, "environment": {"dtype": "float32"}}
    settings |= {"model": "m", "fingerprint": "f", "dtype": "auto"}

    tasks = [task.metadata for name in BENCHMARKS[:2] for task in mteb.get_benchmark(name).tasks]
    types = {task.name: task.type for task in tasks}
    complete = {"scores": dict.fromkeys(types, 50.0), "types": types}
    partial = {"scores": {"STS12": 1.0}, "types": {"STS12": "STS"}, "instruction_template": "Q {x}"}
    for name, result in (("whole", complete), ("part", partial)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, **settings, **result}))

    write_tables(tmp_path)
    text = (tmp_path / "table.md").read_text()

    header = " | ".join(["model", "source", *MTEB_TYPES.values(), "mean of tasks", "mean of types"])
    assert text.count(f"| {header} |") == 2 and "## NanoBEIR" not in text
    assert text.count(f"| whole | measured |{' 50.0 |' * 9}\n") == 2 and "| part | m" not in text
    assert "| NeoBERT-4096 | published | 61.6 | 40.8 | 76.2 | 51.2 | 31.6 | 74.8 | 30.7 |" in text
    assert text.count("| published |") == len(MTEB) == 10
    assert text.index("## MTEB(eng, v1)") < text.index("| published |")

    assert f"| **mean over {len(types)} tasks** |  |  | 50.00 |" in text
    assert "| part | 48 | mteb | float32 | 'Q {x}' |\n" in text
    assert "| whole | 48 | mteb | float32 | 'Instruction: {instruction} Query: ' |" in text


def test_scores_match_sentence_transformers_evaluator(model_folder, encoder, tmp_path):
    """Scores equal those of the evaluator of sentence-transformers, with and without a prompt.

    The published scores of NanoBEIR were computed with this evaluator.
    """
    queries = {f"q{i}": text for i, text in enumerate(TEXTS[:8])}
    documents = {f"d{i}": text for i, text in enumerate(TEXTS)}
    relevant = {name: set(document_ids) for name, document_ids in TinyRetrieval.relevant.items()}

    for choice, prompt in (("none", None), ("mteb", "Instruction: Find me. Query: ")):
        report = run(
            model_folder, tmp_path / choice, "TinyRetrieval", "TinyAggregate", instructions=choice
        )

        evaluate = InformationRetrievalEvaluator(
            queries, documents, relevant, ndcg_at_k=[10], query_prompt=prompt
        )
        expected = evaluate(encoder.sentence_transformer)["cosine_ndcg@10"]
        assert 0.2 < expected < 0.9
        # The aggregate task is the mean of two tasks with equal scores.
        for score in report["scores"].values():
            assert score == pytest.approx(100 * expected, abs=1e-3)


def test_prompts_of_the_model(encoder, tmp_path, caplog):
    """`--instructions model` uses the prompts of the model, which other choices do not use."""
    folder = tmp_path / "prompts"
    encoder.sentence_transformer.save_pretrained(str(folder))
    path = folder / "config_sentence_transformers.json"
    prompts = {"query": "the cold sea of ", "document": "a story: "}
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": prompts}))

    queries = {f"q{i}": prompts["query"] + text for i, text in enumerate(TEXTS[:8])}
    documents = {f"d{i}": prompts["document"] + text for i, text in enumerate(TEXTS)}
    relevant = {name: set(document_ids) for name, document_ids in TinyRetrieval.relevant.items()}
    evaluate = InformationRetrievalEvaluator(queries, documents, relevant, ndcg_at_k=[10])
    expected = 100 * evaluate(encoder.sentence_transformer)["cosine_ndcg@10"]

    out = tmp_path / "out"
    report = run(str(folder), out, "TinyRetrieval", instructions="model")
    assert report["scores"]["TinyRetrieval"] == pytest.approx(expected, abs=1e-3)
    assert "prompts of the model are not used" not in caplog.text

    other = run(str(folder), out, "TinyRetrieval", name="other", instructions="none")
    assert other["scores"]["TinyRetrieval"] != pytest.approx(expected, abs=1e-3)
    assert "The prompts of the model are not used: query, document." in caplog.text


def test_second_run_adds_tasks_and_refuses_another_model(
    model_folder, tokenizer_dir, tmp_path, monkeypatch
):
    """A second run with the same name adds tasks. Another model needs another name."""
    out = tmp_path / "out"
    first = run(model_folder, out, "TinySTS")
    both = run(model_folder, out, "TinyRetrieval")
    assert both["scores"].items() > first["scores"].items() and len(both["scores"]) == 2
    assert both["environment"]["versions"]["mteb"]
    assert "| **mean over 2 tasks** |" in (out / "table.md").read_text()

    other_model = small_model(tmp_path / "other", tokenizer_dir, seed=2)
    with pytest.raises(UserError, match="tiny.json contains the scores of other .* another --name"):
        run(other_model, out, "TinySTS")

    # Finished tasks are not encoded again.
    monkeypatch.setattr(PackedModel, "encode", None)
    assert run(model_folder, out, "TinySTS", "TinyRetrieval")["scores"] == both["scores"]


def test_cached_scores_of_other_subsets_are_not_counted(model_folder, tmp_path):
    """The score of a task has the subsets and splits of the task, and no others of the cache."""
    scores = run(model_folder, tmp_path, "TinySTS")["scores"]
    (cache_path,) = tmp_path.rglob("TinySTS.json")
    cached = json.loads(cache_path.read_text())
    (row,) = cached["scores"]["test"]
    cached["scores"]["test"].append({**row, "hf_subset": "de", "main_score": 5.0})
    cached["scores"]["validation"] = [{**row, "main_score": 5.0}]
    cache_path.write_text(json.dumps(cached))
    assert run(model_folder, tmp_path, "TinySTS")["scores"] == scores


def test_scores_of_another_process_are_kept(model_folder, tmp_path, monkeypatch):
    """Scores that another process writes during the evaluation are kept."""
    evaluate = mteb.evaluate

    def evaluate_slowly(*args, **kwargs):
        # The other process evaluates another task with the same name.
        monkeypatch.setattr(mteb, "evaluate", evaluate)
        results = evaluate(*args, **kwargs)
        run(model_folder, tmp_path, "TinyRetrieval")
        return results

    monkeypatch.setattr(mteb, "evaluate", evaluate_slowly)
    report = run(model_folder, tmp_path, "TinySTS")
    assert report["scores"].keys() == {"TinySTS", "TinyRetrieval"}
    assert None not in report["scores"].values()
    assert report["types"] == {"TinySTS": "STS", "TinyRetrieval": "Retrieval"}
    assert "| **mean over 2 tasks** |" in (tmp_path / "table.md").read_text()


def test_other_weights_of_another_process_are_refused(
    model_folder, tokenizer_dir, tmp_path, monkeypatch
):
    """Scores of other weights that appear during the evaluation are not mixed with the new ones."""
    other_model = small_model(tmp_path / "other", tokenizer_dir, seed=2)
    evaluate = mteb.evaluate

    def evaluate_slowly(*args, **kwargs):
        monkeypatch.setattr(mteb, "evaluate", evaluate)
        run(other_model, tmp_path / "out", "TinySTS")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(mteb, "evaluate", evaluate_slowly)
    with pytest.raises(UserError, match="tiny.json contains the scores of other weights"):
        run(model_folder, tmp_path / "out", "TinySTS")
    assert json.loads((tmp_path / "out" / "tiny.json").read_text())["model"] == other_model


@pytest.mark.parametrize("name", ["tiny.json", "table.md"])
def test_files_of_other_programs_are_not_replaced(model_folder, tmp_path, name):
    """Files that `neobert mteb` has not written are refused and not changed."""
    (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match=f"{name} was not written by `neobert mteb`"):
        run(model_folder, tmp_path, "TinySTS")
    assert (tmp_path / name).read_text() == "[]"


def test_failed_task_is_reported_and_other_scores_are_kept(model_folder, tmp_path, monkeypatch):
    """The other tasks finish and keep their scores, and a second run repeats the failed task."""
    names = ("TinySTS", "BrokenRetrieval", "TinyRetrieval")
    message = r"1 of 3 tasks failed \(BrokenRetrieval\). First error: no network"
    with pytest.raises(UserError, match=message):
        run(model_folder, tmp_path, *names)

    report = json.loads((tmp_path / "tiny.json").read_text())
    assert [name for name, score in report["scores"].items() if score is None] == [names[1]]
    assert "| **mean over 3 tasks** |  |  |" in (tmp_path / "table.md").read_text()

    monkeypatch.setattr(BrokenRetrieval, "load_data", TinyRetrieval.load_data)
    assert None not in run(model_folder, tmp_path, *names)["scores"].values()


@pytest.mark.parametrize(
    "template", ["Query: ", "{{instruction}} ", "a {x} {instruction}", "{instruction.__class__} "]
)
def test_invalid_templates_are_refused(template):
    """A template contains the field, which is replaced literally, and no other braces."""
    with pytest.raises(UserError, match="must contain {instruction} and no other braces, got"):
        check_template(template)
    check_template("Q: {instruction} A: {instruction}")


def test_documents_have_no_instruction(encoder):
    """Queries get the instruction of their task, and documents get none.

    An instruction is that of the task or of its type, or else that of MTEB.
    """
    retrieval = TinyRetrieval.metadata
    sts = TinySTS.metadata
    sides = (
        (retrieval, PromptType.query),
        (retrieval, PromptType.document),
        (sts, None),
        (mteb.get_task("STS13").metadata, None),
    )

    def prompts(instructions):
        model = PackedModel(encoder, "neobert/x", "1", instructions, "I: {instruction} Q: ")
        return [model.prompt(*side) for side in sides]

    *instructions, default_of_type = prompts({})
    assert instructions == ["I: Find me. Q: ", "", "I: Find the same. Q: "]
    assert default_of_type.startswith("I: "), "a task without a prompt must have that of its type"

    custom = prompts({"TinyRetrieval": "Mine.", "STS": "All of them."})
    assert custom == ["I: Mine. Q: ", "", *["I: All of them. Q: "] * 2]
    assert prompts(None) == [""] * 4


def test_fingerprint_depends_on_weights_and_settings(
    model_folder, encoder, tokenizer_dir, tmp_path
):
    """The fingerprint depends on everything that changes the embeddings.

    MTEB caches results by the fingerprint. A copy of the same weights has the same fingerprint.
    """
    options = mteb_options(model_folder)
    copy = mteb_options(small_model(tmp_path / "copy", tokenizer_dir, seed=1))
    assert fingerprint(encoder, copy, {}) == fingerprint(encoder, options, {})

    fingerprints = {fingerprint(encoder, options, {}), fingerprint(encoder, options, None)}
    changed = Path(shutil.copytree(model_folder, tmp_path / "changed"))
    config = json.loads((changed / "tokenizer_config.json").read_text()) | {"model_max_length": 77}
    (changed / "tokenizer_config.json").write_text(json.dumps(config))

    for changes in (
        {"model": small_model(tmp_path / "other", tokenizer_dir, seed=2)},
        {"model": str(changed)},
        {"tokenizer": str(tokenizer_dir)},
        {"instruction_template": "{instruction} "},
    ):
        changed_options = mteb_options(**{"model": model_folder, **changes})
        fingerprints.add(fingerprint(encoder, changed_options, {}))

    for changes in ({"max_length": 16}, {"dtype": "bfloat16"}, {"pooling": "cls"}):
        other = PackedEncoder(model_folder, device="cpu", **{"dtype": "float32", **changes})
        fingerprints.add(fingerprint(other, options, {}))
    other.prompts = {"query": "find: "}
    fingerprints.add(fingerprint(other, options, {}))

    assert len(fingerprints) == 10, "different settings have the same fingerprint"


def test_second_run_keeps_the_dtype(model_folder, tmp_path, monkeypatch):
    """A second run keeps the dtype of the first one, although `auto` would select another dtype."""
    for measured, task in (("bfloat16", "TinySTS"), ("float32", "TinyRetrieval")):
        monkeypatch.setattr(loading, "_fastest_on_cpu", lambda measured=measured: measured)
        report = run(model_folder, tmp_path, task, dtype="auto")
        assert report["environment"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_instructions_from_file(tmp_path, ending):
    """Instructions can be read from a file, such as the tables of the paper."""
    instructions = {"STS12": "Find: the same.", "STS": "All others."}
    path = tmp_path / f"tables7and8.{ending}"
    path.write_text(
        json.dumps(instructions)
        if ending == "json"
        else "STS12: 'Find: the same.'\nSTS: All others.\n"
    )

    assert resolve_instructions(str(path), choose_tasks(["STS12", "STS13"])) == instructions
    # A file with the instructions of a benchmark is accepted for one of its tasks.
    assert resolve_instructions(str(path), choose_tasks(["STS14"])) == instructions
    assert resolve_instructions("mteb", []) == {} and resolve_instructions("none", []) is None


def test_invalid_input_is_reported(model_folder, tmp_path):
    """Invalid input ends with one error message, and nothing is written."""
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "unknown.json").write_text('{"STS99": "x"}')
    with pytest.raises(UserError, match="'Bankin77.*Did you mean: 'Banking77Classification'"):
        choose_tasks(["Bankin77Classification"])

    sts = choose_tasks(["STS12", "STS13"])
    for choice, message in (
        (str(tmp_path / "list.json"), "must map names to texts"),
        (
            str(tmp_path / "unknown.json"),
            "must be among STS, STS12, STS13, got 'STS99'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            resolve_instructions(choice, sts)

    for options, message in (
        (["--tasks", "Nope"], "must name tasks or benchmarks of MTEB, got 'Nope'"),
        (["--tasks", "STS12", "--name", "a/b"], "`name` must consist of letters"),
        (["--tasks", "STS12", "--model", str(tmp_path)], "there is no model in"),
    ):
        with pytest.raises(UserError, match=message):
            main(["--model", model_folder, "--output", str(tmp_path / "out"), *options])

    assert not (tmp_path / "out").exists(), "invalid input created the output directory"


@pytest.mark.slow
def test_wordnet_queries_are_held_out_synsets():
    """The queries of the WordNet tasks are synsets that are held out from the training."""
    from benchmarks.local_text import WORDNET as folder

    try:
        definitions = local_tasks.wordnet_definitions(folder)
    except UserError:
        pytest.skip("WordNet is not installed. Install it with apt-get install wordnet-base.")

    task = local_tasks.WordNetRetrieval()
    task.load_data()
    split = task.dataset["default"]["test"]
    queries = set(split["queries"]["id"])

    assert len(queries) == 1000 and all(map(is_held_out, queries))
    documents = set(split["corpus"]["id"])
    assert len(documents) > 3000
    assert all(documents >= docs.keys() and docs for docs in split["relevant_docs"].values())
    assert len(definitions) > 100_000

    held_out_pairs, training_pairs = (
        local_tasks.similarity_pairs(30, held_out) for held_out in (True, False)
    )
    assert not {pair[0] for pair in held_out_pairs} & {pair[0] for pair in training_pairs}
    assert (
        all(0 <= pair[2] < 1 for pair in (*held_out_pairs, *training_pairs))
        and len({pair[2] for pair in held_out_pairs}) > 3
    )


def test_training_and_test_sentences_are_disjoint(monkeypatch):
    """The training and the test split of the sentiment task have different sentences."""
    rows = [{"id": str(i), "text": f"sentence {i}", "label": i % 2} for i in range(700)]

    monkeypatch.setattr(local_tasks, "sentiment_sentences", lambda kind: rows)
    task = local_tasks.MovieSentimentClassification()
    task.load_data()

    splits = [
        dict(zip(task.dataset[name]["text"], task.dataset[name]["label"]))
        for name in ("train", "test")
    ]

    assert list(map(len, splits)) == [200, 500] and splits[0] | splits[1] == {
        row["text"]: row["label"] for row in rows
    }
