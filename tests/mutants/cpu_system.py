"""Faults in what is around the kernels of the CPU backend: object files, targets, trust in files, threads."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_cpu_objects.py",
    "tests/system/test_cache_files.py",
    "tests/system/test_cache_trust.py",
    "tests/system/test_threads.py",
    "tests/system/test_concurrency.py",
    "tests/system/test_prebuilt.py",
)

CPU = "flashkit/backends/cpu"

FAULTS = (
    Fault(
        "backward: as many work tiles as threads", f"{CPU}/passes.py",
        "-(-WORK_TILES_A_THREAD * count // heads)",
        "-(-count // heads)",
    ),
    Fault(
        "backward: splits take memory without a bound", f"{CPU}/passes.py",
        "min(balanced, DQ_BYTES_A_THREAD * count // split_bytes)",
        "balanced",
    ),
    Fault(
        "scratch memory of any size is kept", f"{CPU}/scratch_pool.py",
        "if scratch.size <= MAX_BYTES:",
        "if True:",
    ),
    # object files
    Fault(
        "objects: keys without the target", f"{CPU}/objects.py",
        'f"{fingerprint()} {tuple(wanted)} {source.text}"',
        'f"{fingerprint()} {source.text}"',
    ),
    Fault(
        "objects: keys without the sources", f"{CPU}/objects.py",
        'f"{fingerprint()} {tuple(wanted)} {source.text}"',
        'f"{tuple(wanted)} {source.text}"',
    ),
    Fault(
        "objects: a source is left out", f"{CPU}/objects.py",
        'for path in sorted(_HERE.rglob("*.py")):',
        'for path in sorted(_HERE.glob("*.py")):',
    ),
    Fault(
        "objects: the compiler's version", f"{CPU}/objects.py",
        "{llvmlite.__version__} {np.__version__} {_numba_version()}",
        "{np.__version__} {_numba_version()}",
    ),
    Fault("objects: keys without Numba's settings", f"{CPU}/specialise.py", 'f"{settings} {text}"', 'f"{text}"'),
    Fault(
        "objects: a damaged file is loaded", f"{CPU}/objects.py",
        "if header.sha256 != _hash(name, stored) or",
        "if",
        "tests/system/test_cache_files.py -k object",
    ),
    Fault(
        "objects: another machine's file is loaded", f"{CPU}/objects.py",
        " or not headers.alike(code, _model()):",
        ":",
    ),
    Fault(
        "objects: a file is made twice", f"{CPU}/objects.py",
        "    with kernel_cache.compile_lock(FOLDER, name):\n"
        "        if (cached := _cached(name)) is not None:\n            "
        "return cached\n",
        "    with kernel_cache.compile_lock(FOLDER, name):\n",
    ),
    Fault(
        "objects: the cache before the package", f"{CPU}/objects.py",
        "_prebuilt(names.prebuilt) or _cached(names.cached)",
        "_cached(names.cached) or _prebuilt(names.prebuilt)",
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "objects: what an object calls is not looked for", f"{CPU}/objects.py",
        'compiled.code.startswith(b"\\x7fELF") and',
        "False and",
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "target: a class that the CPU does not fulfil", f"{CPU}/target.py",
        "level.features <= available and",
        "",
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "target: prebuilt kernels of this machine's architecture alone", f"{CPU}/target.py",
        'f"{one.arch}-{system}"',
        "initialised()",
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "target: a class of another architecture", f"{CPU}/target.py",
        'level.arch == triple.partition("-")[0] and',
        "",
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "specialise: names that count what was compiled", f"{CPU}/specialise.py",
        'name.linkage, name.name = "internal", f"part{i}"',
        'name.linkage = "internal"',
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "trust: prebuilt files of other users", "flashkit/devices/trust.py",
        "users[0] not in (0, os.geteuid(), top.st_uid) or",
        "",
        "tests/system/test_prebuilt.py",
    ),
    Fault(
        "trust: prebuilt files of another group", "flashkit/devices/trust.py",
        "writers if users[1] == top.st_gid else writers & ~stat.S_IWGRP",
        "writers",
        "tests/system/test_prebuilt.py",
    ),
    # threads
    Fault("threads: a child of a fork uses the pool", f"{CPU}/threads.py", "    if _forked:\n        return 1\n", ""),
    Fault(
        "threads: the setting is not bounded", f"{CPU}/threads.py",
        "return allowed if wanted is None else min(allowed, wanted)",
        "return allowed if wanted is None else wanted",
    ),
)  # fmt: skip
