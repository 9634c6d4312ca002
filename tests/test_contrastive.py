"""Pins contrastive training: the loss against its formula, an output that loads in a fresh process,
exact resuming, LoRA, nothing removed that it did not make, and bad input in one sentence."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

import huggingface_hub
from contrastive_runs import ANIMALS, arguments_for, make_model_folder, make_pairs, make_triplets  # noqa: F401
from safetensors.torch import load_file
from transformers import TrainerCallback

from neobert.common.cards import base_model
from neobert.common.errors import Stopped, UserError
from neobert.common.identity import model_digest
from neobert.common.runs import locked
from neobert.embeddings import contrastive, retrieval
from neobert.embeddings.contrastive import build_loss, main
from neobert.embeddings.options import ContrastiveArguments
from neobert.embeddings.packed_encoder import load_sentence_transformer


def loss_of(arguments, anchors, positives, negatives):
    """The library's loss on given vectors."""

    class Vectors(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["vectors"]}

    loss = build_loss(Vectors(), arguments)
    return loss.compute_loss_from_embeddings([anchors, positives, *negatives], None)


def test_loss_is_infonce_of_cosine_over_temperature(model_folder):
    generator = torch.Generator().manual_seed(0)
    anchors, positives, first, second = (torch.randn(6, 16, generator=generator) for _ in range(4))
    arguments = ContrastiveArguments(model=str(model_folder), output="o", pairs=["x.jsonl"])
    got = loss_of(arguments, anchors, positives, [first, second])
    candidates = torch.nn.functional.normalize(torch.cat([positives, first, second]), dim=1)
    logits = torch.nn.functional.normalize(anchors, dim=1) @ candidates.T / 0.07
    expected = torch.stack([logits[i].logsumexp(0) - logits[i, i] for i in range(6)]).mean()
    torch.testing.assert_close(
        got,
        expected,
        msg="the loss is not -log softmax(cos / 0.07) over in-batch and hard negatives",
    )


