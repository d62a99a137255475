"""Parts of the CPU backend, each alone: the edges of micro-kernels, every vector width, machine code, conversions."""

import ctypes
import re
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest

from flashkit.backends.cpu import target
from flashkit.backends.cpu.backend import CpuBackend
from flashkit.backends.cpu.micro import compile as micro
from flashkit.backends.cpu.micro import exponentials
from flashkit.backends.cpu.micro.register_block import RegisterBlock
from flashkit.backends.cpu.plan import CpuPlan
from flashkit.backends.cpu.target import Target
from flashkit.call.arguments import prepare
from flashkit.devices import profiles
from flashkit.devices.io_model import CpuTile
from flashkit.spec import Gradients

FLOATS = {"float": np.float32, "double": np.float64}
BLOCKS = [
    RegisterBlock("float", 6, 4, 16), RegisterBlock("float", 8, 3, 16), RegisterBlock("float", 12, 2, 16),
    RegisterBlock("float", 4, 3, 8), RegisterBlock("float", 6, 2, 8), RegisterBlock("float", 8, 3, 4),
    RegisterBlock("float", 1, 1, 4), RegisterBlock("double", 8, 3, 8), RegisterBlock("double", 4, 3, 4),
    RegisterBlock("double", 8, 3, 2),
]  # fmt: skip


def run(block: RegisterBlock, name: str, *arguments: int) -> None:
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(micro.addresses(block)[name])(*arguments)


