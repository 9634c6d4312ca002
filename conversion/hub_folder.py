"""Writes a folder ready for the Hugging Face Hub, whole or not at all, and proves it by loading it as a user would."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn
from tqdm.auto import tqdm
from transformers import BertTokenizerFast

from ..common.errors import UserError, printable
from ..common.files import write_safetensors
from ..common.loading import ROOT
from ..common.pooling import write_sentence_transformers  # noqa: F401


CODE_FILES = ("configuration_neobert.py", "modeling_neobert.py")
# Where transformers looks for a tokenizer.
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


# ------------------------------------------------------------------------------------------------------------------- weights


def _bytes(tensor):
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write_weights(folder, shapes, dtype, read, max_shard_size):
    """model.safetensors, or shards of at most `max_shard_size` ("5GB" or bytes) with their index; returns one row per file."""
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        split = split_state_dict_into_shards_factory(
            shapes,
            get_storage_size=lambda shape: torch.Size(shape).numel() * dtype.itemsize,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError:
        raise UserError(f"--max-shard-size takes a size as 5GB or 500MB, but {max_shard_size!r} was given.") from None
    with tqdm(total=len(shapes), desc="writing tensors", unit="tensor") as progress:

        def read_one(name):
            tensor = read(name)
            progress.update()
            return tensor

        rows = []
        for file, names in sorted(split.filename_to_tensors.items()):
            layout = {name: (_DTYPE_NAMES[dtype], tuple(shapes[name])) for name in names}
            rows.append(write_safetensors(folder / file, layout, lambda name: [_bytes(read_one(name))], {"format": "pt"}))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return rows


# ------------------------------------------------------------------------------------------------------------ the other files


def write_config(folder, config, architecture, dtype):
    """config.json with the whole auto_map, and the two code files that it points at."""
    config.architectures = [architecture]
    config.dtype = str(dtype).removeprefix("torch.")
    config.to_json_file(folder / "config.json")
    for name in CODE_FILES:
        shutil.copyfile(ROOT / name, folder / name)


# What a tokenizer_config.json may say. Everything else of a stranger's file stays out: `auto_map` names code to run, `name_or_path` a path.
_TOKENIZER_SETTINGS = (
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "do_lower_case",
    "model_input_names",
    "padding_side",
    "strip_accents",
    "tokenize_chinese_chars",
    "truncation_side",
)


def check_tokenizer_files(folder):
    """Raises UserError for a tokenizer file that is a link, which could lead anywhere; those of the Hub's cache lead to its `blobs`."""
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_symlink() and path.resolve().parent != (folder.resolve().parent.parent / "blobs"):
            raise UserError(
                f"{path} is a link to {path.resolve()}, and links are not followed into what may be published; put the file there."
            )


def write_tokenizer(folder, tokenizer, max_length):
    """Writes a loaded tokenizer to the top of the folder, from what was parsed and not by copying: no foreign key or file comes along.

    Args:
        tokenizer: a fast tokenizer, loaded without remote code.
        max_length: tokens that it truncates at, at the latest.
    """
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    is_bert = isinstance(tokenizer, BertTokenizerFast) and type(backend.pre_tokenizer).__name__ == "BertPreTokenizer"
    if is_bert:
        vocabulary = backend.get_vocab(with_added_tokens=False)
        lines = "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.get))
        (folder / "vocab.txt").write_text(lines, encoding="utf-8")
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, (str, AddedToken))}
    own = tokenizer.model_max_length
    settings = {name: tokenizer.init_kwargs[name] for name in _TOKENIZER_SETTINGS if name in tokenizer.init_kwargs}
    settings |= special | {
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "model_max_length": min(own, max_length) if isinstance(own, int) and own > 0 else max_length,
    }
    for name, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


_TASKS = {
    "masked-lm": ("fill-mask", "AutoModelForMaskedLM"),
    "base": ("feature-extraction", "AutoModel"),
    "sequence-classification": ("text-classification", "AutoModelForSequenceClassification"),
}


