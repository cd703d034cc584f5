"""Packed (padding-free) inputs for encoding and training."""
