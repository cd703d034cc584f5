"""Search: retrieval, feedback, fusion, reranking and explanation."""
