"""Arrays of PyTorch, JAX and others: read in place, returned in the same kind; what does not fit is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import mods
from flashkit.call import interop

RNG = np.random.default_rng(0)
SHAPE = (2, 4, 19, 16)
DTYPES = ("float64", "float32", "float16", "bfloat16")


class Standard:
    """The least that the array API standard asks of an array that is exchanged."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array_namespace__(self) -> Any:
        return Standard

    @staticmethod
    def from_dlpack(x: Any) -> Standard:
        return Standard(np.from_dlpack(x))

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def torch_tensor(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.name == "bfloat16" else torch.tensor(x)


def jax_array(x: np.ndarray) -> Any:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if x.dtype == np.float64:
        pytest.skip("JAX computes in float32 unless told otherwise")
    return jax.device_put(x)


def standard_array(x: np.ndarray) -> Any:
    if x.dtype.name == "bfloat16":
        pytest.skip("DLPack does not carry NumPy's bfloat16")
    return Standard(x)


def as_numpy(x: Any) -> np.ndarray:
    return x.array if isinstance(x, Standard) else interop.native("x", x)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {"torch": torch_tensor, "jax": jax_array, "standard": standard_array}
kinds = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in KINDS.items()])


def qkv(dtype: str = "float32") -> list[np.ndarray]:
    found = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    return [RNG.standard_normal(SHAPE).astype(found) for _ in range(3)]


def equal(found: Any, expected: np.ndarray, like: Any) -> None:
    assert type(found) is type(like)
    assert as_numpy(found).dtype == expected.dtype
    np.testing.assert_array_equal(as_numpy(found), expected)


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_function_returns_the_kind_it_got(make: Callable[..., Any], dtype: str) -> None:
    own = qkv(dtype)
    given = [make(x) for x in own]
    out, lse = flashkit.attention(*own, causal=True, return_lse=True)
    for found in (
        flashkit.attention(*given, causal=True, return_lse=True),
        flashkit.plan(*given, causal=True, return_lse=True)(*given),
    ):
        equal(found[0], out, given[0])
        equal(found[1], lse, given[0])
    dout, dlse = RNG.standard_normal(SHAPE).astype(out.dtype), RNG.standard_normal(lse.shape).astype(lse.dtype)
    expected = flashkit.attention_vjp(*own, causal=True)[1](dout, dlse)
    found, vjp = flashkit.attention_vjp(*given, causal=True)
    equal(found, out, given[0])
    for gradient, wanted in zip(vjp(make(dout), make(dlse)), expected, strict=True):
        equal(gradient, wanted, given[0])
    equal(flashkit.weights(*given[:2], rows=[3]), flashkit.weights(*own[:2], rows=[3]), given[0])
    assert flashkit.explain(*given, causal=True).flops == flashkit.explain(*own, causal=True).flops


@kinds
def test_every_array_argument_may_be_of_the_kind(make: Callable[..., Any]) -> None:
    own = qkv()
    options = {
        "bias": RNG.standard_normal((4, 19, 19)).astype(np.float32), "mask": RNG.random((2, 1, 19, 19)) < 0.7,
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 1], np.float32), "sinks": np.zeros(4, np.float32),
        "kv_lengths": np.array([19, 7], np.int32), "q_offset": np.array([0, 2], np.int32),
    }  # fmt: skip
    table = np.linspace(0.5, 1, 4, dtype=np.float32)
    expected, given = flashkit.attention(*own, **options, score_mod=scaled_by(table)), [make(x) for x in own]
    lent = {name: make(x) for name, x in options.items()}
    equal(flashkit.attention(*given, **lent, score_mod=scaled_by(make(table))), expected, given[0])


