"""What a newcomer writes by mistake is met with the argument that was meant, and silent misreadings with a warning."""

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit import attention, attention_vjp, errors, mods
from flashkit.options import Options

ENTRIES = [attention, attention_vjp, flashkit.plan, flashkit.explain]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("attn_mask", "did you mean mask?"), ("is_causal", "did you mean causal?"),
        ("key_padding_mask", "did you mean mask=~key_padding_mask[:, None, None, :]?"),
        ("softmax_scale", "did you mean scale?"), ("casual", "did you mean causal?"),
        ("Layout", "did you mean layout?"), ("zzz", "kv_lengths"),
    ],
)  # fmt: skip
def test_unknown_arguments_name_the_one_that_was_meant(entry: Any, name: str, meant: str) -> None:
    q = zeros(2, 2, 4, 8)
    with pytest.raises(TypeError, match="unexpected argument") as caught:
        entry(q, q, q, **{name: None})
    assert repr(name) in str(caught.value) and meant in str(caught.value)


def test_options_are_the_arguments_of_attention() -> None:
    known = [name for name in inspect.signature(attention).parameters if name not in ("q", "k", "v")]
    assert sorted(known) == sorted([*Options.__annotations__, "return_lse", "return_stats", "out", "backend"])


def test_errors_say_when_the_other_layout_fits() -> None:
    q, k, v = zeros(2, 50, 8, 16), zeros(2, 60, 2, 16), zeros(2, 60, 2, 16)
    with pytest.raises(ValueError, match=r"did you mean layout='bnhd'\?"):
        attention(q, k, v)
    assert attention(q, k, v, layout="bnhd").shape == q.shape
    with pytest.raises(ValueError, match=r"did you mean layout='bhnd'\?"):
        attention(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bnhd")
    with pytest.raises(ValueError, match="k: expected batch axes") as caught:  # neither fits
        attention(q, k[:1], v)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("q", "k", "layout", "exchanged"),
    [
        ((2, 1000, 8, 16), (2, 1000, 8, 16), "bhnd", True),  # 1000 heads
        ((2, 64, 8, 16), (2, 64, 2, 16), "bhnd", True),  # 8 query heads on 2, as tokens
        ((2, 8, 1000, 16), (2, 8, 1000, 16), "bnhd", True),
        ((2, 64, 8, 16), (2, 64, 8, 16), "bhnd", False),  # could be a short prompt of a large model
        ((2, 1000, 8, 16), (2, 1000, 8, 16), "bnhd", False),
        ((1, 32, 1, 16), (1, 8, 4, 16), "bhnd", False),  # decoding begins
        ((2, 8, 1000, 16), (2, 8, 1000, 16), "bhnd", False),
        ((2, 8, 4, 16), (2, 8, 4, 16), "bhnd", False),
        ((600, 16, 16), (600, 16, 16), "bhnd", False),  # batch and heads as one axis
    ],
)
def test_axes_that_look_exchanged(q: Any, k: Any, layout: Any, exchanged: bool) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        flashkit.explain(zeros(*q), zeros(*k), zeros(*k), layout=layout)
    assert [w.filename for w in caught] == [__file__] * exchanged  # the caller's line
    other = "bnhd" if layout == "bhnd" else "bhnd"
    assert all("q has 1000 heads of 8" in str(w.message) or "q has 64 heads of 8" in str(w.message) for w in caught)
    assert all(f"layout={other!r} reads 8 heads of" in str(w.message) for w in caught)


def test_a_mask_of_keys_where_pairs_are_meant() -> None:
    q = zeros(5, 2, 5, 8)
    k = v = zeros(5, 2, 7, 8)
    keys = np.ones((5, 7), bool)
    with pytest.warns(UserWarning, match=r"read as \(Nq, Nk\).*mask\[:, None, None, :\]"):
        attention(q, k, v, mask=keys)
    with warnings.catch_warnings(action="error"):
        attention(q, k, v, mask=keys[:, None, None, :])
        attention(q, k, v, mask=keys[None, None])
        attention(q[:1], k[:1], v[:1], mask=keys)
    with pytest.raises(ValueError, match=r"mask\[:, None, None, :\] is one of the keys of each batch entry"):
        attention(q[:, :, :3], k, v, mask=keys)


def test_a_planned_call_says_what_it_computes() -> None:
    q = zeros(2, 4, 5, 8)
    text = repr(flashkit.plan(q, q, q, causal=True, return_lse=True, backend="reference"))
    for word in ("float32", "batch 2, heads 4, queries 5", "mask", "reference", "returns (out, lse)"):
        assert word in text


