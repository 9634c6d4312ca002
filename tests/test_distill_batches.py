"""Pins the batches of a distillation: pairs stay together from the file to the batch, every text
comes once an epoch, and an epoch repeats exactly."""

import json

import pytest


pytest.importorskip("sentence_transformers")

from neobert.common.errors import UserError
from neobert.embeddings.distill_batches import UnitBatches
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


def test_batches_hold_units_and_each_text_once():
    units = [[2 * u, 2 * u + 1] for u in range(50)]
    batches = list(UnitBatches(range(100), 8, units=units, seed=1))
    assert len(batches) == 12 and len({i for rows in batches for i in rows}) == 96
    for rows in batches:
        assert sorted(rows) == sorted({2 * (i // 2) + j for i in rows for j in range(2)})


def test_an_epoch_repeats_exactly_and_the_next_differs():
    units = [[2 * u, 2 * u + 1] for u in range(50)]
    first, second = (UnitBatches(range(100), 8, units=units, seed=1) for _ in range(2))
    assert list(first) == list(second) == list(first)
    second.set_epoch(1)
    assert list(first) != list(second)
    few = UnitBatches(range(3), 8, units=[[0, 1], [2]])
    assert [len(rows) for rows in few] == [3], "few texts are one batch"
