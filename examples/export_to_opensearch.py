"""How do I put sparse vectors into OpenSearch, and query them there?

Needs: pip install "tilefold[demo]"; a running OpenSearch only for the commands that are printed
Run:   python examples/export_to_opensearch.py
It takes seconds on two CPU cores. The files are written to the folder opensearch-files.
"""

import json
from pathlib import Path

from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.recipes import minilm_splade
from tilefold.retrieval import SparseVectors, export_opensearch, load_collection, term_names

bank = load_collection(Path(__file__).parent / "data" / "bank")
texts = bank.contents()  # document id -> title and text
model = minilm_splade(list(texts.values()))  # or SparseEncoder("naver/splade-v3")

# [CLS] and [SEP] match in every text, so their weights are left out.
special_terms = model.tokenizer.all_special_ids
document_rows = encode_sparse(model, list(texts.values()), task="document", top_k=128)
vectors = SparseVectors.from_torch(list(texts), document_rows).without(special_terms)

tokens = term_names(model.tokenizer, vectors.vocab_size)
export_opensearch(
    vectors,
    "opensearch-files",
    tokens,
    texts=texts,
    dots="keep",  # tokens such as "." are fine for neural_sparse queries
    overwrite=True,
)
print("files:", sorted(file.name for file in Path("opensearch-files").iterdir()))

query_rows = encode_sparse(model, ["my card was stolen"], task="query", top_k=8)
terms, weights = SparseVectors.from_torch(["q1"], query_rows).without(special_terms).row(0)
query_tokens = {
    tokens[term]: round(float(weight), 3) for term, weight in zip(terms, weights, strict=True)
}
print("curl -X PUT localhost:9200/articles -H 'Content-Type: application/json' \\")
print("  --data-binary @opensearch-files/mapping.json")
print("curl -X POST localhost:9200/articles/_bulk -H 'Content-Type: application/x-ndjson' \\")
print("  --data-binary @opensearch-files/bulk-00000.ndjson")
print(json.dumps({"query": {"neural_sparse": {"sparse": {"query_tokens": query_tokens}}}}))
