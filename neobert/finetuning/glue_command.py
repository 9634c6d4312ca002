"""`neobert glue`: fine-tune any encoder on GLUE with the protocol of the paper (section 4.2).

    neobert glue --task rte --model chandar-lab/NeoBERT
    neobert glue --task all --model google-bert/bert-base-uncased --grid --seeds 1 2 3
    neobert glue --task sst2 --data my_folder --model my_model --lora

Every run is a directory OUTPUT/<name>/<task>/<run>/ that contains result.json at the end. Running
the command again skips finished runs and resumes an unfinished run from its newest checkpoint.
OUTPUT/table.md and table.json contain the results of all result.json files under OUTPUT.
"""

import functools
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..common.errors import UserError
from ..common.identity import model_digest
from ..common.loading import load_tokenizer
from ..common.options import log_options
from ..common.results import check_result_files, earlier_result
from .glue_data import task_baselines
from .glue_options import GLUE_OPTIONS, PRESET_HIDDEN_SIZE, GlueOptions, GlueRun, Hyperparameters
from .glue_run import check_sizes, fine_tune
from .glue_table import finished_runs, write_tables
from .glue_tasks import GlueRows, Task, load_task, parse_tasks, rows_digest
from .model import encoder_hidden_size
from .trainer import process_state


logger = logging.getLogger("neobert.glue")


@dataclass(frozen=True)
class Inputs:
    """Inputs that all runs of a command share.

    Attributes:
        tokenizer: Tokenizer of the model.
        model_digest: Digest of the model's weights, configuration and tokenizer.
        hidden_size: Hidden size of the encoder, None if unknown.
        splits: Rows of every task, {task: splits}.
    """

    tokenizer: PreTrainedTokenizerBase
    model_digest: str
    hidden_size: int | None
    splits: dict[str, GlueRows]


def runs_of_row(options: GlueOptions, task: str) -> list[tuple[float, Path]]:
    """Return the selection scores and directories of the row's finished runs, best run last.

    Args:
        options: Options of the command, which name the row.
        task: Name of the task.
    """
    return sorted(
        (result["selected"]["score"], folder)
        for folder, result in finished_runs(options.output.output)
        if (result["row"], result["task"]) == (options.row, task)
    )


def choose_start(options: GlueOptions, task: Task) -> tuple[str | None, str]:
    """Choose the model that the runs of a task start from.

    Args:
        options: Options of the command.
        task: GLUE task.

    Returns:
        Name of the row's best finished MNLI run, or None, and the model to load. The best run has
        the highest selection score over seeds and grid.
    """
    model = options.model.model
    # The paper fine-tunes the smaller tasks on sentence pairs from an MNLI checkpoint.
    if not task.from_mnli or options.model.start == "none":
        return None, model

    # The runs are sorted by their score, so the last one is the best.
    runs = [folder for _, folder in runs_of_row(options, "mnli") if (folder / "best").is_dir()]
    if runs:
        logger.info("%s starts from the best MNLI run, %s.", task.name, runs[-1].name)
        return runs[-1].name, str(runs[-1] / "best")
    logger.warning(
        "%s starts from %s, because there is no finished MNLI run under %s. The paper "
        "starts from MNLI: run --task mnli first.",
        task.name,
        model,
        options.output.output,
    )
    return None, model


def run_task(options: GlueOptions, task: Task, inputs: Inputs) -> list[dict]:
    """Run all seeds of one task and compare them with the baselines.

    Args:
        options: Options of the command.
        task: GLUE task.
        inputs: Rows of all tasks, tokenizer, and hidden size and digest of the model.

    Returns:
        The results of the chosen hyperparameters, one per seed.
    """
    splits = inputs.splits[task.name]
    rows = rows_digest(splits)
    start, model = choose_start(options, task)
    combinations = options.combinations(task, inputs.hidden_size)
    if options.uses_default_rate(inputs.hidden_size):
        logger.info(
            "%s: learning rate %.2g, the default for a hidden size of %d. The presets are for %d.",
            task.name,
            combinations[0].learning_rate,
            inputs.hidden_size,
            PRESET_HIDDEN_SIZE,
        )

    # All runs of a task have the same training rows, and so the same baselines. The first run that
    # is not finished fits them.
    baselines = functools.cache(lambda: task_baselines(task, splits, options.selection))

    def run(hyperparameters: Hyperparameters, seed: int) -> dict:
        glue_run = GlueRun(
            options=options,
            task=task,
            hyperparameters=hyperparameters,
            seed=seed,
            model_digest=inputs.model_digest,
            rows=rows,
            start=start,
        )
        logger.info("%s: %s", task.name, glue_run.folder.name)
        # The weights of a run are saved only if it is better than all finished runs of the task.
        best = max((score for score, _ in runs_of_row(options, task.name)), default=-math.inf)
        result = fine_tune(glue_run, model, splits, inputs.tokenizer, best, baselines)
        logger.info("%s: dev %.2f", glue_run.folder.name, 100 * result["score"])
        return result

    # The grid is searched with one seed only. The run of this seed is not repeated below: a
    # finished run returns its result.
    seeds = options.optimization.seeds
    combination = combinations[0]
    if len(combinations) > 1:
        scores = [run(candidate, seeds[0])["selected"]["score"] for candidate in combinations]
        combination = combinations[scores.index(max(scores))]
        logger.info("%s: best of %d combinations: %s", task.name, len(combinations), combination)

    results = [run(combination, seed) for seed in seeds]
    report_baselines(task, results)
    return results


