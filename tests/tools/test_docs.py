"""What the documents say is run: Python blocks, links, paths, commands, YAML, environment variables.

A fence says how its block is treated. Blocks tagged `python` run in order in one namespace per file; a `text` block
right after one is what it must have printed. `python notest` (of another library), `python sketch` (the shape of a
kernel) and `text example` do not run.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import flashkit
from flashkit import dispatch
from flashkit.devices import profiles

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "docs" / "api.rst"
AT_ROOT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
FILES = [ROOT / name for name in AT_ROOT] + sorted(ROOT.glob("docs/**/*.md"))
SLOW = {
    "README.md", "docs/mods.md", "docs/numerics.md", "docs/howto.md", "docs/coming-from.md", "docs/jax.md",
    "docs/dask.md", "docs/distributed.md", "docs/onnx.md", "docs/torch.md", "docs/transformers.md",
}  # fmt: skip
"""Documents whose blocks take over two seconds where no kernel is in the cache yet."""


OPTIONAL = "torch", "jax", "dask", "transformers", "onnx", "matplotlib", "safetensors", "tokenizers", "mpi4py"
"""What blocks may import that flashkit does not need: see `make pythons`."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after the fence, its text, and the line of the file that it starts on."""

    info: str
    text: str
    line: int


@functools.cache
def blocks(file: Path) -> list[Block]:
    found, inside, start, info = [], False, 0, ""
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if inside:
                found.append(Block(info, "\n".join(lines[start : number - 1]) + "\n", start + 1))
            inside, start, info = not inside, number, line[3:].strip()
    assert not inside, f"{file.name}: the block of line {start} has no end"
    return found


@functools.cache
def prose(file: Path) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def inline_code(file: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(file))


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def documents(*marked: str) -> list[Any]:
    """Every document as a parameter, those named as slow."""
    marks = {name: [pytest.mark.slow] for name in marked}
    return [pytest.param(file, id=relative(file), marks=marks.get(relative(file), [])) for file in FILES]


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks run in an empty folder, and leave no backend and no profile behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "user_dir", lambda: tmp_path / "user")
    monkeypatch.delenv("FLASHKIT_PROFILE_DIR", raising=False)
    monkeypatch.delenv("FLASHKIT_BACKEND", raising=False)
    before = dict(dispatch.registry())
    profiles.forget()
    dispatch.forget()
    yield
    dispatch.registry().clear()
    dispatch.registry().update(before)
    profiles.forget()
    dispatch.forget()


