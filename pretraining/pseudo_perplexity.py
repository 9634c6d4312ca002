"""`neobert pseudo-perplexity`: pseudo-perplexity of masked language models against text length
(Figure 2 of the paper).

    neobert pseudo-perplexity --model chandar-lab/NeoBERT --text wikimedia/wikipedia:20231101.en
    neobert pseudo-perplexity --model my_model --text articles.jsonl \\
        --lengths 128 512 2048 --positions exact --yarn off 2

For a text of n tokens (special tokens not counted), each position is masked on its own, -log
p(token | rest) is its cross-entropy, and the pseudo-perplexity is exp of their mean. That is n
forwards of length n. With `--positions 64` a random 64 of the n positions, without replacement,
estimate the mean cross-entropy without bias; its standard error is s / sqrt(64) * sqrt(1 - 64 / n).

OUTPUT/pseudo_perplexity.csv gets a row as soon as a text is done, and the same command again
continues it. A row holds the settings that it was measured with. Models share a CSV: the table and
the plot show all rows with the settings, texts and lengths of this run.
"""

import hashlib
import io
import math
import sys
from pathlib import Path

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM

from ..common import figures
from ..common.errors import UserError
from ..common.files import write_text
from ..common.folders import check_folder, locked
from ..common.identity import model_digest
from ..common.loading import (
    check_model,
    check_vocabulary,
    choose_device,
    load_tokenizer,
    position_limit,
    text_limit,
)
from ..common.results import check_result_files, environment, markdown_table, write_result
from .options import LENGTHS, OPTIONS
from .sources import load_rows, parse_sources


ROWS = 20_000  # of the data that are looked at
BATCH_TOKENS = 16384  # of a forward: masked copies of a text go through together
# What a row of the CSV is known by: the model, the settings, the text at one length.
SETTINGS = ["dtype", "bucketing", "sampled", "seed"]
NUMBERS = ["length", "tokens", "positions"]
KEY = ["name", "revision", "yarn", *SETTINGS, "text", *NUMBERS]
FIELDS = [*KEY, "mean_cross_entropy", "standard_error", "pseudo_perplexity"]


# ------------------------------------------------------------------------------------------------
# arithmetic


def sample_positions(length, count, seed, text):
    """Positions to mask, sorted: all of them (`count` None), or `count` drawn without replacement
    by (seed, text)."""
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
    values = pandas.Series(values, dtype=np.float64)
    correction = math.sqrt(1 - len(values) / population)
    return float(values.mean()), float(values.sem() * correction) if correction else 0.0


