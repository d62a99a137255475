"""Arrays of other libraries as NumPy's or CuPy's, without a copy, and back: PyTorch, JAX, and what follows the array
API standard or has __cuda_array_interface__.

A library is imported only if it is there already: an array of it exists only then. DLPack is the last resort, because
it has no way to carry NumPy's bfloat16 and does not know the current stream of a library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np

from ..options import PLAIN, with_axes
from . import views
from .views import View, bfloat16, cupy_for

_HERE: AbstractContextManager[None] = nullcontext()
"""Of `Library.scope`, where nothing has to change. It may be entered many times at once."""


class Library:
    """A library of arrays, named for messages; the base class is for the array API standard and DLPack."""

    name = "array API"

    def place(self, array: Any) -> Any:
        """Where an array lies: equal for arrays that one call may read."""
        return tuple(map(int, array.__dlpack_device__()))

    def native(self, name: str, array: Any) -> Any:
        """The same memory as an array of NumPy or CuPy; TypeError if there is no such array."""
        kind, _ = self.place(array)
        if kind not in (1, 2, 3, 13):  # CPU, CUDA, CUDA's pinned and managed memory
            raise TypeError(f"{name}: expected an array on a CPU or a CUDA device, got DLPack's device kind {kind}")
        try:
            return (np if kind == 1 else cupy_for(name)).from_dlpack(array)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise TypeError(
                f"{name}: expected an array that DLPack exports, got a {full_name(array)}: {error}"
            ) from error

    def own(self, native: Any, like: Any) -> Any:
        """A result as an array of this library, on the device of `like`."""
        return like.__array_namespace__().from_dlpack(native)

    def view(self, name: str, array: Any) -> Any:
        """The same as a View, where the library has these, or as `native` gives it."""
        return self.native(name, array)

    def scope(self, array: Any) -> AbstractContextManager[None]:
        """Where to compute: on the device of this array, and on its library's current stream."""
        return _HERE

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
        torch = self._checked(name, array)
        if array.is_cuda:
            return views.cuda_array(torch, name, array)
        if not array.is_cpu:
            raise TypeError(f"{name}: expected a tensor on a CPU or a CUDA device, got one on {array.device}")
        try:
            return self.memory(array)
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"{name}: expected a torch.Tensor with plain memory: {error}") from error

    def memory(self, tensor: Any) -> Any:
        """What a plan reads of a plain tensor: an array of NumPy, or a View."""
        if tensor.is_cuda:
            return View(tensor)
        torch = sys.modules["torch"]
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy(force=True).view(bfloat16())
        return tensor.numpy(force=True)  # without the graph, and with negations computed

    def view(self, name: str, array: Any) -> Any:
        """A View, or an array where the tensor is not strided memory as it is, or none at all."""
        torch = self._checked(name, array)
        if not array.is_cuda or array.layout is not torch.strided or array.is_neg() or not array.numel():
            return self.native(name, array)
        return View(array)

    def _checked(self, name: str, array: Any) -> Any:
        """The module torch; TypeError if the tensor is more than its memory."""
        torch = sys.modules["torch"]
        kind = type(array)
        if kind is not torch.Tensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name}: expected a plain torch.Tensor, got a {full_name(array)}")
        if torch._C._functorch.is_functorch_wrapped_tensor(array) or is_dual(array):
            raise TypeError(f"{name}: expected a plain tensor, got one of a transform of torch.func or of forward mode")
        if array.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name} requires grad, and autograd does not record this function: use flashkit.torch.attention, "
                f"which is differentiable, or pass {name}.detach()"
            )
        if name == "out":
            if array.is_neg():
                raise TypeError("out: expected plain memory, got a tensor with a pending negation, as x.conj().imag")
            if not array.is_inference():  # autograd refuses to use what was in it before
                torch.autograd.graph.increment_version(array)
        return torch

    def own(self, native: Any, like: Any) -> Any:
        torch = sys.modules["torch"]
        if type(native) is View:
            return native.tensor
        take = torch.from_numpy if isinstance(native, np.ndarray) else torch.from_dlpack
        if native.dtype.kind == "V":  # of ml_dtypes; its name takes microseconds
            return take(native.view(np.int16)).view(torch.bfloat16)
        return take(native)

    def scope(self, array: Any) -> AbstractContextManager[None]:
        if not array.is_cuda:
            return _HERE
        cupy, index = sys.modules.get("cupy") or cupy_for("q"), array.get_device()
        stream = sys.modules["torch"]._C._cuda_getCurrentRawStream(index)  # `torch.cuda.current_stream` makes an object
        current = cupy.cuda.runtime.getDevice() == index and cupy.cuda.get_current_stream().ptr == stream
        if current and stream == 0:  # the default stream, which is not captured
            return _HERE
        return _on_stream(cupy, index, stream)


