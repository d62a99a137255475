"""flashkit.jax: the same bits as on NumPy arrays, under JAX's transformations."""

from typing import Any

import numpy as np
import pytest
from cases import near, same

import flashkit
from flashkit import mods

jax = pytest.importorskip("jax", reason="the extra `jax`")
jnp = jax.numpy

from flashkit.jax import attention, dot_product_attention  # noqa: E402

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
TABLE = np.linspace(0.5, 1.5, 4, dtype=np.float32)


def tensors(shape: tuple[int, ...] = (2, 4), n_q: int = 20, n_k: int = 28, kv: int = 2, dtype: str = "float32") -> list:
    *batch, heads = shape
    shapes = (*batch, heads, n_q, 16), (*batch, kv, n_k, 16), (*batch, kv, n_k, 16)
    return [RNG.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": [5, 2], "softcap": 2.0, "alibi_slopes": np.float32([0.5, 0.25, 0.1, 0.05])},
    "slopes of entries": {"alibi_slopes": np.abs(normal(2, 4))},
    "arrays": {"bias": normal(4, 1, 28), "mask": RNG.random((2, 1, 20, 28)) < 0.8},
    "additive mask": {"mask": np.where(RNG.random((20, 28)) < 0.8, 0, -np.inf).astype(np.float32)},
    "lengths": {"kv_lengths": np.array([17, 0]), "q_offset": 0, "causal": True},
    "queries": {"kv_lengths": np.array([17, 28]), "q_lengths": np.array([9, 20]), "causal": True},
    "offsets": {"q_offset": np.array([3, 8]), "causal": True},
    "sinks": {"sinks": normal(4)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "traced seed": {"dropout_p": 0.3, "seed": np.uint32(7)},
    "functions": {
        "score_mod": mods.score(lambda s, b, h, q, k, *, table: s * table[h] - 0.01 * b * abs(q - k), table=TABLE),
        "mask_mod": lambda b, h, q, k: (q + b) % 3 != k % 3,
    },
    "blocks": {"block_mask": flashkit.BlockMask.from_mod(mods.causal(), 20, 28, 8, 8)},
}  # fmt: skip


def traced(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays among the options, and the others."""
    arrays = {name: x for name, x in options.items() if isinstance(x, (np.ndarray, np.generic))}
    return arrays, {name: x for name, x in options.items() if name not in arrays}


def on_numpy(q: Any, k: Any, v: Any, dout: Any, dlse: Any, **options: Any) -> list[np.ndarray]:
    """out, lse, dq, dk, dv and dsinks of flashkit on NumPy arrays."""
    options = {name: int(x) if name == "seed" else x for name, x in options.items()}
    (out, lse), vjp = flashkit.attention_vjp(q, k, v, return_lse=True, **options)
    return [out, lse, *vjp(dout, dlse, wrt=("q", "k", "v", *(["sinks"] if "sinks" in options else [])))]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_of_numpy(name: str) -> None:
    q, k, v = tensors()
    arrays, static = traced(OPTIONS[name])
    dout, dlse = normal(*q.shape), normal(*q.shape[:-1])

    @jax.jit
    def both(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        sinks = {"sinks": arrays["sinks"]} if "sinks" in arrays else {}
        rest = {name: x for name, x in arrays.items() if name != "sinks"}
        call = lambda q, k, v, sinks: attention(q, k, v, return_lse=True, **static, **rest, **sinks)
        (out, lse), vjp = jax.vjp(call, q, k, v, sinks)
        *gradients, dsinks = vjp((dout, dlse))
        return out, lse, *gradients, *dsinks.values()

    found = both(q, k, v, arrays)
    same(found, on_numpy(q, k, v, dout, dlse, **OPTIONS[name]))
    np.testing.assert_array_equal(attention(q, k, v, **OPTIONS[name]), found[0])  # not traced, without lse


@pytest.mark.parametrize("shape", [(), (4,), (3, 2, 4)], ids=["ND", "HND", "ABHND"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_shapes_and_layouts(shape: tuple[int, ...], layout: str) -> None:
    if shape:
        q, k, v = tensors(shape)
        options = {"bias": normal(*shape[:-1], 1, 20, 28), "kv_lengths": RNG.integers(0, 28, shape[:-1]), "q_offset": 8}
    else:
        (q, k, v), options = (x[0, 0] for x in tensors()), {"bias": normal(20, 28)}
    if layout == "bnhd" and shape:
        q, k, v = (np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (q, k, v))
    dout = normal(*q.shape)
    call = lambda *x: attention(*x, layout=layout, causal=True, return_lse=True, **options)
    (out, lse), vjp = jax.vjp(call, q, k, v)
    expected = on_numpy(q, k, v, dout, np.zeros_like(lse), layout=layout, causal=True, **options)
    same((out, lse, *vjp((dout, jnp.zeros_like(lse)))), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    q, k, v = tensors(dtype=dtype)
    dout = tensors(dtype=dtype)[0]
    out, vjp = jax.vjp(lambda *x: attention(*x, causal=True), *map(jnp.asarray, (q, k, v)))
    expected, numpy_vjp = flashkit.attention_vjp(q, k, v, causal=True)
    for got, wanted in zip((out, *vjp(jnp.asarray(dout))), (expected, *numpy_vjp(dout)), strict=True):
        assert got.dtype == wanted.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(got), wanted)


# --- vmap -------------------------------------------------------------------------------------------------------------

BATCHED: dict[str, tuple[dict[str, Any], dict[str, int | None]]] = {
    "plain": ({}, {}),
    "lengths": ({"kv_lengths": RNG.integers(1, 28, (3, 2)), "q_offset": 0, "causal": True}, {"kv_lengths": 0}),
    "shared lengths": ({"kv_lengths": np.array([9, 20]), "q_offset": 0, "causal": True}, {"kv_lengths": None}),
    "queries": ({"q_lengths": RNG.integers(0, 20, (3, 2)), "causal": True}, {"q_lengths": 0}),
    "bias": ({"bias": normal(3, 1, 4, 1, 28)}, {"bias": 0}),
    "shared mask": ({"mask": RNG.random((2, 1, 20, 28)) < 0.8}, {"mask": None}),
    "slopes": ({"alibi_slopes": np.abs(normal(3, 2, 4))}, {"alibi_slopes": 0}),
    "sinks": ({"sinks": normal(3, 4)}, {"sinks": 0}),
    "shared sinks": ({"sinks": normal(4)}, {"sinks": None}),
    "entries": ({"score_mod": lambda s, b, h, q, k: s * (b + 1.0)}, {}),
    "dropout": ({"dropout_p": 0.3, "seed": 7}, {}),
    "seeds": ({"dropout_p": 0.3, "seed": np.arange(3)}, {"seed": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, 0)], ids=str)
@pytest.mark.one_in(2)
def test_vmap_is_a_loop(name: str, axes: tuple[int | None, ...]) -> None:
    options, option_axes = BATCHED[name]
    arrays, static = traced(options)
    q, k, v = (np.stack([x] * 3) * normal(3, 1, 1, 1, 1) for x in tensors())
    q = np.moveaxis(q, 0, axes[0])
    k = k[0] if axes[1] is None else k

    def one(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        call = lambda q, k, v, sinks: attention(q, k, v, **static, **{**arrays, **sinks})
        sinks = {name: x for name, x in arrays.items() if name == "sinks"}
        out, vjp = jax.vjp(call, q, k, v, sinks)
        return out, vjp(jnp.cos(out))

    places = {name: option_axes[name] for name in arrays}
    found = jax.jit(jax.vmap(one, in_axes=(*axes, places)))(q, k, v, arrays)
    take = lambda x, axis, i: x if axis is None else np.take(x, i, axis)
    for i in range(3):
        own = {name: take(x, places[name], i) for name, x in arrays.items()}
        expected = one(*(take(x, axis, i) for x, axis in zip((q, k, v), axes)), own)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], found), expected)


# --- derivatives ------------------------------------------------------------------------------------------------------


def test_only_gradients_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    gradients = flashkit.api.Vjp.gradients

    def spied(self: Any, dout: Any, dlse: Any, wrt: Any) -> Any:
        asked.append((wrt, dlse is not None))
        return gradients(self, dout, dlse, wrt)

    monkeypatch.setattr(flashkit.api.Vjp, "gradients", spied)
    q, k, v = tensors()
    jax.block_until_ready(jax.grad(lambda k: attention(q, k, v).sum())(k))
    jax.block_until_ready(jax.grad(lambda v: attention(q, k, v, return_lse=True)[0].sum())(v))
    assert asked == [(("k",), False), (("v",), False)]


@pytest.mark.parametrize("vmapped", [False, True])
def test_biases_masks_and_slopes_are_learned(vmapped: bool) -> None:
    """Under jit, as jax.nn has them; and under vmap, shared by the entries or not."""
    q, k, v = tensors()
    bias, mask, slopes = normal(1, 4, 20, 28), normal(20, 28), np.abs(normal(4))
    distance = np.abs(np.arange(20)[:, None] + 8 - np.arange(28))

    def ours(q: Any, bias: Any, mask: Any, slopes: Any) -> Any:
        return attention(q, k, v, bias=bias, mask=mask, alibi_slopes=slopes)

    def plain(q: Any, bias: Any, mask: Any, slopes: Any) -> Any:
        added = bias + mask - slopes[:, None, None] * distance
        s = jnp.einsum("bhqd,bhkd->bhqk", q, jnp.repeat(k, q.shape[1] // k.shape[1], 1)) * q.shape[-1] ** -0.5 + added
        return jax.nn.softmax(s, -1) @ jnp.repeat(v, q.shape[1] // v.shape[1], 1)

    def gradients(function: Any) -> Any:
        arguments = (q, bias, mask, slopes)
        if vmapped:
            function = jax.vmap(function, (0, 0, None, None))
            arguments = (jnp.stack([q, 2 * q]), jnp.stack([bias, -bias]), mask, slopes)
        return jax.jit(jax.grad(lambda *x: (function(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))(*arguments)

    for got, wanted in zip(gradients(ours), gradients(plain), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5 * np.abs(wanted).max() + 1e-5)


def _plain(q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    """Causal attention with sinks by operations of JAX."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    n_q, n_k = q.shape[2], k.shape[2]
    seen = jnp.arange(n_k) <= jnp.arange(n_q)[:, None] + n_k - n_q
    s = jnp.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], -1)
    return jax.nn.softmax(s, -1)[..., :-1] @ v, jax.nn.logsumexp(s, -1)


