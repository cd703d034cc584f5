"""Measurements of the laboratory, run from the root of the repository: see README.md."""
