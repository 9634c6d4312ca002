"""Embeds a corpus on a Ray cluster: parquet in, parquet out, packed batches, one actor a GPU or
group of cores, any of which may die.

    pip install '.[eval,ray]'
    python examples/encode_ray.py s3://bucket/corpus s3://bucket/vectors --model MODEL \\
        --actors 64 --gpus 1
    python examples/encode_ray.py corpus/ vectors/ --model MODEL --actors 16 --cores 4

Each row group of SOURCE becomes one file of OUTPUT, with all columns and "embedding"; with
--long-texts windows a row is a window of a text, with its "start" and "end" in it. A file
appears complete or not at all: the row group of an actor that died is encoded again, bit for bit,
and the same command continues a run with the files that are missing.
"""

import argparse
import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import ray
import torch
from pyarrow import fs

from neobert.common.constants import DTYPES
from neobert.common.identity import model_digest
from neobert.common.loading import choose_dtype
from neobert.embeddings.long_texts import Windows, WindowSettings, tokenize_windows
from neobert.embeddings.packed_encoder import PackedEncoder
from neobert.embeddings.stamps import STAMP, Stamp


def files_of(path):
    """File system, root, and {path: name without its ending} of the parquet files below; hidden
    ones are left out."""
    system, root = fs.FileSystem.from_uri(path if "://" in path else os.path.abspath(path))
    system.create_dir(root)
    found = [
        info.path
        for info in system.get_file_info(fs.FileSelector(root, recursive=True))
        if info.path.endswith(".parquet")
    ]
    names = {
        name: name[len(root) + 1 : -len(".parquet")].replace("/", "_") for name in sorted(found)
    }
    return (
        system,
        root,
        {path: name for path, name in names.items() if not os.path.basename(path).startswith(".")},
    )


class Encoder:
    """An actor: takes row groups, {"path", "group", "name"}, and writes their files."""

    def __init__(self, options):
        torch.set_num_threads(options.cores)
        self.options, device = options, "cuda" if options.gpus else "cpu"
        self.encoder = PackedEncoder(
            options.model, dtype=options.dtype, device=device, max_length=options.max_length
        )
        self.prompt, self.windows = self.encoder.prompt(options.prompt_name), None
        if options.long_texts == "windows":
            self.windows = WindowSettings.of(
                self.encoder, self.prompt, options.window, options.overlap
            )
        self.stamp = Stamp.of(
            self.encoder, self.prompt, options, options.model_digest, self.windows
        ).text()
        (self.system, _, _) = files_of(options.source)
        (self.target, self.root, _) = files_of(options.output)

    def embedded(self, rows):
        """The rows of a table, or of the windows of their texts, with "embedding"."""
        texts = rows[self.options.text_column].to_pylist()
        if self.windows is None:
            found = Windows(self.encoder.tokenize(texts, self.prompt))
        else:
            found = tokenize_windows(self.encoder, texts, self.prompt, self.windows)
            rows = rows.take(pyarrow.array(found.rows))
            for name, places in (("start", found.starts), ("end", found.ends)):
                rows = rows.append_column(name, pyarrow.array(places))
        vectors = self.encoder.embed(found.tokens, prompt=self.prompt)
        embedding = pyarrow.FixedSizeListArray.from_arrays(
            pyarrow.array(vectors.reshape(-1)), self.encoder.width
        )
        return rows.append_column("embedding", embedding)

    def __call__(self, batch):
        rows = pyarrow.parquet.ParquetFile(
            self.system.open_input_file(batch["path"][0])
        ).read_row_group(int(batch["group"][0]))
        size = self.options.rows
        table = pyarrow.concat_tables(
            [self.embedded(rows.slice(start, size)) for start in range(0, len(rows), size)]
        )
        table = table.replace_schema_metadata({**(rows.schema.metadata or {}), STAMP: self.stamp})
        temporary, final = (
            f"{self.root}/{hidden}{batch['name'][0]}.parquet" for hidden in (f".{os.getpid()}-", "")
        )
        pyarrow.parquet.write_table(
            table,
            temporary,
            filesystem=self.target,
            compression="none",
        )
        self.target.move(temporary, final)
        return {"rows": np.array([len(rows)])}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("source", "output", "--model", "--prompt-name"):
        parser.add_argument(name, **({"required": True} if name == "--model" else {}))
    for name, default in (
        ("actors", 1),
        ("cores", 1),
        ("gpus", 0),
        ("rows", 8192),
        ("max-length", None),
        ("window", None),
        ("overlap", None),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            help={"rows": "encoded at a time", "cores": "of an actor"}.get(name),
        )
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--long-texts", default="cut", choices=("cut", "windows"))
    parser.set_defaults(normalize=False, output_dtype="float32")
    options = parser.parse_args(argv)
    options.model_digest = model_digest(options.model)
    (system, _, sources), (target, root, there) = files_of(options.source), files_of(options.output)
    known = ("prompt_name", "rows", "max_length", "text_column", "dtype", "long_texts", "window")
    known += ("overlap", "model_digest")
    settings, path = {name: getattr(options, name) for name in known}, f"{root}/settings.json"
    begun = (
        json.loads(target.open_input_file(path).read())
        if target.get_file_info(path).is_file
        else None
    )
    if begun is None and there or begun is not None and begun["settings"] != settings:
        parser.error(
            f"{options.output} holds other files, or a run with other settings; choose a new folder"
        )
    # Chosen once: neither machines nor a continued run must choose differently.
    options.dtype = (
        begun["dtype"]
        if begun
        else str(choose_dtype(options.dtype, "cuda" if options.gpus else "cpu"))[6:]
    )
    target.open_output_stream(path).write(
        json.dumps({"settings": settings, "dtype": options.dtype}).encode()
    )
    counts = {
        path: pyarrow.parquet.ParquetFile(system.open_input_file(path)).num_row_groups
        for path in sources
    }
    groups = [
        {"path": path, "group": i, "name": f"{sources[path]}-{i:05d}"}
        for path, count in counts.items()
        for i in range(count)
    ]
    todo, rows = [group for group in groups if group["name"] not in there.values()], 0
    if todo:
        resources = {
            "num_cpus": options.cores,
            "num_gpus": options.gpus,
            "compute": ray.data.ActorPoolStrategy(size=options.actors),
        }
        data = ray.data.from_items(todo, override_num_blocks=len(todo))
        data = data.map_batches(
            Encoder,
            fn_constructor_args=(options,),
            batch_size=1,
            max_restarts=-1,
            max_task_retries=-1,
            **resources,
        )
        rows = sum(row["rows"] for row in data.take_all())
    print(
        f"{options.output}: {len(groups)} files, {len(todo)} of them by this run, with {rows:,} "
        "rows"
    )


if __name__ == "__main__":
    main()
