"""Three MTEB tasks from real data in packages, for measuring sentence encoders without a network.

- WordNetRetrieval (nDCG@10): a definition finds the words it defines, among the words of all
  held-out synsets.
- MovieSentimentClassification (accuracy): rated sentences of movie reviews; logistic regression on
  64 sentences a class, 5 draws.
- WordNetSimilarity (Spearman): two noun definitions against the path similarity of their synsets,
  1 / (1 + edges) (Rada et al. 1989).

They are made by MTEB's own task classes, so they run wherever its tasks do. The choice of rows is a
function of their ids (SHA-1). Queries come from the synsets that `common.local_text` keeps out of
training; `wordnet_pairs` gives the pairs of all others.
"""

import functools
import hashlib

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from ..common.local_text import (
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


def _order(key):
    return hashlib.sha1(key.encode()).digest()


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


def wordnet_pairs(folder=WORDNET):
    """Training pairs `{"anchor": definition, "positive": word}`, one a word, of the synsets that
    are not held out."""
    for identifier, words, definition in wordnet_definitions(folder):
        if not is_held_out(identifier):
            for word in words:
                yield {"anchor": definition, "positive": word}


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
        if self.data_loaded:
            return
        held_out = [row for row in wordnet_definitions() if is_held_out(row[0])]
        words = sorted({word for _, synonyms, _ in held_out for word in synonyms})
        held_out = sorted(held_out, key=lambda row: _order(row[0]))[: self.queries]
        self.dataset = {
            "default": {
                "test": {
                    "queries": Dataset.from_dict(
                        {"id": [row[0] for row in held_out], "text": [row[2] for row in held_out]}
                    ),
                    "corpus": Dataset.from_dict(
                        {
                            "id": [f"word-{word}" for word in words],
                            "title": [""] * len(words),
                            "text": words,
                        }
                    ),
                    "relevant_docs": {
                        row[0]: {f"word-{word}": 1 for word in row[1]} for row in held_out
                    },
                    "top_ranked": None,
                }
            }
        }
        self.data_loaded = True


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
        if self.data_loaded:
            return
        rows = sorted(sentiment_sentences("movie"), key=lambda row: _order(row["id"]))
        parts = {"test": rows[: self.test_rows], "train": rows[self.test_rows :]}
        self.dataset = DatasetDict(
            {
                name: Dataset.from_dict(
                    {"text": [row["text"] for row in part], "label": [row["label"] for row in part]}
                )
                for name, part in parts.items()
            }
        )
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
        if self.data_loaded:
            return
        pairs = similarity_pairs(self.synsets)
        columns = ("sentence1", "sentence2", "score")
        self.dataset = DatasetDict(
            {
                "test": Dataset.from_dict(
                    {name: [pair[i] for pair in pairs] for i, name in enumerate(columns)}
                )
            }
        )
        self.data_loaded = True


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
    everything = sorted(nodes, key=_order)
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
        partners = [
            parent,
            *(
                min(group, key=lambda node: _order(offset + node))
                for group in (siblings, cousins)
                if group
            ),
            anyone,
        ]
        for partner in dict.fromkeys(partners):
            if partner != offset and nodes[partner][1]:
                pairs.append(
                    (nodes[offset][1], nodes[partner][1], path_similarity(nodes, offset, partner))
                )
    return pairs


LOCAL_TASKS = {
    task.metadata.name: task
    for task in (WordNetRetrieval, MovieSentimentClassification, WordNetSimilarity)
}
