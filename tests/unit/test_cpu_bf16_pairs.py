"""bf16 pairs on the CPU: micro-kernels against NumPy, AMX tiles emulated and as machine code."""

import re
from collections.abc import Iterator

import amx_emulation  # noqa: F401  (which brings the method "emulate")
import cases
import ml_dtypes
import numpy as np
import pytest
from cases import with_
from test_cpu_kernels import at, bits, run

import flashkit
from flashkit import dispatch
from flashkit.backends.cpu import bf16
from flashkit.backends.cpu.micro import amx
from flashkit.backends.cpu.micro import compile as micro
from flashkit.backends.cpu.micro.register_block import RegisterBlock
from flashkit.backends.cpu.target import Target
from flashkit.devices import host
from flashkit.tools.doctor import probes

BF16 = np.dtype(ml_dtypes.bfloat16)
HERE = pytest.mark.skipif("avx512_bf16" not in host.cpu_features(), reason="this CPU has no AVX512-BF16")
METHODS = ["emulate", pytest.param("avx512bf16", marks=HERE)]
NATIVE = pytest.param("avx512bf16", 16, marks=HERE)


def block(method: str, lanes: int = 16) -> RegisterBlock:
    rows, vectors = (6, 4) if lanes == 16 else (4, 2)
    return RegisterBlock("float", rows, vectors, lanes, "bfloat16", method)


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def two_rows(block: RegisterBlock, s: np.ndarray, dp: np.ndarray, lse: list[float]) -> list[np.ndarray]:
    """P, then dS, of softmax_backward_bf16_pairs for two rows of 16 scores, in float32."""
    stats, delta, lines = np.array(lse, np.float32), np.zeros(2, np.float32), np.zeros((2, 16), np.uint16)
    run(
        block, "softmax_backward_bf16_pairs", at(s), s.strides[0], 2, 16, at(dp), at(stats), at(delta), bits(1.0),
        at(lines), lines.strides[0],
    )  # fmt: skip
    return [words[0].view(BF16).astype(np.float32).reshape(16, 2).T for words in (s, dp)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [8e3, 1e4, 1e6, 1.4e11, 3.4e38])
@pytest.mark.parametrize(("method", "lanes"), [("emulate", 4), ("emulate", 16), NATIVE])
def test_great_scores_are_subtracted_exactly(method: str, lanes: int, size: float, sign: int) -> None:
    """The weight of the row reference is 1, whatever log2 e times it is rounded to; small scores beside it."""
    top = np.float32(sign * size)
    below = np.nextafter(top, np.float32(-np.inf))
    s, dp = np.full((3, 16), top), np.ones((2, 16), np.float32)
    s[1], s[2] = below, -np.inf
    s[:, :5] = [[0.25], [0], [-1]]
    m, l, want = np.full(16, -np.inf, np.float32), np.zeros(16, np.float32), np.zeros((4, 16))
    np.exp2(1.4 * (s.astype(np.float64) - s[0]), out=want[:3])
    want[want < 2.0**-126] = 0
    run(block(method, lanes), "online_softmax_bf16_pairs", at(s), 64, 3, 16, at(m), at(l), at(l), 64, 0, bits(1.4))
    assert (m == np.where(np.arange(16) < 5, np.float32(0.25), top)).all()
    np.testing.assert_allclose(l, want.sum(0), rtol=4e-4)
    got = s[:2].view(BF16).astype(np.float64).reshape(2, 16, 2).transpose(0, 2, 1).reshape(4, 16)
    np.testing.assert_allclose(got, want, rtol=2.0**-8)

    s = np.full((2, 16), top)
    s[0, 3] = below
    p, ds = two_rows(block(method, lanes), s, dp, [top, np.inf])
    weights = np.where(np.arange(16) == 3, np.exp(float(below) - float(top)), 1)
    weights[weights < 2.0**-126] = 0
    for found in (p, ds):
        np.testing.assert_allclose(found, [weights, np.zeros(16)], rtol=2.0**-8)


@pytest.mark.parametrize(("method", "lanes"), [("emulate", 4), ("emulate", 16), NATIVE])
def test_a_masked_pair_of_a_nan_row_has_no_weight(method: str, lanes: int) -> None:
    s, dp = np.zeros((2, 2, 16), np.float32)
    s[:, 3], dp[:, 3] = -np.inf, np.nan
    for first, second in two_rows(block(method, lanes), s, dp, [np.nan, 1]):
        assert np.isnan(np.delete(first, 3)).all() and np.isfinite(second).all()
        assert first[3] == second[3] == 0


