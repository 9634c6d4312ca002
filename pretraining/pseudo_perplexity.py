"""`neobert pseudo-perplexity`: pseudo-perplexity of masked language models against text length (Figure 2 of the paper).

    neobert pseudo-perplexity --model chandar-lab/NeoBERT --text wikimedia/wikipedia --subset 20231101.en --texts 100
    neobert pseudo-perplexity --model my_model --text articles.jsonl --lengths 128 512 2048 8192 --positions exact --yarn off 2

For a text of n tokens (special tokens not counted), each position is masked on its own, -log p(token | rest) is its cross-entropy, and the
pseudo-perplexity is exp of their mean. That is n forwards of length n. With `--positions 64` a random 64 of the n positions, without replacement,
estimate the mean cross-entropy without bias; its standard error is s / sqrt(64) * sqrt(1 - 64 / n).

OUTPUT/pseudo_perplexity.csv gets a row as soon as a text is done, and the same command again continues it. The table and the plot show this run and,
beside it, other models of the CSV that were evaluated alike.
"""

import csv
import hashlib
import io
import logging
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM

from ..common.errors import UserError, one_line, require
from ..common.files import TEXT_LIMIT, read_text, write_text
from ..common.identity import model_digest
from ..common.loading import check_model, check_there, check_vocabulary, choose_device, load_tokenizer, position_limit, text_limit
from ..common.outputs import check_folder, check_result_files
from ..common.runs import locked
from .options import LENGTHS, OPTIONS
from .pseudo_perplexity_report import FIELDS, KEY, comparable_rows, write_summary
from .pseudo_perplexity_texts import make_units, open_texts


# --------------------------------------------------------------------------------------------------------------- arithmetic


