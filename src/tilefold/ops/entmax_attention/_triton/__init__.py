"""Alpha-entmax attention in Triton: compute capability 8.0 and newer."""