@contextmanager
def _on_stream(cupy: Any, index: int, stream: int) -> Iterator[None]:
    """On this device and this stream of PyTorch."""
    with cupy.cuda.Device(index), _stream(index, stream):
        if not sys.modules["torch"].cuda.is_current_stream_capturing():
            yield
            return
        with _allocations_in_a_capture():
            yield


@cache  # without end: CuPy may destroy the stream with its object, and a library has few streams
def _stream(index: int, handle: int) -> Any:
    """A stream of another library, on the current device, as CuPy's."""
    streams = sys.modules["cupy"].cuda
    if not hasattr(streams.Stream, "from_external"):  # CuPy before 14
        return streams.ExternalStream(handle, index)
    return streams.Stream.from_external(_Handle(handle))


class _Handle:
    """A stream by the protocol of CUDA's libraries for Python."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@contextmanager
def _allocations_in_a_capture() -> Iterator[None]:
    """Where CuPy's pool may grow in PyTorch's captures, as its own does (cuThreadExchangeStreamCaptureMode)."""
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
            raise TypeError(f"{name}: expected a concrete array, got a traced one: use the functions of flashkit.jax")
        if len(array.devices()) != 1:
            raise TypeError(f"{name}: expected an array on one device, got one on {len(array.devices())} devices")
        (device,) = array.devices()
        return device

    def native(self, name: str, array: Any) -> Any:
        device = self.device(name, array)
        if name == "out":
            raise TypeError("out: expected None, got a jax array, which is immutable")
        if device.platform == "cpu":
            if name == "seed" and "key" in str(array.dtype):
                raise TypeError("seed: expected an integer, got a key of jax.random; pass jax.random.bits(key)")
            return np.asarray(array)  # a view, of bfloat16 too
        if device.platform not in ("gpu", "cuda"):
            raise TypeError(f"{name}: expected an array on a CPU or a CUDA device, got one on {device}")
        return cupy_for(name).from_dlpack(array)

    def own(self, native: Any, like: Any) -> Any:
        jax = sys.modules["jax"]
        if not isinstance(native, np.ndarray):
            return jax.dlpack.from_dlpack(native)
        made = jax.device_put(native, self.device("q", like))
        return made if made.dtype == native.dtype else jax.dlpack.from_dlpack(native)  # float64 without x64

    def scope(self, array: Any) -> AbstractContextManager[None]:
        device = self.device("q", array)
        return _HERE if device.platform == "cpu" else cupy_for("q").cuda.Device(device.local_hardware_id)


class CudaArrays(Library):
    """Arrays with __cuda_array_interface__: those of Numba come back as Numba's, others as CuPy's."""

    name = "CUDA"

    def place(self, array: Any) -> Any:
        return cupy_for("an array").cuda.runtime.pointerGetAttributes(array.__cuda_array_interface__["data"][0]).device

    def describe(self, array: Any) -> str:
        return full_name(array)

    def native(self, name: str, array: Any) -> Any:
        return cupy_for(name).asarray(array)

    def own(self, native: Any, like: Any) -> Any:
        if type(like).__module__.partition(".")[0] != "numba":
            return native
        from numba import cuda

        return cuda.as_cuda_array(native)


TORCH, JAX, STANDARD, CUDA = Torch(), Jax(), Library(), CudaArrays()

_known: dict[type, Library | None] = {np.ndarray: None, View: None}


def library_of(array: Any) -> Library | None:
    """The library of an array that is neither NumPy's nor CuPy's; None for those and for what is no array."""
    kind = type(array)
    try:
        return _known[kind]
    except KeyError:
        library = _find(array)
        if len(_known) < 1000:  # classes may be made without end
            _known[kind] = library
        return library


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


def is_dual(array: Any) -> bool:
    """Whether a tensor carries a tangent of forward-mode differentiation."""
    forward = sys.modules.get("torch.autograd.forward_ad")
    if forward is None or forward._current_level < 0:
        return False
    return forward.unpack_dual(array).tangent is not None


HOST_INTEGERS = with_axes("entries", "memory")
"""Arguments that may lie on the host beside arrays on a device."""


class Foreign:
    """The adapter between arrays of q's library, all beside q, and native ones. library: None if q is native."""

    def __init__(self, library: Library | None, q: Any) -> None:
        self.library: Any = library
        self.q = q

    def scope(self) -> AbstractContextManager[None]:
        """Where to compute: on q's device and its library's current stream."""
        return _HERE if self.library is None else self.library.scope(self.q)

    def to_native(self, **given: Any) -> dict[str, Any]:
        """Arguments with native arrays, others as they are. TypeError for an array that cannot be read beside q."""
        if self.library is None:
            return given
        return {name: value if type(value) in PLAIN else self._native(name, value) for name, value in given.items()}

    def views(self, **given: Any) -> dict[str, Any]:
        """Arrays and None as Views, or all as `to_native` gives them."""
        take = self.library.view
        found = {name: x if x is None else self._native(name, x, take) for name, x in given.items()}
        kinds = {type(x) for x in found.values() if x is not None}
        return self.to_native(**given) if View in kinds and len(kinds) > 1 else found

    def _native(self, name: str, value: Any, take: Any = None) -> Any:
        if isinstance(value, tuple) and name == "cu_seqlens":
            return tuple(self._native(name, each) for each in value)
        other = library_of(value)
        if other is self.library:
            native = (take or other.native)(name, value)
            on_host = name in HOST_INTEGERS and isinstance(native, np.ndarray)
            if value is self.q or on_host or other.place(value) == other.place(self.q):
                return native
            place = "on the device of q"
        elif other is not None or (name not in HOST_INTEGERS and getattr(value, "ndim", 0) != 0):
            place = "of the library of q"
        else:
            return value
        what = full_name(value) if other is None else other.describe(value)
        raise TypeError(f"{name}: expected an array {place}, a {self.library.describe(self.q)}, got a {what}")

    def from_native(self, name: str, result: Any) -> Any:
        """A result as an array of the library. name: "out", "lse", "dq", ..., as for other adapters."""
        return result if self.library is None else self.library.own(result, self.q)


