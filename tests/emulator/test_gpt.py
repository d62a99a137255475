"""The kernels of examples/gpt: its whole model on the device against the one in NumPy, and replayed."""

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from examples.gpt import cpu
from examples.gpt.model import GPT, Batch, Config
from examples.gpt.parameters import AdamW


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


NEAR = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.03}
"""Of gradients and weights, by the root mean square."""


@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [("float64", 21), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("float32", 21), ("bfloat16", 8200)))],
)
def test_the_model_is_that_of_numpy(gpu, dtype, vocabulary):
    """A step of training; a row of logits may be longer than a CTA takes at once."""
    config, rng = Config(vocabulary, context=12, layers=2, heads=2, width=64), np.random.default_rng(3)
    state = {name: rng.normal(0, 0.3, shape) for name, shape in config.shapes().items()}
    ids, targets = rng.integers(0, vocabulary, (2, 27))
    targets[[3, 11]] = -1
    batch = Batch(ids, targets, np.array([0, 5, 17, 18, 27]))
    models = [GPT(config, cpu, "float64"), GPT(config, gpu, dtype)]
    for model in models:
        model.parameters.load(state)
    for losses in ([float(model.loss(batch)) for model in models], [float(x.add_gradients(batch)) for x in models]):
        assert abs(losses[0] - losses[1]) < NEAR[dtype]
    for flat in ("gradients", "masters"):
        here, there = (getattr(model.parameters, flat) for model in models)
        assert np.linalg.norm(here - there.get()) < NEAR[dtype] * np.linalg.norm(here)
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
