"""`flashkit ...` and `python -m flashkit ...`.

The command line needs typer and rich. `doctor` has to work in a broken installation without them, so this file imports
neither and falls back to the plain text of `doctor`.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        from .tools.cli import run
    except ImportError as error:
        from .tools import doctor

        if sys.argv[1:2] != ["doctor"]:
            print(f"error: the command line does not load: {error}\n", file=sys.stderr)
            print("    pip install typer rich        installs what it needs", file=sys.stderr)
            print("    flashkit doctor               works without, and reports what else is missing", file=sys.stderr)
            return 1
        return doctor.main(sys.argv[2:])
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
