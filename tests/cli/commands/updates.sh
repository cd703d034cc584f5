tilefold encode --model minilm --kind dense --data my-collection --output first-vectors
tilefold index --vectors first-vectors --output growing-index
tilefold index --backend bm25 --data my-collection --output words-index
tilefold encode --model minilm --kind dense --data new-documents.jsonl --output new-vectors
tilefold index --update --vectors new-vectors --output growing-index --delete gone.txt
tilefold index --update --data new-documents.jsonl --output words-index --delete gone.txt
tilefold search "how do I work with kettles" --index growing-index --model minilm
tilefold index --merge --output growing-index
tilefold merge first-vectors new-vectors --output all-vectors
