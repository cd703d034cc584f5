tilefold train --data pydocs --output splade-model
tilefold encode --model splade-model --data pydocs --output vectors --top-k 128
tilefold index --vectors vectors --output my-index
tilefold search "read a file line by line" --index my-index --model splade-model --data pydocs
tilefold evaluate --data pydocs --index my-index --model splade-model --measure nDCG@10 --measure R@500
tilefold encode --model splade-model --data pydocs --output vectors-bf16 --top-k 128 --dtype bf16
tilefold encode --model minilm --data pydocs --output minilm-vectors --top-k 128
tilefold index --vectors minilm-vectors --output minilm-index
tilefold search "read a file line by line" --index minilm-index --model minilm --data pydocs --rerank minilm
tilefold search --index my-index --model splade-model --data pydocs --vectors vectors
tilefold search - --index my-index --model splade-model --json < queries.txt
tilefold search --queries topics.trec --index my-index --model splade-model --k 100 --json
tilefold search --queries topics.trec --index my-index --model splade-model --k 1000 --save-run topics-run.trec
tilefold index --vectors vectors --output seismic-index --backend seismic --n-postings 2000 --summary-energy 0.4
tilefold evaluate --data pydocs --index seismic-index --model splade-model --query-cut 10 --heap-factor 0.8
tilefold encode --model minilm --data pydocs --passages 64 --stride 32 --output passages --top-k 128
tilefold index --vectors passages --output passage-index
tilefold search "read a file line by line" --index passage-index --model minilm --data pydocs --vectors passages
tilefold search "read a file line by line" --index passage-index --model minilm --data pydocs --by passage --k 3
tilefold index --backend bm25 --data pydocs --passages 64 --stride 32 --output bm25-passages
tilefold encode --model minilm --kind tokens --data pydocs --passages 64 --output passage-tokens --storage int8
tilefold search "read a file line by line" --index bm25-passages --data pydocs --rerank passage-tokens --json
tilefold evaluate --data pydocs --index passage-index --model minilm --rerank passage-tokens --save-run passages.trec
tilefold evaluate --data pydocs --index passage-index --model minilm --vectors passages --prf rocchio --prf-with bm25-passages
tilefold encode --model splade-model --data pydocs --max-length 64 --output vectors-64
tilefold index --backend bm25 --data pydocs --output bm25-index --identifiers
tilefold search "read a file line by line" --index bm25-index --data pydocs
tilefold evaluate --data pydocs --split test --split train --index bm25-index --save-run bm25.trec
tilefold evaluate --data pydocs --split test --split train --model minilm --save-run dense.trec
tilefold evaluate --data pydocs --split test --split train --index my-index --model splade-model --save-run splade.trec
tilefold fuse --data pydocs --run bm25.trec --run dense.trec --run splade.trec
tilefold fuse --data pydocs --run bm25.trec --run dense.trec --method interpolation --tune train --save-run fused.trec
tilefold evaluate --data pydocs --run bm25.trec --per-query bm25.tsv
tilefold compare bm25.trec dense.trec splade.trec --data pydocs --plot compared.png
tilefold compare bm25.trec dense.trec splade.trec --data pydocs --all-pairs --measure nDCG@10 --measure R@100 --json
tilefold search "read a file line by line" --index my-index --model splade-model --vectors vectors --prf average --prf-terms 64
tilefold evaluate --data pydocs --index my-index --model splade-model --vectors vectors --prf rocchio --save-run prf.trec
tilefold evaluate --data pydocs --index bm25-index --prf rocchio --prf-depth 5 --prf-alpha 0.9 --prf-beta 0.1
tilefold evaluate --data pydocs --model minilm --prf average --prf-with bm25.trec --prf-place both --prf-weight 0.3
tilefold train --recipe colbert --data pydocs --output colbert-model
tilefold encode --model colbert-model --data pydocs --output tokens --storage int8
tilefold search "read a file line by line" --index my-index --model splade-model --data pydocs --rerank tokens
tilefold evaluate --data pydocs --index my-index --model splade-model --rerank tokens --rerank-depth 50
tilefold evaluate --data pydocs --index my-index --model splade-model --rerank tokens --rerank-weight 0.6
tilefold evaluate --data pydocs --run bm25.trec --rerank colbert-model --rerank-tail drop --save-run reranked.trec
tilefold fuse --data pydocs --run bm25.trec --run reranked.trec --method interpolation --weight 0.4 --weight 0.6
tilefold index --backend late --tokens tokens --output late-index
tilefold search "read a file line by line" --index late-index --model colbert-model --data pydocs
tilefold evaluate --data pydocs --index late-index --model colbert-model
tilefold index --backend late --tokens tokens --storage int4 --pool-factor 2 --output small-late-index
tilefold mine --data pydocs --index bm25-index --ranks 1-50 --per-query 10 --ranks 51-1000 --per-query 6 --output mined.parquet
tilefold mine --data pydocs --model minilm --max-score-share 0.95 --output mined-dense.parquet
tilefold score mined.parquet --data pydocs --teacher minilm --teacher bm25 --output scored.parquet
tilefold score mined.parquet --data pydocs --teacher colbert-model --teacher splade-model --like splade-model --output scored-by-two.parquet
tilefold export --to opensearch --vectors vectors --model splade-model --output opensearch --dots keep
tilefold export --to vespa --vectors vectors --names numbers --output vespa --document article
tilefold export --to onnx --model splade-model --output onnx-model
tilefold export --to onnx --model splade-model --output onnx-int8 --quantize int8
