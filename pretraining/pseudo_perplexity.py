"""`neobert pseudo-perplexity`: pseudo-perplexity of masked language models against text length
(Figure 2 of the paper).

    neobert pseudo-perplexity --model chandar-lab/NeoBERT --text wikimedia/wikipedia \\
        --subset 20231101.en --texts 100
    neobert pseudo-perplexity --model my_model --text articles.jsonl \\
        --lengths 128 512 2048 --positions exact --yarn off 2

For a text of n tokens (special tokens not counted), each position is masked on its own, -log
p(token | rest) is its cross-entropy, and the pseudo-perplexity is exp of their mean. That is n
forwards of length n. With `--positions 64` a random 64 of the n positions, without replacement,
estimate the mean cross-entropy without bias; its standard error is s / sqrt(64) * sqrt(1 - 64 / n).

OUTPUT/pseudo_perplexity.csv gets a row as soon as a text is done, and the same command again
continues it. A row holds the settings that it was measured with. The table and the plot show the
rows with the settings of this run.
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

from ..common.errors import UserError
from ..common.files import TEXT_LIMIT, read_text, write_text
from ..common.identity import model_digest
from ..common.loading import (
    check_model,
    check_there,
    check_vocabulary,
    load_tokenizer,
    position_limit,
    text_limit,
)
from ..common.outputs import check_folder, check_result_files
from ..common.runs import locked
from .options import OPTIONS
from .pseudo_perplexity_model import is_rotary, load_config, load_model
from .pseudo_perplexity_report import write_summary
from .pseudo_perplexity_texts import make_units, usual_lengths
from .sources import load_rows, parse_sources


logger = logging.getLogger("neobert.pseudo_perplexity")
# What a row of the CSV is known by: the model, the settings, the text at one length.
SETTINGS = ("dtype", "bucketing", "sampled", "seed")
KEY = ("name", "revision", "yarn", *SETTINGS, "text", "length", "tokens", "positions")
FIELDS = (*KEY, "mean_cross_entropy", "standard_error", "pseudo_perplexity")


# ------------------------------------------------------------------------------------------------
# arithmetic


def sample_positions(length, count, seed, text):
    """Positions to mask, sorted: all of them, or `count` drawn without replacement by (seed,
    text)."""
    if count is None or count >= length:
        return np.arange(length)
    digest = hashlib.sha256(f"{seed} {text}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return np.sort(generator.choice(length, size=count, replace=False))


def mean_and_error(values, population):
    """Mean of a sample drawn without replacement from `population` values, and its standard error.

    The error carries the finite-population correction sqrt(1 - n / N): it is 0 when all are there,
    and nan for a single one of many.
    """
    values = np.asarray(values, dtype=np.float64)
    n = len(values)
    if n >= population:
        return float(values.mean()), 0.0
    error = (
        math.nan
        if n < 2
        else float(values.std(ddof=1) / math.sqrt(n) * math.sqrt(1 - n / population))
    )
    return float(values.mean()), error


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

    def keep(module, inputs):
        """The decoder gets the masked position of every row, (n, D), so that no (n, L, V) logits
        are made."""
        hidden = inputs[0]
        return (
            (hidden[rows, positions],) if hidden.dim() == 3 and len(hidden) == len(rows) else None
        )

    decoder = model.get_output_embeddings()
    hook = decoder.register_forward_pre_hook(keep) if isinstance(decoder, torch.nn.Module) else None
    try:
        logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits
    finally:
        if hook is not None:
            hook.remove()
    if logits.dim() == 3:
        logits = logits[rows, positions]
    return F.cross_entropy(logits.float(), targets, reduction="none").double().cpu().numpy()


# ------------------------------------------------------------------------------------------------
# evaluation


def read_finished(path):
    """Rows of the CSV, without a last line that a killed run left unfinished. UserError: the file
    is of another kind."""
    text = read_text(path, 256 * TEXT_LIMIT) if path.exists() else ""
    if text and text.splitlines()[0] != ",".join(FIELDS):
        raise UserError(
            f"{path} is not a pseudo-perplexity CSV of this version; move it away or choose "
            "another --output"
        )
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))


def _csv_text(rows):
    text = io.StringIO(newline="")
    csv.DictWriter(text, FIELDS, lineterminator="\n").writerows(rows)
    return text.getvalue()


def evaluate(given, model, tokenizer, units, factor, revision, path):
    """Appends a row to `path` for every unit that has none yet."""
    prefix, suffix = _special_ids(tokenizer)
    yarn = (
        "off"
        if factor is None
        else f"{factor:g}" + (f" from {given.yarn_from}" if given.yarn_from else "")
    )
    known = {"name": given.name, "revision": revision, "yarn": yarn, **settings(given)}
    finished = {tuple(row[name] for name in KEY) for row in read_finished(path)}
    todo = []
    for unit in units:
        positions = sample_positions(len(unit.ids), given.position_count, given.seed, unit.text)
        ids = [*prefix, *unit.ids, *suffix]
        row = {
            **known,
            "text": unit.text,
            "length": unit.length,
            "tokens": len(ids),
            "positions": len(positions),
        }
        if tuple(str(row[name]) for name in KEY) not in finished:
            todo.append((row, ids, positions))
    with tqdm(
        total=sum(len(positions) for *_, positions in todo),
        desc=f"{given.name}, YaRN {yarn}",
        unit="position",
    ) as progress:
        for row, ids, positions in todo:
            ids, losses = torch.tensor(ids, device=model.device), []
            for chosen in (
                torch.from_numpy(positions + len(prefix))
                .to(model.device)
                .split(max(1, given.batch_tokens // len(ids)))
            ):
                losses.append(
                    masked_cross_entropy(
                        model, ids.expand(len(chosen), -1), chosen, tokenizer.mask_token_id
                    )
                )
                progress.update(len(chosen))
            mean, error = mean_and_error(
                np.concatenate(losses), len(ids) - len(prefix) - len(suffix)
            )
            row |= {"mean_cross_entropy": f"{mean:.8g}", "standard_error": f"{error:.5g}"}
            row["pseudo_perplexity"] = f"{math.exp(min(mean, 700.0)):.8g}"
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(_csv_text([row]))


def _special_ids(tokenizer):
    """Special tokens before and after a single text."""
    inside = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(ids)) if ids[i : i + len(inside)] == inside)
    return ids[:start], ids[start + len(inside) :]


def settings(given):
    """`SETTINGS` as a row of the CSV holds them: rows with equal ones compare. Own lengths depend
    on all buckets."""
    bucketing = "cut" if given.bucketing == "cut" else " ".join(map(str, ["own", *given.lengths]))
    return dict(zip(SETTINGS, (given.dtype, bucketing, given.positions, str(given.seed))))


def rows_to_show(given, units, rows):
    """Those of `rows` that have the settings of this run, a text and a length of it; models that
    have none are named in a warning."""
    asked = settings(given).items()
    texts = {unit.text for unit in units}
    lengths = set(map(str, given.lengths))
    shown = [
        row
        for row in rows
        if asked <= row.items() and row["text"] in texts and row["length"] in lengths
    ]
    if left := sorted({row["name"] for row in rows} - {row["name"] for row in shown}):
        logger.warning("not in this table, because of other texts or settings: %s", ", ".join(left))
    return shown


def main(argv=None):
    """Runs `neobert pseudo-perplexity`; bad input is a UserError before any work."""
    (given,) = OPTIONS["pseudo-perplexity"].read(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(message)s")
    check_folder(given.output, "output")
    path = Path(given.output) / "pseudo_perplexity.csv"
    check_result_files(
        given.output,
        "pseudo-perplexity",
        read_finished(path),
        *(path.stem + end for end in (".json", ".md", ".png")),
    )
    check_model(given.model)
    check_there(given.tokenizer or given.model)
    texts = load_rows(parse_sources(given.text, given.subset, given.split, given.column))
    model = load_model(given, given.yarn_factors[0])
    tokenizer = load_tokenizer(
        given.tokenizer or given.model, padding=False, trust_remote_code=given.trust_remote_code
    )
    if tokenizer.mask_token_id is None:
        raise UserError(f"the tokenizer of {given.tokenizer or given.model} has no mask token")
    check_vocabulary(tokenizer, model, given.model)
    contexts = [
        load_config(given, factor).max_position_embeddings
        for factor in given.yarn_factors
        if factor is not None
    ]
    given.lengths = sorted(
        set(given.lengths or usual_lengths(max([position_limit(model.base_model), *contexts])))
    )
    units = make_units(
        given, texts, tokenizer, None if is_rotary(model.config) else text_limit(model, tokenizer)
    )
    revision = model_digest(given.model) + (
        f" {given.tokenizer}".replace(",", ";") if given.tokenizer else ""
    )
    with locked(given.output):
        rows = read_finished(path)
        if any(row["name"] == given.name and row["revision"] != revision for row in rows):
            raise UserError(
                f"{path} holds rows of other weights or another tokenizer under the name "
                f"{given.name!r}; give this model another --name, "
                "or choose another --output"
            )
        write_text(path, ",".join(FIELDS) + "\n" + _csv_text(rows))
        for i, factor in enumerate(given.yarn_factors):
            model = model if i == 0 else load_model(given, factor)
            evaluate(given, model, tokenizer, units, factor, revision, path)
        print(
            write_summary(
                given.output, rows_to_show(given, units, read_finished(path)), given.title
            )
        )
    return 0