def at(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def bits(x: float) -> int:
    return int(np.float64(x).view(np.int64))


def padded(rng: np.random.Generator, rows: int, columns: int, block: RegisterBlock) -> np.ndarray:
    """A tile whose rows are padded to whole vectors, as the kernels' are."""
    width = -(-columns // block.lanes) * block.lanes
    return rng.standard_normal((rows, width)).astype(FLOATS[block.element])


def online_softmax(block: RegisterBlock, s: np.ndarray, columns: int, m: np.ndarray, l: np.ndarray, o: Any) -> None:
    run(block, "online_softmax", at(s), s.strides[0], len(s), columns, at(m), at(l), at(o), o.strides[0], len(o))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_score_of_nan_is_no_maximum(block: RegisterBlock) -> None:
    """In any row, before and after greater scores; the sum has it."""
    s = padded(np.random.default_rng(5), 9, 16, block)
    s[0] += 20
    s[np.arange(9), np.arange(9)] = np.nan
    greatest = np.fmax.reduce(s, axis=0)
    m, l = np.full(s.shape[1], -np.inf, s.dtype), np.zeros(s.shape[1], s.dtype)
    online_softmax(block, s, 16, m, l, s[:0])
    assert np.array_equal(m, greatest) and np.isnan(l[:9]).all() and np.isfinite(l[9:16]).all()


def test_polynomials_have_the_errors_that_they_state() -> None:
    """Relative, on the reduced range; that of double precision is two units in the last place."""
    middle, above = np.linspace(-0.5, 0.5, 100_001), np.linspace(0, 1, 100_001)
    for coefficients, x, error in (
        (exponentials.EXP2_COEFFICIENTS["float"], middle, 3e-9),
        (exponentials.EXP2_COEFFICIENTS["double"], middle, 4.4e-16),
        (exponentials.EXP2_SHORT, middle, 1.02e-4),
        (exponentials.EXP2_SHORT_OF_FLOOR, above, 1.04e-4),
    ):
        assert np.abs(np.polyval(coefficients[::-1], x) / np.exp2(x) - 1).max() <= error


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_weights_at_the_edges(block: RegisterBlock) -> None:
    dtype = FLOATS[block.element]
    s = np.zeros((1, 16), dtype)
    least = {"float": -126, "double": -1022}[block.element] * np.log(2)
    s[0, :7] = [-np.inf, np.nan, 0, -1e30, least * 0.999, least * 1.001, -0.0]
    m, l = np.zeros(16, dtype), np.zeros(16, dtype)
    online_softmax(block, s, 16, m, l, s[:0])
    assert s[0, 0] == 0 and np.isnan(s[0, 1]) and s[0, 2] == 1 and s[0, 3] == 0 and s[0, 6] == 1
    assert s[0, 4] >= np.finfo(dtype).tiny and s[0, 5] == 0  # no denormals
    assert np.isnan(l[1]) and np.isfinite(np.delete(l, 1)).all()


@pytest.mark.parametrize("name", ["exp", "tanh"])
def test_functions_of_single_precision(name: str) -> None:
    """Within two units in the last place everywhere, denormals and infinities included."""
    from numba import njit

    from flashkit.backends.cpu import functions

    function = getattr(functions, name)

    @njit(error_model="numpy")
    def run(x, y):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            y[i] = function(x[i])

    edges = [0, np.inf, -np.inf, np.nan, 1e-30, -1e-38, 88.7, 88.73, -87.4, -103.9, -104.1, 1e-45, 1e30, -1e30]
    x = np.concatenate([np.linspace(-110, 95, 200_001), np.linspace(-1.5, 1.5, 100_001), edges]).astype(np.float32)
    y = np.empty_like(x)
    run(x, y)
    with np.errstate(over="ignore", under="ignore"):
        want = getattr(np, name)(x.astype(np.float64))
        nearest = want.astype(np.float32)
    finite = np.isfinite(nearest)
    assert np.array_equal(y[~finite], nearest[~finite], equal_nan=True)
    assert (np.abs(y[finite] - want[finite]) <= 2 * np.spacing(np.abs(nearest[finite])).astype(np.float64)).all()


def test_neon_code_uses_fused_products_and_does_not_spill() -> None:
    from llvmlite import binding

    try:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError as error:
        pytest.skip(f"this LLVM has no AArch64 target: {error}")
    block = RegisterBlock("float", 6, 4, 4)
    module, target = micro.assemble(block, Target("", "aarch64-unknown-linux-gnu", "neoverse-n1", "+neon"))
    text = target.emit_assembly(module)
    body = text[text.index("gemm_add:") : text.index("online_softmax:")]
    assert body.count("fmla") >= 24
    # The innermost loop of the 6 x 4 block: its 24 products and nothing stored to the stack among them.
    labels_and_code = re.split(r"^(\.LBB\w+):.*$", body, flags=re.MULTILINE)[1:]
    blocks = zip(labels_and_code[::2], labels_and_code[1::2], strict=True)
    loops = [code for label, code in blocks if re.search(rf"\tb\.?\w*\t{re.escape(label)}$", code, re.MULTILINE)]
    widest = max(loops, key=lambda code: code.count("fmla"))
    assert widest.count("fmla") == 24 and "[sp" not in widest


@pytest.mark.parametrize("instructions", ["avx512bf16", pytest.param("amx", marks=pytest.mark.exhaustive)])
def test_every_micro_kernel_is_ordered_for_the_tuned_cpu(instructions: str) -> None:
    wanted = target.of_class("x86-64-v4", instructions)
    assert wanted.tune == ("" if instructions == "amx" else "znver4")
    block = RegisterBlock("float", 1, 1, 16, "bfloat16", instructions)
    module, machine = micro.assemble(block, wanted)
    names = micro.kernels(block)
    of_each = [set(map(str, function.attributes)) for function in module.functions if function.name in names]
    assert len(of_each) == len(names)
    tuned = [any(f'"tune-cpu"="{wanted.tune}"' in one for one in attributes) for attributes in of_each]
    assert all(tuned) if wanted.tune else not any(tuned)
    untuned, _ = micro.assemble(block, wanted._replace(tune=""))
    assert (machine.emit_assembly(module) != machine.emit_assembly(untuned)) == bool(wanted.tune)


@pytest.mark.parametrize(
    ("dtype", "lanes", "rows", "vectors"),
    [
        ("float16", 4, 4, 3), ("float64", 8, 4, 3), ("float32", 16, 8, 3), ("bfloat16", 16, 6, 4),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in (
            ("float32", 4, 4, 3), ("float32", 8, 4, 3), ("float32", 16, 6, 4), ("float64", 16, 8, 3),
            ("float16", 8, 4, 3), ("float16", 16, 6, 4),
        )),
    ],
)  # fmt: skip
def test_every_width_computes_attention(dtype: str, lanes: int, rows: int, vectors: int) -> None:
    """With dtypes in turn: shorter vectors than this CPU's have kernels of their own, which compile for long."""
    rng = np.random.default_rng(3)
    q, k, v, dout = (rng.standard_normal((1, 2, n, 21)).astype(dtype) for n in (70, 131, 131, 70))
    problem, operands, _ = prepare(q, k, v, causal=True, softcap=4.0)
    tile = CpuTile(2 * vectors * lanes, 40, lanes, rows, vectors)
    backend, plan = CpuBackend(), CpuPlan(problem, tile, CpuTile(32, 48, lanes, rows, vectors), "forced")
    backend.forward(plan, operands)
    gradients = Gradients(dout, None, *(np.full_like(x, np.nan) for x in (q, k, v)))
    backend.backward(plan, operands, gradients)
    got = cases.Results(operands.out, operands.lse, gradients.dq, gradients.dk, gradients.dv, None)
    cases.assert_conforms(got, *cases.by_definition(problem.spec, operands, dout))


def test_words_of_the_argument_block_do_not_overlap() -> None:
    from flashkit.backends.cpu import arguments

    words = {name: int(value) for name, value in vars(arguments).items() if isinstance(value, np.int64)}
    words = dict(list(words.items())[: list(words).index("SIZE") + 1])  # constants follow
    tensors = (
        "Q", "K", "V", "K_SCALE", "V_SCALE", "K_PE", "OUT", "LSE", "DOUT", "DLSE", "DQ", "DK", "DV", "DQ_ACCUM",
        "BWD_LSE", "DELTA", "ENTROPY", "MAX_LOGIT",
    )  # fmt: skip
    taken = [words[name] + i for name in words for i in range(4 if name in tensors else 1) if name != "SIZE"]
    assert sorted(taken) == list(range(words["SIZE"]))


def test_sixteen_bit_conversions_round_like_numpy() -> None:
    from numba import njit

    from flashkit.backends.cpu import views

    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    wide = np.concatenate(
        [
            np.random.default_rng(4).standard_normal(4096) * 10.0 ** np.arange(-40, 24).repeat(64),
            [0, -0.0, np.inf, -np.inf, 65519, 65520],
        ]
    )
    for dtype, widen, narrow in (
        (np.float16, views.float16_to_float32, views.float32_to_float16),
        (ml_dtypes.bfloat16, views.bfloat16_to_float32, views.float32_to_bfloat16),
    ):

        @njit
        def convert(bits, single, widen=widen, narrow=narrow):  # type: ignore[no-untyped-def]
            return np.array([widen(x) for x in bits]), np.array([narrow(x) for x in single])

        widened, narrowed = convert(bits, wide.astype(np.float32))
        assert np.array_equal(widened, bits.view(dtype).astype(np.float32), equal_nan=True)
        with np.errstate(over="ignore"):
            assert np.array_equal(narrowed.view(dtype), wide.astype(np.float32).astype(dtype))
        assert np.isnan(convert(bits[:1], np.array([np.nan], np.float32))[1].view(dtype)[0])


def test_dtypes_share_the_classification_of_a_mask() -> None:
    def functions(dtype: str) -> dict[str, int]:
        x = np.zeros((1, 2, 65, 8), dtype)
        return CpuBackend().plan(prepare(x, x, x, causal=True)[0], profiles.for_device("cpu")).classify

    single = functions("float32")
    assert single["classify"] and all(functions(dtype) is single for dtype in ("float64", "float16"))
