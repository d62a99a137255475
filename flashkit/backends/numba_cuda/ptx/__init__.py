"""PTX instructions as functions of Numba kernels.

asm         makes a function of an instruction; the only file that knows LLVM
entry       addresses of tensor maps and shared memory
numbers     scalars and lanes
barriers    mbarriers, named barriers, fences, setmaxnreg
copies      cp.async, TMA and bulk copies
matrices    ldmatrix, stmatrix, mma.sync, wgmma
tuples      functions of a scalar, applied to a fragment
"""

from .barriers import *
from .copies import *
from .entry import *
from .matrices import *
from .numbers import *
from .tuples import *
