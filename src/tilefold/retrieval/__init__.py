"""Collections, sparse vectors, indexes, baselines, fusion and evaluation around a retriever.

Names are resolved on first use, so importing this package imports nothing heavy.
"""

from __future__ import annotations

from tilefold._internal.lazy import lazy_exports

_NAMES = {
    "data.fields": "DocumentFields",
    "common.runs": "Run",
    "data.collection": "Document Collection load_beir load_documents load_queries query_of_line",
    "data.pages": "Page PageRanges",
    "data.datasets": "load_collection build_pydocs",
    "vectors.sparse_files": (
        "SparseVectors SparseVectorWriter VectorManifest read_manifest read_rows read_vectors "
        "write_vectors export_jsonl term_names vocabulary_fingerprint"
    ),
    "vectors.export": "export_opensearch export_vespa",
    "encoding.sparse": "encode_collection encode_queries",
    "vectors.tokens": (
        "DenseManifest TokenManifest TokenStore TokenVectorWriter TokenVectors open_dense "
        "open_tokens"
    ),
    "encoding.tokens": "encode_dense_collection encode_texts encode_tokens",
    "search.reranking": "rerank Reranking",
    "data.passages": "Passage Passages PassageTexts",
    "search.passages": "best_passages",
    "search.searcher": "Searcher SearchRequest",
    "index": "Hit SparseIndex build_index load_index hits_to_run",
    "index.dense": "DenseIndex",
    "index.late": "LateIndex",
    "data.metadata": "Filter",
    "index.checking": "IndexCheck check_index",
    "index.merging": "merge_segments merge_vectors update_index",
    "index.bm25": "BM25Index",
    "encoding.dense": "encode_dense encoded_index",
    "search.fusion": "Fusion interpolate reciprocal_rank_fusion",
    "evaluation.measures": (
        "evaluate evaluate_per_query write_trec_run read_trec_run active_terms flops"
    ),
    "evaluation.significance": "Difference Mean compare mean_of",
    "search.feedback": (
        "Feedback Interpolation expand_dense expand_sparse feedback_documents with_feedback"
    ),
    "training_data.mining": "FalseNegatives Window drop_false_negatives mine_negatives",
    "training_data.teachers": "Teacher score_rows ensemble",
    "training_data.passages": "training_passages",
    "training_data.rows": "TrainingRows read_training_rows write_training_rows",
}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
