"""The benchmark of sequences on a GPU, with NumPy in the place of CuPy: its cases, its checks, its tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sequence_baselines
import sequence_cases
import sequences_cuda
from sequence_cases import Case, Work

import flashkit

SMALL: dict[str, Callable[..., Work]] = {
    "packed": partial(sequence_cases.packed, [70, 33, 128], 4, 2, 32, True, "forward"),
    "packed, backward": partial(sequence_cases.packed, [70, 33, 128], 4, 2, 32, False, "backward"),
    "decode": partial(sequence_cases.cached, [100, 37], 16, 1),
    "decode, dense": partial(sequence_cases.cached, [100, 37], 0, 1),
    "prefill": partial(sequence_cases.cached, [100, 37], 16, 20),
    "mla": partial(sequence_cases.latent, 2, 100, 4, 2, 64),
    "mla, dense": partial(sequence_cases.latent, 2, 128, 4, 1, 0),
    "training": partial(sequence_cases.training, 128, True, "backward"),
}
WAYS = {"packed": 2, "packed, backward": 2, "decode": 4, "decode, dense": 3, "prefill": 3, "mla": 4, "mla, dense": 4}


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases, of NumPy arrays."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(sequence_cases, "DECODING", (4, 2, 32))
    monkeypatch.setattr(sequence_cases, "TRAINING_TOKENS", 256)
    monkeypatch.delenv("BASELINES", raising=False)
    sequence_baselines.library.cache_clear()


@pytest.mark.usefixtures("on_numpy")
@pytest.mark.parametrize("name", SMALL)
def test_flashkit_computes_each_case(name: str) -> None:
    """By every way, as exactly as bfloat16 permits; and the check sees a result that is not."""
    work = SMALL[name]({"flashkit": "cpu"})
    own = {who: make for who, make in work.contenders.items() if who.startswith("flashkit")}
    assert len(own) == WAYS.get(name, 1)
    for who, make in own.items():
        results = make()()
        assert sequences_cuda.error_of(results, work.expected) < 6e-3, who
        for number in range(len(results)):
            others = [x if i != number else x * x.dtype.type(1.1) for i, x in enumerate(results)]
            assert sequences_cuda.error_of(others, work.expected) > 0.08
    assert work.amount > 0


def test_the_exact_values_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((n, heads, 16)) for n, heads in ((7, 3), (9, 1), (9, 1), (7, 3)))
    out, vjp = flashkit.attention_vjp(q, k, v, causal=True, scale=0.3, layout="bnhd", backend="reference")
    for direction, right in (("forward", (out,)), ("backward", vjp(dout))):
        arrays = (q, k, v, dout) if direction == "backward" else (q, k, v)
        found = sequence_cases.exact(direction, 0.3, True, *arrays)  # type: ignore[arg-type]
        for x, y in zip(found, right, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_the_cases_differ_and_have_the_tokens_that_they_name() -> None:
    cases = list(sequence_cases.cases())
    assert len({(case.what, case.label) for case in cases}) == len(cases)
    assert {case.what for case in cases} == {"packed", "decode", "prefill", "mla", "training"}
    mixes = sequence_cases.mixes().values()
    assert all(sum(lengths) == sequence_cases.TOKENS and min(lengths) >= 64 for lengths in mixes)


@pytest.mark.usefixtures("on_numpy")
def test_sequences_share_no_page() -> None:
    lengths = [100, 37, 16]
    (pool,), table = sequence_cases.memory(lengths, 16, 1, (8,))
    used = np.concatenate([row[: -(-n // 16)] for row, n in zip(table, lengths, strict=True)])
    assert sorted(used.tolist()) == list(range(len(pool)))
    assert used.tolist() != sorted(used.tolist())


@pytest.mark.usefixtures("on_numpy")
def test_what_is_absent_or_wrong_is_said_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(ours: dict[str, str]) -> Work:
        right = np.ones((2, 3))
        contenders: dict[str, Any] = {
            "flashkit": lambda: lambda: (np.ones((2, 3)),),
            "wrong": lambda: lambda: (np.full((2, 3), 1.5),),
            "NaN": lambda: lambda: (np.full((2, 3), math.nan),),
            "FA-3": lambda: sequence_baselines.library("fa3.so", "_"),
        }
        return Work(4e9, "FLOP", [((0, slice(None)), right)], contenders, False)

    timing, clocks = sequences_cuda.Timing((2e-3, 4e-3, 3e-3)), {"clocks.sm": "1"}
    monkeypatch.setattr(sequences_cuda, "timed", lambda calls, stream: (dict.fromkeys(calls, timing), clocks))
    lines = {line["who"]: line for line in sequences_cuda.measured(Case("packed", "a", make), {}, None)}
    json.dumps(list(lines.values()))
    assert [who for who, line in lines.items() if "seconds" in line] == ["flashkit"]
    assert lines["flashkit"]["seconds"]["median"] == 3e-3
    assert "error is 0.5" in lines["wrong"]["skipped"]
    assert "error is nan" in lines["NaN"]["skipped"]
    assert "BASELINES, which is not set" in lines["FA-3"]["skipped"]
    assert capsys.readouterr().out.count("is not timed") == 3


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that each call moves: 10 ms three times a round, 1 ms as often as a round's time permits."""
    now, order = [0.0], []

    class Event:
        def record(self, stream: Any) -> None:
            self.at = now[0]

    def call(name: str, milliseconds: float) -> None:
        order.append(name)
        now[0] += milliseconds

    events = SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: end.at - begin.at)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=events, empty=np.empty))
    monkeypatch.setattr(sequences_cuda, "FLUSHED", 8)
    monkeypatch.setattr(sequences_cuda, "cuda_clocks", lambda: {"clocks.sm": "1"})
    calls = {"a": partial(call, "a", 10), "b": partial(call, "b", 1)}
    timings, clocks = sequences_cuda.timed(calls, SimpleNamespace(synchronize=lambda: None))
    assert [round(timings[who].median, 9) for who in "ab"] == [10e-3, 1e-3]
    assert "".join(order) == "aabb" + "a" * 4 + "b" * 80 + "a" * 8 + "b" * 40
    assert clocks == {"clocks.sm": "1"}


def test_ratios_are_of_the_best_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(case: str, who: str, milliseconds: float) -> dict[str, Any]:
        found = {"what": "packed", "case": case, "who": who, "work": 2e9, "unit": "FLOP", "error": 2e-3}
        return found | {"seconds": {"median": 1e-3 * milliseconds}}

    lines = [line("a", "flashkit", 1), line("a", "flashkit, planned", 0.5), line("a", "FA-3", 1.25)]
    lines += [line("a", "cuDNN", 2), line("b", "flashkit", 2), line("b", "cuDNN", 1.6)]
    lines.append({"what": "packed", "case": "b", "who": "FA-3", "work": 2e9, "unit": "FLOP", "skipped": "no"})
    file = tmp_path / "stored.jsonl"
    file.write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert sequences_cuda.main(["--report", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "| a | 1000.0 | 2 TFLOP/s | 2.0e-03 | 0.50 | 1.25 | 2.00 |" in printed
    assert "| b | 2000.0 | 1 TFLOP/s | 2.0e-03 | - | - | 0.80 |" in printed
    assert "geometric mean 1.000, least 0.800 (b), 2 cases" in printed
