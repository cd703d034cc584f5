"""How do I use a sparse model as a retriever of LangChain?

Needs: pip install "tilefold[demo]" langchain-qdrant
Run:   python examples/search_with_langchain.py
It takes seconds on two CPU cores. The store is in memory; pass url= for a Qdrant server.
"""

from pathlib import Path

from langchain_core.documents import Document
from langchain_qdrant import QdrantVectorStore, RetrievalMode

from tilefold.integrations.langchain import TilefoldSparseEmbeddings
from tilefold.recipes import minilm_splade
from tilefold.retrieval import load_collection

bank = load_collection(Path(__file__).parent / "data" / "bank")
texts = bank.contents()  # document id -> title and text
model = minilm_splade(list(texts.values()))  # or a folder, or "naver/splade-v3"

store = QdrantVectorStore.from_documents(
    [Document(text, metadata={"id": document_id}) for document_id, text in texts.items()],
    None,  # no dense embeddings
    sparse_embedding=TilefoldSparseEmbeddings(model, top_k=128),
    retrieval_mode=RetrievalMode.SPARSE,
    location=":memory:",
    collection_name="articles",
)
retriever = store.as_retriever(search_kwargs={"k": 3})
hits = retriever.invoke("my card was stolen")
print("my card was stolen ->", [document.metadata["id"] for document in hits])
