"""Attention in plain NumPy: slow, short, right. For small problems, for other dtypes and for comparison."""
