"""Test the comparison with other engines: the order of the calls, the BERT model and the tables."""

import pytest

from benchmarks import peers
from benchmarks.engines import Files, LineProcess, sorted_batches
from neobert import NeoBERTConfig, NeoBERTModel


SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 30522}


def test_engine_order_differs_between_turns():
    """Every turn calls all engines once, and the order differs between turns."""
    order = []
    sessions = {name: lambda name=name: order.append(name) or 1.0 for name in "abcd"}
    seconds = peers.take_turns(sessions, turns=4, calls=1)
    rounds = ["".join(order[start : start + 4]) for start in range(0, 16, 4)]
    assert all(sorted(names) == list("abcd") for names in rounds) and len(set(rounds)) > 1
    assert seconds == {name: [1.0] * 4 for name in "abcd"}


def test_turn_is_the_median_without_the_first_call():
    times = iter([100.0, 1.0, 3.0, 2.0])
    assert peers.take_turns({"a": lambda: next(times)}, turns=1, calls=3) == {"a": [2.0]}


def test_compared_models_have_equal_matrix_parameter_counts():
    """The BERT and the NeoBERT that are compared have the same number of matrix weights."""
    from transformers import BertConfig, BertModel

    config = NeoBERTConfig(**SIZES, intermediate_size=96)
    ours = NeoBERTModel(config).transformer_encoder
    bert = BertModel(BertConfig(**peers.bert_config(config))).encoder
    products = [
        sum(p.numel() for p in blocks.parameters() if p.dim() == 2) for blocks in (ours, bert)
    ]
    assert products[0] == products[1]


def test_processor_seconds_uses_reported_time():
    """`processor_seconds` uses the time that an engine in another process reports.

    The processor time of this process does not include that engine.
    """
    process = LineProcess.__new__(LineProcess)
    process.seconds = 12.5
    type(process).__call__ = lambda self, texts: None
    try:
        assert peers.processor_seconds(process, [[1]]) == 12.5
    finally:
        del LineProcess.__call__
    assert peers.processor_seconds(lambda texts: None, [[1]]) < 1


def test_sorted_batches_contain_texts_of_similar_length():
    assert sorted_batches([[1] * 5, [1], [1] * 4, [1] * 2], 2) == [[1, 3], [2, 0]]


@pytest.fixture
def rows():
    """Return rows of two engines. Engine "a" takes twice as long as neobert."""
    rows = []
    for name, seconds in (("neobert", 0.001), ("a", 0.002)):
        for precision in ("float32", "bfloat16", "int8"):
            workloads = {key: {"seconds": [seconds], "batch": None} for key in peers.WORKLOADS}
            rows.append(
                {"name": name, "precision": precision, "workloads": workloads, "cosine": 0.5}
            )
    return rows


def test_page_has_latency_and_throughput(rows):
    page = peers.page({"768x6": {"rows": rows, "errors": {"b int8": "not installed."}}}, turns=1)
    assert "| neobert | float32 | 1.00 | 1.00 | 1.00 | 1.00 | 0.500000 |" in page
    assert "| a | int8 | 337,000 | 512,000 | 1,024,000 | 0.500000 |" in page
    assert "- b int8: not installed." in page
    assert "| 8 tokens | float32 | neobert | 1.00 |" in page


def test_ratios_compare_the_same_precision(rows):
    """The table of the fastest engines divides times of the same precision."""
    rows[0]["workloads"]["8"]["seconds"] = [0.006]
    assert "| 8 tokens | float32 | a | 3.00 |" in peers.fastest_table(rows)


def test_packed_embeddings_agree_with_padded_torch(tmp_path):
    from neobert.common.constants import TOKENIZER
    from neobert.common.loading import load_tokenizer

    files = Files(tmp_path)
    NeoBERTModel(NeoBERTConfig(**SIZES, intermediate_size=96)).save_pretrained(files.model)
    tokenizer = load_tokenizer(TOKENIZER)
    tokenizer.save_pretrained(files.model)
    texts = peers.make_texts([8, 20, 5], tokenizer)

    padded, packed = (
        peer.open(files, tmp_path)(texts)
        for peer in (peers.torch_peer(), peers.neobert_peer("float32"))
    )
    assert padded == pytest.approx(packed, abs=2e-6)


def test_missing_engine_error_names_make_target(tmp_path, monkeypatch):
    """The error of an engine that is not installed names the make target that installs it."""
    monkeypatch.setattr(peers, "PEERS", [peers.llama_peer(), peers.ctranslate2_peer("int8")])
    sessions, errors = peers.open_sessions(Files(tmp_path), tmp_path)
    assert sessions == {} and all("make peers" in reason for reason in errors.values())
    assert list(errors) == ["llama.cpp q8_0", "CTranslate2 (BERT) int8"]
