"""Test the types of the fields in request bodies."""

import pydantic
import pytest

from neobert.serving.openai import EmbeddingsBody
from neobert.serving.rerank import RerankBody
from neobert.serving.tei import PredictBody


@pytest.mark.parametrize(
    ("body_type", "body"),
    [
        (EmbeddingsBody, {"input": [[-1] * 50] * 50}),
        (EmbeddingsBody, {"input": [""] * 50}),
        (RerankBody, {"query": "a", "documents": [1] * 50}),
        (PredictBody, {"inputs": [[1, 2]] * 50}),
    ],
)
def test_validation_stops_at_the_first_invalid_item(body_type, body):
    """A body with many invalid items has one error.

    An error takes about 2 KB of memory, and a body can contain millions of invalid token ids.
    """
    with pytest.raises(pydantic.ValidationError) as caught:
        body_type.model_validate(body)
    assert caught.value.error_count() == 1
