"""The benchmark of entmax attention."""
