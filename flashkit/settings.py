"""Every FLASHKIT_* environment variable: its type, its meaning, and how its text is read.

A variable is read where it is needed, not when flashkit is imported, so a program can set it before the call that it is
for. `flashkit config show` prints all of them.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SettingError(ValueError):
    """A variable has a value that it cannot have."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """An environment variable.

    name: with its prefix. kind: of its values, for people. parse: the value of a text that is not empty; ValueError
    with what it expects. default: what holds where it is not set, for people. meaning: a sentence.
    """

    name: str
    kind: str
    parse: Callable[[str], T]
    default: str
    meaning: str

    def text(self) -> str:
        """The text of the variable; empty where it is not set, which is the same."""
        return os.environ.get(self.name, "")

    def read(self) -> T | None:
        """The value, None where it is not set. SettingError names the variable, what is expected, and the text."""
        text = self.text()
        try:
            return self.parse(text) if text else None
        except ValueError as error:
            raise SettingError(f"{self.name}: expected {error}, got {text!r}") from None

    def raw(self) -> Any:
        """The variable as the system stores it (bytes, text or None), for comparison."""
        return _variables.get(_encoded(self.name))


# os.environ encodes the name on each access, which takes longer than the other steps of a planned call.
_variables: Any = getattr(os.environ, "_data", os.environ)
_encoded: Any = functools.cache(getattr(os.environ, "encodekey", str))


# --- types ------------------------------------------------------------------------------------------------------------


def size(text: str) -> int:
    """Bytes of a text such as 500M, 2G or 1048576; K, M and G are powers of 1024."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("a number of bytes such as 500M or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _any(text: str) -> str:
    return text


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("0", "1", "false", "true", "no", "yes", "off", "on"):
        raise ValueError("1 or 0")
    return word in ("1", "true", "yes", "on")


def _threads(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise ValueError("a number of threads, 1 or more")
    return int(text)


def _directory(text: str) -> str:
    path = os.path.expanduser(text)
    if not os.path.isabs(path):
        raise ValueError("an absolute path")
    return path


def _one_of(*names: str) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in names:
            raise ValueError(f"{', '.join(names[:-1])} or {names[-1]}")
        return text

    return choose


# --- the settings -----------------------------------------------------------------------------------------------------

BACKEND = Setting(
    "FLASHKIT_BACKEND", "name of a backend", _any, "the fastest",
    "the backend that every call of the process uses, unless the call or a block says otherwise",
)  # fmt: skip
NUM_THREADS = Setting(
    "FLASHKIT_NUM_THREADS", "1 or more", _threads, "NUMBA_NUM_THREADS, or the cores of the process",
    "threads of a call on a CPU, at most what Numba allows",
)  # fmt: skip
DETERMINISTIC = Setting(
    "FLASHKIT_DETERMINISTIC", "1 or 0", _flag, "0", "1: every call of the process is one with `deterministic=True`"
)
PROGRESS = Setting(
    "FLASHKIT_PROGRESS", "1 or 0", _flag, "1 on a terminal",
    "0: no line on the terminal while kernels compile; the logger `flashkit` logs each compilation regardless",
)  # fmt: skip
CACHE_DIR = Setting(
    "FLASHKIT_CACHE_DIR", "absolute path", _directory, "the user's cache directory",
    "compiled kernels go to its folder `flashkit-kernels`",
)  # fmt: skip
CACHE_SIZE = Setting(
    "FLASHKIT_CACHE_SIZE", "size such as 500M", size, "1G", "how much the compiled kernels may take on disk"
)
PREBUILT = Setting(
    "FLASHKIT_PREBUILT", "1 or 0", _flag, "1", "0: kernels are compiled here, not taken from the package"
)
PROFILE_DIR = Setting(
    "FLASHKIT_PROFILE_DIR", "absolute path", _directory, "none",
    "a directory of device profiles with precedence over all others",
)  # fmt: skip
CPU_LANES = Setting(
    "FLASHKIT_CPU_LANES", "4, 8 or 16", _one_of("4", "8", "16"), "what the CPU has",
    "limit vectors to that many float32 lanes: profile, tiles and kernels are those of such a CPU",
)  # fmt: skip
BF16_METHODS = "amx", "avx512bf16", "widen"
CPU_BF16 = Setting(
    "FLASHKIT_CPU_BF16", ", ".join(BF16_METHODS), _one_of(*BF16_METHODS), "the best of this machine",
    "how the CPU backend multiplies bfloat16",
)  # fmt: skip
CUDA_GENERATIONS = "sm90", "sm80", "simt"
CUDA_GENERATION = Setting(
    "FLASHKIT_CUDA_GENERATION", ", ".join(CUDA_GENERATIONS), _one_of(*CUDA_GENERATIONS), "the fastest",
    "the generation of kernels that the CUDA backends use; what it cannot do is refused",
)  # fmt: skip
CUDA_WATCHDOG = Setting(
    "FLASHKIT_CUDA_WATCHDOG", "1 or 0", _flag, "0",
    "1: where a kernel of `sm90` waits too long for another part of itself it fails instead of hanging",
)  # fmt: skip

ALL: tuple[Setting[Any], ...] = tuple(value for value in globals().values() if isinstance(value, Setting))
"""In the order of their definition."""
