"""Run by tokenizer.py in a process of its own, with its memory bounded: loads a stranger's tokenizer from a folder of plain files and writes
it anew, from what was parsed and not by copying.

Arguments: the folder, the folder to write, the longest text in tokens, texts to split as JSON, the JSON file for the answer.
"""

import json
import sys
from pathlib import Path


MEMORY = 8 << 30
# What a tokenizer_config.json may say beside its class and special tokens.
SETTINGS = (
    *("add_prefix_space", "clean_up_tokenization_spaces", "do_lower_case", "model_input_names", "padding_side", "strip_accents"),
    *("tokenize_chinese_chars", "truncation_side"),
)


def limit_memory():
    """A text that a normaliser makes longer and longer must not take the machine's memory."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def write(tokenizer, target, max_length):
    """Writes a loaded fast tokenizer to the folder `target`; it truncates at `max_length` tokens at the latest."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import BertTokenizerFast

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    (target / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    words = sorted((number, word) for word, number in backend.get_vocab(with_added_tokens=False).items())
    in_lines = [number for number, _ in words] == list(range(len(words)))  # vocab.txt has a token's id as the number of its line
    is_bert = isinstance(tokenizer, BertTokenizerFast) and type(backend.pre_tokenizer).__name__ == "BertPreTokenizer" and in_lines
    if is_bert:
        (target / "vocab.txt").write_text("".join(f"{word}\n" for _, word in words), encoding="utf-8")
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, (str, AddedToken))}
    own = tokenizer.model_max_length
    settings = {name: tokenizer.init_kwargs[name] for name in SETTINGS if name in tokenizer.init_kwargs}
    # Version 4 takes the space before a text from here, and where nothing is said changes tokenizer.json's; as in common/loading.py.
    words = json.loads(backend.to_str())["pre_tokenizer"] or {}
    settings |= {name: words[name] for name in ("add_prefix_space",) if name in words}
    settings |= special | {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "model_max_length": min(own, max_length) if isinstance(own, int) and own > 0 else max_length,
    }
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (target / name).write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def main(source, target, max_length, texts, answer):
    limit_memory()
    from transformers import AutoTokenizer

    texts = json.loads(texts)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    said = {"fast": tokenizer.is_fast, "size": max(tokenizer.get_vocab().values()) + 1}
    if tokenizer.is_fast:
        write(tokenizer, Path(target), int(max_length))
        written = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
        said |= {"ids": tokenizer(texts)["input_ids"], "written_ids": written(texts)["input_ids"]}
    Path(answer).write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
