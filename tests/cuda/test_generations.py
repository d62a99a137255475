"""Which generation of CUDA kernels a profile's rows choose, with which tile. No device is needed."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiles import MODELS

from flashkit import errors, mods
from flashkit.backends.cuda_common import backend, generation
from flashkit.backends.cuda_common.backend import CudaBackend
from flashkit.backends.cuda_common.compiler import CompileError, SerialisedError
from flashkit.backends.cuda_common.device import Device
from flashkit.backends.cuda_common.launch import listing
from flashkit.backends.cupy_raw import sm80_jvp, sm90_jvp
from flashkit.backends.cupy_raw.backend import CupyRawBackend
from flashkit.backends.numba_cuda.backend import NumbaCudaBackend
from flashkit.devices import profiles, schema
from flashkit.devices.schema import TileRow
from flashkit.mods import expr
from flashkit.spec import AttentionSpec, Direction, Fp8, Problem, Tokens, Verdict
from flashkit.tools.autotune import cuda as tune_cuda

HOPPER = MODELS["sm_90a"]
SPEC = AttentionSpec("bfloat16", 64, 64)
SM90, SM80 = CupyRawBackend.generations[:2]
GRAPHS = {"causal": mods.causal().expr, "softcap": mods.softcap(30.0).expr, "squared": expr.S * expr.S}
LONG, SHORT = (Problem(SPEC, 1, 8, n, 4096, "cupy") for n in (4096, 1))
HEAD = "schema: 1\ndevice: {kind: cuda}\ntiles:\n  cupy_raw.forward:\n"


class Fake(generation.Generation):
    """A generation that has no kernels. Its tile is that of any row."""

    def __init__(self, name: str, refusal: str = "") -> None:
        self.name, self.verdict = name, Verdict(not refusal, refusal)
        self.directions: tuple[str, ...] = ("forward",)

    def supports(self, *question: Any) -> Verdict:
        return self.verdict

    def tile(self, problem: Problem, row: TileRow, *where: Any) -> Any:
        return row.block_q

    def model(self, *where: Any) -> generation.Choice:
        return generation.Choice("own", None, "the model")


def rows(*names_and_rates: tuple[str, float | None], more: str = "") -> Any:
    text = "".join(
        f"    - {{generation: {name}, block_q: 128, block_k: 64, measured: {{tflops: {rate or 'null'}}}{more}}}\n"
        for name, rate in names_and_rates
    )
    return schema.parse(HEAD + text)


def chosen(monkeypatch: pytest.MonkeyPatch, profile: Any, *generations: Fake, problem: Problem = LONG) -> Any:
    monkeypatch.setattr(CupyRawBackend, "generations", generations)
    return CupyRawBackend().choose(problem, profile, HOPPER, "forward")


@pytest.mark.parametrize(
    ("speeds", "name", "row", "rejected"),
    [
        ((("simt", None),), "sm80", None, []),
        ((("simt", 20),), "sm80", None, []),  # the newer one was not measured
        ((("sm80", 10), ("simt", 20)), "simt", "simt", ["sm80: 10 TFLOP/s in the profile"]),
    ],
    ids=["the newest", "the newest beside one that was measured", "the fastest"],
)
def test_the_newest_or_the_fastest_of_those_measured(
    speeds: tuple[tuple[str, float | None], ...], name: str, row: str | None, rejected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = chosen(monkeypatch, rows(*speeds), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, getattr(found.choice.row, "generation", None)) == (name, row)
    assert not rejected or found.rejected == rejected


def test_what_cannot_do_it_is_left_out_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    cannot = Fake("sm80", "it is Sunday")
    found = chosen(monkeypatch, rows(("sm80", 90), ("simt", 20)), cannot, Fake("simt"))
    assert (found.generation.name, found.rejected) == ("simt", ["sm80: it is Sunday"])
    assert chosen(monkeypatch, rows(("simt", 20)), cannot).generation is None


def test_a_forced_one_takes_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "sm80")
    found = chosen(monkeypatch, rows(("sm80", 10), ("simt", 20)), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, found.choice.row.generation) == ("sm80", "sm80")


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
    many, few = rows(("sm80", 10), more=", min_rows: 65"), rows(("sm80", 10), more=", max_rows: 16")
    for profile, problem, applies in ((many, LONG, 1), (many, SHORT, 0), (few, LONG, 0), (few, SHORT, 1)):
        assert (chosen(monkeypatch, profile, Fake("sm80"), problem=problem).choice.row is not None) == applies
    # Query heads that share keys count together.
    grouped = Problem(AttentionSpec("bfloat16", 64, 64, group=32), 1, 32, 1, 4096, "cupy")
    assert chosen(monkeypatch, few, Fake("sm80"), problem=grouped).choice.row is None


def test_a_speed_alone_ranks_and_leaves_the_tile_to_the_rows_below(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = "    - {generation: sm80, measured: {tflops: 5}}\n    - {generation: simt, measured: {tflops: 9}}\n"
    tile = "  cuda.forward:\n    - {generation: simt, block_q: 32, block_k: 32}\n"
    found = chosen(monkeypatch, schema.parse(HEAD + speeds + tile), Fake("sm80"), Fake("simt"))
    assert (found.generation.name, found.choice.tile, found.choice.row.origin) == ("simt", 32, "<text>:8")
    assert found.rejected == ["sm80: 5 TFLOP/s in the profile"]


def test_a_generation_without_a_tile_that_fits_is_left_out() -> None:
    """float32 of wide rows fits no tile of the tensor cores' kernels in the shared memory of an L40S."""
    small, wide = Device("L40S", (8, 9), 142, 101376, 102400), AttentionSpec("float32", 192, 192)
    problem, profile = Problem(wide, 1, 16, 4096, 4096, "cupy"), profiles.by_name("l40s")
    found = CupyRawBackend().choose(problem, profile, small, "forward")
    assert found.generation is not None and found.generation.name == "simt"
    assert "sm80: no tile of the profile fits" in found.rejected
    again = replace(problem, spec=replace(wide, dtype="bfloat16"))
    assert CupyRawBackend().choose(again, profile, small, "forward").generation.name == "sm80"  # type: ignore[union-attr]


