"""Training a SPLADE encoder: the largest batch that fits and the time of a step, of the stock and
of the fused head in one run.
"""
