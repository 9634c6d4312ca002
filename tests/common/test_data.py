"""Test the reader of data files.

Every format, compressed or not, contains the same rows, in a file, a folder, a glob or a URL.
Memory use is constant, and a damaged file raises an error of one line.
"""

import bz2
import functools
import gzip
import json
import lzma
import os
import tracemalloc

import fsspec
import pytest

from neobert.common import data
from neobert.common.data import FORMATS, count_rows, file_format, files, numbered_rows, rows, schema
from neobert.common.errors import UserError


pytest.importorskip("pyarrow")
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402


TEXTS = ["a, \u2028 b", 'say "c"', "  blanks  ", "\u00e9", "2024-01-01", "7"] * 30
ROWS = [{"text": text, "id": str(i)} for i, text in enumerate(TEXTS)]
NAMES = [f"rows{suffix}" for suffix in FORMATS]
NAMES += ["rows.jsonl.gz", "rows.csv.xz", "rows.jsonl.zst", "rows.TXT.bz2"]


def write(path, rows=ROWS):
    """Write rows in the format and the compression of the file name, and return the path.

    Text files begin with a byte order mark and end with a blank line, which readers must skip.
    """
    suffix = file_format(path.name)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        return path

    if suffix == ".csv":
        quoted = ['"' + row["text"].replace('"', '""') + '"' for row in rows]
        lines = ["text,id", *(f"{text},{row['id']}" for text, row in zip(quoted, rows))]
    elif suffix == ".tsv":
        lines = ["text\tid", *(f"{row['text']}\t{row['id']}" for row in rows)]
    elif suffix == ".txt":
        lines = [row["text"] for row in rows]
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]

    content = ("\ufeff" + "\n".join(lines) + "\n\n").encode()
    if path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(content))
        return path

    open_file = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
    with open_file(path, "wb") as file:
        file.write(content)
    return path


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_truncated_compressed_file_is_refused(tmp_path, suffix):
    """A compressed file that ends early is an error, after the rows before its end."""
    path = write(tmp_path / f"rows.txt{suffix}")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UserError, match="ended before the end-of-stream marker was reached"):
        list(rows(path))


def test_zstd_files_with_several_frames(tmp_path):
    """All frames of a .zst file are read, with content larger than the buffers."""
    zstandard = pytest.importorskip("zstandard")
    lines = [f"{number} {'long text ' * 3000}" for number in range(20)]
    parts = ["\n".join(lines[:12]) + "\n", "", "\n".join(lines[12:])]
    (tmp_path / "rows.txt.zst").write_bytes(
        b"".join(zstandard.compress(part.encode()) for part in parts)
    )
    assert [row["text"] for row in rows(tmp_path / "rows.txt.zst")] == lines


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_rows(tmp_path, name):
    """Check the rows, the columns and the number of rows of a file in each format."""
    write(tmp_path / name)
    expected = [{"text": row["text"]} for row in ROWS] if ".txt" in name.lower() else ROWS
    assert list(rows(tmp_path / name)) == expected
    assert list(rows(tmp_path / name, ["text"], text_columns=["text"])) == [
        {"text": text} for text in TEXTS
    ]

    (file,) = files(tmp_path / name)
    assert count_rows(file) == len(ROWS) and schema(file).names == list(expected[0])

    # Rows that are not wanted are counted, but not decoded.
    numbered = dict(numbered_rows(file, is_wanted=lambda number: number % 50 < 5))
    assert list(numbered) == list(range(len(ROWS)))
    assert all(numbered[n] == row for n, row in enumerate(expected) if n % 50 < 5)
    assert numbered[20] is None, "row 20 must not be decoded"
    assert count_rows(file._replace(url=str(tmp_path / name))) == len(ROWS)


def test_row_numbers_include_skipped_row_groups(tmp_path):
    """Row numbers include the rows of skipped row groups."""
    (file,) = files(write(tmp_path / "rows.parquet"))
    numbered = list(numbered_rows(file, is_wanted=lambda number: number >= 100))
    assert [number for number, _ in numbered] == list(range(len(ROWS)))
    assert [row for number, row in numbered if number >= 100] == ROWS[100:]