@kinds
def test_packed_sequences_pages_and_parts(make: Callable[..., Any]) -> None:
    q, k, v = (RNG.standard_normal((12, 4, 16)).astype(np.float32) for _ in range(3))
    cu, lengths, table = np.array([0, 5, 12]), np.array([5, 6]), np.array([[0, 1], [2, 1]])
    given = [make(x) for x in (q, k, v)]
    expected = flashkit.attention(q, k, v, cu_seqlens=cu, causal=True)
    equal(flashkit.attention(*given, cu_seqlens=make(cu), causal=True), expected, given[0])
    equal(flashkit.attention(*given, cu_seqlens=(make(cu), cu), causal=True), expected, given[0])
    pages = [x.reshape(3, 4, 4, 16) for x in (k, v)]
    queries = q.reshape(2, 4, 6, 16)
    expected, lse = flashkit.attention(queries, *pages, page_table=table, kv_lengths=lengths, return_lse=True)
    parts = queries[..., :12], queries[..., 12:], *(q[None, :, 0, columns] for columns in (slice(12), slice(12, None)))
    parts = tuple(np.ascontiguousarray(x[:1]) for x in parts)
    equal(flashkit.mla(*map(make, parts), scale=0.2), flashkit.mla(*parts, scale=0.2), given[0])
    lent = [make(x) for x in (queries, *pages)]
    found = flashkit.attention(*lent, page_table=make(table), kv_lengths=make(lengths), return_lse=True)
    equal(found[0], expected, given[0])
    merged = flashkit.merge((expected, lse), (expected, lse + 1))
    parts = flashkit.merge(found, (found[0], make(lse + 1)))
    equal(parts[0], merged[0], given[0])
    equal(parts[1], merged[1], given[0])
    cache = flashkit.KVCache(12, 4, 16, pages=12)
    cache.append(given[1], given[2])
    assert type(cache.attend(given[0], return_stats=("entropy",))[1]["entropy"]) is type(given[0])
    with pytest.raises(TypeError, match=r"lse of part 1: expected .* of q.* got a numpy.ndarray"):
        flashkit.merge(found, (found[0], lse))


