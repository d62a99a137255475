"""The benchmarks of traffic and of lengths: how counters are read, and that what is stored agrees with the IO model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lengths
import pytest
import traffic


def stored(folder: Path) -> list[Any]:
    lines = [json.loads(text) for file in sorted(folder.glob("*.jsonl")) for text in file.read_text().splitlines()]
    if not lines:
        pytest.skip(f"nothing is stored in {folder.name}")
    return lines


def test_what_multiprocessors_moved_grows_as_the_model_says() -> None:
    """By one factor for both tiles and every length, which is what these kernels fetch twice; docs/theory.md."""
    lines = stored(traffic.RESULTS)
    for line in lines:
        if line["who"] in traffic.TILES:
            assert line["model"] == pytest.approx(traffic.modelled(line["tokens"], line["who"])["model"])
            assert 1 <= line["sram"] / line["model"] < 1.6
            assert line["memory"] < line["model"]  # L2 answers for keys that are read again
    of = {(line["tokens"], line["who"]): line for line in lines}
    longest = max(line["tokens"] for line in lines)
    large, small = (of[longest, method]["sram"] for method in traffic.TILES)
    assert small / large == pytest.approx(4, rel=0.02)  # a quarter of the queries a tile
    assert of[longest, "standard"]["memory"] > 100 * of[longest, "128 x 64"]["memory"]


def test_memory_grows_linearly_and_plain_attention_quadratically() -> None:
    of = {(x["who"], x["pass"], x["tokens"]): x for x in stored(lengths.RESULTS)}
    assert of["standard", lengths.PASSES[0], 65536]["memory"] is None
    for passes in lengths.PASSES:
        ours, plain = ([of[method, passes, n]["memory"] for n in (8192, 32768)] for method in ("flashkit", "standard"))
        assert ours[1] / ours[0] == pytest.approx(4, rel=0.2)
        assert plain[1] / plain[0] == pytest.approx(16, rel=0.2)
        assert of["flashkit", passes, 65536]["seconds"]["median"] > 0
