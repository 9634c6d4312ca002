"""Build a model that embeds queries with a small encoder and documents with its teacher.

    pip install '.[eval]'
    python examples/query_router.py --output runs/router

The bundled encoder was distilled from all-MiniLM-L6-v2, and their embeddings have a common space.
Documents are embedded once, by the larger model; queries arrive one by one, and are embedded by the
smaller one. An existing index of all-MiniLM-L6-v2 needs no new documents.

The output is a directory of sentence-transformers with a `Router`, which contains both models:

    model = SentenceTransformer("runs/router", trust_remote_code=True)
    scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
"""

import argparse
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router

from neobert.scripts import UserError, check_model, check_new, copy_code, run_script


# The bundled student and its teacher have embeddings in the same space.
ENCODER = Path(__file__).resolve().parent / "sentence-encoder"
TEACHER = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["a bird of prey", "an eagle", "a violin"]


def prompt_of(encoder: SentenceTransformer, name: str) -> str:
    """Return the prompt of an encoder for queries or documents, "" if it has none."""
    return encoder.prompts.get(name) or encoder.prompts.get(encoder.default_prompt_name) or ""


def build_router(query_model: str, document_model: str) -> SentenceTransformer:
    """Return a model with a route for queries and one for documents.

    Args:
        query_model: Sentence encoder for queries: a directory or a name on the Hub.
        document_model: Sentence encoder for documents, with embeddings in the same space.

    Raises:
        UserError: If the embeddings have different dimensions.
    """
    encoders = []
    for name in (query_model, document_model):
        check_model(name)
        encoders.append(SentenceTransformer(name, device="cpu", trust_remote_code=True))

    dimensions = [encoder.get_embedding_dimension() for encoder in encoders]
    if dimensions[0] != dimensions[1]:
        raise UserError(
            "both models must have embeddings of the same dimension, got "
            f"{dimensions[0]} and {dimensions[1]}. Use a student and its teacher."
        )

    query, document = encoders
    # The modules of an encoder are its transformer, pooling and normalization.
    router = Router.for_query_document(
        query_modules=list(query.children()), document_modules=list(document.children())
    )
    return SentenceTransformer(
        modules=[router],
        device="cpu",
        prompts={
            "query": prompt_of(query, "query"),
            "document": prompt_of(document, "document"),
        },
        similarity_fn_name="cosine",
    )


def main(argv: list[str] | None = None) -> None:
    """Build the directory, load it again and print how near both routes are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--query-model",
        default=str(ENCODER),
        help="Sentence encoder for queries. (default: %(default)s)",
    )
    parser.add_argument(
        "--document-model",
        default=TEACHER,
        help="Sentence encoder for documents. (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, help="New directory.")
    options = parser.parse_args(argv)

    check_new(options.output)
    model = build_router(options.query_model, options.document_model)
    model.save_pretrained(str(options.output))
    # transformers looks for the code of a route in the directory itself.
    copy_code(options.output)

    # Load the saved model, to check what other programs will load.
    saved = SentenceTransformer(str(options.output), device="cpu", trust_remote_code=True)
    queries = saved.encode_query(TEXTS, convert_to_tensor=True)
    documents = saved.encode_document(TEXTS, convert_to_tensor=True)
    cosines = torch.cosine_similarity(queries, documents)
    print(
        f"{options.output}: the mean cosine between both embeddings of a text is "
        f"{cosines.mean().item():.3f}"
    )


if __name__ == "__main__":
    run_script(main)
