"""CUDA graphs of encoding and of training steps."""
