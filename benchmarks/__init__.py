"""Measurements that are not part of the package, run from the root of the repository: see
README.md.
"""
