"""PTX mnemonics to the names that the interpreter has: qualifiers that change nothing in it are dropped."""

import re
from functools import cache

WIDTHS = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
WIDTHS |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8}

_IGNORED = {
    "uni", "volatile", "relaxed", "nc", "cg", "ca", "cs", "lu", "cv", "wt", "wb", "weak", "aligned", "rn", "gpu", "cta",
    "sys",
}  # fmt: skip


@cache
def normal(name: str) -> tuple[str, str, int, int]:
    """An operation's name in the interpreter, its operands' type, and two numbers of its own."""
    parts = name.split(".")
    base, kind = parts[0], parts[-1]
    if name.startswith("st.async"):
        return "st.async", kind, 0, 0
    if base in ("ld", "ldu", "st"):
        space = next(
            (
                s.partition("::")[0]
                for s in parts
                if s.partition("::")[0] in ("global", "shared", "local", "param", "const")
            ),
            "generic",
        )
        count = next((int(p[1:]) for p in parts if re.fullmatch("v[248]", p)), 1)
        wait = "acquire" in parts or "volatile" in parts or "relaxed" in parts
        space = {"param": "global", "const": "global"}.get(space, space)
        base = "ld" if base == "ldu" else base
        width = WIDTHS[kind] * (-1 if kind[0] == "s" else 1)
        return f"{base}.{space}", kind, width, count * 2 + wait
    if base in ("atom", "red"):
        space = "shared" if any(p.startswith("shared") for p in parts) else "global"
        operation = next(p for p in parts if p in ("add", "or", "and", "max", "min", "exch", "cas", "inc", "xor"))
        count = next((int(p[1:]) for p in parts if re.fullmatch("v[248]", p)), 1)
        return f"{base}.{space}.{operation}.{kind}", kind, count, 0
    if base == "wgmma" and parts[1] == "mma_async":
        shape = re.fullmatch(r"m64n(\d+)k(\d+)", parts[4])
        assert shape, name
        return f"wgmma.{parts[-1]}", "b32", int(shape[1]), int(shape[2])
    if base == "mma":
        return "mma." + ".".join(p for p in parts if p in ("f16", "bf16", "tf32"))[:4].rstrip("."), "b32", 0, 0
    if base in ("ldmatrix", "stmatrix"):
        count = int(next(p for p in parts if re.fullmatch(r"x[124]", p))[1:])
        return base, "b32", count, "trans" in parts
    if base == "cp":
        return (
            ".".join(p for p in (q.partition("::")[0] for q in parts) if p not in _IGNORED and not p.startswith("L2")),
            "s64",
            0,
            0,
        )
    if (base == "bar" and parts[1] != "warp") or (base == "barrier" and parts[1] != "cluster"):
        return ".".join(["bar", *(p for p in parts[1:] if p not in ("aligned", "cta"))]), "s32", 0, 0
    if name.startswith("mbarrier.inval"):
        return "nop", "s32", 0, 0
    if base == "mbarrier":
        return (
            ".".join(
                p
                for p in (q.partition("::")[0] for q in parts)
                if p not in ("shared", "b64", "cluster", "acquire", "release", *_IGNORED)
            ),
            "s32",
            0,
            0,
        )
    if base == "vote":
        return name, "s32", 0, 0  # the mask's
    if base == "mapa":
        return "mapa.u32", "u32", 0, 0
    if base == "barrier":
        return ".".join(parts[:3]), "s32", 0, 0
    if base in ("fence", "membar"):
        return "nop", "s32", 0, 0
    if base == "setmaxnreg":
        return "setmaxnreg", "s32", 0, 0
    if base == "cvt":
        return name, kind, 0, 0
    if base == "cvta" and "shared" in parts:  # the addresses of shared memory are 32 bits of a register
        return "cvt.u64.u32", "u32", 0, 0
    if base == "cvta":
        return "mov.b64" if kind.endswith("64") else "mov.b32", kind, 0, 0
    if base == "mov":
        return f"mov.{kind}", kind, 0, 0
    if base == "setp" or base == "set":
        return ".".join(p for p in parts if p != "ftz"), kind, 0, 0
    return ".".join(p for p in parts if p not in _IGNORED), kind if kind in WIDTHS or kind == "pred" else "s32", 0, 0
