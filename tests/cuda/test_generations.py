"""Which generation of CUDA kernels a profile's rows choose, with which tile. No device is needed."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import asdict, replace
from typing import Any

import pytest

from flashkit.backends.cuda_common import backend, generation, simt
from flashkit.backends.cuda_common.compiler import CompileError
from flashkit.backends.cuda_common.device import MODELS
from flashkit.backends.cupy_raw import sm80
from flashkit.backends.cupy_raw.backend import CupyRawBackend
from flashkit.backends.numba_cuda.backend import NumbaCudaBackend
from flashkit.devices import schema
from flashkit.devices.schema import TileRow
from flashkit.mods import expr
from flashkit.spec import AttentionSpec, Direction, Problem, Verdict
from flashkit.tools.autotune import cuda as tune_cuda

HOPPER = MODELS["sm_90a"]
SPEC = AttentionSpec("bfloat16", 64, 64)
LONG, SHORT = (Problem(SPEC, 1, 8, n, 4096, "cupy") for n in (4096, 1))
HEAD = "schema: 1\ndevice: {kind: cuda}\ntiles:\n  cupy_raw.forward:\n"


class Fake(generation.Generation):
    """A generation that has no kernels."""

    def __init__(self, name: str, refusal: str = "") -> None:
        self.name, self.verdict = name, Verdict(not refusal, refusal)
        self.directions: tuple[str, ...] = ("forward",)

    def supports(self, *question: Any) -> Verdict:
        return self.verdict


def rows(*names_and_rates: tuple[str, float | None], more: str = "") -> Any:
    text = "".join(
        f"    - {{block_q: 128, block_k: 64, options: {{generation: {name}}}, measured: {{tflops: {rate or 'null'}}}"
        f"{more}}}\n"
        for name, rate in names_and_rates
    )
    return schema.parse(HEAD + text)


def chosen(monkeypatch: pytest.MonkeyPatch, profile: Any, *generations: Fake, problem: Problem = LONG) -> Any:
    monkeypatch.setattr(CupyRawBackend, "generations", generations)
    return CupyRawBackend().choose(problem, profile, HOPPER, "forward")


def test_the_newest_without_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, rows(("simt", None)), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, found.row, found.rejected) == ("sm80", None, [])


def test_the_fastest_of_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, rows(("sm80", 10), ("simt", 20)), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, found.row.options) == ("simt", {"generation": "simt"})
    assert found.rejected == ["sm80: 10 TFLOP/s in the profile"]


def test_a_newer_one_that_was_not_measured_stays_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, rows(("simt", 20)), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, found.row) == ("sm80", None)


def test_what_cannot_do_it_is_left_out_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cannot = Fake("sm80", "it is Sunday")
    found = chosen(monkeypatch, rows(("sm80", 90), ("simt", 20)), cannot, Fake("simt"))
    assert (found.generation.name, found.rejected) == ("simt", ["sm80: it is Sunday"])
    assert chosen(monkeypatch, rows(("simt", 20)), cannot).generation is None


def test_a_forced_one_takes_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "sm80")
    found = chosen(monkeypatch, rows(("sm80", 10), ("simt", 20)), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, found.row.options) == ("sm80", {"generation": "sm80"})


def test_a_forced_one_leaves_a_direction_that_it_has_not_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = Fake("sm80"), Fake("simt")
    new.verdict, old.directions = Verdict(False, "it goes forward"), ("forward", "backward")
    monkeypatch.setattr(CupyRawBackend, "generations", (new, old))
    monkeypatch.setenv(backend.VARIABLE, "sm80")
    profile = rows(("simt", None))
    assert CupyRawBackend().choose(LONG, profile, HOPPER, "forward").generation is None
    found = CupyRawBackend().choose(LONG, profile, HOPPER, "backward").generation
    assert found is not None and found.name == "simt"


def test_rows_for_many_do_not_count_for_few_nor_those_for_few_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = rows(("sm80", 10)), rows(("sm80", 10), more=", max_rows: 16")
    for profile, problem, applies in ((many, LONG, 1), (many, SHORT, 0), (few, LONG, 0), (few, SHORT, 1)):
        assert (chosen(monkeypatch, profile, Fake("sm80"), problem=problem).row is not None) == applies
    # Query heads that share keys count together.
    grouped = Problem(AttentionSpec("bfloat16", 64, 64, group=32), 1, 32, 1, 4096, "cupy")
    assert chosen(monkeypatch, few, Fake("sm80"), problem=grouped).row is None


# --- tiles and rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "direction"),
    [(each, direction) for each in CupyRawBackend.generations for direction in each.directions],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("problem", [LONG, SHORT], ids=["long", "short"])
def test_every_candidate_fits_and_comes_back_from_its_row(each: Any, direction: Any, problem: Problem) -> None:
    tiles = each.candidates(problem, HOPPER, direction)
    assert len(set(tiles)) == len(tiles) >= 2
    for tile in tiles:
        numbers = asdict(tile)
        inside = {name: numbers.pop(name) for name in generation.IN_ROW if name in numbers}
        row = TileRow(**inside, options={"generation": each.name, **numbers}, why="measured")
        assert generation.tile_of(type(tile), row, SPEC, lambda *_: True) == (tile, "measured")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"block_q": 96}, "block_q is a multiple of 64"),
        ({"options": {"warps": 4, "speed": 9}}, "it has no speed"),
        ({"options": {}}, "warps"),
        ({"block_k": 1024}, "fits no head dim"),
        ({"options": {"warps": 0}}, "warps are 1, 2, 4 or 8"),
        ({"options": {"warps": 4, "warps_k": 0}}, "by zero"),
        ({"options": {"warps": "four"}}, "warps is 'four'; an integer"),
        ({"options": {"warps": 4.0}}, "warps is 4.0; an integer"),
    ],
)
def test_a_row_that_is_no_tile_is_not_followed(fields: dict[str, Any], complaint: str) -> None:
    row = TileRow(**{"block_q": 128, "block_k": 64, "options": {"warps": 4}, **fields})
    schema.forget_warnings()
    with pytest.warns(schema.ProfileWarning, match="no tile of Sm80Tile"):
        tile, why = generation.tile_of(sm80.Sm80Tile, row, SPEC, lambda tile, spec: tile.fits(spec, HOPPER))
    assert tile is None
    assert complaint in why


def test_a_tile_that_fits_other_head_dims_is_left_without_a_warning() -> None:
    row = TileRow(128, 128, options={"warps": 4}, stages=2)
    wide = AttentionSpec("bfloat16", 256, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tile, why = generation.tile_of(sm80.Sm80Tile, row, wide, lambda tile, spec: tile.fits(spec, HOPPER))
    assert tile is None and "does not fit" in why


NUMBERS = (0, 1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 48, 64, 96, 100, 128, 192, 256, 500, 512, 1000, 1024)
ANYTHING = (*NUMBERS, *(-n for n in NUMBERS), 2**53, 2.5, True, "four", "")


@pytest.mark.parametrize("subject", [CupyRawBackend(), NumbaCudaBackend()], ids=lambda one: one.name)
def test_no_row_stops_a_plan(subject: backend.CudaBackend) -> None:
    """Random rows for every kind of tile: each is one that the generation could have chosen, or is not followed."""
    rng = random.Random(0)
    followed = refused = 0
    for each, direction in [(one, way) for one in subject.generations for way in one.directions]:
        for problem in (LONG, SHORT, replace(LONG, spec=replace(SPEC, dtype="float32"))):
            if not each.supports(problem, HOPPER, direction):
                continue
            tile = each.candidates(problem, HOPPER, direction)[0]
            names = [field for field in asdict(tile) if field not in generation.IN_ROW]
            for _ in range(300):
                choices = NUMBERS if rng.random() < 0.9 else ANYTHING
                options = {name: rng.choice(choices) for name in names if rng.random() < 0.7}
                row = TileRow(
                    rng.choice(NUMBERS[1:]), rng.choice(NUMBERS[1:]), stages=rng.choice((None, 1, 2, 3, 32)),
                    options={"generation": each.name, **options},
                )  # fmt: skip
                part = "forward" if direction == "forward" else "dkdv"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if each.name == "simt":
                        found, why = simt.by_profile(part, row, problem.spec, HOPPER)
                        found = None if "by the model" in why else found
                    else:
                        fits = lambda x, spec: x.fits(spec, HOPPER)
                        found, why = generation.tile_of(type(tile), row, problem.spec, fits)
                if found is None:
                    assert "no tile" in why or "does not fit" in why
                    refused += 1
                    continue
                followed += 1
                assert all(type(n) is int and 0 <= n <= 1024 for n in asdict(found).values()), found
                assert 32 * getattr(found, "warps", 1) <= 1024 and getattr(found, "threads", 32) <= 1024
    assert followed and refused >= 1000, (followed, refused)


def test_an_impossible_backward_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="in groups of 16"):
        sm80.Sm80BackwardTile(64, 96, 8, 2, 4, 2)


def test_a_row_whose_kernels_do_not_compile_is_left_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiles(Fake):
        def plan(self, problem: Problem, row: Any, *where: Any) -> str:
            if row is not None:
                raise CompileError("7 is not a multiple of 8")
            return "its own tile"

    monkeypatch.setattr(CupyRawBackend, "generations", (Compiles("sm80"),))
    verified: list[object] = []
    monkeypatch.setattr(backend.verify, "check", lambda made, *_: verified.append(made))
    schema.forget_warnings()
    with pytest.warns(schema.ProfileWarning, match="<text>:5: not followed.*7 is not a multiple of 8"):
        assert backend.CudaPlan(CupyRawBackend(), LONG, rows(("sm80", 10))).on(HOPPER, "forward") == "its own tile"
    assert verified == ["its own tile"]


# --- what is tuned ----------------------------------------------------------------------------------------------------


def test_every_target_is_of_a_generation_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cuda.device, "current", lambda: HOPPER)
    tunable = tune_cuda.TunableCuda(CupyRawBackend())
    targets = tunable.targets(tune_cuda.FULL, None)
    assert len({target.key for target in targets}) == len(targets)
    assert {target.generation for target in targets if target.dtype == "float64"} == {"simt"}
    of = [t.generation for t in targets if t.problem == ("forward", "bfloat16", "64", "full")]
    assert of == [each.name for each in CupyRawBackend().allowed()]  # newest first: the others are held against it
    assert {t.direction for t in targets if t.few} == {"forward"}
    assert {t.dtype for t in tunable.targets(tune_cuda.QUICK, ["float16"])} == {"float16"}


def test_what_is_timed_fills_a_device() -> None:
    Target = tune_cuda.Target
    for target in (Target("backward", "float32", 64, causal=True), Target("forward", "float16", 96)):
        problem = tune_cuda.problem_of(target, 2048)
        assert problem.batch * problem.n_q == tune_cuda.TOKENS
        assert problem.spec.masked == target.causal
        assert (problem.array_kind, problem.spec.dtype) == ("cupy", target.dtype)
    decoding = tune_cuda.problem_of(Target("forward", "float16", 128, few=True), 2048)
    assert (decoding.n_q, decoding.n_k, decoding.spec.group) == (1, tune_cuda.DECODED_KEYS, 4)


def test_a_trials_tile_becomes_a_row_and_is_followed() -> None:
    for tile in sm80.Sm80().candidates(LONG, HOPPER, "forward"):
        tried = tune_cuda.CudaTile.of("sm80", tile)
        assert (tried.block_q, tried.block_k, tried.shape) == (tile.block_q, tile.block_k, "sm80")
        assert generation.tile_of(sm80.Sm80Tile, TileRow(**tried.row), SPEC, lambda *_: True)[0] == tile
        assert str(tried).startswith(f"{tile.block_q} x {tile.block_k}, warps {tile.warps}")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("subject", [CupyRawBackend(), NumbaCudaBackend()], ids=lambda one: one.name)
def test_every_candidate_can_stand_in_a_profile(subject: backend.CudaBackend, direction: Direction) -> None:
    tried = 0
    for dtype, d, mask in itertools.product(("float32", "bfloat16"), (64, 128, 256), (None, expr.K <= expr.Q)):
        problem = Problem(AttentionSpec(dtype, d, d, mask=mask), 4, 16, 4096, 4096, "cupy")
        for one in subject.generations:
            if direction not in one.directions or not one.supports(problem, HOPPER, direction):
                continue
            for tile in one.candidates(problem, HOPPER, direction):
                row = TileRow(**tune_cuda.CudaTile.of(one.name, tile).row)
                assert generation.tile_of(type(tile), row, SPEC, lambda *_: True)[0] == tile
                tried += 1
    assert tried > 20


def test_a_row_may_leave_the_tile_to_the_generation() -> None:
    tile = tune_cuda.CudaTile.of("sm80", sm80.Sm80BackwardTile(64, 128, 8, 2, 4, 2), own=True)
    row = TileRow(**tile.row, why="measured")
    assert (row.block_q, row.block_k) == (64, 128)
    assert generation.tile_of(sm80.Sm80BackwardTile, row, SPEC, lambda *_: True) == (None, "measured")


def test_autotune_marks_what_a_generation_chooses_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cuda.device, "current", lambda: HOPPER)
    tunable = tune_cuda.TunableCuda(CupyRawBackend())
    targets = [target for target in tunable.targets(tune_cuda.QUICK, ["bfloat16"]) if not target.few]
    runner = tunable.runner(tune_cuda.QUICK, targets)
    for target in targets:
        own = [tile.own for tile in runner.listed(target)]
        assert own == [target.generation == "sm90"] + [False] * (len(own) - 1)
