"""Instructions of PTX as functions of Numba: one text and its operands' types make an intrinsic.

Operands are numbered as LLVM numbers them, $0, $1, ..., results first, then arguments; each element of a tuple is an
operand. Arguments that have to be constants of the text, `CONSTANT`, are written #0, #1, ... instead. So the line

    shuffle = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", float32, float32, int32)

makes shuffle(x, lane). What is tied to its result, such as the sums of a product, stays in its registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

CONSTANT = object()
"""In place of an argument's type: an integer known when the kernel is compiled."""

NOTHING = types.void
_REGISTERS = {
    types.float32: "f", types.float64: "d", types.int32: "r", types.uint32: "r", types.int64: "l", types.uint64: "l",
    types.uint16: "h", types.boolean: "r",
}  # fmt: skip


def instruction(text: str, result: Any, *takes: Any, pure: bool = False, tied: bool = False) -> Any:
    """The intrinsic of an instruction, or of several that belong together.

    result: a type, a UniTuple of one, or NOTHING. A boolean is a 32-bit register of the text, not zero for True.
    pure: the result depends on the arguments alone, so that the compiler may move the text, or leave it out.
    tied: the result's registers are those of the first argument, which has its type.
    """

    def define(_: Any, *kinds: Any) -> Any:
        constants = [each for each, take in zip(kinds, takes) if take is CONSTANT]
        if not all(isinstance(each, types.IntegerLiteral) for each in constants):
            return None
        filled = text
        for i, each in enumerate(constants):
            filled = filled.replace(f"#{i}", str(each.literal_value))
        signature = result(*(each if take is CONSTANT else take for each, take in zip(kinds, takes)))

        def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
            operands = []
            for value, take in zip(arguments, takes):
                if take is not CONSTANT:
                    operands += [(part, _leaf(take)) for part in parts(builder, value, take)]
            return _emit(context, builder, filled, result, operands, pure, tied)

        return signature, generate

    return intrinsic_of(len(takes), define)


def intrinsic_of(arguments: int, define: Any) -> Any:
    """The intrinsic that define(typing, *kinds) types: Numba wants a name for each argument, and no more."""
    names = "".join(f", x{i}" for i in range(arguments))
    return intrinsic(eval(f"lambda typing{names}: define(typing{names})", {"define": define}))


def count(kind: Any) -> int:
    """Registers that a value of a type takes."""
    return kind.count if isinstance(kind, types.UniTuple) else int(kind != NOTHING)


def parts(builder: Any, value: Any, kind: Any) -> list[Any]:
    """A value's elements, or itself."""
    if not isinstance(kind, types.UniTuple):
        return [value]
    return [builder.extract_value(value, i) for i in range(kind.count)]


def together(context: Any, builder: Any, elements: Sequence[Any], kind: Any) -> Any:
    """A tuple of a type from its elements."""
    value = ir.Constant(context.get_value_type(kind), ir.Undefined)
    for i, element in enumerate(elements):
        value = builder.insert_value(value, element, i)
    return value


def _leaf(kind: Any) -> Any:
    return kind.dtype if isinstance(kind, types.UniTuple) else kind


def _emit(
    context: Any, builder: Any, text: str, result: Any, operands: Sequence[tuple[Any, Any]], pure: bool, tied: bool
) -> Any:
    number, kind = count(result), _leaf(result)
    register = None if kind == NOTHING else ir.IntType(32) if kind == types.boolean else context.get_value_type(kind)
    values, letters = [], []
    for i, (value, leaf) in enumerate(operands):
        values.append(builder.zext(value, ir.IntType(32)) if leaf == types.boolean else value)
        letters.append(str(i) if tied and i < number else _REGISTERS[leaf])
    constraints = [f"={_REGISTERS[kind]}" for _ in range(number)] + letters + ([] if pure else ["~{memory}"])
    returned = ir.VoidType() if number == 0 else register if number == 1 else ir.LiteralStructType([register] * number)
    assembly = ir.InlineAsm(
        ir.FunctionType(returned, [value.type for value in values]), text, ",".join(constraints), side_effect=not pure
    )
    # Without `convergent` the compiler might copy an instruction that all lanes execute together into branches.
    output = builder.call(assembly, values, attrs=("nounwind", "readnone" if pure else "convergent"))
    if number == 0:
        return context.get_dummy_value()
    if number == 1 and not isinstance(result, types.UniTuple):
        return builder.icmp_unsigned("!=", output, ir.Constant(register, 0)) if kind == types.boolean else output
    elements = [output] if number == 1 else [builder.extract_value(output, i) for i in range(number)]
    return together(context, builder, elements, result)
