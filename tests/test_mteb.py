"""Pins `neobert mteb`: all 56 tasks with CQADupstack and MSMARCO's dev split, means in which
nothing is dropped, instructions on the right side, results that are not computed twice and not
reused for other weights, the published rows, and the local tasks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch


pytest.importorskip("mteb")
pytest.importorskip("sentence_transformers")

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.aggregate_task_metadata import AggregateTaskMetadata
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.types import PromptType
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.benchmarks import local_tasks
from neobert.benchmarks.local_text import is_held_out
from neobert.common import loading
from neobert.common.errors import UserError
from neobert.common.published import MTEB
from neobert.embeddings import mteb_evaluation
from neobert.embeddings.mteb_evaluation import (
    PackedModel,
    choose_tasks,
    evaluate,
    fingerprint,
    main,
    read_instructions,
)
from neobert.embeddings.mteb_tables import (
    averages,
    table4,
    task_table,
    write_tables,
)
from neobert.embeddings.options import MtebArguments
from neobert.embeddings.packed_encoder import PackedEncoder


WORDS = "red green blue black cat dog bird fish runs sleeps eats swims".split()


def small_model(folder, tokenizer_dir, seed=1):
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


class TinyRetrieval(AbsTaskRetrieval):
    metadata = local_tasks._metadata(
        "TinyRetrieval",
        "Retrieval",
        "Texts that find themselves.",
        "ndcg_at_10",
        {"query": "Find me."},
        "x/y",
        "https://example.org",
    )

    def load_data(self, **kwargs):
        texts = [f"{a} {b}" for a in WORDS[:4] for b in WORDS[4:8]]
        ids = [str(i) for i in range(16)]
        split = {
            "queries": Dataset.from_dict({"id": ids, "text": texts}),
            "corpus": Dataset.from_dict(
                {"id": [f"d{i}" for i in ids], "title": [""] * 16, "text": texts}
            ),
            "relevant_docs": {i: {f"d{i}": 1} for i in ids},
            "top_ranked": None,
        }
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


class OtherRetrieval(TinyRetrieval):
    metadata = TinyRetrieval.metadata.model_copy(update={"name": "OtherRetrieval"})


class BrokenRetrieval(TinyRetrieval):
    metadata = TinyRetrieval.metadata.model_copy(update={"name": "BrokenRetrieval"})

    def load_data(self, **kwargs):
        raise ConnectionError("no network here")


class TinySTS(AbsTaskSTS):
    metadata = local_tasks._metadata(
        "TinySTS",
        "STS",
        "Overlap.",
        "cosine_spearman",
        "Find the same.",
        "x/z",
        "https://example.org",
    )

    def load_data(self, **kwargs):
        rows = [
            (f"{a} {b}", f"{a} {c}", float(b == c))
            for a in WORDS[:3]
            for b in WORDS[4:7]
            for c in WORDS[4:7]
        ]
        columns = dict(zip(("sentence1", "sentence2", "score"), map(list, zip(*rows))))
        self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_dict(columns)}), True


class TinyClassification(AbsTaskClassification):
    metadata = local_tasks._metadata(
        "TinyClassification",
        "Classification",
        "Colour.",
        "accuracy",
        "Which?",
        "x/w",
        "https://example.org",
    )
    n_experiments = 2

    def load_data(self, **kwargs):
        rows = {
            "text": [f"{word} {other}" for word in WORDS[:2] for other in WORDS[2:]],
            "label": [0] * 10 + [1] * 10,
        }
        self.dataset, self.data_loaded = (
            DatasetDict({"train": Dataset.from_dict(rows), "test": Dataset.from_dict(rows)}),
            True,
        )


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


@pytest.fixture
def tiny_tasks(monkeypatch):
    tasks = {
        task.metadata.name: task
        for task in (TinyRetrieval, TinySTS, TinyClassification, BrokenRetrieval, TinyAggregate)
    }
    monkeypatch.setattr(mteb_evaluation, "LOCAL_TASKS", tasks)
    return tasks


def arguments(model_folder, output, tasks, **more):
    return MtebArguments(model=model_folder, output=str(output), tasks=tasks, name="tiny", **more)


def test_the_papers_benchmark_has_56_tasks_with_cqadupstack_and_msmarco_dev():
    tasks = {task.metadata.name: task for task in choose_tasks(["MTEB(eng, v1)"])}
    assert len(tasks) == 56, f"MTEB(eng, v1) has 56 tasks, not {len(tasks)}"
    assert len(tasks["CQADupstackRetrieval"].tasks) == 12, (
        "CQADupstack is the mean of twelve forums"
    )
    assert list(tasks["MSMARCO"].eval_splits) == ["dev"], "MSMARCO is evaluated on its dev split"
    counts = {}
    for task in tasks.values():
        counts[task.metadata.type] = counts.get(task.metadata.type, 0) + 1
    expected = {
        "Classification": 12,
        "Clustering": 11,
        "PairClassification": 3,
        "Reranking": 4,
        "Retrieval": 15,
        "STS": 10,
        "Summarization": 1,
    }
    assert counts == expected


def test_means_are_over_all_tasks_or_absent():
    scores = {"a": 10.0, "b": 20.0, "c": 60.0}
    types = {"a": "STS", "b": "STS", "c": "Retrieval"}
    assert averages(scores, types) == {"all": 30.0, "STS": 15.0, "Retrieval": 60.0}, (
        "the mean is over tasks, not over types"
    )
    assert averages({**scores, "b": None}, types) == {
        "all": None,
        "STS": None,
        "Retrieval": 60.0,
    }, "a failed task must not be dropped"


def test_published_rows_average_as_the_paper_says():
    counts = np.array([12, 11, 3, 4, 15, 10, 1])
    for name, values in MTEB.items():
        mean = (np.array(values[:7]) * counts).sum() / 56
        # Seven rounded columns, weighted by up to 15 / 56.
        assert mean == pytest.approx(values[7], abs=0.1), (
            f"{name}: columns give {mean:.2f}, the row says {values[7]}"
        )


def test_tables_mark_what_is_published():
    types = {task.metadata.name: task.metadata.type for task in choose_tasks(["MTEB(eng, v1)"])}
    types["beyond the 56"] = "STS"
    scores = {**dict.fromkeys(types, 50.0), "beyond the 56": 0.0}
    part = {"scores": {"STS12": 50.0}, "types": {"STS12": "STS"}}
    text = table4({"ours": {"scores": scores, "types": types}, "part": part})
    for row in (
        "| model | source | Class | Clust | PairClass | Rerank | Retr | STS | Summ | avg |",
        "| NeoBERT-4096 | published, 56 tasks | 61.6 | 40.8 | 76.2 | 51.2 | 31.6 | 74.8 | 30.7 |",
        f"| ours | measured, 56 tasks |{' 50.0 |' * 8}",
        "| part | measured, 1 other task |  |  |  |  |  | 50.0 |  | 50.0 |",
    ):
        assert row in text
    assert text.count("| published") == len(MTEB) == 10
    assert "| **mean over 2 tasks** |  |  | 2.00 |" in task_table(
        {
            "one": {"scores": {"a": 1.0}, "types": {"a": "STS"}, "averages": {"all": 1.0}},
            "two": {
                "scores": {"a": 1.0, "b": 3.0},
                "types": {"a": "STS", "b": "STS"},
                "averages": {"all": 2.0},
            },
        }
    ), "a mean over fewer tasks than the table has must be left empty"


def test_the_table_has_the_settings_of_its_rows(tmp_path):
    base = {"scores": {"a": 1.0}, "types": {"a": "STS"}, "averages": {"all": 1.0, "STS": 1.0}}
    base |= {"instructions": "mteb", "max_length": 48, "environment": {"dtype": "float32"}}
    for name, more in (("two", {"max_length": 40}), ("three", {"instruction_template": "Q {x}"})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**base, "name": name, **more}))
    write_tables(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "| three | 48 | mteb | float32 | 'Q {x}' |\n" in text
    assert "| two | 40 | mteb | float32 | 'Instruction: {instruction} Query: ' |" in text


def test_help_states_the_default_batch(model_folder):
    help_text = MtebArguments.__dataclass_fields__["tokens_per_batch"].metadata["help"]
    assert f"{PackedEncoder(model_folder, device='cpu').tokens_per_batch:,} on the CPU" in help_text


def test_an_evaluation_its_files_and_a_second_run_that_encodes_nothing(
    model_folder, tiny_tasks, tmp_path, monkeypatch
):
    encoder = PackedEncoder(model_folder, dtype="float32", device="cpu")
    given = arguments(
        model_folder, tmp_path, ["TinyRetrieval", "TinySTS", "TinyClassification", "TinyAggregate"]
    )
    report = evaluate(encoder, given, show_progress_bar=False)
    assert report["scores"]["TinyRetrieval"] > 20 and set(report["scores"]) == set(given.tasks)
    assert report["scores"]["TinyAggregate"] == pytest.approx(report["scores"]["TinyRetrieval"]), (
        "the mean of two equal tasks"
    )
    assert report["averages"]["all"] == pytest.approx(np.mean(list(report["scores"].values())))
    assert report["averages"]["Retrieval"] == pytest.approx(
        (report["scores"]["TinyRetrieval"] + report["scores"]["TinyAggregate"]) / 2
    )
    saved = json.loads((tmp_path / "tiny.json").read_text())
    assert saved["scores"] == report["scores"] and saved["environment"]["versions"]["mteb"]
    assert "mean over 4 tasks" in (tmp_path / "table.md").read_text()

    def fail(*arguments, **kwargs):
        raise AssertionError("a finished task was encoded again")

    monkeypatch.setattr(PackedModel, "encode", fail)
    assert evaluate(encoder, given, show_progress_bar=False)["scores"] == report["scores"]


def test_a_name_belongs_to_one_model_and_keeps_its_tasks(
    model_folder, tiny_tasks, tokenizer_dir, tmp_path, monkeypatch
):
    out, encoder = tmp_path / "out", PackedEncoder(model_folder, dtype="float32", device="cpu")
    first = evaluate(encoder, arguments(model_folder, out, ["TinySTS"]), show_progress_bar=False)
    both = evaluate(
        encoder, arguments(model_folder, out, ["TinyClassification"]), show_progress_bar=False
    )
    assert both["scores"]["TinySTS"] == first["scores"]["TinySTS"] and len(both["scores"]) == 2, (
        "a second run dropped the first one's task"
    )
    table = (out / "table.md").read_text()
    assert (
        "| tiny | measured, 2 other tasks |" in table
        and "| BERT base | published, 56 tasks |" in table
    )
    other = small_model(tmp_path / "other", tokenizer_dir, seed=2)
    with pytest.raises(
        UserError, match="tiny.json holds the scores of other weights or settings .* another --name"
    ):
        evaluate(
            PackedEncoder(other, dtype="float32", device="cpu"),
            arguments(other, out, ["TinySTS"]),
            show_progress_bar=False,
        )
    # kill -9 while MTEB writes a result
    path = next((out / "cache").rglob("TinySTS.json"))
    path.write_text(path.read_text()[:40])
    assert (
        evaluate(encoder, arguments(model_folder, out, ["TinySTS"]), show_progress_bar=False)[
            "scores"
        ]
        == both["scores"]
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; choose another name"):
        evaluate(
            encoder,
            arguments(model_folder, tmp_path / "file", ["TinySTS"]),
            show_progress_bar=False,
        )


def test_files_of_others_are_not_replaced(model_folder, tiny_tasks, tmp_path, monkeypatch):
    given = [
        "--model",
        model_folder,
        "--output",
        str(tmp_path),
        "--name",
        "tiny",
        "--tasks",
        "TinySTS",
    ]
    for name in ("tiny.json", "table.md"):
        for content in ("[]", "mine"):
            (tmp_path / name).write_text(content)
            with (
                monkeypatch.context() as patch,
                pytest.raises(UserError, match=f"{name} was not made by neobert mteb"),
            ):
                patch.setattr(
                    PackedEncoder, "from_arguments", lambda *given: pytest.fail("the work began")
                )
                main(given)
            assert (tmp_path / name).read_text() == content
        (tmp_path / name).unlink()
    for name, content in (
        ("a.json", b"mine"),
        ("b.json", b"[]"),
        ("c.json", b'{"scores": {}, "averages": {}}'),
        ("d.json", b"\xff"),
    ):
        (tmp_path / name).write_bytes(content)
    assert (
        main(given) == 0
        and "| tiny | measured, 1 other task |" in (tmp_path / "table.md").read_text()
    )
    assert main(given) == 0 and (tmp_path / "a.json").read_bytes() == b"mine"


def test_a_task_that_fails_keeps_the_others_and_is_reported(
    model_folder, tiny_tasks, tmp_path, monkeypatch
):
    names = ["--tasks", "TinySTS", "BrokenRetrieval", "TinyRetrieval"]
    command = ["--model", model_folder, "--output", str(tmp_path), "--name", "tiny", *names]
    with pytest.raises(
        UserError, match=r"1 of 3 tasks failed \(BrokenRetrieval\): no network here"
    ):
        main(command)
    report = json.loads((tmp_path / "tiny.json").read_text())
    assert report["scores"]["BrokenRetrieval"] is None and report["averages"]["all"] is None, (
        "the failed task was dropped from the mean"
    )
    assert report["scores"]["TinyRetrieval"] is not None and report["averages"]["STS"] is not None
    monkeypatch.setattr(BrokenRetrieval, "load_data", TinyRetrieval.load_data)
    encoded = []
    encode = PackedModel.encode
    monkeypatch.setattr(
        PackedModel,
        "encode",
        lambda self, *a, **k: (encoded.append(k["task_metadata"].name), encode(self, *a, **k))[1],
    )
    assert main(command) == 0
    assert set(encoded) == {"BrokenRetrieval"}, f"finished tasks were evaluated again: {encoded}"


def test_instructions_go_before_the_query_and_before_both_texts_of_a_symmetric_task(model_folder):
    encoder = PackedEncoder(model_folder, dtype="float32", device="cpu")
    retrieval, sts = TinyRetrieval().metadata, TinySTS().metadata
    model = PackedModel(encoder, "neobert/x", "1", {}, "I: {instruction} Q: ")
    assert model.prompt(retrieval, PromptType.query) == "I: Find me. Q: "
    assert model.prompt(retrieval, PromptType.document) == "", "documents carry no instruction"
    assert model.prompt(sts, None) == "I: Find the same. Q: "
    assert model.prompt(mteb.get_task("STS12").metadata, None).startswith("I: "), (
        "a task without a prompt has its type's"
    )
    own = PackedModel(
        encoder,
        "neobert/x",
        "1",
        {"TinyRetrieval": "Mine.", "STS": "All of them."},
        "{instruction} ",
    )
    assert (
        own.prompt(retrieval, PromptType.query) == "Mine. "
        and own.prompt(sts, None) == "All of them. "
    )
    assert own.prompt(retrieval, PromptType.document) == "", "documents carry none of a file either"
    assert (
        PackedModel(encoder, "neobert/x", "1", None, "{instruction}").prompt(
            retrieval, PromptType.query
        )
        == ""
    )


def test_results_of_other_weights_or_settings_are_not_reused(model_folder, tokenizer_dir, tmp_path):
    given = arguments(model_folder, tmp_path, ["STS12"])
    encoder = PackedEncoder(model_folder, dtype="float32", device="cpu")
    prints = {fingerprint(encoder, given, {}), fingerprint(encoder, given, None)}
    for seed in (1, 2):  # 1: a copy of the same model
        prints.add(
            fingerprint(
                encoder,
                replace(
                    given,
                    model=str(small_model(tmp_path / f"seed{seed}", tokenizer_dir, seed=seed)),
                ),
                {},
            )
        )
    changed = Path(shutil.copytree(model_folder, tmp_path / "changed"))
    config = json.loads((changed / "tokenizer_config.json").read_text()) | {"model_max_length": 77}
    (changed / "tokenizer_config.json").write_text(json.dumps(config))
    prints.add(fingerprint(encoder, replace(given, model=str(changed)), {}))
    prints.add(fingerprint(PackedEncoder(model_folder, device="cpu", max_length=16), given, {}))
    prints.add(fingerprint(PackedEncoder(model_folder, device="cpu", dtype="bfloat16"), given, {}))
    for more in (
        {"pooling": "cls"},
        {"tokenizer": str(tokenizer_dir)},
        {"instruction_template": "{instruction} "},
    ):
        prints.add(fingerprint(encoder, replace(given, **more), {}))
    prompted = PackedEncoder(model_folder, dtype="float32", device="cpu")
    prompted.prompts = {"query": "find: "}
    prints.add(fingerprint(prompted, given, {}))
    low = PackedEncoder(model_folder, dtype="float32", device="cpu")
    low.dtype = torch.float16  # of weights that float16 holds exactly
    prints.add(fingerprint(low, given, {}))
    assert len(prints) == 11, "two settings that change the vectors share MTEB's result cache"
    assert (
        fingerprint(PackedEncoder(model_folder, dtype="float32", device="cpu"), given, {}) in prints
    ), "the same model must find its own results"


def test_a_row_keeps_the_dtype_that_it_began_with(model_folder, tiny_tasks, tmp_path, monkeypatch):
    command = ["--model", model_folder, "--output", str(tmp_path), "--name", "tiny", "--tasks"]
    for measured, task in (("bfloat16", "TinySTS"), ("float32", "TinyClassification")):
        monkeypatch.setattr(loading, "_fastest_on_cpu", lambda measured=measured: measured)
        assert main([*command, task]) == 0
    report = json.loads((tmp_path / "tiny.json").read_text())
    assert report["environment"]["dtype"] == "bfloat16" and len(report["scores"]) == 2
    with pytest.raises(UserError, match="holds the scores of other weights or settings"):
        main([*command, "TinySTS", "--dtype", "float32"])


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_instructions_of_a_file(tmp_path, ending):
    """So that who has the paper's tables runs exactly them."""
    texts = {"STS12": "Find: the same.", "STS": "All others."}
    path = tmp_path / f"tables7and8.{ending}"
    path.write_text(
        json.dumps(texts) if ending == "json" else "STS12: 'Find: the same.'\nSTS: All others.\n"
    )
    assert read_instructions(str(path), choose_tasks(["STS12,STS13"])) == texts
    assert read_instructions("mteb", []) == {} and read_instructions("none", []) is None


