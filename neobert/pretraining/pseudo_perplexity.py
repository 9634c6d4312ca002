"""Command `neobert pseudo-perplexity`: pseudo-perplexity by text length, Figure 2 of the paper.

    neobert pseudo-perplexity --model chandar-lab/NeoBERT --text wikimedia/wikipedia:20231101.en
    neobert pseudo-perplexity --model mine --text articles.jsonl --positions exact --yarn off 2

The pseudo-perplexity of a text of n tokens (without special tokens) is the exponential of the mean
cross-entropy -log p(token | all other tokens) over its positions (Salazar et al. 2020, arXiv
1910.14659). Each position is masked separately, which takes n forward passes over n tokens. With
`--positions 64`, 64 positions are sampled without replacement. Their mean is an unbiased estimate
of the mean cross-entropy, and its standard error is s / sqrt(64) * sqrt(1 - 64 / n).

Each measured text becomes a row of OUTPUT/pseudo_perplexity.csv at once. The same command resumes
an interrupted run.
"""

import hashlib
import io
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..common.environment import environment, environment_line
from ..common.errors import UserError
from ..common.files import write_text
from ..common.folders import new_file
from ..common.identity import model_fingerprint
from ..common.loading import (
    check_trained_head,
    check_vocabulary,
    choose_device,
    load_tokenizer,
    position_limit,
    text_limit,
)
from ..common.options import identity, log_options
from ..common.output import Output
from ..common.tables import markdown_table
from .pseudo_perplexity_options import (
    LENGTHS,
    PARSER,
    ModelOptions,
    PseudoPerplexityOptions,
    SamplingOptions,
    TextOptions,
)
from .sources import Source, load_rows, parse_sources, source_key


logger = logging.getLogger("neobert.pseudo_perplexity")

# Number of rows of the data from which the texts are selected.
MAX_ROWS = 20_000

# Number of tokens in a forward pass over masked copies of a text.
BATCH_TOKENS = 16384

# Columns of the CSV file; those of KEY identify a row.
KEY = ["name", "yarn", "text", "length"]
COLUMNS = [*KEY, "tokens", "positions", "mean_cross_entropy", "standard_error"]


@dataclass(frozen=True)
class Excerpt:
    """A text, truncated to the length at which it is measured.

    Attributes:
        digest: Twelve hex digits that identify the complete text.
        length: Length in tokens of the bucket that the excerpt belongs to.
        ids: Token ids without special tokens.
    """

    digest: str
    length: int
    ids: list[int]


@dataclass(frozen=True)
class Series:
    """A model in one YaRN setting, and the excerpts on which it is measured.

    Attributes:
        name: Name of the model in the tables.
        yarn: YaRN factor as text, or "off".
        model: Masked language model.
        tokenizer: Tokenizer of the model.
        excerpts: Excerpts in the order in which they are measured.
    """

    name: str
    yarn: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    excerpts: list[Excerpt]

    def key(self, excerpt: Excerpt) -> tuple[str, str, str, int]:
        """Return the values of KEY in the row of an excerpt."""
        return self.name, self.yarn, excerpt.digest, excerpt.length


