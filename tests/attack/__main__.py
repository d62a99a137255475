"""The command: `python -m tests.attack --help`."""

import argparse
import json
import resource
import sys
import time
from collections import Counter
from itertools import count

from . import campaign, draw, graphs


def prove(seed: int, first: int, last: int, until: float) -> int:
    """Look at the graphs of these numbers; the exit status."""
    begun, seen, proven, findings = time.monotonic(), Counter[str](), Counter[str](), 0
    for each in graphs.checked(seed, first, last):
        seen[each["kind"]] += 1
        proven[each["kind"]] += each["proven"]
        if each["problem"]:
            findings += 1
            repeat = f"python -m tests.attack --seed {seed} --first {each['number']} --proofs 1"
            print(json.dumps({**each, "repeat": repeat}), flush=True)
        if time.monotonic() > until:
            break
    seconds = round(time.monotonic() - begun, 1)
    print(json.dumps({"seen": seen, "proven": proven, "findings": findings, "seconds": seconds}))
    return bool(findings)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack", description="Random calls of attention on guarded memory, each result checked."
    )
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the calls and of the pool of graphs")
    add("--calls", type=int, default=1000, help="how many")
    add("--first", type=int, default=0, help="number of the first one")
    add("--minutes", type=float, default=float("inf"), help="end after so many")
    add("--backend", default="cpu", help="cpu, cupy_raw or numba_cuda")
    add("--lanes", nargs="*", default=[""], metavar="4|8|16", help="FLASHKIT_CPU_LANES, in turn")
    add("--bf16", default="", help="FLASHKIT_CPU_BF16: widen, avx512bf16, amx or emulate")
    add("--generation", default="", help="FLASHKIT_CUDA_GENERATION: simt, sm80 or sm90")
    add("--emulated", default="", metavar="SMS", help="run on the emulated CUDA device with so many SMs")
    sanitizer = "compute-sanitizer --report-api-errors no --error-exitcode 9"
    add("--sanitizer", default="", metavar="COMMAND", help=f"runs children: {sanitizer!r}")
    add("--graphs", type=int, default=200, help="combinations of features that code is compiled for")
    add("--proofs", type=int, default=0, metavar="N", help="no calls, but N random indices and 2 N masks that wrap")
    add("--batch", type=int, default=campaign.BATCH, help="calls of one process")
    add("--fix", type=json.loads, default={}, metavar="JSON", help="factors that are not drawn, with their levels")
    add("--call", type=json.loads, metavar="JSON", help="make this call alone")
    add("--whole", action="store_true", help="print findings as they are, without looking for the smallest call")
    args = parser.parse_args()

    def settings(lanes: str) -> campaign.Settings:
        return campaign.Settings(
            args.backend, lanes, args.bf16, args.generation, args.emulated, args.sanitizer, args.graphs,
            args.batch, args.fix,
        )  # fmt: skip

    if args.call is not None:
        found = campaign.problems_of(settings(args.lanes[0]), draw.PLAIN | args.call)
        print(json.dumps({"choice": args.call, "problems": found}))
        return bool(found)
    begun, tally = time.monotonic(), campaign.Tally()
    until = begun + 60 * args.minutes
    if args.proofs:
        return prove(args.seed, args.first, args.first + args.proofs, until)
    for first, lanes in zip(range(args.first, args.first + args.calls, args.batch), count()):
        used = settings(args.lanes[lanes % len(args.lanes)])
        last = min(first + args.batch, args.first + args.calls)
        for finding in campaign.numbered(used, args.seed, first, last, tally, until):
            tally.findings.append(finding)
            choice, found = finding["choice"], finding["problems"]
            if not args.whole:
                choice, found = campaign.smallest(used, choice)
            repeat = campaign.command(used, choice)
            print(json.dumps({**finding, "smallest": choice, "problems_of_it": found, "repeat": repeat}), flush=True)
        rate = tally.calls / (time.monotonic() - begun)
        print(f"{tally.calls} calls, {len(tally.findings)} findings, {rate:.1f} calls/s", file=sys.stderr, flush=True)
        if time.monotonic() > until:
            break
    seconds = time.monotonic() - begun
    used_cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(json.dumps({
        "calls": tally.calls, "refused": tally.refused, "findings": len(tally.findings), "seconds": round(seconds, 1),
        "calls_per_second": round(tally.calls / seconds, 1), "per_cpu_second": round(tally.calls / used_cpu, 1),
    }))  # fmt: skip
    return bool(tally.findings)


if __name__ == "__main__":
    sys.exit(main())
