"""Test error messages: untrusted text is escaped and truncated in one place."""

from neobert.common.errors import UserError, listed, one_line


def test_text_of_a_stranger_is_escaped_in_every_message():
    name = "a\x1b]0;owned\x07\n\u202e\ud800\u00e9\u4f60"
    escaped = "a\\x1b]0;owned\\x07\\n\\u202e\\ud800\u00e9\u4f60"
    assert str(UserError(name)) == listed([name]) == escaped
    assert str(UserError(str(UserError(name)))) == escaped, "escaped twice"
    assert len(str(UserError("x" * 10**6))) == 4000 and len(listed(["x" * 10**6] * 3)) < 700
    assert one_line(ValueError(" two\n lines. ")) == "two lines"


def test_the_error_of_a_loaders_worker_is_its_sentence():
    """torch raises it again with the worker's traceback before it."""
    traceback = (
        'Original Traceback (most recent call last):\n  File "a.py", line 3, in f\n    raise '
        'UserError("x")\n'
    )
    message = (
        "Caught UserError in DataLoader worker process "
        f"0.\n{traceback}neobert.common.errors.UserError: a.csv, line 9: a quote is open\n"
    )
    assert str(UserError(message)) == "a.csv, line 9: a quote is open"
