"""Autotuning: the search on simulated machines, its log, the profiles it writes; and trials on this CPU."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit.backends.cpu import bf16
from flashkit.devices import io_model, profiles, timing
from flashkit.devices.io_model import CpuTile
from flashkit.devices.timing import Timing
from flashkit.tools import cli
from flashkit.tools.autotune import command, cpu
from flashkit.tools.autotune.log import Log, MeasuredPeaks
from flashkit.tools.autotune.search import Outcome, Search
from flashkit.tools.autotune.targets import DROP, Effort, Target
from flashkit.tools.bench import environment

MEMORY = {"l1d": 32 << 10, "l2": 1 << 20}
pytestmark = pytest.mark.usefixtures("own_profiles")

TARGET = Target("forward", "float32", 64, causal=False)
IN_USE = CpuTile(96, 96, 16, 8, 3)
EFFORT = Effort(("float32",), (64,), tokens=512, blocks=6, shapes=2, rounds=5, budget=math.inf)
PEAKS = MeasuredPeaks(20.0, 100.0, 200.0, {"float32": 0.2, "float64": 0.1})


class Machine:
    """A simulated Tuner: functions give the seconds and the errors of a tile; timing advances its clock."""

    def __init__(
        self, seconds: Callable[[CpuTile], float], complaint: Callable[[CpuTile], str] = lambda tile: ""
    ) -> None:
        self.seconds, self.complaint = seconds, complaint
        self.now = 0.0
        self.timed: list[CpuTile] = []
        self.verified: list[CpuTile] = []
        self.interrupt_after = math.inf

    def clock(self) -> float:
        return self.now

    def in_use(self, target: Target) -> CpuTile:
        return IN_USE

    def row_in_use(self, target: Target) -> None:
        return None

    def candidates(self, target: Target) -> list[CpuTile]:
        d = target.head_dim
        return io_model.candidates(target.dtype, d, d, target.direction, lanes=16, **MEMORY)

    def flops(self, target: Target) -> float:
        return 1e12

    def verify(self, target: Target, tile: CpuTile) -> str:
        self.verified.append(tile)
        return self.complaint(tile)

    def time(self, target: Target, tiles: Sequence[CpuTile], rounds: int, budget: float) -> dict[CpuTile, Timing]:
        if len(self.timed) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.timed += tiles
        calls = {tile: self.call(tile) for tile in tiles}
        return timing.interleaved(calls, rounds=rounds, budget=budget, drop=DROP, clock=self.clock)

    def call(self, tile: CpuTile) -> Callable[[], None]:
        def spend() -> None:
            self.now += self.seconds(tile)

        return spend


class Simulated(cpu.CpuTuner):
    """The CPU backend on a simulated machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        for name in ("in_use", "row_in_use", "candidates", "flops", "verify", "time"):
            setattr(self, name, getattr(machine, name))

    def measure_peaks(self) -> MeasuredPeaks:
        return PEAKS


def tuner(head_dim: int) -> cpu.CpuTuner:
    """Of small problems on this CPU."""
    made = cpu.CpuTuner()
    made.begin(Effort(("float32",), (head_dim,), 256, 1, 1, 2, 1.0), [])
    return made


def autotune(machine: Machine, **options: Any) -> list[Outcome]:
    return command.autotune(quick=True, tuned=[Simulated(machine)], clock=machine.clock, **options)


@pytest.fixture(autouse=True)
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of the cores' time that other processes are said to take, in place of what they take; short runs."""
    monkeypatch.setattr(cpu, "QUICK", EFFORT)
    shares = [0.0]

    def leave(self: environment.BackgroundLoad, *error: object) -> None:
        self.share = shares[0]

    monkeypatch.setattr(environment.BackgroundLoad, "__exit__", leave)
    return shares


def block_size(tile: CpuTile) -> float:
    """Seconds on a machine that is fast with large blocks of queries and 4 x 3 registers."""
    return (1.0 if (tile.rows, tile.vectors) == (4, 3) else 1.3) + 10 / tile.block_q


def search(machine: Machine, path: Path, **options: Any) -> Outcome | None:
    return Search(TARGET, machine, Log(path, CpuTile), EFFORT, clock=machine.clock, **options).run()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the search -------------------------------------------------------------------------------------------------------


