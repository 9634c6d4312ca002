"""Pins contrastive training: the loss against its formula, batches of one data set drawn by size^alpha, instructions that reach the tokens,
the fixes of the published recipe, an output that loads in a fresh process, exact resuming, LoRA, and bad input in one sentence."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml


pytest.importorskip("sentence_transformers")

import huggingface_hub
from datasets import Dataset
from safetensors.torch import load_file
from torch.utils.data import ConcatDataset
from transformers import AutoTokenizer, TrainerCallback

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import Stopped, UserError
from neobert.common.locks import FolderLock
from neobert.embeddings import contrastive
from neobert.embeddings.contrastive import ContrastiveArguments, build_datasets, build_loss, build_trainer, main, parse
from neobert.embeddings.contrastive_data import PairSource, SizeAlphaBatchSampler, TextsBatchSampler, example, load_source, lookup
from neobert.embeddings.packed_encoder import load_sentence_transformer


RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "contrastive.yaml"
COLOURS = "red green blue black white brown grey pink".split()
ANIMALS = "cat dog bird fish horse mouse lion wolf".split()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer_dir):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("encoder")
    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
    NeoBERTForMaskedLM(NeoBERTConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return folder


def write_jsonl(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.fixture
def triplets(tmp_path):
    rows = [
        {
            "anchor": f"an animal, a {animal}, that is {colour} and number {i}",
            "positive": f"{i} {colour} {animal}",
            "negative": f"{animal} {i}",
        }
        for i, (colour, animal) in enumerate((colour, animal) for colour in COLOURS for animal in ANIMALS)
    ]
    return write_jsonl(tmp_path / "triplets.jsonl", rows)


@pytest.fixture
def pairs(tmp_path):
    return write_jsonl(
        tmp_path / "pairs.jsonl", [{"anchor": f"{colour} thing {i}", "positive": f"{i} {colour}"} for i, colour in enumerate(COLOURS * 2)]
    )


def arguments_for(model_folder, output, *more):
    argv = ["--model", str(model_folder), "--output", str(output), "--max_length", "32", "--per_device_train_batch_size", "8"]
    argv += ["--use_cpu", "true", "--logging_steps", "1", "--save_steps", "4", "--max_steps", "8", *more]
    return argv


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
    torch.testing.assert_close(got, expected, msg="the loss is not -log softmax(cos / 0.07) over in-batch and hard negatives")


def test_cached_loss_equals_the_plain_one(model_folder):
    model = load_sentence_transformer(str(model_folder), max_length=32)
    losses, gradients = [], []
    for mini_batch_size in (None, 3):
        loss = build_loss(model, ContrastiveArguments(model=str(model_folder), output="o", pairs=["x"], mini_batch_size=mini_batch_size))
        features = [model.preprocess([f"{word} {i}" for i in range(8)]) for word in ("query", "answer", "wrong")]
        model.zero_grad()
        value = loss(features, None)
        value.backward()
        losses.append(value.item())
        gradients.append(model[0].auto_model.transformer_encoder[0].qkv.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


def mixture(sizes, batch_size=4, **settings):
    parts = [
        Dataset.from_dict({"anchor": [f"{k} a {i}" for i in range(n)], "positive": [f"{k} p {i}" for i in range(n)]})
        for k, n in enumerate(sizes)
    ]
    samplers = [TextsBatchSampler(part, batch_size=batch_size, seed=3) for part in parts]
    return SizeAlphaBatchSampler(ConcatDataset(parts), batch_samplers=samplers, seed=3, **settings), parts


def origins(sampler, sizes):
    bounds = torch.tensor(sizes).cumsum(0)
    batches = list(sampler)
    owners = [set(torch.searchsorted(bounds, torch.tensor(batch), right=True).tolist()) for batch in batches]
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
        assert counts[number] / len(drawn) == pytest.approx(p, abs=4 * error), f"data set {number} is not drawn by size^{alpha}"


def test_the_sampler_repeats_itself_and_differs_between_epochs():
    sizes = [40, 12]
    sampler, _ = mixture(sizes, alpha=0.5)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == again, "an epoch must repeat exactly, or a run could not be resumed"
    assert first != list(sampler), "two epochs have the same order"


def test_a_small_data_set_is_gone_through_completely_before_it_repeats():
    sizes = [200, 8]
    sampler, _ = mixture(sizes, alpha=0.0)
    owners, batches = origins(sampler, sizes)
    small = [index for owner, batch in zip(owners, batches) if owner == 1 for index in batch]
    assert len(small) > 16, "the small data set was hardly drawn, so this test would be vacuous"
    rounds = [tuple(small[i : i + 8]) for i in range(0, len(small) - 7, 8)]
    assert all(sorted(part) == list(range(200, 208)) for part in rounds), "a text repeats before the data set was gone through"
    assert len(set(rounds)) > 1, "every round has the same order"


def test_the_processes_of_a_step_share_a_data_set():
    sizes = [64, 64, 64]
    sampler, _ = mixture(sizes, alpha=0.5, group=4)
    owners, batches = origins(sampler, sizes)
    assert len(batches) == len(sampler) == 48
    assert all(len(set(owners[i : i + 4])) == 1 for i in range(0, 48, 4)), "neighbouring batches of one step differ in data set"


def test_texts_per_batch_counts_every_column():
    data = Dataset.from_dict({name: [f"{name} {i}" for i in range(50)] for name in ("anchor", "positive", "negative_1", "negative_2")})
    assert TextsBatchSampler(data, batch_size=64, texts_per_batch=24).batch_size == 6, "24 texts in 4 columns are 6 rows"
    assert TextsBatchSampler(data, batch_size=64, texts_per_batch=3).batch_size == 2, "a data set never has a batch of 0"


def test_no_text_is_its_own_negative():
    data = Dataset.from_dict({"anchor": [f"a{i // 2}" for i in range(40)], "positive": [f"p{i}" for i in range(40)]})
    for batch in TextsBatchSampler(data, batch_size=8):
        anchors = [data[i]["anchor"] for i in batch]
        assert len(set(anchors)) == 8, "an anchor occurs twice in a batch"


def test_a_batch_is_no_larger_than_the_rows_that_differ():
    def rows(positives):
        return Dataset.from_dict({"anchor": [f"question {i}" for i in range(len(positives))], "positive": positives})

    assert TextsBatchSampler(rows([f"answer {max(i, 1)}" for i in range(10)]), batch_size=64).batch_size == 9, "two rows share an answer"
    assert TextsBatchSampler(rows([f"answer {i}" for i in range(500)]), batch_size=64).batch_size == 64
    generator = random.Random(0)
    # A chain of rows that share texts: how many go together depends on their order, and every epoch must find a batch.
    knotted = Dataset.from_dict({name: [f"{name} {generator.randrange(12)}" for _ in range(40)] for name in ("anchor", "positive")})
    sampler = SizeAlphaBatchSampler(ConcatDataset([knotted]), batch_samplers=[TextsBatchSampler(knotted, batch_size=64)])
    for epoch in range(20):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) > 0 and all(len(set(knotted[batch]["anchor"])) == len(batch) > 4 for batch in batches)


@pytest.mark.parametrize("instruction", [[], ["--instruction", "Find it."]], ids=["without", "with instruction"])
def test_batches_of_training_have_the_rows_that_were_asked_for(model_folder, pairs, tmp_path, instruction):
    """With instructions the library's trainer gives every row the name of its data set, a text that all rows share: it must not count."""
    given, training = parse(arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, *instruction))
    data, prompts = build_datasets(given, training, contrastive.check(given, training))
    trainer = build_trainer(load_sentence_transformer(**given.loading()), data, prompts, given, training)
    batches = list(trainer.get_train_dataloader().batch_sampler)
    assert {len(batch) for batch in batches} == {training.per_device_train_batch_size}, "a batch of one row has no negatives, and loss 0"
    assert training.per_device_train_batch_size > 2


