"""`neobert pseudo-perplexity`: pseudo-perplexity of masked language models against text length (PAPER section 8, Figure 2).

    neobert pseudo-perplexity --model chandar-lab/NeoBERT --text wikimedia/wikipedia --config 20231101.en --texts 100
    neobert pseudo-perplexity --model my_model --text articles.jsonl --lengths 128,512,2048,8192 --positions exact --yarn off,2

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
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForMaskedLM

from ..common.errors import UserError, one_line, require
from ..common.files import check_folder, write_json, write_text
from ..common.identity import weights_digest
from ..common.recipe import read_recipe
from ..common.results import environment, markdown_table
from .pseudo_perplexity_texts import make_units


logger = logging.getLogger("neobert.pseudo_perplexity")
FIELDS = (
    "name",
    "revision",
    "yarn",
    "dtype",
    "text",
    "length",
    "tokens",
    "positions",
    "seed",
    "mean_cross_entropy",
    "standard_error",
    "pseudo_perplexity",
)
_KEY = FIELDS[: FIELDS.index("mean_cross_entropy")]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class PseudoPerplexityRecipe:
    """Options of `neobert pseudo-perplexity`."""

    model: str = field(metadata={"help": "folder or Hub name of a masked language model"})
    text: str = field(metadata={"help": ".txt (texts between blank lines), .jsonl, .parquet, a folder of .txt files, or a Hub data set"})
    column: str = field(default="text", metadata={"help": "column with the text"})
    config: str | None = field(default=None, metadata={"help": "configuration of the Hub data set"})
    split: str = field(default="train", metadata={"help": "split of the Hub data set"})
    output: str = field(default="results/pseudo_perplexity", metadata={"help": "folder of the CSV, the table and the plot"})
    name: str | None = field(default=None, metadata={"help": "name in the plot; default: last part of --model"})
    tokenizer: str | None = field(default=None, metadata={"help": "folder or Hub name, where the model has no tokenizer"})
    lengths: str = field(default="128,256,512,1024,2048,3072,4096,6144,8192", metadata={"help": "length buckets, in tokens"})
    bucketing: str = field(
        default="cut",
        metadata={"help": "cut: every text at each length that it reaches; own: every text once, at its own length, in the next bucket up"},
    )
    texts: int = field(default=100, metadata={"help": "so many texts are used: the first that reach the largest length, then the longest"})
    max_documents: int = field(default=20000, metadata={"help": "how many rows of the data are looked at"})
    positions: str = field(default="64", metadata={"help": "sampled positions a text, or exact for all of them"})
    seed: int = 0
    yarn: str = field(default="off", metadata={"help": "comma-separated: off, or the factor by which YaRN extends the context (off,2)"})
    yarn_from: int | None = field(
        default=None, metadata={"help": "length that YaRN extends from; default: the model's max_position_embeddings"}
    )
    batch_tokens: int = field(default=16384, metadata={"help": "tokens a forward: masked copies of a text go through together"})
    dtype: str = "float32"
    device: str | None = field(default=None, metadata={"help": "default: cuda if there is one, else cpu"})
    attn_implementation: str | None = None
    trust_remote_code: bool = field(default=False, metadata={"help": "run Python code that the model brings (NeoBERT itself needs none)"})
    title: str | None = field(default=None, metadata={"help": "title of the plot"})

    def __post_init__(self):
        self.name = (self.name or Path(str(self.model).rstrip("/")).name or "model").replace(",", ";")
        self.length_list = _positive(self.lengths, "lengths")
        self.position_count = None if str(self.positions) == "exact" else _positive(self.positions, "positions")[0]
        self.yarn_factors = [None if part == "off" else _factor(part) for part in _parts(self.yarn)]
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.bucketing not in ("cut", "own"):
            raise UserError(f"bucketing must be cut or own, but {self.bucketing!r} was given")
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, but {self.dtype!r} was given")
        for key in ("texts", "max_documents", "batch_tokens", "yarn_from"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise UserError(f"{key} must be at least 1, but {getattr(self, key)} was given")
        if not self.yarn_factors:
            raise UserError("yarn must be off, a factor, or several of them such as off,2")


def _parts(text):
    # YAML reads a bare `off` as false.
    return ["off"] if text is False else [part.strip() for part in str(text).split(",") if part.strip()]


def _positive(text, name):
    try:
        numbers = sorted({int(part) for part in _parts(text)})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        extra = " or exact" if name == "positions" else " separated by commas"
        raise UserError(f"{name} must be whole numbers of at least 1{extra}, but {text!r} was given")
    return numbers


def _factor(text):
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not factor > 1:
        raise UserError(f"yarn takes off or a factor above 1, but {text!r} was given")
    return factor


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


def load_model(recipe, factor):
    """The masked language model in evaluation mode, with YaRN of `factor` if it is not None.

    Raises:
        UserError: no model, no masked-LM head, or no rotary positions to extend.
    """
    try:
        config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"the model {recipe.model!r} was not loaded: {one_line(error)}") from error
    if factor is not None:
        _set_yarn(config, factor, recipe)
    more = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    try:
        model, info = AutoModelForMaskedLM.from_pretrained(
            recipe.model,
            config=config,
            dtype=_DTYPES[recipe.dtype],
            trust_remote_code=recipe.trust_remote_code,
            output_loading_info=True,
            **more,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(f"{recipe.model} is no masked language model here: {one_line(error)}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise UserError(f"{recipe.model} has no trained masked-LM head: {missing} are not in its checkpoint, and would be random")
    return model.eval().to(recipe.device)


def _rotary(config):
    """Whether positions are rotary, so that texts may be longer than in training."""
    if getattr(config, "position_embedding_type", "rope") not in ("rope", "rotary"):
        return False
    return any(getattr(config, name, None) is not None for name in ("rope_parameters", "rope_scaling", "rope_theta", "global_rope_theta"))


def _set_yarn(config, factor, recipe):
    """YaRN for a configuration with one set of rotary parameters, under transformers 4 and 5."""
    parameters = getattr(config, "rope_parameters", None)
    nested = isinstance(parameters, dict) and any(isinstance(value, dict) for value in parameters.values())
    if not _rotary(config) or nested or hasattr(config, "global_rope_theta"):
        raise UserError(
            f"YaRN needs one set of rotary parameters, which {recipe.model} ({config.model_type}) does not have; use --yarn off"
        )
    original = recipe.yarn_from or config.max_position_embeddings
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if isinstance(parameters, dict):
        config.rope_parameters = {"rope_theta": parameters.get("rope_theta", 10000.0), **scaling}
    else:
        config.rope_scaling = scaling
    config.max_position_embeddings = max(config.max_position_embeddings, math.ceil(original * factor))


# --------------------------------------------------------------------------------------------------------------- evaluation


def read_finished(path):
    """Rows of the CSV so far; a last line that was not written to its end is dropped from the file.

    Raises:
        UserError: the file is of another kind.
    """
    if not path.is_file():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    rows = list(csv.DictReader(io.StringIO(whole)))
    if whole and whole.split("\n", 1)[0] != ",".join(FIELDS):
        raise UserError(f"{path} is no pseudo-perplexity CSV of this version; move it away or choose another --output")
    return rows


def _append(path, row):
    if not path.is_file() or not path.stat().st_size:
        write_text(path, ",".join(FIELDS) + "\n")
    with open(path, "a") as file:
        file.write(",".join(str(row[name]) for name in FIELDS) + "\n")


def check_weights(recipe, revision, rows, path):
    """Raises UserError when the CSV has rows of this name from other weights or with another tokenizer: a name is one model."""
    if any(row["name"] == recipe.name and row["revision"] != revision for row in rows):
        raise UserError(
            f"{path} holds rows of other weights or another tokenizer under the name {recipe.name!r}; give this model another --name, "
            "or choose another --output"
        )


def plan(recipe, tokenizer, units, revision):
    """What is evaluated with every YaRN factor: [(unit, positions, the row's key without its YaRN)]."""
    special = sum(map(len, _special_ids(tokenizer)))
    planned = []
    for unit in units:
        positions = sample_positions(len(unit.ids), recipe.position_count, recipe.seed, unit.text)
        key = {
            "name": recipe.name,
            "revision": revision,
            "dtype": recipe.dtype,
            "text": unit.text,
            "length": unit.length,
            "tokens": len(unit.ids) + special,
            "positions": len(positions),
            "seed": recipe.seed if len(positions) < len(unit.ids) else "",
        }
        planned.append((unit, positions, {name: str(value) for name, value in key.items()}))
    return planned


def evaluate(recipe, model, tokenizer, planned, factor, path, finished):
    """Appends a row to `path` for every planned one that is not among the finished."""
    prefix, suffix = _special_ids(tokenizer)
    keys = {tuple(row[name] for name in _KEY) for row in finished}
    yarn = "off" if factor is None else f"{factor:g}" + (f" from {recipe.yarn_from}" if recipe.yarn_from else "")
    todo = [(unit, positions, {**key, "yarn": yarn}) for unit, positions, key in planned]
    todo = [entry for entry in todo if tuple(entry[2][name] for name in _KEY) not in keys]
    label = f"{recipe.name}, YaRN {yarn}"
    with tqdm(total=sum(len(positions) for _, positions, _ in todo), desc=label, unit="position") as progress:
        for unit, positions, key in todo:
            ids = torch.tensor([*prefix, *unit.ids, *suffix], device=recipe.device)
            batch = max(1, recipe.batch_tokens // len(ids))
            losses = []
            for start in range(0, len(positions), batch):
                chosen = torch.from_numpy(positions[start : start + batch]).to(recipe.device) + len(prefix)
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


# --------------------------------------------------------------------------------------------------------------------- plot


def comparable_rows(recipe, rows, planned, texts):
    """The CSV's rows that belong in this run's table, each text once in every series and length.

    Of this run's model those that are planned (with any YaRN); of other models, whose tokens may differ, those of the same data, lengths,
    bucketing, dtype, positions and seed. Models that have none are named in a warning.

    Args:
        texts: digests of the texts that the data holds.
    """
    alike = [name for name in _KEY if name != "yarn"]
    mine = {tuple(key[name] for name in alike) for _, _, key in planned}
    count, largest = recipe.position_count, {}
    for row in rows:
        series = row["name"], row["yarn"]
        largest[series] = max(int(row["length"]), largest.get(series, 0))

    def belongs(row):
        if row["name"] == recipe.name:
            return tuple(row[name] for name in alike) in mine
        if row["seed"]:
            positions = (row["seed"], row["positions"]) == (str(recipe.seed), str(count))
        else:
            positions = count is None or int(row["positions"]) <= count
        # A text that fills its bucket was cut to it; texts at their own length are cut at the largest alone.
        length, filled = int(row["length"]), row["tokens"] == row["length"]
        bucketing = filled if recipe.bucketing == "cut" else not filled or length == largest[row["name"], row["yarn"]]
        return positions and bucketing and length in recipe.length_list and row["dtype"] == recipe.dtype and row["text"] in texts

    kept = {(row["name"], row["yarn"], row["text"], row["length"]): row for row in rows if belongs(row)}
    if left := sorted({row["name"] for row in rows} - {key[0] for key in kept}):
        logger.warning("not in this table, because of other texts or settings: %s", ", ".join(left))
    return list(kept.values())


def summarise(rows):
    """Buckets of CSV rows: [{"name", "yarn", "length", "texts", "positions", "pseudo_perplexity", "low", "high", errors}].

    The bucket's pseudo-perplexity is exp of the mean over texts of their mean cross-entropy. `error_positions`: standard error of that mean
    from sampling positions, for these texts; `error_texts`: from the spread between texts, which contains the former. low and high are exp of
    the mean -+ 1.96 of the larger error.
    """
    groups = {}
    for row in rows:
        groups.setdefault((row["name"], row["yarn"], int(row["length"])), []).append(row)
    buckets = []
    for (name, yarn, length), found in sorted(groups.items()):
        means = np.array([float(row["mean_cross_entropy"]) for row in found])
        errors = np.array([float(row["standard_error"]) for row in found])
        mean = means.mean()
        error_positions = float(np.sqrt((errors**2).sum()) / len(found))
        error_texts = float(means.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan
        error = np.nanmax([error_positions, error_texts, 0.0])
        low, middle, high = (math.exp(min(x, 700.0)) for x in (mean - 1.96 * error, mean, mean + 1.96 * error))
        buckets.append(
            {
                "name": name,
                "yarn": yarn,
                "length": length,
                "texts": len(found),
                "positions": sum(int(row["positions"]) for row in found),
                "mean_cross_entropy": float(mean),
                "error_positions": None if math.isnan(error_positions) else error_positions,
                "error_texts": None if math.isnan(error_texts) else error_texts,
                "pseudo_perplexity": middle,
                "low": low,
                "high": high,
            }
        )
    return buckets


def plot(rows, buckets, path, title=None):
    """Figure 2: every text as a point, the buckets as a line with 95 % intervals, both axes logarithmic."""
    require("eval", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    series = sorted({(bucket["name"], bucket["yarn"]) for bucket in buckets}, key=lambda pair: (pair[0], pair[1] != "off", pair[1]))
    for i, (name, yarn) in enumerate(series):
        colour = f"C{i % 10}"
        label = name if yarn == "off" else f"{name}, YaRN x {yarn}"
        # Series stand a little beside each other, so that their bars can be told apart.
        shift = 1.02 ** (i - (len(series) - 1) / 2)
        own = [row for row in rows if (row["name"], row["yarn"]) == (name, yarn)]
        axes.scatter(
            [int(r["tokens"]) * shift for r in own],
            [float(r["pseudo_perplexity"]) for r in own],
            s=6,
            alpha=0.2,
            color=colour,
            linewidths=0,
        )
        line = [b for b in buckets if (b["name"], b["yarn"]) == (name, yarn)]
        x, y = [b["length"] * shift for b in line], [b["pseudo_perplexity"] for b in line]
        bars = [[b["pseudo_perplexity"] - b["low"] for b in line], [b["high"] - b["pseudo_perplexity"] for b in line]]
        axes.errorbar(x, y, yerr=bars, marker="o", markersize=4, capsize=2, color=colour, label=label)
    lengths = sorted({bucket["length"] for bucket in buckets})
    axes.set(xscale="log", yscale="log", xlabel="length in tokens", ylabel="pseudo-perplexity")
    axes.set_title(textwrap.fill(title or "Pseudo-perplexity against length", 66), fontsize=11)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [m * 10**e for e in range(-1, 9) for m in (1, 2, 5) if low <= m * 10**e <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = Path(path).with_name(f".{Path(path).name}.partial.png")
    figure.savefig(temporary, dpi=150)
    plt.close(figure)
    temporary.replace(path)


def write_summary(output, rows, title=None):
    """Writes pseudo_perplexity.json, .md and .png beside the CSV, from these of its rows."""
    output = Path(output)
    buckets = summarise(rows)
    env = environment(dtype=sorted({row["dtype"] for row in rows}))
    data = {"kind": "pseudo-perplexity", "buckets": buckets, "environment": env}
    write_json(output / "pseudo_perplexity.json", data)
    header = ["model", "YaRN", "length", "texts", "positions", "pseudo-perplexity", "95 % interval"]
    lines = [
        [
            b["name"],
            b["yarn"],
            b["length"],
            b["texts"],
            b["positions"],
            f"{b['pseudo_perplexity']:.3f}",
            f"{b['low']:.3f} to {b['high']:.3f}",
        ]
        for b in buckets
    ]
    note = "exp(mean cross-entropy), every position masked on its own; the interval covers the choice of texts and of positions."
    versions = ", ".join(f"{package} {version}" for package, version in env["versions"].items())
    made = f"`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, {env['threads']} threads, {', '.join(env['dtype'])}; {versions}."
    write_text(output / "pseudo_perplexity.md", f"{markdown_table(header, lines)}\n{note}\n\n{made}\n")
    plot(rows, buckets, output / "pseudo_perplexity.png", title)
    return buckets


def main(argv=None):
    """Runs `neobert pseudo-perplexity`; bad input is a UserError before any work."""
    recipe = read_recipe([PseudoPerplexityRecipe], sys.argv[1:] if argv is None else argv, prog="neobert pseudo-perplexity")[0]
    require("eval", "accelerate", "matplotlib")
    from ..common.loading import check_vocabulary, load_tokenizer, text_limit

    logging.basicConfig(format="%(message)s")
    check_folder(recipe.output, "output")
    path = Path(recipe.output) / "pseudo_perplexity.csv"
    finished = read_finished(path)
    model = load_model(recipe, recipe.yarn_factors[0])
    tokenizer = load_tokenizer(recipe.tokenizer or recipe.model, padding=False, trust_remote_code=recipe.trust_remote_code)
    if tokenizer.mask_token_id is None:
        raise UserError(f"the tokenizer of {recipe.tokenizer or recipe.model} has no mask token")
    check_vocabulary(tokenizer, model, recipe.model)
    revision = weights_digest(recipe.model) + (f" {recipe.tokenizer}".replace(",", ";") if recipe.tokenizer else "")
    check_weights(recipe, revision, finished, path)
    for factor in recipe.yarn_factors[1:]:
        if factor is not None:
            _set_yarn(AutoConfig.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code), factor, recipe)
    units, texts = make_units(recipe, tokenizer, None if _rotary(model.config) else text_limit(model, tokenizer))
    planned = plan(recipe, tokenizer, units, revision)
    for i, factor in enumerate(recipe.yarn_factors):
        model = model if i == 0 else load_model(recipe, factor)
        evaluate(recipe, model, tokenizer, planned, factor, path, finished)
    write_summary(recipe.output, comparable_rows(recipe, read_finished(path), planned, texts), recipe.title)
    print((Path(recipe.output) / "pseudo_perplexity.md").read_text())
    return 0
