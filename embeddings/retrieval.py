"""`neobert retrieval MODEL --pairs FILE`: how often an encoder finds the text that belongs to a
question, among all texts of the file."""

import sys

from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from ..common.loading import choose_device
from .contrastive_data import PairSource, inspected, load_source
from .options import OPTIONS
from .packed_encoder import load_sentence_transformer


METRICS = ("recall@1", "recall@10", "mrr@10")


def read_questions(path):
    """({question: its positives}, all positives and negatives) of a file of pairs.

    Raises:
        UserError: it cannot be read, or has no usable row.
    """
    rows = load_source(inspected(PairSource.from_file(path)))
    relevant = {}
    for row in rows:
        relevant.setdefault(row["anchor"], set()).add(row["positive"])
    return relevant, list(
        dict.fromkeys(text for name in rows.column_names if name != "anchor" for text in rows[name])
    )


def measure(model, relevant, texts):
    """{"recall@1", "recall@10", "mrr@10"}: means over the questions, by the model's own similarity
    and its prompts.

    Args:
        model: SentenceTransformer.
        relevant: {question: set of those of `texts` that belong to it}.
        texts: what is searched.
    """
    evaluator = InformationRetrievalEvaluator(
        {question: question for question in relevant},
        {text: text for text in texts},
        relevant,
        corpus_chunk_size=max(1, 10**8 // len(relevant)),  # all scores of a chunk are in memory
        precision_recall_at_k=[1, 10],
        show_progress_bar=True,
    )
    found = evaluator(model)
    return {name: float(found[f"{model.similarity_fn_name}_{name}"]) for name in METRICS}


def described(found):
    """The measures as one text."""
    return ", ".join(f"{name.replace('mrr', 'MRR')} {found[name]:.3f}" for name in METRICS)


def main(argv=None):
    """`neobert retrieval MODEL --pairs FILE`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    (arguments,) = OPTIONS["retrieval"].read(argv)
    relevant, texts = read_questions(arguments.pairs)
    model = load_sentence_transformer(
        arguments.model,
        choose_device(arguments.device),
        max_length=arguments.max_length,
        pooling=arguments.pooling,
        tokenizer=arguments.tokenizer,
        attn_implementation=arguments.attn_implementation,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(
        f"{arguments.model}: {len(relevant):,} questions among {len(texts):,} texts: "
        f"{described(measure(model, relevant, texts))}"
    )
    return 0
