"""The benchmark of searching a collection of sparse vectors."""
