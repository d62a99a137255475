"""CUDA C++ text of wgmma, Hopper's warp group matrix instruction, in the shapes that a kernel uses.

The instruction for 64 rows and N columns names each of a lane's N / 2 accumulators, so one text cannot cover all N.

    product(c, a, b, accumulate)           c = a b, plus c if accumulate: both operands in shared memory, by descriptor
    wgmma_zero_init(c, a, b)               c = a b, whatever c holds
    wgmma_rs(c, a, i, b, accumulate)       A in registers a[i] ... a[i + 3]

Template arguments say which operands are transposed, that is read along columns (kernels/sm90/instructions.cuh). e4m3
cannot be: its functions are no templates, but wgmma_rs by the length of a.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...spec import DTYPES

E4M3 = "e4m3"
"""The dtype of FP8 products, which no argument of attention has by this name."""


def text(dtype: str, shared: Iterable[int], registers: Iterable[int]) -> str:
    """Functions for the column counts N of products with A in shared memory and of those with A in registers."""
    kind = E4M3 if dtype == E4M3 else DTYPES[dtype].mma
    parts = [_shared(kind, n, zero_init) for n in sorted(set(shared)) for zero_init in (False, True)]
    parts += [_registers(kind, n) for n in sorted(set(registers))]
    return "\n".join(parts)


def _instruction(kind: str, n: int) -> tuple[str, str]:
    sums = ", ".join(f"%{i}" for i in range(n // 2))
    depth = 32 if kind == E4M3 else 16
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind}.{kind} {{{sums}}}", "p, 1, 1"


def _transposed(kind: str, names: tuple[str, ...], first: int) -> tuple[str, str, str]:
    """Of operands that may be transposed: template parameters, operands of the instruction, and their values."""
    if kind == E4M3:
        return "", "", ""
    operands = "".join(f", %{first + i}" for i in range(len(names)))
    values = "".join(f', "n"({name})' for name in names)
    return ", ".join(f"int {name}" for name in names), operands, values


def _shared(kind: str, n: int, zero_init: bool) -> str:
    count = n // 2
    head, flags = _instruction(kind, n)
    a, b, total = (f"%{count + i}" for i in range(3))
    template, transposed, values = _transposed(kind, ("TRANSPOSED_A", "TRANSPOSED_B"), count + 3)
    outputs = ", ".join(f'"{"=" if zero_init else "+"}f"(c[{i}])' for i in range(count))
    name, parameters, value = "product", ", int accumulate", '"r"(accumulate)'
    if zero_init:
        name, parameters, value = "wgmma_zero_init", "", '"n"(0)'
    return (
        (f"template <{template}>\n" if template else "") +
        f"DEVICE void {name}(float (&c)[{count}], unsigned long long a, unsigned long long b{parameters}) {{\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {total}, 0;\\n"\n'
        f'        "{head}, {a}, {b}, {flags}{transposed}; }}"\n'
        f'        : {outputs} : "l"(a), "l"(b), {value}{values});\n}}'
    )


def _registers(kind: str, n: int) -> str:
    count = n // 2
    head, flags = _instruction(kind, n)
    left = ", ".join(f"%{count + i}" for i in range(4))
    b, total = (f"%{count + 4 + i}" for i in range(2))
    template, transposed, values = _transposed(kind, ("TRANSPOSED_B",), count + 6)
    sums = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[i + {i}])' for i in range(4))
    return (
        f"template <{template + ', ' if template else ''}int M>\n"
        f"DEVICE void wgmma_rs(float (&c)[{count}], const unsigned (&a)[M], int i, unsigned long long b, "
        "int accumulate) {\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {total}, 0;\\n"\n'
        f'        "{head}, {{{left}}}, {b}, {flags}{transposed}; }}"\n'
        f'        : {sums} : {inputs}, "l"(b), "r"(accumulate){values});\n}}'
    )
