"""A part of the fuzzer's work on the emulated device: calls with fixed seeds."""

from importlib.util import find_spec

import pytest
from attack import campaign

CALLS = 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "generation"),
    [("cupy_raw", "simt"), ("cupy_raw", "sm80"), pytest.param("cupy_raw", "sm90", marks=pytest.mark.exhaustive)],
)
def test_random_calls_on_the_emulated_device(backend: str, generation: str) -> None:
    if not find_spec("cuda") or find_spec("cupy"):
        pytest.skip("for machines with cuda-bindings and without CuPy")
    tensor_cores = {} if generation == "simt" else {"dtype": "float16", "dims": "64"}
    if generation == "sm90":
        tensor_cores["sequences"] = "batch"  # it refuses most others
    settings = campaign.Settings(
        backend, generation=generation, emulated="3", graphs=1,
        fixed={"sizes": "70x90", "heads": "2:1", "batch": "1", **tensor_cores},
    )  # fmt: skip
    tally = campaign.check(settings, 2, CALLS)
    assert tally.refused < CALLS
