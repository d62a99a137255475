"""Checkpoints: parameters, the optimizer's averages and the number of steps, in one file of safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .model import GPT


def _on_host(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x if isinstance(x, np.ndarray) else x.get())


def save(path: Path, model: GPT, step: int) -> None:
    """Write the file, or leave the one before as it was."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    arrays = {name: _on_host(x) for name, x in model.parameters.state().items()}
    save_file(arrays, partial, metadata={"step": str(step)})
    os.replace(partial, path)


def load(path: Path, model: GPT) -> int:
    """Set the model's parameters and the averages; the number of steps done, 0 for a published model's file."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        model.parameters.load({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return int((file.metadata() or {}).get("step", 0))