def test_stdin_and_pipes_are_rejected(tmp_path):
    """Check that stdin and pipes, which cannot be read twice, are rejected."""
    os.mkfifo(tmp_path / "pipe")
    for source in ("-", "/dev/stdin", str(tmp_path / "pipe")):
        with pytest.raises(UserError, match="got the stream .*Write its content to a file first"):
            files(source)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_folders_globs_and_urls(tmp_path, scheme, monkeypatch):
    """Check which files a folder or a glob contains, and their order.

    Hidden and temporary files, and files of other formats, are skipped. The files are sorted by
    their paths.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    names = ("b.jsonl", "a.jsonl.gz", "deep/c.jsonl", "_temporary.jsonl", ".hidden.jsonl")
    for number, name in enumerate(names):
        write(tmp_path / "corpus" / name, ROWS[3 * number : 3 * number + 3])
    (tmp_path / "corpus" / "README.md").write_text("no rows")
    # The cache of the Hub consists of symbolic links.
    (tmp_path / "corpus" / "d.jsonl").symlink_to("deep/c.jsonl")
    root = f"{scheme}{tmp_path}/corpus" if scheme else "corpus"
    if scheme == "memory://":
        fsspec.filesystem("memory").put(f"{tmp_path}/corpus", root, recursive=True)

    # The order is a.jsonl.gz, b.jsonl, d.jsonl, deep/c.jsonl.
    expected = [ROWS[3:6], ROWS[:3], ROWS[6:9], ROWS[6:9]]
    assert list(rows(root)) == sum(expected, [])
    assert [(file.url, file.name) for file in files(f"{root}/")][2:] == [
        (f"{root}/{name}", name) for name in ("d.jsonl", "deep/c.jsonl")
    ]

    size = (tmp_path / "corpus" / "b.jsonl").stat().st_size
    assert files(f"{root}/b.jsonl") == [(f"{root}/b.jsonl", "b.jsonl", size)]
    assert [file.name for file in files(f"{root}/*.jsonl*")] == ["a.jsonl.gz", "b.jsonl", "d.jsonl"]
    assert [file.name for file in files(f"{root}/*/*.jsonl")] == ["deep/c.jsonl"]

    if scheme == "memory://":
        fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_link_to_a_folder_inside_of_a_folder_is_refused(tmp_path, scheme):
    """A link to a folder inside of the source is an error, because its files would be missing."""
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    write(corpus / "a.jsonl", ROWS[:1])
    write(tmp_path / "other" / "b.jsonl", ROWS[1:2])
    # Links to a file and to nothing, and hidden links, are no error.
    (corpus / "c.jsonl").symlink_to("../other/b.jsonl")
    (corpus / "broken.jsonl").symlink_to("missing")
    (corpus / "_hidden").symlink_to("../other")
    assert list(rows(f"{scheme}{corpus}")) == ROWS[:2]

    # A source that is a link itself is read.
    (tmp_path / "link").symlink_to("corpus")
    assert list(rows(f"{scheme}{tmp_path}/link")) == ROWS[:2]

    link = corpus / "deep" / "linked"
    link.symlink_to("../../other")
    with pytest.raises(UserError, match=f"^{link} is a link to a directory, which is not followed"):
        files(f"{scheme}{corpus}")


def test_changed_file_is_read_again(tmp_path):
    """Check that changes are seen even if the name and the size of a file stay the same."""
    path = tmp_path / "a.jsonl"
    for text in ("one", "two"):
        path.write_text(json.dumps({"text": text}))
        assert list(rows(path)) == [{"text": text}]


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Check that reading files with 4 MB of text needs less than 3 MiB of memory."""
    for name in ("rows.jsonl", "rows.csv", "rows.parquet", "rows.txt"):
        path = write(tmp_path / name, [{"text": "word " * 200, "id": str(i)} for i in range(4000)])
        tracemalloc.start()
        for _ in rows(path):
            pass
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        assert peak < 3, f"{name}: reading 4 MB of text took {peak:.1f} MiB"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text" \n', "a.jsonl, row 2: Expecting ':' delimiter"),
        ("a.jsonl", b'{"text": "a"}\n\n["a"]\n', "row 2: a row must be an object"),
        ("a.json", b'[{"text": "a"}]\n', "row 1: a row must be an object"),
        (
            "a.json",
            b'[\n  {\n    "text": "a"\n  }\n]\n',
            r"row 1: a row must be .*`jq -c '.\[\]'`\.$",
        ),
        ("a.json", b'{\n  "rows": []\n}\n', "row 1: a row must be an object"),
        ("dataset_info.json", b"{}\n", "`save_to_disk` has written. .* with `to_parquet` first"),
        ("a.jsonl", b'{"text": "a"}\n{"body": 1}', "row 2: there is no column 'text'. Columns: b"),
        ("a.jsonl", b'{"text": null}\n', "row 1: 'text' must be text, got null"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl cannot be read .*recursion"),
        ("a.txt", b"good\ncaf\xe9\n", "a.txt cannot be read .*utf-8.*. Convert the file to UTF-8."),
        ("a.csv", b'text,label\n"open,1\nnext,0\n', "unexpected end of data.. A quote is not cl"),
        ("a.csv", b"text,label\none, two,1\n", "row 1: the row has more columns than the header"),
        ("a.csv", b"id, text\n1,a\n", "there is no column 'text'. Columns: id, ' text'"),
        (
            "a.tsv",
            b"text\tlabel\na\tb\tx\n",
            "row 1: .* A text of a .tsv file must not contain tabs",
        ),
        ("a.csv", b"text,n,text\na,1,b\n", "a.csv must have different names, got 'text' 2 times"),
        ("a.tsv", b"text\ttext\na\tb\n", "a.tsv must have different names, got 'text' 2 times"),
        ("a.parquet", b"PAR0nothing", "a.parquet cannot be read"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read .Not a gzipped file"),
        ("a.doc", b"x", "there is no file of rows at .*a.doc"),
    ],
)
def test_invalid_file_is_reported(tmp_path, name, content, sentence):
    """Check that the error about a damaged file contains its name, the row and the reason."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        list(rows(tmp_path / name, ["text"], text_columns=["text"]))


def test_parquet_columns_of_the_same_name_are_refused(tmp_path):
    """Check the error about a parquet file with two columns of one name, of which one is lost."""
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for columns in (None, ["text"]):
        with pytest.raises(UserError, match="a.parquet must have different names, got 'text' 2"):
            list(rows(tmp_path / "a.parquet", columns))


def test_missing_files_protocols_and_columns(tmp_path):
    """Check the errors about a missing file, protocol or column, and about mixed formats."""
    with pytest.raises(UserError, match="there is no file of rows .*nothing.jsonl"):
        files(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match="nothing://a cannot be read .Protocol not known"):
        files("nothing://a")
    with pytest.raises(UserError, match="there is no column 'body'. Columns: text, id"):
        list(rows(write(tmp_path / "a.parquet"), ["body"]))
    write(tmp_path / "b.csv")
    with pytest.raises(UserError, match=r"several formats \(.csv, .parquet\): a.parquet, b.csv"):
        files(tmp_path)


def test_quotes_in_tsv_and_long_cells_in_csv(tmp_path):
    """Quotes have no meaning in tsv files, and the cells of a csv file may have any length."""
    (tmp_path / "a.tsv").write_text('text\tlabel\n"open and never closes\t1\n')
    assert list(rows(tmp_path / "a.tsv")) == [{"text": '"open and never closes', "label": "1"}]

    # The default limit of the csv module is 131,072 characters per cell.
    long_text = "word " * 100_000
    (tmp_path / "a.csv").write_text(f'text\n"{long_text}"\n')
    assert next(rows(tmp_path / "a.csv"))["text"] == long_text


@pytest.mark.parametrize(
    ("content", "number", "cell"),
    [
        # pandas writes cells with quotes, line ends or tabs in this way.
        ('text\tlabel\n"say ""hi"""\ta\n', 1, '"say ""hi"""'),
        ('text\tlabel\none\ta\n"two\nlines"\tb\n', 2, '"two'),
        ('label\ttext\na\t"two\nlines"\n', 2, 'lines"'),
        ('label\ttext\na\t"one\ttwo"\n', 1, '"one'),
        ('text\n"say ""hi"" to\nall"\n', 1, '"say ""hi"" to'),
    ],
)
def test_quoted_cells_of_tsv_files_are_refused(tmp_path, content, number, cell):
    """A cell with the quotes of csv files is an error that names the row and the remedy."""
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(UserError) as error:
        list(rows(tmp_path / "a.tsv"))
    assert str(error.value) == (
        f"{tmp_path}/a.tsv, row {number}: the cells of a .tsv file must not be enclosed in quotes, "
        f"got {cell}. Convert the file to .csv, or write it without quotes (`quoting=3`)."
    )