@pytest.mark.parametrize("file", documents(*SLOW))
@pytest.mark.usefixtures("untouched")
def test_python_blocks_run_and_print_what_they_say(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(f"docs_{file.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for what annotations mean
    all_blocks = [*blocks(file), Block("", "", 0)]
    for block, following in itertools.pairwise(all_blocks):
        if block.info != "python":
            if block.info.startswith("python"):
                assert block.info in ("python notest", "python sketch"), f"{relative(file)}:{block.line}"
            continue
        printed = io.StringIO()
        # As many lines before it as in the document, so that a traceback names the document's line.
        code = compile("\n" * (block.line - 1) + block.text, str(file), "exec")
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(f"{relative(file)}:{block.line} needs {error.name}, which is not installed")
        if following.info == "text" and adjacent(file, block, following):
            assert printed.getvalue() == following.text, f"{relative(file)}:{following.line}"


def adjacent(file: Path, block: Block, following: Block) -> bool:
    """Whether nothing but blank lines lies between two blocks."""
    lines = file.read_text(encoding="utf-8").splitlines()
    between = lines[block.line + block.text.count("\n") : following.line - 2]
    return not any(line.strip() for line in between)


def test_most_python_is_run() -> None:
    infos = [block.info for file in FILES for block in blocks(file) if block.info.startswith("python")]
    assert infos.count("python") > 20
    assert infos.count("python notest") <= 3
    assert {block.info for file in FILES if file.name != "numba_hopper.md" for block in blocks(file)}.isdisjoint(
        {"python sketch"}
    )


# --- the backend of docs/backends.md, installed as a package would be -------------------------------------------------


def test_the_example_backend_is_found_by_its_entry_point(tmp_path: Path) -> None:
    document = ROOT / "docs" / "backends.md"
    source = next(block.text for block in blocks(document) if block.info == "python" and "class " in block.text)
    table = next(block.text for block in blocks(document) if block.info == "toml")
    [(name, where)] = re.findall(r'^(\w+) = "([\w.:]+)"$', table, re.MULTILINE)
    (tmp_path / f"{where.partition(':')[0]}.py").write_text(source, encoding="utf-8")
    folder = tmp_path / "flashkit_example-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashkit-example\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[flashkit.backends]\n{name} = {where}\n")
    code = f"""
import json, numpy as np, flashkit
q, k, v = (np.random.default_rng(i).standard_normal((2, 3, 20, 8)) for i in range(3))
out = flashkit.attention(q, k, v, backend={name!r})
same = np.abs(out - flashkit.attention(q, k, v, backend="reference")).max() < 1e-12
print(json.dumps([bool(same), flashkit.explain(q, k, v, causal=True).as_dict()["candidates"]]))
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    same, candidates = json.loads(done.stdout)
    assert same
    assert next(c for c in candidates if c["name"] == name)["reason"]


# --- what documents point at ------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("file", documents())
def test_links_resolve(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(file)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (file.parent / path).resolve() if path else file
        assert other.exists(), f"{relative(file)}: {target}"
        if anchor:
            headings = re.findall(r"^#+\s+(.*)$", prose(other), re.MULTILINE)
            assert anchor in map(slug, headings), f"{relative(file)}: {target}"


FOLDERS = "flashkit|docs|tests|examples|device_profiles|benchmarks|\\.ci"


@pytest.mark.parametrize("file", documents())
def test_paths_exist(file: Path) -> None:
    """Every `path/like/this.py` in inline code: of the repository, or, in a table of places, of the package."""
    for code in inline_code(file):
        if re.fullmatch(rf"({FOLDERS})/[\w./-]*", code) and not re.search(r"\.jsonl$", code):
            assert (ROOT / code).exists(), f"{relative(file)}: {code}"


@pytest.mark.parametrize("file", documents())
def test_rows_stand_in_tables(file: Path) -> None:
    """A row without the head of a table above it is shown as text."""
    for table in re.findall(r"(?:^\|.*\n)+", prose(file), re.MULTILINE):
        head, below = (*table.splitlines(), "")[:2]
        assert re.fullmatch(r"(\| ?:?-+:? ?)+\|", below), f"{relative(file)}: {head}"
        assert {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in table.splitlines()} == {
            below.count("|")
        }, f"{relative(file)}: {head}"


def test_every_promise_names_tests_that_exist() -> None:
    """Each row of docs/promises.md: files of tests, or file::test."""
    rows = [row for row in prose(ROOT / "docs" / "promises.md").splitlines() if row.startswith("| ")]
    promises = [row for row in rows if row != "| promise | held by |"]
    assert len(promises) >= 20
    for row in promises:
        tests = re.findall(r"`(tests/[\w./]+\.py)(?:::(\w+))?`", row.split("|")[2])
        assert tests, row
        for path, name in tests:
            assert (ROOT / path).is_file(), row
            assert not name or f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), row


@functools.cache
def names_in_the_tree() -> frozenset[str]:
    """Every identifier of the package and its benchmarks, and the names of their files and folders."""
    paths = [path for part in ("flashkit", "benchmarks") for path in (ROOT / part).rglob("*")]
    sources = [path for path in paths if path.suffix in (".py", ".cu", ".cuh")] + [ROOT / "pyproject.toml"]
    words = {word for source in sources for word in re.findall(r"\w+", source.read_text(encoding="utf-8"))}
    return frozenset(words | {path.name for path in paths} | {path.name for path in ROOT.iterdir()})


def names_that_do_not_exist(text: str, folders: tuple[str, ...] = ()) -> list[str]:
    """Identifiers and files in the inline code of a text that the tree does not have. folders: where else files lie."""
    missing, bases = [], [ROOT, *(ROOT / folder for folder in ("flashkit", "flashkit/backends", *folders))]
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        for word in re.findall(r"[\w./-]+", code):
            if re.search(r"\w\.(py|cu|cuh|md|yaml)$", word):
                found = Path(word).name in names_in_the_tree()
                if folders:
                    found = any((base / word).exists() for base in bases)
            else:
                found = all(part in names_in_the_tree() for part in re.findall(r"[A-Za-z_]\w+", word))
            missing += [] if found else [word]
    return missing


CUDA_FOLDERS = tuple(f"flashkit/backends/{name}" for name in ("cuda_common", "cupy_raw", "numba_cuda"))
SECTIONS = {"Inside the CPU backend": ("flashkit/backends/cpu",), "Inside the CUDA backends": CUDA_FOLDERS}
EXPLANATIONS = ["architecture", "glossary", "hopper", "hopper-float32", "hopper-fp8", "hopper-latent", "numba_hopper"]


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_names_in_explanations_exist(name: str) -> None:
    """In architecture.md a backend's section names files of that backend."""
    for section in re.split(r"^## ", prose(ROOT / "docs" / f"{name}.md"), flags=re.MULTILINE):
        heading = section.partition("\n")[0]
        folders = SECTIONS.get(heading, ()) if name == "architecture" else ()
        assert not names_that_do_not_exist(section, folders), heading


def test_names_that_do_not_exist_are_found() -> None:
    text = "`quantize` (`backend.py`, `simulated.py`), `no_such_name` and `call/no_such_file.py` of `AttentionSpec`"
    assert names_that_do_not_exist(text) == ["simulated.py", "no_such_name", "call/no_such_file.py"]
    assert names_that_do_not_exist("`memory.py`, `tiling.py`", ("flashkit/backends/cpu",)) == ["memory.py"]
    headings = re.findall(r"^## (.*)$", prose(ROOT / "docs" / "architecture.md"), re.MULTILINE)
    assert set(SECTIONS) <= set(headings)


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_generated_tables_have_their_place(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count("<!-- bench:start -->") == text.count("<!-- bench:end -->") == 1
    assert text.index("<!-- bench:start -->") < text.index("<!-- bench:end -->")


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_tracked_plots_are_small() -> None:
    plots = sorted((ROOT / "docs" / "plots").iterdir())
    assert len(plots) >= 5
    assert not [plot.name for plot in plots if plot.stat().st_size > 60_000]


STANDS_IN = """
import importlib, importlib.abc, importlib.machinery, sys, types
class StandIn(types.ModuleType):
    __path__ = []
    __mro_entries__ = lambda self, bases: ()
    __getattr__ = lambda self, name: StandIn(name) if not name.startswith("__") else object.__getattribute__(self, name)
    __getitem__ = lambda self, key: StandIn("item")
    __call__ = lambda self, *args, **kwargs: StandIn("call")
    __iter__ = lambda self: iter(())
    __contains__ = lambda self, key: False
    __len__ = lambda self: 0
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    create_module = lambda self, spec: StandIn(spec.name)
    exec_module = lambda self, module: None
sys.meta_path.insert(0, Finder())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
"""Sphinx's stand-ins of other libraries: what they can do, and no more, as they assign no item."""


def test_modules_for_other_libraries_import_where_the_site_is_built() -> None:
    """`make docs` has stand-ins for these libraries, and no device."""
    [names] = re.findall(r"^autodoc_mock_imports = (.*)$", (ROOT / "docs" / "conf.py").read_text(), re.MULTILINE)
    libraries = ast.literal_eval(names)
    listed = set(re.findall(r"^   (jax|dask|torch|transformers|distributed|onnx)\.", API.read_text(), re.MULTILINE))
    assert len(listed) == 6
    if "jax" not in libraries:
        pytest.importorskip("jax")  # of the extra `docs`
    modules = [f"flashkit.{name}" for name in sorted(listed)]
    done = subprocess.run(
        [sys.executable, "-c", STANDS_IN, ",".join(libraries), *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_api_reference_lists_every_public_name() -> None:
    listed = set(re.findall(r"^   ([\w.]+)$", API.read_text(), re.MULTILINE))
    assert {*flashkit.__all__} - listed == {"__version__", "mods"}  # a number, and a module with names of its own
    assert {"formulas", "standard"} <= listed  # the way into the algorithm, for arrays


def test_every_page_is_in_a_table_of_contents() -> None:
    """What no toctree names is a page that the site's reader does not find."""
    named = set()
    for file in FILES:
        for block in blocks(file):
            if block.info == "{toctree}":
                for line in filter(None, block.text.splitlines()):
                    if not line.startswith(":"):
                        named.add(file.parent / (re.sub(r".*<(.*)>", r"\1", line) + ".md"))
    pages = {file for file in FILES if file.parent != ROOT} - {ROOT / "docs" / "index.md"}
    assert pages <= named, sorted(map(relative, pages - named))


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(file: Path) -> Iterator[list[str]]:
    """Command lines of shell blocks and of inline code that begins with a command's name."""
    shell = [line for block in blocks(file) if block.info in ("sh", "console") for line in block.text.splitlines()]
    for line in [*shell, *inline_code(file)]:
        line = line.removeprefix("$ ").partition(" #")[0].partition("|")[0]
        if re.match(r"(\w+=\S+ )*(flashkit|make|python -m flashkit)( |$)", line):
            words = shlex.split(line)
            yield [word for i, word in enumerate(words) if "=" not in word or i > 1]


@pytest.mark.parametrize("file", documents())
def test_commands_exist(file: Path) -> None:
    import typer

    from flashkit.tools import cli

    root: Any = typer.main.get_command(cli.app)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(file):
        if words[0] == "make":
            assert all(word in targets for word in words[1:] if word.isidentifier() and word.islower()), words
            continue
        words = words[3:] if words[0] == "python" else words[1:]
        command = root
        while words and hasattr(command, "commands"):
            if words[0].startswith("-"):
                break
            assert words[0] in command.commands, f"{relative(file)}: {words}"
            command, words = command.commands[words[0]], words[1:]
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        parser = {"demo": "semantic_search/search.py", "generate": "generate/command.py"}.get(str(command.name))
        known |= set(re.findall(r'"(--[a-z-]+)"', (ROOT / "examples" / parser).read_text())) if parser else set()
        for word in words:
            option = word.partition("=")[0]
            assert not option.startswith("--") or option in known, f"{relative(file)}: {option} of {command.name}"


def test_every_command_is_documented() -> None:
    import typer

    from flashkit.tools import cli

    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    root: Any = typer.main.get_command(cli.app)
    for name, command in root.commands.items():
        for line in [f"{name} {inner}" for inner in getattr(command, "commands", [])] or [name]:
            assert f"flashkit {line}" in text, line


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_error_of_the_exponentials() -> None:
    """The polynomials' errors that numerics.md states, computed in exact arithmetic."""
    from flashkit.backends.cpu.micro.exponentials import EXP2_COEFFICIENTS

    text = prose(ROOT / "docs" / "numerics.md")
    for (element, coefficients), bound in zip(EXP2_COEFFICIENTS.items(), ("3e-9", "2e-17")):
        assert bound in text
        for i in range(-500, 501):
            r, value = Fraction(i, 1000), Fraction(0)
            for c in reversed(coefficients):
                value = value * r + Fraction(c)
            power = Fraction(Context(prec=40).power(2, Decimal(i) / 1000))
            assert abs(value / power - 1) < Fraction(bound), (element, i)


def test_environment_variables_exist() -> None:
    sources = [*ROOT.glob("flashkit/**/*.py"), *ROOT.glob("tests/**/*.py")]
    known = set(re.findall(r"FLASHKIT_[A-Z_]+", "\n".join(s.read_text(encoding="utf-8") for s in sources)))
    for file in FILES:
        assert set(re.findall(r"FLASHKIT_[A-Z_]+", file.read_text(encoding="utf-8"))) <= known, relative(file)


def test_every_argument_of_attention_is_in_the_table_of_numerics() -> None:
    text = prose(ROOT / "docs" / "numerics.md")
    for name, parameter in list(inspect.signature(flashkit.attention).parameters.items())[3:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        assert f"`{name}`" in text, name


@pytest.mark.parametrize("library", ["jax", "torch", "dask"])
def test_pages_name_the_arguments_that_an_adapter_does_not_take(library: str) -> None:
    pytest.importorskip(library)
    adapter = importlib.import_module(f"flashkit.{library}").attention
    taken, all_of_them = (inspect.signature(f).parameters.keys() for f in (adapter, flashkit.attention))
    named = inline_code(ROOT / "docs" / f"{library}.md")
    assert all_of_them - taken - {*named} <= {"dropout_p", "seed"}  # which Dask's page calls dropout


def test_every_ready_made_mod_and_pattern_is_in_the_document_of_mods() -> None:
    from flashkit import mods

    text = prose(ROOT / "docs" / "mods.md")
    general = {"mask", "score", "trace", "combine", "visible"}
    made = {n for n, f in vars(mods).items() if getattr(f, "__annotations__", {}).get("return") == "Mod"} - general
    assert len(made) >= 8
    mask = flashkit.BlockMask
    patterns = {n for n in dir(mask) if isinstance(inspect.getattr_static(mask, n), classmethod)}
    assert len(patterns) >= 9
    for name in (n for n in made | patterns if not n.startswith("_")):
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize("file", documents())
def test_profiles_in_the_documents_fit_the_schema(file: Path) -> None:
    for block in blocks(file):
        if block.info == "yaml" and "schema:" in block.text:
            profiles.parse(block.text, f"{relative(file)}:{block.line}")


def test_the_examples_need_what_flashkit_needs() -> None:
    used = {name for file in FILES for block in blocks(file) if block.info == "python"
            for name in re.findall(r"^\s*(?:import|from) (\w+)", block.text, re.MULTILINE)}  # fmt: skip
    libraries = {"dask", "jax", "mpi4py", "onnx", "torch", "transformers"}  # with extras
    assert used - set(sys.stdlib_module_names) <= {"numpy", "ml_dtypes", "flashkit"} | libraries
