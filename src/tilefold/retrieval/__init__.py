"""Collections, sparse vectors, indexes, baselines, fusion and evaluation around a retriever.

Names are resolved on first use, so importing this package imports nothing heavy.
"""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_HOME = {
    "Document": "collection",
    "Collection": "collection",
    "load_beir": "collection",
    "load_documents": "collection",
    "load_queries": "collection",
    "query_of_line": "collection",
    "load_collection": "datasets",
    "build_pydocs": "pydocs",
    "SparseVectors": "vectors",
    "SparseVectorWriter": "vectors",
    "VectorManifest": "vectors",
    "read_manifest": "vectors",
    "read_rows": "vectors",
    "read_vectors": "vectors",
    "write_vectors": "vectors",
    "export_jsonl": "vectors",
    "vocabulary_fingerprint": "vectors",
    "encode_collection": "encoding",
    "encode_queries": "encoding",
    "TokenManifest": "tokens",
    "TokenStore": "tokens",
    "TokenVectorWriter": "tokens",
    "TokenVectors": "tokens",
    "open_tokens": "tokens",
    "encode_texts": "token_encoding",
    "encode_tokens": "token_encoding",
    "rerank": "reranking",
    "Hit": "index",
    "SparseIndex": "index",
    "build_index": "index",
    "load_index": "index",
    "hits_to_run": "index",
    "BM25Index": "bm25",
    "dense_run": "dense",
    "encode_dense": "dense",
    "rank_by_similarity": "dense",
    "Run": "fusion",
    "interpolate": "fusion",
    "reciprocal_rank_fusion": "fusion",
    "evaluate": "evaluation",
    "evaluate_per_query": "evaluation",
    "write_trec_run": "evaluation",
    "read_trec_run": "evaluation",
    "active_terms": "evaluation",
    "flops": "evaluation",
    "Feedback": "feedback",
    "Interpolation": "feedback",
    "expand_dense": "feedback",
    "expand_sparse": "feedback",
    "feedback_documents": "feedback",
    "with_feedback": "feedback",
    "TrainingRows": "training_rows",
    "read_training_rows": "training_rows",
    "write_training_rows": "training_rows",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_exports(globals(), _HOME)
