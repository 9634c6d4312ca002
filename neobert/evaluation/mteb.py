"""Command `neobert mteb`: evaluate an encoder on MTEB with the `mteb` package.

Batches are packed, an interrupted evaluation resumes, and tables of the benchmarks are written.
"""

import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from mteb.abstasks import AbsTask
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.results import TaskResult
from mteb.types import PromptType

from ..common.environment import environment
from ..common.errors import UserError, one_line
from ..common.files import write_record
from ..common.folders import check_folder, locked
from ..common.identity import model_digest
from ..common.loading import choose_device
from ..common.options import log_options
from ..common.results import check_result_files
from ..embeddings.instructions import read_instructions
from ..embeddings.options import check_limit
from ..embeddings.packed_encoder import PackedEncoder
from .mteb_tables import read_run, read_runs, task_table, write_tables
from .options import BENCHMARKS, OPTIONS, MtebOptions


logger = logging.getLogger("neobert.mteb")

# Texts of symmetric tasks have no prompt type, and all of them get the instruction. In asymmetric
# tasks, only the queries get it.
_INSTRUCTED_PROMPT_TYPES = (None, PromptType.query)


def main(
    argv: Sequence[str] | None = None, extra_tasks: Mapping[str, Sequence[AbsTask]] | None = None
) -> int:
    """Run `neobert mteb --model MODEL --output FOLDER` and return the exit code.

    Args:
        argv: Command line.
        extra_tasks: Tasks in addition to those of MTEB, {name: tasks}.
    """
    options = OPTIONS["mteb"].read(argv or [])
    log_options(options)
    folder = Path(options.evaluation.output)
    name = f"{options.evaluation.row}.json"

    # All checks run before the model is loaded, which may take minutes. Files that another program
    # has written are never replaced.
    check_folder(folder, "output")
    earlier = read_run(folder / name)
    check_result_files(folder, "mteb", earlier, name)
    check_result_files(folder, "mteb", read_runs(folder), "table.md")
    tasks = choose_tasks(options.evaluation.tasks, extra_tasks)
    resolve_instructions(options.instructions.instructions, tasks)

    dtype = options.inference.dtype
    if earlier and earlier["dtype"] == dtype == "auto":
        # "auto" measures the speed again and could choose another dtype than the earlier run.
        dtype = earlier["environment"]["dtype"]
    encoder = PackedEncoder(
        options.evaluation.model,
        dtype,
        choose_device(options.inference.device),
        options.inference.batch_tokens,
        **options.encoder.settings(),
    )
    check_limit("max_length", options.encoder.max_length, encoder.max_length)
    report = evaluate(encoder, options, tasks)

    # If a task fails, the results of the other tasks are kept, and the command fails after all.
    print(task_table({report["name"]: report}))
    errors = report["errors"]
    if errors:
        raise UserError(
            f"{len(errors)} of {len(tasks)} tasks failed ({', '.join(errors)}). First error: "
            f"{one_line(next(iter(errors.values()))).removesuffix('.')}. {report['name']}.json "
            "contains all errors. Run the same command again to retry these tasks."
        )
    return 0


def choose_tasks(
    names: Iterable[str], extra_tasks: Mapping[str, Sequence[AbsTask]] | None = None
) -> list[AbsTask]:
    """Return the tasks with these names, and the tasks of the benchmarks with these names.

    The tasks of a benchmark have the subsets and splits that the benchmark defines. A single task
    has those of the first of `BENCHMARKS` that contains the task, or else its English subsets.

    Args:
        names: Names of tasks and benchmarks.
        extra_tasks: Tasks in addition to those of MTEB, {name: tasks}.

    Raises:
        UserError: If MTEB has no task or benchmark with one of the names, a task has no English
            subset, or two benchmarks define a task differently.
    """
    extra_tasks = extra_tasks or {}
    benchmarks = {benchmark.name for benchmark in mteb.get_benchmarks()}
    # The score of a single task is also a score of the benchmarks with a table, so the task must
    # have their definition.
    definitions: dict[str, Any] = {}
    for benchmark_name in BENCHMARKS:
        for task in mteb.get_benchmark(benchmark_name).tasks:
            definitions.setdefault(task.metadata.name, task)

    tasks: dict[str, Any] = {}
    # Benchmarks come first, because a single task must not replace the definition of a benchmark.
    for name in sorted(names, key=lambda name: name not in benchmarks):
        # A name is that of extra tasks, of a benchmark of MTEB, or of a single task.
        if name in extra_tasks:
            matches = extra_tasks[name]
        elif name in benchmarks:
            matches = mteb.get_benchmark(name).tasks
        elif name in definitions:
            matches = [definitions[name]]
        else:
            # A multilingual task is evaluated in English, the language of the model. Pairs of
            # English and another language are excluded.
            try:
                matches = [mteb.get_task(name, languages=["eng"], exclusive_language_filter=True)]
            except KeyError as error:
                raise UserError(
                    f"`tasks` must name tasks or benchmarks of MTEB, got {name!r} "
                    f"({error.args[0]}). Benchmarks are, for example, {', '.join(BENCHMARKS)}."
                ) from None
            except ValueError:
                raise UserError(
                    f"`tasks` must name tasks with English texts, got {name!r}, which has no "
                    "subset in English only. For other languages, pass the name of a benchmark."
                ) from None

        # Several benchmarks may contain the same task, which is evaluated once.
        for task in matches:
            chosen = tasks.setdefault(task.metadata.name, task)
            if name in benchmarks and _definition(chosen) != _definition(task):
                raise UserError(
                    f"`tasks` must not name benchmarks that define {task.metadata.name} "
                    f"differently, got {name} and another one. Evaluate the benchmarks separately, "
                    "with different --name."
                )
    return list(tasks.values())


