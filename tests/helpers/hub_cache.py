"""Cache of the Hub with a model, for tests without a network."""

from pathlib import Path
from typing import Any

import huggingface_hub.constants


def add_to_cache(monkeypatch: Any, cache: Path, folder: Path, name: str) -> None:
    """Use a directory as the cache of the Hub, and add a model to the cache.

    Args:
        monkeypatch: Fixture of pytest.
        cache: Directory of the cache.
        folder: Directory of the model.
        name: Name of the model on the Hub.
    """
    commit = "0" * 40
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
