"""Test the selection of texts for distillation."""

from benchmarks import make_distill_text as text


def test_held_out_definitions_are_dropped():
    """`new_texts` drops held-out definitions, also after their word, and repeated texts.

    Upper case and punctuation do not matter.
    """
    forbidden = {text.normal_form("a bag-shaped fishnet on a long handle")}
    rows = [
        "Landing net: a bag-shaped fishnet on a long handle",
        "A bag-shaped fishnet, on a long handle.",
        "A long handle.",
        "a LONG handle",
    ]
    assert list(text.new_texts(rows, forbidden, set())) == ["A long handle."]
