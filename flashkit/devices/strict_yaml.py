"""YAML of files that others may have written: plain values within bounds, and the line of each, which errors name."""

from __future__ import annotations

import difflib
import math
import re
from typing import Any

import msgspec
import yaml

from ..errors import ProfileError

MAX_BYTES = 1 << 18
"""Largest size of a profile file."""

MAX_DEPTH, MAX_EVENTS, MAX_TEXT = 16, 30_000, 2000
"""Bounds of a file: lists within lists, events of the parser (about one a value and key), characters of a value."""


class SchemaError(ProfileError):
    """A profile violates the schema. Attributes: `file`, `line`, dotted `field`, `problem`."""

    def __init__(self, file: str, line: int, field: str, problem: str) -> None:
        self.file, self.line, self.field, self.problem = file, line, field, problem
        super().__init__(f"{file}:{line}: {field or 'the file'}: {problem}")


Path = tuple[str | int, ...]
"""Of a field: keys of mappings, indices of lists."""

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is faster


_UNREAD = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Loader(_BaseLoader):  # type: ignore[misc]
    """Safe YAML that reads 2026-11-20 as text: JSON has no dates, and the schema has a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own name and form)
        first: [(tag, pattern) for tag, pattern in rules if tag not in _UNREAD]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class Source:
    """The data of a YAML text, without anchors or recursion in C, by events, and the line of every field."""

    def __init__(self, text: str, file: str) -> None:
        self.file, self.events = file, 0
        self.lines: dict[Path, int] = {(): 1}
        if len(text) > MAX_BYTES:
            raise SchemaError(file, 1, "", f"expected at most {MAX_BYTES} characters, got {len(text)}")
        try:
            self.loader = _Loader(text)
            self.data = self._document()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise SchemaError(file, mark.line + 1 if mark else 1, "", f"not YAML: {problem}") from None

    def _document(self) -> Any:
        self._event()  # the stream's start
        if isinstance(self._event(), yaml.StreamEndEvent):
            return None
        data = self._value(self._event(), ())
        self._event()  # the document's end
        if not isinstance(event := self._event(), yaml.StreamEndEvent):
            raise self._wrong(event, (), "not YAML: expected a single document")
        return data

    def _event(self) -> Any:
        """The next event. It is one that is read."""
        event = self.loader.get_event()
        self.events += 1
        if getattr(event, "anchor", None) is not None:
            raise self._wrong(event, (), "anchors (&) and aliases (*) are not read: write the value twice")
        if getattr(event, "tag", None) is not None:
            raise self._wrong(event, (), f"tags are not read, here {event.tag[:80]!r}")
        if self.events > MAX_EVENTS:
            raise self._wrong(event, (), "it has too many values")
        return event

    def _value(self, event: Any, path: Path) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if len(path) >= MAX_DEPTH:
            raise self._wrong(event, (), f"lists and mappings are nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := self._event(), yaml.SequenceEndEvent):
                self.lines[at := (*path, len(items))] = event.start_mark.line + 1
                items.append(self._value(event, at))
            return items
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._event(), yaml.MappingEndEvent):
            key = self._scalar(event, path) if isinstance(event, yaml.ScalarEvent) else None
            if not isinstance(key, str):
                raise self._wrong(event, path, "expected a short text as key")
            at = *path, key
            # YAML readers silently keep the last of two equal keys, which would drop rows of a tile table.
            if key in mapping:
                raise self._wrong(event, at, "appears twice")
            self.lines[at] = event.start_mark.line + 1
            mapping[key] = self._value(self._event(), at)
        return mapping

    def _scalar(self, event: Any, path: Path) -> Any:
        """A value, and what no schema says: numbers are finite, text can be printed on a line."""
        if len(event.value) > MAX_TEXT:
            raise self._wrong(event, path, f"expected at most {MAX_TEXT} characters, got {len(event.value)}")
        tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        try:
            value = self.loader.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark))
        except ValueError as error:
            raise self._wrong(event, path, f"expected a number, got {event.value!r}: {error}") from None
        if isinstance(value, str) and (control := _CONTROL.search(value)):
            raise self._wrong(event, path, f"has the control character {control[0]!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(event, path, f"expected a finite number, got {event.value}")
        if isinstance(value, int) and abs(value) > 2**53:
            raise self._wrong(event, path, f"expected a number within 2^53, got {value}")
        return value

    def _wrong(self, event: Any, path: Path, problem: str) -> SchemaError:
        return SchemaError(self.file, event.start_mark.line + 1, _dotted(path), problem)

    def error(self, path: Path, problem: str) -> SchemaError:
        """An error with the line of the field at `path`, or of its nearest ancestor in the text."""
        line = next(self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines)
        return SchemaError(self.file, line, _dotted(path), problem)

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(path, f"expected a mapping, got {type(value).__name__}")
        return value

    def convert(self, value: Any, kind: type[Any], path: Path) -> Any:
        """`value` as `kind`; SchemaError with file, line and full field name if it is invalid."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, inner = str(error).partition(" - at `$")
            steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", inner)
            path = *path, *(int(index) if index else name for name, index in steps)
            problem = problem.replace(" | null`", "`")  # irrelevant for a field that has a value
            if unknown := re.search(r"unknown field `(.+)`", problem):
                problem += suggest(unknown[1], kind.__struct_fields__)
                path = *path, unknown[1]
            raise self.error(path, problem) from None


def _dotted(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def suggest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}"
