"""Which rows are kept out of training: a fixed function of their keys."""

import hashlib


def is_held_out(key, percent):
    """Whether a row belongs to the held-out part of `percent`, by the SHA-1 of its key: the same
    whatever the order or the machine."""
    digest = hashlib.sha1(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64
