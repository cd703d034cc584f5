"""Options that name what is searched, with feedback (--prf) and reranking, and what they load."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tilefold import retrieval
from tilefold._internal.precision import inference_precision
from tilefold.cli import _common, _models, _options, _scores
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import Count, Number, Place, Text, flag, option, positive
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.index import DENSE, LATE

if TYPE_CHECKING:
    from tilefold._internal.typing import Model
    from tilefold.retrieval.common.runs import Run
    from tilefold.retrieval.data.collection import Document
    from tilefold.retrieval.data.metadata import Filter
    from tilefold.retrieval.data.passages import Passages
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex
    from tilefold.retrieval.search.feedback import Feedback, Interpolation
    from tilefold.retrieval.search.reranking import Reranker, Reranking
    from tilefold.retrieval.search.searcher import Searcher, SearchRequest
    from tilefold.retrieval.vectors.tokens import TokenStore

Texts = Callable[[], Mapping[str, str]]
AnyIndex: TypeAlias = "SparseIndex | BM25Index | DenseIndex | LateIndex"
PASSAGES = option(
    "Cut texts into passages of at most so many words; documents are then found by their best one.",
)
STRIDE = option(
    "Words from the beginning of a passage to that of the next; by default --passages, without overlap.",
)
CUT = option("Where passages begin and end; by default sentences.", metavar="sentences|words")
CHUNK = 1024  # queries searched at a time
MODEL_HELP = "The model that made --index; minilm for an index of encode --model minilm."
DENSE_LENGTH = positive(
    "Dense: tokens read of a text, at most; by default as many as the model reads.",
)
WHERE = option(
    "Only documents whose metadata match: lang=de, lang=de,en (one of them), lang!=de, year>=2000, or lang=null "
    "(without the field); may be repeated.",
)


def of_index(
    query_top_k: Count = positive("Sparse: keep only this many terms of a query."),
    query_cut: Count = option(
        "seismic: heaviest terms of a query that choose clusters; by default the index's.",
    ),
    heap_factor: Number = option(
        "seismic: lower is slower and closer to exact; by default the index's.",
    ),
    candidates: Count = option(
        "late, on a CPU: documents to score, 0 for all; by default the index's.",
        min=0,
    ),
    other_model: bool = flag(
        "Take a model that did not make the vectors, such as a query encoder.",
        "--other-model",
    ),
    device: Text = option(
        "exact, dense, late: such as cuda; by default the CPU for exact, else a GPU if any.",
    ),
) -> None:
    """Options of a search in an index."""


def of_reranking(
    rerank: Text = option(
        "Rerank by late interaction: token vectors (tilefold encode), or a multi-vector model, which encodes "
        "candidates; minilm takes the token states of the packaged one.",
    ),
    rerank_model: Text = option(
        "Multi-vector model of the queries, or minilm; by default that of the token vectors.",
    ),
    rerank_depth: Count = option(
        "Candidates to rerank; by default 100, of evaluate --k or a whole run.",
    ),
    rerank_weight: Number = option(
        "Weight of MaxSim beside the first scores, both in [0, 1]; by default MaxSim alone.",
    ),
) -> None:
    """Options of reranking."""


def of_feedback(
    prf: Text = option(
        "Search again with each query moved towards what it found.",
        "--prf",
        metavar="average|rocchio",
    ),
    prf_depth: Count = option("Best documents taken as relevant; by default 3, and 5 for rocchio."),
    prf_terms: Count = option("Sparse: heaviest terms kept of a query after --prf."),
    prf_alpha: Number = option(
        "rocchio: weight of the query; by default 0.9 of vectors of equal length.",
    ),
    prf_beta: Number = option("rocchio: weight of the best documents; by default 0.1."),
    prf_equal_lengths: bool | None = option(
        "Bring documents' vectors to the query's length first; by default for rocchio without weights.",
        "--prf-equal-lengths/--no-prf-equal-lengths",
    ),
    prf_gamma: Number = option("rocchio: weight of the last documents, subtracted (0)."),
    prf_bottom: Count = option("rocchio: how many last documents, of 1,000, --prf-gamma is for."),
    prf_with: Place = option("A second ranking to interpolate with: a BM25 index, or a TREC run."),
    prf_place: Text = option(
        "Where to interpolate around feedback; by default both.",
        metavar="before|after|both",
    ),
    prf_weight: Number = option("Weight of --prf-with in [0, 1], beside the other one (0.5)."),
    prf_normalization: Text = option(
        "Before interpolation; by default min_max.",
        metavar="min_max|z_score|none",
    ),
) -> None:
    """Options of pseudo relevance feedback."""


def passages(asked: Asked) -> Passages | None:
    """The cut that --passages, --stride and --cut ask for."""
    if asked["passages"] is None:
        return None
    from tilefold.retrieval.data.passages import Passages

    given = _common.known({name: asked[name] for name in ("stride", "cut")})
    with _options.as_options(length="--passages", stride="--stride", cut="--cut"):
        return Passages(asked["passages"], **given)


def load_index(asked: Asked, texts: Texts | None) -> tuple[AnyIndex, Model | None, Values]:
    """The index of --index or --vectors, the model of --model (BM25 has none), and options of the
    search.

    `texts` are the documents of --data, from which the untrained start is made again where it is
    not in the cache.
    """
    from tilefold.retrieval.index.opening import open_index
    from tilefold.retrieval.search.searcher import check_model

    if (path := asked.get("index")) is None:
        read = read_documents(asked["vectors"])
        sparse = isinstance(read, retrieval.SparseVectors)
        index = (retrieval.build_index if sparse else retrieval.DenseIndex.build)(read)
    else:
        index = open_index(path)
    path = path or asked["vectors"]
    index = _on(index, asked.get("device"), path)
    options = _common.known(
        {name: asked.get(name) for name in ("query_cut", "heap_factor", "candidates")},
    )
    of = {"query_cut": "seismic", "heap_factor": "seismic", "candidates": LATE}
    for name in (name for name, backend in of.items() if backend != index.backend):
        _options.refuse(
            [name],
            f"is for {of[name]} indexes, and {path} is searched as {index.backend}",
        )
    if index.backend == "bm25":
        useless = [name for name in ("model", "query_top_k", "other_model") if asked[name]]
        _options.refuse(useless, f"does nothing here: {path} is a BM25 index, which reads words")
        return index, None, {}
    model, made_by = asked["model"], index.provenance
    if model is None:
        raise UsageError(
            f"--index: {path} holds vectors; name the model that made them with --model.",
        )
    encoder: Model
    others = {
        DENSE: (["query_top_k", "prf_terms"], "dense"),
        LATE: (["query_top_k", "prf", "vectors"], "multi-vector"),
    }
    if index.backend in others:
        useless, kind = others[index.backend]
        _options.refuse(useless, f"is for sparse queries, and {path} holds {_models.VECTORS[kind]}")
        encoder = _models.load_model(model, kinds=(kind,))[0]
    elif model == _models.PACKAGED:
        if made_by.texts_sha256 is None:
            missing = (
                f"{path} does not say which those are: give the folder of the model that made it."
            )
            raise UsageError(
                f"--model: {model} is the untrained start for the documents of an index, and {missing}",
            )
        encoder = _models.load_untrained(made_by.texts_sha256, texts, f"the documents of {path}")
    else:
        encoder = _models.load_encoder(model)
    try:
        if not check_model(made_by, encoder, model, f"the index {path}"):
            note(
                f"--index: {path} does not say which model made it, so that {model} could not be compared with it",
            )
    except ValueError as error:
        if not asked["other_model"]:
            raise CommandError(f"--{error}") from error
        note(f"--model: {model} is not the model that made the index {path}")
    _report_precision(made_by, encoder, path)
    return index, encoder, options


def _report_precision(made_by: Provenance, encoder: Model, index: Path) -> None:
    """Print a note where queries are encoded in another precision than the index was."""
    precision = inference_precision(encoder)
    if made_by.precision not in (None, precision):
        note(
            f"{index} was computed in {made_by.precision}, and queries are encoded in {precision} here: "
            "scores differ from those of a search in one precision",
        )


def _on(index: Any, device: str | None, path: Path) -> Any:
    """The index on a device, or where it is without one."""
    if device is None:
        return index
    if index.backend not in ("exact", DENSE, LATE):
        raise UsageError(
            f"--device goes with exact, dense and late indexes; {path} is searched as {index.backend}.",
        )
    try:
        return index.on(device)
    except (RuntimeError, AssertionError) as error:  # of torch: no such device, or no space there
        raise UsageError(
            f"--device: {path} cannot be searched on {device} ({_common.first_line(error)}).",
        ) from error


def open_searcher(
    asked: Asked,
    texts: Texts | None,
    load: Callable[[Provenance], Values],
) -> Searcher:
    """A searcher of what :func:`load_index` loads, with the parts that `load` then loads for its
    provenance.
    """
    from tilefold.retrieval.search.searcher import Searcher

    index, encoder, options = load_index(asked, texts)
    parts = load(index.provenance)
    if index.backend == DENSE and asked["index"] is not None:
        _options.refuse(["vectors"], f"does nothing here: {asked['index']} holds its own vectors")
    elif encoder is not None and asked.get("prf") is not None and parts.get("vectors") is None:
        raise UsageError(
            "--prf reads the vectors of the documents found: give them with --vectors.",
        )
    names = {
        "vectors": "--vectors",
        "second": f"--prf-with: {asked.get('prf_with')}",
        "tokens": "--rerank",
    }
    with _options.as_options(**names, model="--rerank-model"):
        return Searcher(
            index,
            encoder,
            query_top_k=asked["query_top_k"],
            options=options,
            other_model=True,
            **parts,
        )


def where_of(asked: Asked, searcher: Searcher) -> Filter | None:
    """The conditions of --where, checked against the fields of the index; a line says so where
    nothing matches.
    """
    from tilefold.retrieval.data.metadata import Filter

    if not asked["where"]:
        return None
    index: Any = getattr(searcher.retriever, "index", None)
    with _options.as_options(where="--where"):
        chosen = Filter.parse(asked["where"], index.metadata and index.metadata.kinds)
        matching = count_matching(index, chosen)
    if not matching:
        note(f"--where: none of the {index.n_documents} documents of the index matches")
    return chosen


def count_matching(index: Any, where: Filter) -> int:
    """Number of documents of an index that match a filter."""
    from tilefold.retrieval.data.metadata import allowed_by

    if index.backend == "qdrant":
        return int(index.collection.count(where))
    allowed = allowed_by(index.metadata, where)
    return index.n_documents if allowed is None else int(allowed.sum())


def reason_without_hits(searcher: Searcher, where: Filter | None) -> str:
    """Return why a query found nothing: no documents, none that matches, or none with its terms."""
    index: Any = getattr(searcher.retriever, "index", None)
    if not index.n_documents:
        return "the index has no documents"
    if where is None:
        return "no document shares a term with this query"
    if not count_matching(index, where):
        return "no document matches --where"
    return "no document that matches --where shares a term with this query"


def ranked(
    searcher: Searcher,
    queries: Mapping[str, str],
    request: SearchRequest,
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The rankings of `queries`, some at a time, after reranking if the request has one."""
    left, done = iter(queries.items()), 0
    with _common.progress_bar("searching") as update:
        while chunk := dict(itertools.islice(left, CHUNK)):
            found = searcher.rank(chunk, request)
            if request.reranking is not None:
                found = searcher.rerank(chunk, found, request.reranking)
            yield from (
                (query, dict(list(scores.items())[: request.k]))
                for query, scores in found.run.items()
            )
            done += len(chunk)
            update(done, len(queries))


