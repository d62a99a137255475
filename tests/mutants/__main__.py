"""Judge the faults: python -m tests.mutants [--area A] [--only TEXT] [--tests fast|all|device] [--jobs N]."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from . import areas
from .results import Results, score
from .runner import SELECTIONS, Judge

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--area", action="append", help="an area, a module of tests/mutants; may be given again")
    parser.add_argument("--only", metavar="TEXT", action="append", help="faults whose name contains this text")
    parser.add_argument("--core", action="store_true", help="faults that take away a part of the algorithm")
    parser.add_argument(
        "--tests", choices=sorted(SELECTIONS), default="all",
        help="fast: without the slow ones; device: the stages for a machine with a GPU",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--output", type=Path, default=WORK / "results.jsonl", metavar="FILE", help="lines are added")
    parser.add_argument(
        "--resume", action="append", nargs="?", type=Path, default=[], const=None, metavar="FILE",
        help="judge no fault that this file knows, by default the output; may be given again",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER", help="of one run at a time; kept")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for all tests of a fault")
    parser.add_argument("--score", action="store_true", help="print the score of what is known, and run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the faults, and run nothing")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # progress shows in a file, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and its jobs with it
    chosen = [area for area in areas() if not options.area or area.name in options.area]
    if options.tests == "device":
        chosen = [area for area in chosen if area.device]
    if options.only:
        chosen = [area.of(lambda fault: any(text in fault.name for text in options.only)) for area in chosen]
    if options.core:
        chosen = [area for area in (area.of(lambda fault: bool(fault.core)) for area in chosen) if area.faults]
    if not any(area.faults for area in chosen):
        parser.error(f"no fault is chosen; areas: {', '.join(area.name for area in areas())}")
    if options.list:
        for area in chosen:
            print(*(f"{area.name}: {fault.name}" for fault in area.faults), sep="\n")
        return 0
    known = [path or options.output for path in options.resume] or ([options.output] if options.score else [])
    with tempfile.TemporaryDirectory(prefix="flashkit-mutants-", ignore_cleanup_errors=True) as folder:
        judge = Judge(ROOT, Path(folder), options.work, 1 if options.score else options.jobs)
        results = Results(options.output, judge.digest, known)
        try:
            if not options.score:
                judge.run(chosen, results, options.tests, options.limit)
        finally:
            print(score(chosen, results, options.tests))
        records = [results.known(area.name, fault, options.tests) for area in chosen for fault in area.faults]
    return 0 if all(record and record["outcome"] == "killed" for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
