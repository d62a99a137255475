"""GPT-2 trained on NumPy or CuPy arrays, its attention by flashkit: `make train`, or `python -m examples.gpt --help`.

Read model.py first: the forward pass and its derivative. It calls the same functions of cpu.py (NumPy, threads) and
gpu.py (cuBLAS and short CUDA kernels).
"""
