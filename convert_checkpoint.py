"""Turns a raw training checkpoint into a Hub repository: `python convert_checkpoint.py CHECKPOINT OUTPUT`, or `neobert convert`.

The steps: find and list the tensors (checkpoint_readers.py), work out and check the architecture, write the folder and prove it
(hub_folder.py), push it if asked to. Code in a checkpoint is never run; the output is whole or absent.
"""

import argparse
import errno
import importlib.util
import inspect
import os
import re
import shutil
import sys
from pathlib import Path


if not __package__:
    # Run from a bare checkout: the folder of this file is the package `neobert`.
    _here = Path(__file__).resolve().parent
    _spec = importlib.util.spec_from_file_location("neobert", _here / "__init__.py", submodule_search_locations=[str(_here)])
    sys.modules["neobert"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["neobert"])
    __package__ = "neobert"

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from .common.errors import UserError, listed
from .common.files import check_apart, check_replaceable, new_folder, recover
from .common.loading import TOKENIZER
from .configuration_neobert import NeoBERTConfig
from .conversion.hub_folder import (
    TOKENIZER_FILES,
    check_tokenizer_files,
    reference_outputs,
    usage_lines,
    verify,
    verify_tokenizer,
    write_config,
    write_model_card,
    write_sentence_transformers,
    write_tokenizer,
    write_weights,
)
from .conversion.locate import find_config, open_checkpoint, read_config
from .modeling_neobert import NeoBERTForMaskedLM, NeoBERTForSequenceClassification, NeoBERTModel


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# --head: (class, published name, the tensors beside the backbone)
HEADS = {
    "masked-lm": (NeoBERTForMaskedLM, "NeoBERTLMHead", ("decoder.",)),
    "base": (NeoBERTModel, "NeoBERT", ()),
    "sequence-classification": (NeoBERTForSequenceClassification, "NeoBERTForSequenceClassification", ("dense.", "classifier.")),
}
_HEAD_TENSORS = ("decoder.", "dense.", "classifier.", "qa_outputs.")
CONFIG_FIELDS = (set(inspect.signature(NeoBERTConfig.__init__).parameters) - {"self", "kwargs"}) | {
    *("max_length", "rope", "rms_norm", "dropout", "dropout_prob", "ngpt"),
    *("num_labels", "id2label", "label2id", "problem_type"),
}
# A vocabulary may be the tokenizer's size rounded up to one of these, as training on GPUs likes it.
_VOCABULARY_MULTIPLES = (8, 16, 32, 64, 128, 256, 512)


# ------------------------------------------------------------------------------------------------------------- the architecture