def scaled_by(table: Any) -> mods.Mod:
    return mods.score(lambda s, b, h, q, k, *, table: s * table[h], table=table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_are_read_and_written_in_place(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.zeros(2, 3, 4, dtype=getattr(torch, dtype))[:, ::2].transpose(0, 1)
    view = interop.native("x", tensor)
    assert view.__array_interface__["data"][0] == tensor.data_ptr()
    assert view.strides == tuple(n * tensor.element_size() for n in tensor.stride())
    q, k, v = (torch_tensor(x) for x in qkv(dtype))
    out = torch.empty_like(q)
    assert flashkit.attention(q, k, v, out=out) is out
    assert torch.equal(out, flashkit.attention(q, k, v))
    assert flashkit.plan(q, k, v)(q, k, v, out=out.zero_()) is out
    assert torch.equal(out, flashkit.attention(q, k, v))
    spread = torch.empty(*SHAPE[:3], 2 * SHAPE[3], dtype=out.dtype)[..., ::2]  # not addressable: copied into
    assert flashkit.attention(q, k, v, out=spread) is spread
    assert torch.equal(spread, out)


def test_views_with_a_pending_negation_are_resolved() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = (torch_tensor(x) for x in qkv())
    assert torch.equal(flashkit.attention(torch._neg_view(q), k, v), flashkit.attention(-q, k, v))
    with pytest.raises(TypeError, match="out: expected plain memory"):
        flashkit.attention(q, k, v, out=torch._neg_view(torch.empty_like(q)))


def test_results_go_to_memory_that_autograd_watches() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = (torch_tensor(x) for x in qkv())
    out, planned = torch.zeros_like(q), flashkit.plan(q, k, v)
    for write in (flashkit.attention, planned, lambda *x, out: flashkit.rotary(q, out=out)):
        saves = (q.clone().requires_grad_() * out).sum()
        assert write(q, k, v, out=out) is out
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saves.backward()
    with torch.inference_mode():
        assert torch.equal(flashkit.attention(q, k, v, out=torch.empty_like(q)), flashkit.attention(q, k, v))
    for write in (flashkit.attention, planned):
        with pytest.raises(ValueError, match="out: expected memory for each element"):
            write(q, k, v, out=torch.empty(SHAPE[0], 1, *SHAPE[2:]).expand(SHAPE))


def test_a_gradient_is_never_cut_silently() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = (torch_tensor(x) for x in qkv())
    k.requires_grad_()
    for call in (flashkit.attention, flashkit.attention_vjp, flashkit.plan):
        with pytest.raises(TypeError, match=r"k requires grad.*flashkit\.torch\.attention"):
            call(q, k, v)
    with torch.no_grad():
        expected = flashkit.attention(q, k, v)
    assert torch.equal(flashkit.attention(q, k.detach(), v), expected)
    k = k.detach()
    with pytest.raises(TypeError, match=r"q: expected a plain tensor"):
        torch.func.grad(lambda q: flashkit.attention(q, k, v).sum())(q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match="v: expected a plain tensor"):
        flashkit.attention(q, k, torch.autograd.forward_ad.make_dual(v, v))
    planned = flashkit.plan(q, k, v)
    with pytest.raises(TypeError, match="v requires grad"):
        planned(q, k, v.requires_grad_())


def test_tensors_without_plain_memory_are_errors() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = (torch_tensor(x) for x in qkv())
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(v)
    for wrong, message in (
        (v.to("meta"), "v: .* on meta"), (v.to_sparse(), "v: expected a torch.Tensor with plain memory"),
        (v.to(torch.float8_e4m3fn), "v: expected a torch.Tensor with plain memory"), (fake, "v: .* got a .*FakeTensor"),
        (v.to(torch.complex64), "v: expected .* got complex64"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=message):
            flashkit.attention(q, k, wrong)


def test_mixed_kinds_are_errors_that_name_both() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    own, tensors = qkv(), [torch_tensor(x) for x in qkv()]
    standard = [Standard(x) for x in own]
    mask = np.ones((19, 19), bool)
    cases = [
        (lambda: flashkit.attention(own[0], tensors[1], own[2]), "k: .* got a torch tensor on cpu"),
        (lambda: flashkit.attention(tensors[0], own[1], tensors[2]), "k: expected .* of q.* got a numpy.ndarray"),
        (lambda: flashkit.attention(*tensors, mask=mask), "mask: expected .* of q.* got a numpy.ndarray"),
        (lambda: flashkit.attention(*tensors, bias=standard[0]), "bias: expected .* of q.* got a .*Standard"),
        (lambda: flashkit.attention(*own, mask=torch_tensor(mask)), "mask: .* got a torch tensor on cpu"),
        (lambda: flashkit.plan(*own)(tensors[0], *own[1:]), "k: expected .* of q.* got a numpy.ndarray"),
        (lambda: flashkit.attention_vjp(*tensors)[1](own[0]), "dout: expected .* of q.* got a numpy.ndarray"),
        (lambda: flashkit.attention_vjp(*own)[1](tensors[0]), "dout: .* got a torch tensor on cpu"),
    ]
    for call, message in cases:
        with pytest.raises(TypeError, match=message):
            call()


def test_plans_take_any_kind_of_the_planned_layout() -> None:
    own = qkv()
    tensors = [torch_tensor(x) for x in own]
    equal(flashkit.plan(*own)(*tensors), flashkit.plan(*tensors)(*own), tensors[0])
    with pytest.raises(ValueError, match=r"k: expected .*shape"):
        flashkit.plan(*tensors)(tensors[0], tensors[1][:, :, 1:], tensors[2])


def test_traced_and_sharded_jax_arrays_are_errors() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q, k, v = (jax_array(x) for x in qkv())
    for call in (jax.jit(flashkit.attention), jax.grad(lambda q, k, v: flashkit.attention(q, k, v).sum())):
        with pytest.raises(TypeError, match=r"q: .* traced one.*flashkit\.jax"):
            call(q, k, v)
    with pytest.raises(TypeError, match="immutable"):
        flashkit.attention(q, k, v, out=q)
