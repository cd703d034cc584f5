"""Benchmarks of the operators: every number is gated on correctness in the same run and carries its provenance.

``registry`` describes what to run, ``gate`` decides whether a number may be shown, ``timing`` takes it, ``provenance``
says where it comes from, ``runner`` ties them together. Start with ``tilefold bench --list``.
"""