def test_a_data_set_without_a_batch_is_named():
    data = Dataset.from_dict({"anchor": ["a", "b"], "positive": ["c", "c"]})
    batches = TextsBatchSampler(data, batch_size=2)
    batches.batch_size = 2
    with pytest.raises(UserError, match="the data set faq has too few different rows for a batch of 2"):
        next(iter(SizeAlphaBatchSampler(ConcatDataset([data]), batch_samplers=[batches], names=["faq"])))


ROWS = {
    "set.0": ({"set": ["a", "b"]}, "a"),
    "set.query": ({"set": {"query": "q", "neg": ["x"]}}, "q"),
    "pos_paras.0.text": ({"pos_paras": [{"text": "t"}]}, "t"),
    "neg_paras.*.text": ({"neg_paras": [{"text": "t"}, {"text": "u"}]}, ["t", "u"]),
    "pos.3": ({"pos": ["a"]}, None),
}


@pytest.mark.parametrize("path", ROWS)
def test_a_path_leads_into_the_row(path):
    row, expected = ROWS[path]
    assert lookup(row, path) == expected


def test_rows_become_examples_with_as_many_negatives_each():
    source = PairSource(name="x", path="x", anchor="q", positive="pos.0", negatives=["neg"], max_negatives=3)
    row = {"q": "q", "pos": ["p"], "neg": ["n1", "n2", "n3", "n4"]}
    assert example(row, source, 3) == {"anchor": "q", "positive": "p", "negative_1": "n1", "negative_2": "n2", "negative_3": "n3"}
    assert example({**row, "neg": ["n1", "n2"]}, source, 3)["negative_3"] == "n1", "a shorter list is repeated"
    assert example({**row, "neg": []}, source, 3) is None, "a row without a negative would shift the columns"
    assert example({**row, "pos": ["  "]}, source, 3) is None, "an empty positive does not make an example"