def read_documents(path: Path) -> Any:
    """The encoded documents that --vectors names, sparse or dense ones."""
    from tilefold.retrieval.vectors.sparse_files import layout_of

    dense = retrieval.open_dense(path) if layout_of(path) == "dense" else None
    if (kind := (dense.manifest if dense else retrieval.read_manifest(path)).kind) != "document":
        raise UsageError(
            f"--vectors: {path} holds {kind} vectors; encode documents without --queries.",
        )
    return dense or retrieval.read_vectors(path)


def read_tokens(tokens: Path | None) -> Any:
    """The token vectors that --tokens names."""
    if tokens is None:
        raise UsageError("--backend late indexes token vectors: give them with --tokens.")
    if tokens.is_file():
        from tilefold.retrieval.vectors.given_tokens import read_token_file

        return read_token_file(tokens)
    return retrieval.open_tokens(tokens)


def open_dense(asked: Asked, texts: Mapping[str, str], **parts: Any) -> Searcher:
    """A searcher of `texts` by the dense model at --model, encoded now, and of `parts`, which fit
    the texts.
    """
    from tilefold.retrieval.search.searcher import Searcher

    _options.refuse(["prf_terms"], "is for sparse queries, and this model is dense")
    _options.refuse(
        ["vectors"],
        "does nothing here: --model is a dense model, which encodes the documents itself",
    )
    model, _ = _models.load_model(asked["model"], kinds=("dense",))
    _models.limit_length(model, asked["max_length"])
    with _common.progress_bar("encoding") as update:
        return Searcher(retrieval.encoded_index(model, texts, progress=update), model, **parts)


