"""flashkit.torch and flashkit.transformers on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")  # first: torch takes two seconds
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.cuda.is_available():
    pytest.skip("this PyTorch has no CUDA device", allow_module_level=True)

from flashkit import torch as ft  # noqa: E402
from flashkit.call import views  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def qkv(dtype: Any, shape: tuple[int, ...] = (2, 4, 260, 64)) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


def both(function: Callable[..., Any], inputs: list[Any], **options: Any) -> list[Any]:
    out = function(*inputs, **options)
    leaves = [*inputs, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").bfloat16()  # the same in each dtype
    weights = weights.to(out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def accurate(found: list[Any], inputs: list[Any], **options: Any) -> None:
    """At most twice the error of PyTorch's own math."""

    def doubled(x: Any) -> Any:
        return x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    exact = both(sdpa, [doubled(x) for x in inputs], **{name: doubled(x) for name, x in options.items()})
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = both(sdpa, inputs, **options)
    for ours, other, wanted in zip(found, plain, exact):
        error, yardstick = ((x.double() - wanted).abs().max() for x in (ours, other))
        assert error <= 2 * yardstick + torch.finfo(ours.dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "bool", "floating"])
def test_it_is_torchs_function(dtype: Any, name: str) -> None:
    inputs = qkv(dtype)
    made: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(2, 1, 260, 260, device="cuda") < 0.7},
        "floating": {"attn_mask": torch.randn(4, 260, 260, device="cuda", dtype=dtype, requires_grad=True)},
    }
    accurate(both(ft.scaled_dot_product_attention, inputs, **made[name]), inputs, **made[name])


def test_compiled() -> None:
    inputs = qkv(torch.bfloat16)
    mods = ft.Mods(score_mod=lambda s, b, h, q, k: s - 0.1 * torch.abs(q - k))

    def model(q: Any, k: Any, v: Any) -> Any:
        return ft.flex_attention(q, k, v, mods=mods) + ft.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = both(torch.compile(model, fullgraph=True), inputs)
    torch.testing.assert_close(found, both(model, inputs), atol=2e-2, rtol=2e-2)


def test_the_work_is_on_the_current_stream() -> None:
    inputs = qkv(torch.float16)
    expected = both(ft.attention, inputs)
    late = [torch.zeros_like(x, requires_grad=True) for x in inputs]
    both(ft.attention, late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for to, source in zip(late, inputs):
                to.copy_(source)
        found = both(ft.attention, late)
        assert not stream.query()  # nothing waited for the device
    stream.synchronize()
    torch.testing.assert_close(found, expected)


def test_packed_sequences_whose_offsets_lie_on_the_device() -> None:
    q, k, v = (torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    found = both(ft.attention, [q, k, v], cu_seqlens=cu, causal=True)

    def apart(q: Any, k: Any, v: Any) -> Any:
        pieces = zip(*(x.transpose(0, 1).split([100, 200], 1) for x in (q, k, v)))
        return torch.cat([sdpa(*each, is_causal=True) for each in pieces], 1).transpose(0, 1)

    torch.testing.assert_close(found, both(apart, [q, k, v]), atol=2e-2, rtol=2e-2)


def test_a_graph_replays_both_passes() -> None:
    inputs = qkv(torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both(ft.attention, inputs, causal=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = both(ft.attention, inputs, causal=True)
    with torch.no_grad():
        for x in inputs:
            x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, both(ft.attention, inputs, causal=True), atol=1e-2, rtol=1e-2)


def test_calls_of_one_layout_make_no_arrays(calls_of: Any) -> None:
    """From the second call on, in both passes, on any stream; and a plan takes no other layout."""
    q, k, v = (x.detach() for x in qkv(torch.float16, (2, 4, 60, 64)))
    wide = torch.randn(2, 4, 60, 128, device="cuda").half()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    made = calls_of(views, "cuda_array")
    layouts = [(q, k, v), (q, turned[1], v), (q, wide[..., :64], v), (q[:, :, :33], k, v), tuple(turned)]
    layouts += [(q.bfloat16(), k.bfloat16(), v.bfloat16()), (q[0], k[0], v[0])]
    stream = torch.cuda.Stream()
    for turn in range(3):
        made.clear()
        for given in layouts:
            inputs = [x.detach().requires_grad_() for x in given]
            found = both(ft.attention, inputs)
            accurate(found, inputs)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(stream if turn == 2 else torch.cuda.current_stream()):
                again = ft.attention(*inputs)
            stream.synchronize()
            torch.testing.assert_close(again, found[0])
        assert turn == 0 or not made
