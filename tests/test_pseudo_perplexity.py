"""Pins `neobert pseudo-perplexity`: the definition against a plain loop, sampled against exact
positions (mean and standard error), length buckets, resuming after an interruption, what of a
shared CSV stands in the table, YaRN, and one sentence for bad input."""

import csv
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.errors import UserError
from neobert.common.output import locked
from neobert.pretraining import pseudo_perplexity as module


pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random NeoBERT whose predictions are far from uniform, a random BERT, texts of 20 to 70
    words."""
    root = tmp_path_factory.mktemp("pseudo_perplexity")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).resolve().parents[1] / "tokenizer")
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


def arguments(folder, output, **more):
    given = {
        "model": folder / "neobert",
        "text": folder / "texts.jsonl",
        "output": output,
        "lengths": "16,32,64",
        "positions": "exact",
        **more,
    }
    lists = ("lengths", "yarn")
    given = {key: value for key, value in given.items() if value is not None}
    named = [
        (key.replace("_", "-"), str(value).split(",") if key in lists else [str(value)])
        for key, value in given.items()
    ]
    return [part for key, values in named for part in (f"--{key}", *values)]


def run(folder, output, **more):
    module.main(arguments(folder, output, **more))
    with open(output / "pseudo_perplexity.csv") as file:
        return list(csv.DictReader(file))


def test_exact_value_is_the_definition(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_TOKENS", 100)
    rows = run(folder, tmp_path, lengths="16,32", texts=2)
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
        assert found == pytest.approx(sorted(expected), rel=1e-4), (
            "The pseudo-perplexity is not exp of the mean masked cross-entropy."
        )
        assert {(row["tokens"], row["positions"], row["standard_error"]) for row in own} == {
            (str(length), str(length - 2), "0")
        }
        assert bucket["pseudo_perplexity"] == pytest.approx(
            math.sqrt(math.prod(expected)), rel=1e-4
        ), "A bucket is exp of the texts' mean."
    assert (tmp_path / "pseudo_perplexity.png").stat().st_size > 5000, "No plot was drawn."


def test_every_subset_together_is_unbiased():
    """Over all subsets of a population: mean of the means = the mean; mean of the squared errors =
    variance of the means."""
    population = np.array([0.3, 1.0, 4.0, 0.1, 2.5, 7.0, 0.9])
    subsets = [
        module.mean_and_error(population[list(chosen)], len(population))
        for chosen in itertools.combinations(range(7), 3)
    ]
    means, errors = np.array(subsets).T
    assert means.mean() == pytest.approx(population.mean(), rel=1e-12), (
        "The sampled mean is biased."
    )
    assert (errors**2).mean() == pytest.approx(means.var(), rel=1e-12), (
        "The squared standard error is not the variance of the estimate."
    )
    assert module.mean_and_error(population, 7) == (pytest.approx(population.mean()), 0.0), (
        "All positions leave no sampling error."
    )


def test_positions_are_drawn_evenly_without_replacement():
    counts = np.zeros(12)
    for seed in range(3000):
        positions = module.sample_positions(12, 5, seed, "text")
        assert len(set(positions.tolist())) == 5, "A position was drawn twice."
        counts[positions] += 1
    # Binomial: 3000 draws with probability 5/12, standard deviation 27.
    assert np.abs(counts - 1250).max() < 110, f"Positions are not drawn evenly: {counts}."
    assert module.sample_positions(4, None, 0, "x").tolist() == [0, 1, 2, 3]
    assert (
        module.sample_positions(12, 5, 1, "a").tolist()
        != module.sample_positions(12, 5, 1, "b").tolist()
    ), "Texts share their positions."


def test_sampled_agrees_with_exact(folder, tmp_path):
    exact = {
        (row["text"], row["length"]): float(row["mean_cross_entropy"])
        for row in run(folder, tmp_path / "exact")
    }
    deviations = []
    for seed in range(6):
        for row in run(folder, tmp_path / str(seed), positions=9, seed=seed):
            if int(row["positions"]) < int(row["tokens"]) - 2:
                difference = float(row["mean_cross_entropy"]) - exact[row["text"], row["length"]]
                deviations.append(difference / float(row["standard_error"]))
    assert len(deviations) > 50, "Too few sampled texts: the comparison would say nothing."
    # Student's t with 8 degrees of freedom has variance 8 / 6.
    assert abs(np.mean(deviations)) < 0.5, (
        f"Sampled values lie {np.mean(deviations):.2f} standard errors off on average."
    )
    assert 0.7 < np.std(deviations) < 1.8, (
        f"The standard error is wrong by a factor of {np.std(deviations):.2f}."
    )


def test_buckets(folder, tmp_path):
    cut = run(folder, tmp_path / "cut", positions=2)
    assert [row["length"] for row in cut].count("64") == 1, (
        "Only the text of 70 words reaches 64 tokens."
    )
    assert [row["length"] for row in cut].count("32") == 5 and [row["length"] for row in cut].count(
        "16"
    ) == 6
    assert all(row["tokens"] == row["length"] for row in cut), "A cut text fills its bucket."
    own = run(folder, tmp_path / "own", positions=2, bucketing="own")
    assert [int(row["tokens"]) for row in own] == [22, 32, 42, 52, 62, 64], (
        "Each text stands once, at its own length with [CLS] and [SEP]."
    )
    assert [row["length"] for row in own] == ["32", "32", "64", "64", "64", "64"]
    # BERT's 48 learned positions end the buckets there.
    bert = run(folder, tmp_path / "bert", model=folder / "bert", positions=2)
    assert {row["length"] for row in bert} == {"16", "32"}, (
        "A bucket beyond the position table was evaluated."
    )


def test_errors_of_a_bucket_by_hand():
    """Means 1 and 2 with errors 0.3 and 0.4: the mean's own error is 0.5 / 2, the spread of the
    texts gives 0.7071 / sqrt(2)."""
    rows = pandas.DataFrame({"mean_cross_entropy": [1.0, 2.0], "standard_error": [0.3, 0.4]})
    rows = rows.assign(name="m", yarn="off", length=16, positions=4)
    (bucket,) = module.summarise(rows)
    assert (bucket["texts"], bucket["positions"]) == (2, 8)
    errors = [bucket["error_positions"], bucket["error_texts"]]
    assert errors == pytest.approx([0.25, 0.5])
    expected = [math.exp(value) for value in (1.5 - 1.96 * 0.5, 1.5, 1.5 + 1.96 * 0.5)]
    assert [bucket[name] for name in ("low", "pseudo_perplexity", "high")] == pytest.approx(
        expected
    )
    (bucket,) = module.summarise(rows[:1])
    assert bucket["error_texts"] is None, "one text has no spread"
    assert bucket["high"] == pytest.approx(math.exp(1 + 1.96 * 0.3))


def test_the_published_table_follows_from_its_rows():
    committed = ROOT / "results" / "pseudo_perplexity" / "pseudo_perplexity.csv"
    rows = pandas.read_csv(committed, dtype={"yarn": str})
    published = json.loads(committed.with_suffix(".json").read_text())["buckets"]
    for found, bucket in zip(module.summarise(rows), published, strict=True):
        assert {k: found[k] for k in ("name", "yarn", "length", "texts", "positions")} == {
            k: bucket[k] for k in ("name", "yarn", "length", "texts", "positions")
        }
        for name in ("pseudo_perplexity", "low", "high", "error_positions", "error_texts"):
            assert found[name] == pytest.approx(bucket[name], rel=1e-12)


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
    assert len(path.read_text().splitlines()) == 6, (
        "Five texts were done, and each should have its row."
    )
    path.write_text(path.read_text() + "neobert,half a li")
    calls.clear()
    monkeypatch.setattr(
        module, "masked_cross_entropy", lambda *inputs: (calls.append(1), real(*inputs))[1]
    )
    parts = run(folder, tmp_path / "parts", positions=4)
    assert len(calls) == len(whole) - 5, (
        "Finished texts were evaluated again, or open ones were not."
    )
    assert parts == whole, "The continued run differs from the uninterrupted one."


def table(folder, output, **more):
    """{(name, YaRN, length): (texts, pseudo-perplexity)} of the run's table."""
    run(folder, output, **{"lengths": "16,32", **more})
    buckets = json.loads((output / "pseudo_perplexity.json").read_text())["buckets"]
    return {
        (b["name"], b["yarn"], b["length"]): (b["texts"], b["pseudo_perplexity"]) for b in buckets
    }


