"""Pins the tokenizer of the result: it splits text as its source does, goes with the embedding's rows, and nothing that a stranger's files name
(code, other files, links, commands of a parser) comes along or does harm.
"""

import json
import os
import shutil

import pytest
import torch
from conversion_helpers import convert, save
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForMaskedLM, NeoBERTModel
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError, one_line
from neobert.conversion import fresh, fresh_tokenizer, tokenizer
from neobert.conversion.tokenizer import check_rows, find_tokenizer, write_tokenizer


@pytest.fixture
def in_this_process(monkeypatch):
    """The script without its process, which takes seconds; the other tests have it."""

    def run(script, *arguments, scratch, what, seconds):
        assert script == "fresh_tokenizer.py"
        try:
            fresh_tokenizer.main(*map(str, arguments))
        except BaseException as error:
            raise UserError(f"{what}: {one_line(error)}") from error

    monkeypatch.setattr(fresh_tokenizer, "limit_memory", lambda: None)
    monkeypatch.setattr(tokenizer, "run_fresh", run)


@pytest.fixture
def small(tmp_path):
    """A tokenizer of 24 tokens in a folder, with all files that BERT's has."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqr", "nest"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    settings = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.backend_tokenizer.to_str())
    return folder


@pytest.fixture
def write(tmp_path):
    """Writes a tokenizer anew; the value is a function of its folder that returns the new folder."""

    def written(source, rows=24, length=128):
        target, scratch = tmp_path / "target", tmp_path / "scratch"
        for folder in (target, scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        config = NeoBERTConfig(vocab_size=rows, max_position_embeddings=length)
        write_tokenizer(source, target, config, scratch)
        return target

    return written


def change(folder, **settings):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


# -------------------------------------------------------------------------------------------------------------------- which, and fits


def test_which_tokenizer(tmp_path, tokenizer_dir):
    shutil.copytree(tokenizer_dir, tmp_path / "run")
    assert find_tokenizer(None, [tmp_path / "run" / "none", tmp_path / "run"]) == tmp_path / "run"
    assert find_tokenizer(None, [tmp_path]) == TOKENIZER
    assert find_tokenizer("none", [tmp_path / "run"]) is None
    assert find_tokenizer(str(tokenizer_dir), [tmp_path / "run"]) == tokenizer_dir
    for folder in (tmp_path, tmp_path / "nowhere", "/dev/null"):
        with pytest.raises(UserError, match="--tokenizer takes a folder"):
            find_tokenizer(str(folder), [])


@pytest.mark.parametrize(
    "rows, fits", [(30522, True), (30528, True), (30592, True), (30720, True), (30521, False), (30523, False), (31000, False)]
)
def test_vocabulary_rows_against_the_tokenizer(rows, fits):
    """Exactly 30,522, or rounded up to a multiple of 8 ... 512."""
    if fits:
        check_rows(30522, rows, "it")
    else:
        with pytest.raises(UserError, match=f"{rows} vocabulary rows, but the tokenizer .* has 30522 tokens .*30522, 30528, 30592, 30720"):
            check_rows(30522, rows, "it")


def test_llama_vocabulary(tmp_path, tokenizer_dir, without_proof, in_this_process):
    """32,064 rows: the bundled tokenizer of 30,522 does not fit; one with 32,003 tokens, rounded up to a multiple of 64, does."""
    model = NeoBERTModel(NeoBERTConfig(vocab_size=32064, hidden_size=64, num_hidden_layers=1, intermediate_size=96, num_attention_heads=1))
    source = save(tmp_path / "run", model.state_dict())
    with pytest.raises(UserError, match="32064 vocabulary rows, but the tokenizer .* has 30522 tokens"):
        convert(source, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tokenizer_dir)
    loaded.add_tokens([f"extra{i}" for i in range(32003 - 30522)])
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / "llama").mkdir(exist_ok=True)
        shutil.copyfile(tokenizer_dir / name, tmp_path / "llama" / name)
    loaded._tokenizer.save(str(tmp_path / "llama" / "tokenizer.json"))
    convert(source, tmp_path / "out", "--tokenizer", tmp_path / "llama")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("extra7") == 30529


@pytest.mark.parametrize("files", [("tokenizer.json",), ("vocab.txt",), ("tokenizer.json", "tokenizer_config.json")])
def test_parts_of_a_tokenizer_are_enough(small, write, in_this_process, files):
    for path in list(small.iterdir()):
        if path.name not in files:
            path.unlink()
    written = AutoTokenizer.from_pretrained(write(small))
    ids = written("nest a b")["input_ids"]
    assert ids == [2, 23, 5, 6, 3], "not what BERT's tokenizer makes of it"


def test_ids_with_gaps_stay(small, write, in_this_process):
    """A vocab.txt counts lines, so that it would give the tokens above a gap other ids; rows are as many as the highest id asks for."""
    backend = json.loads((small / "tokenizer.json").read_text())
    backend["model"]["vocab"]["nest"] = 30
    (small / "tokenizer.json").write_text(json.dumps(backend))
    (small / "vocab.txt").unlink()
    target = write(small, rows=31)
    assert AutoTokenizer.from_pretrained(target)("nest a").input_ids == AutoTokenizer.from_pretrained(small)("nest a").input_ids
    assert AutoTokenizer.from_pretrained(target).convert_tokens_to_ids("nest") == 30 and not (target / "vocab.txt").exists()
    with pytest.raises(UserError, match="has 31 tokens"):
        write(small, rows=24)


def test_a_tokenizer_of_another_kind(tmp_path, write, in_this_process):
    """Byte-level BPE with a vocabulary of 300 tokens: neither vocab.txt nor BERT's class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<mask>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the owl's nest is a nest of the owl"] * 9, trainer)
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>", padding_side="left")
    loaded.save_pretrained(tmp_path / "bpe")
    target = write(tmp_path / "bpe", rows=-(-len(loaded) // 8) * 8)
    written = AutoTokenizer.from_pretrained(target)
    text = "the owl <mask> caf\u00e9"
    assert written(text)["input_ids"] == loaded(text)["input_ids"] and written.mask_token == "<mask>" and written.padding_side == "left"
    assert not (target / "vocab.txt").exists() and written.model_max_length == 128
    assert json.loads((target / "tokenizer_config.json").read_text())["add_prefix_space"] is True, "transformers 4 would leave it out"


# --------------------------------------------------------------------------------------------------------------- a stranger's files


def test_no_code_or_path_of_a_tokenizer_comes_along(tmp_path, tiny_config, tokenizer_dir, without_proof):
    """auto_map would run OTHER/REPO's code at loading."""
    fields = {**tiny_config, "vocab_size": 30522}
    run = save(tmp_path / "run", NeoBERTForMaskedLM(NeoBERTConfig(**fields)).state_dict(), **fields)
    for path in tokenizer_dir.iterdir():
        shutil.copyfile(path, run / path.name)
    change(run, auto_map={"AutoTokenizer": ["other/repo--file.Class"] * 2}, name_or_path="/home/me/secret")
    change(run, custom={"nested": "/home/me"}, chat_template="{{ x }}", model_max_length=None)
    (run / "file.py").write_text("raise SystemExit('ran')")
    (run / "chat_template.jinja").write_text("/home/me")
    assert convert(run, tmp_path / "out") == 0
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    expected = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    assert written == {**expected, "model_max_length": 128}, "a foreign key was copied, or one of ours lost"
    for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        ours, theirs = ((folder / name).read_text() for folder in (tmp_path / "out", tokenizer_dir))
        assert ours == theirs or json.loads(ours) == json.loads(theirs), f"{name} is not what was read"
    assert "home/me" not in "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors")
    assert not {"file.py", "chat_template.jinja"} & {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "merges_file", "added_tokens_file"])
