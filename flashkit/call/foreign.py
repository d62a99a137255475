"""Arrays of other libraries as NumPy's or CuPy's, without a copy, and back: PyTorch, JAX, and what follows the array
API standard or has __cuda_array_interface__.

A library is imported only if it is there already: an array of it exists only then. DLPack is the last resort, because
it has no way to carry NumPy's bfloat16 and does not know the current stream of a library.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np


class Library:
    """A library of arrays. The base class is for what follows the array API standard and DLPack.

    Attributes
    ----------
    name : str
        For messages.
    """

    name = "array API"

    def place(self, array: Any) -> Any:
        """Where an array lies: equal for arrays that one call may read."""
        return tuple(map(int, array.__dlpack_device__()))

    def native(self, name: str, array: Any) -> Any:
        """The same memory as an array of NumPy or CuPy; TypeError if there is no such array."""
        kind, _ = self.place(array)
        if kind not in (1, 2, 3, 13):  # CPU, CUDA, CUDA's pinned and managed memory
            raise TypeError(f"{name} lies on a device of DLPack's kind {kind}; an array on a CPU or a CUDA device fits")
        try:
            return (np if kind == 1 else _cupy(name)).from_dlpack(array)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise TypeError(f"{name} is a {full_name(array)} that DLPack does not carry over: {error}") from error

    def own(self, native: Any, like: Any) -> Any:
        """A result as an array of this library, on the device of `like`."""
        return like.__array_namespace__().from_dlpack(native)

    @contextmanager
    def scope(self, array: Any) -> Iterator[None]:
        """Where to compute: on the device of this array, and on its library's current stream."""
        yield

    def describe(self, array: Any) -> str:
        """A library and place for messages."""
        return f"{full_name(array)} on DLPack's device {self.place(array)}"


class Torch(Library):
    """Tensors of PyTorch, on CPUs and CUDA devices."""

    name = "torch"

    def place(self, array: Any) -> Any:
        return array.device

    def describe(self, array: Any) -> str:
        return f"torch tensor on {array.device}"

    def native(self, name: str, array: Any) -> Any:
        torch = sys.modules["torch"]
        if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name} is a {full_name(array)}, which is more than its memory; a plain torch.Tensor fits")
        if torch._C._functorch.is_functorch_wrapped_tensor(array) or _is_dual(torch, array):
            raise TypeError(f"{name} belongs to a transform of torch.func or forward mode; a plain tensor fits")
        if array.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name} requires grad, and autograd does not record this function; flashkit.torch.attention is "
                f"differentiable, {name}.detach() or torch.no_grad() fits without a gradient"
            )
        if array.device.type == "cuda":
            return _cuda_tensor(torch, name, array)
        if array.device.type != "cpu":
            raise TypeError(f"{name} lies on {array.device}; a tensor on a CPU or a CUDA device fits")
        try:
            if array.dtype == torch.bfloat16:
                return array.view(torch.int16).numpy(force=True).view(_bfloat16())
            return array.numpy(force=True)  # without the graph, and with negations computed
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"{name} is a torch tensor without plain memory: {error}") from error

    def own(self, native: Any, like: Any) -> Any:
        torch = sys.modules["torch"]
        if not isinstance(native, np.ndarray):
            return torch.from_dlpack(native)
        if native.dtype.kind == "V":  # of ml_dtypes; its name takes microseconds
            return torch.from_numpy(native.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(native)

    @contextmanager
    def scope(self, array: Any) -> Iterator[None]:
        if array.device.type != "cuda":
            yield
            return
        cupy, torch = _cupy("q"), sys.modules["torch"]
        index = array.device.index
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(index).cuda_stream, index)
        with cupy.cuda.Device(index), stream:
            if not torch.cuda.is_current_stream_capturing():
                yield
                return
            with _allocations_in_a_capture():
                yield


@contextmanager
def _allocations_in_a_capture() -> Iterator[None]:
    """Where CuPy's pool may grow while PyTorch captures: its captures forbid that unless a thread asks for it, and its
    own pool grows so as well (CUDA driver API, cuThreadExchangeStreamCaptureMode).
    """
    from cuda.bindings import driver

    exchange = driver.cuThreadExchangeStreamCaptureMode
    _, before = exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        exchange(before)


