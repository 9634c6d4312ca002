"""`neobert glue`: the paper's GLUE protocol (its section 4.2) for any encoder, full or LoRA, with
several seeds, and its table.

    neobert glue --task rte --model chandar-lab/NeoBERT
    neobert glue --task all --model google-bert/bert-base-uncased --grid --seeds 1 2 3
    neobert glue --task sst2 --data my_folder --model my_model --lora

Every finished run is a folder OUTPUT/<name>/<task>/<run>/ with result.json; the same command again
skips it and continues an unfinished one from its newest checkpoint. OUTPUT/table.md and table.json
are made from all result.json files under OUTPUT.
"""

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
from .glue_run import check_sizes, fine_tune, process_state
from .glue_table import check_table, finished_runs, write_tables
from .glue_tasks import load_task, parse_tasks, rows_digest
from .options import OPTIONS


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


def mnli_start(arguments):
    """Folder of the best finished MNLI run in this row, by the score that selected its checkpoint,
    over seeds and grid; None where there is none."""
    runs = [folder for _, folder in runs_of_row(arguments, "mnli") if (folder / "best").is_dir()]
    return runs[-1] if runs else None


def _start(arguments, task):
    """(what the run starts from for its settings, model to load)."""
    if not task.from_mnli or arguments.start == "none":
        return None, arguments.model
    if folder := mnli_start(arguments):
        logger.warning("%s starts from the best MNLI run, %s", task.name, folder.name)
        return folder.name, str(folder / "best")
    logger.warning(
        "%s starts from %s itself: there is no finished MNLI run under %s (the paper starts from "
        "MNLI; run --task mnli first)",
        task.name,
        arguments.model,
        arguments.output,
    )
    return None, arguments.model


def run_task(arguments, trainer, task, splits, tokenizer, revision):
    """All runs of one task; returns the results of the chosen hyper-parameters, one a seed.

    Args:
        trainer: {option of Trainer: value}.
        revision: what the model is known by.
    """
    start, model = _start(arguments, task)
    known = {"revision": revision, "rows": rows_digest(splits), "start": start}

    def run(hyper, seed):
        settings = arguments.settings(trainer, task, hyper, seed, **known)
        output = Output(run_folder(arguments, settings), "glue", settings)
        if output.state() == "finished":
            logger.warning("%s is finished already: %s", task.name, output.folder)
            return read_json(output.result)
        logger.warning("%s: %s", task.name, output.folder.name)
        best = max((score for score, _ in runs_of_row(arguments, task.name)), default=-math.inf)
        result = fine_tune(output, settings, splits, model, tokenizer, arguments, trainer, best)
        score, last = 100 * result["score"], 100 * result["last"]["score"]
        logger.warning("%s: dev %.2f, last evaluation %.2f", output.folder.name, score, last)
        return result

    combinations = arguments.combinations(task)
    chosen = combinations[0]
    if len(combinations) > 1:
        tried = [run(hyper, arguments.seeds[0])["selected"]["score"] for hyper in combinations]
        chosen = combinations[tried.index(max(tried))]
        logger.warning("%s: best of %d combinations: %s", task.name, len(combinations), chosen)
    return [run(chosen, seed) for seed in arguments.seeds]


def check(arguments, trainer, tasks):
    """What can be wrong with any of the tasks is found here, before the first is trained. Returns
    the tokenizer, what the model is known by, and {task: splits}."""
    check_table(arguments.output)
    revision = model_digest(arguments.model)
    data = {task.name: load_task(task, arguments.data) for task in tasks}
    for task in tasks:
        sizes = {hyper["batch_size"] for hyper in arguments.combinations(task)}
        check_sizes(task, len(data[task.name]["train"]["label"]), sizes, arguments, trainer)
    for folder, result in finished_runs(arguments.output):
        # A row of the table holds one model, and one set of rows of a task.
        previous, task = result["settings"], result["task"]
        is_other = result["name"] == arguments.name and previous["revision"] != revision
        if result["row"] == arguments.row and task in data:
            is_other = is_other or previous["rows"] != rows_digest(data[task])
        if is_other:
            raise UserError(
                f"{folder} is a run of other weights or rows under the name {arguments.name!r}; "
                "give another --name or another --output"
            )
    return load_tokenizer(arguments.model), revision, data


def main(argv=None):
    """Runs `neobert glue`; bad input is a UserError before any work."""
    arguments, trainer = OPTIONS["glue"].read(sys.argv[1:] if argv is None else argv)
    is_main = process_state().is_main_process
    logging.basicConfig(format="%(message)s")
    logger.disabled = not is_main
    tasks = parse_tasks(arguments.task)
    tokenizer, revision, data = check(arguments, trainer, tasks)
    for task in tasks:
        run_task(arguments, trainer, task, data[task.name], tokenizer, revision)
        if is_main:
            write_tables(arguments.output)
    if is_main:
        print((Path(arguments.output) / "table.md").read_text())
    return 0
