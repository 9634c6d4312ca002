"""Secrets are never written: options and keys named token, key, password or secret, and the user
part of an address. By name alone."""

import re


HIDDEN = "<hidden>"
_NAME = re.compile(r"(^|[_-])(token|key|password|secret)$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def redacted(data):
    """`data` (of JSON types) with the text under such keys, and the users in addresses, hidden."""
    if isinstance(data, dict):
        return {
            key: HIDDEN
            if value and isinstance(value, str) and _NAME.search(str(key))
            else redacted(value)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [redacted(value) for value in data]
    return _USER.sub(HIDDEN, data) if isinstance(data, str) else data


def redacted_arguments(argv):
    """A command line with the values of such options hidden: `--hub_token X`, `--api-key=X`."""
    output, hide = [], False
    for argument in argv:
        option, equals, _ = argument.partition("=")
        is_secret = option.startswith("-") and bool(_NAME.search(option))
        if hide and not argument.startswith("--"):
            output.append(HIDDEN)
        else:
            output.append(f"{option}={HIDDEN}" if is_secret and equals else redacted(argument))
        hide = is_secret and not equals
    return output
