"""Argument checks, file helpers and provenance for all of the retrieval package."""
