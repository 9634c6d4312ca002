"""Test the metrics that several worker processes share."""

from neobert.serving import metrics
from neobert.serving.options import METRICS_FOLDER_VARIABLE


def test_two_workers_remove_the_gauges_of_a_dead_worker(tmp_path, monkeypatch):
    """A worker whose files another worker removes at the same time still returns the metrics."""
    path = tmp_path / "gauge_livesum_999999999.db"
    path.touch()

    def remove(pid, folder):
        # The other worker removes the file after it has been found.
        path.unlink()
        path.unlink()

    monkeypatch.setattr(metrics, "mark_process_dead", remove)
    monkeypatch.setenv(METRICS_FOLDER_VARIABLE, str(tmp_path))
    assert metrics.Metrics().render() == b""
    assert not path.exists()
