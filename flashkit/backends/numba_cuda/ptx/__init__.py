"""Instructions of NVIDIA's GPUs that Python has no words for, as functions of Numba's kernels.

asm         how an instruction becomes a function: the only file that knows LLVM
entry       where a kernel's tensor maps and shared memory are
numbers     single numbers and lanes
barriers    barriers, fences, registers
clusters    what blocks of a cluster do to each other
copies      between memory and shared memory
matrices    products
tuples      functions of a number applied to a tile of registers
"""

from .barriers import *
from .clusters import *
from .copies import *
from .entry import *
from .matrices import *
from .numbers import *
from .tuples import *
