"""Test the files that make a directory a sentence-transformers model.

The pooling configuration is written in two forms, because a version of sentence-transformers that
does not find its form silently uses CLS pooling. Covers both forms, and the required versions.
"""

import configparser
import json
from pathlib import Path

import pytest
import torch

from neobert.common.sentence_transformers_files import (
    REQUIREMENTS,
    write_pooling,
    write_sentence_transformers,
)


# Flags of the older form, which has one flag per pooling mode.
FLAGS = (
    "cls_token mean_tokens max_tokens mean_sqrt_len_tokens weightedmean_tokens lasttoken".split()
)


@pytest.mark.parametrize(
    "mode, flag", [("mean", "mean_tokens"), ("cls", "cls_token"), ("lasttoken", "lasttoken")]
)
def test_config_contains_both_forms(tmp_path, mode, flag):
    """Check that the configuration contains the name of the mode and the flags of all modes."""
    write_pooling(tmp_path, 64, mode)
    config = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    expected = {"word_embedding_dimension": 64, "include_prompt": True, "pooling_mode": mode}
    assert config == expected | {f"pooling_mode_{name}": name == flag for name in FLAGS}


@pytest.mark.parametrize("reader", ["old", "new"])
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_sentence_transformers_reads_each_form(tmp_path, mode, reader):
    """Check that sentence-transformers reads the same mode if one form is removed."""
    models = pytest.importorskip("sentence_transformers.models")
    write_sentence_transformers(tmp_path, 64, 128, mode)
    path = tmp_path / "1_Pooling" / "config.json"

    # The older form has the keys `pooling_mode_*`, and the newer form the key `pooling_mode`.
    removed_key = {"old": "pooling_mode", "new": "pooling_mode_"}[reader]
    config = json.loads(path.read_text()).items()
    matches = str.startswith if reader == "new" else str.__eq__
    path.write_text(json.dumps({name: v for name, v in config if not matches(name, removed_key)}))

    pooling = models.Pooling.load(str(path.parent))
    pooling_mode = getattr(pooling, "pooling_mode", None)
    # Before version 6 of sentence-transformers, there is no attribute `pooling_mode`.
    assert (pooling_mode or pooling.get_pooling_mode_str()) == mode


def test_outdated_torch_is_reported(tmp_path, monkeypatch):
    """Check that sentence-transformers reports a version of torch that is too old.

    The written requirements are those of setup.cfg.
    """
    sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.2")
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    install_requires = settings["options"]["install_requires"]
    assert all(f"{name}{versions}" in install_requires for name, versions in REQUIREMENTS.items())

    write_sentence_transformers(tmp_path, 64, 128)
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(ImportError, match="torch>=2.6, but torch==2.5.1 is installed"):
        sentence_transformers.SentenceTransformer(str(tmp_path))