def test_single_quotes_in_tsv_cells_are_kept(tmp_path):
    """Quotes that are not those of a csv file are characters like any other."""
    texts = ['"Hi" and "bye"', '"" he said', '""hi""', 'say ""hi""', '"', '""', '"open']
    (tmp_path / "a.tsv").write_text("".join(f"{line}\n" for line in ["text", *texts]))
    assert [row["text"] for row in rows(tmp_path / "a.tsv")] == texts
    (tmp_path / "b.tsv").write_text('text\tlabel\nsay "hi" twice\n')
    assert list(rows(tmp_path / "b.tsv")) == [{"text": 'say "hi" twice', "label": None}]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_blank_lines_before_the_header_are_skipped(tmp_path, name):
    """The first line that is not blank is the header; empty columns may have the same name."""
    separator = "," if name == "a.csv" else "\t"
    lines = [
        "",
        "  ",
        separator.join(["text", "label", "", ""]),
        separator.join(["a", "1", "", ""]),
    ]
    (tmp_path / name).write_text("\n".join(lines))
    assert list(rows(tmp_path / name, ["text", "label"])) == [{"text": "a", "label": "1"}]


@pytest.mark.parametrize("name", [".hidden.jsonl", "_rows.jsonl"])
def test_a_hidden_file_that_is_named_is_read(tmp_path, name):
    """A hidden file is read if it is the source, and skipped in a folder."""
    write(tmp_path / name, ROWS[:1])
    write(tmp_path / "a.jsonl", ROWS[1:2])
    assert list(rows(tmp_path / name)) == ROWS[:1]
    assert list(rows(tmp_path)) == ROWS[1:2]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_carriage_returns_in_tsv_cells(tmp_path, end):
    """A carriage return in a cell of a tsv file is read as a space, and CRLF ends a row."""
    lines = ["text\tlabel", "one\rtwo\t1", "\rthree\t2", "four\t3", ""]
    (tmp_path / "a.tsv").write_bytes(end.join(lines).encode())
    expected = [
        {"text": "one two", "label": "1"},
        {"text": " three", "label": "2"},
        {"text": "four", "label": "3"},
    ]
    assert list(rows(tmp_path / "a.tsv")) == expected
    assert count_rows(files(tmp_path / "a.tsv")[0]) == 3


