"""Attention in plain NumPy, for small problems and for comparison."""
