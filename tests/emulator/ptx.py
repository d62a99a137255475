"""PTX parsed into tables for the interpreter (PTX ISA 9.0).

A thread's registers are numbered, and constants are registers, too. An instruction is a row of `code`: its operation,
its guard (0, or predicate register n as n + 1, negative where negated), the first of its operands in `operands`, how
many there are, and two numbers of its own, such as the width of a load.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .mnemonics import WIDTHS, normal

SPECIAL = (
    "%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%warpid", "%cluster_ctarank", "%clock", "%clock64",
    "%globaltimer", "%smid", "%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z", "PARAMETERS", "SHARED",
)  # fmt: skip
"""Registers that a launch sets; the first numbers are theirs."""

LOCAL = 1 << 33
"""Generic address of a thread's local memory: above that of any shared memory, below global memory."""


@dataclass
class Entry:
    """A kernel."""

    name: str
    code: np.ndarray
    operands: np.ndarray
    registers: int
    constants: list[tuple[int, int]]  # register, bits
    parameters: list[tuple[int, int]]  # where each begins, its bytes
    shared: int  # bytes, not counting what a launch asks for
    local: int  # bytes of a thread
    threads: int
    blocks_per_sm: int  # as its registers permit
    cluster: int
    text: list[str] = field(repr=False)  # of each row
    hits: np.ndarray = field(init=False, repr=False)  # how often each row ran

    def __post_init__(self) -> None:
        self.hits = np.zeros(len(self.code), np.int64)


@dataclass
class Module:
    entries: dict[str, Entry]
    place: int  # the address of its global variables
    image: bytes  # their contents


Number = Callable[[str], int]
"""The number of an operation; a new name gets the next one."""

_BLANK, _LABEL, _TARGETS = map(re.compile, (r"\s*", r"([$\w]+):(?!:)\s*", r"\.branchtargets\s+([^;]+);"))
_DECLARED, _COUNTED = re.compile(r"\.reg\s+\.\w+\s+(.*)", re.S), re.compile(r"(.*)<(\d+)>")
_GUARDED = re.compile(r"@(!?)([%\w#]+)\s+(.*)", re.S)
_NUMBER, _ADDRESS = re.compile(r"-?\d"), re.compile(r"([%$\w.#]+)(?:\s*\+\s*(-?\w+))?")
_OPERAND = re.compile(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+")  # a comma in brackets ends none


def _strip(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.S))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def module(text: str, number: Number, allocate: Callable[[int], int]) -> Module:
    """Parse a module. allocate: returns the address of so many bytes, for its global variables."""
    image, found = bytearray(), dict[str, int]()
    head, bodies = _kernels(_strip(text))
    for align, kind, name, count, values in re.findall(
        r"\.(?:global|const) \.align (\d+) \.(\w+) (\w+)(?:\[(\d*)\])?(?: = ([^;]+))?;", head
    ):
        width = WIDTHS[kind]
        listed = re.findall(r"-?[\w.]+", values or "")
        size = width * int(count or len(listed) or 1)
        data = b"".join((_literal(x, kind) & (1 << 8 * width) - 1).to_bytes(width, "little") for x in listed)
        at = _up(len(image), max(16, int(align)))
        image += bytes(at - len(image)) + data.ljust(size, b"\0")
        found[name] = at
    place = allocate(len(image))
    places = {name: place + at for name, at in found.items()}
    outside = _shared(head)
    entries = {}
    for name, parameters, directives, body in bodies:
        used = {symbol: at for symbol, at in outside.items() if re.search(rf"\b{symbol}\b", body)}
        entries[name] = _Body(name, parameters, directives, body, places, used, number).entry()
    return Module(entries, place, bytes(image))


def _kernels(text: str) -> tuple[str, list[tuple[str, str, str, str]]]:
    """The text outside of kernels, and the name, parameters, directives and body of each kernel."""
    head, found, at = "", [], 0
    for match in re.finditer(r"\.visible \.entry (\w+)\((.*?)\)([^{]*)\{", text, re.S):
        head += text[at : match.start()]
        depth, at = 1, match.end()
        while depth:
            brace = re.compile(r"[{}]").search(text, at)
            assert brace, "a kernel has no end"
            depth, at = depth + (1 if brace[0] == "{" else -1), brace.end()
        found.append((*match.groups(), text[match.end() : at - 1]))
    return head + text[at:], found


def _shared(text: str) -> dict[str, tuple[int, int]]:
    """Alignment and size of variables in shared memory; the size is -1 for the one whose size a launch gives."""
    declared = re.findall(r"(\.extern )?\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d*)\])?", text)
    return {
        name: (int(align), -1 if extern else WIDTHS[kind] * int(count or 1))
        for extern, align, kind, name, count in declared
    }


