"""Device profiles: every shipped file, errors that name the place, lookup order, merging, and writing."""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashkit.devices import host, profiles, schema
from flashkit.spec import AttentionSpec, Problem

SHIPPED = sorted(profiles.shipped_dir().glob("*.yaml"))

X86 = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "amx": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "amx_tile", "amx_bf16"},
    "zen4": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
}

FLOAT32: dict[str, Any] = {"dtype": "float32", "head_dim": 64, "mask": False}

MINIMAL = "schema: 1\ndevice: {kind: cpu, name: test}\n"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Empty override and user directories, and no cached profile before or after."""
    found = {"override": tmp_path / "override", "user": tmp_path / "user"}
    for folder in found.values():
        folder.mkdir()
    monkeypatch.setenv("FLASHKIT_PROFILE_DIR", str(found["override"]))
    monkeypatch.setattr(profiles, "user_dir", lambda: found["user"])
    profiles.forget()
    yield found
    profiles.forget()


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to pretend to be a CPU with these features, caches, name and cores."""

    def pretend(
        features: set[str], caches: dict[str, int] | None = None, name: str = "Imaginary CPU 3000", cores: int = 4
    ) -> None:
        monkeypatch.setattr(host, "cpu_count", lambda: cores)
        monkeypatch.setattr(host, "cpu_features", lambda: frozenset(features))
        monkeypatch.setattr(host, "cpu_caches", lambda: caches or {})
        monkeypatch.setattr(host, "cpu_name", lambda: name)
        profiles.forget()

    return pretend


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to pretend to have this CUDA device, or none."""

    def pretend(**facts: Any) -> None:
        monkeypatch.setattr(host, "cuda_device", lambda: facts or None)
        profiles.forget()

    return pretend


# ---- the shipped files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_profile(file: Path, folders: dict[str, Path]) -> None:
    profile = profiles.load_file(file)
    device = profile.device
    assert device.name
    if not file.stem.startswith("generic"):
        assert device.match or device.features, "would speak for every device of its kind"
    if device.match:
        assert profiles._rank(device, device), "does not match its own name"
    for dotted, rate in {**profile.peak_tflops, "bandwidth": profile.memory.bandwidth_gbs}.items():
        if rate and rate.datasheet:
            assert rate.source, f"{dotted}: a datasheet number needs its source"
        if rate and rate.measured:
            assert rate.date and rate.versions, f"{dotted}: a measurement needs date and versions"
    for table, rows in profile.tiles.items():
        assert rows, f"{table} is empty"
        tiles = {(row.selector, row.block_q, row.block_k, str(row.options)) for row in rows}
        assert len(tiles) == len(rows), f"{table} has a tile twice for the same problems"
        assert all(row.why for row in rows), f"{table}: every row says why"
    assert profiles.by_name(file.stem).device.kind == device.kind


def test_all_promised_devices_are_shipped() -> None:
    names = "h200 h100 a100 l40s rtx4090 rtx3090 t4 v100 rtx5090 b200 generic_cuda"
    names += " cpu_avx2 cpu_avx512 cpu_zen4_2core cpu_amx cpu_neon generic_cpu"
    assert {file.stem for file in SHIPPED} == set(names.split())


@pytest.mark.parametrize("name", ["cpu_avx2", "cpu_avx512", "cpu_zen4_2core", "cpu_amx", "cpu_neon", "generic_cpu"])
@pytest.mark.parametrize("table", ["cpu.forward", "cpu.backward"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 64, 96, 128, 129, 512])
def test_cpu_tables_answer_every_problem(name: str, table: str, dtype: str, head_dim: int) -> None:
    for mask in (False, True):
        row = profiles.by_name(name).tile(table, dtype=dtype, head_dim=head_dim, mask=mask)
        assert row is not None and row.lanes and row.rows and row.vectors
        assert row.block_q % (row.lanes * row.vectors) == 0, "a query tile is whole panels of the micro-kernel"


# ---- which files speak for a device --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "file", "lanes", "block"),
    [
        (X86["amx"], "cpu_avx512", 16, (6, 4)),  # its tables for other dtypes are AVX-512's
        (X86["avx512"], "cpu_avx512", 16, (6, 4)),
        (X86["avx2"], "cpu_avx2", 8, (6, 2)),
        ({"asimd"}, "cpu_neon", 4, (6, 4)),
        (set(), "generic_cpu", 4, (4, 3)),
        ({"avx2"}, "generic_cpu", 4, (4, 3)),  # without fma
    ],
)
def test_cpu_is_matched_by_its_features(
    folders: dict[str, Path], cpu: Any, features: set[str], file: str, lanes: int, block: tuple[int, int]
) -> None:
    cpu(features)
    profile = profiles.for_device("cpu")
    row = profile.tile("cpu.forward", **FLOAT32)
    assert row is not None and row.lanes == lanes and (row.rows, row.vectors) == block
    assert Path(str(row.origin).rpartition(":")[0]).stem == file
    assert ("cpu_amx.forward" in profile.tiles) == ("amx_bf16" in features)


@pytest.mark.parametrize(
    ("name", "cores", "known"),
    [
        ("AMD EPYC", 2, True),
        ("AMD EPYC 9654 96-Core Processor", 2, True),
        ("AMD EPYC-Genoa Processor", 2, True),
        ("AMD EPYC 9654 96-Core Processor", 96, False),
        ("AMD EPYC 9655 96-Core Processor", 2, False),  # Zen 5
        ("Imaginary CPU 3000", 2, False),
    ],
)
def test_rates_are_those_of_as_many_cores(
    folders: dict[str, Path], cpu: Any, name: str, cores: int, known: bool
) -> None:
    cpu(X86["zen4"], name=name, cores=cores)
    profile = profiles.for_device("cpu")
    assert (profile.device.name, profile.device.cores) == (name, cores)
    assert profile.provenance["device.cores"] == "system"
    assert (profile.peak("float32") is not None) == (profile.bandwidth_gbs is not None) == known
    row = profile.tile("cpu.forward", **FLOAT32)
    assert row is not None and Path(str(row.origin).rpartition(":")[0]).stem == "cpu_avx512"


def test_cores_are_a_criterion_of_its_own(folders: dict[str, Path], cpu: Any) -> None:
    for cores in (4, 8):
        text = f"schema: 1\ndevice: {{kind: cpu, cores: {cores}}}\nmemory: {{bandwidth_gbs: {{measured: {cores}}}}}\n"
        (folders["user"] / f"cores{cores}.yaml").write_text(text)
    (folders["user"] / "any.yaml").write_text(MINIMAL + "memory: {bandwidth_gbs: {measured: 1}}\n")
    for cores, gbs in {2: 1, 4: 4, 8: 8}.items():
        cpu(set(), cores=cores)
        assert profiles.for_device("cpu").bandwidth_gbs == gbs


def test_cache_sizes_come_from_the_system(folders: dict[str, Path], cpu: Any) -> None:
    cpu(X86["avx2"], {"l1d": 49152, "l2": 1310720})
    profile = profiles.for_device("cpu")
    assert (profile.memory.l1d, profile.memory.l2) == (49152, 1310720)
    assert profile.provenance["memory.l1d"] == profile.provenance["memory.l2"] == "system"
    assert profile.provenance["memory.l3"].endswith("cpu_avx2.yaml")  # which the system did not tell
    assert profile.device.name == "Imaginary CPU 3000"


def test_cuda_device_by_name(folders: dict[str, Path], gpu: Any) -> None:
    gpu(name="NVIDIA H200", compute_capability=[9, 0], sms=132, l2=62914560)
    profile = profiles.for_device("cuda")
    assert profile.peak("float8_e4m3") == 1979
    rate = profile.peak_tflops["bfloat16"]
    assert rate.datasheet == 989 and profile.peak("bfloat16") == rate.measured, "measured goes before datasheet"
    assert 4000 < profile.bandwidth_gbs < 4800
    assert profile.provenance["device.sms"] == "system"
    facts = {"dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "dim": 128, "mask": True, "rows": 4096}
    rate = profile.rate("cupy_raw.forward", **facts, generation="sm90")
    assert rate is not None and rate > 1e14
    assert profile.rate("cupy_raw.forward", **facts | {"dtype": "float64"}, generation="sm90") is None


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe"])
def test_cuda_relative_lends_tiles_but_no_rates(folders: dict[str, Path], gpu: Any, name: str) -> None:
    gpu(name=name, compute_capability=[9, 0], sms=114)
    profile = profiles.for_device("cuda")
    assert profile.device.name == name and profile.device.sms == 114
    facts = {"dtype": "float16", "head_dim": 64, "mask": False, "rows": 4096, "generation": "sm80"}
    row = profile.tile("cupy_raw.forward", **facts)
    assert row is not None and row.measured is None and row.block_q == 128
    assert profile.rate("cupy_raw.forward", **facts) is None
    assert profile.memory.sram_per_block == 232448
    assert "same compute capability" in profile.provenance["memory.sram_per_block"]
    assert profile.peak("float16") is None and profile.bandwidth_gbs is None


def test_unknown_cuda_device_and_none(folders: dict[str, Path], gpu: Any) -> None:
    gpu(name="Imaginary GPU", compute_capability=[99, 0], sms=7, sram_per_block=12345)
    profile = profiles.for_device("cuda")
    assert (profile.device.sms, profile.memory.sram_per_block) == (7, 12345)
    assert profile.provenance["memory.sram_per_sm"].endswith("generic_cuda.yaml")
    gpu()
    assert profiles.for_device("cuda").device.name == "a CUDA device"


# ---- layers --------------------------------------------------------------------------------------------------------


def test_lookup_order_and_field_by_field_merge(folders: dict[str, Path], cpu: Any) -> None:
    cpu(X86["avx512"], {"l1d": 1000, "l2": 2000, "l3": 3000})
    (folders["user"] / "mine.yaml").write_text(
        MINIMAL + "memory: {l2: 2222, l3: 3333, bandwidth_gbs: {measured: 20, date: 2026-01-01}}\n"
        "tiles: {cpu.forward: [{block_q: 7, block_k: 7, dtype: float32, head_dim: 64}]}\n"
    )
    (folders["override"] / "forced.yaml").write_text(
        MINIMAL + "memory: {l3: 4444, bandwidth_gbs: {datasheet: 30, source: a box}}\n"
    )
    profile = profiles.for_device("cpu")
    assert (profile.memory.l1d, profile.memory.l2, profile.memory.l3) == (1000, 2222, 4444)
    assert profile.provenance["memory.l3"] == str(folders["override"] / "forced.yaml")
    assert profile.provenance["memory.l2"] == str(folders["user"] / "mine.yaml")
    assert profile.provenance["memory.l1d"] == "system"
    bandwidth = profile.memory.bandwidth_gbs
    assert bandwidth is not None
    assert (bandwidth.datasheet, bandwidth.measured, bandwidth.date) == (30, 20, "2026-01-01")
    tuned, other = (profile.tile("cpu.forward", **FLOAT32 | {"dtype": dtype}) for dtype in ("float32", "float16"))
    assert tuned is not None and tuned.block_q == 7
    assert tuned.origin == f"{folders['user'] / 'mine.yaml'}:4"
    assert other is not None and other.lanes == 16


def test_a_date_is_not_taken_from_another_layer(folders: dict[str, Path], cpu: Any) -> None:
    cpu(set())
    (folders["user"] / "old.yaml").write_text(MINIMAL + "memory: {bandwidth_gbs: {measured: 20, date: 2020-01-01}}\n")
    (folders["override"] / "new.yaml").write_text(MINIMAL + "memory: {bandwidth_gbs: {measured: 25}}\n")
    bandwidth = profiles.for_device("cpu").memory.bandwidth_gbs
    assert bandwidth is not None and (bandwidth.measured, bandwidth.date) == (25, None)


def test_the_first_row_whose_conditions_hold_wins() -> None:
    profile = profiles.parse(
        MINIMAL + "tiles:\n  t:\n"
        "  - {measured: {tflops: 7}, dtype: float16}\n"
        "  - {block_q: 7, block_k: 1, head_dim: 64, dtype: float16, mask: true}\n"
        "  - {block_q: 6, block_k: 1, head_dim: [64, 80], dtype: [float16, bfloat16]}\n"
        "  - {block_q: 5, block_k: 1, min_keys: 100, max_keys: 200, packed: false}\n"
        "  - {block_q: 4, block_k: 1, min_head_dim: 65, max_head_dim: 128}\n"
        "  - {block_q: 3, block_k: 1, max_head_dim: 256, measured: {gflops: 3}}\n"
        "  - {block_q: 2, block_k: 1, max_tiles_per_sm: 1}\n"
        "  - {block_q: 1, block_k: 1}\n"
    )

    def chosen(dtype: str, head_dim: int, **more: Any) -> int | None:
        row = profile.tile("t", dtype=dtype, head_dim=head_dim, **more)
        assert row is not None
        return row.block_q

    assert chosen("float16", 64, mask=True) == 7
    assert chosen("float16", 64, mask=False) == chosen("bfloat16", 80) == 6
    keys = {99: 4, 100: 5, 200: 5, 201: 4}
    assert {n: chosen("float32", 100, keys=n, packed=False) for n in keys} == keys
    assert chosen("float32", 100, keys=150, packed=True) == 4
    assert (chosen("float32", 64), chosen("float32", 128), chosen("float32", 129)) == (3, 4, 3)
    assert chosen("float32", 512, tiles_per_sm=1.0) == 2
    assert chosen("float32", 512, tiles_per_sm=1.1) == 1
    assert chosen("float32", 512) == 1, "a condition on what is not known does not hold"
    assert profile.tile("nothing", dtype="float16", head_dim=64) is None
    rates = (profile.rate("t", dtype=dtype, head_dim=100) for dtype in ("float16", "float32"))
    assert tuple(rates) == (7e12, 3e9)


def test_facts_of_a_problem_are_those_that_rows_ask_for() -> None:
    """A condition whose fact is called otherwise would never hold."""
    facts = Problem(AttentionSpec("float32", 64, 64), 1, 1, 1, 1).facts.keys()
    told_by_backends = {"generation", "modified", "tiles_per_sm"}
    asked = {re.sub("^(min|max)_", "", name) for name in schema.CONDITIONS}
    assert asked == facts | told_by_backends


def test_unknown_kind_and_name() -> None:
    with pytest.raises(ValueError, match="kind: expected 'cpu' or 'cuda', got 'tpu'"):
        profiles.for_device("tpu")
    with pytest.raises(ValueError, match=r"'h20'.*did you mean `h200`"):
        profiles.by_name("h20")


# ---- errors name file, line and field ------------------------------------------------------------------------------

ROW = "  - {block_q: 16, block_k: 16}\n"

MALFORMED = [
    # text, line, field, part of the message
    ("", 1, "", "expected a mapping"),
    ("- 1\n", 1, "", "expected a mapping"),
    ("schema: 1\ndevice: {kind: cpu\n", 3, "", "not YAML"),
    ("device: {kind: cpu}\n", 1, "", "`schema` is missing"),
    ("schema: 1\n", 1, "", "`device` is missing"),
    ("schema: 2\ndevice: {kind: cpu}\n", 1, "schema", "expected schema 1, got 2"),
    ("schema: 1\ndevice:\n  kind: tpu\n", 3, "device.kind", "'tpu'"),
    ("schema: 1\ndevice:\n  name: x\n", 2, "device", "missing required field `kind`"),
    ("schema: 1\ndevice:\n  kind: cpu\n  match: '('\n", 2, "device", "not a regular expression"),
    ("schema: 1\ndevice:\n  kind: cuda\n  compute_capability: [9]\n", 4, "device.compute_capability", "length 2"),
    (MINIMAL + "memry: {}\n", 3, "memry", "did you mean `memory`?"),
    (MINIMAL + "memory:\n  l1: 5\n", 4, "memory.l1", "did you mean `l1d`?"),
    (MINIMAL + "memory:\n  l2: 1\n  l2: 2\n", 5, "memory.l2", "appears twice"),
    (MINIMAL + "memory:\n  l2: 1 MB\n", 4, "memory.l2", "got `str`"),
    (MINIMAL + "memory:\n  l2: -1\n", 4, "memory.l2", ">= 1"),
    (MINIMAL + "memory:\n  bandwidth_gbs:\n    datasheet: fast\n", 5, "memory.bandwidth_gbs.datasheet", "got `str`"),
    (MINIMAL + "peak_tflops:\n  float16:\n    measured: 0\n", 5, "peak_tflops.float16.measured", "> 0"),
    (MINIMAL + "peak_tflops: 3\n", 3, "peak_tflops", "expected a mapping"),
    (MINIMAL + "tiles:\n  cpu.forward: {}\n", 4, "tiles.cpu.forward", "expected a list of rows"),
    (MINIMAL + "tiles:\n  t:\n" + ROW + "  - {block_q: 0, block_k: 1}\n", 6, "tiles.t[1].block_q", ">= 1"),
    (MINIMAL + "tiles:\n  t:\n" + ROW + "  - block_q: 1\n    blok_k: 1\n", 7, "tiles.t[1].blok_k", "mean `block_k`"),
    (MINIMAL + "tiles:\n  t:\n  - block_q: 1\n", 5, "tiles.t[0]", "expected block_q and block_k"),
    (MINIMAL + "tiles:\n  t:\n  - dtype: float32\n", 5, "tiles.t[0]", "or a speed in `measured`"),
    (MINIMAL + "tiles:\n  t:\n  - block_q: 1\n    block_k: 1\n    dtype: float23\n", 7, "tiles.t[0].dtype", "float23"),
    (MINIMAL + "tiles:\n  t:\n  - {block_q: 1, block_k: 1, min_keys: 8, max_keys: 4}", 5, "tiles.t[0]", "max_keys: "),
    (MINIMAL + "tiles:\n  t:\n  - {block_q: 1, block_k: 1, causal: true}", 5, "tiles.t[0].causal", "unknown field"),
    (MINIMAL + "tiles:\n  t:\n  - {block_q: 1, block_k: 1, lanes: 5}\n", 5, "tiles.t[0].lanes", "5"),
    (
        MINIMAL + "tiles:\n  t:\n  - {block_q: 1, block_k: 1, lanes: 8, rows: 8, vectors: 3}\n", 5, "tiles.t[0]",
        "needs 28 vector registers, there are 16",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "field", "problem"), MALFORMED, ids=[case[3] for case in MALFORMED])
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, line: int, field: str, problem: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(profiles.ProfileError) as caught:
        profiles.load_file(file)
    error = caught.value
    assert isinstance(error, profiles.SchemaError)
    assert (error.file, error.line, error.field) == (str(file), line, field)
    assert problem in error.problem
    assert str(error).startswith(f"{file}:{line}: ")


# ---- writing -------------------------------------------------------------------------------------------------------


def test_written_profile_is_found_and_updated(folders: dict[str, Path], cpu: Any) -> None:
    cpu(X86["avx512"])
    device = profiles.criteria("cpu")
    assert set(device["features"]) == X86["avx512"]
    measured = {"gflops": 150.0, "date": "2026-01-01", "versions": {"numba": "0.68"}}
    rows = [
        {**FLOAT32, "block_q": 10, "block_k": 11, "measured": measured},
        {**FLOAT32, "mask": True, "block_q": 12, "block_k": 13},
    ]
    path = profiles.write_user_profile({"device": device, "tiles": {"cpu.forward": rows}})
    assert path.parent == folders["user"]
    row = profiles.for_device("cpu").tile("cpu.forward", **FLOAT32)
    assert row is not None and row.block_q == 10 and row.measured and row.measured.versions == {"numba": "0.68"}
    assert [row.matches(FLOAT32 | {"mask": mask}) for mask in (False, True)] == [True, False]

    again = profiles.write_user_profile(
        {
            "device": device,
            "memory": {"bandwidth_gbs": {"measured": 20, "date": "2026-01-02"}},
            "tiles": {"cpu.forward": [{**rows[0], "block_q": 99}]},
        }
    )
    assert again == path
    profile = profiles.load_file(path)
    assert [row.block_q for row in profile.tiles["cpu.forward"]] in ([99, 12], [12, 99])
    assert profile.bandwidth_gbs == 20
    assert "origin" not in path.read_text() and "provenance" not in path.read_text()
    assert [file.name for file in folders["user"].iterdir() if file.name != ".lock"] == [path.name]


def test_another_cpu_does_not_take_it(folders: dict[str, Path], cpu: Any) -> None:
    cpu(X86["avx512"])
    row = {"block_q": 48, "block_k": 5}
    first = profiles.write_user_profile({"device": profiles.criteria("cpu"), "tiles": {"cpu.forward": [row]}})
    cpu(X86["avx2"])  # the same name: virtual machines tell no more
    assert profiles.for_device("cpu").tile("cpu.forward", **FLOAT32).block_k != 5  # type: ignore[union-attr]
    assert profiles.write_user_profile({"device": profiles.criteria("cpu")}) != first


def test_a_bad_profile_is_not_written(folders: dict[str, Path], cpu: Any) -> None:
    cpu(set())
    bad = {"t": [{"block_q": "x", "block_k": 1}]}
    with pytest.raises(profiles.ProfileError, match=r"tiles\.t\[0\]\.block_q"):
        profiles.write_user_profile({"device": profiles.criteria("cpu"), "tiles": bad})
    assert not list(folders["user"].iterdir())


def test_a_spoilt_file_is_moved_away_not_lost(folders: dict[str, Path], cpu: Any) -> None:
    cpu(set())
    path = profiles.write_user_profile({"device": profiles.criteria("cpu")})
    path.write_text("schema: one\n")
    with pytest.warns(profiles.ProfileWarning, match="moved to"):
        profiles.write_user_profile({"device": profiles.criteria("cpu")})
    assert profiles.load_file(path).device.kind == "cpu"
    assert (path.parent / (path.name + ".bad")).read_text() == "schema: one\n"


def test_concurrent_writers_lose_nothing(folders: dict[str, Path], cpu: Any) -> None:
    cpu(set())
    device = profiles.criteria("cpu")

    def write(head_dim: int) -> None:
        row = {"head_dim": head_dim, "block_q": 4, "block_k": 4}
        profiles.write_user_profile({"device": device, "tiles": {"cpu.forward": [row]}})

    with ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(write, range(1, 9))]) == 8
    rows = profiles.load_file(next(folders["user"].glob("*.yaml"))).tiles["cpu.forward"]
    assert sorted(row.head_dim for row in rows) == list(range(1, 9))  # type: ignore[type-var]


# ---- what the machine reports --------------------------------------------------------------------------------------


@pytest.fixture
def read_anew() -> Iterator[None]:
    """Facts that are read once in a process."""
    functions = (host._cpuinfo, host._all_features, host.cpu_name, host.cpu_caches)
    for function in functions:
        function.cache_clear()
    yield
    for function in functions:
        function.cache_clear()


def test_linux_facts(read_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t: none\n")
    caches = tmp_path / "cache"
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "1M")]
    ):
        folder = caches / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(level)
        (folder / "type").write_text(kind)
        (folder / "size").write_text(size + "\n")
    (caches / "index9").mkdir()  # unreadable: no files in it
    monkeypatch.setattr(host, "CPUINFO", info)
    monkeypatch.setattr(host, "CPU_CACHE", caches)
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    assert host.cpu_features() == {"fma", "avx2"}
    assert host.cpu_name() == "Some CPU"
    assert host.cpu_caches() == {"l1d": 48 << 10, "l2": 2 << 20, "l3": 1 << 20}


def test_vectors_held_to_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.lanes_of({"avx2", "fma", "avx512f"}) == 8  # Knights Landing: no masks on shorter vectors
    everything = frozenset({"sse2", "avx2", "fma", "avx512f", "avx512vl", "avx512_bf16", "amx_tile"})
    monkeypatch.setattr(host, "_all_features", lambda: everything)
    left = {"4": {"sse2"}, "8": {"sse2", "avx2", "fma"}, "16": everything, "": everything}
    for lanes, features in left.items():
        monkeypatch.setenv(host.LANES, lanes)
        assert host.cpu_features() == features
        profiles.forget()
        assert host.lanes_of(profiles.for_device("cpu").device.features) == int(lanes or 16)
    monkeypatch.setattr(host, "_all_features", lambda: left["8"])
    monkeypatch.setenv(host.LANES, "16")
    with pytest.raises(ValueError, match="expected 4 or 8, the lanes"):
        host.cpu_features()


def test_macos_facts(read_anew: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "machdep.cpu.brand_string": "Apple M9", "hw.optional.arm64": "1", "hw.perflevel0.l1dcachesize": "131072",
        "hw.l1dcachesize": "65536", "hw.l2cachesize": "4194304", "hw.l3cachesize": "0",
    }  # fmt: skip
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(host, "CPU_CACHE", tmp_path / "none")
    monkeypatch.setattr(host, "_sysctl", answers.get)
    monkeypatch.setattr(host, "_llvm_features", set)
    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host.platform, "machine", lambda: "arm64")
    assert host.cpu_features() == {"asimd"}
    assert host.cpu_name() == "Apple M9"
    assert host.cpu_caches() == {"l1d": 131072, "l2": 4194304}


def test_cuda_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as CuPy 14 has them, values as an H200 gives them."""
    attributes = {
        "MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerMultiprocessor": 233472,
        "MaxRegistersPerMultiprocessor": 65536, "L2CacheSize": 62914560,
    }  # fmt: skip
    properties = {"name": b"NVIDIA H200", "major": 9, "minor": 0}
    runtime = SimpleNamespace(getDeviceProperties=lambda index: properties)
    device = SimpleNamespace(id=0, attributes=attributes)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=lambda: device))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert host.cuda_device() == {
        "name": "NVIDIA H200", "compute_capability": [9, 0], "sms": 132, "sram_per_block": 232448,
        "sram_per_sm": 233472, "registers_per_sm": 65536, "l2": 62914560,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", None)  # not installed
    assert host.cuda_device() is None


@pytest.mark.gpu
def test_this_cuda_device(folders: dict[str, Path]) -> None:
    pytest.importorskip("cupy")
    if host.cuda_device() is None:
        pytest.skip("CuPy finds no CUDA device")
    profile = profiles.for_device("cuda")
    known = ("sms", "compute_capability")
    assert all(profile.provenance[f"device.{name}"] == "system" for name in known)
    sizes = ("sram_per_block", "sram_per_sm", "registers_per_sm", "l2")
    assert all(profile.provenance[f"memory.{name}"] == "system" for name in sizes)
