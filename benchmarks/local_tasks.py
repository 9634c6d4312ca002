"""Three MTEB tasks from real data in packages, for measuring sentence encoders without a network.

    python -m benchmarks.local_tasks --model runs/encoder --output results/mteb

The options are those of `neobert mteb`; --tasks takes the names below, or "local" for all three.

- WordNetRetrieval (nDCG@10): a definition finds the words it defines, among the words of all
  held-out synsets.
- MovieSentimentClassification (accuracy): rated sentences of movie reviews; logistic regression on
  64 sentences a class, 5 draws.
- WordNetSimilarity (Spearman): two noun definitions against the path similarity of their synsets,
  1 / (1 + edges) (Rada et al. 1989).

They are made by MTEB's own task classes. The choice of rows is a function of their ids (SHA-1).
Queries come from the synsets that `local_text` keeps out of training.
"""

import functools
import sys

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from neobert.common.commands import guarded
from neobert.common.data import fraction
from neobert.evaluation import mteb as mteb_evaluation

from .local_text import (
    WORDNET,
    is_held_out,
    parse_synset,
    read_synsets,
    sentiment_sentences,
    split_gloss,
)


_WORDNET_HOME = "https://wordnet.princeton.edu/"


def _metadata(name, kind, description, main_score, prompt, path, reference, **more):
    return TaskMetadata(
        name=name,
        description=description,
        dataset={"path": path, "revision": "1"},
        reference=reference,
        type=kind,
        category="t2c" if kind == "Classification" else "t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=main_score,
        date=("1985-01-01", "2014-12-31"),
        domains=["Written"],
        task_subtypes=[],
        license="not specified",
        annotations_creators="expert-annotated",
        dialect=[],
        sample_creation="found",
        bibtex_citation="",
        prompt=prompt,
        **more,
    )


@functools.cache
def wordnet_definitions(folder=WORDNET):
    """List of (id, words, definition) of every synset that has a definition, in file order; ids as
    in `wordnet_entries`."""
    rows = []
    for part, offset, words, _, _, gloss in read_synsets(folder):
        definition, _ = split_gloss(gloss)
        if definition:
            rows.append(
                (
                    f"{part}-{offset}",
                    list(dict.fromkeys(word.lower() for word in words)),
                    definition,
                )
            )
    return rows


class WordNetRetrieval(AbsTaskRetrieval):
    queries = 1000
    metadata = _metadata(
        "WordNetRetrieval",
        "Retrieval",
        "Definitions of 1,000 held-out WordNet 3.0 synsets as queries, the words of all held-out "
        "synsets as documents.",
        "ndcg_at_10",
        {"query": "Find the defined word."},
        "wordnet/retrieval",
        _WORDNET_HOME,
    )

    def load_data(self, **kwargs):
        held_out = [row for row in wordnet_definitions() if is_held_out(row[0])]
        words = sorted({word for _, synonyms, _ in held_out for word in synonyms})
        held_out = sorted(held_out, key=lambda row: fraction(row[0]))[: self.queries]
        ids, _, definitions = zip(*held_out)
        documents = {"id": [f"word-{word}" for word in words], "title": [""] * len(words)}
        split = {
            "queries": Dataset.from_dict({"id": ids, "text": definitions}),
            "corpus": Dataset.from_dict({**documents, "text": words}),
            "relevant_docs": {
                key: {f"word-{word}": 1 for word in synonyms} for key, synonyms, _ in held_out
            },
            "top_ranked": None,
        }
        self.dataset, self.data_loaded = {"default": {"test": split}}, True


class MovieSentimentClassification(AbsTaskClassification):
    samples_per_label = 64
    n_experiments = 5
    test_rows = 500
    metadata = _metadata(
        "MovieSentimentClassification",
        "Classification",
        "Sentences of movie reviews with the sign of their mean rating by 20 people (Hutto and "
        "Gilbert 2014).",
        "accuracy",
        "Tell whether this sentence of a movie review is positive or negative.",
        "vaderSentiment/movie",
        "https://ojs.aaai.org/index.php/ICWSM/article/view/14550",
    )

    def load_data(self, **kwargs):
        rows = sorted(sentiment_sentences("movie"), key=lambda row: fraction(row["id"]))
        rows = [{"text": row["text"], "label": row["label"]} for row in rows]
        parts = {"test": rows[: self.test_rows], "train": rows[self.test_rows :]}
        self.dataset = DatasetDict({name: Dataset.from_list(parts[name]) for name in parts})
        self.data_loaded = True


