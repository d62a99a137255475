"""The interpreter: the files of interpreter/ and a branch for each arithmetic operation, as one module, compiled."""

import hashlib
import importlib.util
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from filelock import FileLock
from numba import int64, typeof
from numba.core import config
from numba.core.codegen import CPUCodeLibrary
from numba.core.registry import cpu_target

from flashkit.devices import kernel_cache, trust

from .errors import CODES
from .operations import atomic, indexed, is_atomic, statement
from .ptx import LOCAL

FOLDER = Path(__file__).parent
FILES = "arithmetic", "memory", "barriers", "copies", "shuffles", "matrices", "warps"
"""Of interpreter/, in the order of their text: one module, in which a function is defined before it is called."""

GROUPS = {
    group: names.split()
    for group, names in {
        "flow": """
            bra cp.async.commit_group cp.async.wait_all cp.async.wait_group exit griddepcontrol.launch_dependents
            griddepcontrol.wait nanosleep.u32 ret trap
        """,
        "memory": "ld.generic ld.global ld.local ld.shared st.generic st.global st.local st.shared",
        "packing": "pack unpack",
        "mbarriers": "mbarrier.arrive mbarrier.arrive.expect_tx mbarrier.init mbarrier.try_wait.parity",
        "copies": """
            cp.async.bulk.commit_group cp.async.bulk.global.shared.bulk_group cp.async.bulk.shared.global.mbarrier
            cp.async.bulk.shared.shared.mbarrier cp.async.bulk.tensor.5d.global.shared.bulk_group
            cp.async.bulk.tensor.5d.shared.global.mbarrier cp.async.bulk.tensor.5d.shared.global.mbarrier.multicast
            cp.reduce.async.bulk.global.shared.bulk_group.add.f32
        """,
        "store_waits": "cp.async.bulk.wait_group cp.async.bulk.wait_group.read",
        "lanewise": "cp.async.shared.global st.async",
        "barriers": """
            bar.arrive bar.red.and.pred bar.red.or.pred bar.sync barrier.cluster.arrive barrier.cluster.wait setmaxnreg
        """,
        "matrices": """
            ldmatrix mma.f16 mma.bf16 mma.tf32 stmatrix wgmma.f16 wgmma.bf16 wgmma.tf32 wgmma.e4m3
            wgmma.commit_group.sync wgmma.fence.sync wgmma.wait_group.sync
        """,
        "shuffles": """
            bar.warp.sync elect.sync redux.sync.add.s32 redux.sync.add.u32 redux.sync.and.b32 redux.sync.max.s32
            redux.sync.max.u32 redux.sync.min.s32 redux.sync.min.u32 redux.sync.or.b32 shfl.sync.bfly.b32
            shfl.sync.down.b32 shfl.sync.idx.b32 shfl.sync.up.b32 vote.sync.all.pred vote.sync.any.pred
            vote.sync.ballot.b32
        """,
    }.items()
}
"""Operations that have functions in interpreter/, numbered in this order. Up to "lanewise" a lane executes by itself;
"barriers" and "matrices" take all lanes of a warp, "shuffles" those of a mask.
"""

SPECIAL = [name for names in GROUPS.values() for name in names]

BRANCH = """\
    elif {condition}:  # {names}
        for l in range(WIDE):
            if m >> l & 1:
                {statement}
"""

SOME = """
@njit
def lanes_{first}(op, m, s, operands, R, HALVES):
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    WIDE = R.shape[1]
    d, a, b, c, e = operands[s], operands[s + 1], operands[s + 2], operands[s + 3], operands[s + 4]
    if op < {first}:
        pass
{branches}
"""

A_FEW = 12
"""Statements in one function: Numba takes far longer for one function of all."""

HEAD = '''"""The interpreter of tests/emulator, generated."""

import math

import numpy as np
from numba import njit

'''