def sample_positions(length, count, seed, text):
    """Positions to mask, sorted: all of them, or `count` drawn without replacement by (seed, text)."""
    if count is None or count >= length:
        return np.arange(length)
    digest = hashlib.sha256(f"{seed} {text}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return np.sort(generator.choice(length, size=count, replace=False))


def mean_and_error(values, population):
    """Mean of a sample drawn without replacement from `population` values, and its standard error.

    The error carries the finite-population correction sqrt(1 - n / N): it is 0 when all are there, and nan for a single one of many.
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n >= population:
        return float(values.mean()), 0.0
    error = math.nan if n < 2 else float(values.std(ddof=1) / math.sqrt(n) * math.sqrt(1 - n / population))
    return float(values.mean()), error


def _rows_of_decoder(model, rows, positions):
    """Context: the decoder sees one position of every row, (rows, D), so that no (rows, L, V) logits are made."""
    decoder = model.get_output_embeddings()

    def keep(module, inputs):
        hidden = inputs[0]
        return (hidden[rows, positions],) if hidden.dim() == 3 and len(hidden) == len(rows) else None

    return decoder.register_forward_pre_hook(keep) if isinstance(decoder, torch.nn.Module) else None


@torch.inference_mode()
def masked_cross_entropy(model, token_ids, positions, mask_token_id):
    """-log p(token | all other tokens) at each position, one masked copy of the text a position.

    Args:
        model: a masked language model.
        token_ids: (n, L) token ids: row i is the text that position i belongs to.
        positions: (n,) the position that is masked in row i.
    Returns:
        (n,) float64 array, in nats.
    """
    rows = torch.arange(len(token_ids), device=token_ids.device)
    targets = token_ids[rows, positions]
    masked = token_ids.clone()
    masked[rows, positions] = mask_token_id
    hook = _rows_of_decoder(model, rows, positions)
    try:
        logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits
    finally:
        if hook is not None:
            hook.remove()
    if logits.dim() == 3:
        logits = logits[rows, positions]
    return F.cross_entropy(logits.float(), targets, reduction="none").double().cpu().numpy()


# -------------------------------------------------------------------------------------------------------------------- model


def load_model(given, factor):
    """The masked language model in evaluation mode, with YaRN of `factor` if it is not None.

    Raises:
        UserError: no model, no masked-LM head, or no rotary positions to extend.
    """
    try:
        config = AutoConfig.from_pretrained(given.model, trust_remote_code=given.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"the model {given.model!r} was not loaded: {one_line(error)}") from error
    if factor is not None:
        _set_yarn(config, factor, given)
    more = {"attn_implementation": given.attn_implementation} if given.attn_implementation else {}
    try:
        model, info = AutoModelForMaskedLM.from_pretrained(
            given.model,
            config=config,
            dtype=getattr(torch, given.dtype),
            trust_remote_code=given.trust_remote_code,
            output_loading_info=True,
            **more,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{given.model} is not a masked language model here: {one_line(error)}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"{given.model} has no trained masked-LM head: {missing} are not in its checkpoint, and would be random")
    return model.eval().to(choose_device(given.device))


def _rotary(config):
    """Whether positions are rotary, so that texts may be longer than in training."""
    if getattr(config, "position_embedding_type", "rope") not in ("rope", "rotary"):
        return False
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_scaling", "rope_theta", "global_rope_theta"))


def _set_yarn(config, factor, given):
    """YaRN for a configuration with one set of rotary parameters, under transformers 4 and 5."""
    parameters = getattr(config, "rope_parameters", None)
    nested = isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values())
    if not _rotary(config) or nested or hasattr(config, "global_rope_theta"):
        raise UserError(f"YaRN needs one set of rotary parameters, which {given.model} ({config.model_type}) does not have; use --yarn off")
    original = given.yarn_from or config.max_position_embeddings
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if isinstance(parameters, dict):
        config.rope_parameters = {"rope_theta": parameters.get("rope_theta", 10000.0), **scaling}
    else:
        config.rope_scaling = scaling
    config.max_position_embeddings = max(config.max_position_embeddings, math.ceil(original * factor))


def usual_lengths(context):
    """`LENGTHS` up to the context of a model, which is among them."""
    longest = min(context, LENGTHS[-1])
    return [*(length for length in LENGTHS if length < longest), longest]


# --------------------------------------------------------------------------------------------------------------- evaluation


def read_finished(path, repair=False):
    """Rows of the CSV so far, without a last line that was not written to its end.

    Args:
        repair: whether that line goes from the file as well: only a run that holds the folder's lock knows that nobody is writing it.
    Raises:
        UserError: the file is of another kind.
    """
    text = read_text(path, 256 * TEXT_LIMIT) if path.exists() else ""
    if text and text.splitlines()[0] != ",".join(FIELDS):
        raise UserError(f"{path} is not a pseudo-perplexity CSV of this version; move it away or choose another --output")
    whole = text[: text.rfind("\n") + 1]
    if repair and whole != text:
        write_text(path, whole)
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def _append(path, row):
    if not path.is_file() or not path.stat().st_size:
        write_text(path, ",".join(FIELDS) + "\n")
    with open(path, "a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)


def check_weights(given, revision, rows, path):
    """Raises UserError when the CSV has rows of this name from other weights or with another tokenizer: a name is one model."""
    if any(row["name"] == given.name and row["revision"] != revision for row in rows):
        raise UserError(
            f"{path} holds rows of other weights or another tokenizer under the name {given.name!r}; give this model another --name, "
            "or choose another --output"
        )


def plan(given, tokenizer, units, revision):
    """What is evaluated with every YaRN factor: [(unit, positions, the row's key without its YaRN)]."""
    special = sum(map(len, _special_ids(tokenizer)))
    planned = []
    for unit in units:
        positions = sample_positions(len(unit.ids), given.position_count, given.seed, unit.text)
        key = {
            "name": given.name,
            "revision": revision,
            "dtype": given.dtype,
            "text": unit.text,
            "length": unit.length,
            "tokens": len(unit.ids) + special,
            "positions": len(positions),
            "seed": given.seed if len(positions) < len(unit.ids) else "",
        }
        planned.append((unit, positions, {name: str(value) for name, value in key.items()}))
    return planned


def evaluate(given, model, tokenizer, planned, factor, path, finished):
    """Appends a row to `path` for every planned one that is not among the finished."""
    prefix, suffix = _special_ids(tokenizer)
    keys = {tuple(row[name] for name in KEY) for row in finished}
    yarn = "off" if factor is None else f"{factor:g}" + (f" from {given.yarn_from}" if given.yarn_from else "")
    todo = [(unit, positions, {**key, "yarn": yarn}) for unit, positions, key in planned]
    todo = [entry for entry in todo if tuple(entry[2][name] for name in KEY) not in keys]
    label = f"{given.name}, YaRN {yarn}"
    if not todo:
        logging.getLogger("neobert.pseudo_perplexity").warning("%s: finished already", label)
        return
    with tqdm(total=sum(len(positions) for _, positions, _ in todo), desc=label, unit="position") as progress:
        for unit, positions, key in todo:
            ids = torch.tensor([*prefix, *unit.ids, *suffix], device=model.device)
            batch = max(1, given.batch_tokens // len(ids))
            losses = []
            for start in range(0, len(positions), batch):
                chosen = torch.from_numpy(positions[start : start + batch]).to(model.device) + len(prefix)
                losses.append(masked_cross_entropy(model, ids.expand(len(chosen), -1), chosen, tokenizer.mask_token_id))
                progress.update(len(chosen))
            mean, error = mean_and_error(np.concatenate(losses), len(unit.ids))
            row = {**key, "mean_cross_entropy": f"{mean:.8g}", "standard_error": f"{error:.5g}"}
            row["pseudo_perplexity"] = f"{math.exp(min(mean, 700.0)):.8g}"
            _append(path, row)


def _special_ids(tokenizer):
    """Special tokens before and after a single text."""
    inside = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(ids)) if ids[i : i + len(inside)] == inside)
    return ids[:start], ids[start + len(inside) :]


def main(argv=None):
    """Runs `neobert pseudo-perplexity`; bad input is a UserError before any work."""
    argv = sys.argv[1:] if argv is None else argv
    (given,) = OPTIONS["pseudo-perplexity"].read(argv)
    require("eval", "accelerate", "matplotlib")
    logging.basicConfig(format="%(message)s")
    check_folder(given.output, "output")
    path = Path(given.output) / "pseudo_perplexity.csv"
    finished = read_finished(path)
    check_result_files(given.output, "pseudo-perplexity", finished, *(f"{path.stem}{ending}" for ending in (".json", ".md", ".png")))
    check_model(given.model)
    check_there(given.tokenizer or given.model)
    rows = open_texts(given)
    model = load_model(given, given.yarn_factors[0])
    tokenizer = load_tokenizer(given.tokenizer or given.model, padding=False, trust_remote_code=given.trust_remote_code)
    if tokenizer.mask_token_id is None:
        raise UserError(f"the tokenizer of {given.tokenizer or given.model} has no mask token")
    check_vocabulary(tokenizer, model, given.model)
    revision = model_digest(given.model) + (f" {given.tokenizer}".replace(",", ";") if given.tokenizer else "")
    check_weights(given, revision, finished, path)
    context = position_limit(model.base_model)
    for factor in filter(None, given.yarn_factors[1:]):
        config = AutoConfig.from_pretrained(given.model, trust_remote_code=given.trust_remote_code)
        _set_yarn(config, factor, given)
        context = max(context, config.max_position_embeddings)
    given.lengths = sorted(set(given.lengths or usual_lengths(context)))
    units, texts = make_units(given, rows, tokenizer, None if _rotary(model.config) else text_limit(model, tokenizer))
    planned = plan(given, tokenizer, units, revision)
    with locked(given.output):
        finished = read_finished(path, repair=True)
        check_weights(given, revision, finished, path)
        for i, factor in enumerate(given.yarn_factors):
            model = model if i == 0 else load_model(given, factor)
            evaluate(given, model, tokenizer, planned, factor, path, finished)
        print(write_summary(given.output, comparable_rows(given, read_finished(path), planned, texts), given.title))
    return 0