# --- the choice by the shipped rows -----------------------------------------------------------------------------------

CHOICES = json.loads(Path(__file__).with_name("choices.json").read_text())
"""[profile, backend, direction, call, generation, tile]: what shapes around every threshold take."""


@pytest.mark.parametrize(("profile", "backend"), sorted({(one[0], one[1]) for one in CHOICES}))
def test_the_shipped_rows_choose_what_was_fastest(profile: str, backend: str) -> None:
    """Whoever changes a row changes this file, and with it sees which calls get another tile."""
    subject: CudaBackend = {"cupy_raw": CupyRawBackend, "numba_cuda": NumbaCudaBackend}[backend]()
    found, device = profiles.by_name(profile), {"a100": MODELS["sm_80"]}.get(profile, HOPPER)
    wrong = []
    for _, _, direction, call, *wanted in (one for one in CHOICES if one[:2] == [profile, backend]):
        fields = dict(call)
        sizes = [fields.pop(name) for name in ("batch", "heads", "n_q", "n_k")]
        tokens = Tokens(*fields.pop("tokens")) if "tokens" in fields else None
        fields |= {name: GRAPHS[fields[name]] for name in ("score", "mask") if name in fields}
        fields |= {"fp8": Fp8(fields["fp8"])} if "fp8" in fields else {}
        problem = Problem(AttentionSpec(**fields), *sizes, "cupy", tokens)
        choice = subject.choose(problem, found, device, direction)
        assert choice.generation is not None and choice.choice is not None
        tile = list(asdict(choice.choice.tile).values())  # what follows is of dense arrays, which no row knows
        got = [choice.generation.name, tile[: len(wanted[1])]]
        if got != wanted:
            wrong.append((call, wanted, got))
    assert wrong == []


@pytest.mark.parametrize(
    ("fields", "wanted", "reason"),
    [
        ({}, "sm90", ""),
        ({"head_dim": 128, "head_dim_v": 40, "group": 4, "dtype": "float16", "dropout": True}, "sm90", ""),
        ({"packed": True, "kv_lengths": True, "mask": GRAPHS["causal"], "score": GRAPHS["squared"]}, "sm90", ""),
        ({"head_dim": 36}, "sm80", "not a multiple of 16 bytes"),
        ({"head_dim": 136}, "simt", "over 128"),
        ({"dtype": "float32"}, "simt", "tangents of float32"),
    ],
)
def test_tangents_take_the_newest_kernels_that_have_them(fields: dict[str, Any], wanted: str, reason: str) -> None:
    """Few rows, too; on Ampere never Hopper's."""
    tokens = Tokens(4, 64, 64) if "packed" in fields else None
    problem = Problem(replace(SPEC, jvp="qkv", **fields), 2, 8, 4, 64, "cupy", tokens)
    found = CupyRawBackend().choose(problem, profiles.by_name("h200"), HOPPER, "forward")
    assert found.generation is not None and found.generation.name == wanted
    assert reason in " ".join(found.rejected)
    on_ampere = CupyRawBackend().choose(problem, profiles.by_name("a100"), MODELS["sm_80"], "forward")
    assert on_ampere.generation is not None and on_ampere.generation.name == wanted.replace("sm90", "sm80")


