"""PTX instructions as functions of Numba kernels: asm.py makes a function of an instruction, and is the only file that
knows LLVM but for a few in instructions.py; tuples.py applies functions of a scalar to a fragment.
"""

from .instructions import *
from .tuples import *
