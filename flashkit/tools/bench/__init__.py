"""`flashkit bench`: attention against its baselines, interleaved in one process.

Each module imports only from those above it:

    cases           attention problems and their suites
    contender       what is timed: contenders compute attention, yardsticks measure a rate
    environment     what a figure is stored with: device, versions, load
    results         result files, lines of JSON
    baselines       NumPy, PyTorch, JAX, ONNX Runtime on a CPU; baselines_cuda, PyTorch and JAX on a GPU
    yardsticks      rates that a CPU case is compared with: matrix product, read loop, kernel alone
    platforms       the CPU or the CUDA device: its suites, baselines and yardsticks
    memory          growth of resident memory, in a new process
    measure         one case in one direction
    command         the command, and the table on the screen
"""
