"""Every argument with every kind of array and value: the right result, or an error that names the argument."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_numbers import Nameless

import flashkit
from flashkit import BlockMask, mods
from flashkit.call import compose

pytestmark = [
    pytest.mark.filterwarnings("error"), pytest.mark.filterwarnings("ignore:the matrix subclass"),
    pytest.mark.filterwarnings("ignore:The chararray class"),
]  # fmt: skip

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((1, 2, 9, 8)).astype(np.float32)


class Subclass(np.ndarray):
    pass


def variants(x: np.ndarray, folder: Path) -> Iterator[tuple[str, Any]]:
    """The same array in other forms and dtypes."""
    file = folder / "array.bin"
    file.write_bytes(np.ascontiguousarray(x).tobytes())
    read_only = x.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only
    yield "memory-mapped", np.memmap(file, x.dtype, "r", shape=x.shape)
    yield "subclass", x.view(Subclass)
    yield "list", x.tolist()
    yield "reversed", x[::-1].copy()[::-1]
    yield "byte-swapped", x.astype(x.dtype.newbyteorder())
    yield "masked", np.ma.masked_array(x, mask=np.ones(x.shape, bool))
    for name in ("object", "complex128", "longdouble", "U8", "S8", "V4", "M8[s]", "m8[s]"):
        yield name, np.zeros(x.shape, name)
    for name in ("float8_e4m3fn", "int4", "int2", "float4_e2m1fn"):
        yield name, x.astype(getattr(ml_dtypes, name))
    yield "structured", np.zeros(x.shape, [("a", "f4")])
    yield "records", np.zeros(x.shape, [("a", "f4")]).view(np.recarray)
    yield "characters", np.char.array(x.astype(str))
    if x.ndim <= 2:
        yield "matrix", np.matrix(x)


VALUES = {
    "None in an array": np.full(2, None), "ragged": [[1, 2], [3]], "text": "abc", "bytes": b"abc", "dict": {},
    "set": {1},
    "generator": iter([1]), "complex": 1j, "NaN": float("nan"), "infinity": float("inf"), "2^63": 2**63, "2^70": 2**70,
    "10^5000": 10**5000, "-10^5000": -(10**5000), "list of large": [10**5000], "class": int, "object": object(),
    "without text": Nameless(), "empty": (), "slice": slice(1), "Ellipsis": ..., "masked constant": np.ma.masked,
}  # fmt: skip

CALLS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "q": (Q, lambda x: flashkit.attention(x, Q, Q)),
    "k": (Q, lambda x: flashkit.attention(Q, x, Q)),
    "v": (Q, lambda x: flashkit.attention(Q, Q, x)),
    "out": (np.empty_like(Q), lambda x: flashkit.attention(Q, Q, Q, out=x)),
    "bias": (RNG.standard_normal((9, 9)).astype(np.float32), lambda x: flashkit.attention(Q, Q, Q, bias=x)),
    "mask": (RNG.random((9, 9)) > 0.3, lambda x: flashkit.attention(Q, Q, Q, mask=x)),
    "alibi_slopes": (np.array([0.5, 0.25]), lambda x: flashkit.attention(Q, Q, Q, alibi_slopes=x)),
    "sinks": (np.array([0.5, 0.25]), lambda x: flashkit.attention(Q, Q, Q, sinks=x)),
    "kv_lengths": (np.array([5]), lambda x: flashkit.attention(Q, Q, Q, kv_lengths=x)),
    "q_offset": (np.array([2]), lambda x: flashkit.attention(Q, Q, Q, q_offset=x, causal=True)),
    "table": (
        np.array([0.5, 0.25]),
        lambda x: flashkit.attention(
            Q, Q, Q, score_mod=mods.score(lambda s, b, h, q, k, *, table: s * table[h], table=x)
        ),
    ),
    "index": (
        np.arange(9) % 3,
        lambda x: flashkit.attention(Q, Q, Q, mask_mod=mods.mask(lambda b, h, q, k, *, index: index[k] < 2, index=x)),
    ),
    "ids": (np.arange(9) // 3, lambda x: flashkit.attention(Q, Q, Q, mask_mod=mods.document(x))),
    "grid": (np.tri(3, dtype=bool), lambda x: flashkit.attention(Q, Q, Q, block_mask=BlockMask.from_dense(x, 3, 3))),
    "dout": (Q, lambda x: flashkit.attention_vjp(Q, Q, Q)[1](x)[0]),
    "dlse": (np.ones((1, 2, 9), np.float32), lambda x: flashkit.attention_vjp(Q, Q, Q)[1](Q, x)[0]),
    "window": (None, lambda x: flashkit.attention(Q, Q, Q, window=x)),
    "causal": (None, lambda x: flashkit.attention(Q, Q, Q, causal=x)),
    "layout": (None, lambda x: flashkit.attention(Q, Q, Q, layout=x)),
    "precision": (None, lambda x: flashkit.attention(Q, Q, Q, precision=x)),
    "backend": (None, lambda x: flashkit.attention(Q, Q, Q, backend=x)),
    "deterministic": (None, lambda x: flashkit.attention(Q, Q, Q, deterministic=x)),
    "block_mask": (None, lambda x: flashkit.attention(Q, Q, Q, block_mask=x)),
    "score_mod": (None, lambda x: flashkit.attention(Q, Q, Q, score_mod=x)),
    "mask_mod": (None, lambda x: flashkit.attention(Q, Q, Q, mask_mod=x)),
    "modification": (None, lambda x: flashkit.attention(Q, Q, Q, score_mod=lambda s, b, h, q, k: s * x)),
    "param": (
        None,
        lambda x: flashkit.attention(Q, Q, Q, score_mod=mods.score(lambda s, b, h, q, k, *, param: s * param, param=x)),
    ),
    "wrt": (None, lambda x: flashkit.attention_vjp(Q, Q, Q)[1](Q, wrt=x)),
}

NAMED = {"grid": "(grid|block_mask)", "table": "(table|Expr)", "index": "(index|Expr)",
         "modification": "(modification|traced|mod)", "block_mask": "block_mask", "param": "(param|mod)"}  # fmt: skip
"""What an error says instead of the argument's name."""