def test_the_table_is_of_the_command_that_ran(folder, tmp_path):
    """One folder for everything, against a folder of its own for each command."""
    lines = (folder / "texts.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("p1", lines[:3]), ("p2", lines[3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    p1, p2 = ({"text": tmp_path / f"{name}.jsonl"} for name in ("p1", "p2"))
    commands = [
        p1,
        {**p1, "positions": 2},
        {**p1, "positions": 2, "seed": 1},
        {**p1, "texts": 1},
        p2,
        {**p1, "bucketing": "own"},
    ]
    commands += [{**p1, "dtype": "bfloat16"}, {**p1, "lengths": "16"}]
    alone = [table(folder, tmp_path / str(i), **more) for i, more in enumerate(commands)]
    assert len(set(map(str, alone))) == len(alone), (
        "The commands must differ, or this shows nothing."
    )
    for more, expected in [*zip(commands, alone), (commands[0], alone[0])]:
        assert table(folder, tmp_path / "shared", **more) == expected, (
            f"{more} shows rows of other commands."
        )


def test_models_and_yarn_share_a_table_where_they_compare(folder, tmp_path):
    neobert, yarn = (
        table(folder, tmp_path, positions=4),
        table(folder, tmp_path, positions=4, yarn=2),
    )
    assert neobert.items() < yarn.items() and {key[1] for key in yarn} == {"off", "2"}, (
        "Another YaRN factor stands beside the first."
    )
    both = table(folder, tmp_path, positions=4, model=folder / "bert")
    assert yarn.items() < both.items() and {key[0] for key in both} == {"neobert", "bert"}, (
        "Another model stands beside the first."
    )
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "a cold green sea " * 10}))
    for more in (
        {"positions": 5},
        {"positions": "exact"},
        {"positions": 4, "seed": 1},
        {"positions": 4, "text": tmp_path / "other.jsonl"},
        {"positions": 4, "dtype": "bfloat16"},
    ):
        assert {key[0] for key in table(folder, tmp_path, model=folder / "bert", **more)} == {
            "bert"
        }, more
    assert table(folder, tmp_path, positions=4) == both, "The first command again shows both."
    short = table(folder, tmp_path, positions=4, lengths="16", model=folder / "bert")
    assert short == {key: value for key, value in both.items() if key[2] == 16}, (
        "Lengths that were not asked for stand in the table."
    )
    own = (
        table(folder, tmp_path, positions=4, bucketing="own"),
        table(folder, tmp_path, positions=4, bucketing="own", model=folder / "bert"),
    )
    assert (
        sum(
            texts
            for (name, yarn, _), (texts, _) in own[1].items()
            if (name, yarn) == ("neobert", "off")
        )
        == 6
    ), "Each text stands once."
    assert (
        own[1].items()
        > {key: value for key, value in own[0].items() if key[:2] == ("neobert", "off")}.items()
    )


