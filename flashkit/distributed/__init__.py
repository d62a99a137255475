"""Attention whose tokens are spread over processes: `Comm`, over MPI, NCCL or a process group of PyTorch."""

from .cache import SpreadCache as SpreadCache
from .comm import Comm as Comm
from .comm import RankError as RankError
from .explanation import Prediction as Prediction
from .explanation import predict as predict
