"""`neobert mteb`: MTEB through the `mteb` package, packed and resumable, and its table in the layout of the paper's Table 4."""

# ruff: noqa: E402  (a missing extra is named before the imports that need it)

import functools
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..common.errors import require


require("eval", "sentence_transformers", "mteb")

import mteb
import numpy as np
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.types import PromptType

from ..common.errors import UserError, one_line
from ..common.files import check_folder, write_json, write_text
from ..common.loading import choose_device, choose_dtype
from ..common.published import MTEB, MTEB_NOTE, MTEB_TYPES
from ..common.recipe import read_recipe
from ..common.results import environment, markdown_table
from .contrastive import INSTRUCTION_TEMPLATE
from .local_tasks import LOCAL_TASKS
from .packed_encoder import TOKENS_HELP, PackedEncoder


PAPER_BENCHMARK = "MTEB(eng, v1)"
# Both texts of these tasks are alike, so both carry the instruction; elsewhere the query alone does.
_INSTRUCTED_SIDES = (None, PromptType.query)


@dataclass
class MtebArguments:
    """Options of `neobert mteb`."""

    model: str = field(metadata={"help": "sentence encoder or bare encoder: a folder or a Hub name"})
    output: str = field(metadata={"help": "folder for <name>.json, the tables and MTEB's result cache"})
    tasks: list[str] = field(
        default_factory=lambda: [PAPER_BENCHMARK], metadata={"help": "task names, benchmark names, or 'local' (WordNet, movie sentiment)"}
    )
    name: str | None = field(default=None, metadata={"help": "name of the row; the model's by default"})
    dtype: str = field(default="auto", metadata={"help": "auto (float16 on CUDA, float32 elsewhere), float32, float16 or bfloat16"})
    instructions: str = field(default="mteb", metadata={"help": "mteb (each task's own prompt), none, or a JSON file {task, type: text}"})
    instruction_template: str = field(default=INSTRUCTION_TEMPLATE, metadata={"help": "how an instruction is put before a text"})
    max_length: int | None = field(default=None, metadata={"help": "tokens per text"})
    pooling: str = field(default="mean", metadata={"help": "mean or cls, for a bare encoder"})
    tokenizer: str | None = field(default=None, metadata={"help": "tokenizer, where the model's folder has none"})
    tokens_per_batch: int | None = field(default=None, metadata={"help": TOKENS_HELP})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:1, ..."})
    attn_implementation: str | None = field(default=None, metadata={"help": "attention implementation of transformers"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the model repository's own code"})
    stop_on_error: bool = field(default=False, metadata={"help": "stop at the first task that fails, rather than after the others"})

    def __post_init__(self):
        choose_dtype(self.dtype, "cpu")
        if "{instruction}" not in self.instruction_template:
            raise UserError(f"instruction_template must contain {{instruction}}, but {self.instruction_template!r} was given")
        if not self.tasks:
            raise UserError("no task was given; give names, a benchmark such as 'MTEB(eng, v1)', or 'local'")


def choose_tasks(names):
    """MTEB task objects for names of tasks and benchmarks; "local" is the three local ones; commas separate names too.

    Raises:
        UserError: a name that MTEB does not know, with the nearest one.
    """
    import difflib

    benchmarks = {benchmark.name for benchmark in mteb.get_benchmarks()}
    tasks = {}
    for name in names:
        if name in benchmarks or name == "local" or name in LOCAL_TASKS:
            parts = [name]
        else:
            parts = [part.strip() for part in name.split(",") if part.strip()]
        for part in parts:
            if part in benchmarks:
                found = list(mteb.get_benchmark(part).tasks)
            elif part == "local":
                found = [task() for task in LOCAL_TASKS.values()]
            elif part in LOCAL_TASKS:
                found = [LOCAL_TASKS[part]()]
            else:
                try:
                    found = [mteb.get_task(part, languages=["eng"])]
                except (KeyError, ValueError):
                    known = [*benchmarks, *LOCAL_TASKS, "local", *(task.metadata.name for task in mteb.get_tasks(languages=["eng"]))]
                    near = difflib.get_close_matches(part, known, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else ""
                    raise UserError(f"MTEB has no task or benchmark {part!r}{hint}") from None
            tasks.update({task.metadata.name: task for task in found})
    return list(tasks.values())


def read_instructions(choice, tasks):
    """{task name or task type: text} from a JSON file, {} for "mteb", None for "none".

    Raises:
        UserError: not such a file, or a key that is neither a chosen task (or a part of one) nor its type.
    """
    if choice == "mteb":
        return {}
    if choice == "none":
        return None
    path = Path(choice)
    if not path.is_file():
        raise UserError(f"instructions must be mteb, none or a JSON file, but there is no file {choice}")
    try:
        instructions = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from None
    if not isinstance(instructions, dict) or not all(isinstance(text, str) for text in instructions.values()):
        raise UserError(f"{path} must map names of tasks or task types to texts")
    known = {name for task in tasks for part in (task, *getattr(task, "tasks", ())) for name in (part.metadata.name, part.metadata.type)}
    for key in instructions:
        if key not in known:
            raise UserError(f"{path}: {key!r} is neither a chosen task nor the type of one; allowed: {', '.join(sorted(known))}")
    return instructions


class PackedModel(AbsEncoder):
    """A `PackedEncoder` as MTEB calls models.

    Args:
        encoder: `PackedEncoder`.
        name, revision: under which MTEB caches results; the revision must change with anything that changes the vectors.
        instructions: {task name or type: text} that go before MTEB's own, or None for no instruction at all.
        template: how an instruction is put before a text.
    """

    prompt_priority = (PromptSource.CUSTOM_PROMPT, PromptSource.TASK_TYPE_PROMPT, PromptSource.DEFAULT_TASK_PROMPT)

    def __init__(self, encoder, name, revision, instructions, template):
        self.encoder = encoder
        self.model = encoder.sentence_transformer
        self.prompts_dict = instructions
        self.instruction_template = template
        self.mteb_model_meta = ModelMeta.create_empty({"name": name, "revision": revision})

    def prompt(self, task_metadata, prompt_type):
        """The text before each text of this task and side."""
        if self.prompts_dict is None or prompt_type not in _INSTRUCTED_SIDES:
            return ""
        return self.get_task_instruction(task_metadata, prompt_type)

    def encode(self, inputs, *, task_metadata, hf_split, hf_subset, prompt_type=None, **kwargs):
        """(N, width) float32 vectors of all texts of the loader, batched anew by tokens."""
        texts = [text for batch in inputs for text in batch["text"]]
        show = kwargs.get("show_progress_bar", True)
        return self.encoder.encode(texts, self.prompt(task_metadata, prompt_type), show_progress_bar=show)


def fingerprint(encoder, arguments, instructions):
    """40 hex digits that change with the weights and with every setting that changes vectors."""
    digest = hashlib.sha1()
    for name, tensor in sorted(encoder.sentence_transformer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    settings = [str(encoder.dtype), encoder.max_length, encoder.prompts, arguments.pooling, instructions, arguments.instruction_template]
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()


def averages(scores, types):
    """Mean over all tasks, and per type; scores in percent.

    Args:
        scores: {task: score}; a task that failed has None.
        types: {task: type}.
    Returns:
        dict type -> mean, with "all" -> mean over the tasks. None where a task of the mean has no score: no task is ever left out.
    """
    groups = {"all": list(scores)}
    for task in scores:
        groups.setdefault(types[task], []).append(task)
    means = {}
    for group, tasks in groups.items():
        values = [scores[task] for task in tasks]
        means[group] = None if any(value is None for value in values) else float(np.mean(values))
    return means


def _cell(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def table4(runs):
    """Markdown table in the layout of Table 4: published rows, then `runs` of the whole benchmark.

    Args:
        runs: {name: result dict}, results as `evaluate` returns them; tasks beyond the 56 do not count.
    """
    header = ["model", "source", *MTEB_TYPES.values(), "avg (56)"]
    rows = [[name, "published", *(_cell(value) for value in values)] for name, values in MTEB.items()]
    for name, run in runs.items():
        rows.append([name, "measured", *_means(run, _paper_tasks())])
    return markdown_table(header, rows) + "\n" + MTEB_NOTE + "\n"


def table4_of_other_tasks(runs):
    """The same layout for `runs` of other tasks: the source of a row says how many, and the note that they are not those of the paper."""
    header = ["model", "source", *MTEB_TYPES.values(), "avg"]
    rows = [[name, "published, 56 tasks", *(_cell(value) for value in values)] for name, values in MTEB.items()]
    for name, run in runs.items():
        count = len(run["scores"])
        rows.append([name, f"measured, {count} other task{'s' if count > 1 else ''}", *_means(run, run["scores"])])
    note = "Rows of other tasks share the layout alone: their scores are not those of MTEB(eng, v1), and not to be compared with published rows."
    return markdown_table(header, rows) + f"\n{note} {MTEB_NOTE}\n"


def _means(run, tasks):
    means = averages({task: score for task, score in run["scores"].items() if task in tasks}, run["types"])
    return [*(_cell(means.get(kind)) for kind in MTEB_TYPES), _cell(means["all"])]


def task_table(runs):
    """Markdown table of every task (rows) and run (columns), with the means per type and over all tasks."""
    tasks = {task: run["types"][task] for run in runs.values() for task in run["scores"]}
    rows = []
    for kind in dict.fromkeys(tasks.values()):
        members = [task for task in tasks if tasks[task] == kind]
        rows += [[task, kind, *(_cell(run["scores"].get(task), 2) for run in runs.values())] for task in members]
        if len(members) > 1:
            rows.append([f"**mean of {len(members)}**", kind, *(_cell(run["averages"].get(kind), 2) for run in runs.values())])
    whole = [_cell(run["averages"]["all"], 2) if set(run["scores"]) == set(tasks) else "" for run in runs.values()]
    rows.append([f"**mean over {len(tasks)} tasks**", "", *whole])
    return markdown_table(["task", "type", *runs], rows)


def settings_table(runs):
    """Markdown table of the settings that every run's scores depend on, after a sentence that names those in which runs differ."""
    columns = {"max_length": [], "instructions": [], "dtype": []}
    for run in runs.values():
        template = run.get("instruction_template", INSTRUCTION_TEMPLATE)
        own = run["instructions"] != "none" and template != INSTRUCTION_TEMPLATE
        columns["max_length"].append(run["max_length"])
        columns["instructions"].append(run["instructions"] + (f", put as {json.dumps(template)}" if own else ""))
        columns["dtype"].append(run["environment"]["dtype"])
    differing = [name for name, values in columns.items() if len(set(values)) > 1]
    text = f"These rows were not measured alike: they differ in {', '.join(differing)}.\n\n" if differing else ""
    return text + markdown_table(["model", *columns], zip(runs, *columns.values()))


@functools.cache
def _paper_tasks():
    return frozenset(task.metadata.name for task in mteb.get_benchmark(PAPER_BENCHMARK).tasks)


def is_paper_benchmark(run):
    """Whether a result covers the 56 tasks of the paper's benchmark."""
    return _paper_tasks() <= set(run["scores"])


def write_tables(folder):
    """Writes table.md from every result in `folder`."""
    runs = {}
    for path in sorted(Path(folder).glob("*.json")):
        run = json.loads(path.read_text())
        if "scores" in run and "averages" in run:
            runs[run["name"]] = run
    whole = {name: run for name, run in runs.items() if is_paper_benchmark(run)}
    rest = {name: run for name, run in runs.items() if name not in whole}
    parts = []
    if whole:
        parts += ["# MTEB(eng, v1), the layout of Table 4", table4(whole), task_table(whole)]
    if rest:
        parts += ["# Other tasks, in the layout of Table 4", table4_of_other_tasks(rest)]
        parts += ["## Each task", "Main score of each task in percent (its own metric).\n\n" + task_table(rest)]
    parts += ["## Settings of the measured rows", settings_table(runs)]
    write_text(Path(folder) / "table.md", "\n\n".join(parts))


def _earlier(folder, name, revision):
    """The result that `folder` holds under this name, {} where there is none.

    Raises:
        UserError: it belongs to other weights or settings.
    """
    try:
        run = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    if run.get("fingerprint") != revision:
        raise UserError(
            f"{folder / name}.json holds the scores of other weights or settings ({run.get('model')}); give this model another --name, "
            "or choose another --output"
        )
    return run


def _remove_broken_results(cache, model):
    """Deletes what a killed run left half-written in MTEB's cache, which its reader would stop at."""
    meta = model.mteb_model_meta
    folder = cache.get_task_result_path(task_name="x", model_name=meta, model_revision=meta.revision).parent
    for path in folder.glob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            path.unlink()


def evaluate(encoder, arguments, show_progress_bar=True):
    """Runs the tasks; finished ones are taken from MTEB's result cache in `output`/cache.

    Args:
        encoder: `PackedEncoder`.
        arguments: `MtebArguments`.
    Returns:
        dict with scores in percent, types, averages, errors, and the environment; also written to `output`/<name>.json, beside the scores
        of other tasks that it holds already.
    """
    tasks = choose_tasks(arguments.tasks)
    instructions = read_instructions(arguments.instructions, tasks)
    name = arguments.name or Path(arguments.model.rstrip("/")).name
    if not re.fullmatch(r"[\w.+-]+", name):
        raise UserError(f"name may hold letters, digits and . _ + -, but {name!r} was given")
    folder = Path(arguments.output)
    check_folder(folder, "output")
    revision = fingerprint(encoder, arguments, instructions)
    earlier = _earlier(folder, name, revision)
    model = PackedModel(encoder, f"neobert/{name}", revision, instructions, arguments.instruction_template)
    cache = mteb.ResultCache(cache_path=folder / "cache")
    _remove_broken_results(cache, model)
    results = mteb.evaluate(
        model,
        tasks,
        cache=cache,
        co2_tracker=False,
        raise_error=arguments.stop_on_error,
        show_progress_bar=show_progress_bar,
        encode_kwargs={"batch_size": 1024, "show_progress_bar": show_progress_bar},
    )
    scores = earlier.get("scores", {}) | {task.metadata.name: None for task in tasks}
    metrics = earlier.get("metrics", {}) | {task.metadata.name: task.metadata.main_score for task in tasks}
    for result in results.task_results:
        score = result.get_score()
        scores[result.task_name] = None if score is None or np.isnan(score) else round(100 * float(score), 4)
    types = earlier.get("types", {}) | {task.metadata.name: task.metadata.type for task in tasks}
    report = {
        "name": name,
        "model": str(arguments.model),
        "fingerprint": revision,
        "scores": scores,
        "metrics": metrics,
        "types": types,
        "averages": averages(scores, types),
        "errors": {error.task_name: error.exception for error in results.exceptions or []},
        "instructions": arguments.instructions,
        "instruction_template": arguments.instruction_template,
        "max_length": encoder.max_length,
        "environment": environment(dtype=str(encoder.dtype).removeprefix("torch."), device=str(encoder.device)),
    }
    write_json(folder / f"{name}.json", report)
    write_tables(folder)
    return report


def main(argv=None):
    """`neobert mteb --model MODEL --output FOLDER`; returns the exit code."""
    (arguments,) = read_recipe((MtebArguments,), argv or [], prog="neobert mteb")
    read_instructions(arguments.instructions, choose_tasks(arguments.tasks))
    encoder = PackedEncoder.from_arguments(arguments, choose_device(arguments.device))
    report = evaluate(encoder, arguments)
    print(task_table({report["name"]: report}))
    if report["errors"]:
        names = ", ".join(report["errors"])
        first = one_line(next(iter(report["errors"].values())))
        raise UserError(f"{len(report['errors'])} of {len(report['scores'])} tasks failed ({names}): {first}; run again to continue")
    return 0
