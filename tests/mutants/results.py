"""What is known of each fault: JSON lines, one for each time that it was judged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import Area, Fault

Record = dict[str, Any]
"""area, name, tests (the selection's name), outcome, by, stage, selection, seconds, digests of the fault and the tree.

outcome: killed (by a test, or the tests of a stage do not end), survived (all tests pass), timeout (the fault's limit
ran out before the last stage) or error (pytest could not run).
"""


class Results:
    """The last line of a fault counts, in the order of the files; new lines go to `output`.

    A killed fault stays killed while its text is the same. One that survived is tried again when any source or test
    has changed, and one that has not been judged to the end whenever it is asked for.
    """

    def __init__(self, output: Path, tree: str, known: Iterable[Path] = ()) -> None:
        self.output, self.tree = output, tree
        self.records: dict[tuple[str, str, str], Record] = {}
        for path in known:
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
                self._know(json.loads(line))

    def _know(self, record: Record) -> None:
        self.records[record["area"], record["name"], record["tests"]] = record

    def known(self, area: str, fault: Fault, tests: str) -> Record | None:
        """What is known of the fault by these tests. All tests kill what the fast ones kill."""
        for by in (tests, "fast") if tests == "all" else (tests,):
            record = self.records.get((area, fault.name, by))
            if record is None or record["fault"] != digest(fault):
                continue
            if record["outcome"] == "killed":
                return record
            if by == tests and record["outcome"] == "survived" and record["tree"] == self.tree:
                return record
        return None

    def survived_fast(self, area: str, fault: Fault) -> bool:
        """Whether the fast tests of this tree let the fault survive, so that the slow ones are left to try."""
        fast = self.records.get((area, fault.name, "fast"))
        return fast is not None and (fast["outcome"], fast["fault"], fast["tree"]) == (
            "survived", digest(fault), self.tree,
        )  # fmt: skip

    def add(self, record: Record) -> None:
        self._know(record)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def digest(fault: Fault) -> str:
    return hashlib.sha256(repr((fault.file, fault.old, fault.new)).encode()).hexdigest()[:16]


def score(areas: Iterable[Area], results: Results, tests: str) -> str:
    """A line for each area: faults killed, those killed by tests that are not slow, and all that were judged."""
    lines = [f"{'area':24} {'killed':>8} {'fast':>8} {'judged':>8} {'faults':>8}"]
    totals = [0, 0, 0, 0]
    for area in areas:
        known = [record for fault in area.faults if (record := results.known(area.name, fault, tests))]
        numbers = [
            sum(record["outcome"] == "killed" for record in known),
            sum(record["selection"] == "not slow" for record in known),
            len(known),
            len(area.faults),
        ]
        totals = [total + n for total, n in zip(totals, numbers, strict=True)]
        lines.append(f"{area.name:24} " + " ".join(f"{n:8}" for n in numbers))
    return "\n".join([*lines, f"{'all':24} " + " ".join(f"{n:8}" for n in totals)])
