"""Texts to rows without waiting: token ids, batches cut by tokens, work ahead and behind, copies that nobody waits for.

Nothing here knows sentence-transformers; ``tilefold.integrations.sentence_transformers`` puts the parts together for
its models, and ``tilefold.retrieval`` writes what comes out. README.md says which file does what.
"""