@dataclass(frozen=True)
class Bucket:
    """Result of a model, a YaRN setting and a length, over all texts.

    Attributes:
        name: Name of the model.
        yarn: YaRN factor as text, or "off".
        length: Length in tokens.
        texts: Number of texts.
        positions: Number of masked positions in all texts.
        mean_cross_entropy: Mean over texts of their mean cross-entropy, in nats.
        error_positions: Standard error of this mean from the sampling of positions, with the texts
            fixed; None if it is unknown.
        error_texts: Standard error from the variation between texts, which includes the former;
            None for a single text.
        pseudo_perplexity: Exponential of the mean cross-entropy.
        low: Lower end of the 95 % interval, which is based on the larger error; None if it is
            unknown.
        high: Upper end of the 95 % interval; None if it is unknown.
    """

    name: str
    yarn: str
    length: int
    texts: int
    positions: int
    mean_cross_entropy: float
    error_positions: float | None
    error_texts: float | None
    pseudo_perplexity: float
    low: float | None
    high: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert pseudo-perplexity` and return the exit code."""
    options = PARSER.read(argv or [])
    log_options(options)
    print(run(options))
    return 0


def run(options: PseudoPerplexityOptions) -> str:
    """Measure all models, write the CSV file, the table and the plot, and return the table's page.

    Raises:
        UserError: If a model, the texts or the output cannot be used; raised before any text is
            measured.
    """
    sources = parse_sources(options.data.text, column=options.data.column)
    settings = {
        **identity(options),
        "model": [model_fingerprint(name) for name in options.model.model],
        "text": source_key(sources),
    }
    output = Output(options.output.output, "pseudo-perplexity", settings)
    path = output.folder / "pseudo_perplexity.csv"
    if output.state() == "finished":
        return path.with_suffix(".md").read_text(encoding="utf-8")

    # Models that cannot be used are reported before the output directory is created.
    series = load_series(options, sources)

    with output.claim():
        # An excerpt with a row in the CSV file was measured before an interruption.
        finished = set(read_rows(path)[KEY].itertuples(index=False, name=None))
        for entry in series:
            description = f"{entry.name}, YaRN {entry.yarn}"
            for excerpt in tqdm(entry.excerpts, desc=description, unit="text"):
                if entry.key(excerpt) not in finished:
                    row = measure_excerpt(entry, excerpt, options.sampling)
                    row.to_csv(path, mode="a", header=False, index=False)

        buckets = summarize(read_rows(path))
        run_environment = environment(dtype=options.model.dtype)
        page = write_page(path, buckets, environment_line(run_environment))
        output.finish(environment=run_environment, buckets=[asdict(bucket) for bucket in buckets])
    return page


# ------------------------------------------------------------------------------------------------
# arithmetic


def sample_positions(length: int, count: int | None, seed: int, text_digest: str) -> np.ndarray:
    """Sample positions of a text without replacement.

    Args:
        length: Number of positions.
        count: Number of positions to sample; None selects all.
        seed: Random seed.
        text_digest: Identifier of the text. Each text has its own sequence of random numbers.

    Returns:
        Sorted positions, (count,) int64.
    """
    if count is None or count >= length:
        return np.arange(length)

    # The positions do not depend on the model, so models with one tokenizer are measured at
    # identical positions.
    digest = hashlib.sha256(f"{seed} {text_digest}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    return np.sort(generator.choice(length, size=count, replace=False))


def mean_and_error(values: np.ndarray, population: int) -> tuple[float, float]:
    """Return the mean of a sample and its standard error.

    The error includes the finite population correction sqrt(1 - n / N). It is 0 if the sample is
    the complete population, and NaN for a single value of a larger population.

    Args:
        values: Sample without replacement, (n,).
        population: Number N of values in the population.
    """
    # The standard error of pandas uses n - 1 degrees of freedom, and is NaN for a single value.
    sample = pandas.Series(values, dtype=np.float64)
    correction = math.sqrt(1 - len(sample) / population)
    error = float(sample.sem()) * correction if correction else 0.0
    return float(sample.mean()), error


@torch.inference_mode()
def masked_cross_entropy(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, mask_token_id: int
) -> np.ndarray:
    """Compute -log p(token | all other tokens) at positions of a text.

    Args:
        model: Masked language model.
        ids: Token ids of the text with special tokens, (L,) int64.
        positions: Positions to mask, one per copy of the text, (n,) int64.
        mask_token_id: Id of the mask token.

    Returns:
        Cross-entropy in nats, (n,) float64.
    """
    losses = []
    # Each row of a forward pass is a copy of the text with one masked position.
    for part in positions.split(max(1, BATCH_TOKENS // len(ids))):
        rows = torch.arange(len(part), device=ids.device)
        masked = ids.repeat(len(part), 1)
        masked[rows, part] = mask_token_id

        # The default arguments bind the tensors of this iteration.
        def select_masked(
            module: torch.nn.Module,
            inputs: tuple[torch.Tensor, ...],
            rows: torch.Tensor = rows,
            part: torch.Tensor = part,
        ) -> tuple[torch.Tensor]:
            # The decoder receives the masked position of each row, so logits of the shape
            # (n, L, V) are never computed.
            return (inputs[0][rows, part],)

        with model.get_output_embeddings().register_forward_pre_hook(select_masked):
            logits = model(input_ids=masked, attention_mask=torch.ones_like(masked)).logits
        # The softmax over the vocabulary is computed in float32 for models of any precision.
        losses.append(F.cross_entropy(logits.float(), ids[part], reduction="none").double().cpu())
    return torch.cat(losses).numpy()


def summarize(rows: pandas.DataFrame) -> list[Bucket]:
    """Return the results of all models, YaRN settings and lengths.

    Args:
        rows: Table of the CSV file.
    """
    buckets = []
    for (name, yarn, length), texts in rows.groupby(["name", "yarn", "length"]):
        # All texts have the same weight, whatever their length. The errors of their means are
        # independent, and one unknown error makes the total unknown.
        means = texts["mean_cross_entropy"]
        mean = means.mean()
        squared_errors = texts["standard_error"] ** 2
        error_positions = math.sqrt(squared_errors.sum(skipna=False)) / len(texts)
        error_texts = means.sem()

        # 1.96 standard errors on both sides are a 95 % interval. A single text has no error between
        # texts, and its interval is unknown if all positions, or only one of them, were masked. The
        # exponential of 700 is close to the largest float64.
        margin = math.nan
        if len(texts) > 1 or error_positions > 0:
            margin = 1.96 * np.nanmax([error_positions, error_texts])
        interval = np.exp(np.minimum([mean - margin, mean, mean + margin], 700)).tolist()

        bucket = Bucket(
            name=name,
            yarn=yarn,
            length=int(length),
            texts=len(texts),
            positions=int(texts["positions"].sum()),
            mean_cross_entropy=float(mean),
            error_positions=None if math.isnan(error_positions) else error_positions,
            error_texts=None if math.isnan(error_texts) else float(error_texts),
            pseudo_perplexity=interval[1],
            low=None if math.isnan(margin) else interval[0],
            high=None if math.isnan(margin) else interval[2],
        )
        buckets.append(bucket)
    return buckets


# ------------------------------------------------------------------------------------------------
# models and texts


def load_series(options: PseudoPerplexityOptions, sources: Sequence[Source]) -> list[Series]:
    """Load all models in all YaRN settings, and select the excerpts of each model.

    Args:
        options: Options of the command.
        sources: Sources of the texts.

    Raises:
        UserError: If a model or a tokenizer cannot be used, or no text is long enough.
    """
    names = options.model.model
    labels = [Path(name).name for name in names]
    if len(set(labels)) < len(labels):
        # Directories of the same name are distinguished by their paths.
        labels = names

    series = []
    for label, name in zip(labels, names):
        tokenizer = load_tokenizer(name, trust_remote_code=options.model.trust_remote_code)
        models = [load_model(options.model, name, factor) for factor in options.model.yarn]
        check_vocabulary(tokenizer, models[0], name)

        # YaRN changes neither the tokenizer nor the texts, so all settings of a model share the
        # excerpts.
        lengths = usable_lengths(options.data.lengths, models, tokenizer)
        excerpts = select_excerpts(options.data, sources, tokenizer, lengths)
        for factor, model in zip(options.model.yarn, models):
            yarn = "off" if factor == "off" else f"{factor:g}"
            series.append(Series(label, yarn, model, tokenizer, excerpts))
    return series


def load_model(options: ModelOptions, name: str, yarn: float | str) -> PreTrainedModel:
    """Load a masked language model in evaluation mode.

    Args:
        options: Precision, device, and whether remote code is trusted.
        name: Directory or Hub name.
        yarn: YaRN factor, or "off".

    Raises:
        UserError: If the checkpoint contains no masked-LM head, or YaRN is requested for a model
            other than NeoBERT.
    """
    trust_remote_code = options.trust_remote_code
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if not isinstance(yarn, str):
        if config.model_type != "neobert":
            raise UserError(
                f"`yarn` requires a NeoBERT model, got the {config.model_type} model {name}. Pass "
                "`--yarn off`."
            )

        config.rope_scaling = {"rope_type": "yarn", "factor": yarn}
        # A model that was saved with YaRN has been trained with a shorter context.
        trained_length = config.rope_parameters["original_max_position_embeddings"]
        config.max_position_embeddings = math.ceil(trained_length * yarn)

    model, info = AutoModelForMaskedLM.from_pretrained(
        name,
        config=config,
        dtype=getattr(torch, options.dtype),
        output_loading_info=True,
        trust_remote_code=trust_remote_code,
    )
    check_trained_head(info, name, "masked-LM head", "Pass a masked language model.")

    # The batches have no padding. Unpadding would warn about the hook of `masked_cross_entropy`.
    model.config.unpad_inputs = False
    return model.eval().to(choose_device(options.device))


def usable_lengths(
    lengths: Sequence[int] | None,
    models: Sequence[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
) -> list[int]:
    """Return the lengths that a model supports, in ascending order.

    Args:
        lengths: Requested lengths in tokens; None selects those of LENGTHS up to the context length
            of the model.
        models: The model in all YaRN settings.
        tokenizer: Tokenizer of the model.

    Raises:
        UserError: If the model supports none of the lengths.
    """
    if not lengths:
        limits = [position_limit(model.base_model) or LENGTHS[-1] for model in models]
        context_length = min(max(limits), LENGTHS[-1])
        lengths = [*(length for length in LENGTHS if length < context_length), context_length]

    limit = max(lengths)
    if any("position" in name for name, _ in models[0].named_parameters()):
        # Learned position embeddings do not extend beyond their table.
        limit = text_limit(models[0], tokenizer) or limit

    # A text needs at least one token besides the special tokens.
    min_length = tokenizer.num_special_tokens_to_add() + 1
    usable = sorted({length for length in lengths if min_length <= length <= limit})
    unusable = ", ".join(str(length) for length in sorted(set(lengths) - set(usable)))
    # Without a limit of the model, `limit` is the largest of the requested lengths.
    bounds = f"at least {min_length}"
    if limit < max(lengths):
        bounds += f" and at most {limit}"
    if not usable:
        raise UserError(
            f"`lengths` must be {bounds} tokens for this model, got {unusable}. Pass other "
            "--lengths."
        )
    if unusable:
        logger.warning(
            "The lengths %s are omitted, because they must be %s tokens for this model.",
            unusable,
            bounds,
        )
    return usable


def select_excerpts(
    options: TextOptions,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
) -> list[Excerpt]:
    """Select texts, and truncate them to the lengths at which they are measured.

    Lengths include the special tokens.

    Args:
        options: Number of texts, and the assignment of texts to lengths. truncate: the first tokens
            of every text, at each length that the text reaches. full: every text once, truncated to
            the largest length, in the smallest length that holds it, as in Figure 2.
        sources: Sources of the texts.
        tokenizer: Tokenizer of the model.
        lengths: Lengths in ascending order.

    Returns:
        Excerpts, shortest first.

    Raises:
        UserError: If no text is long enough.
    """
    special_count = tokenizer.num_special_tokens_to_add()
    # Texts are truncated to the largest length when they are read, so MAX_ROWS of them fit
    # into memory. Identical texts have one digest and are measured once.
    texts = {}
    row_count = 0
    for row in load_rows(sources).take(MAX_ROWS):
        row_count += 1
        text = row["text"] or ""
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ids and lengths:
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            texts[digest] = ids[: lengths[-1] - special_count]

    if row_count == MAX_ROWS:
        logger.warning("The texts are selected from the first %s rows.", f"{MAX_ROWS:,}")

    # The longest texts are used at every length that they reach, so the results of two lengths
    # differ in nothing but the length.
    longest = sorted(texts.items(), key=lambda item: len(item[1]), reverse=True)
    excerpts = []
    for digest, ids in longest[: options.max_texts]:
        if options.bucketing == "full":
            bucket_lengths = [
                next(length for length in lengths if len(ids) + special_count <= length)
            ]
        else:
            bucket_lengths = [length for length in lengths if length <= len(ids) + special_count]
        for length in bucket_lengths:
            excerpts.append(Excerpt(digest, length, ids[: length - special_count]))

    if not excerpts:
        raise UserError(
            f"no text of {options.text} reaches one of the lengths {list(lengths)}. Pass longer "
            "texts, or smaller `--lengths`."
        )
    return sorted(excerpts, key=lambda excerpt: (len(excerpt.ids), excerpt.digest))


# ------------------------------------------------------------------------------------------------
# measurement and results


def measure_excerpt(series: Series, excerpt: Excerpt, options: SamplingOptions) -> pandas.DataFrame:
    """Measure a model on an excerpt, and return the row of the CSV file.

    Args:
        series: Model and tokenizer.
        excerpt: Text without special tokens.
        options: Number of masked positions, and seed of their sample.
    """
    # The special tokens of any text are those before and after its tokens.
    encoded = series.tokenizer("a", return_special_tokens_mask=True)
    special_ids = encoded["input_ids"]
    special_mask = encoded["special_tokens_mask"]
    start = special_mask.index(0)
    end = start + special_mask.count(0)
    ids = [*special_ids[:start], *excerpt.ids, *special_ids[end:]]

    count = None if options.positions == "exact" else options.positions
    # Special tokens are never masked. The sampled positions count from the first token of the text.
    positions = sample_positions(len(excerpt.ids), count, options.seed, excerpt.digest)
    device = series.model.device
    losses = masked_cross_entropy(
        series.model,
        torch.tensor(ids, device=device),
        torch.from_numpy(positions + start).to(device),
        series.tokenizer.mask_token_id,
    )
    mean, error = mean_and_error(losses, len(excerpt.ids))
    values = [*series.key(excerpt), len(ids), len(positions), mean, error]
    return pandas.DataFrame([values], columns=COLUMNS)


def read_rows(path: Path) -> pandas.DataFrame:
    """Read the CSV file, which is created if it does not exist.

    An incomplete last line, left behind by a process that was killed, is removed from the file.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ",".join(COLUMNS) + "\n"
    complete = text[: text.rfind("\n") + 1]
    write_text(path, complete)

    # Names and digests that consist of digits remain strings, and so do names such as "null".
    missing = dict.fromkeys(["mean_cross_entropy", "standard_error"], [""])
    return pandas.read_csv(
        io.StringIO(complete),
        dtype=dict.fromkeys(KEY[:3], str),
        keep_default_na=False,
        na_values=missing,
    )


def write_page(path: Path, buckets: Sequence[Bucket], environment_text: str) -> str:
    """Write the table and the plot next to the CSV file.

    Args:
        path: Path of the CSV file.
        buckets: Results of `summarize`.
        environment_text: Description of the environment.

    Returns:
        Content of the page with the table.
    """
    columns = ["name", "yarn", "length", "texts", "positions", "pseudo_perplexity", "low", "high"]
    table = pandas.DataFrame([asdict(bucket) for bucket in buckets])[columns].round(3)
    cells = table.astype(object).where(table.notna(), "").astype(str).values.tolist()
    page = (
        f"# Pseudo-perplexity\n\n{environment_text}.\n\n"
        f"{markdown_table(columns, cells)}\n"
        "The pseudo-perplexity is the exponential of the mean cross-entropy, with every position "
        "masked separately. `low` and `high` are the ends of its 95 % interval, which covers the "
        "selection of texts and of positions.\n"
    )
    write_text(path.with_suffix(".md"), page)

    figure = plot_buckets(buckets)
    with new_file(path.with_suffix(".png")) as file:
        figure.savefig(file, dpi=150)
    return page


def plot_buckets(buckets: Sequence[Bucket]) -> Figure:
    """Plot pseudo-perplexity against length, with one line per model and YaRN setting.

    The error bars are the 95 % intervals.
    """
    lines: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        yarn = "" if bucket.yarn == "off" else f", YaRN {bucket.yarn}"
        lines.setdefault(f"{bucket.name}{yarn}", []).append(bucket)

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        points = sorted(points, key=lambda point: point.length)
        # A point without an interval has an error bar of length 0.
        values = [point.pseudo_perplexity for point in points]
        below = [value - (point.low or value) for value, point in zip(values, points)]
        above = [(point.high or value) - value for value, point in zip(values, points)]
        axes.errorbar(
            [point.length for point in points],
            [point.pseudo_perplexity for point in points],
            yerr=[below, above],
            label=label,
            marker="o",
            capsize=3,
        )

    lengths = sorted({bucket.length for bucket in buckets})
    # The lengths grow by factors, and pseudo-perplexities may differ by orders of magnitude.
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
