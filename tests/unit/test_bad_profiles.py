"""Bad profiles never stop attention: it gives the right result with one warning, and the tools name file and defect."""

import itertools
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import flashkit
from flashkit import dispatch
from flashkit.call import plans
from flashkit.devices import host, io_model, profiles, schema, strict_yaml
from flashkit.tools import cli
from flashkit.tools.doctor import probes

HEAD = "schema: 1\ndevice: {kind: cpu}\n"
ROWS = HEAD + "tiles:\n  cpu.forward:\n  - "
WATCHDOG = 300  # seconds: a profile that is read for ever fails, on a machine of any load


def nested(opening: str, closing: str, depth: int) -> str:
    return HEAD + "tiles: " + opening * depth + closing * depth + "\n"


BOMB = "a: &a [x, x, x, x]\n" + "".join(
    f"{n}: &{n} [*{m}, *{m}, *{m}, *{m}]\n" for m, n in itertools.pairwise("abcdefghij")
)
ANCHOR, FINITE, LARGE = "anchors (&) and aliases (*)", "expected a finite number", "within 2^53"
# "nested more than 16 deep", or "exceeded maximum nesting depth" where PyYAML's scanner comes upon it first.
DEEP = "nest"

TEXTS = {
    # name: (text, what is said about it)
    "flow lists": (nested("[", "]", 50_000), DEEP),
    "flow mappings": (nested("{a: ", "}", 20_000), DEEP),
    "block lists": (HEAD + "tiles:\n  " + "- " * 100_000, DEEP),
    "open lists": (HEAD + "tiles: " + "[" * 100_000, DEEP),
    "question marks": (HEAD + "? " * 50_000, "expected a short text as key"),
    "lists on lines": (HEAD + "tiles: " + "[\n" * 50_000, DEEP),
    "alias bomb": (HEAD + BOMB, ANCHOR),
    "recursive alias": (HEAD + "memory: &a {l2: *a}\n", ANCHOR),
    "recursive list": (HEAD + "tiles: &a [*a]\n", ANCHOR),
    "anchor alone": (HEAD + "memory: &a {l2: 1024}\n", ANCHOR),
    "unknown alias": (HEAD + "memory: *a\n", ANCHOR),
    "merge key": (HEAD + "memory: {<<: {l2: 1024}}\n", "`<<`"),
    "python object": (HEAD + "memory: !!python/object/apply:os.getcwd []\n", "tags are not read"),
    "binary tag": (HEAD + "memory: !!binary '='\n", "tags are not read"),
    "bool tag": (HEAD + "memory: !!bool maybe\n", "tags are not read"),
    "time tag": (HEAD + "memory: !!timestamp soon\n", "tags are not read"),
    "set tag": (HEAD + "memory: !!set {a, b}\n", "tags are not read"),
    "two documents": (HEAD + "---\n" + HEAD, "not YAML"),
    "list as key": (HEAD + "? [a]\n: 1\n", "expected a short text as key"),
    "long key": (HEAD + "a" * 5000 + ": 1\n", ""),  # PyYAML refuses it in its own words
    "NUL": (HEAD + "memory: \0\n", "not YAML"),
    "escape codes": (HEAD + 'memory: {source: "\\e[2J"}\n', "control character"),
    "tab": (HEAD + "\tmemory: {}\n", "not YAML"),
    "many values": (HEAD + "tiles: {cpu.forward: [" + "1, " * 60_000 + "]}\n", "too many values"),
    "long text": (HEAD + "memory: {source: " + "x" * 50_000 + "}\n", "got 50000"),
    "large file": (HEAD + "#" * (1 << 20), "has more than"),
    "digits": (HEAD + "memory: {l2: " + "9" * 100_000 + "}\n", "got 100000"),
    "huge integer": (HEAD + f"memory: {{l2: {10**60}}}\n", LARGE),
    "hex without digits": (HEAD + "memory: {l2: 0x_}\n", "expected a number"),
    "not a number": (HEAD + "memory: {bandwidth_gbs: {measured: .nan}}\n", FINITE),
    "infinity": (HEAD + "peak_tflops: {float32: {measured: .inf}}\n", FINITE),
    "overflow": (HEAD + "peak_tflops: {float32: {datasheet: 1.0e+999}}\n", FINITE),
    "infinity in an option": (ROWS + "{block_q: 64, block_k: 64, options: {x: -.inf}}\n", FINITE),
    "tiny cache": (HEAD + "memory: {l1d: 1}\n", "4096 bytes or more"),
    "fast device": (HEAD + "peak_tflops: {float32: {measured: 1.0e+30}}\n", "<= 1000000000"),
    "500 registers": (ROWS + "{block_q: 96, block_k: 64, rows: 500}\n", "<= 32"),
    "many registers": (ROWS + "{block_q: 96, block_k: 64, rows: 32, vectors: 32}\n", "needs 1057 vector registers"),
    "more than this CPU has": (ROWS + "{block_q: 96, block_k: 64, lanes: 8, rows: 20}\n", "16 registers of 8 lanes"),
    "huge tile": (ROWS + "{block_q: 1000000000, block_k: 64}\n", "<= 1024"),
    "huge stages": (ROWS + "{block_q: 64, block_k: 64, stages: 1000000}\n", "<= 32"),
    "slow expression": ("schema: 1\ndevice: {kind: cpu, match: '(\\w+\\s*)+$'}\n", "repeats a group"),
    "many repeats": ("schema: 1\ndevice: {kind: cpu, match: '.*.*.*.*.*.*.*x'}\n", "more than 3 repeats"),
    "optional again": (f"schema: 1\ndevice: {{kind: cpu, match: '{'.?' * 40}x'}}\n", "more than 3 repeats"),
    "alternatives": (f"schema: 1\ndevice: {{kind: cpu, match: '{'(.|.)' * 40}x'}}\n", "more than 6 alternatives"),
    "long expression": (f"schema: 1\ndevice: {{kind: cpu, match: '{'a' * 1000}'}}\n", "more than 500 characters"),
    "deep expression": (f"schema: 1\ndevice: {{kind: cpu, match: '{'(' * 450}'}}\n", "not a regular expression"),
    "no expression": ("schema: 1\ndevice: {kind: cpu, match: '('}\n", "not a regular expression"),
}  # fmt: skip

FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "FIFO": (os.mkfifo, "is not a regular file"),
    "zeros": (lambda file: file.symlink_to("/dev/zero"), "is not a regular file"),
    "terminal": (lambda file: file.symlink_to("/dev/tty"), ""),
    "folder": (Path.mkdir, "Is a directory"),
    "dangling": (lambda file: file.symlink_to("nothing"), "No such file"),
    "ring": (lambda file: file.symlink_to(file.name), "leads nowhere"),
    "no text": (lambda file: file.write_bytes(b"\xff\xfe\x00"), "utf-8"),
    "endless /proc": (lambda file: file.symlink_to("/proc/self/mem"), ""),
}

NUMBERS = ("memory.l2", "memory.l3", "device.cores", "device.sms", "row.block_q", "row.block_k", "row.head_dim",
           "row.max_rows", "row.rows", "row.vectors", "row.stages", "rate.datasheet", "rate.measured")  # fmt: skip
NONSENSE = [
    *["0", "-1", "-.inf", ".nan", ".inf"], "9" * 40, "2.0e+300", "many", "[1, [2]]", "{a: 1}", "''", "yes",
    "2026-01-01",
]  # fmt: skip
RANDOM = random.Random(0).sample([*itertools.product(NUMBERS, NONSENSE)], 61)


def text_of(field: str, value: str) -> str:
    section, _, name = field.partition(".")
    row = {"block_q": "96", "block_k": "64"}
    given = {"device": {"kind": "cpu"}, "memory": {}, "row": row, "rate": {}}
    given[section][name] = value
    flow = {section: "{" + ", ".join(f"{k}: {v}" for k, v in fields.items()) + "}" for section, fields in given.items()}
    return (
        f"schema: 1\ndevice: {flow['device']}\nmemory: {flow['memory']}\npeak_tflops:\n  float32: {flow['rate']}\n"
        f"tiles:\n  cpu.forward:\n  - {flow['row']}\n"
    )