def test_bad_input_is_one_sentence(model_folder, tmp_path):
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "unknown.json").write_text('{"STS99": "x"}')
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(
        UserError,
        match=(
            "no task or benchmark 'Bankin77Classification'; did you mean 'Banking77Classification'?"
        ),
    ):
        choose_tasks(["Bankin77Classification"])
    sts = choose_tasks(["STS12,STS13"])
    for choice, message in (
        ("nothing.json", "there is no file"),
        (str(tmp_path / "list.json"), "must map names to texts"),
        (
            str(tmp_path / "unknown.json"),
            "there is no 'STS99' here; the names are STS, STS12, STS13",
        ),
        (str(tmp_path / "broken.json"), "is not valid JSON"),
    ):
        with pytest.raises(UserError, match=message):
            read_instructions(choice, sts)
    for more, message in (
        (["--dtype", "int4"], "dtype must be one of"),
        (["--tasks", "Nope"], "no task or benchmark 'Nope'"),
        (["--tasks", "STS12", "--name", "a/b"], "name may hold"),
        (["--tasks", "STS12", "--model", str(tmp_path)], "there is no model in"),
    ):
        with pytest.raises(UserError, match=message):
            main(["--model", model_folder, "--output", str(tmp_path / "out"), *more])
    assert not (tmp_path / "out").exists(), "something was written for bad input"