def test_backslashes_of_windows_paths_separate_folders(tmp_path, monkeypatch):
    """Where the separator is a backslash, files have their folder in their URL."""
    assert data.with_slashes("C:\\data\\a.csv", "\\") == "C:/data/a.csv"
    assert data.with_slashes("s3://bucket/a\\b.csv", "\\") == "s3://bucket/a\\b.csv"
    assert data.with_slashes("data/a\\b.csv", "/") == "data/a\\b.csv"

    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus" / "a.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "with_slashes", functools.partial(data.with_slashes, separator="\\"))
    for source in ("corpus\\a.jsonl", "corpus\\*.jsonl", "corpus\\"):
        assert [(file.url, file.name) for file in files(source)] == [("corpus/a.jsonl", "a.jsonl")]


@pytest.mark.parametrize("root", ["", "data/", "{}/data/", "memory://matched/"])
def test_outputs_that_a_glob_matches_are_refused(tmp_path, monkeypatch, root):
    """A glob must not match an output, unless the files of the output are hidden."""
    monkeypatch.chdir(tmp_path)
    root = root.format(tmp_path)
    for pattern, name in (
        ("**/*.parquet", "out/a-00000.parquet"),
        ("*/a*", "out/a-00000.parquet"),
        ("*.parquet", "out.parquet"),
        ("[a-z]ut/?.csv", "out/a.csv"),
    ):
        with pytest.raises(UserError, match="`output` must not contain files that the glob"):
            data.check_not_matched(f"{root}{pattern}", f"{root}{name}")

    for pattern, name in (
        ("*.parquet", "out/a-00000.parquet"),
        ("**/*.jsonl", "out/a-00000.parquet"),
        ("**/*.parquet", "_out/a-00000.parquet"),
        ("*/in/*.parquet", "out/a-00000.parquet"),
        ("out.parquet", "out.parquet"),
    ):
        data.check_not_matched(f"{root}{pattern}", f"{root}{name}")
    data.check_not_matched(f"{root}**/*.parquet", "memory://other/out/a-00000.parquet")


def test_folder_with_wildcards_in_its_name(tmp_path):
    """A folder whose name looks like a glob is a folder."""
    for name in ("d [1]", "d 1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name}\n")
    assert list(rows(tmp_path / "d [1]")) == [{"text": "d [1]"}]
    assert list(rows(f"{tmp_path}/d [1]/*.txt")) == [{"text": "d 1"}]


def test_lone_surrogates_of_texts_are_replaced(tmp_path):
    """One half of a surrogate pair becomes U+FFFD in texts, and other columns are not changed."""
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800", "id": "\\ud83d\\ude00\\udfff"}\n')
    expected = [{"text": "a\ufffd", "id": "\U0001f600\udfff"}]
    assert list(rows(tmp_path / "a.jsonl", text_columns=["text"])) == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_optional_columns_are_returned_where_they_exist(tmp_path, name):
    path = tmp_path / name
    content = [{"text": "a", "extra": "x", "other": "y"}, {"text": "b"}]
    if name == "rows.jsonl":
        path.write_text("\n".join(map(json.dumps, content)))
        expected = [{"text": "a", "extra": "x"}, {"text": "b"}]
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        expected = [{"text": "a", "extra": "x"}, {"text": "b", "extra": None}]
    assert list(data.rows(path, ["text"], optional_columns=["extra", "absent"])) == expected
