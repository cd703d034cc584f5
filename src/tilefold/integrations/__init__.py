"""Fused operators inside other libraries, by extension points or reversible replacements."""
