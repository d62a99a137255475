"""The exceptions of flashkit besides ValueError and TypeError, its warnings, and how errors show values."""

from __future__ import annotations

import sys
import warnings


class UnsupportedError(NotImplementedError):
    """No backend can compute the call. The message has the reason of each backend.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q = np.zeros((1, 1, 4, 8), np.float32)
    >>> try:
    ...     flashkit.attention(q, q, q, backend="cupy_raw")
    ... except flashkit.UnsupportedError as error:
    ...     print(str(error)[:38])
    no backend can compute attention of fl
    """


class ProfileError(ValueError):
    """A device profile is malformed. The message names file, line and field.

    Examples
    --------
    >>> import flashkit
    >>> from flashkit.devices import profiles
    >>> try:
    ...     profiles.parse("schema: 1", "mine.yaml")
    ... except flashkit.ProfileError as error:
    ...     print(error)
    mine.yaml:1: the file: the section `device` is missing
    """


class OutOfPagesError(RuntimeError):
    """A KVCache has too few free pages for the tokens of an append. The cache is as it was before.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> cache = flashkit.KVCache(1, kv_heads=1, dim=8, pages=2, page=4)
    >>> k = np.ones((1, 1, 9, 8), np.float32)
    >>> try:
    ...     cache.append(k, k)
    ... except flashkit.OutOfPagesError as error:
    ...     print(str(error)[:32], cache.lengths.tolist())
    9 more tokens need 3 pages of 4, [0]
    """


def shown(value: object) -> str:
    """The text of a value in an error, which is short whatever the value is.

    Examples
    --------
    >>> from flashkit import errors
    >>> errors.shown("bhnd"), errors.shown(1 << 100_000)
    ("'bhnd'", 'an integer of 100001 bits')
    """
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # of the caller's own class, or of a long integer in a list
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line of the caller outside flashkit, so that each such line warns once."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


_said: set[str] = set()


def warn_once(message: str, about: str = "", category: type[Warning] = UserWarning) -> None:
    """Warn once in a process with each message, or of each thing that messages are about."""
    if (about or message) not in _said:
        _said.add(about or message)
        warn(message, category)


def forget_warnings() -> None:
    """`warn_once` gives all warnings again."""
    _said.clear()
