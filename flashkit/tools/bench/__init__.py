"""`flashkit bench`: attention against its baselines, interleaved in one process.

    cases           attention problems, and the suites of them
    contender       what is timed: baselines and yardsticks are made of these
    baselines       NumPy, PyTorch, JAX, ONNX Runtime on a CPU; baselines_cuda, PyTorch and JAX on a GPU
    yardsticks      what else a CPU case is timed with: matrix product, read loop, kernel alone
    platforms       the CPU or the CUDA device: its suites, baselines and yardsticks
    measure         one case in one direction; memory, its growth of resident memory
    results         result files, lines of JSON
    environment     device, versions and load, which a figure is stored with
    command         the command and its table
"""
