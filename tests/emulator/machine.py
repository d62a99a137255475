"""Warps of PTX, stepped.

A warp's lanes have a program counter each; those with the lowest go on together until they part or meet. What lanes do
together (shuffles, matrices, barriers) waits until all of them are there. What hardware does in its own time, copies
and stores, is put down and done at a moment that chance chooses, or when it is waited for; products of warp groups
when they are waited for. So what a kernel forgets to wait for shows as poison or as what was there before.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from flashkit.devices import kernel_cache

FOLDER = Path(__file__).parent

# --- operations of a lane ---------------------------------------------------------------------------------------------
# Registers as one type or another: I, U: 32 bits; L, V: 64; S, H: 16; F, D: float; P: predicates. d, a, b, c: operands.

VIEWS = {
    "s32": "I", "u32": "U", "b32": "U", "s64": "L", "u64": "V", "b64": "V", "s16": "S", "u16": "H", "b16": "H",
    "f32": "F", "f64": "D", "pred": "V",
}  # fmt: skip
BITS = {"I": 32, "U": 32, "L": 64, "V": 64, "S": 16, "H": 16}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
CONTRARY = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # of those that NaN makes true


def expression(name: str) -> str:
    """What an operation without effects does, as a statement in Python."""
    base, *parts = name.split(".")
    kind = parts[-1] if parts else ""
    v = VIEWS.get(kind, "U")
    floating, whole = v in "FD", v not in "FD"
    signed = v in "ILS"
    if base in ("add", "sub", "mul") and floating:
        sign = {"add": "+", "sub": "-", "mul": "*"}[base]
        made = f"{v}[a] {sign} {v}[b]"
        return f"{v}[d] = flushed({made})" if "ftz" in parts else f"{v}[d] = {made}"
    if base in ("add", "sub"):
        return f"{v}[d] = {v}[a] {'+' if base == 'add' else '-'} {v}[b]"
    if base in ("mul", "mad"):
        more = " + {}[c]" if base == "mad" else ""
        if "wide" in parts:
            w = {"I": "L", "U": "V", "S": "I", "H": "U"}[v]
            to = {"L": "np.int64", "V": "np.uint64", "I": "np.int32", "U": "np.uint32"}[w]
            return f"{w}[d] = {to}({v}[a]) * {to}({v}[b])" + more.format(w)
        if "hi" in parts:
            if BITS[v] == 64:
                return f"{v}[d] = high_{'signed' if signed else 'unsigned'}({v}[a], {v}[b])" + more.format(v)
            to = "np.int64" if signed else "np.uint64"
            shift = f"{to}({BITS[v]})"
            return f"{v}[d] = ({to}({v}[a]) * {to}({v}[b]) >> {shift})" + (f" + {to}({v}[c])" if more else "")
        return f"{v}[d] = {v}[a] * {v}[b]" + more.format(v)
    if base == "mul24":
        return f"{v}[d] = {v}[a] * {v}[b]"
    if base in ("div", "rem") and whole:
        to = "np.int64" if signed else "np.uint64"
        return f"{v}[d] = {base}_{'signed' if signed else 'unsigned'}({to}({v}[a]), {to}({v}[b]))"
    if base == "div":
        return f"{v}[d] = {v}[a] / {v}[b]"
    if base == "fma" and parts[0] == "rm":
        return "F[d] = below(np.float64(F[a]) * np.float64(F[b]) + np.float64(F[c]))"
    if base == "fma":
        if v == "D":
            return "D[d] = D[a] * D[b] + D[c]"
        return "F[d] = np.float32(np.float64(F[a]) * np.float64(F[b]) + np.float64(F[c]))"
    if base in ("min", "max"):
        if floating:
            return f"{v}[d] = {'least' if base == 'min' else 'greatest'}({v}[a], {v}[b])"
        return f"{v}[d] = {base}({v}[a], {v}[b])"
    if base in ("and", "or", "xor"):
        return f"{v}[d] = {v}[a] {dict(zip(('and', 'or', 'xor'), '&|^'))[base]} {v}[b]"
    if base == "not":
        return "V[d] = np.uint64(1) - V[a]" if kind == "pred" else f"{v}[d] = ~{v}[a]"
    if base == "cnot":
        return f"{v}[d] = 1 if {v}[a] == 0 else 0"
    if base == "neg":
        return f"{v}[d] = -{v}[a]"
    if base == "abs":
        return f"{v}[d] = abs({v}[a])"
    if base == "shl":
        return f"V[d] = np.uint64(0) if U[b] >= {BITS[v]} else np.uint64({v}[a]) << np.uint64(U[b])"
    if base == "shr":
        if signed:
            return f"{v}[d] = np.int64({v}[a]) >> np.int64(min(U[b], np.uint32({BITS[v] - 1})))"
        return f"V[d] = np.uint64(0) if U[b] >= {BITS[v]} else np.uint64({v}[a]) >> np.uint64(U[b])"
    if base == "shf":
        both, by = "(np.uint64(U[b]) << np.uint64(32) | np.uint64(U[a]))", "np.uint64(U[c] & np.uint32(31))"
        return f"U[d] = {both} << {by} >> np.uint64(32)" if parts[0] == "l" else f"U[d] = {both} >> {by}"
    if base == "mov":
        return "V[d] = V[a]"
    if base == "selp":
        return "V[d] = V[a] if V[c] != 0 else V[b]"
    if base == "slct":
        return "V[d] = V[a] if I[c] >= 0 else V[b]"
    if base == "setp":
        how = parts[0]
        if how in CONTRARY:
            made = f"not ({v}[a] {CONTRARY[how]} {v}[b])"
        elif how == "equ":
            made = f"not ({v}[a] < {v}[b] or {v}[a] > {v}[b])"
        elif floating and how == "ne":
            made = f"{v}[a] < {v}[b] or {v}[a] > {v}[b]"
        elif how == "nan":
            made = f"{v}[a] != {v}[a] or {v}[b] != {v}[b]"
        elif how == "num":
            made = f"{v}[a] == {v}[a] and {v}[b] == {v}[b]"
        else:
            made = f"{v}[a] {COMPARED[how]} {v}[b]"
        if len(parts) == 3 and parts[1] in ("and", "or"):
            made = f"({made}) {parts[1]} V[c] != 0"
        return f"V[d] = np.uint64(1) if {made} else np.uint64(0)"
    if base == "cvt":
        return _converted(parts)
    if base == "popc":
        return f"U[d] = count_of_ones(np.uint64({v}[a]))"
    if base == "clz":
        return f"U[d] = {BITS[v] - 1} - highest_one(np.uint64({v}[a]))"
    if base == "bfind":
        if "shiftamt" in parts:
            return f"I[d] = -1 if {v}[a] == 0 else {BITS[v] - 1} - highest_one(np.uint64({v}[a]))"
        return f"I[d] = highest_one(np.uint64({v}[a]))"
    if base == "brev":
        return "U[d] = turned_bits(U[a])"
    if base == "bfe":
        return f"{v}[d] = {'field' if signed else 'bits_of'}({v}[a], {v}[b], {v}[c])"
    if base == "bfi":
        return f"{v}[d] = inserted(np.uint64({v}[a]), np.uint64({v}[b]), np.uint64(U[c]), np.uint64(U[e]))"
    if base == "prmt":
        return "U[d] = permuted(U[a], U[b], U[c])"
    if base == "lop3":
        return "U[d] = looked_up(U[a], U[b], U[c], U[e])"
    if base in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos"):
        made = f"{base}_({v}[a])"
        return f"{v}[d] = flushed({made})" if "ftz" in parts else f"{v}[d] = {made}"
    if base == "copysign":
        return f"{v}[d] = np.copysign({v}[b], {v}[a])"
    if base == "testp":
        test = {"infinite": "np.isinf", "finite": "np.isfinite", "notanumber": "np.isnan"}[parts[0]]
        return f"V[d] = np.uint64(1) if {test}({v}[a]) else np.uint64(0)"
    if base in ("nop", "prefetch", "prefetchu"):
        return "pass"
    raise NotImplementedError(name)


ROUNDED = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}


def _converted(parts: list[str]) -> str:
    to, of = parts[-2:]
    how = parts[0] if len(parts) > 2 else ""
    if to in ("bf16x2", "f16x2"):
        return f"U[d] = np.uint32(to_{to[:-2]}(F[b])) | np.uint32(to_{to[:-2]}(F[a])) << np.uint32(16)"
    if of == "f16":
        return f"{VIEWS[to]}[d] = HALVES[H[a]]"
    if of == "bf16":
        return "U[d] = np.uint32(H[a]) << np.uint32(16)"
    if to in ("f16", "bf16"):
        return f"H[d] = to_{to}(np.float32({VIEWS[of]}[a]))"
    if to == "tf32":
        return "U[d] = (U[a] + np.uint32(0x1000)) & np.uint32(0xffffe000)"
    v, w = VIEWS.get(to, ""), VIEWS.get(of, "")
    if of in ("u8", "s8"):
        return f"{v}[d] = {'np.int8' if of == 's8' else ''}(V[a] & np.uint64(0xff))"
    if to in ("u8", "s8"):
        byte = "V[a] & np.uint64(0xff)"
        return f"V[d] = {byte}" if to == "u8" else f"V[d] = np.uint64(np.int64(np.int8({byte})))"
    if w in "FD" and v in "FD":
        rounded = ROUNDED.get(how)
        made = f"{rounded}({w}[a])" if rounded else f"{w}[a]"
        return f"{v}[d] = saturated({made})" if "sat" in parts else f"{v}[d] = {made}"
    if w in "FD":
        rounded = ROUNDED[how]
        low, high = (-(2 ** (BITS[v] - 1)), 2 ** (BITS[v] - 1) - 1) if v in "ILS" else (0, 2 ** BITS[v] - 1)
        whole = f"within({rounded}(np.float64({w}[a])), {float(low)!r}, {float(high)!r})"
        return f"{v}[d] = {'np.uint64' if v == 'V' else 'np.int64'}({whole})"
    if v in "FD":
        return f"{v}[d] = {'np.float32' if v == 'F' else 'np.float64'}({w}[a])"
    wide = "np.int64" if w in "ILS" else "np.uint64"
    return f"{'L' if w in 'ILS' else 'V'}[d] = {wide}({w}[a])"


LANES = """\
    elif op == {number}:  # {name}
        for l in range(WIDE):
            if m >> l & 1:
                {statement}