def test_the_search_finds_the_fastest_of_what_it_tries(tmp_path: Path) -> None:
    machine = Machine(block_size)
    found = search(machine, tmp_path / "log")
    assert found.complete
    assert (found.tile.rows, found.tile.vectors) == (4, 3)
    assert found.tile == min(machine.timed, key=block_size)
    assert found.gain == pytest.approx(block_size(IN_USE) / block_size(found.tile))
    assert found.gflops == pytest.approx(1000 / block_size(found.tile))
    assert found.tried == len(set(machine.timed)) - 1
    assert "times as fast as 96 x 96 in 8 x 3 registers" in found.why


def test_a_tile_within_the_margin_does_not_replace_the_one_in_use(tmp_path: Path) -> None:
    found = search(Machine(lambda tile: 1.0 if tile == IN_USE else 0.99), tmp_path / "log")
    assert found.tile == IN_USE
    assert found.gain == 1.0
    assert found.why.startswith("none of ")


def test_a_wrong_tile_is_never_chosen(tmp_path: Path) -> None:
    def wrong(tile: CpuTile) -> str:
        if tile.block_q == 48:
            raise FloatingPointError("division by zero")
        return "out is off by 1" if tile.rows == 4 else ""

    machine = Machine(block_size, wrong)
    found = search(machine, tmp_path / "log")
    assert found.tile.rows != 4
    assert found.wrong > 0
    assert all(tile.rows != 4 for tile in machine.timed)
    errors = {line["tile"]["rows"]: (line["status"], line["note"]) for line in read(tmp_path / "log") if line["note"]}
    assert errors[4] == ("wrong", "out is off by 1")
    failed = [line for line in read(tmp_path / "log") if line["status"] == "failed"]
    assert all(line["note"] == "FloatingPointError: division by zero" for line in failed)


def test_a_wrong_tile_in_use_is_replaced_by_a_right_one_even_if_slower(tmp_path: Path) -> None:
    machine = Machine(lambda tile: 1.0 if tile == IN_USE else 1.5, lambda tile: "wrong" if tile == IN_USE else "")
    assert search(machine, tmp_path / "log").tile != IN_USE


def test_an_outclassed_generation_gets_one_trial(tmp_path: Path) -> None:
    """1e12 FLOPs in 1.4 s are 714 GFLOP/s: half of 1500 and not of 1400."""
    for rival, tried in ((1500.0, False), (1400.0, True)):
        machine = Machine(block_size)
        found = search(machine, tmp_path / str(rival), rival_gflops=rival)
        assert found.complete
        assert (set(machine.timed) != {IN_USE}) == tried
        assert found.gflops > 0


