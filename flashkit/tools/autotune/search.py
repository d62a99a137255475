"""The search for the best tile of one target.

It goes in stages, each over a few tiles that a model ranks highest: blocks of queries and keys with the shape in use
(on a CPU, the register block); other shapes; blocks with the best shape; and a final stage of the best tiles against
the one in use, which is replaced only by a clearly faster tile. Times of different stages are compared by their ratio
to the tile in use, which takes part in all of them. Trials in the log are not repeated, so an interrupted search
resumes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ..bench.environment import now
from .log import Log, Stage, Trial
from .targets import DROP, Effort, Target, Tile
from .trials import Tuner

MARGIN = 0.02
"""By how much a tile is faster than the one it replaces, in four of five rounds: repeated runs differ so much."""

FINALISTS = 3
"""Tiles that the final stage compares with the one in use."""

FINAL_SHARE = 0.3
"""Share of a target's time that is reserved for the final stage."""

MIN_ROUNDS = 4
"""A tile needs this many rounds in the final stage to replace the one in use."""

BATCH = 5
"""Tiles that are timed together, interleaved with the tile in use."""


@dataclass(frozen=True)
class Outcome:
    """The result for a target: the tile to use, its GFLOP/s, and `gain`, its speed-up over the tile used before.

    tried, wrong: numbers of other tiles that were timed, and of tiles that failed. complete: False if the time was up
    before every stage was done. conditions: of the row that is written.
    """

    target: Target
    before: Tile
    tile: Tile
    gain: float
    gflops: float
    tried: int
    wrong: int
    complete: bool
    conditions: dict[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        if self.tile == self.before:
            return f"none of {self.tried} other tiles timed was clearly faster"
        return f"{self.gain:.2f} times as fast as {self.before}; best of {self.tried} tiles timed"


@dataclass
class Search:
    """The search for one target, until `deadline`. rival_gflops: of other kernel generations on the same problem."""

    target: Target
    tuner: Tuner
    log: Log
    effort: Effort
    deadline: float = math.inf
    clock: Callable[[], float] = time.monotonic
    on_trial: Callable[[], None] = lambda: None
    rival_gflops: float = 0.0
    before: Any = field(init=False)

    def run(self) -> Outcome | None:
        """All stages. None if the time was up before even the tile in use was timed."""
        logged = self.log.of(self.target.key)
        # A resumed search compares with the tile in the log: by now a profile may name another one.
        self.before = next((t.tile for t in logged if t.stage == "in use"), None) or self.tuner.in_use(self.target)
        ranked = self.tuner.candidates(self.target)
        deadline, reserved = self.deadline, FINAL_SHARE * (self.deadline - self.clock())
        if math.isfinite(deadline):
            self.deadline = deadline - reserved
        started = self.stage("in use", [self.before])
        if started and self.outclassed:
            return self.outcome(complete=True)
        complete = (
            started
            and self.stage("blocks", self.blocks(ranked, self.before.shape))
            and self.stage("shapes", self.shapes(ranked, self.leader(self.before.shape)))
            and self.stage("blocks", self.blocks(ranked, self.leader().shape))
        )
        self.deadline = deadline
        fastest = [t.tile for t in self.timed()]
        decided = self.stage("final", [t for t in fastest if t == self.before or t in fastest[:FINALISTS]])
        return self.outcome(complete and decided)

    @property
    def outclassed(self) -> bool:
        """Whether the tile in use is so much slower than other kernel generations that no tile will catch up."""
        return any(DROP * (t.gflops or 0.0) < self.rival_gflops for t in self.timed() if t.tile == self.before)

    def blocks(self, ranked: Sequence[Any], shape: Hashable) -> list[Any]:
        """The tiles of a shape that rank highest."""
        return [tile for tile in ranked if tile.shape == shape][: self.effort.blocks]

    def shapes(self, ranked: Sequence[Any], best: Any) -> list[Any]:
        """For each of the other shapes that rank highest, the tile nearest to the best so far."""
        others = list(dict.fromkeys(tile.shape for tile in ranked if tile.shape != best.shape))
        return [
            min((tile for tile in ranked if tile.shape == other), key=lambda tile: _distance(tile, best))
            for other in others[: self.effort.shapes]
        ]

    def stage(self, stage: Stage, wanted: Sequence[Any]) -> bool:
        """Verify and time the tiles that are not in the log yet. False if the time was up first."""
        past = [t for t in self.log.of(self.target.key) if (t.stage == "final") == (stage == "final")]
        logged = {t.tile for t in past if stage != "final" or t.rounds >= MIN_ROUNDS}
        left = [tile for tile in wanted if tile not in logged]
        while left:
            if self.clock() > self.deadline:
                return False
            batch, left = left[:BATCH], left[BATCH:]
            right = [tile for tile in batch if stage == "final" or self.verify(stage, tile)]
            if right:
                self.time(stage, right)
        return True

    def verify(self, stage: Stage, tile: Any) -> bool:
        """Whether the tile gives right results; a tile that does not is logged."""
        status: Literal["wrong", "failed"] = "wrong"
        try:
            problem = self.tuner.verify(self.target, tile)
        except Exception as error:  # a candidate may fail in any way; the search goes on with the others
            status, problem = "failed", f"{type(error).__name__}: {error}"
        if problem:
            self.record(Trial(self.target.key, stage, tile, status, note=problem))
        return not problem

    def time(self, stage: Stage, batch: Sequence[Any]) -> None:
        tiles = list(dict.fromkeys([self.before, *batch]))
        rounds = self.effort.rounds * (2 if stage == "final" else 1)
        timings = self.tuner.time(self.target, tiles, rounds, max(self.deadline - self.clock(), 0.0))
        for tile in batch:
            t = timings[tile]
            ratio, _, high = t.over(timings[self.before])
            gflops = self.tuner.flops(self.target) / t.median / 1e9
            self.record(Trial(self.target.key, stage, tile, "ok", t.median, ratio, high, gflops, len(t.rounds)))

    def record(self, trial: Trial[Any]) -> None:
        self.log.add(msgspec.structs.replace(trial, date=now()))
        self.on_trial()

    def timed(self, stage: Stage | None = None) -> list[Trial[Any]]:
        """Timed trials, the fastest first: those of the final stage if asked for, otherwise those of all others."""
        timed = [t for t in self.log.of(self.target.key) if t.ratio is not None]
        return sorted((t for t in timed if (t.stage == "final") == (stage == "final")), key=lambda t: t.ratio or 0.0)

    def leader(self, shape: Hashable = None) -> Any:
        """The fastest tile so far, of a shape or of all; without the final stage, so that a repeated search agrees."""
        timed = (t.tile for t in self.timed() if shape in (None, t.tile.shape))
        return next(timed, self.before)

    def outcome(self, complete: bool) -> Outcome | None:
        timed, finals = self.timed(), [t for t in self.timed("final") if t.rounds >= MIN_ROUNDS]
        current = next((t for t in [*finals, *timed] if t.tile == self.before), None)
        faster = [t for t in finals if (t.ratio or 1.0) < 1 - MARGIN and (t.high or 1.0) < 1]
        # A tile in use that gives wrong results has no time; then any tile with right results is better.
        best = faster[0] if faster else current or next(iter([*finals, *timed]), None)
        if best is None:
            return None
        tried = {t.tile for t in timed} - {self.before}
        wrong = {t.tile for t in self.log.of(self.target.key) if t.status != "ok"}
        gain, gflops = 1 / (best.ratio or 1.0), best.gflops or 0.0
        conditions = self.target.row_conditions(self.tuner.row_in_use(self.target), self.effort.tokens)
        return Outcome(self.target, self.before, best.tile, gain, gflops, len(tried), len(wrong), complete, conditions)


def _distance(a: Tile, b: Tile) -> float:
    return abs(math.log(a.block_q / b.block_q)) + abs(math.log(a.block_k / b.block_k))
