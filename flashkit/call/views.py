"""Tensors of PyTorch on CUDA devices as a plan reads them: layout and address, new memory, and arrays of CuPy.

Nothing is imported that is not there already, but CuPy.
"""

from __future__ import annotations

import math
import sys
from functools import cache, lru_cache
from typing import Any

import numpy as np


class View:
    """Layout and address of a tensor, as of an array of CuPy, which takes longer to make. It keeps the tensor alive."""

    __slots__ = "layout", "ptr", "tensor"

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.ptr = tensor, tensor.data_ptr()

    def __getattr__(self, name: str) -> Any:
        """`layout`, what `arrays.layout` says of such an array of CuPy, if it is asked for: most Views have an address
        alone.
        """
        if name != "layout":
            raise AttributeError(name)
        tensor = self.tensor
        self.layout = known = _layout(tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())
        return known

    shape = property(lambda self: self.layout[1])
    strides = property(lambda self: self.layout[2])
    dtype = property(lambda self: self.layout[3])
    ndim = property(lambda self: len(self.layout[1]))
    data = property(lambda self: self)  # x.data.ptr and x.data.device_id, as of CuPy's arrays
    device_id = property(lambda self: self.layout[4])
    size = property(lambda self: self.tensor.numel())

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> View:
        return View(self.tensor[index])

    def swapaxes(self, a: int, b: int) -> View:
        return View(self.tensor.transpose(a, b))

    def reshape(self, shape: tuple[int, ...]) -> View:
        return self if self.shape == shape else View(self.tensor.reshape(shape))

    def view(self) -> View:
        return self

    def as_array(self, name: str) -> Any:
        """Its memory as an array of CuPy."""
        return cuda_array(sys.modules["torch"], name, self.tensor)

    def sum(self, axes: tuple[int, ...]) -> View:
        """The sum over these axes."""
        return View(self.tensor.sum(axes))

    def astype(self, dtype: Any, copy: bool = True) -> View:
        """A copy of this dtype; itself where it has it, unless a copy is asked for."""
        return self if self.dtype == dtype and not copy else View(self.tensor.to(_form((), dtype)[2], copy=copy))

    def copy(self) -> View:
        """A C-contiguous copy."""
        return View(self.tensor.clone(memory_format=sys.modules["torch"].contiguous_format))

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any) -> View:
        """New memory, C-contiguous, on the current device: in a `scope` that of the tensors."""
        return View(_allocator()(*_form(shape, dtype)))


@lru_cache(maxsize=256)
def _layout(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], device: int) -> tuple[Any, ...]:
    known = numpy_dtype("a tensor", dtype)
    return cupy_for("a tensor").ndarray, tuple(shape), tuple([known.itemsize * n for n in strides]), known, device


@cache
def _allocator() -> Any:
    """A function of shape, strides and dtype. `Tensor.new_empty` takes 2 us longer than that of PyTorch's compiler."""
    torch = sys.modules["torch"]
    try:
        return torch._C._dynamo.guards._empty_strided_cuda
    except AttributeError:
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


@lru_cache(maxsize=256)
def _form(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """Shape, strides and dtype of a C-contiguous tensor."""
    strides = tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
    return shape, strides, getattr(sys.modules["torch"], np.dtype(dtype).name)


@cache
def numpy_dtype(name: str, dtype: Any) -> Any:
    try:
        known = str(dtype).removeprefix("torch.")
        return bfloat16() if known == "bfloat16" else np.dtype(known)
    except TypeError:
        raise TypeError(f"{name}: expected a dtype of NumPy, got {dtype}") from None


def cuda_array(torch: Any, name: str, tensor: Any) -> Any:
    """A tensor on a CUDA device as an array of CuPy, by its address: DLPack would synchronize streams."""
    cupy = cupy_for(name)
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got the layout {tensor.layout}")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    dtype, shape = numpy_dtype(name, tensor.dtype), tuple(tensor.shape)
    if 0 in shape:
        return cupy.empty(shape, dtype)
    storage, size = tensor.untyped_storage(), dtype.itemsize
    # The whole storage, so that views of one are seen to share memory.
    memory = cupy.cuda.UnownedMemory(storage.data_ptr(), storage.nbytes(), tensor, tensor.get_device())
    pointer = cupy.cuda.MemoryPointer(memory, tensor.data_ptr() - storage.data_ptr())
    return cupy.ndarray(shape, dtype, pointer, strides=tuple([size * n for n in tensor.stride()]))


def bfloat16() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def cupy_for(name: str) -> Any:
    """The module cupy; TypeError with the command that installs it."""
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{name} lies on a CUDA device, where flashkit computes through CuPy, which cannot be imported ({error}); "
            'pip install "cupy-cuda13x[ctk]"'
        ) from error
    return cupy
