"""Pins the batches of a distillation: pairs stay together through reading, neighbours
are those of a complete search, every text comes once an epoch, and an epoch repeats exactly."""

import json

import numpy as np
import pytest


pytest.importorskip("sentence_transformers")

from neobert.common.errors import UserError
from neobert.embeddings import distill_batches
from neobert.embeddings.distill_batches import NearTexts, nearest_units
from neobert.embeddings.distill_data import TextSource, is_held_out, read_texts


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path), "column": "a", "pair": "b"}


def test_texts_that_belong_together_are_one_unit(tmp_path):
    rows = [{"a": "title one", "b": "text one"}, {"a": "title two", "b": "text two"}]
    rows += [{"a": "question one", "b": "text one"}, {"a": "alone", "b": " "}]
    pairs = TextSource.from_entry(written(tmp_path / "pairs.jsonl", rows))
    single = tmp_path / "single.txt"
    single.write_text("one more\ntitle two\n")
    texts = read_texts([pairs, TextSource.from_entry(str(single))], [], 1e-9, 10)
    assert texts.train == [
        "title one", "text one", "title two", "text two", "question one", "alone", "one more"
    ]  # fmt: skip
    assert texts.units == [[0, 1, 4], [2, 3], [5], [6]]


def test_a_held_out_half_of_a_pair_leaves_the_other_alone(tmp_path):
    rows = [{"a": f"title {i}", "b": f"text {i}"} for i in range(200)]
    texts = read_texts([TextSource.from_entry(written(tmp_path / "p.jsonl", rows))], [], 20, 1000)
    assert 40 < len(texts.held_out) < 120
    assert not any(is_held_out(text, 20) for text in texts.train)
    assert sorted(i for unit in texts.units for i in unit) == list(range(len(texts.train)))
    for unit in texts.units:
        assert len({texts.train[i].split()[1] for i in unit}) == 1 and unit


def test_a_share_takes_the_same_rows_again(tmp_path):
    rows = [{"a": f"title {i}", "b": f"text {i}"} for i in range(1000)]
    entry = written(tmp_path / "p.jsonl", rows)
    found = list(TextSource.from_entry({**entry, "share": 0.3}).read())
    assert 250 < len(found) < 350 and all(a[6:] == b[5:] for a, b in found)
    assert list(TextSource.from_entry({**entry, "share": 0.3}).read()) == found
    assert set(found) < set(TextSource.from_entry({**entry, "share": 0.5}).read())
    with pytest.raises(UserError, match="share"):
        TextSource.from_entry({**entry, "share": 0})
    with pytest.raises(UserError, match="c"):
        list(TextSource.from_entry({**entry, "pair": "c"}).read())


def test_neighbours_are_those_of_a_complete_search(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    units = [[i, 59 - i] for i in range(20)] + [[i] for i in range(20, 40)]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    means = np.stack([unit[rows].mean(0) for rows in units])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    near = nearest_units(vectors, units, 5)
    for u, found in enumerate(near):
        others = sorted(set(range(40)) - {u}, key=lambda v: -(means[u] @ means[v]))
        assert found.tolist() == others[:5]
    monkeypatch.setattr(distill_batches, "PART", 12)
    parts = nearest_units(vectors, units, 20)
    assert parts.shape == (40, 9), "the smallest of four parts of 10 units has 9 others"
    assert all(u not in found and len(set(found)) == 9 for u, found in enumerate(parts.tolist()))


def sampler(**changes):
    # Units 2i and 2i + 1 are nearest to each other; every unit is two texts.
    units = [[2 * u, 2 * u + 1] for u in range(50)]
    near = np.array([[u ^ 1, (u + 2) % 50, (u + 4) % 50] for u in range(50)])
    given = {"units": units, "near": near, "neighbours": 1, "seed": 1, **changes}
    return NearTexts(range(100), 8, **given)


def test_batches_hold_bundles_and_each_text_once():
    batches = list(sampler())
    assert len(batches) == len(sampler()) == 12 and all(len(rows) == 8 for rows in batches)
    assert len({i for rows in batches for i in rows}) == 96, "a text came twice"
    for rows in batches:  # two bundles of two units of two texts
        assert sorted(rows) == sorted({4 * (i // 4) + j for i in rows for j in range(4)})
    without = [sorted({i // 4 for i in rows}) for rows in sampler(neighbours=0)]
    assert max(map(len, without)) > 2, "units that are near stand together though nobody asked"


def test_a_bundle_takes_the_nearest_units_that_no_other_has():
    """All have the same nearest two: who comes later takes those that are left."""
    near = np.array([[u for u in range(6) if u != own] for own in range(6)])
    given = {"units": [[i] for i in range(6)], "near": near, "neighbours": 2}
    first, second = NearTexts(range(6), 3, **given)
    assert sorted([*first, *second]) == [*range(6)]


def test_an_epoch_repeats_exactly_and_the_next_differs():
    first, second = sampler(), sampler()
    assert list(first) == list(second) == list(first)
    second.set_epoch(1)
    assert list(first) != list(second)
    few = NearTexts(range(3), 8, units=[[0, 1], [2]], near=np.zeros((2, 0), int))
    assert [len(rows) for rows in few] == [3], "few texts are one batch"
