"""The fuzzer finds what it is for: faults planted in a copy of the package, each by a bounded number of calls."""

from __future__ import annotations

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


CRASH_OR_WRONG = ("exit status -11", "times the tolerance")

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


ALONE = FORWARD | {
    "layout": "bhnd", "batch": "3", "heads": "4:2", "dims": "16", "sizes": "20x23", "storage": "packed", "sinks": "no",
    "out": "new", "again": "attention", "page": "5", "q_offset": "default", "scale": "default", "threads": "1",
}  # fmt: skip

APART = [
    Fault(
        "keys of a packed sequence begin one too late", "backends/cpu/kernels/kv_loader.py",
        "kv_at(args, b, seq.key_offset + first)", "kv_at(args, b, seq.key_offset + first + (seq.key_offset > 0))",
        ALONE | {"sequences": "packed"}, CRASH_OR_WRONG,
    ),
    Fault(
        "the page of a key is another", "backends/cpu/kernels/kv_loader.py",
        "page = integer_at(args[PAGE_TABLE] + 8 * (b * args[TABLE_WIDTH] + first // args[PAGE]))",
        "page = integer_at(args[PAGE_TABLE] + 8 * (b * args[TABLE_WIDTH] + first // (args[PAGE] + 1)))",
        ALONE | {"sequences": "paged"}, CRASH_OR_WRONG,
    ),
    Fault(
        "one query too many of a padded sequence", "call/sequences.py", "[expr.B] > expr.ROW", "[expr.B] >= expr.ROW",
        ALONE | {"sequences": "padded"}, CRASH_OR_WRONG,
    ),
    Fault(
        "differences of offsets wrap", "call/sequences.py",
        "offsets[-1] > tokens or (offsets[1:] < offsets[:-1]).any()", "(np.diff(offsets) < 0).any()",
        ALONE | {"sequences": "packed", "hostile": "numbers"},
        ("exit status", "not an error"),
    ),
    Fault(
        "unsigned integers of the other order of bytes wrap", "call/sequences.py",
        'array.dtype.kind == "u" and array.itemsize == 8', "array.dtype == np.uint64",
        ALONE | {"sequences": "batch", "causal": "yes", "hostile": "numbers"}, ("not an error",),
    ),
    Fault(
        "parts are added as if there were one more", "call/merge.py", "reference + xp.log(total)",
        "reference + xp.log1p(total)", ALONE | {"entry": "merge"}, CRASH_OR_WRONG,
    ),
    Fault(
        "weights are those of the first head of k", "call/weights.py", "operands.k, b, h // spec.group)",
        "operands.k, b, 0)", ALONE | {"entry": "weights"}, ("weights @ v",),
    ),
    Fault(
        "the gradient of a rotation turns on", "backends/cpu/kernels/rotary.py",
        "out[half + i] = narrow(a * (sin[i] * sign)", "out[half + i] = narrow(a * sin[i]", ALONE | {"entry": "rotary"},
        ("rotary is",),
    ),
    Fault(
        "a shared page is not copied before it is written", "cache/pages.py",
        "(self.references[self._at(last)] > 1)", "(self.references[self._at(last)] > 9)",
        ALONE | {"entry": "cache"}, ("of a cache",),
    ),
]  # fmt: skip
"""Faults that disturb no call but those with their own factors, so that one copy, which is compiled once, has all."""


CACHES = [
    Fault(
        "a step is published before it is written", "cache/layer.py", "            steps.copy_pages(copy)",
        "            steps.wrote(state, self.number)\n            steps.copy_pages(copy)", ALONE | {"entry": "cache"},
        ("of a cache",),
    ),
]  # fmt: skip
"""Faults of caches, each in a copy of its own."""


def planted(faults: list[Fault], folder: Path) -> Path:
    """A copy of the package with these faults."""
    shutil.copytree(campaign.ROOT / "flashkit", folder / "flashkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(campaign.ROOT / "device_profiles", folder / "device_profiles")
    for fault in faults:
        file = folder / "flashkit" / fault.file
        text = file.read_text()
        assert text.count(fault.text) == 1, f"{fault.file} has not this once: {fault.text!r}; give its present text"
        file.write_text(text.replace(fault.text, fault.instead))
    return folder


def check_found(fault: Fault, package: Path, calls: int) -> None:
    settings = campaign.Settings(graphs=1, fixed=dict(draw.PLAIN_GRAPH) | fault.fixed, package=str(package))
    found = next(campaign.numbered(settings, 5, 0, calls, campaign.Tally()), None)
    assert found is not None, f"{fault.name}: {calls} calls find nothing"
    assert any(word in problem for word in fault.says for problem in found["problems"]), found


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS + CACHES])
@pytest.mark.one_in(8)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    check_found(fault, planted([fault], tmp_path), CALLS)


@pytest.mark.exhaustive
def test_faults_of_each_form_and_function_are_found(tmp_path: Path) -> None:
    package = planted(APART, tmp_path)
    for fault in APART:
        check_found(fault, package, 2 * CALLS)
