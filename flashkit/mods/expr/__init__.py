"""Expression graphs: a score or mask modification, traced once, from which everything else is derived.

A modification is an ordinary Python function. Called with symbols instead of numbers it returns a small immutable
graph. The code in three languages (codegen.py), the derivative by the score, the bounds over a tile and the cache key
all come from that graph.

graph.py: nodes, and how graphs are read and rebuilt. functions.py: what a modification may call. operations.py: the
table of operations, and the derivative. interval_rules.py and intervals.py: bounds, and the class of a tile.
"""

from .functions import *
from .graph import *
from .intervals import *
from .operations import *
