"""Pins the pooling layer of written folders: both forms of its configuration, so that no reader
falls back to another pooling."""

import json

import pytest

from neobert.common.errors import UserError
from neobert.common.pooling import write_pooling, write_sentence_transformers


def read(folder):
    return json.loads((folder / "1_Pooling" / "config.json").read_text())


@pytest.mark.parametrize(
    "mode, flag", [("mean", "mean_tokens"), ("cls", "cls_token"), ("lasttoken", "lasttoken")]
)
def test_both_forms(tmp_path, mode, flag):
    write_pooling(tmp_path, 64, mode)
    config = read(tmp_path)
    kinds = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    assert {
        name.removeprefix("pooling_mode_"): value
        for name, value in config.items()
        if name.startswith("pooling_mode_")
    } == {kind: kind == flag for kind in kinds}
    rest = {name: value for name, value in config.items() if not name.startswith("pooling_mode_")}
    assert rest == {"word_embedding_dimension": 64, "include_prompt": True, "pooling_mode": mode}


@pytest.mark.parametrize("readers", ["old", "new", "both"])
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_the_library_reads_each_form(tmp_path, mode, readers):
    models = pytest.importorskip("sentence_transformers.models")
    write_sentence_transformers(tmp_path, 64, 128, mode)
    config = read(tmp_path)
    # What a reader of one form alone sees.
    kept = {
        "old": lambda name: name != "pooling_mode",
        "new": lambda name: not name.startswith("pooling_mode_"),
        "both": lambda name: True,
    }
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({n: v for n, v in config.items() if kept[readers](n)})
    )
    pooling = models.Pooling.load(str(tmp_path / "1_Pooling"))
    if hasattr(pooling, "pooling_mode"):
        assert pooling.pooling_mode == mode
    else:
        assert (
            getattr(
                pooling,
                {"mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}[mode],
            )
            is True
        )


def test_another_mode_is_refused(tmp_path):
    with pytest.raises(UserError, match="must be one of cls, mean, .* but 'median' was given"):
        write_pooling(tmp_path, 64, "median")