def test_pairs_with_a_low_score_are_left_out(tmp_path):
    rows = [{"sentence1": f"s{i}", "sentence2": f"t{i}", "score": i / 2} for i in range(11)]
    path = write_jsonl(tmp_path / "sts.jsonl", rows)
    data = load_source(PairSource(name="sts", path=path, anchor="sentence1", positive="sentence2", above={"score": 4}))
    assert data["anchor"] == ["s9", "s10"], "only pairs with a score above 4 (here 4.5 and 5) may be trained on"


def test_the_recipe_of_the_paper():
    values = yaml.safe_load(RECIPE.read_text())
    arguments, training = parse([str(RECIPE), "--model", "m", "--output", "o", "--use_cpu", "true", "--bf16", "false"])
    sources = {source.name: source for source in arguments.sources()}
    assert len(sources) == len(values["datasets"]) == 22
    assert all(source.instruction for source in sources.values()), "every data set has an instruction"
    assert len({source.instruction for source in sources.values()}) == 22, "two data sets share an instruction"
    assert sources["sts12"].above == sources["sts-benchmark"].above == {"score": 4}
    assert (arguments.temperature, arguments.alpha, arguments.pooling, training.max_steps) == (0.07, 0.5, "mean", 2000)
    assert training.get_warmup_steps(2000) == 100, "the warm-up is a small part of the run, not all of it"
    assert {source.path for source in sources.values() if source.qrels} == {"mteb/fever", "mteb/msmarco"}
    named_in_the_paper = {"ag-news", "med-mcqa", "npr", "yahoo-answers", "amazon-qa", "paq", "trivia-qa", "wikihow"}
    assert named_in_the_paper <= sources.keys()
    assert len(sources["pubmed-qa"].negatives) == 20 and len(sources["gooaq"].negatives) == 5