F = TypeVar("F", bound=Callable[..., Any])


def takes_every_library(place: int, name: str) -> Callable[[F], F]:
    """Let a native function take and return arrays of other libraries: of that of its argument `name` at `place`."""

    def decorate(function: F) -> F:
        @wraps(function)
        def taken(*args: Any, **options: Any) -> Any:
            first = args[place] if len(args) > place else options.get(name)
            if (library := library_of(first)) is None:
                return function(*args, **options)

            def own(result: Any) -> Any:
                if isinstance(result, tuple):
                    return tuple(map(own, result))
                if isinstance(result, dict):
                    return {name: own(x) for name, x in result.items()}
                return library.own(result, first) if hasattr(result, "__array_interface__") or hasattr(
                    result, "__cuda_array_interface__") else result  # fmt: skip

            with library.scope(first):
                given = [native(name, x) if i == place else _natives("argument", x) for i, x in enumerate(args)]
                result = function(*given, **{name: _natives(name, x) for name, x in options.items()})
                return options["out"] if options.get("out") is not None else own(result)

        return taken  # type: ignore[return-value]

    return decorate


def _natives(name: str, value: Any) -> Any:
    """As `native`, of pairs of arrays as well."""
    return tuple(_natives(name, x) for x in value) if isinstance(value, tuple) else native(name, value)


def adapter_of(array: Any) -> Foreign:
    """The adapter for the arrays of a call whose first one this is."""
    return Foreign(library_of(array), array)
