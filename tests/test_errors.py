"""Pins how messages are made: strangers' text is escaped and cut in one place."""

from neobert.common.errors import UserError, listed, one_line


def test_text_of_a_stranger_is_escaped_in_every_message():
    name = "a\x1b]0;owned\x07\n\u202e\ud800\u00e9\u4f60"
    escaped = "a\\x1b]0;owned\\x07\\n\\u202e\\ud800\u00e9\u4f60"
    assert str(UserError(name)) == listed([name]) == escaped
    assert str(UserError(str(UserError(name)))) == escaped, "escaped twice"
    assert len(str(UserError("x" * 10**6))) == 4000 and len(listed(["x" * 10**6] * 3)) < 700
    assert one_line(ValueError(" two\n lines. ")) == "two lines"
