"""Evaluation measures and significance tests."""
