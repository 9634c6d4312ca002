"""Test the tokenizer of a converted folder.

The written tokenizer must return the same ids as its source, its size must fit the embedding, and
code that the files refer to must be neither executed nor copied.
"""

import json
import shutil

import pytest
from helpers.conversion_helpers import convert, save
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForMaskedLM
from neobert.common.constants import TOKENIZER
from neobert.common.errors import UserError
from neobert.conversion import tokenizer
from neobert.conversion.tokenizer import check_rows, find_tokenizer, write_tokenizer


@pytest.fixture
def small(tmp_path):
    """Return the directory of a tokenizer with 24 tokens and the files of BERT's tokenizer."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqr", "nest"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    names = ("pad", "unk", "cls", "sep", "mask")
    settings = {f"{name}_token": f"[{name.upper()}]" for name in names}
    settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.backend_tokenizer.to_str())
    return folder


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the tokenizer of a directory to another one.

    The function returns the new directory.
    """

    def written(source, rows=24, length=128):
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        write_tokenizer(source, target, rows, length)
        return target

    return written


def change(folder, **settings):
    """Change settings in the tokenizer_config.json of a directory."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


# ------------------------------------------------------------------------------------------------
# Selection and vocabulary size


def test_precedence_of_tokenizers(tmp_path, tokenizer_dir):
    """Check that `--tokenizer`, the checkpoint and the bundled tokenizer are used in this order."""
    shutil.copytree(tokenizer_dir, tmp_path / "run")
    assert find_tokenizer(None, [tmp_path / "run" / "none", tmp_path / "run"]) == tmp_path / "run"
    assert find_tokenizer(None, [tmp_path]) == TOKENIZER
    assert find_tokenizer("none", [tmp_path / "run"]) is None
    assert find_tokenizer(str(tokenizer_dir), [tmp_path / "run"]) == tokenizer_dir
    for folder in (tmp_path, tmp_path / "nowhere", "/dev/null"):
        with pytest.raises(UserError, match="`--tokenizer` must be a directory with"):
            find_tokenizer(str(folder), [])


@pytest.mark.parametrize("rows", [30522, 30528, 30592, 30720, 30521, 30523, 31000])
def test_embedding_rows_must_fit_the_tokenizer(rows):
    """The embedding has 30,522 rows, or this number rounded up to a multiple of 8, 16, ... 512.

    Other numbers of rows raise an error.
    """
    if rows in (30522, 30528, 30592, 30720):
        check_rows(30522, rows, "it")
        return
    words = f"{rows} vocabulary rows, but the tokenizer .* has 30522 tokens .*30522, 30528, 30592"
    with pytest.raises(UserError, match=words):
        check_rows(30522, rows, "it")


@pytest.mark.parametrize(
    "files", [("tokenizer.json",), ("vocab.txt",), ("tokenizer.json", "tokenizer_config.json")]
)
def test_tokenizer_is_loaded_from_some_of_its_files(small, write, files):
    """Check that a tokenizer is loaded if only some of its files exist."""
    for path in list(small.iterdir()):
        if path.name not in files:
            path.unlink()
    written = AutoTokenizer.from_pretrained(write(small))
    assert written("nest a b")["input_ids"] == [2, 23, 5, 6, 3]


def test_ids_with_gaps_are_kept(small, write):
    """Check that a tokenizer whose ids have gaps keeps them, and is written without a vocab.txt.

    The id of a token in vocab.txt is the number of its line, so the file would change the ids above
    a gap. The number of rows that the embedding needs follows from the largest id.
    """
    backend = json.loads((small / "tokenizer.json").read_text())
    backend["model"]["vocab"]["nest"] = 30
    (small / "tokenizer.json").write_text(json.dumps(backend))
    (small / "vocab.txt").unlink()

    target = write(small, rows=31)

    written, source = (AutoTokenizer.from_pretrained(folder) for folder in (target, small))
    assert written("nest a").input_ids == source("nest a").input_ids
    assert written.convert_tokens_to_ids("nest") == 30 and not (target / "vocab.txt").exists()

    with pytest.raises(UserError, match="has 31 tokens"):
        write(small, rows=24)


def test_byte_level_bpe_tokenizer(tmp_path, write):
    """Check that a byte-level BPE tokenizer is written without a vocab.txt and BERT's class."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<mask>"], initial_alphabet=alphabet
    )
    backend.train_from_iterator(["the owl's nest is a nest of the owl"] * 9, trainer)
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", mask_token="<mask>", padding_side="left"
    )
    loaded.save_pretrained(tmp_path / "bpe")

    # The number of tokens is rounded up to a multiple of 8.
    target = write(tmp_path / "bpe", rows=-(-len(loaded) // 8) * 8)
    written = AutoTokenizer.from_pretrained(target)

    text = "the owl <mask> caf\u00e9"
    assert written(text)["input_ids"] == loaded(text)["input_ids"]
    assert written.mask_token == "<mask>" and written.padding_side == "left"
    assert not (target / "vocab.txt").exists() and written.model_max_length == 128
    # transformers 4 omits this setting when it saves a tokenizer.
    assert json.loads((target / "tokenizer_config.json").read_text())["add_prefix_space"] is True


# ------------------------------------------------------------------------------------------------
# Untrusted files


def test_code_and_paths_of_a_tokenizer_are_not_copied(
    tmp_path, tiny_config, tokenizer_dir, without_proof
):
    """Check that code, paths and chat templates of the source are not copied.

    With `auto_map`, transformers would run the code of another repository when it loads the
    tokenizer.
    """
    fields = {**tiny_config, "vocab_size": 30522}
    run = save(tmp_path / "run", NeoBERTForMaskedLM(NeoBERTConfig(**fields)).state_dict(), **fields)
    for path in tokenizer_dir.iterdir():
        shutil.copyfile(path, run / path.name)
    change(run, auto_map={"AutoTokenizer": ["other/repo--file.Class"] * 2}, name_or_path="/home/me")
    change(run, custom={"nested": "/home/me"}, chat_template="{{ x }}", model_max_length=None)
    (run / "file.py").write_text("raise SystemExit('ran')")
    (run / "chat_template.jinja").write_text("/home/me")

    assert convert(run, tmp_path / "out") == 0

    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    expected = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    assert written == {**expected, "model_max_length": 128}
    for name in ("tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        written_text, source_text = (
            (folder / name).read_text() for folder in (tmp_path / "out", tokenizer_dir)
        )
        assert written_text == source_text or json.loads(written_text) == json.loads(source_text), (
            f"{name} differs from the source"
        )
    for path in (tmp_path / "out").iterdir():
        assert path.suffix == ".safetensors" or "home/me" not in path.read_text()
        assert path.name not in ("file.py", "chat_template.jinja")


@pytest.mark.parametrize(
    "settings, is_read",
    [
        ({"model_max_length": None}, True),
        ({"cls_token": {"__type": "AddedToken", "content": "[CLS]", "special": True}}, True),
        ({"added_tokens_decoder": {"0": {"content": "[PAD]", "special": True}}}, True),
        ({"model_max_length": "long"}, False),
    ],
)
def test_settings_of_unexpected_types(small, write, settings, is_read):
    """Check that settings of an unexpected type are accepted or raise a `UserError`."""
    change(small, **settings)
    if not is_read:
        with pytest.raises(UserError, match=f"the tokenizer in {small} cannot be loaded: "):
            write(small)
        return
    written = AutoTokenizer.from_pretrained(write(small))
    assert written("nest a")["input_ids"][1:-1] == [23, 5] and written.model_max_length <= 128


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", "{", "cannot be loaded"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("special_tokens_map.json", "{]", "cannot be loaded"),
    ],
)
def test_damaged_files(small, write, name, content, message):
    """Check that a damaged file raises an error with a short and printable message."""
    (small / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        write(small)
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_different_tokenization_is_detected(tokenizer_dir, write, monkeypatch):
    """Check that a written tokenizer that splits text differently than its source is detected."""
    original = tokenizer._write

    def write_cased(loaded, target, max_length):
        original(loaded, target, max_length)
        path = target / "tokenizer_config.json"
        path.write_text(path.read_text().replace('"do_lower_case": true', '"do_lower_case": false'))

    monkeypatch.setattr(tokenizer, "_write", write_cased)
    with pytest.raises(UserError, match="splits text differently"):
        write(tokenizer_dir, rows=30522)