class Jax(Library):
    """Arrays of JAX, on CPUs and CUDA devices."""

    name = "jax"

    def place(self, array: Any) -> Any:
        return array.sharding

    def describe(self, array: Any) -> str:
        jax = sys.modules["jax"]
        return "traced jax array" if isinstance(array, jax.core.Tracer) else f"jax array on {array.sharding}"

    def device(self, name: str, array: Any) -> Any:
        """The device of a concrete array."""
        if isinstance(array, sys.modules["jax"].core.Tracer):
            raise TypeError(
                f"{name} is traced by a transform of JAX (jit, grad, vmap); the functions of flashkit.jax fit there"
            )
        if len(array.devices()) != 1:
            raise TypeError(f"{name} is sharded over {len(array.devices())} devices; an array on one device fits")
        (device,) = array.devices()
        return device

    def native(self, name: str, array: Any) -> Any:
        device = self.device(name, array)
        if name == "out":
            raise TypeError("out is a jax array, which is immutable; leave it out")
        if device.platform == "cpu":
            return np.asarray(array)  # a view, of bfloat16 too
        if device.platform not in ("gpu", "cuda"):
            raise TypeError(f"{name} lies on {device}; an array on a CPU or a CUDA device fits")
        return _cupy(name).from_dlpack(array)

    def own(self, native: Any, like: Any) -> Any:
        jax = sys.modules["jax"]
        if not isinstance(native, np.ndarray):
            return jax.dlpack.from_dlpack(native)
        made = jax.device_put(native, self.device("q", like))
        return made if made.dtype == native.dtype else jax.dlpack.from_dlpack(native)  # float64 without x64

    @contextmanager
    def scope(self, array: Any) -> Iterator[None]:
        device = self.device("q", array)
        if device.platform == "cpu":
            yield
        else:
            with _cupy("q").cuda.Device(device.local_hardware_id):
                yield


class CudaArrays(Library):
    """Arrays with __cuda_array_interface__: those of Numba come back as Numba's, others as CuPy's."""

    name = "CUDA"

    def place(self, array: Any) -> Any:
        return _cupy("an array").cuda.runtime.pointerGetAttributes(array.__cuda_array_interface__["data"][0]).device

    def describe(self, array: Any) -> str:
        return full_name(array)

    def native(self, name: str, array: Any) -> Any:
        return _cupy(name).asarray(array)

    def own(self, native: Any, like: Any) -> Any:
        if type(like).__module__.partition(".")[0] != "numba":
            return native
        from numba import cuda

        return cuda.as_cuda_array(native)


TORCH, JAX, STANDARD, CUDA = Torch(), Jax(), Library(), CudaArrays()

_known: dict[type, Library | None] = {np.ndarray: None}


def library_of(array: Any) -> Library | None:
    """The library of an array that is neither NumPy's nor CuPy's; None for those and for what is no array."""
    kind = type(array)
    try:
        return _known[kind]
    except KeyError:
        found = _find(array)
        if len(_known) < 1000:  # classes may be made without end
            _known[kind] = found
        return found


def _find(array: Any) -> Library | None:
    if isinstance(array, np.ndarray | np.generic | list | tuple | type):
        return None
    torch, jax, cupy = map(sys.modules.get, ("torch", "jax", "cupy"))
    if cupy is not None and isinstance(array, cupy.ndarray):
        return None
    if torch is not None and isinstance(array, torch.Tensor):
        return TORCH
    if jax is not None and isinstance(array, jax.Array):
        return JAX
    if hasattr(array, "__array_namespace__") and hasattr(array, "__dlpack__"):
        return STANDARD
    return CUDA if hasattr(array, "__cuda_array_interface__") else None


def native(name: str, array: Any) -> Any:
    """An array of NumPy or CuPy for one of any library; what is no array comes back as it is."""
    library = library_of(array)
    return array if library is None else library.native(name, array)


