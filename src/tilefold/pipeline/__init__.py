"""Parts of the encoding pipeline: token ids, batches cut by tokens, threads that work ahead, asynchronous copies.

Nothing here knows sentence-transformers; ``tilefold.integrations.sentence_transformers`` puts the parts together for
its models, and ``tilefold.retrieval`` writes what comes out. README.md says which file does what.
"""
