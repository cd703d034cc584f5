"""Helpers without a domain: files, lazy imports, memory, CSR tensors and types."""
