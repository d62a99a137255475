"""Judge the faults: python -m tests.mutants [--area A] [--only TEXT] [--tests fast|all]."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from . import areas
from .runner import SELECTIONS, Results, Tree, run, score

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--area", action="append", help="an area, a module of tests/mutants; may be given again")
    parser.add_argument("--only", metavar="TEXT", help="faults whose name contains this text")
    parser.add_argument("--tests", choices=sorted(SELECTIONS), default="all", help="fast: without the slow ones")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutants" / "results.jsonl", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for each stage of tests")
    parser.add_argument("--no-baseline", action="store_true", help="do not check that tests pass without a fault")
    parser.add_argument("--score", action="store_true", help="print the score of what is known, and run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the faults, and run nothing")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # progress shows in a file, too
    chosen = [area for area in areas() if not options.area or area.name in options.area]
    if options.only:
        chosen = [area._replace(faults=tuple(f for f in area.faults if options.only in f.name)) for area in chosen]
    if not any(area.faults for area in chosen):
        parser.error(f"no fault is chosen; areas: {', '.join(area.name for area in areas())}")
    if options.list:
        for area in chosen:
            print(*(f"{area.name}: {fault.name}" for fault in area.faults), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="flashkit-mutants-") as folder:
        tree = Tree(ROOT, Path(folder), ROOT / "build" / "mutants" / "kernels")
        results = Results(options.results, tree.digest)
        if not options.score:
            run(tree, chosen, results, options.tests, options.timeout, baseline=not options.no_baseline)
        print(score(chosen, results, options.tests))
        known = [results.known(area.name, fault, options.tests) for area in chosen for fault in area.faults]
    return 0 if all(record and record["killed"] for record in known) else 1


if __name__ == "__main__":
    sys.exit(main())
