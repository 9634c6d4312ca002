"""Pins contrastive training: the loss against its formula, an output that loads in a fresh process,
exact resuming, LoRA, retrieval before and after, and bad input in one sentence."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from jsonl import write_jsonl


pytest.importorskip("sentence_transformers")

from contrastive_runs import ANIMALS, arguments_for, make_model_folder, make_pairs, make_triplets  # noqa: F401
from safetensors.torch import load_file
from transformers import TrainerCallback

from neobert.common.cards import base_model
from neobert.common.errors import Stopped, UserError
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
    settings = {"cwd": tmp_path, "timeout": 200, "env": environment}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, **settings
    )
    assert run.returncode == 0, run.stderr[-2000:]
    name, pooling, prompt, difference = json.loads(run.stdout.splitlines()[-1])
    assert (name, pooling, prompt) == ("NeoBERTModel", "mean", "Instruction: Find it. Query: ")
    assert difference < 1e-5, "encode_query does not put the saved instruction before the query"
    assert main([*argv, "--logging_steps", "3", "--save_total_limit", "1"]) == 0, "finished"
    with open(pairs, "a") as file:
        file.write(json.dumps({"anchor": "one more", "positive": "pair"}) + "\n")
    for changes, message in (
        (["--adam_epsilon", "0.1"], "adam_epsilon 1e-08, now 0.1"),
        (["--instruction", "Find."], "instruction"),
        ([], r"files "),
    ):
        with pytest.raises(UserError, match=rf"other settings \(.*{message}"):
            main([*argv, *changes])


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


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_interruptions_lose_no_step(model_folder, triplets, pairs, tmp_path, monkeypatch, lora):
    """SIGTERM, as schedulers send it before they kill, saves the step and leaves nothing that looks
    finished; Ctrl-C loses what came after the last checkpoint. The same command ends with the
    weights of a run that was left alone."""
    options = ["--pairs", triplets, pairs, "--learning_rate", "1e-3", "--save_steps", "3"]
    if lora:
        pytest.importorskip("peft")
        options += ["--lora"]
    for step, number in ((5, signal.SIGTERM), (7, signal.SIGINT)):
        go_on = stop_at(monkeypatch, [step], lambda number=number: os.kill(os.getpid(), number))
        with pytest.raises((Stopped, KeyboardInterrupt)) as stopped:
            main(arguments_for(model_folder, tmp_path / "out", *options))
        go_on()
        if number == signal.SIGTERM:
            assert "stopped by SIGTERM after step" in str(stopped.value)
        assert not (tmp_path / "out" / "modules.json").exists(), "it looks finished"
    assert main(arguments_for(model_folder, tmp_path / "out", *options)) == 0
    assert main(arguments_for(model_folder, tmp_path / "whole", *options)) == 0
    resumed, whole, start = map(weights, (tmp_path / "out", tmp_path / "whole", model_folder))
    assert resumed.keys() == whole.keys() and not any("lora" in key for key in whole)
    assert max((whole[key] - start[f"model.{key}"]).abs().max() for key in whole) > 1e-4, "vacuous"
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    if lora:
        assert (tmp_path / "whole" / "adapter" / "adapter_model.safetensors").is_file()
        assert torch.equal(whole["encoder.weight"], start["model.encoder.weight"])


def test_the_card_holds_no_row_and_the_manifest_no_folder(model_folder, tmp_path):
    """The folder is made to be published; the library's own card shows rows of the training
    data."""
    rows = [{"anchor": f"unpublished question {i}", "positive": f"answer {i}"} for i in range(20)]
    write_jsonl(tmp_path / "faq.jsonl", rows)
    write_jsonl(tmp_path / "heldout.jsonl", [{"anchor": "other", "positive": "text"}])
    options = ["--pairs", str(tmp_path / "faq.jsonl"), "--max_steps", "1", "--license", "cc0-1.0"]
    options += ["--heldout", str(tmp_path / "heldout.jsonl"), "--base-model", "you/start"]
    assert main(arguments_for(model_folder, tmp_path / "out", *options)) == 0
    written = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".md", ".json")]
    assert not [path.name for path in written if "unpublished question" in path.read_text()]
    assert str(tmp_path.parent) not in (tmp_path / "out" / "result.json").read_text()
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---")[1])
    names = ("license", "base_model", "base_model_relation")
    assert [card[name] for name in names] == ["cc0-1.0", "you/start", "finetune"]
    named = {"base_model": "chandar-lab/NeoBERT", "base_model_relation": "finetune"}
    assert base_model(None, "chandar-lab/NeoBERT") == named
    assert base_model(None, str(model_folder)) == base_model(None) == {}


def test_a_sentence_encoder_keeps_its_own_length(model_folder, pairs, tmp_path):
    short = load_sentence_transformer(str(model_folder), max_length=24)
    short.save_pretrained(str(tmp_path / "short"))

    def length(model, *options):
        argv = arguments_for(model, tmp_path / "out", "--pairs", pairs, *options)
        argv = [word for i, word in enumerate(argv) if "--max_length" not in (word, argv[i - 1])]
        return load_sentence_transformer(
            str(model), **contrastive.parse(argv)[0].loading()
        ).max_seq_length

    assert length(tmp_path / "short") == 24, "the default raised the length of the folder"
    assert length(tmp_path / "short", "--max-length", "50") == 50
    assert length(model_folder) == 64, "a bare encoder of 64 positions"


def test_negatives_are_searched_too(tmp_path):
    rows = [{"anchor": "a", "positive": "p", "negative": "n"}, {"anchor": "a", "positive": "q"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"negative": None, **row}) + "\n" for row in rows))
    relevant, texts = retrieval.read_questions(str(path))
    assert relevant == {"a": {"p", "q"}} and sorted(texts) == ["n", "p", "q"]


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
    found = json.loads((tmp_path / "out" / "result.json").read_text())["training"]["heldout"]
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
        errors = (torch.tensor(measures).std(0) / 12**0.5).tolist()
        expected |= dict(zip(("recall@1_se", "recall@10_se", "mrr@10_se"), errors))
        assert found[when] == pytest.approx(expected, abs=1e-6)
        assert (
            f"| {when} | {expected['recall@1']:.3f} ± {expected['recall@1_se']:.3f} |"
            in (tmp_path / "out" / "README.md").read_text()
        )
    heldout = ["--pairs", str(tmp_path / "heldout.jsonl"), "--trust-remote-code"]
    assert retrieval.main([str(tmp_path / "out"), *heldout]) == 0
    assert re.search(
        r"13 questions among 14 texts: recall@1 \d.\d+ ± 0.\d+, .*MRR@10 \d.\d+ ± 0.\d+\n",
        capsys.readouterr().out,
    )
    assert main([*argv, "--heldout", str(tmp_path / "heldout.jsonl")]) == 0
    assert "finished already" in capsys.readouterr().out, "it was measured on that file"
    write_jsonl(tmp_path / "more.jsonl", rows[22:])
    written = sorted(path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*"))
    assert main([*argv, "--heldout", str(tmp_path / "more.jsonl")]) == 0
    told = capsys.readouterr().out
    assert "retrieval of 10 held-out questions among 10 texts\n  after   recall@1" in told
    assert written == sorted(path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(UserError, match="all questions of .*train.jsonl are in the training data"):
        main([*argv, "--heldout", str(tmp_path / "train.jsonl")])


def test_the_folder_has_both_forms_of_a_pooling(model_folder, pairs, tmp_path):
    """sentence-transformers 5.1 and 6.2 each read one of them, and take the first token's vector
    where theirs is missing."""
    options = ["--pairs", pairs, "--max_steps", "1", "--max_length", "20"]
    assert main(arguments_for(model_folder, tmp_path / "out", *options)) == 0
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode"] == "mean" and pooling["word_embedding_dimension"] == 32
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    assert flags == ["pooling_mode_mean_tokens"] and "embedding_dimension" not in pooling
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"] for module in modules] == [
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.Pooling",
    ]
    settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 20, "do_lower_case": False}


@pytest.mark.parametrize("steps", ["1", "4"])
def test_a_run_that_diverges_stops_and_saves_no_encoder(model_folder, pairs, tmp_path, steps):
    """Of one step only the weights show it, of more the logged loss."""
    options = ["--pairs", pairs, "--max_steps", steps, "--warmup_steps", "0"]
    options += ["--learning_rate", "1e38"]
    with pytest.raises(UserError, match="the run has diverged"):
        main(arguments_for(model_folder, tmp_path / "out", *options))
    assert not (tmp_path / "out" / "modules.json").exists(), "a folder that loads was written"


BAD = {
    "no data": ([], "no training data"),
    "a row without a positive": (["--pairs", "bad.jsonl"], "row 2: there is no column 'positive'"),
    "no rows": (["--pairs", "empty.jsonl"], "has no usable row|has no rows"),
    "no file": (["--pairs", "missing.jsonl"], "there is no file of rows missing.jsonl"),
    "a folder": (["--pairs", "."], "pairs must be files that end in .jsonl, .ndjson"),
    "a name twice": (["--pairs", "good.jsonl", "good.jsonl"], "two data sets are called 'good'"),
    "a row alone": (["--pairs", "single.jsonl"], "its 1 usable rows have not so many"),
    "one answer": (
        ["--pairs", "alike.jsonl"],
        "its 5 usable rows have not so many; give a smaller",
    ),
    "a batch of one": (["--per-device-train-batch-size", "1"], "batch_size must be at least 2"),
    "a file as output": (
        ["--output", "good.jsonl"],
        "are in one another; choose an output elsewhere",
    ),
    "temperature": (["--temperature", "0"], "temperature must be above 0"),
    "template": (["--instruction-template", "Query: "], "must contain {instruction}"),
    "LoRA's target": (["--lora", "--lora-targets", "nothing"], "LoRA target 'nothing'"),
    "alpha": (["--alpha", "1e300"], "alpha must be at most 10"),
    "steps and epochs": (["--num-train-epochs", "1"], "num_train_epochs would be ignored"),
    "evaluation": (["--eval-strategy", "steps"], "there are no rows to evaluate on"),
    "a checkpoint": (["--resume-from-checkpoint", "x"], "is set to None by this command"),
    "Trainer's output": (["--output-dir", "x"], "is set by this command; give --output"),
    "unknown": (["--batch-sampler", "x"], "unknown argument '--batch-sampler'"),
    "a recipe's key": (["recipe.yaml"], "unknown key 'positives'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_before_any_work(case, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = [{"anchor": f"a{i}", "positive": f"b{i}"} for i in range(16)]
    negative = {"anchor": "c", "positive": "d", "negative": "e"}
    write_jsonl(tmp_path / "good.jsonl", good)
    write_jsonl(tmp_path / "bad.jsonl", [good[0], {"anchor": "a"}])
    write_jsonl(tmp_path / "some.jsonl", [good[0], negative])
    write_jsonl(tmp_path / "alike.jsonl", [{"anchor": f"a{i}", "positive": "b"} for i in range(5)])
    write_jsonl(tmp_path / "single.jsonl", good[:1])
    (tmp_path / "empty.jsonl").write_text("")
    entry = {"name": "x", "path": "good.jsonl", "positives": "p"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"datasets": [entry]}))
    words, message = BAD[case]
    if words and words[0].startswith("--") and words[0] != "--pairs":
        words = ["--pairs", "good.jsonl", *words]
    recipe = [word for word in words if word == "recipe.yaml"]
    words = [word for word in words if word not in recipe]
    with pytest.raises(UserError, match=message):
        main([*recipe, *arguments_for(model_folder, tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists(), "something was written"
