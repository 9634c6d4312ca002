"""`neobert ablations --scale small`: the paper's ladder M0 to M9 (Table 2) at a size for one CPU, each rung measured the same way.

Every rung is its recipe `recipes/ablations/m?.yaml`, shrunk by one rule (`shrink`), trained by `neobert pretrain`'s code with several seeds, and
measured by (1) a linear probe: logistic regression on mean-pooled features, sentence sentiment, in place of GLUE, and (2) masked-LM loss and
accuracy on held-out text. A finished rung is not run again, and the table has all that work_dir holds. The chart shows the published numbers beside
ours, which are marked as small-scale.
"""

import dataclasses
import json
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ..common.errors import require


require("train", "accelerate", "datasets")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from ..common import local_text  # noqa: E402
from ..common.errors import UserError  # noqa: E402
from ..common.files import check_folder, write_json, write_text  # noqa: E402
from ..common.loading import RECIPES  # noqa: E402
from ..common.recipe import read_recipe  # noqa: E402
from ..common.results import environment, markdown_table  # noqa: E402
from ..common.rows import read_rows  # noqa: E402
from ..modeling_neobert import NeoBERTForMaskedLM  # noqa: E402
from . import pretrain  # noqa: E402
from .batching import MicroBatches, Windows, pad  # noqa: E402
from .masking import TokenMasking  # noqa: E402
from .pretrain_trainer import evaluate_batches  # noqa: E402
from .pretraining_data import tokens_from_texts  # noqa: E402