def usage_lines(name, head, has_tokenizer, sentence_transformers):
    """Python that loads the folder or repository `name`."""
    auto = _TASKS[head][1]
    lines = [f"from transformers import {auto}" + (", AutoTokenizer" if has_tokenizer else "")]
    lines.append(f'model = {auto}.from_pretrained("{name}", trust_remote_code=True)')
    if has_tokenizer:
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)')
    if sentence_transformers:
        lines.append("from sentence_transformers import SentenceTransformer")
        lines.append(f'sentences = SentenceTransformer("{name}", trust_remote_code=True)')
    return lines


def write_model_card(folder, config, head, dtype, rows, name, parameters, has_tokenizer, sentence_transformers, notes):
    """README.md with the metadata that the Hub reads."""
    task = "sentence-similarity" if sentence_transformers else _TASKS[head][0]
    library = "sentence-transformers" if sentence_transformers else "transformers"
    tags = ["neobert", "custom_code", "safetensors", _TASKS[head][0]]
    if sentence_transformers:
        tags += ["sentence-transformers", "feature-extraction"]
    metadata = ["license: mit", f"library_name: {library}", f"pipeline_tag: {task}", "tags:", *(f"- {tag}" for tag in dict.fromkeys(tags))]
    facts = [
        ("parameters", f"{parameters:,}"),
        ("dtype", str(dtype).removeprefix("torch.")),
        ("layers x hidden size", f"{config.num_hidden_layers} x {config.hidden_size}, {config.num_attention_heads} heads"),
        ("feed-forward", f"{config.hidden_act}, inner size {config.ffn_inner_size}"),
        ("norm, positions", f"{config.norm_type}, {config.position_embedding_type}"),
        ("vocabulary", f"{config.vocab_size:,} rows"),
        ("context", f"{config.max_position_embeddings:,} tokens"),
        *((f"sha256 of {row['file']}", f"`{row['sha256']}`") for row in rows),
    ]
    lines = ["---", *metadata, "---", "", f"# {name.rpartition('/')[2]}", ""]
    lines += ["A NeoBERT ([arXiv 2502.19587](https://arxiv.org/abs/2502.19587)) converted from a training checkpoint.", ""]
    lines += ["```python", *usage_lines(name, head, has_tokenizer, sentence_transformers), "```", ""]
    lines += ["The model's code lies in this repository and runs on your machine: read it, and pin what you read with `revision=`.", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts), ""]
    if notes:
        lines += ["Conversion:", "", *(f"- {note}" for note in notes), ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------------- the proof


# Run by a fresh interpreter that does not know this package.
_RELOAD = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
folder, auto, inputs, outputs = sys.argv[1:]
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
model, info = getattr(transformers, auto).from_pretrained(
    folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True)
bad = {kind: sorted(map(str, info.get(kind) or [])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
# Tied weights have no tensor of their own.
bad["missing_keys"] = [k for k in bad["missing_keys"] if not (k == "decoder.weight" and model.config.tie_word_embeddings)]
if auto == "AutoModel":
    bad["unexpected_keys"] = [k for k in bad["unexpected_keys"] if not k.startswith("decoder.")]
if any(bad.values()):
    sys.exit(f"loading it reported {bad}")
if type(model).__module__.split(".")[0] != "transformers_modules":
    sys.exit(f"it loaded {type(model)} and not the code in the folder")
with torch.no_grad():
    result = model.eval()(**load_file(inputs))
save_file({"output": (result.last_hidden_state if auto == "AutoModel" else result.logits).contiguous()}, outputs)
"""

# The same for the tokenizer, in a folder without a model: no code of anybody is allowed to run.
_RELOAD_TOKENIZER = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
print(json.dumps(tokenizer(json.loads(sys.argv[2]))["input_ids"]))
"""
_PROBES = ["The owl's nest, 42 metres up: caf\u00e9!", "[MASK] unaffable \u4f60\u597d", ""]


def _random_tokens(config):
    """Two rows of random tokens, the second with padding."""
    generator = torch.Generator().manual_seed(0)
    length = min(32, config.max_position_embeddings)
    ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - length // 3 :] = 0
    if config.pad_token_id is not None:
        ids[mask == 0] = config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


def streamed_forward(model, read, inputs):
    """Runs a model that was built on the meta device, reading each module's weights only while it runs.

    Args:
        model: built under `torch.device("meta")`.
        read: function of a parameter's name that returns the float32 tensor.
        inputs: keyword arguments of the forward.
    Returns:
        (B, L, D) hidden states or the head's logits, float32.
    """

    def fill(module, prefix):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(read(f"{prefix}{name}"), requires_grad=False)

    def empty(module):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)

    for name, module in model.named_modules():
        if module._parameters:
            module.register_forward_pre_hook(lambda module, args, prefix=f"{name}.": fill(module, prefix))
            module.register_forward_hook(lambda module, args, output: empty(module))
    with torch.no_grad():
        output = model.eval()(**inputs)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def reference_outputs(head, build, read, config):
    """What the source weights answer for random tokens, in float32, with one module's weights in memory at a time.

    Args:
        head: masked-lm, base or sequence-classification.
        build: returns the model on the meta device.
        read: function of a parameter's name that returns the float32 tensor.
        config: of the model.
    Returns:
        outputs at the real tokens (T, D or V), or (B, C) for sequence classification.
    """
    inputs = _random_tokens(config)
    return streamed_forward(build(), read, inputs)[_compared(head, inputs)]


def _compared(head, inputs):
    return slice(None) if head == "sequence-classification" else inputs["attention_mask"].bool()


def _run_fresh(code, *arguments, scratch):
    """Output of Python code in a new process that knows neither this package nor the network; UserError with its last line if it fails."""
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "HF_MODULES_CACHE": f"{scratch}/modules", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=scratch,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise UserError(f"the converted folder does not load, so it was not kept: {printable(reason)}")
    return process.stdout


def verify_tokenizer(folder, tokenizer):
    """Loads the tokenizer that was written as a plain one, in a fresh process, and compares its ids with those of `tokenizer`.

    Raises:
        UserError: it does not load without remote code, or splits text otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="neobert-verify-") as scratch:
        alone = Path(scratch) / "tokenizer"
        alone.mkdir()
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, alone / name)
        written = json.loads(_run_fresh(_RELOAD_TOKENIZER, alone, json.dumps(_PROBES), scratch=scratch))
    if written != tokenizer(_PROBES)["input_ids"]:
        raise UserError("the converted folder's tokenizer splits text otherwise than its source, so it was not kept.")


def verify(folder, head, expected, config):
    """Loads the folder with `AutoModel...from_pretrained(..., trust_remote_code=True)` in a fresh process and compares its outputs.

    Args:
        folder: what was written.
        head, config: as in `reference_outputs`.
        expected: what `reference_outputs` returned for the source weights, rounded to the dtype that was written.
    Returns:
        the outputs of the folder, in float32.
    Raises:
        UserError: it does not load, or its outputs are not those of the source weights.
    """
    inputs = _random_tokens(config)
    with tempfile.TemporaryDirectory(prefix="neobert-verify-") as scratch:
        given, answered = Path(scratch) / "inputs.safetensors", Path(scratch) / "outputs.safetensors"
        save_file(inputs, given)
        _run_fresh(_RELOAD, folder.resolve(), _TASKS[head][1], given, answered, scratch=scratch)
        output = load_file(answered)["output"][_compared(head, inputs)]
    difference = (output - expected).abs().max().item()
    if not difference <= 1e-5 * max(expected.abs().max().item(), 1.0):
        raise UserError(f"the converted folder's outputs differ from the source's by {difference:.2e}, so it was not kept.")
    return output
