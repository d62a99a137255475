"""flashkit.onnx: ONNX's own reference evaluator computes the same outputs of the operator."""

from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit.onnx import attention

RNG = np.random.default_rng(0)
B, HEADS, KV, N_Q, N_K, D, DV = 2, 4, 2, 6, 9, 8, 5
INPUTS = "Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def floating(array: np.ndarray) -> np.ndarray:
    return np.where(array, 0.5, -np.inf)


VISIBLE = RNG.random((B, HEADS, N_Q, N_K)) < 0.6
VISIBLE[0, 1, 2] = False  # a row without a key
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.75**2, "softcap": 1.5},  # whose root is a float32, which the evaluator computes in
    "causal": {"is_causal": 1},
    "bool mask": {"attn_mask": VISIBLE},
    "floating mask": {"attn_mask": floating(VISIBLE), "softcap": 2.0, "is_causal": 1},
    "mask of rows": {"attn_mask": VISIBLE[0, 0]},
    "mask of heads": {"attn_mask": VISIBLE[0]},
    "mask of keys": {"attn_mask": VISIBLE[0, 0, 0]},
    "short mask": {"attn_mask": VISIBLE[..., :7]},
    "short floating mask": {"attn_mask": floating(VISIBLE[:, :1, :, :7]), "is_causal": 1},
    "past": {"past_key": normal(B, KV, 3, D), "past_value": normal(B, KV, 3, DV), "is_causal": 1},
    "past and mask": {
        "past_key": normal(B, KV, 3, D), "past_value": normal(B, KV, 3, DV),
        "attn_mask": RNG.random((N_Q, N_K + 3)) < 0.7,
    },
    "lengths": {"nonpad_kv_seqlen": np.array([9, 4])},
    "causal lengths": {"nonpad_kv_seqlen": np.array([8, 4]), "is_causal": 1},
    "lengths and mask": {"nonpad_kv_seqlen": np.array([7, 4]), "attn_mask": VISIBLE[..., :7], "is_causal": 1},
    "no lengths": {"nonpad_kv_seqlen": np.array([0, 9])},
    "window": {"left_window_size": 2, "right_window_size": 1},
    "one side": {
        "left_window_size": 2, "is_causal": 1, "past_key": normal(B, KV, 3, D), "past_value": normal(B, KV, 3, DV),
    },
    "window of lengths": {"right_window_size": 0, "nonpad_kv_seqlen": np.array([8, 6])},
}  # fmt: skip


def tensors(axes: int = 4, dtype: str = "float64") -> tuple[list[np.ndarray], dict[str, int]]:
    q, k, v = normal(B, HEADS, N_Q, D), normal(B, KV, N_K, D), normal(B, KV, N_K, DV)
    if axes == 3:
        flat = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(B, x.shape[2], -1).astype(dtype) for x in (q, k, v)]
        return flat, {"q_num_heads": HEADS, "kv_num_heads": KV}
    return [x.astype(dtype) for x in (q, k, v)], {}