def report_baselines(task: Task, results: list[dict]) -> None:
    """Log the score of a task beside its baselines, and warn if nothing was learned.

    Args:
        task: GLUE task.
        results: Contents of result.json, one per seed. Runs of earlier versions without baselines
            are ignored.
    """
    results = [result for result in results if result.get("baselines")]
    if not results:
        return

    mean = sum(result["score"] for result in results) / len(results)
    # The seeds share the dev rows, so their mean has the standard error of one run.
    entries = [("fine-tuned", mean, results[0]["standard_error"])]
    for baseline in results[0]["baselines"]:
        entries.append((baseline["name"], baseline["value"], baseline["standard_error"]))
    texts = [f"{name} {100 * value:.1f} ± {100 * error:.1f}" for name, value, error in entries]
    logger.info("%s, dev %s: %s", task.name, task.metric_name, ", ".join(texts))

    # The first entry is the fine-tuned model.
    best_name, best_value, _ = max(entries[1:], key=lambda entry: entry[1])
    if mean <= best_value:
        logger.warning(
            "%s: the fine-tuned model does not beat the baseline %r. Try another "
            "--learning-rate or more --num-train-epochs.",
            task.name,
            best_name,
        )
    if any(result["predicted_classes"] == 1 for result in results):
        logger.warning(
            "%s: a run predicts the same class for every dev row. Try another "
            "--learning-rate or more --num-train-epochs.",
            task.name,
        )


def load_inputs(options: GlueOptions, tasks: Sequence[Task]) -> Inputs:
    """Load the inputs and check all tasks before the first one is trained.

    Args:
        options: Options of the command.
        tasks: GLUE tasks to run.

    Raises:
        UserError: If the output directory holds a table of another program, or a run of other
            weights or rows under the same name; or if an input is invalid.
    """
    output = options.output.output
    model = options.model.model
    # Files of other programs are not overwritten.
    table = earlier_result(Path(output) / "table.json", "measured")
    check_result_files(output, "glue", table, "table.json", "table.md")

    # All rows are read and checked now, because an error in the last task would come hours later.
    digest = model_digest(model)
    hidden_size = encoder_hidden_size(model, options.model.trust_remote_code)
    splits = {task.name: load_task(task, options.data.data) for task in tasks}
    for task in tasks:
        check_sizes(task, options.combinations(task, hidden_size), options.trainer)

    digests = {name: rows_digest(rows) for name, rows in splits.items()}
    for folder, result in finished_runs(output):
        # A row of the table holds one model, and one set of rows of a task.
        previous = result["settings"]
        is_same = previous["revision"] == digest
        if result["row"] == options.row:
            # Tasks that this command does not run keep their rows.
            rows = digests.get(result["task"], previous["rows"])
            is_same = is_same and previous["rows"] == rows
        if result["name"] == options.name and not is_same:
            raise UserError(
                f"`name` {options.name!r} is already used in {folder} for other weights or rows. "
                "Choose another --name or --output."
            )
    return Inputs(
        load_tokenizer(model, options.model.trust_remote_code), digest, hidden_size, splits
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert glue` and return the exit code."""
    options = GLUE_OPTIONS.read(sys.argv[1:] if argv is None else argv)
    is_main = process_state().is_main_process
    logger.disabled = not is_main
    if is_main:
        log_options(options)

    tasks = parse_tasks(options.data.task)
    inputs = load_inputs(options, tasks)
    page = ""
    for task in tasks:
        run_task(options, task, inputs)
        # The table is written after every task, so an interrupted command leaves one.
        if is_main:
            page = write_tables(options.output.output)
    if is_main:
        print(page)
    return 0
