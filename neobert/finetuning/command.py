"""`neobert glue`: the paper's GLUE protocol (its section 4.2) for any encoder, full or LoRA, with
several seeds, and its table.

    neobert glue --task rte --model chandar-lab/NeoBERT
    neobert glue --task all --model google-bert/bert-base-uncased --grid --seeds 1 2 3
    neobert glue --task sst2 --data my_folder --model my_model --lora

Every finished run is a folder OUTPUT/<name>/<task>/<run>/ with result.json; the same command again
skips it and continues an unfinished one from its newest checkpoint. OUTPUT/table.md and table.json
are made from all result.json files under OUTPUT.
"""

import functools
import hashlib
import json
import logging
import math
import re
import sys
from pathlib import Path

from ..common.errors import UserError
from ..common.files import read_json
from ..common.identity import model_digest
from ..common.loading import load_tokenizer
from ..common.output import Output
from ..common.results import check_result_files, earlier_result
from .data import task_baselines
from .model import encoder_hidden_size
from .options import OPTIONS, PRESET_HIDDEN_SIZE
from .table import finished_runs, write_tables
from .tasks import Task, load_task, parse_tasks, rows_digest
from .trainer import check_sizes, fine_tune, process_state


logger = logging.getLogger("neobert.glue")


def run_folder(arguments, settings):
    """OUTPUT/<name>/<task>/<readable part and a digest of all settings>."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    lora = f"_lora{settings['lora']['rank']}" if settings["lora"] else ""
    run = "bs{batch_size}_lr{learning_rate:g}_wd{weight_decay:g}{0}_seed{seed}_{1}"
    row = Path(arguments.output) / re.sub(r"[^\w.-]+", "-", arguments.name)
    return row / settings["task"] / run.format(lora, digest, **settings)


def runs_of_row(arguments, task):
    """[(selection score, folder)] of the finished runs in this row and task, best last."""
    return sorted(
        (result["selected"]["score"], folder)
        for folder, result in finished_runs(arguments.output)
        if (result["row"], result["task"]) == (arguments.row, task)
    )


def choose_start(arguments, task):
    """(name of the MNLI run that a task starts from, or None; model to load): the best finished
    run in this row, by the score that selected its checkpoint, over seeds and grid."""
    if not task.from_mnli or arguments.start == "none":
        return None, arguments.model
    runs = [folder for _, folder in runs_of_row(arguments, "mnli") if (folder / "best").is_dir()]
    if runs:
        logger.info("%s starts from the best MNLI run, %s", task.name, runs[-1].name)
        return runs[-1].name, str(runs[-1] / "best")
    logger.warning(
        "%s starts from %s itself: there is no finished MNLI run under %s (the paper starts from "
        "MNLI; run --task mnli first)",
        task.name,
        arguments.model,
        arguments.output,
    )
    return None, arguments.model


def run_task(arguments, trainer, task, splits, tokenizer, revision, hidden_size=None):
    """Run all seeds of one task and compare them with the baselines.

    Args:
        trainer: Options of transformers' Trainer.
        revision: Fingerprint of the model.
        hidden_size: Hidden size of the encoder, None if unknown.

    Returns:
        The results of the chosen hyperparameters, one per seed.
    """
    start, model = choose_start(arguments, task)
    known = {"revision": revision, "rows": rows_digest(splits), "start": start}
    combinations = arguments.combinations(task, hidden_size)
    if arguments.uses_default_rate(hidden_size):
        logger.info(
            "%s: learning rate %.2g, the default for a hidden size of %d (the presets are for %d)",
            task.name,
            combinations[0]["learning_rate"],
            hidden_size,
            PRESET_HIDDEN_SIZE,
        )

    # All runs of a task have the same training rows, and so the same baselines.
    cached_baselines = functools.cache(
        lambda: task_baselines(task, splits, arguments.settings(trainer, task, {}, 0))
    )

    def run(hyper, seed):
        settings = arguments.settings(trainer, task, hyper, seed, **known)
        output = Output(run_folder(arguments, settings), "glue", settings)
        if output.state() == "finished":
            logger.info("%s is already finished: %s", task.name, output.folder)
            return read_json(output.result)
        logger.info("%s: %s", task.name, output.folder.name)
        best = max((score for score, _ in runs_of_row(arguments, task.name)), default=-math.inf)
        result = fine_tune(
            output,
            settings,
            splits,
            model,
            tokenizer,
            arguments,
            trainer,
            best,
            cached_baselines,
        )
        logger.info("%s: dev %.2f", output.folder.name, 100 * result["score"])
        return result

    chosen = combinations[0]
    if len(combinations) > 1:
        tried = [run(hyper, arguments.seeds[0])["selected"]["score"] for hyper in combinations]
        chosen = combinations[tried.index(max(tried))]
        logger.info("%s: best of %d combinations: %s", task.name, len(combinations), chosen)
    results = [run(chosen, seed) for seed in arguments.seeds]
    report_baselines(task, results)
    return results


def report_baselines(task: Task, results: list[dict]) -> None:
    """Log the score of a task beside its baselines, and warn if nothing was learned.

    Args:
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

    best_name, best_value, _ = max(entries[1:], key=lambda entry: entry[1])
    if mean <= best_value:
        logger.warning(
            "warning: %s: the fine-tuned model does not beat the baseline %r. Try another "
            "--learning-rate or more --num-train-epochs.",
            task.name,
            best_name,
        )
    if any(result["predicted_classes"] == 1 for result in results):
        logger.warning(
            "warning: %s: a run predicts the same class for every dev row. Try another "
            "--learning-rate or more --num-train-epochs.",
            task.name,
        )


def check(arguments, trainer, tasks):
    """Check all tasks before the first one is trained.

    Returns:
        The tokenizer, the fingerprint and the hidden size of the model, and {task: splits}.
    """
    table = earlier_result(Path(arguments.output) / "table.json", "measured")
    check_result_files(arguments.output, "glue", table, "table.json", "table.md")
    revision = model_digest(arguments.model)
    hidden_size = encoder_hidden_size(arguments.model, arguments.trust_remote_code)
    data = {task.name: load_task(task, arguments.data) for task in tasks}
    for task in tasks:
        check_sizes(task, arguments.combinations(task, hidden_size), trainer)
    digests = {name: rows_digest(splits) for name, splits in data.items()}
    for folder, result in finished_runs(arguments.output):
        # A row of the table holds one model, and one set of rows of a task.
        previous = result["settings"]
        same = previous["revision"] == revision
        if result["row"] == arguments.row:
            same = same and previous["rows"] == digests.get(result["task"], previous["rows"])
        if result["name"] == arguments.name and not same:
            raise UserError(
                f"{folder} is a run of other weights or rows under the name {arguments.name!r}; "
                "give another --name or another --output"
            )
    return load_tokenizer(arguments.model), revision, hidden_size, data


def main(argv=None):
    """Runs `neobert glue`; bad input is a UserError before any work."""
    arguments, trainer = OPTIONS["glue"].read(sys.argv[1:] if argv is None else argv)
    is_main = process_state().is_main_process
    logger.disabled = not is_main
    tasks = parse_tasks(arguments.task)
    tokenizer, revision, hidden_size, data = check(arguments, trainer, tasks)
    for task in tasks:
        run_task(arguments, trainer, task, data[task.name], tokenizer, revision, hidden_size)
        if is_main:
            page = write_tables(arguments.output)
    if is_main:
        print(page)
    return 0