def test_forward_mode_and_second_derivatives() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        shapes = (2, 4, 12, 6), (2, 2, 14, 6), (2, 2, 14, 5), (4,)
        x, along, more = (tuple(jnp.asarray(rng.standard_normal(shape)) for shape in shapes) for _ in range(3))
        weights = [jnp.asarray(rng.standard_normal(shape)) for shape in ((2, 4, 12, 5), (2, 4, 12))]

        def own(*x: Any) -> Any:
            return attention(*x[:3], sinks=x[3], causal=True, return_lse=True)

        def loss(f: Any) -> Any:
            return lambda *x: sum((jnp.sin(y) * w).sum() for y, w in zip(f(*x), weights, strict=True))

        def of_tensors(f: Any) -> Any:  # sinks have first derivatives
            return lambda *t: f(*t, x[3])

        def gradient(f: Any) -> Any:
            return jax.grad(of_tensors(loss(f)), (0, 1, 2))

        derivatives: dict[str, Any] = {
            "jvp of jit": lambda f: jax.jvp(jax.jit(f), x, along),
            "jvp of grad": lambda f: jax.jvp(gradient(f), x[:3], along[:3]),
            "jit of vjp of grad": lambda f: jax.jit(lambda *t: jax.vjp(gradient(f), *t)[1](tuple(along[:3])))(*x[:3]),
            "grad of jvp": lambda f: jax.grad(lambda *t: loss(lambda *t: jax.jvp(of_tensors(f), t, along[:3])[1])(*t), (
                0, 1, 2))(*x[:3]),
            "vmap of jvp": lambda f: jax.vmap(lambda q: jax.jvp(lambda q: f(q, *x[1:]), (q,), (along[0],)))(
                jnp.stack([x[0], more[0]])),
            "jvp of vmap": lambda f: jax.jvp(jax.vmap(lambda q: f(q, *x[1:])), (jnp.stack([x[0], more[0]]),), (
                jnp.stack([along[0], more[0]]),)),
        }  # fmt: skip
        for name, derivative in derivatives.items():
            found, expected = map(jax.tree.leaves, (derivative(own), derivative(_plain)))
            for got, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(got, right, atol=1e-10, err_msg=name)
        for function, message in (
            (lambda q: jax.jvp(lambda q: jax.jvp(lambda q: own(q, *x[1:]), (q,), along[:1])[1], (q,), along[:1]), "fo"),
            (lambda q: jax.grad(lambda s: gradient(lambda *t: own(*t[:3], s))(*x[:3])[0].sum())(x[3]), "by sinks"),
            (
                lambda q: jax.jvp(
                    lambda q: jax.jvp(jax.grad(lambda q: loss(own)(q, *x[1:])), (q,), along[:1])[1], (q,), along[:1]
                ),
                "derivative of",
            ),
        ):
            with pytest.raises(flashkit.UnsupportedError, match=message):
                function(x[0])


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_gradients_over_a_mesh(check_vma: bool) -> None:
    """Under `jax.shard_map`; that of what is equal on all devices is the sum of theirs."""
    mesh = jax.make_mesh((1, 1), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    every, of_heads, shared = (jax.sharding.PartitionSpec(*x) for x in (("batch", "heads"), ("heads",), ()))
    q, k, v = tensors()
    arrays = (q, k, v[:1], np.abs(normal(4)), normal(1, 20, 28))

    def local(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        v = jnp.broadcast_to(v, k.shape)
        out, lse = attention(q, k, v, sinks=sinks, bias=bias, causal=True, return_lse=True)
        return jax.lax.psum((out**2).sum() + lse.sum(), ("batch", "heads"))

    specs = every, every, jax.sharding.PartitionSpec(None, "heads"), of_heads, shared
    spread = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=shared, check_vma=check_vma)
    whole = jax.shard_map(local, mesh=mesh, in_specs=(shared,) * 5, out_specs=shared, check_vma=check_vma)

    def plain(*arrays: Any) -> Any:
        q, k, v, sinks, bias = arrays
        out, lse = attention(q, k, jnp.broadcast_to(v, k.shape), sinks=sinks, bias=bias, causal=True, return_lse=True)
        return (out**2).sum() + lse.sum()

    expected, *found = (jax.jit(jax.grad(function, (0, 1, 2, 3, 4)))(*arrays) for function in (plain, spread, whole))
    for gradients in found:
        near(gradients, expected, atol=1e-5)


def test_rematerialisation_and_scan() -> None:
    q, k, v = tensors((4,), 8, 8, kv=4)

    def loss(q: Any) -> Any:
        layer = jax.checkpoint(lambda q: attention(q, k, v, causal=True))
        return jax.lax.scan(lambda q, _: (layer(q), None), q, None, length=3)[0].sum()

    def plain(q: Any) -> Any:
        for _ in range(3):
            q = attention(q, k, v, causal=True)
        return q.sum()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(q), jax.grad(plain)(q), rtol=1e-5, atol=1e-7)


