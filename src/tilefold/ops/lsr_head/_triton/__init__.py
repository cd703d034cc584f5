"""Kernels of the LSR head, for compute capability 8.0 and newer, with TMA from 9.0 on."""