def feedback_request(asked: Asked) -> tuple[Feedback | None, Interpolation | None]:
    """Feedback and interpolation, None without --prf."""
    from tilefold.retrieval.search.feedback import Feedback, Interpolation

    if (method := asked["prf"]) is None:
        return None, None
    if (asked["prf_gamma"] is None) != (asked["prf_bottom"] is None):
        raise UsageError(
            "--prf-gamma and --prf-bottom go together: a weight, and how many documents.",
        )
    names = ("depth", "terms", "alpha", "beta", "gamma", "bottom", "equal_lengths")
    own = {name: asked[f"prf_{name}"] for name in names}
    mixed = {name: asked[f"prf_{name}"] for name in ("place", "weight", "normalization")}
    options = {name: f"--prf-{name.replace('_', '-')}" for name in (*own, *mixed)} | {
        "top_terms": "--prf-terms",
    }
    own["top_terms"] = own.pop("terms")
    with _options.as_options(**options):
        mix = None if asked["prf_with"] is None else Interpolation(**_common.known(mixed))
        return Feedback(method, **_common.known(own)), mix


def second_ranking(
    asked: Asked,
    queries: Mapping[str, str],
    made_of: Provenance,
) -> BM25Index | Run | None:
    """The BM25 index, or the run of `queries` over texts `made_of`, that --prf-with names."""
    from tilefold.retrieval.index.bm25 import BM25Index
    from tilefold.retrieval.index.opening import open_index

    if (path := asked["prf_with"]) is None:
        return None
    given = open_index(path) if path.is_dir() else _scores.read_run(path, "--prf-with")
    if "texts_sha256" in made_of.differs(given.provenance):
        raise CommandError(
            f"--prf-with: {path} was made from other documents than those that are searched.",
        )
    if isinstance(given, BM25Index):
        return given
    if not isinstance(given, _scores.NamedRun):
        remedy = "give a BM25 index, or save its run and give that: tilefold evaluate --save-run."
        raise UsageError(f"--prf-with: {path} is an index of vectors; {remedy}")
    if not (found := {query: given.run[query] for query in queries if query in given.run}):
        raise CommandError(f"{given.name}: no result for any of the {len(queries)} queries.")
    if len(found) < len(queries):
        note(f"{given.name}: results for {len(found)} of the {len(queries)} queries")
    return found


