"""`flashkit bench`: attention against its baselines, interleaved in one process.

The modules, lower ones first:

    cases           attention problems and their suites
    contender       what is timed: a contender, and a yardstick
    baselines       NumPy, PyTorch, JAX, ONNX Runtime on a CPU; baselines_cuda, PyTorch and JAX on a GPU
    yardsticks      rates that a CPU case is compared with: matrix product, read loop, kernel alone
    platforms       the CPU or the CUDA device: its suites, baselines and yardsticks
    measure         one case in one direction; memory, its growth of resident memory
    results         result files, lines of JSON
    environment     what a figure is stored with: device, versions, load
    table, command  the table on the screen; the command
"""