@contextmanager
def compiled_at_once(name: str) -> Iterator[None]:
    """Optimized little, in half the time; no function of the module `name` before `run`, with which all are."""

    def is_part(library: Any) -> bool:
        return library.name != "run" and any(name in function.name for function in library.get_defined_functions())

    codegen, kind = cpu_target.target_context.codegen(), CPUCodeLibrary
    optimise, finalize, set_env = kind._optimize_final_module, kind._finalize_final_module, codegen.set_env
    changed = [
        (config, "OPT", config._OptLevel(1)), (config, "LOOP_VECTORIZE", 0), (config, "SLP_VECTORIZE", 0),
        (kind, "_optimize_final_module", lambda library: None if is_part(library) else optimise(library)),
        (kind, "_finalize_final_module", lambda x: setattr(x, "_finalized", True) if is_part(x) else finalize(x)),
        (codegen, "set_env", lambda place, env: None if name in place and "run" not in place else set_env(place, env)),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, attribute, value in changed:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


class Machine:
    """The numbers of operations, and the interpreter compiled for those that are known when it is first used."""

    def __init__(self) -> None:
        known = (FOLDER / "operations.txt").read_text().split()
        self.numbers = {name: i for i, name in enumerate([*SPECIAL, *known])}
        self._run: Any = None

    def number(self, name: str) -> int:
        """The number of an operation. NotImplementedError where the interpreter has none of this name."""
        if name not in self.numbers:
            if not is_atomic(name):
                statement(name)
            warnings.warn(f"{name} belongs into operations.txt: the interpreter is compiled again", stacklevel=2)
            self.numbers[name] = len(self.numbers)
            self._run = None
        return self.numbers[name]

    def run(self, block: Any) -> Any:
        """`run` of interpreter/warps.py, compiled for what describes a CTA."""
        if self._run is None:
            text = self._text()
            made_from = text, type(block).__qualname__, block._fields
            name = f"emulator_{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}"
            path = trust.directory(kernel_cache.path() / "emulator", make=True) / f"{name}.py"
            with FileLock(path.with_suffix(".lock")):  # compiled by one process, the others wait
                if not path.exists():
                    trust.write(path, text.encode())
                spec = importlib.util.spec_from_file_location(name, path)
                assert spec and spec.loader
                sys.modules[name] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                with compiled_at_once(name):
                    module.run.compile((int64, int64, typeof(block)))
            self._run = module.run
        return self._run

    def _text(self) -> str:
        plain = {name: number for name, number in self.numbers.items() if name not in SPECIAL}
        branches = [atomic(name, number) for name, number in plain.items() if is_atomic(name)]
        alike: dict[str, list[str]] = {}
        for name in plain:
            if not is_atomic(name):
                alike.setdefault(indexed(statement(name)), []).append(name)
        functions, rest = list[str](), list(alike.items())
        for i in range(0, len(rest), A_FEW):
            some = [(*each, " or ".join(f"op == {plain[name]}" for name in each[1])) for each in rest[i : i + A_FEW]]
            first = plain[some[0][1][0]]
            inner = [BRANCH.format(condition=c, names=", ".join(names), statement=text) for text, names, c in some]
            functions.append(SOME.format(first=first, branches="".join(inner).replace("\n\n", "\n")))
            either = " or ".join(condition for *_, condition in some)
            branches.append(f"    elif {either}:\n        lanes_{first}(op, m, s, operands, R, halves[0])\n")
        constants = [f"{name} = {code}\n" for name, code in {**CODES, "LOCAL": LOCAL}.items()]
        constants += [f"{name.upper().replace('.', '_')} = {self.numbers[name]}\n" for name in SPECIAL]
        constants += [f"LAST_{group.upper()} = {self.numbers[names[-1]]}\n" for group, names in GROUPS.items()]
        *files, warps = [(FOLDER / f"interpreter/{name}.py").read_text() for name in FILES]
        text = "".join([HEAD, *constants, *files, *functions, warps])
        text = re.sub(r"(?m)^ *# OPERATIONS\n", lambda _: textwrap.indent("".join(branches), " " * 8), text)
        inner, _, run = text.rpartition("@njit\n")
        own = "no_cpython_wrapper=True, no_cfunc_wrapper=True, "
        inner = inner.replace("@njit\n", f"@njit({own}error_model='numpy', _nrt=False)\n")
        return f"{inner}@njit(cache=True, error_model='numpy', _nrt=False)\n{run}"
