"""How do I search a sparse index on a GPU, with queries that stay there?

Needs: pip install "tilefold[retrieval,triton]", and a GPU; without one it runs on the CPU
Run:   python examples/search_on_gpu.py
It takes seconds. The vectors are random; encode_sparse and encode_collection make those of texts.
"""

import time

import torch

from tilefold.retrieval import SparseVectors, build_index

VOCABULARY_SIZE, N_DOCUMENTS, N_QUERIES = 30_522, 20_000, 256
TERMS_PER_DOCUMENT, TERMS_PER_QUERY = 64, 16


def random_rows(n_rows: int, n_terms: int) -> torch.Tensor:
    """Return random sparse vectors [n_rows, V] in CSR, with at most n_terms terms each."""
    rows = torch.arange(n_rows).repeat_interleave(n_terms)
    # Squares of uniform numbers: low terms are frequent, as in texts.
    terms = (torch.rand(n_rows * n_terms).square() * VOCABULARY_SIZE).long()
    weights = 3 * torch.rand(n_rows * n_terms) + 0.1
    rows_and_terms = torch.sparse_coo_tensor(
        torch.stack([rows, terms]),
        weights,
        (n_rows, VOCABULARY_SIZE),
        check_invariants=True,
    )
    return rows_and_terms.to_sparse_csr()


torch.manual_seed(0)
document_ids = [f"d{number}" for number in range(N_DOCUMENTS)]
vectors = SparseVectors.from_torch(document_ids, random_rows(N_DOCUMENTS, TERMS_PER_DOCUMENT))
query_rows = random_rows(N_QUERIES, TERMS_PER_QUERY)

device = "cuda" if torch.cuda.is_available() else "cpu"
index = build_index(vectors, "exact")  # load_index("folder") reads one from disk
device_index = index.on(device)  # copies the postings; the search is exact there, too
queries = query_rows.to(device)

device_index.search_tensor(queries, k=10)  # the first call compiles
start = time.perf_counter()
scores, positions = device_index.search_tensor(queries, k=10)
best_positions = positions[:, 0].tolist()  # waits for the GPU
milliseconds = 1000 * (time.perf_counter() - start)
print(f"{N_QUERIES} queries on {device}: {milliseconds:.1f} ms")

query_ids = [f"q{number}" for number in range(N_QUERIES)]
cpu_hits = index.search(SparseVectors.from_torch(query_ids, query_rows), k=10)
best_ids = [document_ids[position] for position in best_positions]
n_equal = sum(hits[0].id == best_id for hits, best_id in zip(cpu_hits, best_ids, strict=True))
print(f"same best document as the index on the CPU: {n_equal} of {N_QUERIES} queries")
