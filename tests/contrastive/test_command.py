"""Tests of `neobert contrastive`: the loss, training runs, adapters, the output, and errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.jsonl import write_jsonl
from helpers.paths import ROOT


pytest.importorskip("sentence_transformers")

from datasets import Dataset
from filelock import FileLock
from helpers.contrastive_runs import (  # noqa: F401
    ANIMALS,
    arguments_for,
    make_model_folder,
    make_pairs,
    make_triplets,
)
from safetensors.torch import load_file
from transformers import TrainerCallback

from neobert.common.errors import Stopped, UserError
from neobert.common.model_card import base_model_metadata
from neobert.common.sentence_transformers_files import save_for_all_versions
from neobert.contrastive import command as contrastive
from neobert.contrastive.command import build_loss, main
from neobert.contrastive.data import PairSource, load_source
from neobert.contrastive.options import OPTIONS, LossOptions, read_sources
from neobert.embeddings.packed_encoder import load_sentence_transformer
from neobert.evaluation import retrieval
from neobert.training.lora import check_adapter_support


def test_loss_is_infonce_of_cosine_over_temperature():
    """The loss is InfoNCE of the cosine similarities to all positives and negatives in a batch."""

    class Vectors(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["vectors"]}

    generator = torch.Generator().manual_seed(0)
    anchors, positives, first, second = (torch.randn(6, 16, generator=generator) for _ in range(4))
    loss = build_loss(Vectors(), LossOptions())
    value = loss.compute_loss_from_embeddings([anchors, positives, first, second], None)

    candidates = torch.nn.functional.normalize(torch.cat([positives, first, second]), dim=1)
    logits = torch.nn.functional.normalize(anchors, dim=1) @ candidates.T / 0.07
    expected = torch.stack([logits[i].logsumexp(0) - logits[i, i] for i in range(6)]).mean()

    torch.testing.assert_close(value, expected)


def test_cached_loss_uses_the_same_temperature():
    """`mini_batch_size` selects the cached loss, which has the same temperature."""
    # The cached loss needs a model with a first module.
    model = torch.nn.Sequential(torch.nn.Identity())
    loss = build_loss(model, LossOptions(mini_batch_size=2))
    assert loss.scale == pytest.approx(1 / 0.07) and loss.mini_batch_size == 2


def test_the_learning_rate_depends_on_the_hidden_size(tmp_path):
    """A local NeoBERT with a hidden size below 485 has a higher rate, as in help and docs."""
    for hidden_size, expected in ((768, 1e-4), (485, 1e-4), (384, 3.2e-4), (192, 5e-4)):
        config = {"model_type": "neobert", "hidden_size": hidden_size}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert contrastive.learning_rate_of(str(tmp_path)) == pytest.approx(expected)
    config = {"model_type": "neobert", "hidden_size": 484}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert contrastive.learning_rate_of(str(tmp_path)) > 1e-4
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 384}')
    assert contrastive.learning_rate_of(str(tmp_path)) == 1e-4


def test_warning_for_unimproved_encoder():
    """A warning reports an encoder that is no better than before the training, or than TF-IDF."""

    def warning_for(before, after, tfidf):
        values = {"before": before, "after": after, "tf-idf": tfidf}
        return contrastive.comparison_warning({k: {"mrr@10": v} for k, v in values.items()})

    assert warning_for(0.5, 0.6, 0.4) is None
    assert "before the training" in warning_for(0.6, 0.6, 0.4)
    assert "TF-IDF" in warning_for(0.1, 0.2, 0.68)


def test_tfidf_ranks_texts_by_shared_words():
    """The TF-IDF baseline ranks texts by the words that they share with the query."""
    relevant = {"a red cat": {"the cat is red"}, "blue birds": {"birds that are blue"}}
    texts = ["the cat is red", "birds that are blue", "nothing"]
    metrics = retrieval.evaluate_tfidf(retrieval.Queries(relevant, texts))
    assert metrics["recall@1"] == 1


@pytest.mark.slow
def test_training_lowers_loss_and_output_loads_without_package(
    model_folder, triplets, pairs, tmp_path
):
    """The loss falls, and the output loads without this package.

    The process that loads the output uses the code and the prompts that are saved in it.
    """
    output = tmp_path / "out"
    options = ["--pairs", triplets, pairs, "--instruction", "Find it.", "--max_steps", "40"]
    options += ["--learning_rate", "2e-3", "--save_steps", "100"]
    argv = arguments_for(model_folder, output, *options)
    assert main(argv) == 0

    log = json.loads((output / "result.json").read_text())["training"]
    losses = [loss for _, loss in log["losses"]]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8]), f"the loss did not fall: {losses}"
    assert sum(log["probabilities"].values()) == pytest.approx(1)

    program = (
        "import json, sys; from sentence_transformers import SentenceTransformer\n"
        f"model = SentenceTransformer({str(output)!r}, trust_remote_code=True)\n"
        "assert 'neobert' not in sys.modules\n"
        "vector = model.encode_query(['grey wolf']); plain = model.encode(['Instruction: Find it. "
        "Query: grey wolf'])\n"
        "print(json.dumps([type(model[0].auto_model).__name__, model[1].pooling_mode, "
        "model.prompts['query'], abs(vector - plain).max().item()]))"
    )

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {"cwd": tmp_path, "timeout": 900, "env": environment}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, **settings
    )

    assert run.returncode == 0, run.stderr[-2000:]

    name, pooling, prompt, difference = json.loads(run.stdout.splitlines()[-1])
    assert (name, pooling, prompt) == ("NeoBERTModel", "mean", "Instruction: Find it. Query: ")
    assert difference < 1e-5, "encode_query does not prepend the saved instruction to the query"


class _Interrupt(TrainerCallback):
    """Callback that sends a signal to this process at the end of a step."""

    def __init__(self, step, signal_number):
        self.step = step
        self.signal_number = signal_number

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.signal_number)


def test_unsupported_peft_version_is_refused(model_folder, triplets, tmp_path, monkeypatch, capsys):
    """An unsupported version of peft is an error before the output directory is created."""
    pytest.importorskip("peft")
    from transformers.integrations import peft as integration

    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "99.0")
    options = ("--pairs", triplets, "--lora")
    with pytest.raises(UserError, match="`--lora` needs peft>=99.0 with transformers"):
        main(arguments_for(model_folder, tmp_path / "out", *options))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_interrupted_lora_run_resumes_and_merges_adapters(
    model_folder, triplets, tmp_path, monkeypatch
):
    """A run that SIGTERM and Ctrl-C interrupt ends with the weights of an uninterrupted run."""
    pytest.importorskip("peft")
    try:
        check_adapter_support()
    except UserError as error:
        pytest.skip(str(error))

    build_trainer = contrastive.build_trainer
    argv = ["--pairs", triplets, "--learning_rate", "1e-3"]
    argv += ["--save_steps", "3", "--lora"]

    for step, signal_number in ((5, signal.SIGTERM), (7, signal.SIGINT)):

        def build_interrupted_trainer(*arguments, step=step, signal_number=signal_number):
            trainer = build_trainer(*arguments)
            trainer.add_callback(_Interrupt(step, signal_number))
            return trainer

        with monkeypatch.context() as patch, pytest.raises((Stopped, KeyboardInterrupt)):
            patch.setattr(contrastive, "build_trainer", build_interrupted_trainer)
            main(arguments_for(model_folder, tmp_path / "out", *argv))
        assert not (tmp_path / "out" / "modules.json").exists(), "the run is marked as finished"

    for name in ("out", "whole"):
        assert main(arguments_for(model_folder, tmp_path / name, *argv)) == 0
    resumed, uninterrupted, start = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "out", tmp_path / "whole", model_folder)
    )

    assert resumed.keys() == uninterrupted.keys() and not any(
        "lora" in key for key in uninterrupted
    )
    assert (
        max((uninterrupted[key] - start[f"model.{key}"]).abs().max() for key in uninterrupted)
        > 1e-4
    ), "the training has not changed the weights"
    assert all(torch.equal(resumed[key], uninterrupted[key]) for key in uninterrupted)
    assert (tmp_path / "whole" / "adapter" / "adapter_model.safetensors").is_file()

    assert torch.equal(uninterrupted["encoder.weight"], start["model.encoder.weight"])


def test_output_directory_is_ready_to_publish(model_folder, tmp_path):
    """Check the output of a run that is to be published.

    - No file contains a row of the training data. The model card of sentence-transformers would.
    - The model card states the license and the base model.
    - The pooling is stored in two forms, because sentence-transformers 5.1 and 6.2 read different
      keys, and both fall back to [CLS] pooling if their key is missing.
    """
    rows = [{"anchor": f"unpublished question {i}", "positive": f"answer {i}"} for i in range(20)]
    write_jsonl(tmp_path / "faq.jsonl", rows)
    write_jsonl(tmp_path / "validation.jsonl", [{"anchor": "other", "positive": "text"}])

    options = ["--pairs", str(tmp_path / "faq.jsonl"), "--max_steps", "1", "--license", "cc0-1.0"]
    options += ["--validation-file", str(tmp_path / "validation.jsonl")]
    options += ["--base-model", "you/start"]
    output = tmp_path / "out"
    assert main(arguments_for(model_folder, output, *options)) == 0

    text_files = [path for path in output.rglob("*") if path.suffix in (".md", ".json")]
    assert not [path.name for path in text_files if "unpublished question" in path.read_text()]
    assert str(tmp_path.parent) not in (output / "result.json").read_text()

    card = yaml.safe_load((output / "README.md").read_text().split("---")[1])
    names = ("license", "base_model", "base_model_relation")
    assert [card[name] for name in names] == ["cc0-1.0", "you/start", "finetune"]

    names = ("1_Pooling/config.json", "sentence_bert_config.json", "modules.json")
    pooling, settings, modules = (json.loads((output / name).read_text()) for name in names)

    library_config = json.loads((output / "config_sentence_transformers.json").read_text())
    assert (
        library_config["requirements"]["transformers"] == ">=4.56"
        and "query" in library_config["prompts"]
    )

    assert pooling["pooling_mode"] == "mean" and pooling["word_embedding_dimension"] == 32
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    assert flags == ["pooling_mode_mean_tokens"] and "embedding_dimension" not in pooling

    assert settings == {"max_seq_length": 32, "do_lower_case": False}

    assert [module["type"] for module in modules] == [
        f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling")
    ]


def test_model_card_names_base_models_on_the_hub_only(model_folder):
    """The model card names a base model that is on the Hub, and no local directory."""
    expected = {"base_model": "chandar-lab/NeoBERT", "base_model_relation": "finetune"}
    assert base_model_metadata(None, "chandar-lab/NeoBERT") == expected
    # A local directory is not the name of a model on the Hub.
    assert base_model_metadata(None, str(model_folder)) == base_model_metadata(None) == {}


def test_retrieval_texts_include_negatives(tmp_path):
    """The texts of a retrieval evaluation include the negatives."""
    rows = [{"anchor": "a", "positive": "p", "negative": "n"}, {"anchor": "a", "positive": "q"}]
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"negative": None, **row} for row in rows])
    queries = retrieval.read_queries(str(path))
    assert queries.relevant == {"a": {"p", "q"}} and sorted(queries.texts) == ["n", "p", "q"]


def test_retrieval_does_not_reduce_the_maximum_length(model_folder, tmp_path):
    """A `--max-length` above the limit of the model is refused, as in other commands."""
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"anchor": "a", "positive": "p"}])
    with pytest.raises(UserError, match="`max_length` must be at most .*, got 100,000. Lower"):
        retrieval.main([str(model_folder), "--pairs", str(path), "--max-length", "100000"])


def test_retrieval_leaves_out_the_rows_that_training_leaves_out(tmp_path, caplog):
    """Rows without both texts are left out with a warning. A missing column is an error."""
    texts = [("a", "p"), ("b", None), ("c", " "), ("d", 5), (None, "q")]
    rows = [{"anchor": anchor, "positive": positive} for anchor, positive in texts]
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    queries = retrieval.read_queries(str(path))
    assert queries.relevant == {"a": {"p"}} and queries.texts == ["p"]
    reasons = "4 of 5 rows are left out: 3 without positive, 1 without anchor."
    assert caplog.messages == [f"{path}: {reasons}"]

    caplog.clear()
    assert load_source(PairSource(name="pairs", path=str(path)))["anchor"][:] == ["a"]
    assert caplog.messages == [f"pairs: {reasons}"]

    write_jsonl(path, [*rows, {"anchor": "e"}])
    with pytest.raises(UserError, match="pairs.jsonl, row 6: there is no column 'positive'"):
        retrieval.read_queries(str(path))
    write_jsonl(path, rows[1:])
    message = (
        r"has no row with an anchor and a positive \(3 without positive, 1 without anchor; both"
    )
    with pytest.raises(UserError, match=message):
        retrieval.read_queries(str(path))


def test_model_card_has_instruction_and_inherited_license(model_folder, tmp_path):
    """The model card explains the instruction, and has the license of the initial model."""
    start = shutil.copytree(model_folder, tmp_path / "start")
    (start / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n", encoding="utf-8")
    rows = [{"anchor": f"question {i}", "positive": f"answer {i}"} for i in range(20)]
    pairs = write_jsonl(tmp_path / "faq.jsonl", rows)
    options = ["--pairs", str(pairs), "--max_steps", "1"]

    cards = {}
    for name, instruction in (("with", ["--instruction", "Find the answer"]), ("without", [])):
        assert main(arguments_for(start, tmp_path / name, *options, *instruction)) == 0
        cards[name] = (tmp_path / name / "README.md").read_text(encoding="utf-8")

    assert "# adds the instruction of the training" in cards["with"]
    assert "instruction" not in cards["without"]
    for card in cards.values():
        assert yaml.safe_load(card.split("---")[1])["license"] == "cc-by-4.0"
        assert "The license is that of the initial model's card." in card


def test_tensorboard_logs_are_kept(model_folder, tmp_path):
    rows = [{"anchor": f"question {i}", "positive": f"answer {i}"} for i in range(20)]
    pairs = write_jsonl(tmp_path / "faq.jsonl", rows)
    options = ["--pairs", str(pairs), "--max_steps", "2", "--report-to", "tensorboard"]
    assert main(arguments_for(model_folder, tmp_path / "out", *options)) == 0
    assert list((tmp_path / "out" / "runs").rglob("events.out.tfevents*"))
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_validation_file_belongs_to_the_identity_of_a_run(model_folder, tmp_path):
    """A validation file changes the identity of a run, because no queries are held out then."""
    write_jsonl(tmp_path / "pairs.jsonl", [{"anchor": "a", "positive": "b"}])
    pairs = str(tmp_path / "pairs.jsonl")
    identities = []
    for words in ([], ["--validation-file", pairs], ["--validation-percent", "0"]):
        arguments = ["--model", str(model_folder), "--pairs", pairs, "--output", "out", *words]
        options = OPTIONS["contrastive"].read(arguments)
        training = SimpleNamespace(world_size=1, learning_rate=1e-4, num_train_epochs=1)
        identity = contrastive.run_identity(
            options, training, read_sources(options.data, options.instructions)
        )
        identities.append(identity["holds_out"])
    assert identities == [True, False, False]


def test_fields_that_other_versions_lack_are_not_part_of_the_identity(model_folder, triplets):
    """A run resumes with a version of transformers whose TrainingArguments have other fields."""
    argv = ["--model", str(model_folder), "--pairs", triplets, "--output", "out", "--seed", "3"]
    options, training = contrastive.parse(argv)
    sources = read_sources(options.data, options.instructions)
    identity = contrastive.run_identity(options, training, sources)
    assert (identity["seed"], identity["num_train_epochs"]) == (3, 1)
    unset = set(training.to_dict()) - set(options.trainer) - {"learning_rate", "num_train_epochs"}
    assert len(unset) > 50 and not unset & set(identity)


def test_another_validation_file_is_another_run(model_folder, tmp_path):
    """A finished run is refused with another validation file. A moved file is the same one."""
    rows = [{"anchor": f"question {i}", "positive": f"answer {i}"} for i in range(20)]
    pairs = str(write_jsonl(tmp_path / "faq.jsonl", rows))
    validation = write_jsonl(tmp_path / "validation.jsonl", [{"anchor": "a", "positive": "b"}])
    other = write_jsonl(tmp_path / "other.jsonl", [{"anchor": "c", "positive": "d"}])

    options = ["--pairs", pairs, "--max_steps", "1", "--validation-file"]
    argv = arguments_for(model_folder, tmp_path / "out", *options)
    assert main([*argv, str(validation)]) == 0
    moved = validation.rename(tmp_path / "moved.jsonl")
    assert main([*argv, str(moved)]) == 0
    with pytest.raises(UserError, match="contains a run with other settings .validation_file"):
        main([*argv, str(other)])


@pytest.fixture
def prompted_folder(model_folder, tmp_path):
    """Return the directory of a sentence encoder with prompts and a default prompt."""
    model = load_sentence_transformer(str(model_folder), max_length=32)
    model.prompts = {"retrieval": "find: ", "query": "query: ", "document": "passage: "}
    model.default_prompt_name = "retrieval"
    save_for_all_versions(model, tmp_path / "start")
    return tmp_path / "start"


def test_prompts_of_the_initial_model_are_kept(prompted_folder, triplets, tmp_path, monkeypatch):
    """A run without instructions trains with the prompts of the initial model and keeps them."""
    trainers = []
    build_trainer = contrastive.build_trainer

    def build_and_keep_trainer(*arguments):
        trainers.append(build_trainer(*arguments))
        return trainers[-1]

    monkeypatch.setattr(contrastive, "build_trainer", build_and_keep_trainer)
    argv = arguments_for(prompted_folder, tmp_path / "out", "--pairs", triplets, "--max_steps", "1")
    assert main(argv) == 0

    batch = next(iter(trainers[0].get_train_dataloader()))
    tokenizer = trainers[0].model.tokenizer
    for column, prompt in (
        ("anchor", "query :"),
        ("positive", "passage :"),
        ("negative_1", "passage :"),
    ):
        text = tokenizer.decode(batch[f"{column}_input_ids"][0], skip_special_tokens=True)
        assert text.startswith(prompt), f"the {column} has another prompt: {text}"

    model = load_sentence_transformer(str(tmp_path / "out"), trust_remote_code=True)
    assert (model.prompts["query"], model.prompts["document"]) == ("query: ", "passage: ")
    assert model.default_prompt_name == "retrieval"


def test_instructions_replace_the_prompts_of_the_initial_model(
    prompted_folder, triplets, tmp_path, caplog
):
    """Instructions replace the prompts with a warning, and the output has no default prompt."""
    options = ["--pairs", triplets, "--max_steps", "1", "--instruction", "Find it."]
    assert main(arguments_for(prompted_folder, tmp_path / "out", *options)) == 0
    prompts = "(query: 'query: ', document: 'passage: ', retrieval: 'find: ')"
    assert f"replace the prompts of the initial model {prompts}" in caplog.text

    model = load_sentence_transformer(str(tmp_path / "out"), trust_remote_code=True)
    assert model.prompts["query"] == "Instruction: Find it. Query: "
    assert model.prompts["document"] == "" and "retrieval" not in model.prompts
    assert model.default_prompt_name is None


def test_example_with_the_trainer_of_sentence_transformers(
    model_folder, pairs, tmp_path, monkeypatch
):
    """The code of docs/embeddings.md trains and saves an encoder with mean pooling."""
    page = (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (code,) = [block for block in blocks if "SentenceTransformerTrainer" in block]
    code = code.replace("chandar-lab/NeoBERT", str(model_folder))
    code = code.replace("runs/pairs/train.jsonl", pairs)

    monkeypatch.chdir(tmp_path)
    exec(code, {})
    model = load_sentence_transformer("runs/encoder", trust_remote_code=True)
    assert model[1].pooling_mode == "mean"


def test_output_is_locked_before_loading_data_and_model(model_folder, tmp_path, monkeypatch):
    """The output directory is locked before the data and the model are loaded."""
    rows = [{"anchor": f"question {i}", "positive": f"answer {i}"} for i in range(20)]
    argv = ["--pairs", str(write_jsonl(tmp_path / "faq.jsonl", rows)), "--max_steps", "1"]
    for name in ("build_mixture", "load_model"):
        monkeypatch.setattr(
            contrastive,
            name,
            lambda *_: pytest.fail("data or a model was loaded before the output was locked"),
        )

    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        with pytest.raises(UserError, match="is in use by another run"):
            main(arguments_for(model_folder, tmp_path / "out", *argv))


def test_queries_of_reversed_training_pairs_are_not_evaluated(tmp_path, caplog):
    """A validation query is left out if it is a positive of the training data."""
    rows = [{"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d"}]
    validation = write_jsonl(tmp_path / "validation.jsonl", rows)
    training_data = {"x": Dataset.from_dict({"anchor": ["b", "e"], "positive": ["a", "f"]})}
    queries = contrastive.read_validation_file(str(validation), training_data)
    assert queries.relevant == {"c": {"d"}} and queries.texts == ["b", "d"]
    assert "1 of 2 queries also occur in the training data, as anchor or positive" in caplog.text


def test_retrieval_is_measured_before_and_after(model_folder, tmp_path, capsys, caplog):
    """Check the retrieval metrics, which a separate implementation computes again.

    Each validation query is searched among all texts of the validation file. Queries that are in
    the training data are left out.
    """
    rows = [
        {"anchor": f"an animal: {animal} {i}", "positive": f"{i} {animal}"}
        for i, animal in enumerate(ANIMALS * 4)
    ]
    train = write_jsonl(tmp_path / "train.jsonl", rows[:20])

    # The last query has two relevant texts.
    second_answer = {"anchor": rows[-1]["anchor"], "positive": "one more answer"}
    validation = write_jsonl(tmp_path / "validation.jsonl", [*rows[19:], second_answer])

    argv = ["--pairs", str(train), "--learning_rate", "2e-3"]
    argv += ["--validation-file", str(validation)]
    assert main(arguments_for(model_folder, tmp_path / "out", *argv)) == 0

    result = json.loads((tmp_path / "out" / "result.json").read_text())
    scores = result["training"]["validation"]
    assert (scores["queries"], scores["texts"]) == (12, 14)
    assert "1 of 13 queries also occur in the training data" in caplog.text
    assert "12 held-out queries among 14 texts" in capsys.readouterr().out

    # Row 19 is also in the training data: its text is searched, but its query is left out.
    texts = [*(row["positive"] for row in rows[19:]), "one more answer"]
    for when, folder in (("before", model_folder), ("after", tmp_path / "out")):
        model = load_sentence_transformer(str(folder), max_length=32, trust_remote_code=True)
        queries = model.encode([row["anchor"] for row in rows[20:]])
        measures = []
        for index, row in enumerate(model.similarity(queries, model.encode(texts))):
            relevant = {index + 1} | ({13} if index == 11 else set())
            hits = [text in relevant for text in row.argsort(descending=True).tolist()[:10]]
            rank = hits.index(True) + 1 if any(hits) else float("inf")
            measures.append([sum(hits[:1]) / len(relevant), sum(hits) / len(relevant), 1 / rank])

        measures = torch.tensor(measures)
        names = ("recall@1", "recall@10", "mrr@10")
        expected = dict(zip(names, measures.mean(0).tolist()))
        expected |= dict(zip([f"{n}_se" for n in names], (measures.std(0) / 12**0.5).tolist()))

        assert scores[when] == pytest.approx(expected, abs=1e-6)
        line = f"| {when} | {expected['recall@1']:.3f} ± {expected['recall@1_se']:.3f} |"
        assert line in (tmp_path / "out" / "README.md").read_text()

    pairs = ["--pairs", str(validation), "--trust-remote-code"]
    assert retrieval.main([str(tmp_path / "out"), *pairs]) == 0
    pattern = r"13 queries among 14 texts: recall@1 \d.\d+ ± 0.\d+, .*MRR@10 \d.\d+ ± 0.\d+\n"
    assert re.search(pattern, capsys.readouterr().out)

    with pytest.raises(UserError, match="all queries of .*train.jsonl are in the training data"):
        argv[-1] = str(train)
        main(arguments_for(model_folder, tmp_path / "other", *argv))


BAD = {
    "no data": ([], "at least one dataset is required"),
    "a name twice": (
        ["--pairs", "good.jsonl", "good.jsonl"],
        "must have different names, got good, good",
    ),
    "a file of another format": (
        ["--pairs", "good.data"],
        "must end in one of .jsonl, .*, got good.data. Rename the file",
    ),
    "a row without a positive": (["--pairs", "bad.jsonl"], "row 2: there is no column 'positive'"),
    "one answer": (["--pairs", "alike.jsonl"], "from 5 usable rows. Reduce --batch-texts"),
    "a batch of one": (
        ["--per-device-train-batch-size", "1"],
        "batch_size` must be at least 2, got 1",
    ),
    "a file as output": (["--output", "good.jsonl"], "must not contain each other. Choose another"),
    "steps and epochs": (["--num-train-epochs", "1"], "`num_train_epochs` would be ignored"),
    "an empty file": (["--pairs", "empty.jsonl"], "empty.jsonl has no row with an anchor"),
    "only blank positives": (
        ["--pairs", "blank.jsonl"],
        "blank.jsonl has no usable row: 5 without",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_is_reported(case, model_folder, tmp_path, monkeypatch):
    """Invalid input ends with one error message before any training."""
    monkeypatch.chdir(tmp_path)
    good = [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(16)]
    write_jsonl(tmp_path / "good.jsonl", good)
    write_jsonl(tmp_path / "good.data", good)
    write_jsonl(tmp_path / "bad.jsonl", [good[0], {"anchor": "a"}])
    write_jsonl(tmp_path / "alike.jsonl", [{"anchor": f"a{i}", "positive": "b"} for i in range(5)])
    write_jsonl(tmp_path / "blank.jsonl", [{"anchor": f"a{i}", "positive": " "} for i in range(5)])
    (tmp_path / "empty.jsonl").touch()

    options, message = BAD[case]
    if options and options[0].startswith("--") and options[0] != "--pairs":
        options = ["--pairs", "good.jsonl", *options]

    with pytest.raises(UserError, match=message):
        main([*arguments_for(model_folder, tmp_path / "out"), *options])
    # The output is claimed before data is read. `run.json` does not block other runs.
    assert {path.name for path in tmp_path.glob("out/*")} <= {"run.json", ".lock"}