class WordNetSimilarity(AbsTaskSTS):
    min_score = 0
    max_score = 1
    synsets = 120
    metadata = _metadata(
        "WordNetSimilarity",
        "STS",
        "Noun definitions in pairs: with the hypernym, a sibling, a cousin and any other, scored "
        "by path similarity in WordNet 3.0.",
        "cosine_spearman",
        "Find a definition of a similar thing.",
        "wordnet/similarity",
        _WORDNET_HOME,
    )

    def load_data(self, **kwargs):
        first, second, scores = zip(*similarity_pairs(self.synsets))
        pairs = {"sentence1": first, "sentence2": second, "score": scores}
        self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_dict(pairs)}), True


@functools.cache
def _noun_taxonomy(folder=WORDNET):
    """{offset: (hypernym offsets, definition)} of the noun synsets."""
    nodes = {}
    with open(f"{folder}/data.noun", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith("  "):
                offset, _, hypernyms, _, gloss = parse_synset(line)
                nodes[offset] = (hypernyms, split_gloss(gloss)[0])
    return nodes


def _ancestors(nodes, offset):
    """{ancestor: edges} over hypernyms, the synset itself at 0."""
    distance, frontier = {offset: 0}, [offset]
    while frontier:
        following = []
        for node in frontier:
            for parent in nodes[node][0]:
                if parent in nodes and parent not in distance:
                    distance[parent] = distance[node] + 1
                    following.append(parent)
        frontier = following
    return distance


def path_similarity(nodes, first, second):
    """1 / (1 + edges on the shortest way over a common hypernym); 0 where there is none."""
    above, other = _ancestors(nodes, first), _ancestors(nodes, second)
    edges = min((above[node] + other[node] for node in above.keys() & other.keys()), default=None)
    return 0.0 if edges is None else 1 / (1 + edges)


def similarity_pairs(count, held_out=True):
    """(definition, definition, path similarity): each of `count` noun synsets with its hypernym, a
    sibling, a cousin, any other.

    Args:
        held_out: of the synsets that are kept out of training, or of the others.
    """
    nodes = _noun_taxonomy()
    children = {}
    for offset, (hypernyms, _) in nodes.items():
        for parent in hypernyms:
            children.setdefault(parent, []).append(offset)
    everything = sorted(nodes, key=fraction)
    chosen = [
        offset
        for offset in everything
        if nodes[offset][0] and is_held_out(f"noun-{offset}") == held_out
    ]
    chosen = chosen[:count]
    pairs = []
    for number, offset in enumerate(chosen):
        parent = nodes[offset][0][0]
        uncles = [
            node for grand in nodes[parent][0][:1] for node in children[grand] if node != parent
        ]
        cousins = [node for uncle in uncles for node in children.get(uncle, [])]
        siblings = [node for node in children[parent] if node != offset]
        anyone = everything[(number * 7919) % len(everything)]
        near = [
            min(group, key=lambda node: fraction(offset + node))
            for group in (siblings, cousins)
            if group
        ]
        partners = [parent, *near, anyone]
        for partner in dict.fromkeys(partners):
            if partner != offset and nodes[partner][1]:
                pairs.append(
                    (nodes[offset][1], nodes[partner][1], path_similarity(nodes, offset, partner))
                )
    return pairs


LOCAL_TASKS = (WordNetRetrieval, MovieSentimentClassification, WordNetSimilarity)


def main(argv=None):
    """`neobert mteb` with these tasks beside MTEB's own; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    tasks = {task.metadata.name: [task()] for task in LOCAL_TASKS}
    named = any(argument.partition("=")[0] == "--tasks" for argument in argv)
    argv = argv if named else [*argv, "--tasks", "local"]
    return mteb_evaluation.main(argv, {**tasks, "local": sum(tasks.values(), [])})


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.local_tasks", main))
