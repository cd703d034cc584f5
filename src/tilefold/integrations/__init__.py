"""Fused operators inside other libraries, through their extension points; patches only on request,
and reversible.
"""
