"""Pins the one reader of local rows: five formats and their compressed forms give the same rows,
reading starts anywhere, memory does not grow with a file, and a broken row is one sentence with its
place."""

import bz2
import gzip
import json
import lzma
import tracemalloc

import pytest

from neobert.common import rows
from neobert.common.errors import UserError
from neobert.common.rows import (
    FORMATS,
    check_characters,
    read_rows,
    row_columns,
    row_files,
    row_format,
)


pytest.importorskip("pyarrow")
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402


ROWS = [
    {"text": text, "id": str(i)}
    for i, text in enumerate(["a, \u2028 b", 'say "c"', "  blanks  ", "é", "last"] * 40)
]


def write(path, rows=ROWS):
    ending = row_format(path)
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        return path
    if ending == ".csv":
        quote = lambda text: '"' + text.replace('"', '""') + '"'  # noqa: E731
        content = "text,id\n" + "".join(f"{quote(row['text'])},{row['id']}\n" for row in rows)
    elif ending == ".tsv":
        content = "text\tid\n" + "".join(f"{row['text']}\t{row['id']}\n" for row in rows)
    elif ending == ".txt":
        content = "\n".join(row["text"] for row in rows) + "\n\n"
    else:
        content = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    if path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(content.encode()))
        return path
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wb") as file:
        file.write(content.encode())
    return path


NAMES = [
    "rows.jsonl",
    "rows.json",
    "rows.parquet",
    "rows.csv",
    "rows.tsv",
    "rows.txt",
    "rows.jsonl.gz",
    "rows.csv.xz",
    "rows.jsonl.zst",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_rows_from_any_place_on(tmp_path, name):
    found = list(read_rows(write(tmp_path / name)))
    rows = [row for _, row in found]
    expected = [{"text": row["text"]} for row in ROWS] if ".txt" in name else ROWS
    assert rows == expected, f"{name} is read wrongly"
    assert row_columns(tmp_path / name) == list(expected[0])
    for i in (0, 1, 6, 7, 8, 100, 199):
        later = list(read_rows(tmp_path / name, start=found[i][0]))
        assert later == found[i:], f"{name} entered at row {i} gives other rows or places"
    assert [row for _, row in read_rows(tmp_path / name, ["text"], ["text"])] == [
        {"text": row["text"]} for row in ROWS
    ]


def test_a_folder_is_its_files_in_order(tmp_path):
    for name, part in (("b.jsonl", ROWS[3:6]), ("a.jsonl", ROWS[:3]), ("c.jsonl.gz", ROWS[6:8])):
        write(tmp_path / name, part)
    (tmp_path / "_SUCCESS").write_text("")
    found = list(read_rows(tmp_path))
    assert [row for _, row in found] == ROWS[:8]
    assert list(read_rows(tmp_path, start=found[4][0])) == found[4:], "a start in the second file"
    assert str(found[4][0]) == f"{tmp_path / 'b.jsonl'}, line 3", "blank lines count as lines"
    write(tmp_path / "d.csv")
    with pytest.raises(
        UserError,
        match=(
            "must hold files of one format among .*, but a.jsonl, b.jsonl, c.jsonl.gz, d.csv "
            "was found"
        ),
    ):
        row_files(tmp_path)


def test_tsv_has_no_quotes_and_csv_has_long_texts(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"open and never closes\t1\n')
    assert [row for _, row in read_rows(tmp_path / "a.tsv")] == [
        {"text": '"open and never closes', "label": "1"}
    ]
    long = "word " * 100_000  # above the csv module's own limit of 131,072 characters
    (tmp_path / "a.csv").write_text(f'text\n"{long}"\n')
    assert next(read_rows(tmp_path / "a.csv"))[1]["text"] == long


def test_memory_does_not_grow_with_the_file(tmp_path):
    for name in ("rows.jsonl", "rows.csv", "rows.parquet", "rows.txt"):
        path = write(tmp_path / name, [{"text": "word " * 200, "id": str(i)} for i in range(4000)])
        tracemalloc.start()
        for _ in read_rows(path):
            pass
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        assert peak < 3, f"{name}: 4 MB of text took {peak:.1f} MiB"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n["a"]\n', "line 3 must be an object {...}, one a line"),
        ("a.json", b'[\n{"text": "a"}\n]\n', "line 1 is not JSON"),
        ("a.jsonl", b'[{"text": "a"}]\n', "line 1 must be an object"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no 'text'; it has: 'body'"),
        ("a.jsonl", b'{"text": null}\n', "line 1: 'text' must be text, but is null"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "line 1 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "b\\ud83d"}\n',
            "line 1: 'text' has half a surrogate pair, '.ud83d'",
        ),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        ("a.jsonl", b"\n\n", "a.jsonl has no rows"),
        ("a.txt", b"good\ncaf\xe9\n", "line 2 is not UTF-8"),
        ("a.csv", b"text\ncaf\xe9\n", "a.csv cannot be read"),
        ("a.csv", b'text,label\n"open,1\nnext,0\n', "line 2 is broken .*; are its quotes closed"),
        (
            "a.csv",
            b"text,label\none, two,1\n",
            "line 2 has more columns than the first line, 2; a separator in a text",
        ),
        ("a.csv", b"text,text\na,b\n", "line 1 names a column twice: text, text"),
        ("a.parquet", b"PAR0nothing", "is not a parquet file"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read"),
        ("a.doc", b"x", "must end in .jsonl, .* but .doc was given"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path, name, content, sentence):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        list(read_rows(path, ["text"], ["text"]))


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        list(read_rows(tmp_path / "nothing.jsonl"))
    with pytest.raises(UserError, match="has no column 'body'; it has: 'text', 'id'"):
        list(read_rows(write(tmp_path / "a.parquet"), ["body"]))
    assert (
        row_format("a.jsonl.gz") == ".jsonl"
        and row_format("a") is None
        and set(map(row_format, map("a{}".format, FORMATS))) == set(FORMATS)
    )


def test_broken_rows_can_be_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": 1}\nnothing\n{"text": "b"}\n')
    errors = []
    assert [
        row["text"] for _, row in read_rows(path, ["text"], ["text"], broken=errors.append)
    ] == ["a", "b"]
    assert len(errors) == 2 and "line 3 is not JSON" in str(errors[1])


def test_a_column_of_some_rows_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "n": 1}\n{"text": "b"}\n')
    assert len(list(read_rows(path))) == 2
    with pytest.raises(
        UserError, match="line 2 has no 'n', unlike the first row; give it to every row or to none"
    ):
        list(read_rows(path, ["text"], alike="n".__eq__))


def test_half_a_character_is_named():
    check_characters("here", "text", "\u00e9 \U0001f600")
    with pytest.raises(UserError, match="here: 'text' has half a surrogate pair"):
        check_characters("here", "text", "\ud83d")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.xz", "a.csv", "a.tsv.bz2"])
def test_a_line_that_no_memory_holds_is_refused(tmp_path, monkeypatch, name):
    """A compressed file of a few MB can have one of several GB. What is read of it is bounded."""
    path = tmp_path / name
    start = "text\n" if row_format(path) in (".csv", ".tsv") else ""
    open_ = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
    with open_(path, "wb") as file:
        file.write(f"{start}{'a' * 5000}".encode())
    monkeypatch.setattr(rows, "LINE_LIMIT", 2000)
    with pytest.raises(UserError, match=rf"{name}, line {1 + bool(start)} has 2,000 bytes or more"):
        list(read_rows(path))