WORDNET = """  1 A licence line.
{noun}
"""


def synset(offset, word, parent, gloss):
    pointer = f"001 @ {parent:08d} n 0000" if parent else "000"
    return f"{offset:08d} 03 n 01 {word} 0 {pointer} | {gloss}  "


def test_path_similarity_counts_the_edges_of_the_taxonomy(tmp_path):
    lines = [
        synset(1, "entity", 0, "anything"),
        synset(2, "animal", 1, "a beast"),
        synset(3, "cat", 2, "a feline"),
        synset(4, "dog", 2, "a canine"),
    ]
    (tmp_path / "data.noun").write_text(
        WORDNET.format(noun="\n".join([*lines, synset(5, "alone", 0, "nothing near")]))
    )
    nodes = local_tasks._noun_taxonomy(str(tmp_path))
    ids = {
        name: f"{i:08d}" for i, name in enumerate(("", "entity", "animal", "cat", "dog", "alone"))
    }
    assert nodes[ids["cat"]] == ([ids["animal"]], "a feline")
    assert local_tasks.path_similarity(nodes, ids["cat"], ids["cat"]) == 1
    assert local_tasks.path_similarity(nodes, ids["cat"], ids["animal"]) == pytest.approx(1 / 2)
    assert local_tasks.path_similarity(nodes, ids["cat"], ids["dog"]) == pytest.approx(1 / 3)
    assert local_tasks.path_similarity(nodes, ids["entity"], ids["dog"]) == pytest.approx(1 / 3)
    assert local_tasks.path_similarity(nodes, ids["cat"], ids["alone"]) == 0


