"""An attribute that is computed on first use.

`functools.cached_property` holds one lock for all instances of a class while it computes (Python before 3.12), so a
thread that compiles for one plan blocks all others, and a child forked meanwhile blocks for ever. This one has no lock:
threads that come at the same time may compute twice, and all get the value that was stored first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:
        """A method as an attribute: called once for an instance, whose `__dict__` keeps the result."""

        def __init__(self, function: Any) -> None:
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.name, self.function(instance))


__all__ = ["cached_property"]
