"""Pins what a run with init_from leaves: adaptation.md with the figures before and after, and the
mean of its last checkpoints where that is better."""

import json
import shutil

import pytest
import torch


pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from pretrain_runs import arguments_of, make_corpus, run_of  # noqa: F401
from safetensors.torch import load_file

from neobert.__main__ import main
from neobert.benchmarks import adaptation
from neobert.benchmarks.report import main as report
from neobert.common.checkpoint_files import checkpoints
from neobert.common.errors import Stopped
from neobert.common.yaml_files import read_yaml
from neobert.pretraining import averaging, pretrain
from neobert.pretraining import trainer as trainer_module


@pytest.fixture(scope="module", name="start")
def make_start(corpus):
    """A trained model and two held-out sets."""
    (corpus / "songs.txt").write_text("old men sing loud songs\ngreen apples fall down\n" * 150)
    (corpus / "other.txt").write_text("old apples fall down\ngreen men sing loud songs\n" * 20)
    run_of(arguments_of(corpus, corpus / "start", max_steps=30, save_steps=30))
    return corpus / "start"


def _adapt(corpus, start, out, **more):
    return arguments_of(
        corpus,
        out,
        **{
            "init_from": start,
            "model_config": None,
            "dataset": corpus / "songs.txt",
            "prepared": corpus / "songs",
            "heldout": json.dumps(
                {"songs": str(corpus / "other.txt"), "general": str(corpus / "heldout.txt")}
            ),
            "eval_strategy": "steps",
            "eval_steps": 4,
            **more,
        },
    )


def test_the_page_says_what_was_won_and_lost(corpus, start, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = _adapt(corpus, start, out, max_steps=12, save_steps=12)
    metrics = run_of(arguments)
    before = run_of([*_adapt(corpus, start, tmp_path / "measured"), "--measure"])
    figures = json.loads((out / "adaptation.json").read_text())
    assert set(figures["sets"]) == {"songs", "general"} and figures["environment"]["command"]
    for name, found in figures["sets"].items():
        for metric, values in found.items():
            assert values["before"] == before[f"eval_{name}_{metric}"]
            assert values["after"] == metrics[f"eval_{name}_{metric}"]
        steps = [step for step, _ in figures["curve"][name]["bits_per_character"]]
        assert steps == [0, 4, 8, 12]
    songs, general = (figures["sets"][name]["bits_per_character"] for name in ("songs", "general"))
    assert songs["after"] < songs["before"]
    page = (out / "adaptation.md").read_text()
    word = "Gained" if general["after"] < general["before"] else "Lost"
    assert "Gained on songs" in page and f"{word} on general" in page
    change = songs["after"] - songs["before"]
    assert f"| {songs['before']:.3f} | {songs['after']:.3f} | {change:+.3f} |" in page
    assert (out / "adaptation.png").stat().st_size > 5000

    # It is the run's own, and neobert report shows it.
    own = json.loads((out / "recipe.json").read_text())["files"]
    assert {"adaptation.md", "adaptation.json", "adaptation.png"} <= own.keys()
    assert report(["--results", str(out), "--output", str(tmp_path / "report.md")]) == 0
    shown = (tmp_path / "report.md").read_text()
    assert "Gained on songs" in shown and "out/adaptation.png" in shown
    # The same command changes nothing.
    capsys.readouterr()
    assert run_of(arguments) == metrics and "finished already" in capsys.readouterr().err


def test_a_run_without_a_start_has_no_page(corpus, tmp_path):
    run_of(arguments_of(corpus, tmp_path, max_steps=3, heldout=corpus / "heldout.txt"))
    assert not list(tmp_path.glob("adaptation*"))


def test_the_mean_is_that_of_the_last_checkpoints(corpus, start, tmp_path, capsys):
    given = {"max_steps": 10, "save_steps": 4, "average_last": 3, "save_total_limit": 3}
    metrics = run_of(_adapt(corpus, start, tmp_path, **given))
    assert list(checkpoints(tmp_path)) == [4, 8, 10]
    found = json.loads((tmp_path / "result.json").read_text())["average_last"]
    bits = found["bits_per_character"]
    assert found["steps"] == [4, 8, 10] and found["kept"] == min(bits, key=bits.get)
    weights = [load_file(tmp_path / f"checkpoint-{step}/model.safetensors") for step in (4, 8, 10)]
    final = load_file(tmp_path / "model.safetensors")
    expected = {
        "mean": {name: sum(each[name].double() for each in weights) / 3 for name in final},
        "last": weights[-1],
    }[found["kept"]]
    for name, tensor in final.items():
        assert torch.equal(tensor, expected[name].float()), name
    sets = [metrics[f"eval_{name}_bits_per_character"] for name in ("songs", "general")]
    assert sum(sets) / 2 == pytest.approx(bits[found["kept"]])
    error = capsys.readouterr().err
    assert f"{bits['mean']:.4f}" in error and f"{bits['last']:.4f}" in error


@pytest.mark.parametrize("better", ["mean", "last"])
def test_the_better_one_is_kept(corpus, start, tmp_path, monkeypatch, better):
    """Whichever it is, by figures that the test makes up."""
    measure, calls = trainer_module.PretrainingTrainer.measure, []

    def made_up(self):
        calls.append(None)
        found = measure(self)
        worse = len(calls) == {"mean": 2, "last": 3}[better]  # 1: step 0, 2: last, 3: mean
        names = [name for name in found if name.endswith("bits_per_character")]
        return {**found, **{name: 2.0 if worse else 1.0 for name in names}}

    monkeypatch.setattr(trainer_module.PretrainingTrainer, "measure", made_up)
    given = {"max_steps": 4, "save_steps": 2, "average_last": 2, "eval_strategy": "no"}
    run_of(_adapt(corpus, start, tmp_path, **given, warmup_steps=1))
    assert len(calls) == 3
    found = json.loads((tmp_path / "result.json").read_text())["average_last"]
    assert found["kept"] == better
    last = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    final = load_file(tmp_path / "model.safetensors")
    same = all(torch.equal(final[name], last[name]) for name in final)
    assert same == (better == "last")


@pytest.mark.slow
def test_a_checkpoint_of_sigterm_is_not_averaged(corpus, start, tmp_path, monkeypatch):
    """It takes no place among those that are kept for the mean, so that a stopped run ends as
    another."""
    given = {"max_steps": 8, "save_steps": 4, "average_last": 2, "save_total_limit": 2}
    run_of(_adapt(corpus, start, tmp_path / "whole", **given))
    step = trainer_module.PretrainingTrainer.training_step
    out = tmp_path / "stopped"

    def signalled(self, *args, **kwargs):
        if self.state.global_step in (4, 5):
            for callback in self.callback_handler.callbacks:
                if hasattr(callback, "_on_signal"):
                    callback._on_signal()
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.PretrainingTrainer, "training_step", signalled)
        for saved in ([4, 5], [4, 5, 6]):
            with pytest.raises(Stopped):
                run_of(_adapt(corpus, start, out, **given))
            assert list(checkpoints(out)) == saved
    run_of(_adapt(corpus, start, out, **given))
    first, second = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