def innermost_loops(text: str) -> list[str]:
    """Code from a label to the jump back to it."""
    labels_and_code = re.split(r"^(\.LBB\w+):.*$", text, flags=re.MULTILINE)[1:]
    loops = []
    for label, code in zip(labels_and_code[::2], labels_and_code[1::2], strict=True):
        if back := re.search(rf"\tj\w+\t{re.escape(label)}$", code, re.MULTILINE):
            loops.append(code[: back.start()])
    return loops


def assembly(method: str, cpu: str, features: str) -> str:
    from llvmlite import binding

    try:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
        binding.Target.from_triple("x86_64-unknown-linux-gnu")
    except RuntimeError as error:
        pytest.skip(f"this LLVM has no x86 target: {error}")
    module, target = micro.assemble(block(method), Target("", "x86_64-unknown-linux-gnu", cpu, features))
    return str(target.emit_assembly(module))


SAPPHIRE_RAPIDS = "+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512bf16,+amx-tile,+amx-bf16"


def test_amx_code_is_tile_instructions() -> None:
    text = assembly("amx", "sapphirerapids", SAPPHIRE_RAPIDS)

    def code_of(name: str) -> str:
        return text[text.index(f"\n{name}:") :].partition(".Lfunc_end")[0]

    # Tiles are configured once for a kernel, and for each region of a product that has remainders.
    for name, configurations in (("amx_whole_Instructions", 0), ("amx_region_Instructions", 1)):
        region = code_of(name)
        loops = [code for code in innermost_loops(region) if "tdpbf16ps" in code]
        # The innermost loops of 2 x 2, 2 x 1, 1 x 2 and 1 x 1 tiles: each operand loaded once, sums never moved.
        counts = sorted((code.count("tdpbf16ps"), code.count("tileloadd"), code.count("tilestored")) for code in loops)
        assert set(counts) == {(1, 2, 0), (2, 3, 0), (4, 4, 0)}
        assert all("(%rsp" not in code for code in loops if code.count("tdpbf16ps") == 4)
        assert region.count("ldtilecfg") == configurations and "tilezero" in region
    for name in ("gemm", "gemm_add"):
        assert code_of(name).count("ldtilecfg") == 1 and "tilerelease" not in code_of(name)
    assert "ldtilecfg" in code_of("begin_products") and "tilerelease" in code_of("end_products")


def test_dot_products_fill_the_registers_and_do_not_spill() -> None:
    text = assembly("avx512bf16", "znver4", "+avx512f,+avx512dq,+avx512bw,+avx512vl,+avx512bf16")
    body = text[text.index("gemm_add:") :]
    widest = max(innermost_loops(body), key=lambda code: code.count("vdpbf16ps"))
    assert widest.count("vdpbf16ps") == 24 and "zmm" not in "".join(re.findall(r".*\(%rsp.*", widest))


