"""The outcomes of a search and the measured peaks as a profile file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...devices import profiles, trust
from ..bench.environment import now
from .log import MeasuredPeaks, four_digits
from .search import Outcome
from .trials import TunableBackend


def profile_of(outcomes: Sequence[Outcome], peaks: MeasuredPeaks | None, tunable: TunableBackend) -> dict[str, Any]:
    """The fields of a profile file: the device, its measured peaks, and a row of a tile table for each outcome."""
    versions = {name: version for name, version in tunable.versions().items() if name != "python"}
    result: dict[str, Any] = {"schema": profiles.SCHEMA, "device": profiles.criteria(tunable.kind)}
    if peaks is not None:

        def measured(value: float) -> dict[str, Any]:
            return {"measured": value, "date": peaks.date[:10], "versions": versions}

        sram = peaks.l2_bandwidth_gbs if tunable.sram == "l2" else peaks.l1_bandwidth_gbs
        result["memory"] = {"bandwidth_gbs": measured(peaks.bandwidth_gbs), "sram_bandwidth_gbs": measured(sram)}
        result["peak_tflops"] = {dtype: measured(value) for dtype, value in peaks.peak_tflops.items()}
    tables: dict[str, list[dict[str, Any]]] = {}
    for o in outcomes:
        speed = {"gflops": four_digits(o.gflops)} if tunable.kind == "cpu" else {"tflops": four_digits(o.gflops / 1000)}
        provenance = {**speed, "date": now()[:10], "versions": versions}
        why = f"{o.why}; {tunable.conditions(o.target)}"
        row = {**o.conditions, **o.tile.row, "why": why, "measured": provenance}
        tables.setdefault(tunable.table(o.target), []).append(row)
    result["tiles"] = tables
    return result


def write(profile: dict[str, Any], output: Path | None) -> Path:
    """Write a profile to `output`, replaced atomically, or by default to the user's profiles; returns its path."""
    if output is None:
        return profiles.write_user_profile(profile)
    text = profiles.dump(profile)
    profiles.parse(text, str(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    trust.write(output, text.encode())
    return output