"""

SOME = """
@njit
def lanes_{first}(op, m, s, operands, R, HALVES):
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    WIDE = R.shape[1]
    d, a, b, c, e = operands[s], operands[s + 1], operands[s + 2], operands[s + 3], operands[s + 4]
    if op < {first}:
        pass
{branches}
"""
"""Operations of lanes, in functions of a few: Numba takes far longer for one of all."""

A_FEW = 12

GROUPS = {
    group: names.split()
    for group, names in {
        "flow": """
            bar.arrive bar.red.and.pred bar.red.or.pred bar.sync bar.warp.sync barrier.cluster.arrive
            barrier.cluster.wait bra cp.async.bulk.wait_group cp.async.bulk.wait_group.read cp.async.commit_group
            cp.async.wait_all cp.async.wait_group exit griddepcontrol.launch_dependents griddepcontrol.wait
            nanosleep.u32 ret trap wgmma.fence.sync whole
        """,
        "memory": """
            ld.global ld.local ld.shared pack st.global st.local st.shared unpack
        """,
        "together": """
            elect.sync redux.sync.add.s32 redux.sync.add.u32 redux.sync.and.b32 redux.sync.max.s32
            redux.sync.max.u32 redux.sync.min.s32 redux.sync.min.u32 redux.sync.or.b32 shfl.sync.bfly.b32
            shfl.sync.down.b32 shfl.sync.idx.b32 shfl.sync.up.b32 vote.sync.all.pred vote.sync.any.pred
            vote.sync.ballot.b32
        """,
        "matrices": """
            ldmatrix mma.bf16 mma.f16 mma.tf32 stmatrix wgmma.bf16 wgmma.commit_group.sync wgmma.f16 wgmma.tf32
            wgmma.wait_group.sync
        """,
        "copies": """
            cp.async.bulk.commit_group cp.async.bulk.global.shared.bulk_group cp.async.bulk.shared.global.mbarrier
            cp.async.bulk.shared.shared.mbarrier cp.async.bulk.tensor.5d.global.shared.bulk_group
            cp.async.bulk.tensor.5d.shared.global.mbarrier cp.async.shared.global
            cp.reduce.async.bulk.global.shared.bulk_group.add.f32 mapa.u32 mbarrier.arrive mbarrier.arrive.expect_tx
            mbarrier.init mbarrier.inval mbarrier.try_wait.parity st.async
        """,
    }.items()
}
SPECIAL = [name for group in GROUPS.values() for name in group]
"""Operations that interpreter.py does itself."""


ATOMIC = """\
    elif op == {number}:  # {name}
        d, first = operands[s], s + {result}
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                for i in range(max(1, np.int64(code[p, 4]))):
                    at = place(L[operands[first], l] + operands[first + 1], {width}, base, allowed)
                    if at < 0:
                        error, info[3], info[4] = at, l, L[operands[first], l] + operands[first + 1]
                        break
                    at = (at >> {shift}) + i
                    x, y, z = A{v}[at], {v}[operands[first + 2 + i]{index}], operands[s + count - 1]
                    {result_set}
                    A{v}[at] = {changed}