CONFIGS = RECIPES / "ablations"
# Table 2 of the paper: change, GLUE dev, kept.
PUBLISHED = {
    "m0": ("BERT base, Wiki + Books", 79.2, None),
    "m1": ("RoPE + SwiGLU + RMSNorm", 81.1, True),
    "m2": ("data: RefinedWeb", 84.0, True),
    "m3": ("tokenizer: LLaMA 2", 82.2, False),
    "m4": ("AdamW + cosine", 83.5, True),
    "m5": ("masking 20 %, always [MASK]", 82.9, True),
    "m6": ("packed without boundaries", 80.5, False),
    "m7": ("250M, 16 x 1,056", 85.3, False),
    "m8": ("250M, 28 x 768", 86.0, True),
    "m9": ("batch 2M, length 4,096", 87.3, True),
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass
class Scale:
    """What stands for the paper's sizes.

    hidden, layers, heads: for 768, 12 and 12. length: for 512 tokens. tokens: of a step, for 131,072; largest_batch: how many times that for the
    2,097,152 of M9. vocabulary: for 30,522. corpus_texts: of each corpus, at most. probe_texts: sentences of the probe, a quarter of them its test.
    """

    hidden: int
    layers: int
    heads: int
    length: int
    tokens: int
    largest_batch: int
    steps: int
    vocabulary: int
    corpus_texts: int
    learning_rate: float
    probe_texts: int


SCALES = {
    "small": Scale(
        hidden=64, layers=2, heads=2, length=64, tokens=512, largest_batch=2, steps=1500, vocabulary=2048, corpus_texts=40_000,
        learning_rate=1.5e-3, probe_texts=8000,
    ),
    "tiny": Scale(
        hidden=24, layers=2, heads=2, length=16, tokens=128, largest_batch=2, steps=3, vocabulary=200, corpus_texts=150,
        learning_rate=3e-3, probe_texts=40,
    ),
}  # fmt: skip


@dataclass
class AblationArguments:
    """The ladder's run."""

    scale: str = field(
        default="small", metadata={"help": f"one of {', '.join(SCALES)}; for the paper's size run the recipes with neobert pretrain"}
    )
    seeds: int = field(default=3, metadata={"help": "runs of each rung"})
    steps: int | None = field(default=None, metadata={"help": "optimizer steps of a run; default: the scale's"})
    rungs: str = field(default=",".join(PUBLISHED), metadata={"help": "which rungs, separated by commas"})
    work_dir: str | None = field(
        default=None, metadata={"help": "models and data; a finished rung is not run again; default runs/ablations_SCALE"}
    )
    results_dir: str = field(default="results", metadata={"help": "where table, chart and numbers go"})
    curated: str | None = field(default=None, metadata={"help": "jsonl with text in place of Wiki + Books (M0, M1); default: WordNet"})
    diverse: str | None = field(
        default=None, metadata={"help": "jsonl with text in place of RefinedWeb (M2 on); default: WordNet and GCIDE"}
    )
    heldout: str | None = field(default=None, metadata={"help": "jsonl with text that no rung sees; default: held-out part of both"})
    probe: str | None = field(default=None, metadata={"help": "jsonl with text and label (0, 1); default: rated movie-review sentences"})

    def __post_init__(self):
        if self.scale not in SCALES:
            raise UserError(
                f"scale must be one of {', '.join(SCALES)}, but {self.scale!r} was given; the paper's size is run rung by rung with neobert pretrain"
            )
        for name in ("seeds", "steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, but {getattr(self, name)} was given")
        self.sizes = SCALES[self.scale] if self.steps is None else dataclasses.replace(SCALES[self.scale], steps=self.steps)
        names = [name.strip() for name in self.rungs.split(",") if name.strip()]
        unknown = sorted(set(names) - set(PUBLISHED))
        if unknown or not names:
            raise UserError(f"there is no rung {(unknown or [self.rungs])[0]!r}; choose among {', '.join(PUBLISHED)}")
        self.rung_names = [name for name in PUBLISHED if name in names]
        self.work_dir = self.work_dir or f"runs/ablations_{self.scale}"
        for name in ("work_dir", "results_dir"):
            check_folder(getattr(self, name), name)
        for name, columns in {"curated": ["text"], "diverse": ["text"], "heldout": ["text"], "probe": ["text", "label"]}.items():
            if getattr(self, name) is not None:
                for _ in read_rows(getattr(self, name), columns, ["text"]):
                    pass
        if self.probe is not None and {row["label"] for _, row in read_rows(self.probe, ["label"])} != {0, 1}:
            raise UserError(f"probe {self.probe}: the labels must be 0 and 1, and both must be there")


def rung_recipe(name):
    """The paper-size recipe of a rung as a dict."""
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def shrink(recipe, scale):
    """A rung's recipe at a reduced scale, by one rule for all rungs: what the paper's recipes share stays shared, what differs still differs.

    The bound of the uniform initialisation grows with 1 / sqrt(width), from 0.02 at 768, so that narrow models start with activations as large.
    """
    model = dict(recipe["model_config"])
    heads = scale.heads
    width = model["hidden_size"] / 768 * scale.hidden
    length = scale.length * (2 if recipe["max_length"] > 512 else 1)
    model.update(
        hidden_size=2 * heads * round(width / (2 * heads)),
        num_attention_heads=heads,
        num_hidden_layers=max(1, round(model["num_hidden_layers"] / 12 * scale.layers)),
        intermediate_size=4 * scale.hidden,
        max_position_embeddings=length,
        decoder_init_range=round(0.02 * math.sqrt(768 / scale.hidden), 4),
    )
    model.pop("vocab_size", None)
    small = {
        key: value
        for key, value in recipe.items()
        if key not in ("bf16", "keep_every", "output_dir", "dataset", "text_column", "tokenizer")
    }
    tokens = scale.tokens * (scale.largest_batch if recipe["gradient_accumulation_steps"] > 1 else 1)
    small.update(
        model_config=model,
        max_length=length,
        tokens_per_batch=tokens // length * length,
        gradient_accumulation_steps=1,
        learning_rate=scale.learning_rate,
        max_steps=scale.steps,
        warmup_steps=scale.steps // 10,
        logging_steps=max(1, scale.steps // 10),
        save_steps=scale.steps // max(1, scale.steps // 10) * max(1, scale.steps // 10),
        keep_last=1,
        text_column="text",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return small


def train_tokenizer(texts, kind, vocabulary, folder):
    """A tokenizer learnt from `texts`: "wordpiece" (uncased, as BERT's) or "bpe" (cased, byte-level, as LLaMA's in kind, 5 % larger)."""
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        size = max(vocabulary * 32064 // 30522, len(alphabet) + 100)
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(str(folder))


def make_data(arguments, folder):
    """Writes the corpora, the held-out text, the probe and the tokenizers under `folder`; returns the paths by name."""
    given = {name: getattr(arguments, name) for name in ("curated", "diverse", "heldout", "probe")}
    paths = {name: Path(value) if value else folder / f"{name}.jsonl" for name, value in given.items()}
    paths.update(wordpiece=folder / "wordpiece", bpe=folder / "bpe")
    scale = arguments.sizes
    if not all(paths[name].is_file() for name in ("curated", "diverse", "heldout")):
        parts = {}
        for name, entries in (("wordnet", local_text.wordnet_entries), ("gcide", local_text.gcide_entries)):
            parts[name] = ([], [])
            for row in entries():
                parts[name][local_text.is_held_out(row["id"])].append(json.dumps({"text": row["text"]}, ensure_ascii=False))
        own = {
            "curated": _some(parts["wordnet"][0], scale.corpus_texts),
            "diverse": _some(parts["wordnet"][0] + parts["gcide"][0], scale.corpus_texts),
            "heldout": _some(parts["wordnet"][1], 750) + _some(parts["gcide"][1], 750),
        }
        for name, lines in own.items():
            if given[name] is None:
                write_text(paths[name], "\n".join(lines) + "\n")
    if not paths["probe"].is_file():
        rows = [json.dumps({"text": row["text"], "label": row["label"]}) for row in local_text.sentiment_sentences("movie")]
        write_text(paths["probe"], "\n".join(rows) + "\n")
    for kind in ("wordpiece", "bpe"):
        if not (paths[kind] / "tokenizer_config.json").is_file():
            texts = (row["text"] for _, row in read_rows(paths["diverse"], ["text"]))
            train_tokenizer(texts, kind, scale.vocabulary, paths[kind])
    return paths


def _some(rows, count):
    """At most `count` of the rows, always the same ones, in an order of their own."""
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:count]]


def rung_values(name, scale, paths, out, seed):
    """All keys of one rung's small run, as `neobert pretrain` takes them."""
    recipe = rung_recipe(name)
    values = shrink(recipe, scale)
    kind = "bpe" if "tokenizer" in recipe else "wordpiece"
    data = "diverse" if "refinedweb" in recipe["dataset"] else "curated"
    prepared = out.parent / f"prepared_{data}_{kind}"
    return {
        **values, "dataset": str(paths[data]), "tokenizer": str(paths[kind]), "prepared_dir": str(prepared), "output_dir": str(out), "seed": seed,
    }  # fmt: skip


def train_rung(values):
    """Trains one rung with `neobert pretrain`'s code, or continues it."""
    argv = []
    for key, value in values.items():
        argv += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    pretrain.run(*read_recipe((pretrain.ModelArguments, pretrain.DataArguments, pretrain.PretrainingArguments), argv))


@torch.no_grad()
def features(model, tokenizer, texts, length, batch_size=64):
    """Mean-pooled last hidden states, (texts, D) numpy; special tokens included, padding not."""
    ids = tokenizer(list(texts), truncation=True, max_length=length - 2, add_special_tokens=False)["input_ids"]
    rows = [np.array([tokenizer.cls_token_id, *row, tokenizer.sep_token_id], dtype=np.int64) for row in ids]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    output = np.zeros((len(rows), model.config.hidden_size), dtype=np.float32)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = pad([rows[i] for i in chosen], tokenizer.pad_token_id)
        hidden = model.model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        output[chosen] = ((hidden * mask).sum(dim=1) / mask.sum(dim=1)).numpy()
    return output


def probe_accuracy(x, labels):
    """Test accuracy of a logistic regression on standardised features: fitted on three quarters, measured on the last."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    split = len(x) * 3 // 4
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500))
    return float(classifier.fit(x[:split], labels[:split]).score(x[split:], labels[split:]))


def measure(model, tokenizer, heldout, probe, length):
    """The measurements of a rung: masking of the held-out text is 20 % always [MASK], whatever the rung was trained with.

    Returns:
        dict: probe_accuracy, masked_accuracy, masked_loss (nats a token), masked_bits_per_character (of the hidden text, so that tokenizers compare).
    """
    model.eval()
    tokens = tokens_from_texts(heldout, tokenizer)
    windows = Windows(tokens, tokenizer.cls_token_id, tokenizer.sep_token_id, length)
    batches = MicroBatches.one_pass(windows, TokenMasking(tokenizer), tokens_per_batch=4096, max_length=length, seed=1234)
    masked = evaluate_batches(model, batches)
    labels = torch.cat([batches[i]["labels"].flatten() for i in range(len(batches))])
    characters = sum(len(token.lstrip("#Ġ")) for token in tokenizer.convert_ids_to_tokens(labels[labels != -100].tolist()))
    x = features(model, tokenizer, [row["text"] for row in probe], length)
    return {
        "probe_accuracy": probe_accuracy(x, np.array([row["label"] for row in probe])),
        "masked_accuracy": masked["masked_accuracy"],
        "masked_loss": masked["loss"],
        "masked_bits_per_character": masked["loss"] * masked["masked_tokens"] / math.log(2) / characters,
    }


def run_ladder(arguments):
    """Trains and measures every rung and seed.

    Returns:
        list of dicts (rung, seed, tokens_seen, parameters and the measurements) of all finished rungs in work_dir, the majority class's accuracy,
        test sentences of the probe.
    """
    scale, folder = arguments.sizes, Path(arguments.work_dir)
    todo = [(name, seed) for seed in range(arguments.seeds) for name in arguments.rung_names]
    _check_same_ladder(arguments, todo)
    paths = make_data(arguments, folder / "data")
    heldout = [row["text"] for _, row in read_rows(paths["heldout"], ["text"])]
    probe = _some([row for _, row in read_rows(paths["probe"], ["text", "label"])], scale.probe_texts)
    baseline = _majority([row["label"] for row in probe])
    for name, seed in tqdm(todo, desc="ladder", unit="run"):
        out = folder / f"{name}_seed{seed}"
        finished = out / "measured.json"
        if not finished.is_file():
            values = rung_values(name, scale, paths, out, seed)
            train_rung(values)
            model = NeoBERTForMaskedLM.from_pretrained(out, dtype=torch.float32)
            tokenizer = pretrain.load_tokenizer(values["tokenizer"])
            trained = json.loads((out / "result.json").read_text())
            row = {"rung": name, "seed": seed, "parameters": trained["parameters"], "tokens_seen": trained["tokens_seen"]}
            write_json(finished, {**row, **measure(model, tokenizer, heldout, probe, scale.length)})
    return finished_runs(folder), baseline, len(probe) - len(probe) * 3 // 4


def finished_runs(folder):
    """What was measured in a work_dir, seed by seed in the ladder's order."""
    rows = [json.loads(path.read_text()) for path in Path(folder).glob("m?_seed*/measured.json")]
    return sorted(rows, key=lambda row: (row["seed"], row["rung"]))


def _check_same_ladder(arguments, todo):
    """Finished rungs are not run again, so work_dir belongs to one scale and one set of texts; so does the report, which must lose no run."""
    folder, report = Path(arguments.work_dir), report_path(arguments)
    texts = {name: getattr(arguments, name) for name in ("curated", "diverse", "heldout", "probe")}
    texts = {name: [Path(value).name, Path(value).stat().st_size] if value else None for name, value in texts.items()}
    now = {"scale": dataclasses.asdict(arguments.sizes), "texts": texts}
    for path, option in ((folder / "ladder.json", "work_dir"), (report, "results_dir")):
        before = json.loads(path.read_text()) if path.is_file() else {}
        for group, values in now.items():
            for name, value in values.items():
                if before.get(group, values).get(name) != value:
                    raise UserError(
                        f"{path.parent} holds a ladder with {name} {before[group].get(name)}, now {value}; give the same, or another {option}"
                    )
    kept = {*todo, *((row["rung"], row["seed"]) for row in finished_runs(folder))}
    lost = [f"{row['rung']} seed {row['seed']}" for row in before.get("runs", []) if (row["rung"], row["seed"]) not in kept]
    if lost:
        raise UserError(f"{report} holds {lost[0]}, which {folder} does not; give its work_dir, or another results_dir")
    write_json(folder / "ladder.json", now)


def _majority(labels):
    test = labels[len(labels) * 3 // 4 :]
    return max(test.count(0), test.count(1)) / len(test)


def summarise(rows):
    """{rung: {measurement: (mean, standard deviation over seeds or None)}}, in the ladder's order."""
    table = {}
    for name in PUBLISHED:
        mine = [row for row in rows if row["rung"] == name]
        if mine:
            values = {key: [row[key] for row in mine] for key in mine[0] if key not in ("rung", "seed")}
            table[name] = {key: (statistics.mean(v), statistics.stdev(v) if len(v) > 1 else None) for key, v in values.items()}
    return table


def _with_spread(pair, digits=1, factor=100):
    mean, spread = pair
    return f"{mean * factor:.{digits}f}" + (f" ± {spread * factor:.{digits}f}" if spread is not None else "")


def report_path(arguments):
    """The report's .json; its .md and .png lie beside it."""
    return Path(arguments.results_dir) / f"ablations_{arguments.scale}.json"


def report(arguments, rows, baseline, probe_tests, env):
    """Writes ablations_<scale>.json, .md and .png into the results folder."""
    table, path = summarise(rows), report_path(arguments)
    ladder = json.loads((Path(arguments.work_dir) / "ladder.json").read_text())
    scale = ladder["scale"]
    counts = sorted({sum(row["rung"] == name for row in rows) for name in table})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    write_json(path, {**env, **ladder, "probe_majority": baseline, "probe_test_texts": probe_tests, "runs": rows})
    header = [
        "model",
        "change",
        "kept",
        "GLUE dev (published)",
        "probe accuracy",
        "masked accuracy",
        "bits per hidden character",
        "parameters",
        "tokens",
    ]
    lines = []
    for rung, values in table.items():
        change, glue, kept = PUBLISHED[rung]
        lines.append(
            [
                rung.upper(),
                change,
                {True: "yes", False: "no", None: "-"}[kept],
                glue,
                _with_spread(values["probe_accuracy"]),
                _with_spread(values["masked_accuracy"]),
                _with_spread(values["masked_bits_per_character"], 2, 1),
                f"{values['parameters'][0] / 1e6:.2f}M",
                f"{values['tokens_seen'][0] / 1e6:.2f}M",
            ]  # fmt: skip
        )
    stand_ins = {
        "Wiki + Books": arguments.curated or "WordNet",
        "RefinedWeb": arguments.diverse or "WordNet and GCIDE together",
        "GLUE": "the probe" if arguments.probe is None else f"the probe on {arguments.probe}",
    }
    text = (
        f"# The ablation ladder at a small scale\n\n"
        f"**Small-scale: models of {table[next(iter(table))]['parameters'][0] / 1e6:.2f}M parameters and up, {scale['steps']:,} steps of "
        f"{scale['tokens']:,} tokens. It shows that every rung runs and is measured alike; it says nothing for or against the "
        f"published numbers, which come from 1,000,000 steps of 131,072 tokens.**\n\n"
        f"Mean ± standard deviation over {seeds} seeds. Probe: logistic regression on mean-pooled features, sentiment of movie-review "
        f"sentences, {probe_tests:,} test sentences (always the majority class: {100 * baseline:.1f} %). Masked accuracy: 20 % always "
        f"[MASK] on held-out text; M3's other tokenizer predicts other pieces, so compare it by bits per hidden character (lower is better). In place of "
        + ", of ".join(f"{name}: {what}" for name, what in stand_ins.items())
        + f". Tokenizers: a WordPiece and a byte-level BPE of {scale['vocabulary']:,} pieces and 5 % more, learnt from that text.\n\n"
    )
    text += markdown_table(header, lines)
    versions = ", ".join(f"{package} {version}" for package, version in env["versions"].items())
    text += (
        f"\n`{env['command']}`, commit {env['commit']}, {env['date']}, {env['hardware']}, {env['threads']} threads, float32; {versions}.\n"
    )
    write_text(path.with_suffix(".md"), text)
    draw(table, seeds, baseline, path.with_suffix(".png"))


def draw(table, seeds, baseline, path):
    """Figure 1's chart: published GLUE by rung on top, our two measurements below; rungs that were not kept are pale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(table)
    colours = ["#2f6db3" if PUBLISHED[name][2] is not False else "#b9cbe0" for name in names]
    figure, panels = plt.subplots(3, 1, figsize=(9, 8.6), sharex=True, layout="constrained")
    measured = {
        "GLUE dev, published": ([PUBLISHED[name][1] for name in names], None, 1),
        f"SMALL SCALE, {seeds} seeds\nprobe accuracy, %": (*_series(table, names, "probe_accuracy", 100), 1),
        f"SMALL SCALE, {seeds} seeds\nbits per hidden character\n(lower is better)": (
            *_series(table, names, "masked_bits_per_character", 1), 2,
        ),
    }  # fmt: skip
    for axes, (label, (means, spreads, digits)) in zip(panels, measured.items()):
        axes.bar(range(len(names)), means, yerr=spreads, color=colours, capsize=3)
        tops = [mean + spread for mean, spread in zip(means, spreads or [0] * len(names))]
        low = min(mean - spread for mean, spread in zip(means, spreads or [0] * len(names)))
        if axes is panels[1]:
            low = min(low, 100 * baseline)
            axes.axhline(100 * baseline, color="grey", linewidth=0.8, linestyle="--", label="always the majority class")
        room = max(max(tops) - low, 1e-3)
        axes.set_ylim(low - 0.25 * room, max(tops) + (0.45 if axes is panels[1] else 0.2) * room)
        for i, (top, mean) in enumerate(zip(tops, means)):
            axes.text(i, top + 0.03 * room, f"{mean:.{digits}f}", ha="center", fontsize=8)
        axes.set_ylabel(label)
    panels[1].legend(fontsize=8, loc="upper left")
    panels[2].set_xticks(
        range(len(names)), [f"{name.upper()}\n{PUBLISHED[name][0]}" for name in names], rotation=35, ha="right", fontsize=8
    )
    figure.suptitle("Ablation ladder: published (top), a small-scale run of the same recipes (below); pale: not kept", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial.png")
    figure.savefig(temporary, dpi=110)
    plt.close(figure)
    temporary.replace(path)


def _series(table, names, key, factor):
    """Means and standard deviations (0 for one seed) of a measurement over the rungs."""
    return [factor * table[name][key][0] for name in names], [factor * (table[name][key][1] or 0) for name in names]


def main(argv=None):
    """Entry point of `neobert ablations`; returns the exit code."""
    require("eval", "sklearn", "matplotlib")
    (arguments,) = read_recipe((AblationArguments,), sys.argv[1:] if argv is None else argv, prog="neobert ablations")
    rows, baseline, probe_tests = run_ladder(arguments)
    report(arguments, rows, baseline, probe_tests, environment())
    print(report_path(arguments).with_suffix(".md"))
    return 0