# --- which method -----------------------------------------------------------------------------------------------------


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Facts about this machine and plans for it are forgotten before and after."""

    def forget() -> None:
        bf16._best.cache_clear()
        bf16._obstacle.cache_clear()
        dispatch.forget()

    monkeypatch.delenv(bf16.VARIABLE, raising=False)
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_the_best_method_is_selected_with_its_reason(methods: pytest.MonkeyPatch) -> None:
    everything = frozenset({"avx512_bf16", "amx_tile", "amx_bf16"})
    for features, intel, refusal, name, reason in (
        (everything, True, "", "amx", "the fastest here"),
        (everything, False, "the kernel refuses", "avx512bf16", "the kernel refuses"),
        (everything, True, "the kernel refuses", "widen", "slower than float32 on Intel's CPUs"),
        (frozenset({"avx512_bf16"}), False, "", "avx512bf16", "no amx_tile, amx_bf16"),
        (frozenset(), True, "", "widen", "no avx512_bf16"),
    ):
        bf16._best.cache_clear()
        bf16._obstacle.cache_clear()
        methods.setattr(host, "cpu_is_intel", lambda intel=intel: intel)
        methods.setattr(host, "cpu_features", lambda features=features: features)
        methods.setattr(amx, "request_permission", lambda refusal=refusal: refusal)
        method = bf16.select()
        assert method.name == name and reason in method.why
        assert ": ".join(method) == probes.bfloat16()


def test_methods_without_their_instructions_are_refused(methods: pytest.MonkeyPatch) -> None:
    x = np.ones((1, 1, 4, 8), BF16)
    methods.setenv(bf16.VARIABLE, "fast")
    with pytest.raises(ValueError, match="FLASHKIT_CPU_BF16: expected amx, avx512bf16 or widen, got 'fast'"):
        flashkit.attention(x, x, x, backend="cpu")
    methods.setenv(bf16.VARIABLE, "amx")
    methods.setattr(host, "cpu_features", lambda: frozenset({"avx2"}))
    with pytest.raises(flashkit.UnsupportedError, match="FLASHKIT_CPU_BF16=amx: this CPU has no amx_tile"):
        flashkit.attention(x, x, x, backend="cpu")


def test_permission_is_asked_of_the_kernel() -> None:
    """Without AMX the kernel refuses, with it it grants; the answer is a sentence or nothing."""
    refusal = amx.request_permission.__wrapped__()
    if "amx_tile" not in host.cpu_features():
        assert refusal
    assert refusal == "" or "AMX" in refusal


FORCED = [
    with_(dtype="bfloat16"),
    with_(dtype="bfloat16", causal="yes", sizes="77x50", dims="7/13", heads="4:2"),
    with_(dtype="bfloat16", sizes="16x128", dims="1", scale="0.3", sinks="yes"),
    with_(dtype="bfloat16", sizes="130x200", dims="192/128", heads="4:1", kv_lengths="yes", window="both"),
    with_(dtype="bfloat16", sizes="97x1", dims="40", storage="misaligned", dlse="yes"),
    with_(dtype="bfloat16", sizes="77x50", dims="80", softcap="yes", bias="with -inf", storage="gaps"),
    with_(dtype="bfloat16", sizes="130x200", dims="96", block_mask="bigbird", score_mod="array by head"),
    with_(dtype="bfloat16", sizes="33x33", dims="8", dropout="yes", mask="float with -inf"),  # dropped, then rounded
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("choice", FORCED, ids=lambda choice: cases.name(choice))
@pytest.mark.parametrize("method", [*METHODS, "widen"])
def test_every_method_conforms(methods: pytest.MonkeyPatch, method: str, choice: dict[str, str]) -> None:
    methods.setenv(bf16.VARIABLE, method)
    call = cases.build(choice)
    found, (exact, allowed) = cases.run(call, "cpu"), cases.expected(call)
    cases.assert_conforms(found, exact, allowed)
    cases.assert_rounded_once(found, exact)
    assert f"bfloat16 by {method}" in flashkit.explain(call.q, call.k, call.v, backend="cpu", **call.options).why


@pytest.mark.parametrize("method", [*METHODS, "widen"])
def test_masked_keys_may_hold_anything(methods: pytest.MonkeyPatch, method: str) -> None:
    """Where P is 0 the non-finite fallback skips the product, NaN included."""
    methods.setenv(bf16.VARIABLE, method)
    rng = np.random.default_rng(5)
    q, k, v, dout = (draw(rng, 1, 2, n, 9) for n in (40, 51, 51, 40))
    clean = flashkit.attention_vjp(q, k, v, kv_lengths=[51], mask=np.arange(51) < 33, backend="cpu")
    k[:, :, 33:], v[:, :, 34:] = np.nan, np.inf
    spoilt = flashkit.attention_vjp(q, k, v, kv_lengths=[51], mask=np.arange(51) < 33, backend="cpu")
    assert np.isfinite(clean[0].astype(np.float32)).all()
    assert np.allclose(clean[0].astype(np.float32), spoilt[0].astype(np.float32), rtol=2**-7, atol=1e-6)
    cases.near(clean[1](dout), spoilt[1](dout), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0, 1e30, 1e-30])
def test_the_scale_is_not_rounded(methods: pytest.MonkeyPatch, scale: float) -> None:
    methods.setenv(bf16.VARIABLE, "emulate")
    q, k, v = (draw(np.random.default_rng(i), 1, 1, 20, 16) for i in range(3))
    if scale == 1e30:
        q = (q.astype(np.float32) * np.float32(1e-30)).astype(BF16)
    if scale == 1e-30:
        q = (q.astype(np.float32) * np.float32(1e30)).astype(BF16)
    _, lse = flashkit.attention(q, k, v, scale=scale, return_lse=True, backend="cpu")
    wide = (x.astype(np.float64) for x in (q, k, v))
    _, want = flashkit.attention(*wide, scale=scale, return_lse=True, backend="reference")
    assert np.abs(lse - want).max() < 1.05e-4  # a scale in bfloat16 would cost 4e-3 of a score


@pytest.mark.parametrize("method", METHODS)
def test_row_maxima_that_grow_leave_room_for_large_values(methods: pytest.MonkeyPatch, method: str) -> None:
    """Weights are relative to the greatest score; relative to an earlier one, e^79 times values of 1e6 is infinity."""
    methods.setenv(bf16.VARIABLE, method)
    q, k, v = (np.ones((1, 1, n, 16), BF16) for n in (40, 300, 300))
    k[:, :, :-1] = 0
    v *= BF16.type(1e6)
    np.testing.assert_array_equal(flashkit.attention(q, k, v, scale=79 / 16, backend="cpu"), v[:, :, :40])