# A row of every data set of the recipe, in the columns that its card on the Hub documents: A anchor, P positive, N negatives.
SHAPES = {
    "ag-news": {"title": "A", "description": "P"},
    "all-nli": {"anchor": "A", "positive": "P", "negative": "N"},
    "amazon-qa": {"query": "A", "pos": ["P", "p"]},
    "concurrent-qa": {"question": "A", "pos_paras": [{"title": "", "text": "P"}], "neg_paras": [{"text": "N"}, {"text": "N"}]},
    "github-issues": {"anchor": "A", "positive": "P"},
    "gooaq": {"question": "A", "answer": "P", **{f"negative_{i}": "N" for i in range(1, 6)}},
    "med-mcqa": {"question": "A", "exp": "P", "cop": 1, "opa": "x", "opb": "x", "opc": "x", "opd": "x"},
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
    assert sources.keys() - SHAPES.keys() == {"fever", "ms-marco"}, "these two are read as queries, corpus and judgements"
    for name, row in SHAPES.items():
        path = write_jsonl(tmp_path / f"{name}.jsonl", [row] * 3)
        data = load_source(PairSource.from_dict({**sources[name], "path": path}))
        count = len([column for column in data.column_names if column.startswith("negative_")])
        assert data[0] == {"anchor": "A", "positive": "P", **{f"negative_{i + 1}": "N" for i in range(count)}}, f"{name} is read wrongly"
        assert (count > 0) == ("N" in json.dumps(row)), f"{name}: {count} negatives"


def test_judgements_queries_and_corpus_become_pairs(tmp_path):
    """MTEB's retrieval layout on the Hub: three subsets, joined by their ids."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}.jsonl\n"
            for name, split in (("default", "train"), ("queries", "queries"), ("corpus", "corpus"))
        )
        + "---\n"
    )
    judgements = [("q1", "d2", 1), ("q2", "d1", 1), ("q2", "d2", 0)]
    write_jsonl(tmp_path / "default.jsonl", [{"query-id": q, "corpus-id": d, "score": s} for q, d, s in judgements])
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in (1, 2, 3)])
    write_jsonl(tmp_path / "corpus.jsonl", [{"_id": f"d{i}", "title": f"Title {i}", "text": f"text {i}"} for i in (1, 2, 3)])
    data = load_source(PairSource(name="fever", path=str(tmp_path), qrels=True))
    pairs = set(zip(data["anchor"], data["positive"]))
    assert pairs == {("query 1", "Title 2 text 2"), ("query 2", "Title 1 text 1")}, "judgements of 0 are not positives"


def test_instructions_reach_the_tokens_of_the_query_alone(model_folder, triplets, pairs, tmp_path):
    entries = [
        {"name": "animals", "path": triplets, "instruction": "Find the animal."},
        {"name": "things", "path": pairs, "instruction": "Find the colour."},
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"datasets": entries, "instruction_template": "I: {instruction} Q: "}))
    arguments, training = parse([str(recipe), *arguments_for(model_folder, tmp_path / "out")])
    sources = contrastive.check(arguments, training)
    data, prompts = build_datasets(arguments, training, sources)
    assert data["animals"].column_names == ["anchor", "positive", "negative_1"]
    model = load_sentence_transformer(str(model_folder), max_length=32)
    seen = set()
    for batch in build_trainer(model, data, prompts, arguments, training).get_train_dataloader():
        decoded = {
            column: model.tokenizer.decode(batch[f"{column}_input_ids"][0], skip_special_tokens=True) for column in ("anchor", "positive")
        }
        expected = "i : find the animal. q :" if batch["dataset_name"] == "animals" else "i : find the colour. q :"
        assert decoded["anchor"].startswith(expected), f"the query of {batch['dataset_name']} starts with {decoded['anchor'][:40]!r}"
        assert "find the" not in decoded["positive"], "documents carry no instruction"
        seen.add(batch["dataset_name"])
    assert seen == {"animals", "things"}, "a data set was never drawn, so this test would be vacuous"


def test_training_lowers_the_loss_and_the_folder_loads_in_a_fresh_process(model_folder, triplets, pairs, tmp_path):
    output = tmp_path / "out"
    argv = arguments_for(model_folder, output, "--pairs", triplets, pairs, "--instruction", "Find it.", "--max_steps", "40")
    argv += ["--learning_rate", "2e-3", "--save_steps", "100"]
    assert main(argv) == 0
    log = json.loads((output / "contrastive.json").read_text())["training"]
    losses = [loss for _, loss in log["losses"]]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8]), f"the loss did not fall: {losses}"
    assert sum(log["probabilities"].values()) == pytest.approx(1)
    assert not (output / "checkpoints").exists() and not list(output.glob(".saving*")), "left-overs of the training"
    program = (
        "import json, sys; from sentence_transformers import SentenceTransformer\n"
        f"model = SentenceTransformer({str(output)!r}, trust_remote_code=True)\n"
        "assert 'neobert' not in sys.modules\n"
        "vector = model.encode_query(['grey wolf']); plain = model.encode(['Instruction: Find it. Query: grey wolf'])\n"
        "print(json.dumps([type(model[0].auto_model).__name__, model[1].pooling_mode, model.prompts['query'], abs(vector - plain).max().item()]))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=200, env=_without_package())
    assert run.returncode == 0, run.stderr[-2000:]
    name, pooling, prompt, difference = json.loads(run.stdout.splitlines()[-1])
    assert (name, pooling, prompt) == ("NeoBERTModel", "mean", "Instruction: Find it. Query: ")
    assert difference < 1e-5, "encode_query does not put the saved instruction before the query"
    assert main([*argv, "--logging_steps", "3", "--save_total_limit", "1"]) == 0, "a finished run is left alone"
    with pytest.raises(UserError, match=r"other settings \(optim, adam_epsilon differ\)"):
        main([*argv, "--adam_epsilon", "0.1", "--optim", "sgd"])
    with pytest.raises(UserError, match="learning_rate differ"):
        main([*argv, "--learning_rate", "1e-3"])
    with open(pairs, "a") as file:
        file.write(json.dumps({"anchor": "one more", "positive": "pair"}) + "\n")
    with pytest.raises(UserError, match=r"other settings \(files differ\)"):
        main(argv)


def _without_package():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize("lora", [False, True])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(model_folder, triplets, pairs, tmp_path, monkeypatch, lora):
    if lora:
        pytest.importorskip("peft")

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    def argv(name):
        return arguments_for(
            model_folder, tmp_path / name, "--pairs", triplets, pairs, "--lora", str(lora).lower(), "--learning_rate", "1e-3"
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
    (tmp_path / "resumed" / ".saving-abc").mkdir()
    monkeypatch.setattr(contrastive, "build_trainer", build)
    assert main(argv("resumed")) == main(argv("whole")) == 0
    assert not list((tmp_path / "resumed").glob(".saving*")), "left-overs of the killed run"
    resumed, whole, start = (load_file(path / "model.safetensors") for path in (tmp_path / "resumed", tmp_path / "whole", model_folder))
    assert resumed.keys() == whole.keys() and not any("lora" in key for key in whole), "the saved model must hold plain weights"
    moved = max((whole[key] - start[f"model.{key}"]).abs().max().item() for key in whole)
    assert moved > 1e-4, "training changed nothing, so this test would be vacuous"
    assert all(torch.equal(resumed[key], whole[key]) for key in whole), "the resumed run differs from the uninterrupted one"
    if lora:
        assert (tmp_path / "whole" / "adapter" / "adapter_model.safetensors").is_file()
        assert torch.equal(whole["encoder.weight"], start["model.encoder.weight"]), "LoRA left the embedding as it was"


class _At(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.function()


def stop_at(monkeypatch, step, function):
    build = contrastive.build_trainer

    def build_and_add(*arguments):
        trainer = build(*arguments)
        trainer.add_callback(_At(step, function))
        return trainer

    monkeypatch.setattr(contrastive, "build_trainer", build_and_add)
    return lambda: monkeypatch.setattr(contrastive, "build_trainer", build)


def interrupt():
    raise KeyboardInterrupt


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_same_weights(one, two):
    one, two = weights(one), weights(two)
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), "the weights differ"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_a_damaged_checkpoint_is_passed_over(model_folder, pairs, tmp_path, monkeypatch, capsys, name):
    """A disk that was full, or a machine that lost its power, cuts a file of the newest checkpoint."""
    arguments = ["--pairs", pairs, "--save_steps", "2", "--learning_rate", "1e-3"]
    go_on = stop_at(monkeypatch, 6, interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(arguments_for(model_folder, tmp_path / "out", *arguments))
    go_on()
    newest = tmp_path / "out" / "checkpoints" / "checkpoint-4" / name
    newest.write_bytes(newest.read_bytes()[:-9])
    assert main(arguments_for(model_folder, tmp_path / "out", *arguments)) == 0
    assert f"damaged: checkpoint-4 ({name} has" in (message := capsys.readouterr().err) and "going on from checkpoint-2" in message
    assert main(arguments_for(model_folder, tmp_path / "whole", *arguments)) == 0
    assert_same_weights(tmp_path / "out", tmp_path / "whole")


def test_sigterm_loses_no_step(model_folder, pairs, tmp_path, monkeypatch):
    """As schedulers send it before they kill: the step is saved, nothing looks finished, and the same command goes on."""
    arguments = ["--pairs", pairs, "--save_steps", "100", "--learning_rate", "1e-3"]
    go_on = stop_at(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped by SIGTERM after step [56] of 8, which is saved"):
        main(arguments_for(model_folder, tmp_path / "out", *arguments))
    go_on()
    assert not (tmp_path / "out" / "modules.json").exists(), "an interrupted run looks finished"
    assert main(arguments_for(model_folder, tmp_path / "out", *arguments)) == 0
    assert main(arguments_for(model_folder, tmp_path / "whole", *arguments)) == 0
    assert_same_weights(tmp_path / "out", tmp_path / "whole")


def test_two_runs_do_not_write_together(model_folder, pairs, tmp_path):
    with FolderLock(tmp_path / "out"):
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on .*; wait until that run has ended"):
            main(arguments_for(model_folder, tmp_path / "out", "--pairs", pairs))
    assert not list((tmp_path / "out").iterdir()), "something was written"


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

    stop_at(monkeypatch, 6, look)
    assert main(arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, "--hub-token", SECRET)) == 0
    look()
    assert "training_args.bin" in seen and "contrastive.json" in seen, "vacuous: nothing was looked at"
    assert not found, f"the token is in {found}"
    assert huggingface_hub.get_token() == SECRET, "the token does not reach the library that needs it"


def test_the_folder_has_both_forms_of_a_pooling(model_folder, pairs, tmp_path):
    """sentence-transformers 5.1 and 6.2 each read one of them, and take the first token's vector where theirs is missing."""
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", "1", "--max_length", "20")
    assert main(argv) == 0
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode"] == "mean" and pooling["pooling_mode_mean_tokens"] is True and pooling["word_embedding_dimension"] == 32
    flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    assert flags == ["pooling_mode_mean_tokens"] and "embedding_dimension" not in pooling
    modules = [module["type"] for module in json.loads((tmp_path / "out" / "modules.json").read_text())]
    assert modules == ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
    settings = json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 20, "do_lower_case": False}


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_instructions_of_a_file(model_folder, triplets, pairs, tmp_path, ending):
    texts = {"triplets": "Find the animal: its colour.", "pairs": ""}
    path = tmp_path / f"instructions.{ending}"
    path.write_text(json.dumps(texts) if ending == "json" else yaml.safe_dump(texts))
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", triplets, pairs, "--instruction", "ours", "--instructions", str(path))
    arguments, training = parse(argv)
    _, prompts = build_datasets(arguments, training, contrastive.check(arguments, training))
    assert prompts == {"triplets": {"anchor": "Instruction: Find the animal: its colour. Query: "}}
    for wrong, message in (
        ({"triplets": "x"}, "has no instruction for pairs; give every data set one, '' for none"),
        ({**texts, "other": "x"}, "there is no 'other' here; the names are pairs, triplets"),
        ({"triplets": 1}, "must map names to texts"),
        (["x"], "must map names to texts"),
    ):
        path.write_text(json.dumps(wrong) if ending == "json" else yaml.safe_dump(wrong))
        with pytest.raises(UserError, match=message):
            contrastive.check(*parse(argv))
    with pytest.raises(UserError, match="there is no file"):
        contrastive.check(*parse([*argv, "--instructions", "nothing.json"]))
    with pytest.raises(UserError, match="must contain {instruction}, and no other braces"):
        parse([*argv, "--instruction-template", "{task}: {instruction}"])