def full_name(array: Any) -> str:
    """Module and name of an array's class."""
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _bfloat16() -> Any:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _is_dual(torch: Any, array: Any) -> bool:
    """Whether a tensor carries a tangent of forward-mode differentiation."""
    forward = sys.modules.get("torch.autograd.forward_ad")
    if forward is None or forward._current_level < 0:
        return False
    return forward.unpack_dual(array).tangent is not None


def _cupy(name: str) -> Any:
    """The module cupy; TypeError with the command that installs it."""
    try:
        import cupy
    except ImportError as error:
        raise TypeError(
            f"{name} lies on a CUDA device, where flashkit computes through CuPy, which cannot be imported ({error}); "
            'pip install "flashkit-attention[cuda13]" installs it'
        ) from error
    return cupy


def _cuda_tensor(torch: Any, name: str, tensor: Any) -> Any:
    """A tensor on a CUDA device as an array of CuPy, by its address: DLPack would synchronize streams."""
    cupy = _cupy(name)
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has the layout {tensor.layout}; a strided tensor fits")
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    try:
        dtype = _bfloat16() if tensor.dtype == torch.bfloat16 else np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:
        raise TypeError(f"{name} has dtype {tensor.dtype}; NumPy has no such dtype") from None
    shape, size = tuple(tensor.shape), dtype.itemsize
    if 0 in shape:
        return cupy.empty(shape, dtype)
    storage = tensor.untyped_storage()
    # The whole storage, so that views of one are seen to share memory.
    memory = cupy.cuda.UnownedMemory(storage.data_ptr(), storage.nbytes(), tensor, tensor.device.index)
    pointer = cupy.cuda.MemoryPointer(memory, tensor.data_ptr() - storage.data_ptr())
    return cupy.ndarray(shape, dtype, pointer, strides=tuple(size * n for n in tensor.stride()))


HOST_INTEGERS = ("kv_lengths", "q_offset", "q_lengths", "cu_seqlens", "page_table")
"""Arguments that may lie on the host beside arrays on a device."""

class Loan:
    """The arrays of one call, lent to NumPy or CuPy, and its results on the way back.

    Parameters
    ----------
    library
        That of q.
    q
        The array that all others have to lie beside.
    """

    def __init__(self, library: Library, q: Any) -> None:
        self.library, self.q = library, q

    def scope(self) -> AbstractContextManager[None]:
        """Where to compute: on q's device and its library's current stream."""
        return self.library.scope(self.q)

    def borrow(self, **given: Any) -> dict[str, Any]:
        """Arguments with NumPy's or CuPy's arrays; numbers, lists, functions and None stay what they are.

        Raises
        ------
        TypeError
            An array is of another library, on another device, or cannot be read in place.
        """
        return {name: self._borrowed(name, value) for name, value in given.items()}

    def _borrowed(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple) and name == "cu_seqlens":
            return tuple(self._borrowed(name, each) for each in value)
        other = library_of(value)
        if other is self.library:
            made = other.native(name, value)
            on_host = name in HOST_INTEGERS and isinstance(made, np.ndarray)
            if value is self.q or on_host or other.place(value) == other.place(self.q):
                return made
            rule = "lie on one device"
        elif other is not None or (name not in HOST_INTEGERS and getattr(value, "ndim", 0) != 0):
            rule = "live in one library"
        else:
            return value
        what = full_name(value) if other is None else other.describe(value)
        raise TypeError(
            f"{name} is a {what}, but q is a {self.library.describe(self.q)}; all arrays of a call {rule}"
        )

    def give_back(self, result: Any, out: Any = None) -> Any:
        """A result, or a tuple of results, as arrays of the library.

        Parameters
        ----------
        result
            The result, or several; the first of them has been written to `out`.
        out
            The caller's array, or None.
        """
        if isinstance(result, tuple):
            return tuple(self.give_back(each, None if index else out) for index, each in enumerate(result))
        return self.library.own(result, self.q) if out is None else out

    def give_back_gradients(self, gradients: tuple[Any, ...], wrt: tuple[str, ...]) -> tuple[Any, ...]:
        """The gradients with respect to these arguments as arrays of the library."""
        return tuple(map(self.give_back, gradients))