def _definition(task: AbsTask) -> tuple[list[str], list[str]]:
    """Return the subsets and the splits on which a task is evaluated."""
    return sorted(task.hf_subsets), sorted(task.eval_splits)


def resolve_instructions(choice: str, tasks: Iterable[AbsTask]) -> dict[str, str] | None:
    """Return the instructions of the option `--instructions`, {task name or task type: text}.

    Args:
        choice: Path of a file, "mteb" for the prompts of MTEB, "model" for those of the model, or
            "none".
        tasks: Tasks to evaluate.

    Returns:
        The instructions of the file, {} for "mteb", and None for "model" and "none".

    Raises:
        UserError: If the file cannot be read, or contains a name that is neither one of these
            tasks, a part or a type of them, nor another task of MTEB.
    """
    if choice == "mteb":
        return {}
    if choice in ("model", "none"):
        return None
    # An aggregate task, such as CQADupstackRetrieval, consists of tasks with names of their own.
    names: set[str] = set()
    for task in tasks:
        for part in (task, *getattr(task, "tasks", ())):
            names |= {part.metadata.name, part.metadata.type}
    # One file may contain the instructions of a complete benchmark.
    others = [
        name for task in mteb.get_tasks() for name in (task.metadata.name, task.metadata.type)
    ]
    return read_instructions(choice, names, others)


