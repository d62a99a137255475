"""`flashkit bench`."""
