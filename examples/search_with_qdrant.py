"""How do I store sparse vectors in Qdrant, filter them, and delete documents?

Needs: pip install "tilefold[demo,qdrant]"
Run:   python examples/search_with_qdrant.py
It takes seconds on two CPU cores. Qdrant's engine runs in this process.
"""

import tempfile
from pathlib import Path

from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.recipes import minilm_splade
from tilefold.retrieval import SparseVectors, load_collection
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection

bank = load_collection(Path(__file__).parent / "data" / "bank")
texts = bank.contents()  # document id -> title and text
model = minilm_splade(list(texts.values()))  # or SparseEncoder("naver/splade-v3")

# [CLS] and [SEP] match in every text, so their weights are left out.
special_terms = model.tokenizer.all_special_ids
document_rows = encode_sparse(model, list(texts.values()), task="document", top_k=128)
vectors = SparseVectors.from_torch(list(texts), document_rows).without(special_terms)
query_rows = encode_sparse(model, ["my card was stolen"], task="query")
query = SparseVectors.from_torch(["q1"], query_rows).without(special_terms)

layout = Layout(
    vectors.vocab_size,
    vectors.fingerprint,
    fields={"lang": "keyword", "year": "integer"},
)
folder = Path(tempfile.mkdtemp()) / "articles"
# For a server: QdrantCollection.server("http://localhost:6333", "articles", layout)
with QdrantCollection.embedded(folder, layout) as collection:
    collection.upsert(Documents(vectors.ids, vectors, payloads=bank.metadata()))
    (hits,) = collection.search(query, 3)
    print("best:", hits)
    (hits,) = collection.search(query, 3, where={"lang": "en", "year": {"gte": 2022}})
    print("best in English since 2022:", hits)
    collection.delete(["cards"])
    print("documents left:", collection.count())
