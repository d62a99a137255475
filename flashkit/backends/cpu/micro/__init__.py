"""Micro-kernels of the CPU backend, emitted as LLVM IR."""
