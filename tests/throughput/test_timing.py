"""Test the timing of single calls."""

from neobert.throughput.timing import timed


def test_reference_rate_is_mean_before_and_after_call():
    """Check the duration of a call, and the mean of the reference rates around it."""
    rates = iter([2.0, 4.0])
    clock = iter([10.0, 13.5])
    result = timed(lambda: None, lambda: next(rates), lambda: next(clock))
    assert result == (3.5, 3.0)
