"""Whether machine code is what a loader takes: of the right format, and with consistent tables. Loaders assume both:
LLVM's and the CUDA driver's end the process on many files that are not.

The check of tables reads section headers, string tables, symbols, relocations (System V ABI, chapter 4) and unwind
tables (LSB, .eh_frame), never the machine code. Only 64-bit little-endian files are read: objects of x86-64 and ARM64,
and cubins.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Any

import numpy as np

_SECTION = np.dtype([
    ("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("size", "<u8"),
    ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8"),
])  # fmt: skip
_SYMBOL = np.dtype([
    ("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")
])  # fmt: skip
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])

_PROGBITS, _SYMTAB, _STRTAB, _RELA, _NOBITS, _REL, _X86_64_UNWIND = 1, 2, 3, 4, 8, 9, 0x70000001
_ALLOC, _EXECUTABLE, _THREAD_LOCAL = 2, 4, 0x400
_GLOBAL, _WEAK, _FUNCTION, _OF_SECTION, _OF_FILE = 1, 2, 2, 3, 4
_UNDEFINED, _RESERVED, _ABSOLUTE, _COMMON = 0, 0xFF00, 0xFFF1, 0xFFF2
_RELOCATABLE = 1
_MAX_ZEROS = 1 << 28  # bytes that the file makes a loader allocate without having them

_X86_64, _AARCH64, _CUDA = 62, 183, 190
_WIDTHS = {
    _X86_64: {1: 8, 2: 4, 4: 4, 9: 4, 10: 4, 11: 4, 24: 8, 25: 8, 26: 4, 29: 8, 41: 4, 42: 4},
    _AARCH64: {
        257: 8, 258: 4, 259: 2, 260: 8, 261: 4, 262: 2,
        **dict.fromkeys((*range(263, 270), 273, 274, 275, *range(277, 281), 282, 283, *range(284, 287)), 4),
        **dict.fromkeys((299, 311, 312, 314), 4),
    },
}  # fmt: skip
"""By machine: the relocations that LLVM's loader (RuntimeDyldELF) applies, and the bytes that each changes."""

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


def is_consistent(code: bytes, functions: Collection[str]) -> bool:
    """Whether a file's tables refer to nothing outside of it and define these functions.

    Parameters
    ----------
    code
        An ELF file whose identification was checked (`alike`). Files of other formats, of 32 bits and of the
        other byte order are not looked at.
    functions
        Names of functions that it has to define, in executable sections. A cubin is linked: of it only sections, names
        and functions are checked.

    Returns
    -------
    bool
    """
    if code[:6] != b"\x7fELF\x02\x01":
        return True
    try:
        return _is_consistent(code, functions)
    except (IndexError, ValueError, struct.error):  # a table ends where the next entry should be
        return False


def undefined(code: bytes) -> set[str]:
    """Names of the functions and variables that a consistent object refers to and does not define; of another format
    than `is_consistent` looks at: none.
    """
    if code[:6] != b"\x7fELF\x02\x01":
        return set()
    (start,) = struct.unpack_from("<Q", code, 40)
    sections = np.frombuffer(code, _SECTION, struct.unpack_from("<H", code, 60)[0], start)
    names: set[str] = set()
    for table in sections[sections["type"] == _SYMTAB]:
        symbols = _entries(code, table, _SYMBOL)[1:]  # the first is no symbol
        missing = symbols[symbols["section"] == _UNDEFINED]
        names.update(_name(code, sections[table["link"]], at).decode() for at in missing["name"])
    return names


def _is_consistent(code: bytes, functions: Collection[str]) -> bool:
    kind, machine = struct.unpack_from("<HH", code, 16)
    (start,) = struct.unpack_from("<Q", code, 40)
    entry, count, names_at = struct.unpack_from("<HHH", code, 58)
    if entry != _SECTION.itemsize or not 0 < count < _RESERVED:
        return False
    sections = np.frombuffer(code, _SECTION, count, start)
    if not _within(sections, len(code)) or not _is_text(code, sections[names_at], sections["name"]):
        return False
    linked = machine == _CUDA
    unknown = (sections["type"] == _REL) | (sections["flags"] & _THREAD_LOCAL != 0)  # to LLVM's loader
    if not linked and (kind != _RELOCATABLE or unknown.any()):
        return False
    found: set[str] = set()
    for table in sections[sections["type"] == _SYMTAB]:
        symbols = _entries(code, table, _SYMBOL)
        strings = sections[table["link"]]
        if not _is_text(code, strings, symbols["name"]) or not (linked or _symbols_fit(symbols, sections)):
            return False
        found.update(_functions(code, symbols, strings, sections))
    if not found.issuperset(functions):
        return False
    return linked or (
        all(
            _relocations_fit(code, table, sections, _WIDTHS.get(machine))
            for table in sections[sections["type"] == _RELA]
        )
        and all(
            _is_unwind_table(_content(code, section))
            for section in sections
            if _name(code, sections[names_at], section["name"]) == b".eh_frame"
        )
    )


