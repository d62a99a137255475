"""Devices that are not there, and the tile of a call on them by the rows of a shipped profile."""

from typing import Any

from flashkit.backends.cuda_common.backend import CudaBackend
from flashkit.backends.cuda_common.device import Device
from flashkit.backends.cuda_common.generation import TileTables
from flashkit.backends.cupy_raw.backend import CupyRawBackend
from flashkit.devices import profiles
from flashkit.spec import AttentionSpec, Direction, Problem

MODELS = {
    "sm_80": Device("Ampere (A100)", (8, 0), 108, 166912, 167936),
    "sm_90a": Device("Hopper (H100, H200)", (9, 0), 132, 232448, 233472),
}
"""Devices to compile for without one, by the name of the architecture."""

HOPPER = MODELS["sm_90a"]
CUPY = CupyRawBackend()


def tables(
    direction: Direction = "forward", device: Device = HOPPER, profile: Any = "generic_cuda", backend: str = "cupy_raw"
) -> TileTables:
    """The tables of a profile, shipped if a name is given."""
    found = profiles.by_name(profile) if isinstance(profile, str) else profile
    return TileTables(backend, found, device, direction)


def tile_of(
    what: AttentionSpec | Problem, generation: str, direction: Direction = "forward", device: Device = HOPPER,
    backend: CudaBackend = CUPY,
) -> Any:  # fmt: skip
    """The tile that a generation has for a problem, or for long sequences of a spec."""
    problem = what if isinstance(what, Problem) else Problem(what, 4, 16, 4096, 4096)
    (kernels,) = (each for each in backend.generations if each.name == generation)
    return next(tables(direction, device, backend=backend.name).choices(kernels, problem)).tile
