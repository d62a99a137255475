"""Attention over several processes. `worker.py` runs on every rank; pytest starts it with mpiexec."""
