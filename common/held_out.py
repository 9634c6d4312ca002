"""Which rows are kept out of training: a fixed function of their keys."""

import hashlib


def fraction(key):
    """A number from 0 to 1 that is a fixed function of a text, the same on every machine."""
    digest = hashlib.sha1(key.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_held_out(key, percent):
    """Whether a row belongs to the held-out part of `percent`, by the SHA-1 of its key: the same
    whatever the order."""
    return fraction(key) < percent / 100
