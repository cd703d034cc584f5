"""Sparse, dense and token vectors: in memory, in files, and exported for other engines."""
