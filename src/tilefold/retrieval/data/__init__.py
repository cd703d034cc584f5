"""Collections: reading corpora, queries, judgements and metadata, and splitting documents into passages."""