def written(text: str) -> Callable[[Path], Any]:
    return lambda file: file.write_text(text)


BAD = {
    **{name: (written(text), defect) for name, (text, defect) in TEXTS.items()},
    **FILES,
    **{f"{field} is {value[:9]}": (written(text_of(field, value)), field.partition(".")[2]) for field, value in RANDOM},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only directory of the user's profiles; nothing is cached before or after."""
    found = tmp_path / "profiles"
    found.mkdir()
    monkeypatch.setenv("FLASHKIT_PROFILE_DIR", str(found))
    monkeypatch.setattr(profiles, "user_dir", lambda: tmp_path / "none")

    def forget() -> None:
        profiles.forget()
        dispatch.forget()
        plans.clear()

    def expired(*_: Any) -> None:
        raise TimeoutError("a bad profile is read for ever")

    forget()
    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(WATCHDOG)
    yield found
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    forget()


def complaints(run: Callable[[], Any]) -> tuple[list[str], Any]:
    """Messages of the ProfileWarnings, and the result."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = run()
    return [str(each.message) for each in caught if issubclass(each.category, profiles.ProfileWarning)], result


class TestBadProfile:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", BAD)
    @pytest.mark.one_in(8)
    def test_attention_is_right_and_the_defect_is_named(self, name: str, folder: Path, capsys: Any) -> None:
        make, defect = BAD[name]
        make(folder / "bad.yaml")
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 40, 16), np.float32)
        said, result = complaints(lambda: flashkit.attention(q, k, v, causal=True, backend="cpu"))
        right = flashkit.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True, backend="reference")
        assert np.abs(result - right).max() < 1e-5
        for line in (*said, *probes.profiles()["skipped"]):
            assert str(folder / "bad.yaml") in line and defect in line and "\n" not in line
        assert len(said) == 1
        assert not complaints(lambda: flashkit.attention(q[:, :1], k[:, :1], v[:, :1], backend="cpu"))[0], "said once"
        assert probes.profiles()["skipped"], "doctor"
        capsys.readouterr()
        assert cli.run(["profile", "show"]) == 0
        shown = capsys.readouterr().err
        assert "bad.yaml" in shown and defect in shown

    @pytest.mark.parametrize("name", [name for name in TEXTS if name != "large file"])
    def test_python_reads_as_libyaml_does(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where PyYAML has no libyaml."""

        class Loader(yaml.SafeLoader):
            yaml_implicit_resolvers = strict_yaml._Loader.yaml_implicit_resolvers

        if name == "more than this CPU has":
            pytest.skip("a tile for other CPUs")
        monkeypatch.setattr(strict_yaml, "_Loader", Loader)
        with pytest.raises(profiles.ProfileError, match=r"mine\.yaml:[0-9]+: "):
            profiles.parse(TEXTS[name][0], "mine.yaml")


def test_a_bad_tile_leaves_the_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda: frozenset({"avx2", "fma"}))
    (folder / "bad.yaml").write_text(ROWS + "{block_q: 96, block_k: 64, rows: 30}\n")
    x = np.zeros((1, 1, 64, 64), np.float32)
    said, planned = complaints(lambda: flashkit.plan(x, x, x, backend="cpu"))
    assert len(said) == 1 and f"{folder / 'bad.yaml'}:5: not followed" in said[0]
    assert planned.tile == io_model.default_cpu(profiles.for_device("cpu"), "float32", 64, 64)


def test_too_many_files(folder: Path) -> None:
    for n in range(profiles.MAX_FILES + 1):
        (folder / f"{n:04}.yaml").write_text(HEAD + "memory: {l3: 12345}\n")
    said, profile = complaints(lambda: profiles.for_device("cpu"))
    most = profiles.MAX_FILES
    assert said == [f"device profiles skipped: {folder} has {most + 1}, the first {most} are read"]
    assert profile.memory.l3 == 12345


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_the_least_cache_has_a_tile_of_every_head_dim(dtype: str, direction: Any, lanes: int) -> None:
    for d, dv in itertools.product((1, 64, 512), repeat=2):
        assert io_model.candidates(dtype, d, dv, direction, l1d=schema.MIN_L1D, l2=1, lanes=lanes)
