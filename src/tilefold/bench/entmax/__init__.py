"""The benchmark of entmax."""