def test_settings_do_not_lead_to_other_files(tmp_path, small, write, in_this_process, file, key):
    """transformers may take `vocab_file` of a settings file before the one that is there: lines of any file would be a published vocabulary."""
    secret = tmp_path / "secret"
    secret.write_text("password\nhunter2\n" + "\n".join(f"line{i}" for i in range(22)))
    (small / "tokenizer.json").unlink()
    settings = json.loads((small / file).read_text()) if (small / file).exists() else {}
    (small / file).write_text(json.dumps(settings | {key: str(secret)}))
    target = write(small)
    assert "hunter2" not in "".join(path.read_text() for path in target.iterdir())
    assert (target / "vocab.txt").read_text() == (small / "vocab.txt").read_text()


def test_the_secret_would_come_along(tmp_path, small):
    """Guards the test above against being vacuous."""
    (tmp_path / "secret").write_text("password\nhunter2\n[UNK]\n")
    (small / "tokenizer.json").unlink()
    # Older versions of the library follow the first one as well.
    change(small, vocab_file=str(tmp_path / "secret"))
    (small / "special_tokens_map.json").write_text(json.dumps({"vocab_file": str(tmp_path / "secret")}))
    assert "hunter2" in AutoTokenizer.from_pretrained(small).get_vocab()


@pytest.mark.parametrize("name", ["merges.txt", "vocab.txt", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"])
@pytest.mark.parametrize("where", ["secret", "nowhere", "itself"])
def test_links_are_not_followed_into_what_is_published(tmp_path, small, write, in_this_process, name, where):
    (tmp_path / "secret").write_text("{}" if name.endswith("json") else "password")
    (small / name).unlink(missing_ok=True)
    (small / name).symlink_to(name if where == "itself" else tmp_path / where)
    with pytest.raises(UserError, match=f"{name} is a link to .*{name if where == 'itself' else where}, and links are not followed"):
        write(small)


def test_a_tokenizer_in_the_cache_of_the_hub_is_read(tmp_path, small, write, in_this_process):
    """Its snapshots are links into the `blobs` of the same repository."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in small.iterdir():
        shutil.copyfile(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert AutoTokenizer.from_pretrained(write(snapshot)).vocab_size == 24
    (blobs / "vocab.txt").unlink()
    (blobs / "vocab.txt").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match="vocab.txt is a link to /etc/hostname"):
        write(snapshot)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_max_length": None},
        {"model_max_length": "long"},
        {"model_max_length": -5},
        {"model_max_length": 1e30},
        {"model_max_length": True},
        {"model_max_length": 10**40},
        {"tokenizer_class": None},
        {"tokenizer_class": ["BertTokenizer"]},
        {"tokenizer_class": "../../evil"},
        {"pad_token": 5, "mask_token": None},
        {"pad_token": {"content": 5}},
        {"cls_token": {"__type": "AddedToken", "content": "[CLS]", "lstrip": False, "special": True}},
        {"added_tokens_decoder": {"x": 1}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"0": {"content": "[PAD]", "special": True}}},
        {"do_lower_case": "maybe" * 100, "padding_side": "up", "truncation_side": ["left"], "strip_accents": 3},
        {"model_input_names": ["input_ids", 5]},
        {"model_input_names": "input_ids"},
        {"extra_special_tokens": 7, "additional_special_tokens": {"a": 1}, "backend": 3, "processor_class": {}},
    ],
    ids=range(19),
)
def test_settings_of_any_type(small, write, in_this_process, settings):
    change(small, **settings)
    written = AutoTokenizer.from_pretrained(write(small))
    assert written("nest a")["input_ids"][1:-1] == [23, 5] and written.model_max_length <= 128


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", "{", "cannot be loaded"),
        ("tokenizer.json", '{"model": {"type": "WordPiece"}}', "cannot be loaded"),
        ("tokenizer.json", "[" * 10**5, "cannot be loaded"),
        ("tokenizer.json", b"\xff", "cannot be loaded"),
        ("tokenizer.json", "", "cannot be loaded"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[" * 10**5, "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"\xff", "not UTF-8"),
        ("tokenizer_config.json", " " * 4_000_001, "more than 4,000,000 bytes"),
        ("special_tokens_map.json", "{]", "not valid JSON"),
        ("tokenizer_config.json", '{"tokenizer_class": "NoSuchTokenizer"}', None),
        ("tokenizer_config.json", "[]", None),
        ("tokenizer_config.json", "5", None),
    ],
    ids=range(13),
)
def test_damaged_files(small, write, in_this_process, name, content, message):
    (small / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if message is None:
        assert write(small).is_dir()
        return
    with pytest.raises(UserError, match=message) as refusal:
        write(small)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 1000


def test_pipes_and_large_files(small, write, in_this_process, monkeypatch):
    monkeypatch.setattr(tokenizer, "_LARGEST", 100)
    with pytest.raises(UserError, match="bytes, which is too many for a tokenizer"):
        write(small)
    (small / "vocab.txt").unlink()
    os.mkfifo(small / "vocab.txt")
    monkeypatch.setattr(tokenizer, "_LARGEST", 10**6)
    with pytest.raises(UserError, match="vocab.txt is not a file, but a pipe"):
        write(small)


def test_no_fast_form(small, write, in_this_process, monkeypatch):
    main = fresh_tokenizer.main

    def slow(source, target, length, texts, answer):
        main(source, target, length, texts, answer)
        with open(answer, "w") as file:
            json.dump({"fast": False, "size": 24}, file)

    monkeypatch.setattr(fresh_tokenizer, "main", slow)
    with pytest.raises(UserError, match="has no fast form"):
        write(small)


def test_the_proof_catches_another_tokenizer(tokenizer_dir, write, in_this_process, monkeypatch):
    written = fresh_tokenizer.write

    def spoiled(loaded, target, max_length):
        written(loaded, target, max_length)
        path = target / "tokenizer_config.json"
        path.write_text(path.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))

    monkeypatch.setattr(fresh_tokenizer, "write", spoiled)
    with pytest.raises(UserError, match="splits text otherwise"):
        write(tokenizer_dir, rows=30522)


# -------------------------------------------------------------------------------------------------------------- the process of its own


def test_in_a_process_of_its_own(small, write, monkeypatch):
    """The real process: it loads and answers; and a panic of the parser is one sentence."""
    monkeypatch.setenv("PYTHONPATH", "")
    assert AutoTokenizer.from_pretrained(write(small)).vocab_size == 24
    (small / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=f"the tokenizer in {small} cannot be loaded: "):
        write(small)


@pytest.mark.parametrize(
    "code, message",
    [
        ("import time; time.sleep(60)", "it fails: not done after 1 seconds"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it fails: the process was ended by SIGSEGV"),
        ("import sys; sys.exit(3)", "it fails: exit code 3"),
        ("raise ValueError('a\\nb\\x1b[2J')", r"it fails: b\\x1b\[2J"),
        ("input()", "it fails: EOFError"),
        ("import os, sys; sys.exit(f'in {os.getcwd()} and {os.environ[\"TMPDIR\"]}')", r"it fails: in (\S+) and \1"),
    ],
    ids=["endless", "crash", "code", "error", "question", "folder"],
)
def test_processes_that_fail(tmp_path, monkeypatch, code, message):
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "script.py").write_text(code)
    with pytest.raises(UserError, match=message):
        fresh.run_fresh(tmp_path / "script.py", scratch=tmp_path, what="it fails", seconds=1 if "sleep" in code else 60)


@pytest.mark.skipif("not sys.platform.startswith('linux')", reason="limits of memory are Linux's")
def test_memory_of_the_process_is_bounded(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(fresh.__file__).rpartition('/')[0]!r}); import fresh_tokenizer as f; f.limit_memory()\n"
    (tmp_path / "script.py").write_text(code + "bytearray(9 << 30)")
    with pytest.raises(UserError, match="it fails: MemoryError"):
        fresh.run_fresh(tmp_path / "script.py", scratch=tmp_path, what="it fails", seconds=60)
    assert torch.zeros(1).item() == 0