def test_modules_list_their_public_names() -> None:
    assert dir(flashkit) == sorted(flashkit.__all__)
    assert dir(mods) == sorted(mods.__all__)
    assert all(hasattr(module, name) for module in (flashkit, mods) for name in dir(module))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_prefixes_of_batch_entries(backend: str) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2, 40, 8), dtype=np.float32)
    out = attention(q, k, v, mask_mod=mods.prefix_lm([20, 30]), backend=backend)
    for b, n in enumerate((20, 30)):
        np.testing.assert_array_equal(out[b], attention(q[b], k[b], v[b], mask_mod=mods.prefix_lm(n), backend=backend))
    with pytest.raises(ValueError, match="axis 0 of n"):
        attention(q, k, v, mask_mod=mods.prefix_lm([20]))
    for n, error, words in (
        (2.5, TypeError, "2.5"), ("two", TypeError, "'two'"), ([[1]], ValueError, r"\(1, 1\)"),
        ([1, [2]], TypeError, "different lengths"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            mods.prefix_lm(n)


TYPED = """
from typing import Any
import numpy as np
import flashkit
def call(q: np.ndarray[Any, np.dtype[np.float32]], chosen: bool) -> None:
    reveal_type(flashkit.attention(q, q, q, causal=True).dtype)
    reveal_type(flashkit.attention(q, q, q, return_lse=True)[0].dtype)
    reveal_type(flashkit.attention(q, q, q, return_lse=chosen))
    (out, lse), vjp = flashkit.attention_vjp(q, q, q, return_lse=True)
    reveal_type(vjp(out)[0].dtype)
    reveal_type(flashkit.explain(q, q, q))
    cache = flashkit.KVCache(1, 2, 16, pages=4)
    reveal_type(cache.attend(q, causal=True).dtype)
    reveal_type(cache.attend(q, return_lse=True)[1].dtype)
    flashkit.attention(q, q, q, layout="hbnd")
    flashkit.plan(q, q, q, attn_mask=None)
"""


@pytest.mark.slow  # mypy starts
def test_results_are_typed(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    root = Path(flashkit.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(root / ".mypy_cache"), str(tmp_path / "typed.py")],
        capture_output=True, text=True, check=False, cwd=root,
    )  # fmt: skip
    said = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    kinds = [line.rpartition("type is ")[2].strip('"') for line in said if "Revealed type" in line]
    assert len(kinds) == 7
    assert all("dtype[" in kinds[i] and "32Bit" in kinds[i] for i in (0, 1, 3, 5, 6))
    assert "| tuple[" in kinds[2] and kinds[4] == "flashkit.call.explanation.Explanation"
    wrong = [line for line in said if line.startswith("error")]
    assert len(wrong) == 2 and "No overload" in wrong[0] and '"attn_mask"' in wrong[1]


def test_a_warning_is_given_once_of_each_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    said = ("a",), ("a",), ("b", "x"), ("c", "x"), ("c",)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for each in said:
            errors.warn_once(*each)
        errors.forget_warnings()
        errors.warn_once("a", category=FutureWarning)
    found = [(str(w.message), w.category) for w in caught]
    assert found == [("a", UserWarning), ("b", UserWarning), ("c", UserWarning), ("a", FutureWarning)]
    assert {w.filename for w in caught} == {__file__}


# --- of the adapters --------------------------------------------------------------------------------------------------


def adapters() -> dict[str, tuple[Any, Any]]:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    da = pytest.importorskip("dask.array")
    import flashkit.dask
    import flashkit.jax
    import flashkit.torch

    x = zeros(1, 2, 8, 16)
    return {function.__name__: (function, x) for function in ENTRIES} | {
        "torch": (flashkit.torch.attention, torch.tensor(x)),
        "jax": (flashkit.jax.attention, jax.numpy.asarray(x)),
        "dask": (flashkit.dask.attention, da.from_array(x)),
    }


@pytest.mark.parametrize("name", [*[function.__name__ for function in ENTRIES], "torch", "jax", "dask"])
def test_tensors_by_other_names_and_a_mask_by_position(name: str) -> None:
    entry, x = adapters()[name]
    with pytest.raises(TypeError, match=r"unexpected argument 'query': did you mean q\?"):
        entry(query=x, key=x, value=x)
    with pytest.raises(TypeError, match="by position: pass others by name, such as mask="):
        entry(x, x, x, x[..., :8] > 0)
    with pytest.raises(TypeError, match=r"expected q, k and v|v: expected an array|v: expected a torch"):
        entry(x, x)
    with pytest.raises(TypeError, match="causal: expected"):  # an error from within stays what it is
        entry(x, x, x, causal="yes")
    first, second, third, *_ = inspect.signature(entry).parameters.values()
    assert (first.name, second.name, third.name) == ("q", "k", "v") and third.default is third.empty


def test_weights_have_two_tensors_and_tangents_may_follow_three() -> None:
    x = zeros(1, 2, 8, 16)
    with pytest.raises(TypeError, match=r"unexpected argument 'query': did you mean q\?"):
        flashkit.weights(query=x, key=x)
    with pytest.raises(TypeError, match=r"weights\(\) takes q and k by position"):
        flashkit.weights(x, x, x)
    with pytest.raises(TypeError, match=r"unexpected argument 'value': did you mean v\?"):
        flashkit.attention_jvp(x, x, value=x)
    assert flashkit.attention_jvp(x, x, x, x)[1].shape == x.shape


def test_functions_with_arguments_of_other_libraries_say_what_they_call_it() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    import flashkit.jax
    import flashkit.torch

    x, y = torch.zeros(1, 2, 8, 16), jax.numpy.zeros((1, 8, 2, 16))
    for function, z, name, meant in (
        (flashkit.torch.scaled_dot_product_attention, x, "causal", r"did you mean is_causal\?"),
        (flashkit.torch.scaled_dot_product_attention, x, "mask", r"did you mean attn_mask\?"),
        (flashkit.torch.flex_attention, x, "scoremod", r"did you mean score_mod\?"),
        (flashkit.jax.dot_product_attention, y, "causal", r"did you mean is_causal\?"),
    ):
        with pytest.raises(TypeError, match=meant):
            function(z, z, z, **{name: True})
        assert "others" not in inspect.signature(function).parameters
    with pytest.raises(ValueError, match=r"expected one of cpu, .*got 'xla'") as caught:
        flashkit.jax.dot_product_attention(y, y, y, implementation="xla")
    assert len(str(caught.value)) < 200
    key = jax.random.key(1)
    q = jax.numpy.ones((1, 2, 8, 16))
    one, other = (flashkit.jax.attention(q, q, q, dropout_p=0.5, seed=s) for s in (key, jax.random.bits(key)))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(TypeError, match=r"seed: expected an integer, got a key .* jax\.random\.bits\(key\)"):
        attention(q, q, q, dropout_p=0.5, seed=key)
    with pytest.raises(TypeError, match="on a CPU or a CUDA device, got one on meta"):
        flashkit.torch.attention(*[x.to("meta")] * 3)


def test_caches_rotations_and_quantisation_take_tensors() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((2, 4, 6, 16), dtype=np.float32) for _ in range(3)]
    tensors = [torch.tensor(each) for each in x]
    results: list[Any] = []
    for q, k, v in (x, tensors):
        cache = flashkit.KVCache(2, 4, 16, pages=4, page=8, like=q)
        table = flashkit.rotary_table(32, 16, like=q)
        cache.append(k, v, rotary=table)
        out, lse = cache.attend(q, causal=True, rotary=table, return_lse=True)
        rotated, codes = flashkit.rotary(x=q), flashkit.quantize(q, "int8")
        assert {type(each) for each in (*table, out, lse, rotated)} == {type(q)}
        of_codes, vjp = flashkit.attention_vjp(q, flashkit.quantize(k, "int8"), flashkit.quantize(v, "int8"))
        gradients = vjp(of_codes)
        assert {type(each) for each in (of_codes, *gradients)} == {type(q)}
        results.append([*table, out, lse, rotated, flashkit.rotary_vjp(q), codes.data, of_codes, *gradients])
    for ours, theirs in zip(*results):
        np.testing.assert_array_equal(ours, np.asarray(theirs))
    into = torch.empty_like(tensors[0])
    assert flashkit.rotary(tensors[0], out=into) is into
    assert str(flashkit.KVCache(1, 2, 16, pages=2, like=torch.zeros(1, dtype=torch.bfloat16)).dtype) == "bfloat16"


def test_what_objects_say_of_themselves() -> None:
    cache = flashkit.KVCache(2, 4, 16, pages=4, page=8, layers=2)
    for layer in cache:
        layer.append(zeros(2, 4, 6, 16), zeros(2, 4, 6, 16))
    assert repr(cache) == "<KVCache: 12 tokens of 2 sequences, 2 layers, 2 of 4 pages of 8 free, float32>"
    assert repr(cache[1]) == "<Layer 1: k_pages (4, 8, 4, 16), v_pages (4, 8, 4, 16), float32>"
    q, k = zeros(1, 4, 6, 16), zeros(1, 2, 9, 16)
    _, vjp = attention_vjp(q, k, k)
    assert repr(vjp) == "<Vjp of attention: q (1, 4, 6, 16), k (1, 2, 9, 16) (batch, heads, tokens, dim), float32>"
    with pytest.raises(TypeError, match=r"pass x\.dequantize"):
        np.asarray(flashkit.quantize(q))


def test_the_formulas_are_for_arrays() -> None:
    from flashkit.reference import formulas

    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 8))
    visible = np.random.default_rng(1).random((6, 6)) < 0.5
    visible[2] = False
    visible[0] = True
    out, lse = formulas(q, k, v, visible, scale=0.3)
    expected = attention(q, k, v, mask=visible, scale=0.3, return_lse=True, backend="reference")
    np.testing.assert_allclose(out, expected[0], atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], atol=1e-12)