@torch.inference_mode()
def masked_cross_entropy(model, ids, positions, mask_token_id):
    """-log p(token | all other tokens) at each position, one masked copy of the text a position.

    Args:
        model: a masked language model.
        ids: (L,) token ids of a text. positions: (n,) which are masked, one in each copy.
    Returns:
        (n,) float64 array, in nats.
    """
    losses = []
    for part in positions.split(max(1, BATCH_TOKENS // len(ids))):
        rows = torch.arange(len(part), device=ids.device)
        masked = ids.repeat(len(part), 1)
        masked[rows, part] = mask_token_id

        def keep(module, inputs, rows=rows, part=part):
            # The decoder gets the masked position of every row, so that no (n, L, V) logits are
            # made.
            return (inputs[0][rows, part],)

        hook = model.get_output_embeddings().register_forward_pre_hook(keep)
        try:
            logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits
        finally:
            hook.remove()
        losses.append(F.cross_entropy(logits.float(), ids[part], reduction="none").double().cpu())
    return torch.cat(losses).numpy()


def summarise(rows):
    """Buckets of CSV rows: [{"name", "yarn", "length", "texts", "positions", "pseudo_perplexity",
    "low", "high", errors}].

    The bucket's pseudo-perplexity is exp of the mean over texts of their mean cross-entropy.
    `error_positions`: standard error of that mean from sampling positions, for these texts;
    `error_texts`: from the spread between texts, which contains the former. low and high are exp of
    the mean -+ 1.96 of the larger error.
    """
    buckets = []
    for (name, yarn, length), texts in rows.groupby(["name", "yarn", "length"]):
        means, errors = texts["mean_cross_entropy"], texts["standard_error"]
        of_positions = math.sqrt((errors**2).sum(skipna=False)) / len(texts)
        of_texts = means.sem()
        reach = 1.96 * np.nanmax([of_positions, of_texts, 0.0])
        mean = means.mean()
        low, middle, high = np.exp(np.minimum([mean - reach, mean, mean + reach], 700)).tolist()
        buckets.append(
            {
                "name": name,
                "yarn": yarn,
                "length": int(length),
                "texts": len(texts),
                "positions": int(texts["positions"].sum()),
                "mean_cross_entropy": float(mean),
                "error_positions": None if math.isnan(of_positions) else of_positions,
                "error_texts": None if math.isnan(of_texts) else float(of_texts),
                "pseudo_perplexity": middle,
                "low": low,
                "high": high,
            }
        )
    return buckets


# ------------------------------------------------------------------------------------------------
# model and texts


def is_rotary(config):
    """Whether positions are rotary, so that texts may be longer than in training."""
    kind = getattr(config, "position_embedding_type", "rope")
    names = ("rope_parameters", "rope_scaling", "rope_theta", "global_rope_theta")
    return kind in ("rope", "rotary") and any(getattr(config, name, None) for name in names)


def load_model(options, factor):
    """The masked language model in evaluation mode, with YaRN of `factor` if it is not None.
    UserError: no masked-LM head in its checkpoint, no rotary positions to extend."""
    code = {"trust_remote_code": options.trust_remote_code}
    config = AutoConfig.from_pretrained(options.model, **code)
    if factor is not None:
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = any(isinstance(value, dict) for value in parameters.values())
        if not is_rotary(config) or nested or hasattr(config, "global_rope_theta"):
            raise UserError(
                f"YaRN needs one set of rotary parameters, which {options.model} "
                f"({config.model_type}) does not have; use --yarn off"
            )
        length = options.yarn_from or config.max_position_embeddings
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        if parameters:  # transformers 5
            config.rope_parameters = {"rope_theta": parameters.get("rope_theta", 10000.0), **yarn}
        else:
            config.rope_scaling = yarn
        longest = math.ceil(length * factor)
        config.max_position_embeddings = max(config.max_position_embeddings, longest)
    dtype = getattr(torch, options.dtype)
    model, info = AutoModelForMaskedLM.from_pretrained(
        options.model, config=config, dtype=dtype, output_loading_info=True, **code
    )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(
            f"{options.model} has no trained masked-LM head: {missing} are not in its checkpoint, "
            "and would be random"
        )
    # No batch here has padding, and the warning about our own hook would be false.
    model.config.unpad_inputs = False
    return model.eval().to(choose_device(options.device))


def cut_texts(options, tokenizer, lengths):
    """[(digest of the text, length bucket, ids between the special ones)], shortest first.

    Lengths count the special tokens. "cut": the first tokens of every text, at each length that it
    reaches. "own": every text in full (cut at the largest length), in the smallest bucket that
    holds it, as in Figure 2. UserError: no text is long enough.
    """
    rows = load_rows(parse_sources(options.text, column=options.column))
    special, texts, skipped = tokenizer.num_special_tokens_to_add(), {}, 0
    for row in rows.take(ROWS):
        if not row["text"] or not row["text"].strip():
            skipped += 1
            continue
        ids = tokenizer(row["text"], add_special_tokens=False, verbose=False)["input_ids"]
        digest = hashlib.sha256(row["text"].encode()).hexdigest()[:12]
        texts[digest] = ids[: lengths[-1] - special]
    # The same texts at every length, as far as they reach: lengths then differ in length alone.
    chosen = sorted(texts.items(), key=lambda item: len(item[1]), reverse=True)[: options.texts]
    units, short = [], 0
    for digest, ids in chosen:
        reached = [length for length in lengths if length <= len(ids) + special]
        if options.bucketing == "own":
            reached = [next(length for length in lengths if len(ids) + special <= length)]
        short += not reached
        units += [(digest, length, ids[: length - special]) for length in reached]
    print(
        f"{options.text}: {len(chosen) - short:,} texts; {skipped:,} rows are empty, "
        f"{short:,} texts shorter than {lengths[0]} tokens, the shortest length",
        file=sys.stderr,
    )
    if not units:
        raise UserError(f"no text of {options.text} reaches {lengths[0]} tokens")
    return sorted(units, key=lambda unit: (len(unit[2]), unit[0]))


def read_rows(path):
    """The CSV as a table of strings, without a last line that a killed run left unfinished.
    UserError: the file is of another kind."""
    header = ",".join(FIELDS) + "\n"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else header
    if not text.startswith(header):
        raise UserError(
            f"{path} is not a pseudo-perplexity CSV of this version; move it away or choose "
            "another --output"
        )
    text = text[: text.rfind("\n") + 1]
    return pandas.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)


# ------------------------------------------------------------------------------------------------
# the command


def write_page(path, rows):
    """Writes the table, the figures and the plot of rows of the CSV beside it; returns the page."""
    rows = rows.astype(dict.fromkeys(FIELDS[-3:], float) | dict.fromkeys(NUMBERS, int))
    buckets, env = summarise(rows), environment(dtype=rows["dtype"].iloc[0])
    header = ["model", "YaRN", "length", "texts", "positions", "pseudo-perplexity", "95 % interval"]
    lines = []
    for bucket in buckets:
        cells = [bucket[name] for name in ("name", "yarn", "length", "texts", "positions")]
        interval = f"{bucket['low']:.3f} to {bucket['high']:.3f}"
        lines.append([*cells, f"{bucket['pseudo_perplexity']:.3f}", interval])
    note = (
        "exp(mean cross-entropy), every position masked on its own; the interval covers the "
        "choice of texts and of positions."
    )
    text = f"{markdown_table(header, lines)}\n{note}"
    data = {"kind": "pseudo-perplexity", "buckets": buckets}
    page = write_result(path.with_suffix(""), "Pseudo-perplexity", env, data, text)

    # Figure 2: the buckets as a line with 95 % intervals, both axes logarithmic.
    title = "Pseudo-perplexity against length"
    figure, axes = figures.subplots(title, "length in tokens", "pseudo-perplexity")
    table = pandas.DataFrame(buckets)
    for i, ((name, yarn), line) in enumerate(table.groupby(["name", "yarn"])):
        label = name if yarn == "off" else f"{name}, YaRN x {yarn}"
        x, y = list(line["length"]), list(line["pseudo_perplexity"])
        spread = list(zip(line["low"], line["high"]))
        figures.line(axes, x, y, spread, label=label, series=i)
    figures.length_axis(axes, table["length"])
    axes.set_yscale("log")
    axes.legend()
    figures.save(figure, path.with_suffix(".png"), env)
    return page


def main(argv=None):
    """Runs `neobert pseudo-perplexity`; bad input is a UserError before any work."""
    (options,) = OPTIONS["pseudo-perplexity"].read(sys.argv[1:] if argv is None else argv)
    check_folder(options.output, "output")
    path = Path(options.output) / "pseudo_perplexity.csv"
    pages = (path.stem + end for end in (".json", ".md", ".png"))
    check_result_files(options.output, "pseudo-perplexity", len(read_rows(path)), *pages)
    check_model(options.model)
    models = {factor: load_model(options, factor) for factor in options.yarn_factors}
    model = next(iter(models.values()))
    folder = options.tokenizer or options.model
    tokenizer = load_tokenizer(folder, padding=False, trust_remote_code=options.trust_remote_code)
    if tokenizer.mask_token_id is None:
        raise UserError(f"the tokenizer of {folder} has no mask token")
    check_vocabulary(tokenizer, model, options.model)
    contexts = [position_limit(each.base_model) for each in models.values()]
    longest = min(max(contexts), LENGTHS[-1])
    lengths = options.lengths or [*(n for n in LENGTHS if n < longest), longest]
    # A table of positions ends; rotary ones do not.
    limit = max(lengths) if is_rotary(model.config) else text_limit(model, tokenizer)
    special = tokenizer.num_special_tokens_to_add()
    lengths = sorted({length for length in lengths if special < length <= limit})
    if not lengths:
        raise UserError(f"none of the lengths fits {options.name}, which takes {limit} tokens")
    units = cut_texts(options, tokenizer, lengths)

    # Own lengths depend on all buckets.
    bucketing = "cut" if options.bucketing == "cut" else " ".join(map(str, ["own", *lengths]))
    settings = (options.dtype, bucketing, options.positions, str(options.seed))
    settings = dict(zip(SETTINGS, settings))
    revision = " ".join(filter(None, [model_digest(options.model), options.tokenizer]))
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special_mask = encoded["input_ids"], encoded["special_tokens_mask"]
    start = special_mask.index(0)
    prefix, suffix = ids[:start], ids[start + special_mask.count(0) :]
    with locked(options.output):
        rows = read_rows(path)
        write_text(path, rows.to_csv(index=False))
        finished = set(rows[KEY].itertuples(index=False, name=None))
        for factor, model in models.items():
            yarn = "off" if factor is None else f"{factor:g}"
            if factor is not None and options.yarn_from:
                yarn += f" from {options.yarn_from}"
            known = {"name": options.name, "revision": revision, "yarn": yarn, **settings}
            for text, length, body in tqdm(units, desc=f"{options.name}, YaRN {yarn}", unit="text"):
                places = sample_positions(len(body), options.position_count, options.seed, text)
                ids = torch.tensor([*prefix, *body, *suffix], device=model.device)
                row = {**known, "text": text}
                row |= zip(NUMBERS, (length, len(ids), len(places)))
                if tuple(map(str, row.values())) in finished:
                    continue
                places = torch.from_numpy(places + len(prefix)).to(model.device)
                losses = masked_cross_entropy(model, ids, places, tokenizer.mask_token_id)
                mean, error = mean_and_error(losses, len(body))
                row |= {"mean_cross_entropy": f"{mean:.8g}", "standard_error": f"{error:.5g}"}
                row["pseudo_perplexity"] = f"{math.exp(min(mean, 700.0)):.8g}"
                pandas.DataFrame([row]).to_csv(path, mode="a", header=False, index=False)
        rows = read_rows(path)
        of_run = rows["text"].isin([unit[0] for unit in units])
        of_run &= rows["length"].isin(map(str, lengths))
        of_run &= (rows["revision"] == revision) | (rows["name"] != options.name)
        for name, value in settings.items():
            of_run &= rows[name] == value
        print(write_page(path, rows[of_run]))
    return 0
