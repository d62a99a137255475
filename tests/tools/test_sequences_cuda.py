"""The benchmark of sequences on a GPU, with NumPy in the place of CuPy: its cases, its checks, its tables."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sequence_baselines
import sequence_cases
import sequences_cuda
from sequence_cases import Work

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


def test_the_cases_differ_and_have_the_tokens_that_they_name() -> None:
    cases = list(sequence_cases.cases())
    assert len({(case.what, case.label) for case in cases}) == len(cases)
    assert {case.what for case in cases} == {"packed", "decode", "prefill", "mla", "training"}
    mixes = sequence_cases.mixes().values()
    assert all(sum(lengths) == sequence_cases.TOKENS and min(lengths) >= 64 for lengths in mixes)


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
