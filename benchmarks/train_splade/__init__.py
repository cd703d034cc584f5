"""Training a SPLADE encoder: the largest batch that fits and the time of a step, stock beside
fused, in one run.
"""
