"""Attention on CUDA devices by kernels in Python, which Numba compiles."""
