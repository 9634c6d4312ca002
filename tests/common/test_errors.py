"""Tests of error messages.

Covers the escaping and shortening of untrusted text, and the errors about missing packages.
"""

import pytest

from neobert.common.errors import UserError, listed, one_line, require


def test_untrusted_text_is_escaped_in_every_message():
    name = "a\x1b]0;owned\x07\n\u202e\ud800\u00e9\u4f60"
    escaped = "a\\x1b]0;owned\\x07\\n\\u202e\\ud800\u00e9\u4f60"
    assert str(UserError(name)) == listed([name]) == escaped
    assert str(UserError(str(UserError(name)))) == escaped, "the text was escaped twice"
    assert len(str(UserError("x" * 10**6))) == 4000 and len(listed(["x" * 10**6] * 3)) < 700
    assert one_line(ValueError(" two\n lines. ")) == "two lines"


def test_traceback_of_a_dataloader_worker_is_removed():
    """Check that the traceback, which torch adds to the error of a worker, is removed."""
    traceback = (
        'Original Traceback (most recent call last):\n  File "a.py", line 3, in f\n    raise '
        'UserError("x")\n'
    )
    message = (
        "Caught UserError in DataLoader worker process "
        f"0.\n{traceback}neobert.common.errors.UserError: a.csv, line 9: a quote is open\n"
    )
    assert str(UserError(message)) == "a.csv, line 9: a quote is open"


def test_installed_packages_are_sufficient():
    require("train", "json", "numpy>=1.0")


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("nonexistent_module", "nonexistent-module"),
        ("numpy>=99", "'numpy>=99'"),
    ],
)
def test_missing_package_error_contains_the_install_command(module, package):
    """Check that the error contains the command that installs the missing package."""
    with pytest.raises(ImportError) as error:
        require("train", "json", module)
    assert str(error.value) == (
        f"a required package is not installed. Run `pip install {package}`, or `pip install -e "
        "'.[train]'` in a clone."
    )
