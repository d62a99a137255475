"""Tables and help on a terminal of 80 columns: no number is cut, and text is printed as it is written."""

import io
import json
import re
import sys
from typing import Any

import pytest
import typer.main
from rich.console import Console

from flashkit.tools import cli
from flashkit.tools.console import digits, print_table

if sys.platform == "win32":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)

from terminal import COLUMNS, on_terminal, written

NAMES = ["heads 32:8, 16384 x 16384, head dim 128, bfloat16, causal, window 1024", "forward"]
NUMBERS = [f"{i}{i}{i}.{i}{i} ({i}.00-{i}.99)" for i in range(1, 8)]


def printed(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    rows = [[*NAMES, *NUMBERS], ["short", "backward", *("-" for _ in NUMBERS)]]
    print_table(console, ["case", "direction"], [f"head {i}" for i in range(1, 8)], rows)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_names_are_folded_and_numbers_kept(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert [text.count(number) for number in NUMBERS] == [1] * 7
    assert [text.count(f"head {i} ") + text.count(f"head {i}\n") for i in range(1, 8)] == [1] * 7
    blocks = sum(line.startswith("case") for line in lines)
    assert (blocks == 1) == (width == 250)
    columns = "".join(line[:14].strip() for line in lines).replace(" ", "")
    assert columns.count("heads32:8") == blocks  # the names are in every block


def test_digits() -> None:
    assert [digits(x) for x in (0.0, 0.00123456, 0.19, 12.34, 671.23, 3399.6)] == [
        "0", "0.00123", "0.190", "12.3", "671", "3400",
    ]  # fmt: skip


COMMANDS = (
    "", "explain", "autotune", "bench", "profile", "profile validate", "cache", "cache prune", "cache warm", "config",
)  # fmt: skip

HELP = f"""
from flashkit.tools import cli
for command in {COMMANDS}:
    print("status", cli.run([*command.split(), "--help"]), flush=True)
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, list[str]]:
    """The lines of each help text, all written by one process."""
    status, lines = on_terminal(["-c", HELP])
    ends = [i for i, line in enumerate(lines) if line.startswith("status")]
    assert status == 0 and [lines[i] for i in ends] == ["status 0"] * len(COMMANDS), lines
    return {command: lines[i:j] for command, i, j in zip(COMMANDS, [0, *(i + 1 for i in ends)], ends)}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole(command: str, helps: dict[str, list[str]]) -> None:
    """Every word of every help text, and no summary cut off."""
    lines = helps[command]
    text = re.sub(r"\s+", " ", " ".join(lines)).replace("- ", "-")
    assert max(map(len, lines)) <= COLUMNS
    assert not re.search(r"\w\.\.\.", text.replace("]...", "]").replace("files...", ""))
    found: Any = typer.main.get_command(cli.app)
    for word in command.split():
        found = found.commands[word]
    for parameter in found.params:
        if (told := getattr(parameter, "help", None)) and not parameter.hidden:
            assert re.sub(r"\s+", " ", told).replace("- ", "-") in text


# --- config show ------------------------------------------------------------------------------------------------------


def test_config_show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from flashkit import settings

    for setting in settings.ALL:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv("FLASHKIT_CACHE_SIZE", "2G")
    assert cli.run(["config", "show", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(listed) == [setting.name for setting in settings.ALL]
    assert listed["FLASHKIT_CACHE_SIZE"]["value"] == 2 << 30
    assert listed["FLASHKIT_BACKEND"]["value"] is None and listed["FLASHKIT_BACKEND"]["default"] == "the fastest"
    monkeypatch.setenv("FLASHKIT_CPU_LANES", "5")
    monkeypatch.setenv("FLASHKIT_CACHEDIR", "/tmp")
    assert cli.run(["config", "show"]) == 1
    out, err = capsys.readouterr()
    assert all(name in out for name in listed)
    assert "FLASHKIT_CPU_LANES: expected 4, 8 or 16, got '5'" in err
    assert "FLASHKIT_CACHEDIR is no variable of flashkit; did you mean FLASHKIT_CACHE_DIR?" in err


def test_config_show_on_a_terminal() -> None:
    status, lines = on_terminal(["-m", "flashkit", "config", "show"], FLASHKIT_CACHE_DIR="/a/long/path" * 5)
    assert status == 0 and max(map(len, lines)) <= COLUMNS
    assert "/a/long/path" * 5 in "".join(line[26:52].strip() for line in lines)  # folded, not cut


# --- while kernels compile --------------------------------------------------------------------------------------------

COMPILE = """
import logging, time
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
from flashkit.devices import progress
with progress.compiling("forward_float32"): time.sleep(0.6)
with progress.compiling("short"): pass
print("done")
"""


@pytest.mark.parametrize(
    ("code", "variables", "drawn"),
    [
        (COMPILE, {}, True),
        (COMPILE, {"FLASHKIT_PROGRESS": "0"}, False),
        (COMPILE.replace("with", "with progress.hidden(), "), {}, False),
    ],
    ids=["drawn", "turned off", "hidden"],
)
def test_a_line_while_kernels_compile(code: str, variables: dict[str, str], drawn: bool) -> None:
    status, text = written(["-c", code], **variables)
    assert status == 0
    lines = re.findall(r"\r([^\r\n]*)", text)
    assert any("flashkit compiles forward_float32" in line for line in lines) == drawn
    assert "compiles short" not in text  # it is over before
    assert all(len(line) < COLUMNS for line in lines)
    assert re.search(r"flashkit INFO compiled forward_float32 in \d+\.\d s", text)
    *_, last = (line.rstrip().rpartition("\r")[2] for line in text.rstrip().split("\n"))
    assert last.strip() == "done"  # nothing of the line is left


def test_no_line_where_stderr_is_no_terminal(program: Any) -> None:
    assert program(COMPILE) == "done\n"


def test_explanations_break_between_words() -> None:
    status, lines = on_terminal(["-m", "flashkit", "explain", "--causal"])
    assert status == 0 and max(map(len, lines)) <= COLUMNS
    (because,) = (i for i, line in enumerate(lines) if line.startswith("  because "))
    assert lines[because + 1].startswith(("  profile", " " * 13))  # a second line stands below the first
