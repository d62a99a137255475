"""What importing flashkit costs, and that a second process compiles nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

HEAVY = (
    "numba", "llvmlite", "ml_dtypes", "cupy", "torch", "jax", "yaml", "msgspec", "typer", "rich", "filelock",
    "platformdirs", "matplotlib", "importlib.metadata",
)  # fmt: skip

LOOP = """
    import time

    def loop():
        start = time.process_time()
        sum(i * i for i in range(2_000_000))
        return time.process_time() - start
"""

IMPORT = (
    LOOP
    + """
    import json, sys
    import numpy
    before, start = set(sys.modules), time.process_time()
    import flashkit
    seconds = time.process_time() - start
    loops = seconds / min(loop() for _ in range(3))
    print(json.dumps({"loops": loops, "new": sorted(set(sys.modules) - before), "all": sorted(sys.modules)}))
"""
)

CALLS = (
    LOOP
    + """
    import json
    import numpy as np
    import flashkit
    from flashkit.devices import kernel_cache

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 70, 16)).astype(np.float32) for _ in range(3))
    from numba.core import event
    start = time.process_time()
    with event.install_recorder("numba:compile") as recorder:
        {call}
    loops = (time.process_time() - start) / min(loop() for _ in range(3))
    files = {{str(p): p.stat().st_mtime_ns for p in kernel_cache.path().rglob("*") if p.is_file()}}
    compiled = len(recorder.buffer)
    print(json.dumps({{"loops": loops, "compiled": compiled, "files": files, "sum": float(out.sum())}}))
"""
)
FORWARD = CALLS.format(call="out = flashkit.attention(q, k, v, causal=True)")
BOTH_PASSES = CALLS.format(
    call="""options = {"mask": rng.random((70, 70)) < 0.5, "dropout_p": 0.5, "seed": 1, "softcap": 3.0}
        out, vjp = flashkit.attention_vjp(q, k, v, score_mod=lambda s, b, h, q, k: s + 0.1 * h, **options)
        vjp(out)"""
)


FIRST_COMPILED = 160
"""Two events for each function, of which a forward call has 58."""


def test_import_is_quick_and_light(program: Callable[..., str], tmp_path: Path) -> None:
    """Less than 0.15 s of a core that takes 0.1 s for the loop: the best of several, with bytecode."""
    runs = [json.loads(program(IMPORT, PYTHONPYCACHEPREFIX=tmp_path)) for _ in range(4)]
    assert min(run["loops"] for run in runs) < 1.5
    for module in HEAVY:
        assert module not in runs[0]["new"], f"import flashkit imports {module}"


PUBLIC = (
    "mods", "mods.block_mask", "reference", "dispatch", "devices.profiles", "devices.io_model", "devices.timing",
    "call.explanation",
)  # fmt: skip


def test_no_module_loads_a_compiler(program: Callable[..., str]) -> None:
    """Nor does any module of public functions before a call needs it; the first that does is named."""
    text = f"""
        import importlib, sys
        for module in {PUBLIC}:
            importlib.import_module(f"flashkit.{{module}}")
            print(module, *{{"numba", "llvmlite", "cupy", "torch", "jax"}} & set(sys.modules))
        from flashkit.devices import profiles
        profiles.for_device("cpu")
        print("a profile", *{{"numba", "cupy", "torch", "typer", "rich"}} & set(sys.modules))
    """
    assert program(text).split("\n") == [*PUBLIC, "a profile", ""]


def test_nothing_is_written_before_the_first_call(program: Callable[..., str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    program("import flashkit; flashkit.BlockMask.local(64, 64, 1, block=16).density", FLASHKIT_CACHE_DIR=cache)
    assert not cache.exists()


@pytest.mark.slow
def test_the_second_process_compiles_nothing(program: Callable[..., str], tmp_path: Path) -> None:
    """Few functions in a first call; later 0.3 s of a core that takes 0.1 s for the loop, here twice that."""
    first = json.loads(program(FORWARD, FLASHKIT_CACHE_DIR=tmp_path))
    assert first["files"]
    assert 0 < first["compiled"] < FIRST_COMPILED
    runs = [json.loads(program(FORWARD, FLASHKIT_CACHE_DIR=tmp_path)) for _ in range(2)]
    if min(run["loops"] for run in runs) >= 6:  # others were at work
        runs += [json.loads(program(FORWARD, FLASHKIT_CACHE_DIR=tmp_path)) for _ in range(2)]
    for run in runs:
        assert run["compiled"] == 0
        assert run["files"] == first["files"]  # nothing new, nothing written again
        assert run["sum"] == first["sum"]
    assert min(run["loops"] for run in runs) < 6
    before, after = (json.loads(program(BOTH_PASSES)) for _ in range(2))  # in the cache of all tests
    assert after["compiled"] == 0 and after["sum"] == before["sum"]


def test_a_later_process_does_without_numba(program: Callable[..., str]) -> None:
    """Its import takes longer than all else before the first result."""
    text = """
        import sys
        import numpy as np, flashkit
        q = np.random.default_rng(0).standard_normal((1, 8, 400, 64)).astype(np.float32)
        options = {"causal": True, "softcap": 5.0, "score_mod": lambda s, b, h, q, k: s + flashkit.sin(k * 0.1) ** 2}
        out, vjp = flashkit.attention_vjp(q, q, q, **options)
        vjp(out)
        print("numba" in sys.modules)
    """
    program(text)  # compiles
    assert program(text) == "False\n"


def test_a_program_whose_own_functions_numba_leaves_alone(program: Callable[..., str]) -> None:
    """NUMBA_DISABLE_JIT=1, for a debugger or to measure coverage: kernels compile all the same."""
    text = """
        import numba, numpy as np, flashkit
        q = np.random.default_rng(0).standard_normal((1, 2, 30, 16)).astype(np.float32)
        mask = lambda b, h, q, k: (q * 3 + {constant}) % 5 != k % 3
        found, right = (flashkit.attention(q, q, q, mask_mod=mask, backend=name) for name in ("cpu", "reference"))
        np.testing.assert_allclose(found, right, atol=1e-5)
        print(numba.njit(lambda: 1).__class__.__name__, numba.config.DISABLE_JIT)
    """.format(constant=int.from_bytes(os.urandom(5), "big"))  # a kernel that no cache has
    assert program(text, NUMBA_DISABLE_JIT=1) == "function 1\n"
