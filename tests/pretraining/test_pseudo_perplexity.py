"""Test `neobert pseudo-perplexity`.

Covers the comparison with the definition in a plain loop, the standard errors of sampled positions,
several models, YaRN, interrupted runs and invalid input.
"""

import csv
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from neobert import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from neobert.common.errors import UserError
from neobert.pretraining import pseudo_perplexity as module


pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
NAMES = ["neobert", "bert"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a random NeoBERT, a random BERT, and six texts of 20 to 70 words.

    The predictions of the NeoBERT are far from uniform.
    """
    root = tmp_path_factory.mktemp("pseudo_perplexity")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tokenizer")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 48,
    }
    models = {
        "neobert": NeoBERTForMaskedLM(
            NeoBERTConfig(**sizes, decoder_init_range=0.3, embedding_init_range=0.5)
        ),
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


def arguments(folder, output, **overrides):
    """Return a command line; an option with the value None is omitted."""
    options = {
        "model": folder / "neobert",
        "text": folder / "texts.jsonl",
        "output": output,
        "lengths": "16,32,64",
        "positions": "exact",
        **overrides,
    }
    words = []
    for name, value in options.items():
        if value is None:
            continue
        is_list = name in ("model", "lengths", "yarn")
        values = str(value).split(",") if is_list else [str(value)]
        words += [f"--{name.replace('_', '-')}", *values]
    return words


def run(folder, output, **overrides):
    """Run the command, and return the rows of its CSV file."""
    module.main(arguments(folder, output, **overrides))
    with open(output / "pseudo_perplexity.csv") as file:
        return list(csv.DictReader(file))


def test_exact_value_matches_the_definition(folder, tmp_path, monkeypatch):
    """Check exact values against a loop that masks one token of one text at a time.

    A text is truncated to the length of the bucket and ends with [SEP].
    """
    monkeypatch.setattr(module, "BATCH_TOKENS", 100)
    rows = run(folder, tmp_path, lengths="16,32", max_texts=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "neobert")
    model = NeoBERTForMaskedLM.from_pretrained(folder / "neobert", dtype=torch.float32).eval()
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    buckets = json.loads((tmp_path / "result.json").read_text())["buckets"]

    for length, bucket in zip((16, 32), buckets, strict=True):
        expected = []
        # `--max-texts 2` selects the first two texts that reach the largest length.
        for text in texts[1:3]:
            ids = [*tokenizer(text)["input_ids"][: length - 1], tokenizer.sep_token_id]
            losses = []
            for position in range(1, length - 1):
                masked = [*ids[:position], tokenizer.mask_token_id, *ids[position + 1 :]]
                with torch.no_grad():
                    logits = model(torch.tensor([masked])).logits[0, position].double()
                losses.append(float(logits.logsumexp(-1) - logits[ids[position]]))
            expected.append(math.exp(sum(losses) / len(losses)))

        bucket_rows = [row for row in rows if row["length"] == str(length)]
        values = sorted(math.exp(float(row["mean_cross_entropy"])) for row in bucket_rows)
        assert values == pytest.approx(sorted(expected), rel=1e-4)
        for row in bucket_rows:
            assert row["tokens"] == str(length)
            assert row["positions"] == str(length - 2)
            assert row["standard_error"] == "0.0"
        # The value of a bucket is the exponential of the mean over texts.
        geometric_mean = math.sqrt(math.prod(expected))
        assert bucket["pseudo_perplexity"] == pytest.approx(geometric_mean, rel=1e-4)
    assert (tmp_path / "pseudo_perplexity.png").stat().st_size > 5000, "the plot must not be empty"


def test_estimates_of_mean_and_error_are_unbiased():
    """Check the estimates of all subsets of a population.

    The mean of their means is the mean of the population. The mean of their squared standard errors
    is the variance of their means.
    """
    population = np.array([0.3, 1.0, 4.0, 0.1, 2.5, 7.0, 0.9])
    subsets = [
        module.mean_and_error(population[list(chosen)], len(population))
        for chosen in itertools.combinations(range(7), 3)
    ]
    means, errors = np.array(subsets).T
    assert means.mean() == pytest.approx(population.mean(), rel=1e-12)
    assert (errors**2).mean() == pytest.approx(means.var(), rel=1e-12)
    assert module.mean_and_error(population, 7) == (pytest.approx(population.mean()), 0.0)


def test_positions_are_sampled_uniformly_without_replacement():
    counts = np.zeros(12)
    for seed in range(3000):
        positions = module.sample_positions(12, 5, seed, "text")
        assert len(set(positions.tolist())) == 5, "a position was sampled twice"
        counts[positions] += 1
    # Each count is binomial with 3000 trials, probability 5/12 and standard deviation 27.
    assert np.abs(counts - 1250).max() < 110, counts
    assert module.sample_positions(4, None, 0, "x").tolist() == [0, 1, 2, 3]

    first = module.sample_positions(12, 5, 1, "a")
    second = module.sample_positions(12, 5, 1, "b")
    assert first.tolist() != second.tolist(), "each text must have its own positions"


def test_texts_are_truncated_to_each_length_or_measured_in_full(folder, tmp_path):
    """Check the lengths of the measured texts with both values of `--bucketing`."""
    truncated = run(folder, tmp_path / "truncated", positions=2)
    assert Counter(row["length"] for row in truncated) == {"16": 6, "32": 5, "64": 1}
    assert all(row["tokens"] == row["length"] for row in truncated)

    full = run(folder, tmp_path / "full", positions=2, bucketing="full")
    assert [int(row["tokens"]) for row in full] == [22, 32, 42, 52, 62, 64]
    assert [row["length"] for row in full] == ["32", "32", "64", "64", "64", "64"]

    # Rows without text and texts that reach no length are ignored.
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        '{"text": " "}\n{"text": "too short"}\n' + (folder / "texts.jsonl").read_text()
    )
    assert run(folder, tmp_path / "again", text=texts, positions=2) == truncated


def test_several_models_match_separate_runs(folder, tmp_path, capsys):
    """Check that each model has the results of a separate run.

    BERT has 48 learned position embeddings, so that it has no results for longer texts.
    """
    models = f"{folder / 'neobert'},{folder / 'bert'}"
    both = run(folder, tmp_path / "both", model=models, positions=2)
    separate = [run(folder, tmp_path / name, model=folder / name, positions=2) for name in NAMES]
    assert both == [*separate[0], *separate[1]]
    assert {row["length"] for row in separate[1]} == {"16", "32"}

    page = (tmp_path / "both" / "pseudo_perplexity.md").read_text()
    assert [page.count(f"| {name} | off |") for name in NAMES] == [3, 2]

    # A finished run is not repeated, and cannot be extended with other settings.
    capsys.readouterr()
    assert run(folder, tmp_path / "both", model=models, positions=2) == both
    assert capsys.readouterr().out.strip() == page.strip(), "a finished run must print its page"
    with pytest.raises(UserError, match="other settings .positions 2, now 3"):
        run(folder, tmp_path / "both", model=models, positions=3)

    # Models in two directories of the same name are not mixed up.
    for number, name in enumerate(NAMES):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "best").symlink_to(folder / name)
    models = f"{tmp_path / '0' / 'best'},{tmp_path / '1' / 'best'}"
    assert len(run(folder, tmp_path / "best", model=models, positions=2)) == len(both)


def test_repeated_models_and_factors_are_measured_once(folder, tmp_path):
    """Check that a model and a YaRN factor that are passed twice count once, in their order."""
    models = ",".join(str(folder / name) for name in ("neobert", "neobert"))
    rows = run(folder, tmp_path / "twice", model=models, yarn="2,off,2", positions=2)
    once = run(folder, tmp_path / "once", yarn="2,off", positions=2)
    assert rows == once
    buckets = json.loads((tmp_path / "twice" / "result.json").read_text())["buckets"]
    assert {bucket["texts"] for bucket in buckets if bucket["length"] == 16} == {6}


def test_a_model_may_have_the_name_of_a_missing_value(folder, tmp_path):
    """Check names that pandas reads as missing values, and one position with an unknown error."""
    (tmp_path / "null").symlink_to(folder / "neobert")
    run(folder, tmp_path / "out", model=tmp_path / "null", positions=1, max_texts=2)
    (*_, bucket) = json.loads((tmp_path / "out" / "result.json").read_text())["buckets"]
    assert bucket["name"] == "null" and bucket["error_positions"] is None


def test_default_output_is_not_the_folder_of_published_results():
    """The default output is a new directory in a clone, which has results/pseudo_perplexity."""
    options = module.PARSER.read(["--model", "m", "--text", "t.txt"])
    assert options.output.output == "runs/pseudo_perplexity"


def test_standard_errors_of_a_bucket():
    """Check two texts with means of 1 and 2 and standard errors of 0.3 and 0.4.

    The standard error of the mean is 0.5 / 2 from the positions, and 0.7071 / sqrt(2) from the
    texts.
    """
    rows = pandas.DataFrame({"mean_cross_entropy": [1.0, 2.0], "standard_error": [0.3, 0.4]})
    rows = rows.assign(name="m", yarn="off", length=16, positions=4)
    (bucket,) = module.summarize(rows)
    assert (bucket.texts, bucket.positions) == (2, 8)
    assert [bucket.error_positions, bucket.error_texts] == pytest.approx([0.25, 0.5])
    expected = [math.exp(value) for value in (1.5 - 1.96 * 0.5, 1.5, 1.5 + 1.96 * 0.5)]
    assert [bucket.low, bucket.pseudo_perplexity, bucket.high] == pytest.approx(expected)

    (bucket,) = module.summarize(rows[:1])
    assert bucket.error_texts is None, "a single text has no variation"
    assert bucket.high == pytest.approx(math.exp(1 + 1.96 * 0.3))

    # If every position was masked, or only one, the errors of a single text are 0 or unknown.
    for error in (0.0, math.nan):
        (bucket,) = module.summarize(rows[:1].assign(standard_error=error))
        assert (bucket.low, bucket.high) == (None, None)
        assert bucket.pseudo_perplexity == pytest.approx(math.e)


def test_published_json_matches_the_csv():
    """Check that the JSON file in results/ is the summary of the CSV file next to it."""
    committed = ROOT / "results" / "pseudo_perplexity" / "pseudo_perplexity.csv"
    rows = pandas.read_csv(committed, dtype={"yarn": str})
    published = json.loads(committed.with_suffix(".json").read_text())["buckets"]
    for bucket, expected in zip(module.summarize(rows), published, strict=True):
        for name in ("name", "yarn", "length", "texts", "positions"):
            assert getattr(bucket, name) == expected[name]
        for name in ("pseudo_perplexity", "low", "high", "error_positions", "error_texts"):
            assert getattr(bucket, name) == pytest.approx(expected[name], rel=1e-12)


def test_an_interrupted_run_resumes(folder, tmp_path, monkeypatch):
    """Check that a resumed run computes only the missing rows, and repeats an incomplete one."""
    uninterrupted = run(folder, tmp_path / "whole", positions=4)
    masked_cross_entropy = module.masked_cross_entropy
    calls = []

    def interrupt(*inputs):
        calls.append(inputs)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return masked_cross_entropy(*inputs)

    def count(*inputs):
        calls.append(inputs)
        return masked_cross_entropy(*inputs)

    monkeypatch.setattr(module, "masked_cross_entropy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "parts", positions=4)

    # A killed process may leave an incomplete line.
    path = tmp_path / "parts" / "pseudo_perplexity.csv"
    assert len(path.read_text().splitlines()) == 6
    path.write_text(path.read_text() + "neobert,half a li")
    calls.clear()
    monkeypatch.setattr(module, "masked_cross_entropy", count)
    resumed = run(folder, tmp_path / "parts", positions=4)
    assert len(calls) == len(uninterrupted) - 5
    assert resumed == uninterrupted, "a resumed run must equal an uninterrupted one"


def test_yarn(folder, tmp_path):
    """Check the value with YaRN against a model that is loaded with the same RoPE scaling."""
    rows = run(folder, tmp_path, lengths=64, yarn="off,2", max_texts=1)
    values = {row["yarn"]: float(row["mean_cross_entropy"]) for row in rows}
    assert set(values) == {"off", "2"}
    assert values["off"] != values["2"]

    tokenizer = AutoTokenizer.from_pretrained(folder / "neobert")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48}
    model = NeoBERTForMaskedLM.from_pretrained(
        folder / "neobert", dtype=torch.float32, rope_scaling=scaling
    ).eval()
    text = json.loads((folder / "texts.jsonl").read_text().splitlines()[-1])["text"]
    ids = torch.tensor(tokenizer(text)["input_ids"][:63] + [tokenizer.sep_token_id])
    positions = torch.arange(1, 63)
    losses = module.masked_cross_entropy(model, ids, positions, tokenizer.mask_token_id)
    assert values["2"] == pytest.approx(losses.mean(), rel=1e-6)


def test_default_lengths_end_at_the_context_length(folder, tmp_path):
    """Check the default length of a long text.

    The model has a context length of 48 tokens, which YaRN with the factor 1.2 extends to 58.
    """
    (tmp_path / "long.txt").write_text("the film is a story " * 80 + "\n")
    for yarn, length in (("off", "48"), ("off,1.2", "58")):
        rows = run(
            folder,
            tmp_path / yarn,
            text=tmp_path / "long.txt",
            lengths=None,
            yarn=yarn,
            positions=2,
        )
        assert {row["length"] for row in rows} == {length}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"positions": "all"}, "`--positions` must be an integer"),
        ({"lengths": 512}, "no text of .* reaches one of the lengths .512."),
        ({"text": "no_such_data"}, "dataset no_such_data cannot be read"),
    ],
)
def test_invalid_input_is_reported(folder, tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run(folder, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists(), "the command must not write anything"


def test_unusable_models_are_refused(folder, tmp_path):
    """Check the errors for a BERT model, and for models without a decoder or their tokenizer."""
    with pytest.raises(UserError, match="`yarn` requires a NeoBERT model, got the bert model .*"):
        run(folder, tmp_path / "out", model=folder / "bert", yarn=2)

    backbone = tmp_path / "backbone"
    NeoBERTModel.from_pretrained(folder / "neobert", dtype=torch.float32).save_pretrained(backbone)
    AutoTokenizer.from_pretrained(folder / "neobert").save_pretrained(backbone)
    with pytest.raises(
        UserError, match="must have a trained masked-LM head, .* decoder.bias, decoder.weight"
    ):
        run(folder, tmp_path / "out", model=backbone)

    model_path = tmp_path / "bare"
    NeoBERTForMaskedLM.from_pretrained(folder / "neobert", dtype=torch.float32).save_pretrained(
        model_path
    )
    with pytest.raises(UserError, match="no tokenizer was found in .*/bare"):
        run(folder, tmp_path / "out", model=model_path)
    assert not (tmp_path / "out").exists()

    larger = AutoTokenizer.from_pretrained(folder / "neobert")
    larger.add_tokens(["sea-green"])
    larger.save_pretrained(model_path)
    with pytest.raises(UserError, match="the tokenizer .* got 30523"):
        run(folder, tmp_path / "out", model=model_path)
    assert not (tmp_path / "out").exists()


def test_lengths_that_a_model_does_not_support(folder, caplog):
    """Lengths without room for a token, or without positions, are an error or are omitted."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    model = BertForMaskedLM.from_pretrained(folder / "bert")
    cases = (([1, 2], "at least 3 tokens for this model, got 1, 2"), ([60], "at most 48 tokens"))
    for lengths, message in cases:
        with pytest.raises(UserError, match=message):
            module.usable_lengths(lengths, [model], tokenizer)
    assert module.usable_lengths([60, 2, 16], [model], tokenizer) == [16]
    assert "The lengths 2, 60 are omitted" in caplog.text


def test_plot_shows_confidence_intervals_per_length():
    """Check the points, confidence intervals, labels and ticks of the plot."""
    buckets = [
        module.Bucket(
            name="demo",
            yarn=yarn,
            length=length,
            texts=1,
            positions=1,
            mean_cross_entropy=math.log(value),
            error_positions=None,
            error_texts=None,
            pseudo_perplexity=value,
            low=value / 2,
            high=value * 3,
        )
        for yarn, length, value in (("off", 512, 9.0), ("off", 128, 4.0), ("4", 128, 5.0))
    ]

    (axes,) = module.plot_buckets(buckets).axes
    plain, yarn = axes.containers
    assert (plain.get_label(), yarn.get_label()) == ("demo", "demo, YaRN 4")
    line, _, (bars,) = plain.lines
    assert line.get_xydata().tolist() == [[128, 4], [512, 9]]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[2, 12], [4.5, 27]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "512"]