def test_generations_compete_on_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is ten times as fast as the second, which gets one trial; both get a row."""

    class TwoGenerations(Simulated):
        def targets(self, effort: Effort, dtypes: Any) -> list[Target]:
            return [Target("forward", "float32", 64, generation=name) for name in ("new", "old")]

    machine = Machine(block_size)
    monkeypatch.setattr(machine, "flops", lambda target: 1e13 if target.generation == "new" else 1e12)
    new, old = command.autotune(quick=True, tuned=[TwoGenerations(machine)], clock=machine.clock)
    assert new.tried > old.tried == 0


def test_a_stored_log_reads(tmp_path: Path) -> None:
    """A log whose peaks have the tag of older versions, and a trial."""
    path = tmp_path / "log"
    path.write_text(
        '{"type":"rates","bandwidth_gbs":20.0,"l2_bandwidth_gbs":100.0,"l1_bandwidth_gbs":200.0,'
        '"peak_tflops":{"float32":0.2},"date":"2026-11-20T00:00:00Z"}\n'
        '{"type":"trial","target":"a","stage":"in use","tile":{"block_q":96,"block_k":96,"lanes":16,"rows":8,'
        '"vectors":3},"status":"ok","seconds":0.1,"ratio":1.0}\n'
    )
    log = Log(path, CpuTile)
    assert (log.peaks.bandwidth_gbs, log.peaks.peak_tflops) == (20.0, {"float32": 0.2})
    assert [trial.tile for trial in log.of("a")] == [IN_USE]


# --- interruption, resumption, time -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is no entry of this log")  # the line of the first interruption
def test_an_interrupted_search_resumes(tmp_path: Path) -> None:
    undisturbed = search(Machine(block_size), tmp_path / "whole")
    first, second = Machine(block_size), Machine(block_size)
    first.interrupt_after = 8
    with pytest.raises(KeyboardInterrupt):
        search(first, tmp_path / "log")
    before = (tmp_path / "log").read_text()
    with (tmp_path / "log").open("a") as file:
        file.write('{"type":"trial","target":"forw')  # killed while it wrote
    resumed = search(second, tmp_path / "log")
    assert (resumed.tile, resumed.complete) == (undisturbed.tile, True)
    assert resumed.gain == pytest.approx(undisturbed.gain)
    assert (tmp_path / "log").read_text().startswith(before)
    done = {CpuTile(**json.loads(line)["tile"]) for line in before.splitlines()}
    assert len(done) > 3
    assert not done & set(second.verified)
    third = Machine(block_size)
    assert search(third, tmp_path / "log") == resumed
    assert third.timed == []


def test_a_resumed_search_compares_with_the_tile_that_was_in_use_at_first(tmp_path: Path) -> None:
    found = search(Machine(block_size), tmp_path / "log")
    again = Machine(block_size)
    again.in_use = lambda target: found.tile  # type: ignore[method-assign, union-attr]  # a profile says so by now
    assert search(again, tmp_path / "log") == found


def test_the_time_is_up(tmp_path: Path) -> None:
    assert search(Machine(block_size), tmp_path / "none", deadline=-1.0) is None
    machine = Machine(block_size)
    assert not search(machine, tmp_path / "some", deadline=70.0).complete
    assert machine.now < 100
    assert any(line["stage"] == "final" for line in read(tmp_path / "some"))


# --- the command ------------------------------------------------------------------------------------------------------


def test_autotune_writes_a_profile_that_is_used_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    q = np.ones((1, 4, 256, 64), np.float32)
    flashkit.attention(q, q, q)  # a plan by the old profile is cached
    machine = Machine(block_size)
    found = autotune(machine)
    assert [f.target for f in found] == EFFORT.targets()
    shown = capsys.readouterr().out
    assert f"{sum(f.tile != f.before for f in found)} of 4 got faster" in shown
    assert "peak TFLOP/s: float32 0.200, float64 0.100" in shown

    (file,) = (profiles.user_dir()).glob("*.yaml")
    best = found[0].tile
    profile = profiles.load_file(file)
    row = profile.tile("cpu.forward", dtype="float32", head_dim=64, mask=False)
    assert (row.block_q, row.block_k, row.rows, row.vectors) == (best.block_q, best.block_k, best.rows, best.vectors)
    assert row.measured.gflops == pytest.approx(found[0].gflops, rel=1e-3)
    assert isinstance(row.measured.versions, dict)
    assert {"flashkit", "numba", "numpy"} <= set(row.measured.versions)
    assert "threads" in str(row.why)
    assert profiles.for_device("cpu").bandwidth_gbs == 20.0
    assert profiles.for_device("cpu").peak("float32") == 0.2

    explanation = flashkit.explain(q, q, q)
    assert explanation.tile["block_q"] == best.block_q
    assert str(file) in str(explanation)
    reference = flashkit.attention(q, q, q, backend="reference")
    assert np.allclose(flashkit.attention(q, q, q), reference, rtol=1e-5)


def test_autotune_reports_targets_without_a_right_tile(capsys: pytest.CaptureFixture[str]) -> None:
    assert autotune(Machine(block_size, lambda tile: "wrong")) == []
    shown = capsys.readouterr().out
    assert shown.count("every tile tried gives wrong results") == 4
    assert "run again" not in shown


def test_autotune_keeps_its_budget_and_reports_unfinished_targets(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(block_size)
    found = autotune(machine, budget=300.0)
    assert machine.now < 400
    assert not all(f.complete for f in found)
    assert "run again to resume" in capsys.readouterr().out


def test_autotune_writes_to_the_output_file(tmp_path: Path) -> None:
    machine = Machine(block_size)
    target = tmp_path / "deep" / "mine.yaml"
    autotune(machine, output=target)
    assert len(profiles.load_file(target).tiles["cpu.forward"]) == 2
    assert [file.name for file in target.parent.iterdir()] == ["mine.yaml"]
    assert not profiles.user_dir().exists()


def test_autotune_writes_no_profile_that_it_does_not_trust(capsys: Any, load: list[float]) -> None:
    load[0] = 0.4
    machine = Machine(block_size)
    found = autotune(machine)
    shown = capsys.readouterr().out
    assert found and not found.written
    assert not profiles.user_dir().exists()
    nothing = autotune(Machine(block_size, lambda tile: "wrong"), resume=False)  # the peaks alone
    assert nothing == [] and not nothing.written
    assert "40 %" in shown and "--force" in shown and "--no-resume" in shown
    load[0] = 0.0  # but the trials in the log were disturbed
    assert not autotune(Machine(block_size)).written
    assert autotune(Machine(block_size), force=True).written
    (file,) = profiles.user_dir().glob("*.yaml")
    file.unlink()
    assert autotune(Machine(block_size), resume=False).written
    assert file.exists()


def test_an_interrupted_run_keeps_that_it_was_disturbed(load: list[float]) -> None:
    load[0] = 0.4
    machine = Machine(block_size)
    machine.interrupt_after = 5
    with pytest.raises(KeyboardInterrupt):
        autotune(machine)
    load[0] = 0.0
    assert not autotune(Machine(block_size)).written


def test_the_command_says_that_no_profile_was_written(monkeypatch: Any, capsys: Any, load: list[float]) -> None:
    monkeypatch.setattr(command, "tuners", lambda backend: [Simulated(Machine(block_size))])
    load[0] = 0.4
    assert cli.run(["autotune", "--quick"]) == 1
    assert "no profile was written" in capsys.readouterr().err
    assert cli.run(["autotune", "--quick", "--force"]) == 0


def test_the_log_depends_on_device_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    here = command.log_path(cpu.CpuTuner())
    assert here.suffix == ".jsonl"
    monkeypatch.setattr(environment, "versions", lambda: {"numba": "9.9"})
    assert command.log_path(cpu.CpuTuner()) != here


# --- trials on this machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tiles_on_this_cpu_are_verified_and_timed(direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(direction, "float32", 16, causal=True)
    runner = tuner(16)
    tile = runner.in_use(target)
    others = [t for t in runner.candidates(target) if t != tile][:1]
    assert runner.verify(target, tile) == ""
    timings = runner.time(target, [tile, *others], rounds=2, budget=10.0)
    assert all(t.best > 0 for t in timings.values())
    assert runner.flops(target) > 0

    kernels = type(runner.kernels)
    run = getattr(kernels, direction)

    def spoilt(self: Any, plan: Any, operands: Any, *gradients: Any) -> None:
        run(self, plan, operands, *gradients)
        if gradients:
            gradients[0].dk[0, 0, 0, 0] *= 1.001
        else:
            operands.lse[...] = 0

    monkeypatch.setattr(kernels, direction, spoilt)
    assert runner.verify(target, tile).startswith("lse is off by " if direction == "forward" else "dk is off by ")
    if direction == "forward":
        monkeypatch.setattr(kernels, direction, lambda *_: None)
        assert runner.verify(target, tile).startswith("out is off by nan")


@pytest.mark.slow
def test_autotune_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUICK", replace(EFFORT, tokens=256, blocks=1, shapes=1, rounds=2))
    q, row = np.ones((1, 4, 256, 64), np.float32), None
    for _ in range(16):  # on a slow machine the first runs end with the peaks, and the next go on from there
        assert cli.run(["autotune", "--quick", "--dtype", "float32", "--budget", "4", "--backend", "cpu"]) == 0
        (file,) = profiles.user_dir().glob("*.yaml")
        if row := profiles.load_file(file).tile("cpu.forward", dtype="float32", head_dim=64, mask=False):
            break
    assert row is not None
    assert str(file) in str(flashkit.explain(q, q, q))


@pytest.mark.parametrize("method", ["amx", "avx512bf16"])
def test_amx_has_tables_and_candidates_of_its_own(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16, "select", lambda: bf16.Method(method, "a test says so"))
    runner = cpu.CpuTuner()
    for dtype in ("bfloat16", "float32"):
        for direction in ("forward", "backward"):
            target, by_amx = Target(direction, dtype, 64), (dtype, method) == ("bfloat16", "amx")
            assert runner.table(target) == f"{'cpu_amx' if by_amx else 'cpu'}.{direction}"
            memory = io_model.cpu_memory(runner.profile)
            assert (runner.candidates(target) == io_model.amx_candidates(64, 64, direction, **memory)) == by_amx
    outcome = Outcome(Target("forward", "bfloat16", 64), IN_USE, IN_USE, 1.0, 100.0, 1, 0, True)
    assert list(command.profile_of([outcome], PEAKS, cpu.CpuTuner())["tiles"]) == [
        "cpu_amx.forward" if method == "amx" else "cpu.forward"
    ]
