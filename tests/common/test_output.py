"""Test the output directory of a long-running command.

Covers the identity of a run, changed settings, the lock against a second process, atomic final
files, and the result as the last file. test_contract.py tests complete commands.
"""

import json

import pytest

from neobert.common.errors import UserError
from neobert.common.files import read_json
from neobert.common.output import Output, differences


def files(folder):
    """Return the relative paths of all files in a directory, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_differences_contain_both_values():
    """Check that changed settings are listed with the previous and the new value."""
    assert (
        differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": [4]}) == "b 2, now 3, c None, now [4]"
    )
    assert differences({"a": [1, 2]}, {"a": [1, 2]}) == ""


def test_states_and_files_during_a_run(tmp_path):
    """Check the state and the files of an output directory in each phase of a run."""
    output = Output(tmp_path / "out", "make", {"seed": 1, "hub_token": "hf_secret"})
    assert output.state() == "new" and not (tmp_path / "out").exists()

    with output.claim():
        assert output.state() == "unfinished"
        with pytest.raises(UserError, match="in use by another run"), output.claim():
            pass

        # Final files are moved into the output directory at the end of the block.
        with output.final_files() as folder:
            (folder / "below").mkdir()
            (folder / "below" / "model").write_text("x")
            assert files(tmp_path / "out") == [".final.tmp/below/model", ".lock", "run.json"]
        assert output.state() == "unfinished"
        output.finish(steps=3)

    # The result contains the settings without secrets.
    assert output.state() == "finished"
    assert files(tmp_path / "out") == [".lock", "below/model", "result.json"]
    assert read_json(output.result) == {
        "neobert": "make",
        "settings": {"seed": 1, "hub_token": "<hidden>"},
        "steps": 3,
    }


def test_directory_of_an_unfinished_run_is_rejected_for_other_runs(tmp_path):
    """Check that the directory of an unfinished run is rejected for other settings or commands.

    A run that has written nothing but its record does not count.
    """
    with Output(tmp_path, "make", {"seed": 1}).claim():
        pass
    other = Output(tmp_path, "make", {"seed": 2})
    assert other.state() == "new", "the first run has written nothing"

    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(UserError, match="other settings .seed 1, now 2.. .* remove the directory"):
        other.state()
    with pytest.raises(UserError, match="did not write .checkpoint-2, run.json"):
        Output(tmp_path, "bake", {"seed": 1}).state()


@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_a_record_of_another_program_is_rejected(tmp_path, name):
    """Check that a file with the name of a record, but of another form, is a file of the user."""
    for text in ("[1, 2]", '{"neobert": "make"}'):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=f"files that this command did not write .{name}"):
            Output(tmp_path, "make", {}).state()


def test_files_allowed_before_a_run(tmp_path):
    """Check which files an output directory may contain before a run."""
    (tmp_path / "prepared").mkdir()
    # A process that is killed leaves temporary files, which are ignored.
    (tmp_path / ".prepared.tmp").mkdir()
    assert Output(tmp_path, "make", {}, preexisting=["prepared"]).state() == "new"
    with pytest.raises(UserError, match="files that this command did not write .prepared."):
        Output(tmp_path, "make", {}).state()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        Output(tmp_path / "file", "make", {}).state()


def test_incomplete_final_files_are_rewritten(tmp_path):
    """Check that incomplete final files of an interrupted run are discarded and written again."""
    output = Output(tmp_path, "make", {})
    with output.claim(), pytest.raises(KeyboardInterrupt), output.final_files() as folder:
        (folder / "model").write_text("half")
        raise KeyboardInterrupt

    with output.claim():
        with output.final_files() as folder:
            assert not files(folder)
            (folder / "model").write_text("whole")
        output.finish()

    assert (tmp_path / "model").read_text() == "whole"
    assert json.loads((tmp_path / "result.json").read_text())["neobert"] == "make"
