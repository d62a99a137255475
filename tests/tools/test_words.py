"""The field's words instead of the project's former ones, and lines that fit, in the package and in the documents."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OLD_WORDS = {
    r"\b(take_item|item_of|at_item|item_slot)\b": "work_tile, TileScheduler.next()",
    r"\b(next|last|this|own|whose|former|each) items?\b|\bitems? (before|ahead|of a head)\b|\bitem's\b": "work tile",
    r"\bAT_NOTES\b|\b(tile's|tiles'|loader's|next|its|await) notes?\b|\b(await|next)_note\b": "tile descriptor",
    r"\bmultiply_tiles\b": "mma_loop",
    r"\bRing\b|\bwait_(empty|full)\b|\brings? of stages\b": "pipeline, producer_acquire, consumer_wait",
    r"\bTURNS\b|\b(take|pass)_turn\b": "PING_PONG, warpgroup_barrier_sync, warpgroup_barrier_arrive",
    r"\bcome_early\b|\bleft to the end\b": "LPT order, lpt_tail",
    r"\bheads_together\b|\bturn_of\b|\btogether\.py\b": "L2 swizzle, heads_per_l2_group, TileCoord",
    r"\bpartial_lse\b": "lse_partial",
    r"\bmarks_of\b": "dq_semaphore",
    r"\bleft_alone\b|\bleft alone\b": "reserved_sms",
    r"\bsomehow\b": "other",
    r"\brows beside\b|\brows_beside\b|\w_beside\b": "fused preprocess",
    r"\bprepare_rows\b|\bstore_queries\b|\brows\.py\b": "bwd_preprocess, bwd_postprocess",
    r"\bhand_pairs\b": "store_ds",
    r"\baccumulate_carefully\b|\bcareful\w*\b|\bis_odd\b|\bodd_\w+": "non-finite fallback, is_nonfinite",
    r"\bgentle\b|\b(calm|CALM)\b": "tanh_poly_ok, TANH_POLY_MAX",
    r"\bhopeful\b|\bbegun\b|\busual (steps?|tiles?|loop)\b": "speculative, has_row_ref, steady state",
    r"\boptimis(m|tic|tically)\b": "speculative row maximum",
    r"\bform\.py\b|\bby form\b|\bof a known form\b": "affine score modification",
    r"\bsettle\(": "fence_operand",
    r"\bproducts_(begin|end|wait)\b": "wgmma_fence, wgmma_commit, wgmma_wait",
    r"\b(give|take)_registers\b": "setmaxnreg_dec, setmaxnreg_inc",
    r"\b\w+_across\b": "dsmem_*",
    r"\bSpare\b|\bjudges\b|\brepays?\b": "Fallback, profitable",
    r"\b([Ww]hoever|[Nn]obody|[Ss]omebody|whom)\b": "the thread, warp, CTA or kernel that is meant",
    r"\b[Ww]ho (multipl|loads?|waits?|takes?|adds?|sums?|stores?|counts?|ends?|comes?|does)": "the same",
    r"\bkept calls?\b|\bcalls? that `?attention`? keeps\b": "cached plan",
    r"\bits peers\b|\beach peer\b|\bpeers (that|whose|in turn)": "baselines",
}
"""What a reader of the field would not recognise, as a pattern, and what to write."""

ORDINARY = """
A list of items, dict.items() and array.itemsize. Notes are in docs/notes. The user, who passes an array, keeps it. It
is the usual case, handled with care. An odd number of blocks. The ring of keys. for item in items. Whose plan is it?
The form of an array. A peer-reviewed paper. Communicate across hosts. The rest is left. fresh environment
"""
EXAMPLES = """
take_item(p) the next item AT_NOTES multiply_tiles Ring<2> TURNS come_early heads_together partial_lse marks_of
left_alone somehow rows_beside prepare_rows hand_pairs carefully CALM hopeful optimistic form.py settle(s)
products_begin give_registers wait_across Spare whoever who multiplies kept call its peers
"""

DOCUMENTS = "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "docs/**/*.py", "benchmarks/*.py"
CODE = tuple(f"flashkit/**/*.{suffix}" for suffix in ("py", "cu", "cuh"))


def texts(*globs: str) -> dict[str, str]:
    files = [file for glob in globs for file in sorted(ROOT.glob(glob)) if not {"generated", "gallery"} & {*file.parts}]
    assert len(files) > 5 * len(globs)
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def test_old_words_are_gone() -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}; write {instead}"
        for name, text in texts(*DOCUMENTS, *CODE).items()
        for pattern, instead in OLD_WORDS.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, "\n".join([f"{len(found)} places", *found[:60]])


def test_lines_are_within_120_columns() -> None:
    numbered = ((name, enumerate(text.splitlines(), 1)) for name, text in texts(*CODE).items())
    found = [f"{name}:{i}: {len(line)}" for name, lines in numbered for i, line in lines if len(line) > 120]
    assert not found, "\n".join([f"{len(found)} lines", *found[:60]])


def test_the_patterns_find_old_words_and_spare_ordinary_english() -> None:
    assert not [pattern for pattern in OLD_WORDS if re.search(pattern, ORDINARY)]
    assert not [pattern for pattern in OLD_WORDS if not re.search(pattern, EXAMPLES)]


def messages(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each error that is raised; "{}" stands for a value."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                yield node.lineno, "".join(str(x.value) if isinstance(x, ast.Constant) else "{}" for x in parts)


FORMER = re.compile(r";.*\bfits?\b|\bfits$")
"""Messages say "name: expected X, got Y", as NumPy's and PyTorch's do."""


def test_errors_say_what_was_expected() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {message}"
        for folder in ("flashkit", "examples")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for number, message in messages(file.read_text(encoding="utf-8"))
        if FORMER.search(message)
    ]
    assert not found, "\n".join(found)
    old = "def f(x):\n    raise ValueError(f'k has dtype {x}; {x} fits')\n"
    assert [bool(FORMER.search(message)) for _, message in messages(old)] == [True]
    new = "def f(x):\n    raise ValueError(f'k: expected dtype {x}, got {x}')\n"
    assert [bool(FORMER.search(message)) for _, message in messages(new)] == [False]
