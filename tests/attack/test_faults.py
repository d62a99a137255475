"""The fuzzer finds what it is for: faults planted in a copy of the package, each by a bounded number of calls."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import campaign, draw

pytestmark = pytest.mark.slow

CALLS = 60

FORWARD = {
    "dtype": "float32", "passes": "forward", "hostile": "no", "kv_lengths": "no", "dropout": "no", "data": "normal",
    "sequences": "batch", "entry": "attention",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What replaces a text of a file of the package, and the factors that the calls have in common."""

    name: str
    file: str
    text: str
    instead: str
    fixed: dict[str, str]
    says: tuple[str, ...] = ("exit status -11",)
    """One of these is in the finding."""


FAULTS = [
    Fault(  # what is read too much is not used, so only the guard shows it
        "rows of Q are not clamped", "backends/cpu/kernels/forward.py",
        "q_rows(args, Q, seq, b, h, row0, min(panel, first + count - row0), d)",
        "q_rows(args, Q, seq, b, h, row0, panel, d)", FORWARD | {"sizes": "20x23"},
    ),
    Fault(
        "a plan is found by the shape alone", "call/arrays.py",
        "(np.ndarray, k.shape, k.strides, k.dtype, k.flags.aligned),",
        "(np.ndarray, k.shape, k.dtype, k.flags.aligned),",
        FORWARD | {"sizes": "20x23", "dims": "16", "heads": "2:2", "batch": "2", "layout": "bhnd", "again": "attention",
                   "threads": "1", "scale": "default", "q_offset": "default", "sinks": "no", "out": "new"},
        ("exit status -11", "has other bits"),
    ),
    Fault(
        "integers that are indices stay the caller's", "mods/mod.py", 'copied = whole or kind == "int" or',
        'copied = whole or kind == "bool" and', FORWARD | {"passes": "both", "hostile": "integers", "sizes": "20x23",
                                                         "score_mod": "array by array"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
@pytest.mark.one_in(8)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    shutil.copytree(campaign.ROOT / "flashkit", tmp_path / "flashkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(campaign.ROOT / "device_profiles", tmp_path / "device_profiles")
    file = tmp_path / "flashkit" / fault.file
    text = file.read_text()
    assert text.count(fault.text) == 1, f"{fault.file} has not this once: {fault.text!r}; give its present text"
    file.write_text(text.replace(fault.text, fault.instead))
    settings = campaign.Settings(graphs=1, fixed=dict(draw.PLAIN_GRAPH) | fault.fixed, package=str(tmp_path))
    found = next(campaign.numbered(settings, 5, 0, CALLS, campaign.Tally()), None)
    assert found is not None, f"{CALLS} calls find nothing"
    assert any(word in problem for word in fault.says for problem in found["problems"]), found