def test_tangents_whose_kernel_would_be_serialised_run_on_ampere_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it does not compile at all."""
    problem = Problem(replace(SPEC, jvp="qkv"), 2, 8, 64, 64, "cupy")
    backend, profile = CupyRawBackend(), profiles.by_name("h200")
    found = backend.choose(problem, profile, HOPPER, "forward")
    assert found.generation is not None and found.choice is not None
    tables = generation.TileTables("cupy_raw", profile, HOPPER, "forward")

    def refuse(error: type[Exception]) -> None:
        monkeypatch.setattr(sm90_jvp.Sm90Jvp, "__init__", mock.Mock(side_effect=error("no registers")))

    with listing():
        refuse(SerialisedError)
        assert isinstance(found.generation.plan(problem, found.choice, tables), sm80_jvp.Sm80Jvp)
        refuse(CompileError)
        with pytest.raises(CompileError, match="no registers"):
            found.generation.plan(problem, found.choice, tables)


# --- tiles and rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"block_q": 96, "generation": "sm90"}, "expected block_q 64, 128 or 192"),
        ({"block_q": 128, "generation": "sm90", "stages": 1}, "expected stages >= 2"),
        ({"block_q": 96, "generation": "sm90 backward"}, "expected block_q 64 or 128"),
        ({"block_q": 64, "generation": "sm90 backward", "block_k": 64}, "block_k 128"),
        ({"block_q": 96}, "expected block_q a multiple of 64"),
        ({"options": {"warps": 4, "speed": 9}}, "it has no speed"),
        ({"options": {}}, "warps"),
        ({"block_k": 1024}, "fits no head dim"),
        ({"options": {"warps": 0}}, "expected 1, 2, 4 or 8 warps"),
        ({"options": {"warps": 4, "warps_k": 0}}, "by zero"),
        ({"options": {"warps": "four"}}, "warps: expected an integer up to 1024, got 'four'"),
        ({"options": {"warps": 4.0}}, "warps: expected an integer up to 1024, got 4.0"),
    ],
)
def test_a_row_that_is_no_tile_is_not_followed(fields: dict[str, Any], complaint: str) -> None:
    of, _, backward = fields.get("generation", "sm80").partition(" ")
    fields = {name: x for name, x in fields.items() if name != "generation"}
    made, kind = (SM80, "Sm80Tile") if of == "sm80" else (SM90, "BackwardTile" if backward else "Sm90Tile")
    options = {"options": {"warps": 4}} if of == "sm80" else {}
    row = TileRow(**{"block_q": 128, "block_k": 64 if of == "sm80" else 128, **options, **fields})
    errors.forget_warnings()
    with pytest.warns(schema.ProfileWarning, match=f"no tile of {kind}.*{complaint}"):
        assert made.tile(LONG, row, HOPPER, "backward" if backward else "forward") is None


def test_a_tile_that_fits_other_head_dims_is_left_without_a_warning() -> None:
    row = TileRow(128, 128, options={"warps": 4}, stages=2)
    wide = replace(LONG, spec=AttentionSpec("bfloat16", 256, 256))
    with warnings.catch_warnings(action="error"):
        assert SM80.tile(wide, row, HOPPER, "forward") is None


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
                    options=options,
                )  # fmt: skip
                with warnings.catch_warnings(action="ignore"):
                    found = each.tile(problem, row, HOPPER, direction)
                if found is None:
                    refused += 1
                    continue
                followed += 1
                assert all(type(n) is int and 0 <= n <= 1024 for n in asdict(found).values()), found
                threads = getattr(found, "threads", 32)
                threads = threads(problem.spec) if callable(threads) else threads
                assert 32 * getattr(found, "warps", 1) <= 1024 and threads <= 1024
    assert followed and refused >= 1000, (followed, refused)


def test_a_row_whose_kernels_do_not_compile_is_left_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiles(Fake):
        def plan(self, problem: Problem, choice: generation.Choice, tables: Any) -> str:
            if choice.row is not None:
                raise CompileError(f"{choice.tile} is not a multiple of 8")
            return "its own tile"

    monkeypatch.setattr(CupyRawBackend, "generations", (Compiles("sm80"),))
    verified: list[object] = []
    monkeypatch.setattr(backend.verify, "check", lambda made, *_: verified.append(made))
    errors.forget_warnings()
    plan = backend.CudaPlan(CupyRawBackend(), LONG, rows(("sm80", 10)), HOPPER)
    with pytest.warns(schema.ProfileWarning, match="<text>:5: not followed.*128 is not a multiple of 8"):
        assert plan.forward == ("its own tile", None)
    assert verified == ["its own tile"]


def test_what_fails_with_two_tiles_is_not_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Fake):
        tried = 0

        def plan(self, *what: Any) -> str:
            self.tried += 1
            raise CompileError("no compiler")

    fails = Fails("sm80")
    monkeypatch.setattr(CupyRawBackend, "generations", (fails,))
    profile = rows(*[("sm80", 10)] * 3)
    with warnings.catch_warnings(action="error"), pytest.raises(CompileError, match="no compiler"):
        _ = backend.CudaPlan(CupyRawBackend(), LONG, profile, HOPPER).forward
    assert fails.tried == 2


# --- what is tuned ----------------------------------------------------------------------------------------------------


def test_every_target_is_of_a_generation_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cuda.device, "current", lambda: HOPPER)
    monkeypatch.setattr(tune_cuda.profiles, "for_device", lambda kind: profiles.by_name("generic_cuda"))
    tunable = tune_cuda.CudaTuner(CupyRawBackend())
    targets = tunable.targets(tune_cuda.FULL, None)
    assert len({target.key for target in targets}) == len(targets)
    assert {target.generation for target in targets if target.dtype == "float64"} == {"simt"}
    of = [t.generation for t in targets if t.problem == ("forward", "bfloat16", "64", "full")]
    assert of == [each.name for each in CupyRawBackend().allowed()]  # newest first: the others are held against it
    assert {t.direction for t in targets if t.few} == {"forward"}
    assert {t.dtype for t in tunable.targets(tune_cuda.QUICK, ["float16"])} == {"float16"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("subject", [CupyRawBackend(), NumbaCudaBackend()], ids=lambda one: one.name)
def test_every_candidate_can_stand_in_a_profile(subject: backend.CudaBackend, direction: Direction) -> None:
    """As what its row says, and is shown as."""
    tried = 0
    masks = None, expr.K <= expr.Q
    for dtype, d, mask, n_q in itertools.product(("float32", "bfloat16"), (64, 128, 256), masks, (4096, 1)):
        problem = Problem(AttentionSpec(dtype, d, d, mask=mask), 4, 16, n_q, 4096, "cupy")
        for one in subject.generations:
            if direction not in one.directions or not one.supports(problem, HOPPER, direction):
                continue
            tiles = one.candidates(problem, HOPPER, direction)
            assert len(set(tiles)) == len(tiles)
            for tile in tiles:
                trial = tune_cuda.CudaTile.of(one.name, tile)
                assert (trial.block_q, trial.block_k, trial.shape) == (tile.block_q, tile.block_k, one.name)
                assert str(trial).startswith(f"{tile.block_q} x {tile.block_k}")
                row = TileRow(**trial.row)
                assert row.generation == one.name and one.tile(problem, row, HOPPER, direction) == tile
                tried += 1
    assert tried > 20


def test_what_is_tuned_replaces_the_row_in_use_for_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that was timed with 4,096 tokens says nothing of 300."""
    monkeypatch.setattr(tune_cuda.device, "current", lambda: HOPPER)
    monkeypatch.setattr(tune_cuda.profiles, "for_device", lambda kind: profiles.by_name("generic_cuda"))
    runner = tune_cuda.CudaTuner(CupyRawBackend())
    runner.begin(tune_cuda.QUICK, [])
    target = tune_cuda.Target("forward", "bfloat16", 64, generation="sm90")
    in_use = runner.row_in_use(target)
    assert in_use is not None and runner.in_use(target).block_q == in_use.block_q == 192
    row = TileRow(**target.row_conditions(in_use, 2048) | runner.listed(target)[0].row)
    assert (row.dtype, row.max_head_dim, row.mask, row.min_queries, row.min_keys) == ("bfloat16", 64, False, 512, 1024)
    for problem, tiles, applies in (
        (LONG, 9.0, True), (LONG, 0.9, False), (replace(LONG, n_q=300), 9.0, False),
        (replace(LONG, n_k=600), 9.0, False),
    ):  # fmt: skip
        facts = problem.facts | {"generation": "sm90", "modified": False, "tiles_per_sm": tiles}
        assert row.matches(facts) == applies, problem
    few = tune_cuda.Target("forward", "bfloat16", 128, few=True, generation="sm80", min_head_dim=65)
    found = few.row_conditions(runner.row_in_use(few), 2048)
    assert (found["min_head_dim"], found["max_head_dim"], found["max_rows"]) == (65, 128, 16) and "mask" not in found