"""


def atomic(name: str, number: int) -> str:
    base, space, operation, kind = name.split(".")
    v = VIEWS[kind]
    width = {"I": 4, "U": 4, "F": 4, "L": 8, "V": 8, "D": 8}[v]
    index = ", 2 * l" if width == 4 else ", l"
    changed = {
        "add": "x + y", "and": "x & y", "or": "x | y", "xor": "x ^ y", "max": "max(x, y)", "min": "min(x, y)",
        "exch": "y", "cas": f"{v}[z{index}] if x == y else x",
    }[operation]  # fmt: skip
    assert space == "global", name
    return ATOMIC.format(
        number=number, name=name, v=v, width=width, shift={4: 2, 8: 3}[width], index=index, changed=changed,
        result=int(base == "atom"), result_set=f"{v}[d{index}] = x" if base == "atom" else "pass",
    )  # fmt: skip


class Machine:
    """Operations by number, and `run`, compiled for those that are known when it is first asked for."""

    def __init__(self) -> None:
        known = (FOLDER / "operations.txt").read_text().split()
        self.numbers = {name: i for i, name in enumerate([*SPECIAL, *known])}
        self._run: Any = None

    def number(self, name: str) -> int:
        """Of an operation."""
        if name not in self.numbers:
            if not _is_atomic(name):
                expression(name)  # raises where it is not known
            self.numbers[name] = len(self.numbers)
            self._run = None
        return self.numbers[name]

    @property
    def run(self) -> Any:
        """`run` of interpreter.py with these operations."""
        if self._run is None:
            text = self._text()
            name = f"emulator_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            path = kernel_cache.folder("emulator") / f"{name}.py"
            if not path.exists():
                kernel_cache.write(path, text.encode())
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec and spec.loader
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self._run = module.run
        return self._run

    def _text(self) -> str:
        """interpreter.py with the numbers of operations, and with what it does not do itself."""
        plain = {name: number for name, number in self.numbers.items() if name not in SPECIAL}
        atomics = [atomic(name, number) for name, number in plain.items() if _is_atomic(name)]
        rest = [(name, number) for name, number in plain.items() if not _is_atomic(name)]
        functions, calls = list[str](), list[str]()
        for i in range(0, len(rest), A_FEW):
            some, first = rest[i : i + A_FEW], rest[i][1]
            branches = [LANES.format(number=n, name=name, statement=_indexed(expression(name))) for name, n in some]
            functions.append(SOME.format(first=first, branches="".join(branches).replace("\n\n", "\n")))
            either = " or ".join(f"op == {number}" for _, number in some)
            calls.append(f"    elif {either}:\n        lanes_{first}(op, m, s, operands, R, halves[0])\n")
        branches = textwrap.indent("".join([*atomics, *calls]), " " * 8)
        numbers = [f"{_capitals(name)} = {self.numbers[name]}\n" for name in SPECIAL]
        numbers += [f"LAST_{group.upper()} = {self.numbers[names[-1]]}\n" for group, names in GROUPS.items()]
        text = (FOLDER / "interpreter.py").read_text().replace("@njit\n", "@njit(cache=True, error_model='numpy')\n")
        text = re.sub(r"(?m)^# FUNCTIONS\n", lambda _: "".join(functions), text)
        return "".join(numbers) + re.sub(r"(?m)^ *# LANES\n", lambda _: branches, text)


def _is_atomic(name: str) -> bool:
    return name.startswith(("atom.", "red."))


def _capitals(name: str) -> str:
    return name.upper().replace(".", "_")


def _indexed(statement: str) -> str:
    """I[d] as I[d, 2 * l], and so on."""
    places = {"I": "2 * l", "U": "2 * l", "F": "2 * l", "H": "4 * l", "S": "4 * l", "L": "l", "V": "l", "D": "l"}
    return re.sub(r"\b([IUFHSLVD])\[([abcde])\]", lambda m: f"{m[1]}[{m[2]}, {places[m[1]]}]", statement)