def test_cached_loss_equals_the_plain_one(model_folder):
    model = load_sentence_transformer(str(model_folder), max_length=32)
    losses, gradients = [], []
    for mini_batch_size in (None, 3):
        loss = build_loss(
            model,
            ContrastiveArguments(
                model=str(model_folder), output="o", pairs=["x"], mini_batch_size=mini_batch_size
            ),
        )
        features = [
            model.preprocess([f"{word} {i}" for i in range(8)])
            for word in ("query", "answer", "wrong")
        ]
        model.zero_grad()
        value = loss(features, None)
        value.backward()
        losses.append(value.item())
        gradients.append(model[0].auto_model.transformer_encoder[0].qkv.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_training_lowers_the_loss_and_the_folder_loads_in_a_fresh_process(
    model_folder, triplets, pairs, tmp_path
):
    output = tmp_path / "out"
    argv = arguments_for(
        model_folder,
        output,
        "--pairs",
        triplets,
        pairs,
        "--instruction",
        "Find it.",
        "--max_steps",
        "40",
    )
    argv += ["--learning_rate", "2e-3", "--save_steps", "100"]
    assert main(argv) == 0
    log = json.loads((output / "contrastive.json").read_text())["training"]
    losses = [loss for _, loss in log["losses"]]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8]), f"the loss did not fall: {losses}"
    assert sum(log["probabilities"].values()) == pytest.approx(1)
    assert not (output / "checkpoints").exists() and not list(output.glob(".saving*")), (
        "left-overs of the training"
    )
    program = (
        "import json, sys; from sentence_transformers import SentenceTransformer\n"
        f"model = SentenceTransformer({str(output)!r}, trust_remote_code=True)\n"
        "assert 'neobert' not in sys.modules\n"
        "vector = model.encode_query(['grey wolf']); plain = model.encode(['Instruction: Find it. "
        "Query: grey wolf'])\n"
        "print(json.dumps([type(model[0].auto_model).__name__, model[1].pooling_mode, "
        "model.prompts['query'], abs(vector - plain).max().item()]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        env=_without_package(),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    name, pooling, prompt, difference = json.loads(run.stdout.splitlines()[-1])
    assert (name, pooling, prompt) == ("NeoBERTModel", "mean", "Instruction: Find it. Query: ")
    assert difference < 1e-5, "encode_query does not put the saved instruction before the query"
    assert main([*argv, "--logging_steps", "3", "--save_total_limit", "1"]) == 0, (
        "a finished run is left alone"
    )
    with pytest.raises(UserError, match=r"other settings \(optim .*adam_epsilon 1e-08, now 0.1"):
        main([*argv, "--adam_epsilon", "0.1", "--optim", "sgd"])
    with pytest.raises(UserError, match="learning_rate .*, now"):
        main([*argv, "--learning_rate", "1e-3"])
    with open(pairs, "a") as file:
        file.write(json.dumps({"anchor": "one more", "positive": "pair"}) + "\n")
    with pytest.raises(UserError, match=r"other settings \(files "):
        main(argv)


def _without_package():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    model_folder, triplets, pairs, tmp_path, monkeypatch, lora
):
    if lora:
        pytest.importorskip("peft")

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    def argv(name):
        return arguments_for(
            model_folder,
            tmp_path / name,
            "--pairs",
            triplets,
            pairs,
            "--lora",
            str(lora).lower(),
            "--learning_rate",
            "1e-3",
        )

    build = contrastive.build_trainer

    def build_and_stop(*arguments):
        trainer = build(*arguments)
        trainer.add_callback(Stop())
        return trainer

    monkeypatch.setattr(contrastive, "build_trainer", build_and_stop)
    with pytest.raises(KeyboardInterrupt):
        main(argv("resumed"))
    assert (tmp_path / "resumed" / "checkpoints" / "checkpoint-4").is_dir()
    # What kill -9 leaves: a checkpoint without its end, a half-saved folder.
    broken = tmp_path / "resumed" / "checkpoints" / "checkpoint-6"
    broken.mkdir()
    (broken / "trainer_state.json").write_text('{"global_')
    (tmp_path / "resumed" / "notes.txt").write_text("mine")
    monkeypatch.setattr(contrastive, "build_trainer", build)
    assert main(argv("resumed")) == main(argv("whole")) == 0
    assert not list((tmp_path / "resumed").glob(".*")), "left-overs of the killed run"
    assert (tmp_path / "resumed" / "notes.txt").read_text() == "mine"
    resumed, whole, start = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "resumed", tmp_path / "whole", model_folder)
    )
    assert resumed.keys() == whole.keys() and not any("lora" in key for key in whole), (
        "the saved model must hold plain weights"
    )
    moved = max((whole[key] - start[f"model.{key}"]).abs().max().item() for key in whole)
    assert moved > 1e-4, "training changed nothing, so this test would be vacuous"
    assert all(torch.equal(resumed[key], whole[key]) for key in whole), (
        "the resumed run differs from the uninterrupted one"
    )
    if lora:
        assert (tmp_path / "whole" / "adapter" / "adapter_model.safetensors").is_file()
        assert torch.equal(whole["encoder.weight"], start["model.encoder.weight"]), (
            "LoRA left the embedding as it was"
        )


class _At(TrainerCallback):
    """Calls a function at the end of some steps."""

    def __init__(self, steps, function):
        self.steps, self.function = steps, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            self.function()


def stop_at(monkeypatch, steps, function):
    build = contrastive.build_trainer

    def build_and_add(*arguments):
        trainer = build(*arguments)
        trainer.add_callback(_At(steps, function))
        return trainer

    monkeypatch.setattr(contrastive, "build_trainer", build_and_add)
    return lambda: monkeypatch.setattr(contrastive, "build_trainer", build)