class PackedModel(AbsEncoder):
    """Adapter of a `PackedEncoder` to the models of MTEB.

    Args:
        encoder: Encoder.
        name: Name under which MTEB caches results.
        revision: Revision under which MTEB caches results. The revision must change with anything
            that changes the embeddings.
        instructions: Instructions that replace those of MTEB, {task name or type: text}, or None
            for no instruction at all.
        template: Format of an instruction before a text.
        uses_model_prompts: Whether to use the prompts of the model for queries and documents.
    """

    # An instruction file may contain a task or a task type. The prompt in the metadata of the task
    # is the fallback. `ENCODE_TYPE_PROMPT` is omitted, because a file has no entries for queries or
    # documents.
    prompt_priority = (  # type: ignore[assignment]
        PromptSource.CUSTOM_PROMPT,
        PromptSource.TASK_TYPE_PROMPT,
        PromptSource.DEFAULT_TASK_PROMPT,
    )

    def __init__(
        self,
        encoder: PackedEncoder,
        name: str,
        revision: str,
        instructions: dict[str, str] | None,
        template: str,
        uses_model_prompts: bool = False,
    ) -> None:
        # MTEB reads all attributes but `encoder`, so their names are those of `AbsEncoder`.
        self.encoder = encoder
        self.model = encoder.sentence_transformer
        self.prompts_dict = instructions
        self.instruction_template = template
        self.uses_model_prompts = uses_model_prompts
        self.mteb_model_meta = ModelMeta.create_empty({"name": name, "revision": revision})

    def prompt(self, task_metadata: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Return the prompt of the texts of a task, for queries or documents."""
        if self.prompts_dict is None or prompt_type not in _INSTRUCTED_PROMPT_TYPES:
            return ""
        return self.get_task_instruction(task_metadata, prompt_type)

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Return the embeddings of all texts of a loader, (N, D) float32, batched by tokens."""
        # The encoder forms its own batches, for which it needs the lengths of all texts.
        texts = [text for batch in inputs for text in batch["text"]]
        progress_bar = kwargs.get("show_progress_bar", True)
        if self.uses_model_prompts:
            encode = self.encoder.encode
            if prompt_type == PromptType.query:
                encode = self.encoder.encode_query
            elif prompt_type == PromptType.document:
                encode = self.encoder.encode_document
            return encode(texts, show_progress_bar=progress_bar)

        prompt = self.prompt(task_metadata, prompt_type)
        return self.encoder.encode(texts, prompt=prompt, show_progress_bar=progress_bar)


def fingerprint(
    encoder: PackedEncoder, options: MtebOptions, instructions: dict[str, str] | None
) -> str:
    """Return 40 hex digits that change with the model and every option that affects embeddings."""
    # MTEB uses the result as the revision of the model, usually a commit hash of 40 digits.
    settings = [
        model_digest(options.evaluation.model),
        options.encoder.tokenizer,
        str(encoder.dtype),
        encoder.max_length,
        encoder.prompts,
        encoder.pooling,
        "model" if options.instructions.instructions == "model" else instructions,
        options.instructions.instruction_template,
    ]
    return hashlib.sha1(json.dumps(settings).encode()).hexdigest()


def evaluate(
    encoder: PackedEncoder,
    options: MtebOptions,
    tasks: Collection[AbsTask],
    show_progress_bar: bool = True,
) -> dict[str, Any]:
    """Evaluate the tasks and write the results.

    Results of finished tasks are read from MTEB's result cache in `output`/cache.

    Args:
        encoder: Encoder.
        options: Options of the command.
        tasks: Tasks, from `choose_tasks`.
        show_progress_bar: Whether to show progress bars.

    Returns:
        Scores in percent, types, errors, settings and the environment, including the earlier
        scores of other tasks. They are also written to `output`/NAME.json.

    Raises:
        UserError: If the output contains scores of other weights or settings with this name.
    """
    name = options.evaluation.row
    folder = Path(options.evaluation.output)
    template = options.instructions.instruction_template
    instructions = resolve_instructions(options.instructions.instructions, tasks)
    revision = fingerprint(encoder, options, instructions)
    uses_model_prompts = options.instructions.instructions == "model"
    if encoder.prompts and not uses_model_prompts:
        logger.warning(
            "The prompts of the model are not used: %s. Pass `--instructions model` to use them.",
            ", ".join(encoder.prompts),
        )

    # A conflict is reported before the evaluation, which may take hours.
    _earlier_run(folder / f"{name}.json", revision)

    model = PackedModel(
        encoder, f"neobert/{name}", revision, instructions, template, uses_model_prompts
    )
    results = mteb.evaluate(
        model,  # type: ignore[arg-type]
        tasks,
        cache=mteb.ResultCache(cache_path=folder / "cache"),
        co2_tracker=False,
        # The report contains errors, and the remaining tasks run.
        raise_error=False,
        show_progress_bar=show_progress_bar,
        # The batch size is that of the loader. The encoder forms batches of tokens from all texts.
        encode_kwargs={  # type: ignore[arg-type]
            "batch_size": 1024,
            "show_progress_bar": show_progress_bar,
        },
    )

    report: dict[str, Any] = {
        "name": name,
        "model": str(options.evaluation.model),
        "fingerprint": revision,
        "scores": _scores_in_percent(results.task_results, tasks),
        "types": {task.metadata.name: task.metadata.type for task in tasks},
        "errors": {error.task_name: error.exception for error in results.exceptions or []},
        "instructions": options.instructions.instructions,
        "instruction_template": template,
        "dtype": options.inference.dtype,
        "max_length": encoder.max_length,
        "environment": environment(dtype=encoder.dtype_name, device=str(encoder.device)),
    }
    # Another process may have added other tasks to the row in the meantime.
    with locked(folder / "cache", wait=True):
        earlier = _earlier_run(folder / f"{name}.json", revision)
        for key in ("scores", "types"):
            report[key] = earlier.get(key, {}) | report[key]
        write_record(folder / f"{name}.json", report)
        write_tables(folder)
    return report


def _scores_in_percent(
    results: Iterable[TaskResult], tasks: Iterable[AbsTask]
) -> dict[str, float | None]:
    """Return the main score of every task, {task name: score in percent}.

    A task that failed has the score None, so a mean over its benchmark is None, too.
    """
    tasks_by_name = {task.metadata.name: task for task in tasks}
    scores: dict[str, float | None] = dict.fromkeys(tasks_by_name)
    for result in results:
        # The cache may also contain other subsets and splits of the task, from another benchmark.
        task = tasks_by_name[result.task_name]
        score = result.validate_and_filter_scores(task).get_score()
        # MTEB returns scores as fractions, and NaN if it cannot compute one.
        if not math.isnan(score):
            scores[result.task_name] = round(100 * float(score), 4)
    return scores


def _earlier_run(path: Path, revision: str) -> dict[str, Any]:
    """Return the earlier results of a row, or an empty dictionary.

    Args:
        path: File of the row.
        revision: Fingerprint of the model and its settings.

    Raises:
        UserError: If the results are those of other weights or settings.
    """
    # Scores of different models or settings in one row of a table would be compared with others.
    earlier = read_run(path) or {}
    if earlier and earlier["fingerprint"] != revision:
        raise UserError(
            f"{path} contains the scores of other weights or settings ({earlier['model']}). Pass "
            "another --name or another --output."
        )
    return earlier