ANY = {
    "wrt": {"empty", "dict"}, "modification": {"NaN", "infinity", "2^63", "2^70"}, "param": {"NaN", "infinity"},
    "table": set(),
}  # fmt: skip
"""Values that an argument takes."""


def check(argument: str, case: str, value: Any, right: np.ndarray | None) -> None:
    import re

    try:
        result = CALLS[argument][1](value)
    except (TypeError, ValueError) as error:
        text = str(error)
        assert re.search(NAMED.get(argument, argument), text), (argument, case, text)
        assert 20 < len(text) < 900 and "Exceeds the limit" not in text and "ufunc" not in text, (argument, case, text)
        return
    assert right is not None or case in ANY.get(argument, ()), (argument, case, "is taken")
    if right is not None:
        np.testing.assert_array_equal(np.asarray(result), right, err_msg=f"{argument}, {case}")


@pytest.mark.parametrize("argument", [name for name, (good, _) in CALLS.items() if good is not None])
@pytest.mark.one_in(2)
def test_other_forms_of_an_array(argument: str, tmp_path: Path) -> None:
    good, call = CALLS[argument]
    right = np.array(call(good))
    for case, value in variants(good, tmp_path):
        check(argument, case, value, right)


@pytest.mark.parametrize("argument", CALLS)
def test_other_values(argument: str) -> None:
    for case, value in VALUES.items():
        check(argument, case, value, None)


def terms(count: int) -> Any:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(count):
            s = s + flashkit.sin(s * (i + 0.5))
        return s

    return score


def test_a_modification_of_many_terms_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ValueError, match=r"expected at most 1000 different operations.*got [0-9]{4,}") as caught:
        flashkit.attention(Q, Q, Q, score_mod=terms(2000))
    assert "got 8002" in str(caught.value)


def test_the_limit_is_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "MAX_NODES", 12)
    compose._compose_graphs.cache_clear()
    flashkit.attention(Q, Q, Q, score_mod=terms(1))
    with pytest.raises(ValueError, match="at most 12"):
        flashkit.attention(Q, Q, Q, score_mod=terms(1), softcap=5.0, causal=True, window=(2, 2))
    compose._compose_graphs.cache_clear()
