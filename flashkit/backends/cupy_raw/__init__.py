"""Attention on CuPy arrays by kernels in CUDA C++, compiled for the call by NVRTC."""
