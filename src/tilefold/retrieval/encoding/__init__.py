"""Encoding of texts into folders of vectors, in one process, over several ranks or on Ray."""
