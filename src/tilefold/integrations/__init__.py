"""Public seams of other libraries: patched only on request, and reversible."""
