"""`neobert pseudo-perplexity`: pseudo-perplexity of masked language models against text length
(Figure 2 of the paper).

    neobert pseudo-perplexity --model chandar-lab/NeoBERT --text wikimedia/wikipedia:20231101.en
    neobert pseudo-perplexity --model mine other --text articles.jsonl \\
        --lengths 128 512 2048 --positions exact --yarn off 2

For a text of n tokens (special tokens not counted), each position is masked on its own, -log
p(token | rest) is its cross-entropy, and the pseudo-perplexity is exp of their mean. That is n
forwards of length n. With `--positions 64` a random 64 of the n positions, without replacement,
estimate the mean cross-entropy without bias; its standard error is s / sqrt(64) * sqrt(1 - 64 / n).

OUTPUT/pseudo_perplexity.csv gets a row as soon as a text is done, and the same command again
continues it.
"""

import hashlib
import io
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM

from ..common.errors import UserError, listed
from ..common.files import write_text
from ..common.folders import new_file
from ..common.identity import known_by
from ..common.loading import (
    check_vocabulary,
    choose_device,
    load_tokenizer,
    position_limit,
    text_limit,
)
from ..common.output import Output, run_settings
from ..common.results import environment, environment_line, markdown_table
from .options import LENGTHS, OPTIONS
from .sources import load_rows, parse_sources, source_key


ROWS = 20_000  # of the data that are looked at
BATCH_TOKENS = 16384  # of a forward: masked copies of a text go through together
KEY = ["name", "yarn", "text", "length"]
FIELDS = [*KEY, "tokens", "positions", "mean_cross_entropy", "standard_error"]


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

        with model.get_output_embeddings().register_forward_pre_hook(keep):
            logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits
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


def load_model(options, name, factor):
    """The masked language model in evaluation mode, with YaRN of `factor` if it is not None.
    UserError: no masked-LM head in its checkpoint, YaRN for another model than NeoBERT."""
    code = {"trust_remote_code": options.trust_remote_code}
    config = AutoConfig.from_pretrained(name, **code)
    if factor is not None:
        if config.model_type != "neobert":
            raise UserError(f"YaRN is for NeoBERT, but {name} is a {config.model_type} model")
        config.rope_scaling = {"rope_type": "yarn", "factor": factor}
        config.max_position_embeddings = math.ceil(config.max_position_embeddings * factor)
    dtype = getattr(torch, options.dtype)
    model, info = AutoModelForMaskedLM.from_pretrained(
        name, config=config, dtype=dtype, output_loading_info=True, **code
    )
    if info["missing_keys"]:
        raise UserError(
            f"{name} has no trained masked-LM head: {listed(sorted(info['missing_keys']), 3)} are "
            "not in its checkpoint, and would be random"
        )
    # No batch here has padding, and the warning about our own hook would be false.
    model.config.unpad_inputs = False
    return model.eval().to(choose_device(options.device))


def usable_lengths(options, models, tokenizer):
    """The buckets that a model takes: `lengths`, or the usual ones up to its context.

    Args:
        models: the model as it is and with YaRN.
    """
    longest = min(max(position_limit(model.base_model) for model in models), LENGTHS[-1])
    lengths = options.lengths or [*(n for n in LENGTHS if n < longest), longest]
    limit = max(lengths)
    if any("position" in name for name, _ in models[0].named_parameters()):
        limit = text_limit(models[0], tokenizer)  # a table of positions ends
    return sorted({n for n in lengths if tokenizer.num_special_tokens_to_add() < n <= limit})


def cut_texts(options, sources, tokenizer, lengths):
    """[(digest of the text, length bucket, ids between the special ones)], shortest first.

    Lengths count the special tokens. "cut": the first tokens of every text, at each length that it
    reaches. "own": every text in full (cut at the largest length), in the smallest bucket that
    holds it, as in Figure 2. UserError: no text is long enough.
    """
    special, texts = tokenizer.num_special_tokens_to_add(), {}
    for row in load_rows(sources).take(ROWS):
        text = row["text"] or ""
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids and lengths:
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            texts[digest] = ids[: lengths[-1] - special]
    # The same texts at every length, as far as they reach: lengths then differ in length alone.
    chosen = sorted(texts.items(), key=lambda item: len(item[1]), reverse=True)[: options.texts]
    units = []
    for digest, ids in chosen:
        reached = [length for length in lengths if length <= len(ids) + special]
        if options.bucketing == "own":
            reached = [next(length for length in lengths if len(ids) + special <= length)]
        units += [(digest, length, ids[: length - special]) for length in reached]
    if not units:
        raise UserError(f"no text of {options.text} reaches one of the lengths {lengths}")
    return sorted(units, key=lambda unit: (len(unit[2]), unit[0]))


