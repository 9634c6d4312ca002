"""Search by meaning and by words in a store on disk (LanceDB): no server, one folder.

    pip install lancedb pandas sentence-transformers
    python examples/search.py add texts.jsonl
    python examples/search.py find "a bird of prey" --where "kind = 'noun'"
    python examples/search.py delete --where "id = '7'"

A file (.jsonl, .csv, .parquet) has rows with `id`, `text`, and any other columns to filter by. A
row whose `id` is there already replaces it. What `neobert encode texts.jsonl vectors --keep id text
...` wrote, a folder or a file, has its vectors in `embedding`. The store remembers their model.

Meaning is searched in bits, the signs of the numbers, a 32nd of the vectors; those of the best
texts are then compared as they are.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import lancedb
import numpy as np
import pandas
import pyarrow as pa
from lancedb.index import FTS
from sentence_transformers import SentenceTransformer
from sentence_transformers.quantization import quantize_embeddings


WEIGHT, CANDIDATES = 0.6, 100  # of vectors in a score, the rest is BM25's; joined of each kind


def read_rows(path, model):
    """Table of a file, with a vector of each text in `embedding`."""
    readers = {"": pandas.read_parquet, ".parquet": pandas.read_parquet, ".csv": pandas.read_csv}
    read = readers.get(Path(path).suffix, partial(pandas.read_json, lines=True))
    try:
        frame = read(path)
    except ValueError as error:
        sys.exit(f"{path} is not read: {error}")
    if missing := {"id", "text"} - set(frame):
        sys.exit(f"{path} has no column {min(missing)!r}; it has {', '.join(frame)}")
    frame = frame.astype({"id": str}).drop_duplicates("id", keep="last")
    if "embedding" not in frame:
        encode = SentenceTransformer(model, trust_remote_code=True).encode_document
        frame["embedding"] = list(encode(list(frame["text"]), normalize_embeddings=True))
    rows = pa.Table.from_pandas(frame.drop(columns="embedding"), preserve_index=False)
    vectors = np.stack(frame["embedding"]).astype(np.float32)
    for name, numbers in (("embedding", vectors), ("bits", bits(vectors))):
        column = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), numbers.shape[1])
        rows = rows.append_column(name, column)
    return rows.replace_schema_metadata({"model": model})


def bits(vectors):
    return quantize_embeddings(vectors, "ubinary")


def best(search, where):
    """The `CANDIDATES` rows of a search, by their `id` and `text`."""
    search = search.where(where, prefilter=True) if where else search
    return search.limit(CANDIDATES).to_pandas().set_index(["id", "text"])


def by_meaning(table, vector, where):
    """The cosine similarities of the rows whose bits are the nearest."""
    rows = best(table.search(bits(vector[None])[0], "bits").distance_type("hamming"), where)
    return rows["embedding"].map(lambda other: other @ vector / np.linalg.norm(other))


def by_words(table, query, where):
    """The BM25 scores of the best rows."""
    return best(table.search(query, query_type="fts", fts_columns="text"), where)["_score"]


def add(store, table, args):
    rows = read_rows(args.given[0], args.model)
    if table:
        merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(rows)
        table.optimize()  # brings the new rows into the index of words
    else:
        table = store.create_table("texts", rows)
        table.create_index("text", config=FTS())
    print(f"{rows.num_rows} rows read; the store has {table.count_rows()}")


def find(store, table, args):
    encoder = SentenceTransformer(args.model, trust_remote_code=True)
    for query in args.given:
        start = time.perf_counter()
        vector = encoder.encode_query(query, normalize_embeddings=True)
        encoded = time.perf_counter()
        scores = words = by_words(table, query, args.where)
        if args.by != "words":
            scores = by_meaning(table, vector, args.where)
        if args.by == "both":  # each from 0 to 1
            scores = (scores - scores.min()) / (scores.max() - scores.min() or 1)
            scores = (WEIGHT * scores).add((1 - WEIGHT) * words / words.max(), fill_value=0)
        rows = scores.sort_values(ascending=False).index[: args.top]
        spent = 1e3 * (encoded - start), 1e3 * (time.perf_counter() - encoded)
        print(f"{query}: encoded in {spent[0]:.0f} ms, found in {spent[1]:.0f} ms")
        print(*(f"  {name}\t{text[:80]}" for name, text in rows), sep="\n")


def delete(store, table, args):
    print(f"{table.delete(args.where).num_deleted_rows} rows deleted")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("add", "find", "delete"))
    parser.add_argument("given", nargs="*", help="file to add, or queries")
    parser.add_argument("--where", help="condition on columns, as in SQL")
    parser.add_argument("--by", choices=("both", "meaning", "words"), default="both")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--model", help="sentence encoder of the store")
    parser.add_argument("--store", default="runs/search")
    args = parser.parse_args()
    store, run = lancedb.connect(args.store), args.command
    table = store.open_table("texts") if store.list_tables().tables else None
    if (run != "add" and not table) or not (args.where if run == "delete" else args.given):
        parser.error("add needs a file, find queries, delete --where; the last two also a store")
    known = table and table.schema.metadata[b"model"].decode()
    if known and args.model not in (None, known):
        sys.exit(f"the store holds vectors of {known}, and {args.model} was given")
    args.model = known or args.model or "examples/sentence-encoder"
    {"add": add, "find": find, "delete": delete}[run](store, table, args)


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
