"""Exceptions that flashkit raises beyond ValueError and TypeError."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """No backend can run the call; the message lists what each backend said."""


class ProfileError(ValueError):
    """A device profile is malformed; the message names file, line and field."""