def test_wordnet_tasks_ask_only_for_held_out_synsets():
    from neobert.benchmarks.local_text import WORDNET as folder

    try:
        definitions = local_tasks.wordnet_definitions(folder)
    except UserError:
        pytest.skip("WordNet is not installed (apt-get install wordnet-base)")
    task = local_tasks.WordNetRetrieval()
    task.load_data()
    split = task.dataset["default"]["test"]
    queries = set(split["queries"]["id"])
    assert len(queries) == 1000 and all(is_held_out(query, 2.0) for query in queries)
    documents = set(split["corpus"]["id"])
    assert len(documents) > 3000
    assert all(documents >= docs.keys() and docs for docs in split["relevant_docs"].values()), (
        "a relevant word is not in the corpus"
    )
    assert len(definitions) > 100_000
    kept, trained = (local_tasks.similarity_pairs(30, held_out) for held_out in (True, False))
    assert not {pair[0] for pair in kept} & {pair[0] for pair in trained}, (
        "a training pair starts from a held-out synset"
    )
    assert (
        all(0 <= pair[2] < 1 for pair in (*kept, *trained)) and len({pair[2] for pair in kept}) > 3
    )


def test_no_sentence_is_both_trained_and_tested_on(monkeypatch):
    rows = [{"id": str(i), "text": f"sentence {i}", "label": i % 2} for i in range(700)]
    monkeypatch.setattr(local_tasks, "sentiment_sentences", lambda kind: rows)
    task = local_tasks.MovieSentimentClassification()
    task.load_data()
    parts = [
        dict(zip(task.dataset[name]["text"], task.dataset[name]["label"]))
        for name in ("train", "test")
    ]
    assert list(map(len, parts)) == [200, 500] and parts[0] | parts[1] == {
        row["text"]: row["label"] for row in rows
    }