def rerank_request(asked: Asked, depth: int | None = None) -> Reranking | None:
    """Reranking by --rerank-depth, else `depth`, --rerank-tail and --rerank-weight; None without
    --rerank.
    """
    if asked["rerank"] is None:
        return None
    from tilefold.retrieval.search.reranking import Reranking

    given: Values = _common.known(
        {name: asked.get(f"rerank_{name}") for name in ("depth", "tail", "weight")},
    )
    with _options.as_options(
        depth="--rerank-depth",
        tail="--rerank-tail",
        weight="--rerank-weight",
    ):
        return Reranking(**{"depth": depth, **given})


def load_reranker(asked: Asked, documents: Mapping[str, Document], texts: Provenance) -> Reranker:
    """The reranker of --rerank, for documents with the fingerprint of `texts`."""
    from tilefold.retrieval.search.reranking import Reranker

    late, tokens = load_late(asked["rerank"], asked["rerank_model"], texts=True)
    with _options.as_options(tokens="--rerank", model="--rerank-model"):
        return Reranker(late, tokens, documents, texts)


def load_late(
    source: str,
    model: str | None,
    texts: bool,
    option: str = "--rerank",
) -> tuple[Any, TokenStore | None]:
    """The multi-vector model, and the token vectors at `source` of `option`, if that is not the
    model itself.

    `model` is that of the option's ``-model``, and `texts` says whether those of candidates are
    known.
    """
    folder, packaged = Path(source), source == _models.PACKAGED
    if not packaged and (folder / "manifest.json").is_file():
        store = retrieval.open_tokens(folder)
        made_by = model or store.manifest.model_source
        if made_by is None or (
            model is None and Path(made_by).is_absolute() and not Path(made_by).is_dir()
        ):
            where = "unknown" if made_by is None else f"no longer in {made_by}"
            raise UsageError(
                f"{option}: the model that made {folder} is {where}; name it with {option}-model.",
            )
        return _models.load_model(made_by, f"{option}-model", ("multi-vector",))[0], store
    a_model = packaged or any((folder / f"{name}.json").is_file() for name in ("config", "modules"))
    if folder.is_dir() and not a_model:
        remedy = "make token vectors with: tilefold encode --model MULTI_VECTOR_MODEL"
        raise UsageError(f"{option}: {source} holds neither token vectors nor a model; {remedy}")
    if model is not None:
        raise UsageError(
            f"{option}-model goes with token vectors in {option}, which here is a model itself.",
        )
    if not texts:
        raise UsageError(
            f"{option} with a model encodes the candidates' texts: give the collection with --data.",
        )
    return _models.load_model(source, option, ("multi-vector",))[0], None
