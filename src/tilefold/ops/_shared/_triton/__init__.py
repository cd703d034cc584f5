"""Device functions that the kernels of several operators share."""