def _literal(text: str, kind: str) -> int:
    if text[:2] in ("0f", "0F"):
        bits = int(text[2:], 16)
        return bits if kind != "f64" else struct.unpack("<Q", struct.pack("<d", _float(bits)))[0]
    if text[:2] in ("0d", "0D"):
        bits = int(text[2:], 16)
        return bits if kind != "f32" else _bits(struct.unpack("<d", struct.pack("<Q", bits))[0])
    text = text.rstrip("U")
    if kind == "f32":
        return _bits(float(text))
    if kind == "pred":
        return int(int(text, 0) != 0)
    return int(text, 0) if not re.fullmatch(r"-?0\d+", text) else int(text, 8)


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


class _Body:
    """A kernel's body, while it is parsed."""

    def __init__(
        self, name: str, parameters: str, directives: str, body: str, places: dict[str, int],
        shared: dict[str, tuple[int, int]], number: Number,
    ) -> None:  # fmt: skip
        self.name, self.body, self.places, self.number = name, body, places, number
        self.parameters, self.sizes = self._parameters(parameters)
        threads = re.search(r"\.(?:max|req)ntid (\d+)", directives)
        blocks = re.search(r"\.minnctapersm (\d+)", directives)
        cluster = re.search(r"\.reqnctapercluster (\d+)", directives)
        self.threads, self.cluster = int(threads[1]) if threads else 1024, int(cluster[1]) if cluster else 1
        self.blocks_per_sm = int(blocks[1]) if blocks else max(1, 1024 // self.threads)
        self.registers = {name: i for i, name in enumerate(SPECIAL)}
        self.constants: dict[int, int] = {}
        self.rows: list[list[int]] = []
        self.operands: list[int] = []
        self.text: list[str] = []
        self.labels: dict[tuple[int, str], int] = {}  # by the number of their scope and their name
        self.branches: list[tuple[int, str, list[int]]] = []
        self.local, self.locals = 0, dict[str, int]()
        self.shared_size, self.shared = 0, dict[str, int]()
        own = _shared(body)
        dynamic = [symbol for symbol, (_, size) in shared.items() if size < 0]
        for symbol, (align, size) in {**shared, **own}.items():
            if size >= 0:
                self.shared_size = _up(self.shared_size, align)
                self.shared[symbol], self.shared_size = self.shared_size, self.shared_size + size
        for symbol in dynamic:
            self.shared_size = _up(self.shared_size, shared[symbol][0])
            self.shared[symbol] = self.shared_size
        for align, size, depot in [
            (int(a), int(n), s) for a, s, n in re.findall(r"\.local \.align (\d+) \.b8\s+(\w+)\[(\d+)\]", body)
        ]:
            self.local = _up(self.local, align)
            self.locals[depot], self.local = self.local, self.local + size

    @staticmethod
    def _parameters(text: str) -> tuple[dict[str, int], list[tuple[int, int]]]:
        places, sizes, at = {}, list[tuple[int, int]](), 0
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            match = re.fullmatch(r"\.param (?:\.align (\d+) )?\.(\w+)(?: \.ptr[^_]*?)? (\w+)(?:\[(\d+)\])?", part)
            assert match, part
            align, kind, name, count = match.groups()
            size = WIDTHS[kind] * int(count or 1)
            at = _up(at, int(align or WIDTHS[kind]))
            places[name], at = at, at + size
            sizes.append((at - size, size))
        return places, sizes

    def entry(self) -> Entry:
        self._read(self.body)
        for row, label, scopes in self.branches:
            self.rows[row][4] = next(
                self.labels[scope, label] for scope in reversed(scopes) if (scope, label) in self.labels
            )
        return Entry(
            self.name, np.array(self.rows, np.int32).reshape(-1, 6), np.array([*self.operands, *[0] * 8], np.int32),
            len(self.registers) + len(self.constants), [(r, bits) for bits, r in self.constants.items()],
            self.sizes, self.shared_size, self.local, self.threads, self.blocks_per_sm, self.cluster, self.text,
        )  # fmt: skip

    def _read(self, body: str) -> None:
        scopes, numbers = [dict[str, str]()], [0]
        at, count = 0, 0
        tables: dict[str, list[str]] = {}
        while True:
            match = _BLANK.match(body, at)
            at = match.end() if match else at
            if at >= len(body):
                break
            if body[at] == "{":
                count += 1
                scopes.append({})
                numbers.append(count)
                at += 1
                continue
            if body[at] == "}":
                scopes.pop()
                numbers.pop()
                at += 1
                continue
            label = _LABEL.match(body, at)
            if label:
                at = label.end()
                targets = _TARGETS.match(body, at)
                if targets:
                    tables[label[1]] = [x.strip() for x in targets[1].split(",")]
                    at = targets.end()
                else:
                    self.labels[numbers[-1], label[1]] = len(self.rows)
                continue
            end = body.index(";", at)
            statement, at = body[at:end].strip(), end + 1
            if statement.startswith("."):
                declared = _DECLARED.match(statement)
                if declared and len(scopes) > 1:
                    for name in declared[1].split(","):
                        name = name.strip()
                        counted = _COUNTED.fullmatch(name)
                        for each in [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]:
                            scopes[-1][each] = f"{each}#{numbers[-1]}"
                continue
            self._statement(statement, scopes, numbers)

    def _register(self, name: str, scopes: list[dict[str, str]]) -> int:
        for scope in reversed(scopes):
            if name in scope:
                name = scope[name]
                break
        else:
            if not name.startswith("%") and name not in self.registers and "+" not in name and name != "_":
                raise ValueError(f"{self.name}: what is {name}?")
        return self.registers.setdefault(name, len(self.registers) + len(self.constants))

    def _constant(self, bits: int) -> int:
        bits &= (1 << 64) - 1
        if bits not in self.constants:
            self.constants[bits] = len(self.registers) + len(self.constants)
        return self.constants[bits]

    def _operand(self, text: str, kind: str, scopes: list[dict[str, str]]) -> list[int]:
        text = text.strip()
        if text.startswith("%") and "|" not in text:  # as most are
            return [self._register(text, scopes)]
        if text.startswith("{"):
            inner = text[1 : text.rindex("}")]
            return [each for part in inner.split(",") for each in self._operand(part, kind, scopes)]
        if text.startswith("["):
            return self._address(text[1:-1].strip(), scopes)
        if "|" in text:
            return [each for part in text.split("|") for each in self._operand(part, kind, scopes)]
        if text == "_":
            return [self._register("_", scopes)]
        if text in self.shared:
            return [self._place("SHARED", self.shared[text], scopes)]
        if text in self.locals:
            return [self._constant(LOCAL + self.locals[text])]
        if text in self.places:
            return [self._constant(self.places[text])]
        if text in self.parameters:
            return [self._place("PARAMETERS", self.parameters[text], scopes)]
        if _NUMBER.match(text):
            return [self._constant(_literal(text, kind))]
        return [self._register(text, scopes)]

    def _place(self, base: str, offset: int, scopes: list[dict[str, str]]) -> int:
        """A register with base + offset, computed by a row of its own."""
        made = self._register(f"{base}+{offset}", scopes)
        name = "add.s32" if base == "SHARED" else "add.s64"
        self._row(name, 0, [made, self.registers[base], self._constant(offset)], 0, 0, f"{name} {base}+{offset}")
        return made

    def _address(self, text: str, scopes: list[dict[str, str]]) -> list[int]:
        """A base register and an offset; after a comma, the coordinates of a tensor map's box."""
        if "," in text:
            first, rest = text.split(",", 1)
            return self._address(first.strip(), scopes) + self._operand(rest.strip(), "s32", scopes)
        match = _ADDRESS.fullmatch(text)
        assert match, text
        base, offset = match[1], int(match[2] or "0", 0)
        zero = self._constant(0)
        if base in self.parameters:
            return [self.registers["PARAMETERS"], self.parameters[base] + offset]
        if base in self.shared:
            return [self.registers["SHARED"], self.shared[base] + offset]
        if base in self.locals:
            return [self._constant(LOCAL), self.locals[base] + offset]
        if base in self.places:
            return [self._constant(self.places[base]), offset]
        if re.match(r"\d", base):
            return [zero, int(base, 0) + offset]
        return [self._register(base, scopes), offset]

    def _row(self, name: str, guard: int, operands: list[int], x: int, y: int, text: str) -> None:
        self.rows.append([self.number(name), guard, len(self.operands), len(operands), x, y])
        self.operands += operands
        self.text.append(text)

    def _statement(self, statement: str, scopes: list[dict[str, str]], numbers: list[int]) -> None:
        guard, rest = 0, statement
        if guarded := _GUARDED.match(statement):
            register = self._register(guarded[2], scopes) + 1
            guard, rest = -register if guarded[1] else register, guarded[3]
        name, given = (rest.split(None, 1) + [""])[:2]
        parts = [part.strip() for part in _OPERAND.findall(given)]
        name, kind, x, y = normal(name)
        if name == "bra":
            self.branches.append((len(self.rows), parts[0], list(numbers)))
            self._row("bra", guard, [], 0, 0, statement)
            return
        if name.startswith("mov") and any(part.startswith("{") for part in parts):
            name = "unpack" if parts[0].startswith("{") else "pack"
            x = WIDTHS[kind] // (max(part.count(",") for part in parts) + 1)
        if name == "cp.async.shared.global" and len(parts) == 4:
            x = 1 if re.fullmatch(r"%p\d+|q|p", parts[3]) else 2  # a predicate: nothing is read; or the bytes that are
        operands = [each for part in parts for each in self._operand(part, kind, scopes)]
        self._row(name, guard, operands, x, y, statement)
