from __future__ import annotations

import sys

from .search import main

sys.exit(main(sys.argv[1:]))