def test_a_name_is_one_model(folder, tmp_path):
    """Two models whose folders have one name: each table has its own rows."""
    for parent, name in (("A", "neobert"), ("B", "bert")):
        (tmp_path / parent).mkdir()
        (tmp_path / parent / "best").symlink_to(folder / name)
    first, second = (
        table(folder, tmp_path / "out", model=tmp_path / parent / "best", texts=1)
        for parent in "AB"
    )
    alone = table(folder, tmp_path / "alone", model=tmp_path / "B" / "best", texts=1)
    assert second == alone != first


def test_yarn(folder, tmp_path):
    rows = run(folder, tmp_path, lengths=64, yarn="off,2", texts=1)
    values = {row["yarn"]: float(row["mean_cross_entropy"]) for row in rows}
    assert set(values) == {"off", "2"} and values["off"] != values["2"], "YaRN changed nothing."
    tokenizer = AutoTokenizer.from_pretrained(folder / "neobert")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 48}
    model = NeoBERTForMaskedLM.from_pretrained(
        folder / "neobert", dtype=torch.float32, rope_scaling=scaling
    ).eval()
    text = json.loads((folder / "texts.jsonl").read_text().splitlines()[-1])["text"]
    ids = torch.tensor(tokenizer(text)["input_ids"][:63] + [tokenizer.sep_token_id])
    positions = torch.arange(1, 63)
    losses = module.masked_cross_entropy(model, ids, positions, tokenizer.mask_token_id)
    assert values["2"] == pytest.approx(losses.mean(), rel=1e-6), (
        "The YaRN row is not the model with this rope_scaling."
    )


