"""The tag of a wheel: FLASHKIT_WHEEL names the architecture of the CPU kernels that it carries, if it is only one."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARCHITECTURES = "x86_64", "aarch64"


class Tag(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if architecture := os.environ.get("FLASHKIT_WHEEL"):
            if architecture not in ARCHITECTURES:
                raise ValueError(f"FLASHKIT_WHEEL: expected {' or '.join(ARCHITECTURES)}, got {architecture!r}")
            # Kernels call C's functions of every Linux with glibc 2.17, and no Python module is compiled.
            build_data["tag"] = f"py3-none-manylinux_2_17_{architecture}.manylinux2014_{architecture}"
