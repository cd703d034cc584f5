"""How do I evaluate a sparse model on a BEIR collection, next to BM25?

Needs: pip install "tilefold[demo]"
Run:   python examples/evaluate_on_beir.py            # the sample collection, in seconds
       python examples/evaluate_on_beir.py scifact    # an unpacked BEIR folder
"""

import sys
from pathlib import Path

from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
from tilefold.recipes import minilm_splade
from tilefold.retrieval import (
    BM25Index,
    SparseVectors,
    build_index,
    compare,
    encode_queries,
    evaluate,
    evaluate_per_query,
    hits_to_run,
    load_collection,
)

folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data" / "bank"
collection = load_collection(folder)
texts = collection.contents()  # document id -> title and text
queries = collection.split_queries("test")
qrels = collection.qrels["test"]

model = minilm_splade(list(texts.values()))  # untrained; or SparseEncoder("naver/splade-v3")
accelerate(model)
rows = encode_sparse(model, list(texts.values()), task="document", top_k=256)
index = build_index(SparseVectors.from_torch(list(texts), rows), "exact")
query_vectors = encode_queries(model, queries)
runs = {
    "BM25": BM25Index.build(texts, language="english").search(queries, 100),
    "SPLADE": hits_to_run(query_vectors, index.search(query_vectors, k=100)),
}

for name, run in runs.items():
    print(name, evaluate(run, qrels, ["nDCG@10", "R@100"]))
tables = {name: evaluate_per_query(run, qrels, ["nDCG@10"]) for name, run in runs.items()}
for row in compare(tables, ["nDCG@10"]):
    print(f"{row.run} - {row.over}: {row.difference.mean:+.3f}, p = {row.p_holm:.3f}")
