"""Collections, sparse vectors, indexes, baselines, fusion and evaluation around a retriever.

Names are resolved on first use, so importing this package imports nothing heavy.
"""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_NAMES = {
    "fields": "DocumentFields",
    "collection": "Document Collection load_beir load_documents load_queries query_of_line",
    "datasets": "load_collection build_pydocs",
    "vectors": "SparseVectors SparseVectorWriter VectorManifest read_manifest read_rows read_vectors write_vectors "
    "export_jsonl term_names vocabulary_fingerprint",
    "export": "export_opensearch export_vespa",
    "encoding": "encode_collection encode_queries",
    "tokens": "DenseManifest TokenManifest TokenStore TokenVectorWriter TokenVectors open_dense open_tokens",
    "token_encoding": "encode_dense_collection encode_texts encode_tokens",
    "reranking": "rerank Reranking",
    "passages": "Passage Passages PassageTexts best_passages",
    "searcher": "Searcher SearchRequest",
    "index": "Hit SparseIndex build_index load_index hits_to_run",
    "index.dense": "DenseIndex",
    "index.late": "LateIndex",
    "metadata": "Filter",
    "merging": "merge_segments merge_vectors update_index",
    "bm25": "BM25Index",
    "dense": "encode_dense encoded_index",
    "fusion": "Fusion Run interpolate reciprocal_rank_fusion",
    "evaluation": "evaluate evaluate_per_query write_trec_run read_trec_run active_terms flops",
    "significance": "Difference Mean compare mean_of",
    "feedback": "Feedback Interpolation expand_dense expand_sparse feedback_documents with_feedback",
    "mining": "FalseNegatives Window drop_false_negatives mine_negatives",
    "teachers": "Teacher score_rows ensemble",
    "training_rows": "TrainingRows read_training_rows write_training_rows",
}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
