"""Headers of machine code: loaders take what they are given at its word, so code is looked at before."""

from __future__ import annotations

import struct

CUBIN = b"\x7fELF\x02\x01".ljust(18, b"\0") + (190).to_bytes(2, "little")
"""How CUDA's machine code begins: 64-bit little-endian ELF for EM_CUDA."""


def alike(code: bytes, model: bytes) -> bool:
    """Whether code has the format and machine of a model, which may be its first 20 bytes alone.

    ELF (System V ABI, chapter 4): class, byte order and machine, and the section table lies within the code. Other
    formats: the first two bytes, Mach-O's magic or COFF's machine.
    """
    if not model.startswith(b"\x7fELF"):
        return len(code) >= 20 and code[:2] == model[:2]
    if len(code) < 64 or code[:6] != model[:6] or code[18:20] != model[18:20]:
        return False
    wide, order = code[4] == 2, "<" if code[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", code, 40 if wide else 32)
    size, count = struct.unpack_from(f"{order}HH", code, 58 if wide else 46)
    return bool(0 < start <= start + size * count <= len(code))
