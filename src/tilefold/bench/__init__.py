"""Benchmarks of the operators: every number is gated on correctness in the same run and carries its
provenance.

Start with ``tilefold bench --list``; README.md says which file does what.
"""