def test_yarn_from_another_length(folder, tmp_path):
    """A model whose configuration says 48 positions, and whose texts had 12: YaRN by 2 from there
    is another model than by 2 from 48."""
    rows = run(folder, tmp_path, lengths=64, yarn=2, yarn_from=12, texts=1) and run(
        folder, tmp_path, lengths=64, yarn=2, texts=1
    )
    values = {row["yarn"]: float(row["mean_cross_entropy"]) for row in rows}
    assert set(values) == {"2 from 12", "2"} and len(set(values.values())) == 2, values


def test_usual_lengths_end_at_the_context(folder, tmp_path):
    """48 positions, with YaRN by 1.2 then 58."""
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


def test_positions_that_start_behind_the_padding(folder, tmp_path):
    """RoBERTa's 34 rows of positions are 32 tokens, and its tokenizer names no limit."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 34,
    }
    RobertaForMaskedLM(RobertaConfig(vocab_size=30522, pad_token_id=1, **sizes)).save_pretrained(
        tmp_path / "roberta"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "neobert")
    tokenizer.model_max_length = int(1e30)
    tokenizer.save_pretrained(tmp_path / "roberta")
    rows = run(
        folder, tmp_path / "out", model=tmp_path / "roberta", lengths="32,33,34", positions=2
    )
    assert {row["length"] for row in rows} == {"32"}, (
        "A bucket beyond the position table was evaluated."
    )


def test_texts_below_the_shortest_length_are_counted(folder, tmp_path, capsys):
    """Six texts of 22 to 72 tokens."""
    assert len(run(folder, tmp_path, lengths="40", positions=2)) == 4
    assert "4 texts; 0 rows are empty, 2 texts shorter than 40" in capsys.readouterr().err
    assert len(run(folder, tmp_path / "own", lengths="40", positions=2, bucketing="own")) == 6


def test_empty_rows_are_counted_not_fatal(folder, tmp_path, capsys):
    out, text = tmp_path / "out", tmp_path / "texts.jsonl"
    text.write_text('{"text": " "}\n' * 2 + (folder / "texts.jsonl").read_text())
    assert len(run(folder, out, text=text, lengths=16, positions=2)) == 6
    assert "6 texts; 2 rows are empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"positions": 0}, "positions must be a whole number of at least 1, or exact"),
        ({"positions": "many"}, "positions and yarn: invalid literal .* 'many'"),
        ({"lengths": "9" * 20}, "lengths must be at most 2147483647, but 9+ was given"),
        ({"lengths": "16,x"}, "lengths on the command line must be a list"),
        ({"lengths": "16,0"}, "lengths must be at least 1, but 0 was given"),
        ({"lengths": 512}, "no text of .* reaches 512 tokens"),
        ({"yarn": "0.5"}, "yarn takes off or factors above 1, but .*'0.5'.* was given"),
        ({"column": "body"}, "there is no column 'body'; there is: text"),
        ({"text": __file__}, "holds no file of rows"),
        ({"text": "no/such/folder"}, "there is no file of rows no/such/folder"),
        ({"text": "missing.txt"}, "there is no file of rows missing.txt"),
        ({"text": "tests/missing"}, "dataset tests/missing cannot be read"),
        ({"yarn": "2", "yarn_from": 0}, "yarn_from must be at least 1"),
        ({"text": "no_such_data"}, "dataset no_such_data cannot be read"),
        (
            {"model": "no_such_model"},
            "there is no no_such_model; give a folder, or a name on the Hub as ORGANISATION/MODEL",
        ),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"bucketing": "both"}, "bucketing must be one of cut, own"),
    ],
)
def test_bad_input_is_one_sentence(folder, tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run(folder, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists(), "Something was written although the input is bad."


def test_output_must_be_a_folder(folder, tmp_path):
    (tmp_path / "out").write_text("mine")
    for output in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(UserError, match="output .*out is a file"):
            module.main(arguments(folder, output))


def test_models_that_cannot(folder, tmp_path):
    with pytest.raises(UserError, match="YaRN needs one set of rotary parameters"):
        run(folder, tmp_path / "out", model=folder / "bert", yarn=2)
    from neobert import NeoBERTModel

    backbone = tmp_path / "backbone"
    NeoBERTModel.from_pretrained(folder / "neobert", dtype=torch.float32).save_pretrained(backbone)
    with pytest.raises(UserError, match="no trained masked-LM head: decoder.bias, decoder.weight"):
        run(folder, tmp_path / "out", model=backbone)
    bare = tmp_path / "bare"
    NeoBERTForMaskedLM.from_pretrained(folder / "neobert", dtype=torch.float32).save_pretrained(
        bare
    )
    with pytest.raises(
        UserError, match="no tokenizer was found in .*bare: give its folder with --tokenizer"
    ):
        run(folder, tmp_path / "out", model=bare)
    assert not (tmp_path / "out").exists()
    larger = AutoTokenizer.from_pretrained(folder / "neobert")
    larger.add_tokens(["sea-green"])
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(
        UserError, match="the tokenizer has 30523 tokens, but the embedding of .* has 30522 rows"
    ):
        run(folder, tmp_path / "out", model=bare, tokenizer=tmp_path / "larger")
    rows = run(
        folder, tmp_path / "with", model=bare, tokenizer=folder / "neobert", lengths=16, texts=1
    )
    assert (
        rows[0]["mean_cross_entropy"]
        == run(folder, tmp_path / "same", lengths=16, texts=1)[0]["mean_cross_entropy"]
    )


def test_files_of_others_are_not_replaced(folder, tmp_path):
    files = [
        ("csv", content, "not a pseudo-perplexity CSV")
        for content in (b"a,b\n1,2\n", b"a,b\n1,2\n3,4", b"a,b", b"\n")
    ]
    files += [
        (ending, b"mine", f"pseudo_perplexity.{ending} was not made by neobert pseudo-perplexity")
        for ending in ("md", "json", "png")
    ]
    for ending, content, sentence in files:
        other = tmp_path / f"pseudo_perplexity.{ending}"
        other.write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            run(folder, tmp_path)
        assert other.read_bytes() == content, "A foreign file was changed."
        other.unlink()


def test_a_second_run_is_refused_and_leaves_the_line_that_the_first_one_writes(folder, tmp_path):
    given = {"lengths": 16, "positions": 2, "texts": 1}
    run(folder, tmp_path, **given)
    path = tmp_path / "pseudo_perplexity.csv"
    path.write_text(path.read_text() + "neobert,half a li")
    with locked(tmp_path), pytest.raises(UserError, match="is in use by another run"):
        run(folder, tmp_path, **given)
    assert path.read_text().endswith("half a li")
    assert len(run(folder, tmp_path, **given)) == 1


def test_a_name_may_hold_quotes(folder, tmp_path):
    for _ in range(2):
        rows = run(folder, tmp_path, name='"A", model', lengths=16, positions=2, texts=2)
        assert [row["name"] for row in rows] == ['"A", model'] * 2