def read_rows(path):
    """The CSV as a table, without a last line that a killed run left unfinished, which is removed
    from the file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ",".join(FIELDS) + "\n"
    text = text[: text.rfind("\n") + 1]
    write_text(path, text)
    return pandas.read_csv(io.StringIO(text), dtype=dict.fromkeys(KEY[:3], str))


# ------------------------------------------------------------------------------------------------
# the command


def measure(model, tokenizer, text, body, options):
    """{field of the CSV: value} of one text, cut to `body`, ids without the special ones."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    special, mask = encoded["input_ids"], encoded["special_tokens_mask"]
    start = mask.index(0)
    ids = [*special[:start], *body, *special[start + mask.count(0) :]]
    ids = torch.tensor(ids, device=model.device)
    places = sample_positions(len(body), options.position_count, options.seed, text)
    masked = torch.from_numpy(places + start).to(model.device)
    losses = masked_cross_entropy(model, ids, masked, tokenizer.mask_token_id)
    return dict(zip(FIELDS[4:], (len(ids), len(places), *mean_and_error(losses, len(body)))))


def plot_buckets(buckets: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot pseudo-perplexity against length, one line per model and YaRN setting.

    Args:
        buckets: Results of `summarise`; the error bars are their 95 % intervals.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for bucket in buckets:
        yarn = "" if bucket["yarn"] == "off" else f", YaRN {bucket['yarn']}"
        lines.setdefault(f"{bucket['name']}{yarn}", []).append(bucket)

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        points = sorted(points, key=lambda point: point["length"])
        values = [point["pseudo_perplexity"] for point in points]
        below = [value - point["low"] for value, point in zip(values, points)]
        above = [point["high"] - value for value, point in zip(values, points)]
        axes.errorbar(
            [point["length"] for point in points],
            values,
            yerr=[below, above],
            label=label,
            marker="o",
            capsize=3,
        )

    lengths = sorted({bucket["length"] for bucket in buckets})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("Length (tokens)")
    axes.set_ylabel("Pseudo-perplexity (95 % interval)")
    axes.grid(color="#e0e0e0")
    axes.legend(frameon=False)
    return figure


def write_page(path, buckets, env):
    """Write the table and the plot of `summarise` beside the CSV, and return the page."""
    columns = ["name", "yarn", "length", "texts", "positions", "pseudo_perplexity", "low", "high"]
    table = pandas.DataFrame(buckets)[columns].round(3)
    page = (
        f"# Pseudo-perplexity\n\n{environment_line(env)}.\n\n"
        f"{markdown_table(columns, table.astype(str).values)}\n"
        "exp(mean cross-entropy), every position masked on its own; low to high is the 95 % "
        "interval, for the choice of texts and of positions.\n"
    )
    write_text(path.with_suffix(".md"), page)
    figure = plot_buckets(buckets)
    with new_file(path.with_suffix(".png")) as file:
        figure.savefig(file, dpi=150)
    return page


def main(argv=None):
    """Runs `neobert pseudo-perplexity`; bad input is a UserError before any work."""
    (options,) = OPTIONS["pseudo-perplexity"].read(sys.argv[1:] if argv is None else argv)
    sources = parse_sources(options.text, column=options.column)
    known = {"model": [known_by(name) for name in options.model], "text": source_key(sources)}
    output = Output(options.output, "pseudo-perplexity", run_settings(options) | known)
    path = output.folder / "pseudo_perplexity.csv"
    if output.state() == "finished":
        print(path.with_suffix(".md").read_text())
        return 0
    labels, work = [Path(name).name for name in options.model], []
    if len(set(labels)) < len(labels):
        labels = options.model
    for label, name in zip(labels, options.model):
        code = options.trust_remote_code
        tokenizer = load_tokenizer(name, trust_remote_code=code)
        models = [load_model(options, name, factor) for factor in options.yarn_factors]
        check_vocabulary(tokenizer, models[0], name)
        lengths = usable_lengths(options, models, tokenizer)
        units = cut_texts(options, sources, tokenizer, lengths)
        for yarn, model in zip(options.yarn, models):
            work.append((label, yarn, model, tokenizer, units))
    with output.claim():
        done = set(read_rows(path)[KEY].itertuples(index=False, name=None))
        for name, yarn, model, tokenizer, units in work:
            for text, length, body in tqdm(units, desc=f"{name}, YaRN {yarn}", unit="text"):
                key = (name, yarn, text, length)
                if key not in done:
                    row = dict(zip(KEY, key)) | measure(model, tokenizer, text, body, options)
                    pandas.DataFrame([row]).to_csv(path, mode="a", header=False, index=False)
        buckets, env = summarise(read_rows(path)), environment(dtype=options.dtype)
        print(write_page(path, buckets, env))
        output.finish(environment=env, buckets=buckets)
    return 0
