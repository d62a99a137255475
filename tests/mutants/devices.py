"""Faults in the IO model, the profiles, the cache of kernels and its trust."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_io_model.py",
    "tests/unit/test_profiles.py",
    "tests/system/test_cache_trust.py",
    "tests/unit/test_dispatch.py",
    "tests/unit/test_timing.py",
    "tests/tools/test_autotune.py",
)

DEVICES = "flashkit/devices"
MODEL, SCHEMA, PROFILES, TRUST = (f"{DEVICES}/{name}.py" for name in ("io_model", "schema", "profiles", "trust"))

FAULTS = (
    Fault(
        "timing: the call that wakes threads sets the repeats", f"{DEVICES}/timing.py",
        "seconds = min(seconds, *(sample(call) for _ in range(SIZING_CALLS - 1)))",
        "[sample(call) for _ in range(SIZING_CALLS - 1)]",
    ),
    Fault("33 warps", MODEL, "if 32 * self.warps > 1024:", "if 32 * self.warps > 1056:"),
    Fault("32 warps", MODEL, "if 32 * self.warps > 1024:", "if 32 * self.warps >= 1024:"),
    Fault(
        "no room for barriers", MODEL,
        "* (head_dim + head_dim_v)) * itemsize + 1024",
        "* (head_dim + head_dim_v)) * itemsize",
    ),
    Fault("registers of a producer", MODEL, "(registers_per_sm - 128 * 24)", "registers_per_sm"),
    Fault("registers of a thread", MODEL, "return min(255, (registers_per_sm", "return min(256, (registers_per_sm"),
    Fault(
        "half of P", MODEL,
        "self.block_k + self.block_k // 4) // (32 * self.warps) + 20",
        "self.block_k) // (32 * self.warps) + 20",
    ),
    Fault(
        "registers of a block", MODEL,
        "return self.rows * self.vectors + self.vectors + 1",
        "return self.rows * self.vectors + self.vectors",
    ),
    Fault(
        "panels of float64", MODEL,
        "return self.vectors * self.lanes * 4 // itemsize",
        "return self.vectors * self.lanes",
    ),
    Fault(
        "the L2 set of the backward pass", MODEL,
        "self.block_k * (2 * both + d) + self.block_q * (both + d)",
        "self.block_k * (2 * both + d) + self.block_q * both",
    ),
    Fault(
        "queries and keys of the paper's tile", MODEL,
        "return (inner, outer) if order == 1 else (outer, inner)",
        "return (inner, outer)",
    ),
    Fault(
        "the paper's tile is rounded down", MODEL,
        "outer = -(-memory // (4 * head_dim))",
        "outer = max(1, memory // (4 * head_dim))",
    ),
    Fault("traffic of O", MODEL, '"out": o + 2 * rounds * o', '"out": o + rounds * o'),
    Fault(
        "traffic of a group", MODEL,
        "{name: group * x for name, x in per_head.items()} | shared",
        "per_head | shared",
    ),
    Fault("traffic: tiles of keys", MODEL, "rounds = kept * -(-n_k // block_k)", "rounds = kept * (n_k // block_k)"),
    Fault("tiles beyond L2", MODEL, "<= l2 * 3 // 4 or smallest)", "<= l2 * 3 or smallest)"),
    Fault(
        "tiles beyond shared memory", MODEL,
        "if tile.shared_memory(head_dim, head_dim_v, ITEMSIZE[dtype]) <= sram",
        "if tile.shared_memory(head_dim, head_dim, ITEMSIZE[dtype]) <= sram",
    ),
    Fault("rows: the bound itself", SCHEMA, "else value <= wanted", "else value < wanted"),
    Fault("rows: what is not known holds", SCHEMA, "if value is None or not (", "if value is not None and not ("),
    Fault("rows: a speed is a tile", SCHEMA, "**facts) if row.block_q is not None), None)", "**facts)), None)"),
    Fault("rows: a register block that spills", SCHEMA, "have = 16 if self.lanes == 8 else 32", "have = 32"),
    Fault(
        "the datasheet before the measurement", SCHEMA,
        "return self.measured if self.measured is not None else self.datasheet",
        "return self.datasheet if self.datasheet is not None else self.measured",
    ),
    Fault("a key that appears twice", SCHEMA, "if key.value in seen:", "if False:"),
    Fault(
        "layers: the lower one wins", PROFILES,
        "            if dotted in provenance or provenance",
        "            if provenance",
    ),
    Fault(
        "layers: dates without their numbers", PROFILES,
        '_BELONGS_TO = {"source": "datasheet", "date": "measured", "versions": "measured"}',
        '_BELONGS_TO = {"source": "datasheet"}',
    ),
    Fault(
        "layers: rows of equal selectors", PROFILES,
        "kept.extend(row for row in rows if row.selector not in known)",
        "kept.extend(rows)",
    ),
    Fault(
        "criteria: features", PROFILES,
        'if not set(criteria.features or ()) <= set(device.get("features", ())):',
        "if False:",
    ),
    Fault("criteria: cores", PROFILES, 'if criteria.cores and criteria.cores != device.get("cores"):', "if False:"),
    Fault(
        "criteria: the closest last", PROFILES,
        "ranked.sort(key=lambda ranked_layer: ranked_layer[0], reverse=True)",
        "ranked.sort(key=lambda ranked_layer: ranked_layer[0])",
    ),
    Fault(
        "profiles: keys without the directory", PROFILES,
        "key = kind, settings.PROFILE_DIR.text(), settings.CPU_LANES.text()",
        "key = kind, settings.CPU_LANES.text()",
    ),
    Fault(
        "profiles: keys without the lanes", PROFILES,
        "settings.PROFILE_DIR.text(), settings.CPU_LANES.text()",
        "settings.PROFILE_DIR.text()",
    ),
    Fault(
        "profiles: measured speeds of another device", PROFILES,
        "[msgspec.structs.replace(row, measured=None) for row in rows if row.block_q is not None]",
        "list(rows)",
    ),
    Fault("trust: a group may write", TRUST, "_OTHERS = stat.S_IWGRP | stat.S_IWOTH", "_OTHERS = stat.S_IWOTH"),
    Fault("trust: hard links", TRUST, "if status.st_nlink > 1:  # 0", "if found.st_nlink > 2:  # 0"),
    Fault(
        "trust: the owner", TRUST,
        "if status.st_uid not in (0, os.geteuid()):",
        "if found.st_uid not in (0, os.geteuid()) and found.st_uid < 1000:",
    ),
    Fault("trust: links without end", TRUST, "if links > _LINKS or", "if"),
    Fault("trust: temporary files stay", TRUST, "            os.unlink(temporary)\n", "            pass\n"),
    Fault(
        "settings: a relative directory", "flashkit/settings.py",
        "    if not os.path.isabs(path):\n",
        "    if not found:\n",
    ),
    Fault(
        "cache: what cannot be written is lost", f"{DEVICES}/kernel_cache.py",
        "        _memory[folder, name] = content\n",
        "        pass\n",
    ),
    Fault(
        "cache: a variable's own folder is emptied", f"{DEVICES}/kernel_cache.py",
        'return Path(override, "flashkit-kernels") if',
        "return Path(override) if",
    ),
    Fault(
        "lanes of AVX-512 without VL", f"{DEVICES}/host.py",
        '{"avx512f", "avx512vl"} <= known',
        '{"avx512f"} <= known',
    ),
    Fault("lanes that hide wider vectors", f"{DEVICES}/host.py", '"8": ("avx512", "amx")', '"8": ("avx512",)'),
)  # fmt: skip
