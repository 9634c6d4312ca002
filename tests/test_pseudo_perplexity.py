"""Pins `neobert pseudo-perplexity`: the definition against a plain loop, sampled against exact positions (mean and standard error), length
buckets, resuming after an interruption, YaRN, and one sentence for bad input."""

import csv
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.evaluation import pseudo_perplexity as module
from neobert.recipe import UserError


pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random NeoBERT whose predictions are far from uniform, a random BERT, texts of 20 to 70 words."""
    root = tmp_path_factory.mktemp("pseudo_perplexity")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(module.Path(__file__).resolve().parents[1] / "tokenizer")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 48}
    models = {
        "neobert": NeoBERTForMaskedLM(NeoBERTConfig(**sizes, decoder_init_range=0.3, embedding_init_range=0.5)),
        "bert": BertForMaskedLM(BertConfig(vocab_size=30522, **sizes)),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    generator = random.Random(0)
    words = "the film is a story of two friends and their house by a cold green sea".split()
    texts = [" ".join(generator.choices(words, k=k)) for k in (20, 30, 40, 50, 60, 70)]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def arguments(folder, output, **more):
    given = {
        "model": folder / "neobert",
        "text": folder / "texts.jsonl",
        "output": output,
        "lengths": "16,32,64",
        "positions": "exact",
        **more,
    }
    return [part for key, value in given.items() for part in (f"--{key}", str(value))]


def run(folder, output, **more):
    module.main(arguments(folder, output, **more))
    with open(output / "pseudo_perplexity.csv") as file:
        return list(csv.DictReader(file))


def test_exact_value_is_the_definition(folder, tmp_path):
    rows = run(folder, tmp_path, lengths="16,32", texts=2, batch_tokens=100)
    tokenizer = AutoTokenizer.from_pretrained(folder / "neobert")
    model = NeoBERTForMaskedLM.from_pretrained(folder / "neobert", dtype=torch.float32).eval()
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    buckets = json.loads((tmp_path / "pseudo_perplexity.json").read_text())["buckets"]
    for length, bucket in zip((16, 32), buckets):
        expected = []
        for text in texts[1:3]:  # the first that reach the largest length
            ids = [*tokenizer(text)["input_ids"][: length - 1], tokenizer.sep_token_id]
            losses = []
            for position in range(1, length - 1):
                masked = [*ids[:position], tokenizer.mask_token_id, *ids[position + 1 :]]
                with torch.no_grad():
                    logits = model(torch.tensor([masked])).logits[0, position].double()
                losses.append(float(logits.logsumexp(-1) - logits[ids[position]]))
            expected.append(math.exp(sum(losses) / len(losses)))
        own = [row for row in rows if row["length"] == str(length)]
        found = sorted(float(row["pseudo_perplexity"]) for row in own)
        assert found == pytest.approx(sorted(expected), rel=1e-4), "The pseudo-perplexity is not exp of the mean masked cross-entropy."
        assert {(row["tokens"], row["positions"], row["standard_error"]) for row in own} == {(str(length), str(length - 2), "0")}
        assert bucket["pseudo_perplexity"] == pytest.approx(math.sqrt(math.prod(expected)), rel=1e-4), "A bucket is exp of the texts' mean."
    assert (tmp_path / "pseudo_perplexity.png").stat().st_size > 5000, "No plot was drawn."


def test_every_subset_together_is_unbiased():
    """Over all subsets of a population: mean of the means = the mean; mean of the squared errors = variance of the means."""
    population = np.array([0.3, 1.0, 4.0, 0.1, 2.5, 7.0, 0.9])
    subsets = [module.mean_and_error(population[list(chosen)], len(population)) for chosen in itertools.combinations(range(7), 3)]
    means, errors = np.array(subsets).T
    assert means.mean() == pytest.approx(population.mean(), rel=1e-12), "The sampled mean is biased."
    assert (errors**2).mean() == pytest.approx(means.var(), rel=1e-12), "The squared standard error is not the variance of the estimate."
    assert module.mean_and_error(population, 7) == (pytest.approx(population.mean()), 0.0), "All positions leave no sampling error."


def test_positions_are_drawn_evenly_without_replacement():
    counts = np.zeros(12)
    for seed in range(3000):
        positions = module.sample_positions(12, 5, seed, "text")
        assert len(set(positions.tolist())) == 5, "A position was drawn twice."
        counts[positions] += 1
    # Binomial: 3000 draws with probability 5/12, standard deviation 27.
    assert np.abs(counts - 1250).max() < 110, f"Positions are not drawn evenly: {counts}."
    assert module.sample_positions(4, None, 0, "x").tolist() == [0, 1, 2, 3]
    assert module.sample_positions(12, 5, 1, "a").tolist() != module.sample_positions(12, 5, 1, "b").tolist(), (
        "Texts share their positions."
    )


def test_sampled_agrees_with_exact(folder, tmp_path):
    exact = {(row["text"], row["length"]): float(row["mean_cross_entropy"]) for row in run(folder, tmp_path / "exact")}
    deviations = []
    for seed in range(6):
        for row in run(folder, tmp_path / "sampled", positions=9, seed=seed)[-len(exact) :]:
            if int(row["positions"]) < int(row["tokens"]) - 2:
                difference = float(row["mean_cross_entropy"]) - exact[row["text"], row["length"]]
                deviations.append(difference / float(row["standard_error"]))
    assert len(deviations) > 50, "Too few sampled texts: the comparison would say nothing."
    # Student's t with 8 degrees of freedom has variance 8 / 6.
    assert abs(np.mean(deviations)) < 0.5, f"Sampled values lie {np.mean(deviations):.2f} standard errors off on average."
    assert 0.7 < np.std(deviations) < 1.8, f"The standard error is wrong by a factor of {np.std(deviations):.2f}."


def test_buckets(folder, tmp_path):
    cut = run(folder, tmp_path / "cut", positions=2)
    assert [row["length"] for row in cut].count("64") == 1, "Only the text of 70 words reaches 64 tokens."
    assert [row["length"] for row in cut].count("32") == 5 and [row["length"] for row in cut].count("16") == 6
    assert all(row["tokens"] == row["length"] for row in cut), "A cut text fills its bucket."
    own = run(folder, tmp_path / "own", positions=2, bucketing="own")
    assert [int(row["tokens"]) for row in own] == [22, 32, 42, 52, 62, 64], "Each text stands once, at its own length with [CLS] and [SEP]."
    assert [row["length"] for row in own] == ["32", "32", "64", "64", "64", "64"]
    # BERT's 48 learned positions end the buckets there.
    bert = run(folder, tmp_path / "bert", model=folder / "bert", positions=2)
    assert {row["length"] for row in bert} == {"16", "32"}, "A bucket beyond the position table was evaluated."


def test_interrupted_run_continues(folder, tmp_path, monkeypatch):
    whole = run(folder, tmp_path / "whole", positions=4)
    real, calls = module.masked_cross_entropy, []

    def interrupted(*inputs):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(*inputs)

    monkeypatch.setattr(module, "masked_cross_entropy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "parts", positions=4)
    path = tmp_path / "parts" / "pseudo_perplexity.csv"
    assert len(path.read_text().splitlines()) == 6, "Five texts were done, and each should have its row."
    path.write_text(path.read_text() + "neobert,half a li")
    calls.clear()
    monkeypatch.setattr(module, "masked_cross_entropy", lambda *inputs: (calls.append(1), real(*inputs))[1])
    parts = run(folder, tmp_path / "parts", positions=4)
    assert len(calls) == len(whole) - 5, "Finished texts were evaluated again, or open ones were not."
    assert parts == whole, "The continued run differs from the uninterrupted one."


def test_yarn(folder, tmp_path):
    rows = run(folder, tmp_path, lengths=64, yarn="off,2", texts=1)
    values = {row["yarn"]: float(row["mean_cross_entropy"]) for row in rows}
    assert set(values) == {"off", "2"} and values["off"] != values["2"], "YaRN changed nothing."
    tokenizer = AutoTokenizer.from_pretrained(folder / "neobert")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48}
    model = NeoBERTForMaskedLM.from_pretrained(folder / "neobert", dtype=torch.float32, rope_scaling=scaling).eval()
    text = json.loads((folder / "texts.jsonl").read_text().splitlines()[-1])["text"]
    ids = torch.tensor(tokenizer(text)["input_ids"][:63] + [tokenizer.sep_token_id])
    positions = torch.arange(1, 63)
    losses = module.masked_cross_entropy(model, ids.expand(62, -1), positions, tokenizer.mask_token_id)
    assert values["2"] == pytest.approx(losses.mean(), rel=1e-6), "The YaRN row is not the model with this rope_scaling."


def test_yarn_from_another_length(folder, tmp_path):
    """A model whose configuration says 48 positions, and whose texts had 12: YaRN by 2 from there is another model than by 2 from 48."""
    rows = run(folder, tmp_path, lengths=64, yarn=2, yarn_from=12, texts=1) and run(folder, tmp_path, lengths=64, yarn=2, texts=1)
    values = {row["yarn"]: float(row["mean_cross_entropy"]) for row in rows}
    assert set(values) == {"2 from 12", "2"} and len(set(values.values())) == 2, values


def test_broken_rows_are_counted_not_fatal(folder, tmp_path, caplog):
    lines = [b'{"text": "caf\xe9"}', b"{broken", b'{"text": null}', b"[1]", b"", (folder / "texts.jsonl").read_bytes().strip()]
    (tmp_path / "texts.jsonl").write_bytes(b"\n".join(lines))
    assert len(run(folder, tmp_path / "out", text=tmp_path / "texts.jsonl", lengths=16, positions=2)) == 6
    assert "5 of 11 rows are broken or empty and were skipped" in caplog.text
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="bad.parquet cannot be read"):
        run(folder, tmp_path / "none", text=tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"positions": 0}, "positions must be whole numbers of at least 1 or exact"),
        ({"lengths": "16,x"}, "lengths must be whole numbers"),
        ({"lengths": 512}, "no text of .* reaches 512 tokens: the longest has 72 tokens"),
        ({"yarn": "0.5"}, "yarn takes off or a factor above 1, but '0.5' was given"),
        ({"column": "body"}, "no row with text in the column 'body'; it has text"),
        ({"text": __file__}, "is no .txt, .jsonl or .parquet file"),
        ({"yarn": "2", "yarn_from": 0}, "yarn_from must be at least 1"),
        ({"text": "no_such_data"}, "'no_such_data' is no local file, and was not loaded from the Hub"),
        ({"model": "no_such_model"}, "the model 'no_such_model' was not loaded"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"bucketing": "both"}, "bucketing must be cut or own"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run(folder, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists(), "Something was written although the input is bad."


def test_models_that_cannot(folder, tmp_path):
    with pytest.raises(UserError, match="YaRN needs one set of rotary parameters"):
        run(folder, tmp_path / "out", model=folder / "bert", yarn=2)
    from neobert import NeoBERTModel

    backbone = tmp_path / "backbone"
    NeoBERTModel.from_pretrained(folder / "neobert", dtype=torch.float32).save_pretrained(backbone)
    with pytest.raises(UserError, match="no trained masked-LM head: decoder.bias, decoder.weight"):
        run(folder, tmp_path / "out", model=backbone)
    other = tmp_path / "pseudo_perplexity.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no pseudo-perplexity CSV"):
        run(folder, tmp_path)
    assert other.read_text() == "a,b\n1,2\n", "A foreign file was changed."