def test_the_papers_instructions_have_a_place_for_each_data_set(tmp_path):
    names = [entry["name"] for entry in yaml.safe_load(RECIPE.read_text())["datasets"]]
    path = tmp_path / "table6.yaml"
    path.write_text(yaml.safe_dump({name: f"Instruction of {name}." for name in names}))
    argv = [str(RECIPE), "--model", "m", "--output", "o", "--use-cpu", "true", "--instructions", str(path)]
    sources = parse([*argv, "--bf16", "false"])[0].sources()
    assert [source.instruction for source in sources] == [f"Instruction of {name}." for name in names]


def test_pairs_of_a_csv_file(model_folder, tmp_path):
    path = tmp_path / "faq.csv"
    path.write_text("anchor,positive\n" + "".join(f'"question, {i}",answer {i}\n' for i in range(9)))
    arguments, training = parse(arguments_for(model_folder, tmp_path / "out", "--pairs", str(path)))
    data, _ = build_datasets(arguments, training, contrastive.check(arguments, training))
    assert data["faq"][3] == {"anchor": "question, 3", "positive": "answer 3"} and len(data["faq"]) == 9
    path.write_text(path.read_text().replace("question, 3", "question, 99"))
    data, _ = build_datasets(arguments, training, contrastive.check(arguments, training))
    assert data["faq"][3]["anchor"] == "question, 99", "the library's cache gave the rows of the file before its change"


