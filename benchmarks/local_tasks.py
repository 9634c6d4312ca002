"""Three MTEB tasks from data in packages, to evaluate sentence encoders without a network.

    python -m benchmarks.local_tasks --model runs/encoder --output results/mteb

The options are those of `neobert mteb`. `--tasks` accepts the names below, and "local" for all
three.

- WordNetRetrieval (nDCG@10): find the words that a definition defines, among the words of all
  held-out synsets.
- MovieSentimentClassification (accuracy): classify sentences of movie reviews by logistic
  regression, trained on 5 random samples of 64 sentences per class.
- WordNetSimilarity (Spearman correlation): compare the similarity of two noun definitions with the
  path similarity of their synsets, 1 / (1 + edges) (Rada et al. 1989).

The tasks are instances of MTEB's task classes. The selection of rows depends on the SHA-1 of their
ids only. Queries come from the synsets that `local_text` holds out from training.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from neobert.common.commands import guarded
from neobert.common.data import hash_fraction
from neobert.evaluation import mteb as mteb_evaluation

from .local_text import (
    WORDNET,
    Synset,
    is_held_out,
    read_synsets,
    sentiment_sentences,
    split_gloss,
)


_WORDNET_HOME = "https://wordnet.princeton.edu/"


# Two definitions and the path similarity of their synsets.
SimilarityPair = tuple[str, str, float]


def _metadata(
    name: str,
    kind: Any,
    description: str,
    main_score: str,
    prompt: Any,
    path: str,
    reference: Any,
) -> TaskMetadata:
    """Return the metadata of a task.

    Args:
        name: Name of the task.
        kind: Type of the task, "Retrieval", "Classification" or "STS".
        description: Description of the data.
        main_score: Name of the metric.
        prompt: Instruction for encoders that expect one, or {"query": instruction}.
        path: Identifier of the data set.
        reference: Address of the source.
    """
    category = "t2c" if kind == "Classification" else "t2t"

    return TaskMetadata(
        name=name,
        description=description,
        dataset={"path": path, "revision": "1"},
        reference=reference,
        type=kind,
        category=category,
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
        # MTEB's term for texts that were not written for the task.
        sample_creation="found",
        bibtex_citation="",
        prompt=prompt,
    )


@functools.cache
def wordnet_definitions(folder: str = WORDNET) -> list[tuple[str, list[str], str]]:
    """Return (id, words, definition) of every synset that has a definition, in file order.

    The ids are those of `wordnet_entries`, and the words are in lower case.
    """
    rows = []
    for synset in read_synsets(folder):
        definition, _ = split_gloss(synset.gloss)
        if definition:
            words = list(dict.fromkeys(word.lower() for word in synset.words))
            rows.append((synset.id, words, definition))
    return rows


class WordNetRetrieval(AbsTaskRetrieval):
    """Retrieval of words by their definition."""

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

    def load_data(self, **kwargs: Any) -> None:
        """Create the queries, the documents and their relevance."""
        # Encoders that were trained on WordNet have not seen these synsets.
        held_out = [row for row in wordnet_definitions() if is_held_out(row[0])]
        words = sorted({word for _, synonyms, _ in held_out for word in synonyms})
        document_ids = [f"word-{word}" for word in words]

        # The queries are a sample of the synsets; the words of the others remain as distractors.
        held_out = sorted(held_out, key=lambda row: hash_fraction(row[0]))[: self.queries]
        query_ids, _, definitions = zip(*held_out)
        relevant = {}
        for query_id, synonyms, _ in held_out:
            relevant[query_id] = {f"word-{word}": 1 for word in synonyms}

        split = {
            "queries": Dataset.from_dict({"id": query_ids, "text": definitions}),
            "corpus": Dataset.from_dict(
                {"id": document_ids, "title": [""] * len(words), "text": words}
            ),
            "relevant_docs": relevant,
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class MovieSentimentClassification(AbsTaskClassification):
    """Classification of sentences of movie reviews as positive or negative."""

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

    def load_data(self, **kwargs: Any) -> None:
        """Create the test and the training split, in the order of the SHA-1 of the ids."""
        rows = sorted(sentiment_sentences("movie"), key=lambda row: hash_fraction(row["id"]))
        rows = [{"text": row["text"], "label": row["label"]} for row in rows]
        self.dataset = DatasetDict(
            {
                "test": Dataset.from_list(rows[: self.test_rows]),
                "train": Dataset.from_list(rows[self.test_rows :]),
            }
        )
        self.data_loaded = True


class WordNetSimilarity(AbsTaskSTS):
    """Similarity of noun definitions."""

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

    def load_data(self, **kwargs: Any) -> None:
        """Create the pairs of definitions."""
        first, second, scores = zip(*similarity_pairs(self.synsets))
        pairs = {"sentence1": first, "sentence2": second, "score": scores}
        self.dataset = DatasetDict({"test": Dataset.from_dict(pairs)})
        self.data_loaded = True


@functools.cache
def _noun_synsets(folder: str = WORDNET) -> dict[str, Synset]:
    """Return the noun synsets by offset."""
    return {
        synset.offset: synset for synset in read_synsets(folder) if synset.part_of_speech == "noun"
    }


def _ancestors(synsets: dict[str, Synset], offset: str) -> dict[str, int]:
    """Return the number of edges to every ancestor over hypernyms, and 0 to the synset itself."""
    distances = {offset: 0}
    frontier = [offset]
    # A breadth-first search reaches each ancestor on a shortest path first.
    while frontier:
        next_frontier = []
        for node in frontier:
            for parent in synsets[node].hypernyms:
                if parent in synsets and parent not in distances:
                    distances[parent] = distances[node] + 1
                    next_frontier.append(parent)
        frontier = next_frontier
    return distances


def path_similarity(synsets: dict[str, Synset], first: str, second: str) -> float:
    """Return 1 / (1 + edges on the shortest path over a common hypernym), 0 without such a path.

    Args:
        synsets: Noun synsets by offset.
        first: Offset of a synset.
        second: Offset of another synset.
    """
    first_distances = _ancestors(synsets, first)
    second_distances = _ancestors(synsets, second)
    common = first_distances.keys() & second_distances.keys()
    if not common:
        return 0.0
    return 1 / (1 + min(first_distances[node] + second_distances[node] for node in common))


def similarity_pairs(count: int, held_out: bool = True) -> list[SimilarityPair]:
    """Return pairs of noun definitions of all degrees of similarity.

    Each of `count` synsets is paired with its hypernym, a sibling, a cousin and any other synset.

    Args:
        count: Number of synsets.
        held_out: Whether to select the synsets from those held out from training or from the
            others.
    """
    synsets = _noun_synsets()
    definitions = {offset: split_gloss(synset.gloss)[0] for offset, synset in synsets.items()}
    children: dict[str, list[str]] = {}
    for offset, synset in synsets.items():
        for parent in synset.hypernyms:
            children.setdefault(parent, []).append(offset)

    # The order of the SHA-1 is random, and identical on every machine.
    shuffled = sorted(synsets, key=hash_fraction)
    selected = [
        offset
        for offset in shuffled
        if synsets[offset].hypernyms and is_held_out(synsets[offset].id) == held_out
    ]

    pairs = []
    for number, offset in enumerate(selected[:count]):
        parent = synsets[offset].hypernyms[0]
        siblings = [node for node in children[parent] if node != offset]
        cousins = []
        for grandparent in synsets[parent].hypernyms[:1]:
            for uncle in children[grandparent]:
                if uncle != parent:
                    cousins += children.get(uncle, [])

        # From similar to dissimilar, so the scores cover the whole range.
        partners = [parent]
        for group in (siblings, cousins):
            if group:
                partners.append(min(group, key=lambda node: hash_fraction(offset + node)))
        # 7919 is a prime number, so the steps through all synsets do not repeat early.
        partners.append(shuffled[(number * 7919) % len(shuffled)])

        for partner in dict.fromkeys(partners):
            if partner != offset and definitions[partner]:
                similarity = path_similarity(synsets, offset, partner)
                pairs.append((definitions[offset], definitions[partner], similarity))
    return pairs


LOCAL_TASKS = (WordNetRetrieval, MovieSentimentClassification, WordNetSimilarity)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `neobert mteb` with these tasks besides those of MTEB, and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not any(argument.partition("=")[0] == "--tasks" for argument in argv):
        argv = [*argv, "--tasks", "local"]

    tasks = {task.metadata.name: [task()] for task in LOCAL_TASKS}
    every_task = [instance for instances in tasks.values() for instance in instances]
    return mteb_evaluation.main(argv, {**tasks, "local": every_task})


if __name__ == "__main__":
    sys.exit(guarded("python -m benchmarks.local_tasks", main))
