tilefold index --backend bm25 --data my-collection --output my-bm25-index
tilefold encode --model minilm --data my-collection --output sparse-vectors
tilefold encode --model minilm --kind dense --data my-collection --output dense-vectors --storage int8
tilefold index --vectors sparse-vectors --output sparse-index
tilefold index --vectors dense-vectors --output dense-index
tilefold search "how do I work with sockets" --index dense-index --model minilm --data my-collection --prf average
tilefold evaluate --data my-collection --index my-bm25-index --save-run my-bm25.trec
tilefold evaluate --data my-collection --index sparse-index --model minilm --save-run my-sparse.trec
tilefold evaluate --data my-collection --index dense-index --model minilm --save-run my-dense.trec
tilefold fuse --data my-collection --run my-bm25.trec --run my-sparse.trec --run my-dense.trec --save-run my-fused.trec
