"""Benchmarks of the operators.

A number is reported only if the results were correct in the same run, and with its provenance:
hardware, versions and date. Start with ``tilefold bench --list``. README.md describes the files.
"""