def reference(inputs: dict[str, np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
    """The outputs of a model of one node, by ONNX's reference evaluator."""
    onnx = pytest.importorskip("onnx", minversion="1.23")
    from onnx import helper, reference

    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
    values = [helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in inputs.items()]
    names = [name if name in inputs else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    outputs = ["Y", "present_key", "present_value", "qk_matmul_output"]
    node = helper.make_node("Attention", names, outputs, **attributes)
    graph = helper.make_graph(
        [node], "one", values, [helper.make_tensor_value_info(name, kinds["Q"], None) for name in outputs]
    )
    opset = 25 if "left_window_size" in attributes or "right_window_size" in attributes else 24
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    assert onnx.__version__
    return reference.ReferenceEvaluator(model).run(None, inputs)


def compare(inputs: dict[str, np.ndarray], attributes: dict[str, Any], rtol: float = 1e-12) -> None:
    found, expected = attention(**inputs, **attributes), reference(inputs, attributes)
    if attributes["qk_matmul_output_mode"] == 0:  # "the output of qk matmul", which the evaluator gives with softcap
        expected[3] = reference(inputs, attributes | {"softcap": 0.0})[3]
    for name, got, wanted in zip(found._fields, found, expected, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), name
        np.testing.assert_allclose(got.astype("float64"), wanted.astype("float64"), rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.one_in(2)
def test_every_case(name: str, axes: int) -> None:
    (q, k, v), heads = tensors(axes)
    given = {"Q": q, "K": k, "V": v, **{n: x for n, x in CASES[name].items() if n in INPUTS}}
    attributes = {n: x for n, x in CASES[name].items() if n not in INPUTS} | heads
    compare(given, attributes | {"qk_matmul_output_mode": 3})
    if axes == 4:
        for mode in (0, 1, 2):
            compare(given, attributes | {"qk_matmul_output_mode": mode})


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("precision", [None, 1, 11])
def test_dtypes_and_precisions(dtype: str, rtol: float, precision: int | None) -> None:
    (q, k, v), heads = tensors(3, dtype)
    attributes = heads | {"is_causal": 1, "qk_matmul_output_mode": 3}
    if precision:
        attributes["softmax_precision"] = precision
    compare({"Q": q, "K": k, "V": v, "attn_mask": normal(N_Q, N_K).astype(dtype)}, attributes, rtol)


def test_double_precision_is_used() -> None:
    (q, k, v), _ = tensors(dtype="float32")
    plain, double = (attention(q, k, v, softmax_precision=precision).Y for precision in (None, 11))
    exact = flashkit.attention(*(x.astype("float64") for x in (q, k, v)), q_offset=0).astype("float32")
    np.testing.assert_array_equal(double, exact)
    assert not np.array_equal(plain, exact)


def test_scores_are_computed_on_request_only() -> None:
    (q, k, v), _ = tensors()
    outputs = attention(q, k, v)
    assert outputs.qk_matmul_output is None
    assert np.shares_memory(outputs.present_key, k) and np.shares_memory(outputs.present_value, v)


def test_rows_without_keys_are_zero_whatever_is_masked() -> None:
    (q, k, v), _ = tensors()
    k[1, :, 4:], v[1, :, 4:] = np.nan, np.inf
    outputs = attention(q, k, v, nonpad_kv_seqlen=np.array([0, 4]), qk_matmul_output_mode=3)
    assert not outputs.Y[0].any() and not outputs.qk_matmul_output[0].any()
    assert np.isfinite(outputs.Y).all() and np.isfinite(outputs.qk_matmul_output).all()


def test_a_model_of_onnx_runs_on_it() -> None:
    """As docs/onnx.md shows; positions of inputs and names of attributes are those of a node."""
    onnx = pytest.importorskip("onnx", minversion="1.23")
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class Attention(OpRun):
        def _run(self, *inputs: Any, **attributes: Any) -> Any:
            return attention(*inputs, **attributes)

    text = """<ir_version: 10, opset_import: ["": 23]>
        model (float[2, 6, 32] x) => (float[2, 6, 32] y) {
            y = Attention<q_num_heads = 4, kv_num_heads = 4, is_causal = 1>(x, x, x)
        }"""
    model = onnx.parser.parse_model(text)
    x = normal(2, 6, 32).astype("float32")
    found, expected = (ReferenceEvaluator(model, new_ops=ops).run(None, {"x": x})[0] for ops in ([Attention], None))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "attributes", "error", "match"),
    [
        ({"Q": [1.0]}, {}, TypeError, "Q: expected .* got a builtins.list"),
        ({"Q": normal(2, 3)}, {}, ValueError, "Q: expected three or four axes"),
        ({"V": normal(2, 9, 16)}, {}, ValueError, "V: .*as many as Q"),
        ({}, {"q_num_heads": 3}, ValueError, "q_num_heads: .* got 3"),
        ({"past_key": normal(2, 2, 3, 8)}, {}, ValueError, "past_key and past_value"),
        ({"past_key": normal(2, 2, 3, 7), "past_value": normal(2, 2, 3, 5)}, {}, ValueError, "past_key: .* shape"),
        ({"past_key": normal(2, 2, 3, 8), "past_value": normal(2, 2, 3, 5), "nonpad_kv_seqlen": np.array([1, 2])}, {},
         ValueError, "expected nonpad_kv_seqlen.*not both"),
        ({"attn_mask": np.ones((6, 10), bool)}, {}, ValueError, "attn_mask: .*up to 9"),
        ({"attn_mask": np.ones((5, 9), bool)}, {}, ValueError, "mask: expected .*shape"),
        ({"nonpad_kv_seqlen": np.array([1, 10])}, {}, ValueError, "kv_lengths: expected .* got values"),
        ({"nonpad_kv_seqlen": [1.5, 2]}, {}, TypeError, "nonpad_kv_seqlen: expected integers"),
        ({}, {"softmax_precision": 7}, ValueError, "softmax_precision: .* got 7"),
        ({}, {"qk_matmul_output_mode": 4}, ValueError, "qk_matmul_output_mode"),
        ({}, {"left_window_size": -2}, ValueError, "window"),
        ({}, {"softcap": -1.0}, ValueError, "softcap"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_nodes(inputs: Any, attributes: Any, error: type[Exception], match: str) -> None:
    given = dict(zip("QKV", tensors()[0])) | inputs
    with pytest.raises(error, match=match):
        attention(**given, **attributes)


@pytest.mark.parametrize("lengths", [[2, 9], np.array([2, 9], np.uint8)], ids=["list", "unsigned"])
def test_fewer_keys_than_queries_as_any_integers(lengths: Any) -> None:
    given = dict(zip("QKV", tensors()[0]))
    right = attention(**given, is_causal=1, nonpad_kv_seqlen=np.array([2, 9]))
    np.testing.assert_array_equal(attention(**given, is_causal=1, nonpad_kv_seqlen=lengths).Y, right.Y)


def test_three_axes_need_heads() -> None:
    (q, k, v), _ = tensors(3)
    for heads in (None, 3, 0):
        with pytest.raises(ValueError, match="q_num_heads"):
            attention(q, k, v, q_num_heads=heads, kv_num_heads=2)