def test_overwrite_removes_only_what_it_made(model_folder, pairs, tmp_path, monkeypatch):
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", "3", "--save_steps", "1")
    assert main(argv) == 0
    old = (tmp_path / "out" / "model.safetensors").read_bytes()
    anew = [*argv, "--learning_rate", "1e-3", "--overwrite"]
    go_on = stop_at(monkeypatch, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(anew)
    go_on()
    kept = tmp_path / "out.before-overwrite" / "model.safetensors"
    assert kept.read_bytes() == old, "the old encoder went before the new one was complete"
    steps = []
    go_on = stop_at(monkeypatch, 2, lambda: steps.append(2))
    assert main(anew) == 0
    go_on()
    assert steps == [2] and (tmp_path / "out" / "model.safetensors").read_bytes() != old and not kept.exists()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="did not write, or that were changed since: notes.txt"):
        main([*argv, "--overwrite"])
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    (tmp_path / "out" / "notes.txt").unlink()
    for folder in ("checkpoints", "adapter"):
        path = tmp_path / "out" / folder / "notes.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        assert main(anew[:-1]) == 0 and path.read_text() == "mine", "a finished run changes nothing"
        with pytest.raises(UserError, match=f"did not write, or that were changed since: {folder}/notes.txt"):
            main([*argv, "--overwrite"])
        path.unlink()


