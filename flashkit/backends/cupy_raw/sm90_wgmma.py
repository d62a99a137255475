"""CUDA C++ text of wgmma, Hopper's warp group matrix instruction, in the shapes that a kernel uses.

The instruction for 64 rows and N columns names each of a lane's N / 2 accumulators, so one text cannot cover all N.

    product(c, a, b, accumulate)           c = a b, plus c if accumulate: both operands in shared memory, by descriptor
    wgmma_zero_init(c, a, b)               c = a b, whatever c holds
    wgmma_rs(c, a, i, b, accumulate)       A in registers a[i] ... a[i + 3]

Template arguments say which operands are transposed, that is read along columns (kernels/sm90/instructions.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable

from ...spec import DTYPES


def text(dtype: str, shared: Iterable[int], registers: Iterable[int]) -> str:
    """Functions for the column counts N of products with A in shared memory and of those with A in registers."""
    kind = DTYPES[dtype].mma
    parts = [_shared(kind, n, zero_init) for n in sorted(set(shared)) for zero_init in (False, True)]
    parts += [_registers(kind, n) for n in sorted(set(registers))]
    return "\n".join(parts)


def _instruction(kind: str, n: int) -> tuple[str, str]:
    sums = ", ".join(f"%{i}" for i in range(n // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}", "p, 1, 1"


def _shared(kind: str, n: int, zero_init: bool) -> str:
    count = n // 2
    head, flags = _instruction(kind, n)
    a, b, total, transposed_a, transposed_b = (f"%{count + i}" for i in range(5))
    outputs = ", ".join(f'"{"=" if zero_init else "+"}f"(c[{i}])' for i in range(count))
    name, parameters, value = "product", ", int accumulate", '"r"(accumulate)'
    if zero_init:
        name, parameters, value = "wgmma_zero_init", "", '"n"(0)'
    return (
        "template <int TRANSPOSED_A, int TRANSPOSED_B>\n"
        f"DEVICE void {name}(float (&c)[{count}], unsigned long long a, unsigned long long b{parameters}) {{\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {total}, 0;\\n"\n'
        f'        "{head}, {a}, {b}, {flags}, {transposed_a}, {transposed_b}; }}"\n'
        f'        : {outputs} : "l"(a), "l"(b), {value}, "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));\n}}'
    )


def _registers(kind: str, n: int) -> str:
    count = n // 2
    head, flags = _instruction(kind, n)
    left = ", ".join(f"%{count + i}" for i in range(4))
    b, total, transposed_b = (f"%{count + 4 + i}" for i in range(3))
    sums = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[i + {i}])' for i in range(4))
    return (
        "template <int TRANSPOSED_B, int M>\n"
        f"DEVICE void wgmma_rs(float (&c)[{count}], const unsigned (&a)[M], int i, unsigned long long b, "
        "int accumulate) {\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {total}, 0;\\n"\n'
        f'        "{head}, {{{left}}}, {b}, {flags}, {transposed_b}; }}"\n'
        f'        : {sums} : {inputs}, "l"(b), "r"(accumulate), "n"(TRANSPOSED_B));\n}}'
    )
