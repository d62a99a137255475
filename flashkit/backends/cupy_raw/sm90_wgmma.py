"""Text of Hopper's matrix instructions, wgmma, in the shapes that a kernel uses: one for 64 rows and N columns names
each of a lane's N / 2 sums, so it cannot be written once for all N.

    product(c, a, b, sum)                c = a b, plus c if sum: both operands in shared memory, by their descriptors
    wgmma_zero_init(c, a, b)               c = a b, whatever c holds
    wgmma_rs(c, a, i, b, sum)     the left operand in registers a[i] ... a[i + 3]

Template arguments say which operands are read along columns (kernels/sm90.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable

_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def text(dtype: str, shared: Iterable[int], weights: Iterable[int]) -> str:
    """Functions for the numbers of columns N of products from shared memory and of those with weights."""
    kind = _TYPES[dtype]
    parts = [_shared(kind, n, fresh) for n in sorted(set(shared)) for fresh in (False, True)]
    parts += [_weights(kind, n) for n in sorted(set(weights))]
    return "\n".join(parts)


def _instruction(kind: str, n: int) -> tuple[str, str]:
    sums = ", ".join(f"%{i}" for i in range(n // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}", "p, 1, 1"


def _shared(kind: str, n: int, fresh: bool) -> str:
    count = n // 2
    head, flags = _instruction(kind, n)
    a, b, total, turned_a, turned_b = (f"%{count + i}" for i in range(5))
    outputs = ", ".join(f'"{"=" if fresh else "+"}f"(c[{i}])' for i in range(count))
    name, parameters, value = ("wgmma_zero_init", "", '"n"(0)') if fresh else ("product", ", int sum", '"r"(sum)')
    return (
        "template <int TURNED_A, int TURNED_B>\n"
        f"DEVICE void {name}(float (&c)[{count}], unsigned long long a, unsigned long long b{parameters}) {{\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {total}, 0;\\n"\n'
        f'        "{head}, {a}, {b}, {flags}, {turned_a}, {turned_b}; }}"\n'
        f'        : {outputs} : "l"(a), "l"(b), {value}, "n"(TURNED_A), "n"(TURNED_B));\n}}'
    )


def _weights(kind: str, n: int) -> str:
    count = n // 2
    head, flags = _instruction(kind, n)
    left = ", ".join(f"%{count + i}" for i in range(4))
    b, total, turned_b = (f"%{count + 4 + i}" for i in range(3))
    sums = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[i + {i}])' for i in range(4))
    return (
        "template <int TURNED_B, int M>\n"
        f"DEVICE void wgmma_rs(float (&c)[{count}], const unsigned (&a)[M], int i, unsigned long long b, "
        "int sum) {\n"
        f'    asm volatile("{{ .reg .pred p; setp.ne.b32 p, {total}, 0;\\n"\n'
        f'        "{head}, {{{left}}}, {b}, {flags}, {turned_b}; }}"\n'
        f'        : {sums} : {inputs}, "l"(b), "r"(sum), "n"(TURNED_B));\n}}'
    )
