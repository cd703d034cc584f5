"""Streams that tokenize, encode and fetch texts ahead of each other."""
