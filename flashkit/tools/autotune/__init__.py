"""`flashkit autotune`."""