# --- jax.nn's signature -----------------------------------------------------------------------------------------------

DOT_PRODUCT: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True, "scale": 0.3}, "bias": {"bias": normal(1, 4, 20, 28)},
    "mask": {"mask": RNG.random((2, 1, 20, 28)) < 0.8},
    "lengths": {"query_seq_lengths": np.int32([9, 20]), "key_value_seq_lengths": np.int32([17, 28]), "is_causal": True},
    "window": {"local_window_size": (3, 2)}, "one window": {"local_window_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("name", DOT_PRODUCT)
@pytest.mark.one_in(3)
def test_the_arguments_of_jax_nn(name: str) -> None:
    query, key, value = (x.swapaxes(1, 2) for x in tensors())
    options = DOT_PRODUCT[name]
    weight = np.linspace(0.5, 1, 20, dtype=np.float32)[None, :, None, None] * np.ones(query.shape, np.float32)

    def both(call: Any) -> Any:
        def passes(*x: Any) -> Any:
            (out, residual), vjp = jax.vjp(lambda *x: call(*x, return_residual=True, **options), *x)
            return out, residual, vjp((weight, 0 * residual))

        return jax.jit(passes)(query, key, value)

    found, expected = map(both, (dot_product_attention, jax.nn.dot_product_attention))
    rows = slice(None)
    if "query_seq_lengths" in options:  # the residuals of rows past the length differ
        rows = np.arange(20) < options["query_seq_lengths"][:, None]
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6)
    np.testing.assert_allclose(found[1][rows], expected[1][rows], atol=2e-6)
    near(found[2], expected[2], atol=5e-6)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"scale": "x"}, TypeError, "scale: expected .* got 'x'"),
        ({"bias": np.ones((3, 3), np.float32)}, ValueError, "bias: expected .*shape"),
        ({"kv_lengths": np.ones(3, int)}, ValueError, "kv_lengths: expected .*shape"),
        ({"kv_lengths": np.ones(2, int), "causal": True}, ValueError, "q_offset"),
        ({"kv_lengths": np.ones(2, int), "score_mod": lambda s, b, h, q, k: s + q}, ValueError, "q_offset"),
        ({"dropout_p": 0.5}, ValueError, "seed: expected an integer beside dropout_p"),
        ({"dropout_p": 0.5, "seed": np.ones(2, int)}, TypeError, "seed"),
        ({"sinks": np.ones(3, np.float32)}, ValueError, "sinks: expected .*shape"),
        ({"layout": "nope"}, ValueError, "layout"),
        ({"window": 3}, TypeError, "window"),
        ({"mask_mod": 3}, TypeError, "mask_mod"),
    ],
)
def test_errors_come_where_the_call_is_written(options: dict[str, Any], error: type[Exception], match: str) -> None:
    q, k, v = tensors()
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda q: attention(q, k, v, **options), q)


def test_errors_of_values_have_their_message() -> None:
    q, k, v = tensors()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"kv_lengths: expected .* got values from 1 to 29"):
        jax.block_until_ready(attention(q, k, v, kv_lengths=np.array([1, 29])))
    np.testing.assert_array_equal(attention(q, k, v), flashkit.attention(q, k, v))  # the next call is as right as ever


def test_programs_are_compiled_once() -> None:
    """Equal options are equal keys of JAX's cache, functions by identity."""
    from flashkit import jax as module

    q, k, v = tensors()
    module._attend.clear_cache()
    mask = mods.causal()
    for _ in range(3):
        attention(q, k, v, window=(3, 0), scale=0.5, mask_mod=mask, kv_lengths=np.array([4, 5]), q_offset=0)
    assert module._attend._cache_size() == 1
