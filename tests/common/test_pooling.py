"""Test the sentence-transformers files of written folders.

Covers both forms of the pooling configuration, so that no reader falls back to another pooling, and
the required versions.
"""

import configparser
import json
from pathlib import Path

import pytest
import torch

from neobert.common.pooling import REQUIREMENTS, write_pooling, write_sentence_transformers


KINDS = (
    "cls_token mean_tokens max_tokens mean_sqrt_len_tokens weightedmean_tokens lasttoken".split()
)


@pytest.mark.parametrize(
    "mode, flag", [("mean", "mean_tokens"), ("cls", "cls_token"), ("lasttoken", "lasttoken")]
)
def test_both_forms(tmp_path, mode, flag):
    write_pooling(tmp_path, 64, mode)
    config = json.loads((tmp_path / "1_Pooling" / "config.json").read_text())
    expected = {"word_embedding_dimension": 64, "include_prompt": True, "pooling_mode": mode}
    assert config == expected | {f"pooling_mode_{kind}": kind == flag for kind in KINDS}


@pytest.mark.parametrize("reader", ["old", "new"])
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_the_library_reads_each_form(tmp_path, mode, reader):
    """What a reader of one form alone sees."""
    models = pytest.importorskip("sentence_transformers.models")
    write_sentence_transformers(tmp_path, 64, 128, mode)
    path = tmp_path / "1_Pooling" / "config.json"
    flags = {"old": "pooling_mode", "new": "pooling_mode_"}[reader]
    config = json.loads(path.read_text()).items()
    left_out = str.startswith if reader == "new" else str.__eq__
    path.write_text(json.dumps({name: v for name, v in config if not left_out(name, flags)}))
    pooling = models.Pooling.load(str(path.parent))
    found = getattr(pooling, "pooling_mode", None)
    assert (found or pooling.get_pooling_mode_str()) == mode  # before version 6


def test_versions_that_are_too_old_are_named(tmp_path, monkeypatch):
    """By the library that loads the folder, before it loads anything."""
    sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6.2")
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    needed = settings["options"]["install_requires"]
    assert all(f"{name}{versions}" in needed for name, versions in REQUIREMENTS.items())
    write_sentence_transformers(tmp_path, 64, 128)
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(ImportError, match="torch>=2.6, but torch==2.5.1 is installed"):
        sentence_transformers.SentenceTransformer(str(tmp_path))
