"""Test the latency benchmark: the order of the calls, the medians and the ratios of the table."""

from benchmarks import latency


def test_engines_alternate_and_first_calls_are_not_measured(monkeypatch):
    # Each reading of this clock advances it by 1 ms, and "b" advances it by another millisecond.
    clock = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(latency.time, "process_time_ns", lambda: next(clock))
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), next(clock))}

    times = latency.median_milliseconds(calls, turns=2, calls_per_turn=3)
    assert "".join(order) == "aaaabbbb" * 2
    assert times == {"a": 1.0, "b": 2.0}


def test_the_table_has_the_ratio_to_onnx_runtime():
    """The last columns divide the times of `PackedEncoder` by those of ONNX Runtime."""
    row = {"tokens": 8, "PackedEncoder, bfloat16": 1.0}
    row |= {"PackedEncoder, float32": 3.0, "PackedEncoder, int8": 2.0}
    row |= {"ONNX Runtime, float32": 2.0, "ONNX Runtime, int8": 1.0}
    last = latency.table([row]).splitlines()[-1]
    assert last.endswith("| 1.50 | 2.00 |") and last.startswith("| 8 | 1.00 |")