def test_a_small_data_set_with_shared_answers_trains(model_folder, tmp_path):
    path = write_jsonl(tmp_path / "faq.jsonl", [{"anchor": f"question {i}", "positive": f"answer {max(i, 1)}"} for i in range(10)])
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", path, "--per_device_train_batch_size", "64")
    assert main([*argv, "--max_steps", "-1", "--num_train_epochs", "2"]) == 0
    training = json.loads((tmp_path / "out" / "contrastive.json").read_text())["training"]
    assert training["rows_per_batch"] == {"faq": 9} and training["steps"] == 2


@pytest.mark.parametrize("steps", ["1", "4"])
def test_a_run_that_diverges_stops_and_saves_no_encoder(model_folder, pairs, tmp_path, steps):
    """Of one step only the weights show it, of more the logged loss."""
    argv = arguments_for(model_folder, tmp_path / "out", "--pairs", pairs, "--max_steps", steps, "--warmup_steps", "0")
    with pytest.raises(UserError, match=rf"training diverged after step {min(int(steps), 2)} with learning_rate 1e\+38"):
        main([*argv, "--learning_rate", "1e38"])
    assert [path.name for path in (tmp_path / "out").glob("*.*")] == ["contrastive.json"], "a folder that loads was written"


def test_bad_input_is_one_sentence_before_any_work(model_folder, triplets, tmp_path):
    bad_row = write_jsonl(tmp_path / "bad.jsonl", [{"anchor": "a", "positive": "b"}, {"anchor": "a"}])
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    some = write_jsonl(tmp_path / "some.jsonl", [{"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": "d", "negative": "e"}])
    alike = write_jsonl(tmp_path / "alike.jsonl", [{"anchor": f"a{i}", "positive": "b"} for i in range(5)])
    half = write_jsonl(tmp_path / "half.jsonl", [{"anchor": "a", "positive": "b"}, {"anchor": "\ud83d", "positive": "c"}])
    single = write_jsonl(tmp_path / "single.jsonl", [{"anchor": "a", "positive": "b"}])
    unknown = tmp_path / "unknown.yaml"
    unknown.write_text(yaml.safe_dump({"datasets": [{"name": "x", "path": triplets, "positives": "p"}]}))
    cases = [
        ([], [], "no training data"),
        ([], ["--pairs", bad_row], "line 2 has no 'positive'"),
        ([], ["--pairs", str(empty)], "has no rows"),
        ([], ["--pairs", "missing.jsonl"], "there is no file missing.jsonl"),
        ([], ["--pairs", str(tmp_path)], "pairs must be files that end in .jsonl, .ndjson, .json, .parquet"),
        ([], ["--pairs", triplets, "--per_device_train_batch_size", "1"], "per_device_train_batch_size must be at least 2"),
        ([], ["--pairs", triplets, "--report_to", "nonsense"], "report_to 'nonsense' is unknown"),
        ([], ["--pairs", triplets, "--output", triplets], "output must be a folder"),
        ([], ["--pairs", triplets, triplets], "two data sets are called 'triplets'"),
        ([], ["--pairs", triplets, "--temperature", "0"], "temperature must be above 0"),
        ([], ["--pairs", triplets, "--instruction_template", "Query: "], "must contain {instruction}"),
        ([], ["--pairs", triplets, "--lora", "true", "--lora_targets", "nothing"], "LoRA target 'nothing'"),
        ([], ["--pairs", single], "in-batch negatives need at least 2"),
        ([], ["--pairs", alike], "alike .*in-batch negatives need at least 2 rows .* its 5 usable rows share theirs"),
        ([], ["--pairs", some], "line 2 has 'negative', unlike the first row"),
        ([], ["--pairs", half], "line 2: 'anchor' has half a surrogate pair"),
        ([], ["--pairs", triplets, "--fp16", "true"], "fp16 needs a GPU"),
        ([], ["--pairs", triplets, "--seed", "-1"], "seed must be between 0 and 4294967295, but -1 was given"),
        ([], ["--pairs", triplets, "--num-train-epochs", "1"], "max_steps 8 decides, so that num_train_epochs would be ignored"),
        ([], ["--pairs", triplets, "--eval-strategy", "steps"], "eval_strategy is 'steps', but there are no rows to evaluate on"),
        ([], ["--pairs", triplets, "--resume-from-checkpoint", "x"], "resume_from_checkpoint is set to None by this command"),
        ([], ["--pairs", triplets, "--output-dir", "x"], "output_dir is set by this command; give --output"),
        ([], ["--pairs", triplets, "--batch-sampler", "x"], "unknown argument '--batch-sampler'"),
        ([str(unknown)], [], "unknown key 'positives'"),
    ]
    for front, back, message in cases:
        with pytest.raises(UserError, match=message):
            main([*front, *arguments_for(model_folder, tmp_path / "out"), *back])
        assert not (tmp_path / "out").exists(), f"{message}: something was written"