def _within(sections: np.ndarray, size: int) -> bool:
    """Whether the sections lie within the file, and have plausible alignments."""
    held = sections[sections["type"] != _NOBITS]
    ends = held["offset"] + held["size"]
    aligns = sections["align"]
    return bool(
        (held["size"] <= size).all()
        and (ends <= size).all()
        and (ends >= held["offset"]).all()
        and (sections["size"] <= _MAX_ZEROS).all()
        and (aligns <= 4096).all()
        and ((aligns & (aligns - np.minimum(aligns, 1))) == 0).all()  # 0 or a power of two
    )


def _content(code: bytes, section: Any) -> bytes:
    return code[int(section["offset"]) : int(section["offset"]) + int(section["size"])]


def _entries(code: bytes, section: Any, kind: np.dtype) -> np.ndarray:
    """The entries of a table. ValueError if it has no whole number of them."""
    if section["entry"] != kind.itemsize:
        raise ValueError(f"entries of {section['entry']} bytes")
    return np.frombuffer(_content(code, section), kind)


def _is_text(code: bytes, section: Any, names: np.ndarray) -> bool:
    """Whether the section is a string table in which these names begin."""
    text = _content(code, section)
    return bool(section["type"] == _STRTAB and text.endswith(b"\0") and (names < len(text)).all())


def _name(code: bytes, strings: Any, at: Any) -> bytes:
    start = int(strings["offset"]) + int(at)
    return code[start : code.index(b"\0", start)]


def _symbols_fit(symbols: np.ndarray, sections: np.ndarray) -> bool:
    """Whether each symbol is of a type that LLVM loads, and undefined, absolute, common or within a section."""
    at, kind = symbols["section"], symbols["info"] & 15
    special = np.isin(at, (_UNDEFINED, _ABSOLUTE, _COMMON))
    if not (special | (at < len(sections))).all() or (kind > _OF_FILE).any() or special[kind == _OF_SECTION].any():
        return False
    common = symbols[at == _COMMON]
    held = symbols[~special]
    sizes = sections["size"][held["section"]]
    return bool(
        (common["size"] <= _MAX_ZEROS).all()
        and (common["value"] <= 4096).all()
        and ((common["value"] & (common["value"] - np.minimum(common["value"], 1))) == 0).all()
        and (held["value"] <= sizes).all()
        and (held["size"] <= sizes - held["value"]).all()
    )


def _functions(code: bytes, symbols: np.ndarray, strings: Any, sections: np.ndarray) -> list[str]:
    """Names of the functions that the symbols define in executable sections."""
    code_symbols = symbols[(symbols["info"] & 15 == _FUNCTION) & (symbols["section"] < len(sections))]
    executable = sections["flags"][code_symbols["section"]] & (_ALLOC | _EXECUTABLE) == _ALLOC | _EXECUTABLE
    visible = np.isin(code_symbols["info"] >> 4, (_GLOBAL, _WEAK))
    defined = code_symbols[executable & visible & (code_symbols["section"] != _UNDEFINED) & (code_symbols["size"] > 0)]
    return [_name(code, strings, at).decode(errors="replace") for at in defined["name"]]


def _relocations_fit(code: bytes, table: Any, sections: np.ndarray, widths: dict[int, int] | None) -> bool:
    """Whether each relocation is one that LLVM applies, within the section that it changes, by a symbol that exists."""
    relocations, target = _entries(code, table, _RELOCATION), sections[table["info"]]
    symbols = sections[table["link"]]
    if symbols["type"] != _SYMTAB or target["type"] not in (_PROGBITS, _X86_64_UNWIND):
        return False
    kinds = _entries(code, symbols, _SYMBOL)["info"] & 15
    if (relocations["symbol"] >= len(kinds)).any() or (kinds[relocations["symbol"]] == _OF_FILE).any():
        return False
    if widths is None:
        return bool((relocations["offset"] < target["size"]).all())
    changed = np.array([widths.get(int(kind), 1 << 40) for kind in relocations["type"]], np.uint64)
    return bool((changed <= target["size"]).all() and (relocations["offset"] <= target["size"] - changed).all())


def _is_unwind_table(table: bytes) -> bool:
    """Whether .eh_frame is a sequence of records, each a CIE that LLVM writes or an FDE that refers to one before."""
    at, cies = 0, set[int]()
    while at < len(table):
        length, back = struct.unpack_from("<II", table, at)
        if not 8 <= length <= len(table) - at - 4:
            return False
        if back == 0:
            version, augmentation = table[at + 8], table[at + 9 : at + 12]
            if version not in (1, 3) or augmentation not in (b"zR\0", b"\0"):
                return False
            cies.add(at)
        elif at + 4 - back not in cies:
            return False
        at += 4 + length
    return True