BAD = [
    ({"average_last": 3}, "average_last 3 is more than the 2 checkpoints that are kept"),
    ({"average_last": 2, "save_steps": 8}, "is more than the 1 checkpoints of 8 steps"),
    ({"average_last": 2, "heldout": None, "eval_strategy": "no"}, "needs held-out text"),
    ({"average_last": 2, "save_strategy": "no"}, "needs save_strategy steps"),
    ({"average_last": -1}, "average_last must be at least 2"),
]


@pytest.mark.parametrize("wrong, words", BAD, ids=str)
def test_bad_means_are_one_sentence(corpus, start, tmp_path, capsys, wrong, words):
    arguments = _adapt(corpus, start, tmp_path / "out", **wrong)
    assert main(["pretrain", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().split("\n")) == 1
    assert not (tmp_path / "out").exists()


def test_steps_of_the_mean(corpus, tmp_path):
    run = pretrain.read_run(arguments_of(corpus, tmp_path, max_steps=20, save_steps=6))
    assert averaging.averaged_steps(run.training, 3) == [12, 18, 20]
    run = pretrain.read_run(arguments_of(corpus, tmp_path, max_steps=20, save_steps=0.25))
    assert averaging.averaged_steps(run.training, 9) == [5, 10, 15, 20]


def test_a_checkpoint_that_is_gone(corpus, start, tmp_path):
    given = {"max_steps": 8, "save_steps": 4, "average_last": 2}
    run_of(_adapt(corpus, start, tmp_path, **given))
    shutil.rmtree(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="checkpoint-4 is not there"):
        averaging.mean_weights([tmp_path / "checkpoint-8", tmp_path / "checkpoint-4"])


def test_the_benchmark_has_the_recipes_values_and_its_arithmetic(tmp_path, corpus, start):
    """Its recipes are read; the table has means and deviations; replay is compared seed by seed."""
    given = adaptation.AdaptationArguments(work=str(tmp_path), steps=40)
    for name in ("manuals", "dictionary", "manuals-heldout", "dictionary-heldout"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a river"}\n')
    shipped = read_yaml(adaptation.RECIPE)
    for way in ("alone", "replay", "anew"):
        run = pretrain.run_of(adaptation.recipe_of(way, 3, given, start))
        assert run.batch.mlm_probability == shipped["mlm_probability"]
        assert run.training.learning_rate == (2e-3 if way == "anew" else 1e-3)
        assert (run.model.init_from is None) == (way == "anew")
        weights = [source.weight for source in run.data.sources]
        assert weights == ([0.9, 0.1] if way == "replay" else [None])
    rows = [
        {
            "way": way,
            "seed": seed,
            "tokens_seen": 100,
            **{f"eval_{name}_masked_accuracy": 0.25 for name in adaptation.SETS},
            **{f"eval_{name}_bits_per_character": bits + seed for name in adaptation.SETS},
        }
        for way, bits in (("none", 3.0), ("alone", 2.0), ("replay", 2.5), ("anew", 4.0))
        for seed in (0, 1)
    ]
    assert "| manual pages alone | 25.0 ± 0.0 | 2.500 ± 0.707 |" in adaptation.table(rows)
    found = adaptation.differences(rows)
    assert "manuals, manual pages and 10 % replay: -0.500 ± 0.000 bits" in found
