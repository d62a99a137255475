"""Arithmetic and atomic operations of a lane, as statements for the interpreter.

A register is read as the type that its name says: I, U: 32 bits; L, V: 64; S, H: 16; F, D: float32, float64.
Predicates are V. d is the destination; a, b, c, e are the operands.
"""

import re

VIEWS = {
    "s32": "I", "u32": "U", "b32": "U", "s64": "L", "u64": "V", "b64": "V", "s16": "S", "u16": "H", "b16": "H",
    "f32": "F", "f64": "D", "pred": "V",
}  # fmt: skip
BITS = {"I": 32, "U": 32, "L": 64, "V": 64, "S": 16, "H": 16}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
NEGATED = {"neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}  # comparisons that hold for NaN


def statement(name: str) -> str:
    """The statement of an arithmetic operation. Raises NotImplementedError."""
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
        return "F[d] = round_down(np.float64(F[a]) * np.float64(F[b]) + np.float64(F[c]))"
    if base == "fma":
        if v == "D":
            return "D[d] = D[a] * D[b] + D[c]"
        return "F[d] = np.float32(np.float64(F[a]) * np.float64(F[b]) + np.float64(F[c]))"
    if base in ("min", "max"):
        if floating:
            return f"{v}[d] = {'minimum' if base == 'min' else 'maximum'}({v}[a], {v}[b])"
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
        if how in NEGATED:
            made = f"not ({v}[a] {NEGATED[how]} {v}[b])"
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
        return _conversion(parts)
    if base == "popc":
        return f"U[d] = popcount(np.uint64({v}[a]))"
    if base == "clz":
        return f"U[d] = {BITS[v] - 1} - find_msb(np.uint64({v}[a]))"
    if base == "bfind":
        if "shiftamt" in parts:
            return f"I[d] = -1 if {v}[a] == 0 else {BITS[v] - 1} - find_msb(np.uint64({v}[a]))"
        return f"I[d] = find_msb(np.uint64({v}[a]))"
    if base == "brev":
        return "U[d] = reverse_bits(U[a])"
    if base == "bfe":
        return f"{v}[d] = {'bfe_signed' if signed else 'bfe_unsigned'}({v}[a], {v}[b], {v}[c])"
    if base == "bfi":
        return f"{v}[d] = bit_insert(np.uint64({v}[a]), np.uint64({v}[b]), np.uint64(U[c]), np.uint64(U[e]))"
    if base == "prmt":
        return "U[d] = byte_permute(U[a], U[b], U[c])"
    if base == "lop3":
        return "U[d] = lop3_(U[a], U[b], U[c], U[e])"
    if base in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos"):
        made = f"{base}_({v}[a])"
        return f"{v}[d] = flushed({made})" if "ftz" in parts else f"{v}[d] = {made}"
    if base == "copysign":
        return f"{v}[d] = np.copysign({v}[b], {v}[a])"
    if base == "testp":
        test = {"infinite": "np.isinf", "finite": "np.isfinite", "notanumber": "np.isnan"}[parts[0]]
        return f"V[d] = np.uint64(1) if {test}({v}[a]) else np.uint64(0)"
    if base == "mapa":
        return "V[d] = np.uint64(U[a] & np.uint32(0xffffff) | U[b] << np.uint32(24))"
    if base in ("nop", "prefetch", "prefetchu"):
        return "pass"
    raise NotImplementedError(name)


ROUNDED = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}


def _conversion(parts: list[str]) -> str:
    to, of = parts[-2:]
    how = parts[0] if len(parts) > 2 else ""
    if to == "e4m3x2":
        return "H[d] = to_e4m3(F[b]) | to_e4m3(F[a]) << np.uint32(8)"
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
        whole = f"clamp({rounded}(np.float64({w}[a])), {float(low)!r}, {float(high)!r})"
        return f"{v}[d] = {'np.uint64' if v == 'V' else 'np.int64'}({whole})"
    if v in "FD":
        return f"{v}[d] = {'np.float32' if v == 'F' else 'np.float64'}({w}[a])"
    wide = "np.int64" if w in "ILS" else "np.uint64"
    return f"{'L' if w in 'ILS' else 'V'}[d] = {wide}({w}[a])"


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
        "exch": "y", "inc": "0 if x >= y else x + 1", "cas": f"{v}[z{index}] if x == y else x",
    }[operation]  # fmt: skip
    assert space == "global", name
    return ATOMIC.format(
        number=number, name=name, v=v, width=width, shift={4: 2, 8: 3}[width], index=index, changed=changed,
        result=int(base == "atom"), result_set=f"{v}[d{index}] = x" if base == "atom" else "pass",
    )  # fmt: skip


def is_atomic(name: str) -> bool:
    return name.startswith(("atom.", "red."))


def indexed(statement: str) -> str:
    """I[d] as I[d, 2 * l], and so on."""
    places = {"I": "2 * l", "U": "2 * l", "F": "2 * l", "H": "4 * l", "S": "4 * l", "L": "l", "V": "l", "D": "l"}
    return re.sub(r"\b([IUFHSLVD])\[([abcde])\]", lambda m: f"{m[1]}[{m[2]}, {places[m[1]]}]", statement)
