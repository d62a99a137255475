"""The kernels of examples/gpt, each against float64, and its whole model on the device against the one in NumPy."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from examples.gpt import cpu
from examples.gpt.model import GPT, Batch, Config
from examples.gpt.parameters import AdamW

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CASES = [("float64", 68), ("float64", 97), ("float32", 1100), ("bfloat16", 264), ("bfloat16", 99), ("bfloat16", 1544)]
cases = pytest.mark.parametrize(("dtype", "width"), CASES)


@pytest.fixture
def gpu(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """examples/gpt/gpu.py on the emulated device, or a real one."""
    cupy = importlib.import_module("cupy")
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    sys.modules.pop("examples.gpt.gpu", None)
    module = importlib.import_module("examples.gpt.gpu")
    if hasattr(cupy.cuda, "emulated_cublas"):
        monkeypatch.setattr(module, "_blas", lambda: (cupy.cuda.emulated_cublas, cupy.empty(1)))
    yield module
    sys.modules.pop("examples.gpt.gpu")


class Check:
    """Runs a function of gpu.py on random arrays, and that of cpu.py on the same in float64."""

    def __init__(self, gpu: Any, dtype: str) -> None:
        self.gpu, self.rng = gpu, np.random.default_rng(7)
        self.dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        self.wide = np.dtype("float64" if dtype == "float64" else "float32")
        self.unit = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}[dtype]

    def array(self, *shape: int, wide: bool = False) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.wide if wide else self.dtype)

    def run(self, name: str, *arguments: Any) -> tuple[Any, Any, list[Any]]:
        """Results of both, and the arguments on the device. A tuple of arrays is one of totals; a list too."""

        def on_device(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(map(on_device, x))
            if not isinstance(x, np.ndarray):
                return x
            return self.gpu.index(x) if x.dtype.kind in "iu" else self.gpu.xp.asarray(x)

        def exact(x: Any) -> Any:
            if isinstance(x, (tuple, list)):
                return type(x)(map(exact, x))
            return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind not in "iu" else x

        there, here = [on_device(x) for x in arguments], [exact(x) for x in arguments]
        found, expected = getattr(self.gpu, name)(*there), getattr(cpu, name)(*here)
        return found, expected, list(zip(there, here, strict=True))

    def same(self, found: Any, expected: np.ndarray, roundings: float) -> None:
        """Within so many roundings of its dtype, each of the largest number."""
        unit = self.unit if found.dtype == self.dtype else np.finfo(self.wide).eps
        error = np.abs(found.get().astype(np.float64) - expected).max()
        assert error <= roundings * unit * max(1, np.abs(expected).max())


@cases
@pytest.mark.one_in(3)
def test_sums_of_rows_and_biases(gpu, dtype, width):
    check = Check(gpu, dtype)
    ids, positions = check.rng.integers(0, 9, (2, 37))
    found, expected, _ = check.run("embed", ids, positions, check.array(9, width), check.array(9, width))
    check.same(found, expected, 0.51)
    found, expected, _ = check.run("add_bias", check.array(5, width), check.array(width))
    check.same(found, expected, 0.51)
    _, _, [(total, sums), _] = check.run("add_sum", check.array(width, wide=True), check.array(21, width))
    check.same(total, sums, 8)
    index = np.where(np.arange(90) < 60, 4, check.rng.integers(0, 7, 90))
    _, _, [(total, sums), *_] = check.run("add_rows", check.array(9, width, wide=True), index, check.array(90, width))
    check.same(total, sums, 8)


@cases
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.one_in(3)
def test_normalisation(gpu, dtype, width, first):
    check = Check(gpu, dtype)
    more = (None, None) if first else (check.array(21, width), check.array(width))
    found, expected, _ = check.run("add_norm", check.array(21, width), *more, check.array(width), check.array(width))
    check.same(found[0], expected[0], 0.51)
    check.same(found[1], expected[1], 3)
    stats = np.stack([check.array(21, wide=True), np.abs(check.array(21, wide=True))])
    dx = None if first else check.array(21, width)
    totals = tuple(check.array(width, wide=True) for _ in range(2))
    found, expected, arguments = check.run(
        "norm_gradient", check.array(21, width), check.array(21, width), stats, check.array(width), dx,
        totals,
    )  # fmt: skip
    check.same(found, expected, 3)
    for total, sums in zip(*arguments[-1], strict=True):
        check.same(total, sums, 24)


@cases
@pytest.mark.one_in(3)
def test_gelu(gpu, dtype, width):
    check = Check(gpu, dtype)
    x, bias = check.array(19, width) * np.array(4, check.dtype), check.array(width)
    x[0, :4] = 40, -40, 3e4, -3e4
    found, expected, _ = check.run("gelu", x, bias)
    check.same(found, expected, 3)
    x[0, :4] = 40, -40, 0, -9
    found, expected, _ = check.run("gelu_gradient", check.array(19, width), x, bias)
    check.same(found, expected, 1 if dtype == "bfloat16" else 16)  # scores to 40 have 16 times their rounding


@pytest.mark.parametrize("scale", [0.25, None])
@pytest.mark.parametrize(("dtype", "width"), [*CASES, ("bfloat16", 8200)])
@pytest.mark.one_in(3)
def test_cross_entropy(gpu, dtype, width, scale):
    check = Check(gpu, dtype)
    logits = check.array(11, width) * np.array(9, check.dtype)
    targets = check.rng.integers(0, width, 11)
    targets[[2, 5]] = -1
    found, expected, [(gradient, there), *_] = check.run("cross_entropy", logits, targets, scale)
    error = np.abs(found.get() - expected).max()
    assert error < 8 * (2.0**-23 if check.wide == np.float32 else 2.0**-52) * expected.max()
    check.same(gradient, there, 8 if scale else 0)
    if scale:
        assert not gradient.get()[[2, 5]].any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_adamw(gpu, dtype):
    check = Check(gpu, dtype)
    flat = {name: check.array(320, wide=True) for name in ("masters", "gradients", "mean", "variance")}
    flat["variance"] = np.abs(flat["variance"])
    here = SimpleNamespace(**{name: x.astype(np.float64) for name, x in flat.items()}, decayed=192)
    there = SimpleNamespace(**{name: gpu.xp.asarray(x) for name, x in flat.items()}, decayed=192)
    there.values = there.masters if check.wide == check.dtype else gpu.xp.asarray(flat["masters"].astype(check.dtype))
    settings = 0.1, 0.3, (0.9, 0.95), (0.2, 0.1)
    cpu.adamw(here, np.float64(0.7), *settings)
    gpu.adamw(there, gpu.xp.asarray(np.array(0.7, check.wide)), *settings)
    for name in flat:
        check.same(getattr(there, name), getattr(here, name), 4)
    np.testing.assert_array_equal(there.values.get(), there.masters.get().astype(check.dtype))


def test_the_model_is_that_of_numpy(gpu):
    """A step of training, in float64."""
    config, rng = Config(vocabulary=21, context=12, layers=2, heads=2, width=64), np.random.default_rng(3)
    state = {name: rng.normal(0, 0.3, shape) for name, shape in config.shapes().items()}
    ids, targets = rng.integers(0, 21, (2, 27))
    targets[[3, 11]] = -1
    batch = Batch(ids, targets, np.array([0, 5, 17, 18, 27]))
    models = [GPT(config, ops, "float64") for ops in (cpu, gpu)]
    for model in models:
        model.parameters.load(state)
    losses = [float(model.add_gradients(batch)) for model in models]
    assert abs(losses[0] - losses[1]) < 1e-12
    for flat in ("gradients", "masters"):
        here, there = (getattr(model.parameters, flat) for model in models)
        assert np.abs(here - there.get()).max() < 1e-12 * max(1, np.abs(here).max())
        for model, ops in zip(models, (cpu, gpu), strict=True):
            AdamW(10).update(model.parameters, 5, ops)


def test_a_replayed_model_has_the_same_bits(gpu):
    """Steps with other tokens and shapes in between; memory that others take meanwhile is not the graph's."""
    config = Config(vocabulary=21, context=12, layers=1, heads=2, width=64)
    losses: list[list[float]] = []
    models = [GPT(config, gpu, "float64", deterministic=True) for _ in range(2)]
    models[1].replay = None
    for model in models:
        rng = np.random.default_rng(3)
        losses.append([])
        for step, lengths in enumerate(([12, 12], [12, 12], [12, 12], [5, 12], [12, 12])):
            ids, targets = rng.integers(0, 21, (2, sum(lengths)))
            batch = Batch(ids, targets, np.append(0, np.cumsum(lengths)))
            losses[-1].append(float(model.add_gradients(batch, 0.5)))
            held = [gpu.xp.zeros(999) for _ in range(99)]
            AdamW(10).update(model.parameters, step, gpu)
            del held
    assert losses[0] == losses[1] and models[0].replay.graph is not None
    masters = [model.parameters.masters.get() for model in models]
    np.testing.assert_array_equal(*masters)
