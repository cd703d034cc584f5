"""Collections: corpora, queries, judgements and metadata, and documents cut into passages."""
