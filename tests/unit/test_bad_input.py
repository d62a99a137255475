"""What does not fit is an error of the right type that names the argument, what came, and what would fit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import same

import flashkit
from flashkit import BlockMask, attention, attention_vjp, mods

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 8, 6


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def good() -> dict[str, Any]:
    return {"q": zeros(B, HQ, NQ, D), "k": zeros(B, HKV, NK, D), "v": zeros(B, HKV, NK, DV)}


def out_of_range(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any) -> Any:
    return s + table[k]


BHND = "layout='bhnd'"
"""A message about a shape says it too."""
Table = dict[type[Exception], list[tuple[dict[str, Any], tuple[str, ...]]]]
"""By error: arguments in place of the good ones, and words of the message: argument, what came, what would fit."""

TABLE: Table = {
    TypeError: [
        ({"q": [[0.0]]}, ("q", "list", "NumPy", "numpy.asarray")),
        ({"q": np.ma.masked_array(zeros(B, HQ, NQ, D))}, ("q", "MaskedArray", "filled")),
        ({"q": zeros(B, HQ, NQ, D, dtype=int)}, ("q", "int64", "float32", "bfloat16")),
        ({"q": zeros(B, HQ, NQ, D, dtype=complex)}, ("q", "complex128", "float32")),
        ({"q": zeros(B, HQ, NQ, D, dtype=np.longdouble)}, ("q", "float64", "float32")),
        ({"q": zeros(B, HQ, NQ, D, dtype=">f4")}, ("q", ">f4", "order", "newbyteorder")),
        ({"k": zeros(B, HKV, NK, D, dtype=float)}, ("k", "float64", "float32", "q's")),
        ({"v": zeros(B, HKV, NK, DV, dtype=np.float16)}, ("v", "float16", "float32")),
        ({"causal": np.ones((NQ, NK), bool)}, ("causal", "array", "True or False", "mask")),
        ({"window": 5}, ("window", "5", "(left, right)")),
        ({"window": (1, 2, 3)}, ("window", "(1, 2, 3)", "(left, right)")),
        ({"alibi_slopes": zeros(HQ, dtype=int)}, ("alibi_slopes", "int64", "floating")),
        ({"alibi_slopes": ["a"] * HQ}, ("alibi_slopes", "'a'", "floating")),
        ({"bias": zeros(NQ, NK, dtype=bool)}, ("bias", "bool", "floating")),
        ({"bias": 1.0}, ("bias", "float", "NumPy")),
        ({"mask": zeros(NQ, NK, dtype=int)}, ("mask", "int64", "bool", "floating")),
        ({"block_mask": zeros(1, 1, dtype=bool)}, ("block_mask", "ndarray", "BlockMask")),
        ({"score_mod": 3}, ("score_mod", "(s, b, h, q, k)", "int")),
        ({"score_mod": mods.causal()}, ("score_mod", "mask mod", "mods.score")),
        ({"mask_mod": mods.softcap(1.0)}, ("mask_mod", "score mod", "mods.mask")),
        ({"kv_lengths": [[1], [2, 3]]}, ("kv_lengths", "[[1], [2, 3]]", "integers")),
        ({"sinks": zeros(HQ, dtype=int)}, ("sinks", "int64", "floating")),
        ({"out": zeros(B, HQ, NQ, DV, dtype=float)}, ("out", "float64", "float32")),
        ({"out": zeros(B, HQ, NQ, DV, dtype=">f4")}, ("out", ">f4", "order")),
        ({"deterministic": "no"}, ("deterministic", "'no'", "True or False")),
    ],
    ValueError: [
        ({"q": zeros(D)}, ("q", "(8,)", "(..., heads, tokens, head_dim)", BHND)),
        ({"k": zeros(NK, D)}, ("k", "expected 4 axes", "got 2", "(7, 8)", BHND)),
        ({"k": zeros(3, HKV, NK, D)}, ("k", "batch axes (2,)", "got (3,)", BHND)),
        ({"k": zeros(B, HKV, NK, 9)}, ("k", "head dim 8", "got 9", BHND)),
        ({"q": zeros(B, HQ, NQ, 0)}, ("q", "got 0", "1 to 1024")),
        ({"v": zeros(B, HKV, NK, 1025)}, ("v", "got 1025", "1 to 1024", BHND)),
        ({"v": zeros(B, HKV, 8, DV)}, ("v", "7 tokens", "got 8", BHND)),
        ({"v": zeros(B, 1, NK, DV)}, ("v", "2 heads", "got 1", BHND)),
        ({"q": zeros(B, 3, NQ, D)}, ("q", "multiple of k's 2 heads", "got 3", BHND)),
        ({"layout": "nbhd"}, ("layout", "'nbhd'", "'bhnd'", "'bnhd'")),
        ({"softcap": 0}, ("softcap", "0", "above 0")),
        ({"q_offset": [1, 2, 3]}, ("q_offset", "(3,)", "(2,)")),
        ({"q_offset": 2**48 + 1}, ("q_offset", str(2**48 + 1), "2^48")),
        ({"alibi_slopes": zeros(3)}, ("alibi_slopes", "(3,)", "(4,)", "(2, 4)", BHND)),
        ({"bias": zeros(NQ, 6)}, ("bias", "(5, 6)", "(2, 4, 5, 7)", BHND)),
        ({"bias": zeros(1, 1, 1, 1, 1)}, ("bias: ", "(1, 1, 1, 1, 1)")),
        ({"mask": zeros(3, 1, NQ, NK, dtype=bool)}, ("mask", "(3, 1, 5, 7)", "(2, 4, 5, 7)", BHND)),
        (
            {"block_mask": BlockMask.from_mod(mods.causal(), NQ, 9)},
            ("block_mask", "5 queries and 7 keys", "5 and 9", BHND),
        ),
        (
            {"block_mask": BlockMask.from_dense(np.ones((3, 1, 1), bool), 8, 8, NQ, NK)},
            ("block_mask", "1 or 4 heads", "got 3", BHND),
        ),
        (
            {"block_mask": BlockMask.from_dense(np.ones((5, 1, 1, 1), bool), 8, 8, NQ, NK)},
            ("block_mask", "1 or 2 batch entries", "got 5"),
        ),
        (
            {"score_mod": mods.score(lambda s, b, h, q, k, *, table: s + table[q], table=zeros(NK - 1))},
            ("score_mod", "table", "(6,)", "2 to 6", "clip"),
        ),
        (
            {"score_mod": mods.score(lambda s, b, h, q, k, *, table: s + table[q], table=zeros(NK)), "q_offset": -1},
            ("score_mod", "table", "(7,)", "-1 to 3", "clip"),
        ),
        ({"score_mod": mods.score(out_of_range, table=zeros(6))}, ("score_mod", "table", "(6,)", "0 to 6", "clip")),
        ({"kv_lengths": [1, 2, 3]}, ("kv_lengths", "(3,)", "(2,)")),
        ({"kv_lengths": [1, 8]}, ("kv_lengths", "8", "0 to 7")),
        ({"mask_mod": mods.document(np.zeros(4, int), np.zeros(NK, int))}, ("mask_mod", "ids", "(4,)", "0 to 3")),
        ({"mask_mod": mods.document(np.zeros(NQ, int), np.zeros(NQ, int))}, ("mask_mod", "kv_ids", "(5,)", "0 to 4")),
        ({"dropout_p": 1.0}, ("dropout_p", "1.0", "below 1")),
        ({"dropout_p": -0.1}, ("dropout_p", "-0.1", "at least 0")),
        ({"seed": 2**64, "dropout_p": 0.5}, ("seed", str(2**64), str(2**64 - 1))),
        ({"sinks": zeros(HKV)}, ("sinks", "(2,)", "(4,)", BHND)),
        ({"out": zeros(B, HQ, NQ, D)}, ("out", "(2, 4, 5, 8)", "(2, 4, 5, 6)")),
        ({"out": np.broadcast_to(np.float32(0), (B, HQ, NQ, DV))}, ("out", "read-only", "writable")),
        ({"out": np.ndarray((B, HQ, NQ, DV), np.float32, zeros(DV), 0, (0, 0, 0, 4))}, ("out", "(0, 0, 0, 4)", "each")),
        ({"precision": "half"}, ("precision", "'half'", "'tf32'")),
        ({"backend": "tpu"}, ("backend", "'tpu'", "cpu", "reference")),
        *(
            (
                {name: value, "kv_lengths": [NK, 3]},
                (
                    "q_offset: ", "kv_lengths has 3", "5 queries",
                    name if name in ("causal", "window") else "functions of q", "pass 0", "kv_lengths - Nq",
                ),
            )
            for name, value in {
                "causal": True, "window": (2, 2), "alibi_slopes": np.ones(HQ, np.float32),
                "mask_mod": mods.prefix_lm(2), "score_mod": lambda s, b, h, q, k: s + (q == k),
            }.items()
        ),
    ],
}  # fmt: skip


def rows_of(table: Table) -> pytest.MarkDecorator:
    rows = [(error, *row) for error, rows in table.items() for row in rows]
    return pytest.mark.parametrize(("error", "arguments", "words"), rows, ids=[" ".join(words) for *_, words in rows])


def message(run: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        run()
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize("entry", [attention, attention_vjp, flashkit.explain], ids=lambda f: f.__name__)
@rows_of(TABLE)
def test_bad_input(error: type[Exception], arguments: dict[str, Any], words: tuple[str, ...], entry: Any) -> None:
    call = {**good(), **arguments}
    text = message(lambda: entry(call.pop("q"), call.pop("k"), call.pop("v"), **call), error)
    assert all(word in text for word in words), f"{text!r} lacks {[w for w in words if w not in text]}"
    assert len(text) < 500


def test_layout_bnhd_names_its_own_axes() -> None:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in good().values())
    assert attention(q, k, v, layout="bnhd").shape == (B, NQ, HQ, DV)
    text = message(lambda: attention(q[:, :, :3], k, v, layout="bnhd"), ValueError)
    assert "k's 2 heads" in text and "got 3" in text
    assert "(..., tokens, heads, head_dim)" in message(lambda: attention(q[0, 0, 0], k, v, layout="bnhd"), ValueError)


VJP: Table = {
    TypeError: [
        ({"dout": zeros(B, HQ, NQ, DV, dtype=float)}, ("dout", "float64", "float32")),
        ({"dout": 1.0}, ("dout", "float", "NumPy")),
        ({"dlse": zeros(B, HQ, NQ, dtype=float)}, ("dlse", "float64", "float32")),
    ],
    ValueError: [
        ({"dout": zeros(B, HQ, NQ, D)}, ("dout", "(2, 4, 5, 8)", "(2, 4, 5, 6)")),
        ({"dlse": zeros(B, HQ, NK)}, ("dlse", "(2, 4, 7)", "(2, 4, 5)")),
        ({"wrt": ("q", "bias")}, ("wrt", "'bias'", "'q', 'k', 'v'")),
        ({"wrt": ("sinks",)}, ("wrt", "'sinks'", "'q', 'k', 'v'")),
    ],
}


@rows_of(VJP)
def test_bad_input_of_the_gradient(error: type[Exception], arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    out, vjp = attention_vjp(**good())
    text = message(lambda: vjp(**{"dout": out, **arguments}), error)
    assert all(word in text for word in words), f"{text!r} lacks {[w for w in words if w not in text]}"


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_the_gradient_reads_its_inputs_again(name: str) -> None:
    """So a result that is written over one of them would give wrong gradients without a word."""
    call = {n: zeros(1, 2, 6, 6) for n in ("q", "k", "v", "bias")}
    memory = zeros(1, 2, 12, 6)
    first, last = memory[:, :, :6], memory[:, :, 5:11]  # one row in common
    for own, out in ((call[name], call[name]), (first, last), (last, first)):
        text = message(lambda own=own, out=out: attention_vjp(**{**call, name: own}, out=out), ValueError)
        assert f"out must not share memory with {name}" in text


def test_out_beside_an_input_in_one_buffer() -> None:
    """Interleaved, for instance in a fused buffer of q, k, v and out, is not shared."""
    buffer = np.random.default_rng(0).standard_normal((6, 2, 4, 8)).astype(np.float32).swapaxes(0, 1)  # tokens outside
    q, k, v, out = (buffer[:, :, i] for i in range(4))
    result, vjp = attention_vjp(q, k, v, out=out)
    assert result is out
    expected, vjp_expected = attention_vjp(*(x.copy() for x in (q, k, v)))
    np.testing.assert_array_equal(out, expected)
    same(vjp(out), vjp_expected(expected))


def test_windows_without_bound() -> None:
    """None is no bound, and so is a number that is too great for any position."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 9, 4)).astype(np.float32) for _ in range(3))
    for side in (2**31, 2**62, 2**63 - 1, 2**70):
        for window, alike in (((side, side), None), ((3, side), (3, None)), ((side, 0), (None, 0))):
            np.testing.assert_array_equal(attention(q, k, v, window=window), attention(q, k, v, window=alike))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "kv_lengths": [NQ, NK]},  # a query at the first key
        {"causal": True, "kv_lengths": [0, NK]},  # an entry without keys
        {"causal": True, "kv_lengths": [3, NK], "q_offset": 0},
        {"causal": True, "kv_lengths": [3, NK], "q_offset": [3 - NQ, NK - NQ]},
        {"kv_lengths": [3, NK]},  # nothing depends on positions
        {"kv_lengths": [3, NK], "mask_mod": lambda b, h, q, k: k > 0},
        {"kv_lengths": [3, NK], "block_mask": BlockMask.from_mod(mods.causal(), NQ, NK)},  # whose positions are fixed
    ],
    ids=["first key", "no keys", "0", "each its own", "no positions", "mask of keys", "block mask"],
)
def test_lengths_that_need_no_offset(options: dict[str, Any]) -> None:
    assert attention(**good(), **options).shape == (B, HQ, NQ, DV)
    one = good() | {"q": zeros(B, HQ, 1, D)}
    assert attention(**one, causal=True, kv_lengths=[1, NK]).shape == (B, HQ, 1, DV)
