tilefold encode --model minilm --kind dense --data articles.jsonl --output article-vectors
tilefold index --vectors article-vectors --data articles.jsonl --output article-index
tilefold index --backend bm25 --data articles.jsonl --output article-words
tilefold search "how do I work with kettles" --index article-index --model minilm --where lang=de --where "year>=2000"
tilefold search "how do I work with kettles" --index article-words --where "lang!=de,fr" --where tags=tea --prf rocchio
tilefold encode --model minilm --kind dense --data new-articles.jsonl --output new-article-vectors
tilefold index --update --vectors new-article-vectors --data new-articles.jsonl --output article-index
tilefold index --merge --output article-index
tilefold search "kettles" --index article-index --model minilm --where "lang=null"
