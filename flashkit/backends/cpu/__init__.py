"""Attention on the CPU: Numba, cache-blocked, with vector micro-kernels in LLVM IR."""
