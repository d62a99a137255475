"""Whether machine code is of the format that a loader takes, and what an object calls. Whether it is the code that was
compiled is for a hash to say: loaders end the process on many damaged files.
"""

from __future__ import annotations

import struct

_SYMTAB, _UNDEFINED = 2, 0  # type of a section; section of a symbol

CUBIN = b"\x7fELF\x02\x01".ljust(18, b"\0") + (190).to_bytes(2, "little")
"""The first bytes of a cubin: 64-bit little-endian ELF for EM_CUDA."""


def alike(code: bytes, model: bytes) -> bool:
    """Whether code has the format and the machine of a model, of which the first 20 bytes are enough.

    Of ELF (System V ABI, chapter 4) this compares class, byte order and machine, and checks that the section table is
    within the code. Of other formats it compares the first two bytes: the magic of Mach-O, the machine of COFF.
    """
    if not model.startswith(b"\x7fELF"):
        return len(code) >= 20 and code[:2] == model[:2]
    if len(code) < 64 or code[:6] != model[:6] or code[18:20] != model[18:20]:
        return False
    wide, order = code[4] == 2, "<" if code[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", code, 40 if wide else 32)
    size, count = struct.unpack_from(f"{order}HH", code, 58 if wide else 46)
    return bool(0 < start <= start + size * count <= len(code))


def undefined(code: bytes) -> set[str]:
    """Names that an object refers to and does not define; none if it is not 64-bit little-endian ELF."""
    if code[:6] != b"\x7fELF\x02\x01":
        return set()
    (start,) = struct.unpack_from("<Q", code, 40)
    (count,) = struct.unpack_from("<H", code, 60)
    names: set[str] = set()
    for section in range(count):
        _, kind, _, _, offset, size, link, *_ = struct.unpack_from("<IIQQQQIIQQ", code, start + 64 * section)
        if kind != _SYMTAB:
            continue
        (strings,) = struct.unpack_from("<Q", code, start + 64 * link + 24)
        for name, _, _, defined, _, _ in struct.iter_unpack("<IBBHQQ", code[offset + 24 : offset + size]):
            if defined == _UNDEFINED:  # the first entry, left out above, is no symbol
                names.add(code[strings + name : code.index(b"\0", strings + name)].decode())
    return names
