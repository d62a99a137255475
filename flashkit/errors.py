"""The exceptions of flashkit besides ValueError and TypeError."""

from __future__ import annotations


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