def interrupt():
    raise KeyboardInterrupt


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_weights(one, two):
    one, two = weights(one), weights(two)
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), (
        "the weights differ"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_a_damaged_checkpoint_is_passed_over(
    model_folder, pairs, tmp_path, monkeypatch, capsys, name
):
    """A disk that was full, or a machine that lost its power, cuts a file of the newest
    checkpoint."""
    arguments = ["--pairs", pairs, "--save_steps", "2", "--learning_rate", "1e-3"]
    go_on = stop_at(monkeypatch, [6], interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(arguments_for(model_folder, tmp_path / "out", *arguments))
    go_on()
    newest = tmp_path / "out" / "checkpoints" / "checkpoint-4" / name
    newest.write_bytes(newest.read_bytes()[:-9])
    assert main(arguments_for(model_folder, tmp_path / "out", *arguments)) == 0
    assert (
        f"damaged: checkpoint-4 ({name} has" in (message := capsys.readouterr().err)
        and "going on from checkpoint-2" in message
    )
    assert main(arguments_for(model_folder, tmp_path / "whole", *arguments)) == 0
    assert_same_weights(tmp_path / "out", tmp_path / "whole")


def test_sigterm_loses_no_step(model_folder, pairs, tmp_path, monkeypatch):
    """As schedulers send it before they kill: the step is saved, nothing looks finished, and the
    same command goes on."""
    arguments = ["--pairs", pairs, "--save_steps", "100", "--learning_rate", "1e-3"]
    go_on = stop_at(monkeypatch, [5], lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped by SIGTERM after step [56] of 8, which is saved"):
        main(arguments_for(model_folder, tmp_path / "out", *arguments))
    go_on()
    assert not (tmp_path / "out" / "modules.json").exists(), "an interrupted run looks finished"
    assert main(arguments_for(model_folder, tmp_path / "out", *arguments)) == 0
    assert main(arguments_for(model_folder, tmp_path / "whole", *arguments)) == 0
    assert_same_weights(tmp_path / "out", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_interruptions_end_as_none(model_folder, triplets, pairs, tmp_path, monkeypatch, seed):
    """Two and three random ones over several passes of two data sets, by Ctrl-C or SIGTERM."""
    arguments = [
        "--pairs",
        triplets,
        pairs,
        "--save_steps",
        "2",
        "--learning_rate",
        "1e-3",
        "--max_steps",
        "14",
    ]
    random = np.random.default_rng(seed)
    for step in sorted(random.integers(1, 8, size=2 + seed).tolist()):
        number = signal.SIGTERM if random.integers(2) else signal.SIGINT
        go_on = stop_at(
            monkeypatch, range(step, 15), lambda number=number: os.kill(os.getpid(), number)
        )
        with pytest.raises((Stopped, KeyboardInterrupt)):
            main(arguments_for(model_folder, tmp_path / "out", *arguments))
        go_on()
    assert main(arguments_for(model_folder, tmp_path / "out", *arguments)) == 0
    assert main(arguments_for(model_folder, tmp_path / "whole", *arguments)) == 0
    assert_same_weights(tmp_path / "out", tmp_path / "whole")


def test_two_runs_do_not_write_together(model_folder, pairs, tmp_path):
    """The second one moves nothing, with --overwrite either."""
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", "1")
    with (
        locked(tmp_path / "out"),
        pytest.raises(UserError, match="is in use by another run; wait until it has ended"),
    ):
        main(argv)
    assert not (tmp_path / "out").exists(), "something was written"
    assert main(argv) == 0
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with locked(tmp_path / "out"), pytest.raises(UserError, match="is in use by another run"):
        main([*argv, "--learning_rate", "1e-3", "--overwrite"])
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_run_is_known_by_its_weights_texts_and_instructions(model_folder, pairs, tmp_path):
    def recipe(*more):
        arguments, training = contrastive.parse(
            arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, *more)
        )
        return contrastive._recipe(arguments, training, arguments.sources())

    first = recipe()
    assert recipe("--overwrite") == first
    changed = recipe("--instruction", "Find it.")
    assert [name for name in first if first[name] != changed[name]] == [
        "instruction",
        "instructions",
    ]
    assert changed["instructions"] == {"pairs": "Find it."} and first[
        "model_digest"
    ] == model_digest(model_folder)
    with open(pairs, "a", encoding="utf-8") as file:
        file.write(json.dumps({"anchor": "another", "positive": "one"}) + "\n")
    changed = recipe()
    assert [name for name in first if first[name] != changed[name]] == ["files"]


def test_the_negatives_of_all_processes_are_asked_for(model_folder):
    model = load_sentence_transformer(str(model_folder), max_length=32)
    for gather in (False, True):
        for more in ({}, {"mini_batch_size": 2}):
            given = ContrastiveArguments(
                model=str(model_folder), output="o", pairs=["x"], gather_negatives=gather, **more
            )
            assert build_loss(model, given).gather_across_devices is gather


SECRET = "hf_" + "Qw3rTy" * 6


def test_no_secret_is_stored(model_folder, pairs, tmp_path, monkeypatch):
    """Trainer writes its arguments into every checkpoint, training_args.bin."""
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(sys, "argv", ["neobert", "contrastive", "--hub-token", SECRET])
    found, seen = [], []

    def look():
        for path in (tmp_path / "out").rglob("*"):
            seen.append(path.name)
            if path.is_file() and SECRET.encode() in path.read_bytes():
                found.append(path.name)

    stop_at(monkeypatch, [6], look)
    assert (
        main(arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, "--hub-token", SECRET))
        == 0
    )
    look()
    assert "training_args.bin" in seen and "contrastive.json" in seen, (
        "vacuous: nothing was looked at"
    )
    assert not found, f"the token is in {found}"
    assert huggingface_hub.get_token() == SECRET, (
        "the token does not reach the library that needs it"
    )


def test_the_card_holds_no_row_and_the_manifest_no_folder(model_folder, tmp_path):
    """The folder is made to be published; the library's own card shows rows of the training
    data."""
    rows = [
        {"anchor": f"unpublished question {i}", "positive": f"unpublished answer {i}"}
        for i in range(20)
    ]
    for name in ("faq", "heldout"):
        write_jsonl(
            tmp_path / f"{name}.jsonl",
            rows if name == "faq" else [{"anchor": "other", "positive": "text"}],
        )
    argv = arguments_for(
        model_folder, tmp_path / "out", "--pairs", str(tmp_path / "faq.jsonl"), "--max_steps", "1"
    )
    assert (
        main(
            [
                *argv,
                "--heldout",
                str(tmp_path / "heldout.jsonl"),
                "--license",
                "cc0-1.0",
                "--base-model",
                "you/start",
            ]
        )
        == 0
    )
    written = [
        path
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and path.suffix in (".md", ".json")
    ]
    assert not [path.name for path in written if "unpublished question" in path.read_text()]
    assert str(tmp_path.parent) not in (tmp_path / "out" / "contrastive.json").read_text()
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---")[1])
    assert (card["license"], card["base_model"], card["base_model_relation"]) == (
        "cc0-1.0",
        "you/start",
        "finetune",
    )
    named = {"base_model": "chandar-lab/NeoBERT", "base_model_relation": "finetune"}
    assert (
        base_model(None, "chandar-lab/NeoBERT") == named
        and base_model(None, str(model_folder)) == base_model(None) == {}
    )


def test_a_sentence_encoder_keeps_its_own_length(model_folder, pairs, tmp_path):
    short = load_sentence_transformer(str(model_folder), max_length=24)
    short.save_pretrained(str(tmp_path / "short"))

    def length(model, *options):
        argv = arguments_for(model, tmp_path / "out", "--pairs", pairs, *options)
        argv = [word for i, word in enumerate(argv) if "--max_length" not in (word, argv[i - 1])]
        return load_sentence_transformer(**contrastive.parse(argv)[0].loading()).max_seq_length

    assert length(tmp_path / "short") == 24, "the default raised the length of the folder"
    assert length(tmp_path / "short", "--max-length", "50") == 50
    assert length(model_folder) == 64, "a bare encoder of 64 positions"


def test_retrieval_is_measured_before_and_after(model_folder, tmp_path, capsys):
    """Against the definition: every question is searched among all texts of the held-out file,
    without those that were trained on."""
    rows = [
        {"anchor": f"an animal: {animal} {i}", "positive": f"{i} {animal}"}
        for i, animal in enumerate(ANIMALS * 4)
    ]
    write_jsonl(tmp_path / "train.jsonl", rows[:20])
    write_jsonl(
        tmp_path / "heldout.jsonl",
        [
            *rows[19:],
            {
                "anchor": rows[-1]["anchor"],
                "positive": "one more answer",
            },
        ],
    )
    argv = arguments_for(
        model_folder,
        tmp_path / "out",
        "--pairs",
        str(tmp_path / "train.jsonl"),
        "--learning_rate",
        "2e-3",
    )
    assert main([*argv, "--heldout", str(tmp_path / "heldout.jsonl")]) == 0
    found = json.loads((tmp_path / "out" / "contrastive.json").read_text())["training"]["heldout"]
    assert (found["questions"], found["texts"]) == (12, 14)
    told = capsys.readouterr()
    assert (
        "1 of 13 questions are trained on" in told.err
        and "12 held-out questions among 14 texts" in told.out
    )
    texts = [*(row["positive"] for row in rows[19:]), "one more answer"]
    for when, folder in (("before", model_folder), ("after", tmp_path / "out")):
        model = load_sentence_transformer(str(folder), max_length=32, trust_remote_code=True)
        scores = model.similarity(
            model.encode([row["anchor"] for row in rows[20:]]), model.encode(texts)
        )
        measures = []
        for number, row in enumerate(scores):
            right = {number + 1} | ({13} if number == 11 else set())
            hits = [text in right for text in row.argsort(descending=True).tolist()[:10]]
            first = hits.index(True) + 1 if any(hits) else None
            measures.append(
                [sum(hits[:1]) / len(right), sum(hits) / len(right), 1 / first if first else 0]
            )
        expected = dict(
            zip(("recall@1", "recall@10", "mrr@10"), torch.tensor(measures).mean(0).tolist())
        )
        assert found[when] == pytest.approx(expected, abs=1e-6)
        assert (
            f"| {when} | {expected['recall@1']:.3f} |"
            in (tmp_path / "out" / "README.md").read_text()
        )
    assert (
        retrieval.main(
            [
                str(tmp_path / "out"),
                "--pairs",
                str(tmp_path / "heldout.jsonl"),
                "--trust-remote-code",
            ]
        )
        == 0
    )
    assert "13 questions among 14 texts: recall@1 0." in capsys.readouterr().out
    with pytest.raises(UserError, match="all questions of .*train.jsonl are in the training data"):
        main([*argv, "--overwrite", "--heldout", str(tmp_path / "train.jsonl")])


def test_the_folder_has_both_forms_of_a_pooling(model_folder, pairs, tmp_path):
    """sentence-transformers 5.1 and 6.2 each read one of them, and take the first token's vector
    where theirs is missing."""
    argv = arguments_for(
        model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", "1", "--max_length", "20"
    )
    assert main(argv) == 0
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert (
        pooling["pooling_mode"] == "mean"
        and pooling["pooling_mode_mean_tokens"] is True
        and pooling["word_embedding_dimension"] == 32
    )
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    assert flags == ["pooling_mode_mean_tokens"] and "embedding_dimension" not in pooling
    modules = [
        module["type"] for module in json.loads((tmp_path / "out" / "modules.json").read_text())
    ]
    assert modules == [
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
    ]
    settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 20, "do_lower_case": False}


@pytest.mark.slow
def test_overwrite_removes_only_what_it_made(model_folder, pairs, tmp_path, monkeypatch):
    argv = arguments_for(
        model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", "3", "--save_steps", "1"
    )
    assert main(argv) == 0
    old = (tmp_path / "out" / "model.safetensors").read_bytes()
    anew = [*argv, "--learning_rate", "1e-3", "--overwrite"]
    go_on = stop_at(monkeypatch, [2], interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(anew)
    go_on()
    kept = tmp_path / "out" / ".before-overwrite" / "model.safetensors"
    assert kept.read_bytes() == old, "the old encoder went before the new one was complete"
    mine = [
        tmp_path / "out" / name
        for name in ("notes.txt", "checkpoints/notes.txt", "checkpoints/checkpoint-1/notes.txt")
    ]
    for path in mine:
        path.write_text("mine")
    steps = []
    go_on = stop_at(monkeypatch, [2], lambda: steps.append(2))
    assert main(anew) == 0
    go_on()
    assert (
        steps == [2]
        and (tmp_path / "out" / "model.safetensors").read_bytes() != old
        and not kept.exists()
    )
    assert all(path.read_text() == "mine" for path in mine)
    (tmp_path / "out" / "README.md").write_text("edited")
    with pytest.raises(UserError, match=r"changed since \(README.md\); move them"):
        main([*argv, "--overwrite"])
    assert (tmp_path / "out" / "README.md").read_text() == "edited"


def test_a_file_of_the_user_under_a_name_of_the_result_stays(
    model_folder, pairs, tmp_path, monkeypatch
):
    """It came while the run worked; nothing of the work is lost."""
    argv = arguments_for(
        model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", "2", "--save_steps", "1"
    )
    go_on = stop_at(monkeypatch, [1], lambda: (tmp_path / "out" / "README.md").write_text("mine"))
    with pytest.raises(
        UserError, match=r"files that this run did not write \(README.md\); move them"
    ):
        main(argv)
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    (tmp_path / "out" / "README.md").unlink()
    go_on()
    stop_at(monkeypatch, [1, 2], lambda: pytest.fail("a step was trained again"))
    assert main(argv) == 0 and "modules.json" in os.listdir(tmp_path / "out")


@pytest.mark.parametrize("steps", ["1", "4"])
def test_a_run_that_diverges_stops_and_saves_no_encoder(model_folder, pairs, tmp_path, steps):
    """Of one step only the weights show it, of more the logged loss."""
    argv = arguments_for(
        model_folder,
        tmp_path / "out",
        "--pairs",
        pairs,
        "--max_steps",
        steps,
        "--warmup_steps",
        "0",
    )
    with pytest.raises(
        UserError,
        match=rf"training diverged after step {min(int(steps), 2)} with learning_rate 1e\+38",
    ):
        main([*argv, "--learning_rate", "1e38"])
    assert [path.name for path in (tmp_path / "out").glob("*.*")] == ["contrastive.json"], (
        "a folder that loads was written"
    )


def test_bad_input_is_one_sentence_before_any_work(model_folder, triplets, tmp_path):
    bad_row = str(
        write_jsonl(tmp_path / "bad.jsonl", [{"anchor": "a", "positive": "b"}, {"anchor": "a"}])
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    some = str(
        write_jsonl(
            tmp_path / "some.jsonl",
            [{"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d", "negative": "e"}],
        )
    )
    alike = str(
        write_jsonl(
            tmp_path / "alike.jsonl", [{"anchor": f"a{i}", "positive": "b"} for i in range(5)]
        )
    )
    half = str(
        write_jsonl(
            tmp_path / "half.jsonl",
            [{"anchor": "a", "positive": "b"}, {"anchor": "\ud83d", "positive": "c"}],
        )
    )
    single = str(write_jsonl(tmp_path / "single.jsonl", [{"anchor": "a", "positive": "b"}]))
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(
        yaml.safe_dump({"datasets": [{"name": "x", "path": triplets, "positives": "p"}]})
    )
    cases = [
        ([], [], "no training data"),
        ([], ["--pairs", bad_row], "line 2 has no 'positive'"),
        ([], ["--pairs", str(empty)], "has no rows"),
        ([], ["--pairs", "missing.jsonl"], "there is no file missing.jsonl"),
        (
            [],
            ["--pairs", str(tmp_path)],
            "pairs must be files that end in .jsonl, .ndjson, .json, .parquet",
        ),
        (
            [],
            ["--pairs", triplets, "--per_device_train_batch_size", "1"],
            "per_device_train_batch_size must be at least 2",
        ),
        ([], ["--pairs", triplets, "--report_to", "nonsense"], "report_to 'nonsense' is unknown"),
        ([], ["--pairs", triplets, "--output", triplets], "output must be a folder"),
        ([], ["--pairs", triplets, triplets], "two data sets are called 'triplets'"),
        ([], ["--pairs", triplets, "--temperature", "0"], "temperature must be above 0"),
        (
            [],
            ["--pairs", triplets, "--instruction_template", "Query: "],
            "must contain {instruction}",
        ),
        (
            [],
            ["--pairs", triplets, "--lora", "true", "--lora_targets", "nothing"],
            "LoRA target 'nothing'",
        ),
        ([], ["--pairs", single], "in-batch negatives need at least 2"),
        (
            [],
            ["--pairs", alike],
            "alike .*in-batch negatives need at least 2 rows .* its 5 usable rows share theirs",
        ),
        ([], ["--pairs", some], "line 2 has 'negative', unlike the first row"),
        ([], ["--pairs", half], "line 2: 'anchor' has half a surrogate pair"),
        ([], ["--pairs", triplets, "--fp16", "true"], "fp16 needs a GPU"),
        ([], ["--pairs", triplets, "--seed", "-1"], "seed must be at least 0, but -1 was given"),
        (
            [],
            ["--pairs", triplets, "--max-steps", "0"],
            "max_steps must be at least 1, or -1 where num_train_epochs counts",
        ),
        (
            [],
            ["--pairs", triplets, "--adam-beta1", "2"],
            "Trainer's options: Invalid beta parameter",
        ),
        (
            [],
            ["--pairs", triplets, "--learning-rate", ".nan"],
            "learning_rate must be a finite number, but nan was given",
        ),
        (
            [],
            ["--pairs", triplets, "--gradient-accumulation-steps", "0"],
            "gradient_accumulation_steps must be at least 1",
        ),
        (
            [],
            ["--pairs", triplets, "--dataloader-num-workers", "-1"],
            "dataloader_num_workers must be at least 0",
        ),
        (
            [],
            ["--pairs", triplets, "--alpha", "1e300"],
            "alpha must be at most 10.*, but 1e\\+300 was given",
        ),
        (
            [],
            ["--pairs", triplets, "--num-train-epochs", "1"],
            "max_steps 8 decides, so that num_train_epochs would be ignored",
        ),
        (
            [],
            ["--pairs", triplets, "--eval-strategy", "steps"],
            "eval_strategy is 'steps', but there are no rows to evaluate on",
        ),
        (
            [],
            ["--pairs", triplets, "--resume-from-checkpoint", "x"],
            "resume_from_checkpoint is set to None by this command",
        ),
        (
            [],
            ["--pairs", triplets, "--output-dir", "x"],
            "output_dir is set by this command; give --output",
        ),
        ([], ["--pairs", triplets, "--batch-sampler", "x"], "unknown argument '--batch-sampler'"),
        ([str(unknown)], [], "unknown key 'positives'"),
    ]
    for front, back, message in cases:
        with pytest.raises(UserError, match=message):
            main([*front, *arguments_for(model_folder, tmp_path / "out"), *back])
        assert not (tmp_path / "out").exists(), f"{message}: something was written"
