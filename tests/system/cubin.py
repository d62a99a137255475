"""A source of CUDA binaries for the cache, which needs no compiler."""

from __future__ import annotations

import struct


class Source:
    """Of a binary without kernels."""

    name = "kernel"
    compiled = 0

    def made_from(self) -> object:
        return "text"

    def compile(self, arch: str) -> tuple[bytes, str]:
        self.compiled += 1
        header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 2, 190)
        names = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 128, 1, 0, 0, 1, 0)  # the only section, which has no name
        header = header.ljust(40, b"\0") + struct.pack("<Q10xHHH", 64, 64, 1, 0)
        return header.ljust(64, b"\0") + names + b"\0", ""