def derived_fields(tensors):
    """Configuration fields that follow from the tensors' names and shapes.

    Args:
        tensors: {published masked-LM name: anything with a `shape`}.
    Returns:
        dict of fields; `num_attention_heads` only where the hidden size is a multiple of 64, the published head size.
    Raises:
        UserError: no token embedding, or a feed-forward that no `intermediate_size` gives.
    """
    embedding = tensors.get("model.encoder.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"the checkpoint holds no token embedding (model.encoder.weight); it holds {listed(tensors, 8)}.")
    vocabulary, hidden = embedding.shape
    layers = {int(match.group(1)) for name in tensors if (match := re.match(r"model\.transformer_encoder\.(\d+)\.", name))}
    if not layers:
        raise UserError("the checkpoint holds no transformer layers (model.transformer_encoder.0...).")
    fields = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": max(layers) + 1}
    if hidden % 64 == 0:
        fields["num_attention_heads"] = hidden // 64
    fields["norm_type"] = "layer" if "model.layer_norm.bias" in tensors else "rms"
    positions = tensors.get("model.positional_embedding.weight")
    fields["position_embedding_type"] = "rope" if positions is None else "learned"
    if positions is not None:
        # Row 0 is padding.
        fields["max_position_embeddings"] = positions.shape[0] - 1
    block = f"model.transformer_encoder.{min(layers)}.ffn."
    if f"{block}w12.weight" in tensors:
        inner = tensors[f"{block}w12.weight"].shape[0] // 2
        fields["hidden_act"] = "swiglu"
        # inner = 8 * ceil(int(2 * intermediate_size / 3) / 8): several sizes give it, this one without rounding.
        fields["intermediate_size"] = 3 * inner // 2
        if inner % 8:
            raise UserError(f"{block}w12.weight has {2 * inner} rows, but SwiGLU's inner size is a multiple of 8, so rows of 16.")
    elif f"{block}0.weight" in tensors:
        fields["hidden_act"], fields["intermediate_size"] = "gelu", tensors[f"{block}0.weight"].shape[0]
    else:
        raise UserError(f"the checkpoint holds no feed-forward of a NeoBERT ({block}w12.weight, or {block}0.weight).")
    if "classifier.weight" in tensors:
        fields["num_labels"] = tensors["classifier.weight"].shape[0]
    return fields


# Other spellings under which a configuration may already say it.
_SAME = {
    "norm_type": ("rms_norm",),
    "position_embedding_type": ("rope",),
    "max_position_embeddings": ("max_length",),
    "num_labels": ("id2label",),
}


def work_out_config(tensors, given, head):
    """The configuration: what a file says, and what it leaves open from the shapes.

    Returns:
        NeoBERTConfig, list of notes on what was derived.
    Raises:
        UserError: the heads are not given and do not follow; a value that is not allowed.
    """
    derived = derived_fields(tensors)
    if head != "sequence-classification":
        derived.pop("num_labels", None)
        given = {name: value for name, value in given.items() if name not in ("num_labels", "id2label", "label2id", "problem_type")}
    if "num_attention_heads" not in given and "num_attention_heads" not in derived:
        raise UserError(
            f"the number of attention heads does not follow from the shapes (hidden size {derived['hidden_size']} is no multiple of 64): "
            "give it with --config, a file with the line 'num_attention_heads: N'."
        )
    filled = {
        name: value for name, value in derived.items() if not any(given.get(other) is not None for other in (name, *_SAME.get(name, ())))
    }
    notes = []
    if filled:
        notes.append("derived from the tensors: " + ", ".join(f"{name} {value}" for name, value in filled.items()))
    if "num_attention_heads" in filled:
        notes.append("num_attention_heads is the published head size of 64, which shapes cannot prove; --config overrides it")
    defaults = [name for name in ("norm_eps", "max_position_embeddings") if not {name, *_SAME.get(name, ())} & {*given, *filled}]
    whole_numbers = {name: int(v) if isinstance(v, float) and v == int(v) and name != "norm_eps" else v for name, v in given.items()}
    try:
        config = NeoBERTConfig(**(filled | whole_numbers))
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from None
    if defaults:
        notes.append("not visible in the tensors, so the default: " + ", ".join(f"{name} {getattr(config, name)}" for name in defaults))
    return config, notes


def choose_head(tensors, wanted):
    """The head to write, and the tensors without those of other heads; and what was left out."""
    has_decoder, has_dense, has_output, answers = (any(name.startswith(prefix) for name in tensors) for prefix in _HEAD_TENSORS)
    has_classifier = has_dense or has_output
    if wanted is None:
        if answers or (has_output and not has_dense):
            other = "question answering" if answers else "token classification"
            raise UserError(
                f"the checkpoint's head is one of {other}, which is not converted: load a folder of save_pretrained as it is, or give --head base "
                "for the backbone alone."
            )
        if has_decoder and has_classifier:
            raise UserError("the checkpoint holds both a decoder and a classifier: choose --head masked-lm or sequence-classification.")
        wanted = "masked-lm" if has_decoder else "sequence-classification" if has_classifier else "base"
        return wanted, tensors, []
    other = [name for name in tensors if name.startswith(_HEAD_TENSORS) and not name.startswith(HEADS[wanted][2] or ("-",))]
    notes = [f"left out for --head {wanted}: {listed(sorted(other))}"] if other else []
    return wanted, {name: tensor for name, tensor in tensors.items() if name not in other}, notes


def decide_tying(tensors, given, head):
    """Whether decoder and embedding are one tensor: (tied, notes); from the configuration, the names, and shared memory."""
    said = given.get("tie_word_embeddings")
    decoder, embedding = tensors.get("decoder.weight"), tensors.get("model.encoder.weight")
    if head != "masked-lm" or embedding is None:
        return bool(said) and head == "masked-lm", []
    if decoder is None:
        tied = "decoder.bias" in tensors and said is not False
        return tied, ["tied decoder: the checkpoint holds decoder.bias but no decoder.weight"] if tied and not said else []
    if said:
        if tuple(decoder.shape) != tuple(embedding.shape) or not torch.equal(decoder.read(), embedding.read()):
            raise UserError("the configuration says tie_word_embeddings, but decoder.weight and model.encoder.weight differ.")
        return True, []
    if said is None and decoder.storage is not None and decoder.storage == embedding.storage:
        return True, ["tied decoder: decoder.weight and model.encoder.weight are one tensor in the checkpoint"]
    return False, []


def check_tensors(tensors, expected):
    """Compares names and shapes with those of the model that the configuration describes.

    Args:
        tensors: {name: anything with a `shape` and `dtype`}.
        expected: {name: shape}.
    Raises:
        UserError: missing, unexpected, of a wrong shape or no floating-point numbers; every name is listed.
    """
    missing, unexpected = [n for n in expected if n not in tensors], [n for n in tensors if n not in expected]
    if missing or unexpected:
        parts = [f"{kind} tensors: {listed(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
        raise UserError(f"the checkpoint does not fit its configuration; {'; '.join(parts)}.")
    shapes = {name: tuple(tensors[name].shape) for name in expected}
    wrong = [f"{name} is {shapes[name]} instead of {tuple(expected[name])}" for name in expected if shapes[name] != tuple(expected[name])]
    if wrong:
        raise UserError(f"tensors of the wrong shape for the configuration: {listed(wrong)}.")
    whole = [f"{n} ({tensors[n].dtype})" for n in expected if not tensors[n].dtype.is_floating_point]
    if whole:
        raise UserError(f"these weights are not floating-point numbers: {listed(whole)}.")


def check_values(tensors, dtype):
    """Refuses NaN, infinity, and what the new dtype cannot hold. One pass over all tensors."""
    broken, too_large = [], []
    for name, tensor in tqdm(tensors.items(), desc="checking tensors", unit="tensor"):
        low, high = (bound.item() for bound in tensor.read().detach().aminmax())
        if not (torch.isfinite(torch.tensor([low, high]))).all():
            broken.append(name)
        elif max(-low, high) > torch.finfo(dtype).max:
            too_large.append(name)
    if broken:
        raise UserError(f"weights that are NaN or infinite: {listed(broken)}.")
    if too_large:
        raise UserError(f"weights beyond the range of {str(dtype).removeprefix('torch.')}: {listed(too_large)}; use --dtype bfloat16.")


# --------------------------------------------------------------------------------------------------------- tokenizer and output


def find_tokenizer(argument, folders, rows):
    """The tokenizer that goes with `rows` of embedding, loaded without remote code; or None for "none".

    Raises:
        UserError: links among its files; not loadable; or its size is neither `rows` nor comes to `rows` when rounded up to a multiple of 8 ... 512.
    """
    if argument == "none":
        return None
    if argument is not None:
        folder = Path(argument)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(f"--tokenizer takes a folder with {listed(TOKENIZER_FILES[:2])} ..., or none, but {argument} was given.")
    else:
        folder = next((f for f in folders if any((f / name).is_file() for name in ("tokenizer.json", "vocab.txt"))), TOKENIZER)
    check_tokenizer_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        size = max(tokenizer.get_vocab().values()) + 1
    except Exception as error:  # a damaged tokenizer fails in many ways
        raise UserError(f"the tokenizer in {folder} cannot be loaded ({str(error).splitlines()[0][:200]}).") from None
    allowed = sorted({size, *(-(-size // multiple) * multiple for multiple in _VOCABULARY_MULTIPLES)})
    if rows not in allowed:
        raise UserError(
            f"the checkpoint has {rows} vocabulary rows, but the tokenizer in {folder} has {size} tokens (which allows {listed(allowed)} "
            "rows): give the right one with --tokenizer DIR, or --tokenizer none."
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer in {folder} has no fast form (tokenizer.json), which the Hub folder needs; give another with --tokenizer DIR."
        )
    return tokenizer


def check_output(output, checkpoint, force):
    """Refuses an output that exists (without --force), that another program wrote or the user changed, or that touches the checkpoint."""
    check_apart(output, checkpoint)
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"the output {output} exists and is a file; choose another name.")
    if any(output.iterdir()):
        if not force:
            raise UserError(f"the output folder {output} exists; choose another one, or replace it with --force.")
        check_replaceable(output, "convert")


def check_space(parent, needed):
    existing = next(folder for folder in (parent, *parent.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(f"no space: {needed / 1e9:.2f} GB are needed at {parent}, but {free / 1e9:.2f} GB are free.")


# ------------------------------------------------------------------------------------------------------------------------ push


def _sentence(error):
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def check_push(repo):
    """Before any work: a well-formed name, a token, and a Hub that answers."""
    import huggingface_hub
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub takes USER/NAME, but {repo!r} was given ({_sentence(error)}).") from None
    if not huggingface_hub.get_token():
        raise UserError("--push-to-hub needs a token: run 'hf auth login', or set HF_TOKEN.")
    try:
        huggingface_hub.HfApi().whoami()
    except Exception as error:  # requests, httpx and the Hub's own errors
        raise UserError(f"--push-to-hub: the Hub cannot be reached or refuses the token ({_sentence(error)}).") from None


def push(folder, repo, private, revision):
    """Creates the repository (and branch) if needed and uploads the folder; returns the address of the commit."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        message = "Convert the training checkpoint"
        return str(api.upload_folder(repo_id=repo, folder_path=str(folder), revision=revision, commit_message=message))
    except Exception as error:  # requests, httpx and the Hub's own errors
        raise UserError(
            f"{folder} is written, but uploading it to {repo} failed ({_sentence(error)}); later: hf upload {repo} {folder}"
        ) from None


# ------------------------------------------------------------------------------------------------------------------ command line


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (--help lists the options)")


def _step(text):
    if text != "latest" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"a number or latest, but {text!r} was given")
    return text


def parse(argv):
    parser = _Parser(prog="convert_checkpoint.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="file, folder of a step, or folder of a run")
    add("output", type=Path, metavar="OUTPUT", help="folder to write; it must not exist")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="JSON, YAML or Hydra file, or a part of one; default: beside the checkpoint, then the shapes",
    )
    add("--step", type=_step, metavar="N|latest", help="which step of a run (default: latest)")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's own; float32 if it mixes several")
    add("--head", choices=HEADS, help="default: what the checkpoint has")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file (default: 5GB)")
    add("--tokenizer", metavar="DIR|none", help="default: the files beside the checkpoint, then the BERT uncased tokenizer")
    add("--sentence-transformers", action="store_true", help="also write modules.json with mean pooling")
    add("--force", action="store_true", help="replace a converted model that is there already")
    add("--push-to-hub", metavar="REPO", help="upload to USER/NAME afterwards")
    add("--private", action="store_true", help="create that repository private")
    add("--revision", metavar="NAME", help="branch to upload to")
    arguments = parser.parse_args(argv)
    if not arguments.push_to_hub and (arguments.private or arguments.revision):
        raise UserError("--private and --revision go with --push-to-hub REPO.")
    if arguments.sentence_transformers and arguments.tokenizer == "none":
        raise UserError("--sentence-transformers needs a tokenizer, but --tokenizer none was given.")
    if arguments.sentence_transformers and arguments.head == "sequence-classification":
        raise UserError("--sentence-transformers goes with --head masked-lm or base.")
    return arguments


def convert(arguments):
    """Does what the parsed command line asks for; returns the path of the folder.

    Raises:
        UserError: anything refused, one sentence; nothing was written then.
    """
    output = Path(os.path.abspath(arguments.output))
    recover(output, "convert")
    check_output(output, arguments.checkpoint, arguments.force)
    if arguments.push_to_hub:
        check_push(arguments.push_to_hub)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.step)
    check_apart(output, checkpoint.path)
    print(f"{checkpoint.path}: {checkpoint.format}, {len(checkpoint.tensors)} tensors")
    if arguments.config:
        config_path, given = arguments.config, read_config(arguments.config, CONFIG_FIELDS)
    else:
        config_path, given = find_config(checkpoint.folders, CONFIG_FIELDS)
    notes = [f"read from {checkpoint.format}", *checkpoint.notes]
    notes.append(f"configuration from {config_path.name}" if config_path else "no configuration beside the checkpoint")

    head, tensors, left_out = choose_head(checkpoint.tensors, arguments.head)
    tied, tying = decide_tying(tensors, given, head)
    config, derived = work_out_config(tensors, {**given, "tie_word_embeddings": tied}, head)
    notes += left_out + tying + derived
    for note in notes[1:]:
        print(f"  {note}")
    model_class, architecture, _ = HEADS[head]

    def build():
        with torch.device("meta"):
            return model_class(config)

    # NeoBERTModel's own names have no `model.`.
    prefix = "model." if head == "base" else ""
    expected = {f"{prefix}{name}": tuple(value.shape) for name, value in build().state_dict().items()}
    if tied:
        expected.pop("decoder.weight", None)
        tensors.pop("decoder.weight", None)
    check_tensors(tensors, expected)
    tokenizer = find_tokenizer(arguments.tokenizer, checkpoint.folders, config.vocab_size)
    own = {tensor.dtype for tensor in tensors.values()}
    dtype = DTYPES[arguments.dtype] if arguments.dtype else own.pop() if len(own) == 1 else torch.float32
    dtype = dtype if dtype in DTYPES.values() else torch.float32
    parameters = sum(torch.Size(shape).numel() for shape in expected.values())
    check_space(output.parent, parameters * dtype.itemsize + 10_000_000)
    check_values(tensors, dtype)

    def source(name):
        name = "model.encoder.weight" if tied and name == "decoder.weight" else f"{prefix}{name}"
        return tensors[name].read()

    def written(name):
        return source(name).detach().to(dtype)

    def exact(name):
        return source(name).detach().to(torch.float32)

    exactly_written = all(tensor.dtype == dtype or dtype == torch.float32 for tensor in tensors.values())
    rounded = exact if exactly_written else lambda name: written(name).to(torch.float32)
    shapes = {name.removeprefix(prefix): shape for name, shape in expected.items()}
    name = arguments.push_to_hub or arguments.output.name
    pooled = arguments.sentence_transformers
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with new_folder(output, "convert", replace=arguments.force) as folder:
            write_config(folder, config, architecture, dtype)
            if tokenizer is not None:
                write_tokenizer(folder, tokenizer, config.max_position_embeddings)
            if pooled:
                write_sentence_transformers(folder, config.hidden_size, config.max_position_embeddings)
            rows = write_weights(folder, shapes, dtype, written, arguments.max_shard_size)
            write_model_card(folder, config, head, dtype, rows, name, parameters, tokenizer is not None, pooled, notes)
            expected = reference_outputs(head, build, exact, config)
            expected_rounded = expected if rounded is exact else reference_outputs(head, build, rounded, config)
            # Unmaps the checkpoint before a second process loads the result.
            tensors.clear()
            checkpoint.tensors.clear()
            if tokenizer is not None:
                verify_tokenizer(folder, tokenizer)
            outputs = verify(folder, head, expected_rounded, config)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left at {output.parent} while writing; nothing was kept.") from None
        raise UserError(f"{output} cannot be written ({error.strerror or error}); nothing was kept.") from None

    report(rows, dtype, parameters, outputs, expected_rounded, expected)
    print("use it:\n" + "\n".join(f"  {line}" for line in usage_lines(str(arguments.output), head, tokenizer is not None, pooled)))
    if arguments.push_to_hub:
        print(f"uploaded: {push(output, arguments.push_to_hub, arguments.private, arguments.revision)}")
    return output


def report(rows, dtype, parameters, outputs, expected_rounded, expected):
    """The table of what was written and how far its outputs are from the source's."""
    difference, rounding = ((outputs - other).abs().max().item() for other in (expected_rounded, expected))
    table = [("tensors", f"{sum(row['tensors'] for row in rows)}"), ("parameters", f"{parameters:,}")]
    table += [("dtype", str(dtype).removeprefix("torch.")), ("bytes", f"{sum(row['bytes'] for row in rows):,}")]
    table += [(f"sha256 {row['file']}", row["sha256"]) for row in rows]
    table += [("largest difference", f"{difference:.1e} (largest output {expected.abs().max().item():.3g})")]
    if expected is not expected_rounded:
        table += [
            ("with rounding", f"{rounding:.1e} from the source weights before they were rounded to {str(dtype).removeprefix('torch.')}")
        ]
    width = max(len(key) for key, _ in table)
    print("\n".join(f"{key:<{width}}  {value}" for key, value in table))


def main(argv=None):
    """`neobert convert`. Raises UserError for bad input, which the command line turns into one sentence and exit code 2."""
    convert(parse(argv))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, ImportError) as error:
        print(f"convert_checkpoint.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("convert_checkpoint.py: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
