"""``tilefold index``, of encoded documents or of their words, and ``tilefold export``, of files for other engines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilefold import retrieval
from tilefold._files import hold_path
from tilefold.cli import _common, _models, _options, _retrievers
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import OF_BACKEND, Count, Number, Place, Text, argument, flag, option, preset, required
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.passages import Passages, document_of
from tilefold.retrieval.provenance import Provenance, owned, texts_digest

# Measured with 120 terms per document on two cores: up to here exact search is as fast, smaller, and built in seconds.
SEISMIC_DOCUMENTS = 100_000
LONG_VECTOR = 256
BM25, QDRANT, LATE = "bm25", "qdrant", "late"
_BACKEND_HELP = (
    "exact (fastest and smallest up to 100,000 documents at least), bm25 (words, no model: give --data), seismic "
    "(approximate, for much larger collections; encode with --top-k 128 or so), qdrant (exact; to add to "
    "and delete from; in the folder, or on the server at --url), or late (late interaction: give --tokens)."
)


def index(
    output: Path = required("Folder for the index."),
    vectors: Place = option(
        "exact, seismic, qdrant: folder that tilefold encode wrote; exact takes dense vectors, too."
    ),
    tokens: Place = option(
        "late: token vectors of the documents, a folder of tilefold encode, or a .safetensors or .npz file."
    ),
    data: Text = option(
        "bm25: the documents; others: those of --vectors or --tokens, to keep their metadata. " + _common.DOCUMENTS_HELP
    ),
    backend: str = preset("exact", _BACKEND_HELP, metavar="exact | seismic | qdrant | bm25 | late"),
    language: Text = option("bm25: of Snowball stemmer and stop words, or none for neither; by default english."),
    k1: Number = option("bm25: saturation of term frequencies; by default 1.5."),
    b: Number = option("bm25: normalisation of document length, 0 to 1; by default 0.75."),
    identifiers: bool = flag(
        "bm25: split words at underscores and capitals, for texts about programs.", "--identifiers"
    ),
    passages: Count = _retrievers.PASSAGES,
    stride: Count = _retrievers.STRIDE,
    cut: Text = _retrievers.CUT,
    n_postings: Count = option("seismic: postings kept per term, on average; more for more documents by default."),
    centroid_fraction: Number = option("seismic: clusters of a term, as a fraction of its documents (0.1)."),
    min_cluster_size: Count = option("seismic: documents of the smallest cluster (10)."),
    summary_energy: Number = option("seismic: fraction of a cluster's weight in its summary (0.4)."),
    doc_cut: Count = option("seismic: heaviest terms of a document used to cluster (15)."),
    query_cut: Count = option(
        "seismic: query terms that choose clusters, at search (20; 10 from a million documents on)."
    ),
    heap_factor: Number = option(
        "seismic: 0 to 1, lower is slower and closer to exact (0.7; 0.8 from a million documents on)."
    ),
    num_threads: Count = option("seismic: threads, 0 for one per core (0).", "--threads"),
    storage: Text = option("late: by default int8; int4 takes half as much.", metavar="int8|fp16|int4"),
    pool_factor: Count = option("late: keep a vector for so many tokens of a document, the mean of a cluster (1)."),
    queries: Place = option("late: token vectors of queries, to measure the recall of candidates on them."),
    url: Text = option("qdrant: a server, such as http://localhost:6333; its key is in QDRANT_API_KEY."),
    collection: Text = option("qdrant: name of the collection on the server; by default that of --output."),
    weights: Text = option("qdrant: of what is searched; by default float32.", metavar="float32|float16"),
    overwrite: bool = flag("qdrant: replace other vectors in the collection of the server.", "--overwrite"),
    update: bool = flag(
        "Put --vectors (bm25: --data, late: --tokens) into the index at --output, replacing documents of the same id.",
        "--update",
    ),
    delete: Place = option("Remove documents, an id per line of this file, from the index at --output."),
    merge: bool = flag(
        "exact, dense, seismic, late: make one index of that at --output and what was added to it.", "--merge"
    ),
    as_json: bool = flag("The result as JSON on stdout.", "--json"),
) -> None:
    """Build an index: of encoded documents (exact, seismic, qdrant, late), or of the words of a collection (bm25).

    late scores all documents on a GPU; on a CPU it scores candidates, whose recall is printed. Of dense vectors, exact
    searches all of them on a GPU if there is one.

    With --update and --delete, the index at --output is changed, whatever its backend; it stays whole if that is
    interrupted.
    """
    asked = locals()
    options = {name: asked[name] for name in OF_BACKEND.get(backend, "").split() if asked[name] not in (None, False)}
    started = time.monotonic()
    if update or delete is not None or merge:
        changed = _change(asked)
        told = f"{changed['n_documents']} documents: {changed['written']} written, {changed['deleted']} removed"
        changed["seconds"] = round(time.monotonic() - started, 3)
        _common.print_result(changed, as_json, f"{told} in {changed['seconds']:.1f} s: {output}")
        return
    if backend == QDRANT:  # on the server, or in the folder
        options = ({"collection": output.resolve().name} if "url" in options else {"folder": output}) | options
    with hold_path(output), _common.heartbeat(f"indexing ({backend})"):
        words, of_words = backend == BM25, _retrievers.passages(asked)
        if backend == LATE:
            built: Any = _late(tokens, data, output, options)
        else:
            built = _words(data, options, of_words) if words else _vectors(vectors, data, backend, options)
        built.save(output)
        documents = built.n_documents
        if backend == QDRANT:
            built.close()
    seconds = round(time.monotonic() - started, 3)
    result = {"output": str(output), "backend": backend, "n_documents": documents, "seconds": seconds}
    if cuts := built.provenance.passages:
        result["passages"] = cuts
    what = "passages" if cuts else "documents"
    said = f"{documents} {what} indexed ({backend}) in {seconds:.1f} s: {output}"
    if backend == LATE:
        result |= built.options
        found = (
            f"; on a CPU it scores {built.n_candidates} candidates, of the ten best {built.recall:.1%}"
            if built.recall
            else ""
        )
        said += f" ({built.files.nbytes / 2**20:.0f} MiB of {built.options['storage']}{found})"
    if built.metadata is not None:
        result["metadata"] = built.metadata.kinds
        kept = ", ".join(f"{name} ({' or '.join(kinds)})" for name, kinds in built.metadata.kinds.items())
        said += f"; metadata: {kept}"
    _common.print_result(result, as_json, said)


def _words(data: str | None, options: Values, cuts: Passages | None) -> Any:
    from tilefold.retrieval.bm25 import BM25Options, Tokenizer

    if data is None:
        raise UsageError("--backend bm25 indexes the words of a collection: give it with --data.")
    with _options.as_options("language", "k1", "b"):
        Tokenizer(BM25Options(**options))
    collection = _common.load_data(data, documents_only=True)
    texts = collection.contents() if cuts is None else cuts.of(collection.documents)
    return retrieval.BM25Index.build(texts, metadata=collection.metadata(), **options)


def _vectors(vectors: Path | None, data: str | None, backend: str, options: Values) -> Any:
    if backend == "seismic":
        from tilefold.retrieval.index.seismic import SeismicOptions

        with _options.as_options(*options):
            SeismicOptions.parse(options)
    read = _read(vectors, backend)
    options = {**options, "metadata": _metadata(data, vectors, read)}
    if not isinstance(read, retrieval.SparseVectors):
        if backend != "exact":
            raise UsageError(f"--backend: {vectors} holds dense vectors, which exact alone searches, got {backend}.")
        return retrieval.DenseIndex.build(read, metadata=options["metadata"])
    if backend == QDRANT:
        return _build_qdrant(read, options)
    documents, terms = len(read), len(read.indices) / max(1, len(read))
    if backend == "seismic" and documents < SEISMIC_DOCUMENTS:
        note(
            f"{documents} documents are few for seismic: up to {SEISMIC_DOCUMENTS:,} at least, --backend exact is "
            "built in seconds, smaller, as fast, and misses nothing"
        )
    if backend == "seismic" and terms > LONG_VECTOR:
        note(
            f"{terms:.0f} terms per document are many for seismic, whose time and size grow with them: "
            "tilefold encode --top-k 128 keeps the heaviest"
        )
    return retrieval.build_index(read, backend, **options)


def _read(vectors: Path | None, backend: str = QDRANT) -> Any:
    """The encoded documents that --vectors names."""
    if vectors is None:
        raise UsageError(f"--backend {backend} indexes encoded documents: give them with --vectors.")
    return _retrievers.read_documents(vectors)


def _metadata(data: str | None, vectors: Path | None, read: Any) -> Mapping[str, Mapping[str, object]] | None:
    """The metadata of the documents of --data, which must be those of --vectors."""
    if data is None or vectors is None:
        return None
    collection, made = _common.load_data(data, documents_only=True), getattr(read, "manifest", read)
    _check_texts(data, vectors, collection.contents(), made.provenance)
    found, cut = collection.metadata(), made.provenance.passages
    lacking = sum((name if cut is None else document_of(name)) not in collection.documents for name in read.ids)
    if lacking:
        note(f"--data: {lacking} of the {len(read.ids)} of {vectors} are not in {data}, and have no metadata")
    if not found:
        note(f"--data: the documents of {data} have no metadata: no fields but an id, a title and a text")
    return found


def _late(tokens: Path | None, data: str | None, output: Path, options: Values) -> Any:
    queries = options.pop("queries", None)
    if queries is not None:
        store = retrieval.open_tokens(queries)
        if store.manifest.kind != "query" or store.manifest.storage == "int8":
            raise UsageError(f"--queries: expected vectors in fp16 of encode --queries, got others in {queries}.")
        options["queries"] = store.read(list(store.ids)[:64])
    with _options.as_options("storage", "pool_factor", "queries", vectors="--tokens"):
        read = _retrievers.read_tokens(tokens)
        return retrieval.LateIndex.build(read, output, metadata=_metadata(data, tokens, read), **options)


def _build_qdrant(read: Any, options: Values) -> Any:
    """A Qdrant index of vectors."""
    done = 0
    _common.kept.append(lambda: done > 0)
    options_of = _options.as_options("url", "weights", name="--collection")
    with options_of, _common.progress_bar("indexing") as update:

        def count(kept: int, total: int) -> None:
            nonlocal done
            done = kept
            update(kept, total)

        resumes = "indexing resumes: {:,} of {:,} were done before".format
        return retrieval.build_index(read, "qdrant", progress=count, resumes=lambda *of: note(resumes(*of)), **options)


def _change(asked: Asked) -> Values:
    """Remove the documents of --delete, then put those of --vectors or --data in; how many, and what there is now."""
    from tilefold.retrieval.index.protocol import read_description
    from tilefold.retrieval.merging import merge_segments, update_index

    output, update = asked["output"], asked["update"]
    there = read_description(output)["backend"]
    if "backend" in _options.given and there not in (asked["backend"], {"exact": "dense"}.get(asked["backend"])):
        raise UsageError(f"--backend: {output} is an index of backend {there}, got {asked['backend']}.")
    if asked["merge"] and there in (QDRANT, BM25):
        raise UsageError(
            f"--merge goes with exact, dense, seismic and late indexes; {output} ({there}) is of one part."
        )
    listed = "" if asked["delete"] is None else _options.read_text(asked["delete"], "--delete", "utf-8-sig")
    names = [line for line in listed.splitlines() if line.strip()]
    changed: Values = {"written": 0, "deleted": 0}
    if there == BM25:
        _options.refuse(["vectors"], f"does nothing here: {output} is a BM25 index, which reads --data")
        return {"output": str(output)} | _change_words(output, names, asked["data"] if update else None)
    late = there == LATE
    _options.refuse(["vectors" if late else "tokens"], f"does nothing here: {output} is an index of backend {there}")
    where, read = asked["tokens" if late else "vectors"], None
    if update:
        read = _retrievers.read_tokens(where) if late else _read(where, there)
    metadata = _metadata(asked["data"], where, read)
    if there == QDRANT:
        return _change_qdrant(output, read, names, metadata or {})
    with _options.as_options(vectors="--tokens" if late else "--vectors", index="--output", path="--output"):
        if update or names:
            changed = update_index(output, read, names, metadata=metadata)
        if asked["merge"]:
            changed["n_documents"] = merge_segments(output)
    return {"output": str(output)} | changed


def _change_words(output: Path, names: Sequence[str], data: str | None) -> Values:
    if data is None and "update" in _options.given:
        raise UsageError("--update: a BM25 index reads the new documents: give them with --data.")
    with hold_path(output), _options.as_options(index="--output", documents="--data"):
        index = retrieval.BM25Index.load(output)
        cut = index.provenance.passages
        collection = None if data is None else _common.load_data(data, documents_only=True)
        texts: Mapping[str, str] = {}
        if collection is not None:
            texts = collection.contents() if cut is None else Passages.parse(cut).of(collection.documents)
        deleted = len(owned(index.ids, set(names), (), cut))
        changed = index.updated(texts, names, {} if collection is None else collection.metadata())
        changed.save(output)
    return {"n_documents": changed.n_documents, "written": len(texts), "deleted": deleted}


def _change_qdrant(
    output: Path, read: Any, names: Sequence[str], metadata: Mapping[str, Mapping[str, object]]
) -> Values:
    from tilefold.retrieval.index.qdrant import QdrantIndex
    from tilefold.retrieval.metadata import fields_by_id
    from tilefold.retrieval.qdrant import Documents

    documents = None
    if read is not None:
        documents = Documents(read.ids, read, payloads=fields_by_id(metadata, read.ids, read.provenance.passages))
    try:
        index = QdrantIndex.load(output)
        with index.collection as collection:
            if documents is not None:
                documents.check(collection.layout, collection.place)  # before anything is removed
            if collection.layout.passages is not None:  # all those of a document, of which new ones may have others
                gone = {*names, *map(document_of, () if documents is None else documents.ids)}
                names = [name for name in collection.ids() if document_of(name) in gone]
            deleted = collection.delete(names)
            if documents is not None:
                with _common.progress_bar("writing") as update:
                    collection.upsert(documents, progress=update)
            index.save(output)
            now = len(collection)
    except DataError as error:
        raise CommandError(f"--output: {error}") from error
    return {"output": str(output), "n_documents": now, "written": len(documents or ()), "deleted": deleted}


def merge(
    folders: list[Path] = argument("Folders of vectors of one kind, of the same model and settings.", ...),
    output: Path = required("Folder for all of them."),
    as_json: bool = flag("The result as JSON on stdout.", "--json"),
) -> None:
    """Write several folders of vectors as one: sparse, token or dense ones, whose texts differ."""
    from tilefold.retrieval.merging import merge_vectors

    with _options.as_options(folders="FOLDERS:", output_dir="--output"), _common.heartbeat("merging"):
        made = merge_vectors(folders, output)
    result = {"output": str(output), "n": made.n_documents, "folders": [str(folder) for folder in folders]}
    _common.print_result(result, as_json, f"{made.n_documents} vectors of {len(folders)} folders: {output}")


def export(
    to: str = required(
        "Bulk files and a mapping, a feed and a schema, or a model as a graph.", "--to", metavar="opensearch|vespa|onnx"
    ),
    vectors: Place = option("Folder of documents that tilefold encode wrote."),
    output: Path = required("Folder for the files."),
    model: Text = option("The SparseEncoder that made the vectors, for the names of its terms; onnx: to export."),
    names: Text = option(
        "What terms are called: by default tokens, with --model; numbers never collide.", metavar="tokens|numbers"
    ),
    data: Text = option("The documents, to send texts along. " + _common.DOCUMENTS_HELP),
    field: str = preset("sparse", "Field of the vectors in the engine."),
    field_type: Text = option(
        "opensearch: by default rank_features (exact); sparse_vector is for Seismic, numbers only.",
        metavar="rank_features | sparse_vector",
    ),
    dots: Text = option("opensearch: tokens with a dot; keep is for neural_sparse queries.", metavar="refuse|keep"),
    document: Text = option("vespa: document type and schema (doc)."),
    namespace: Text = option("vespa: namespace of the document ids (tilefold)."),
    quantize: Text = option("onnx: 8-bit products, several times as fast and less exact.", metavar="int8"),
    top_k: Count = option("onnx: entries that the graph gives of a text; by default all."),
    as_json: bool = flag("The result as JSON on stdout.", "--json"),
) -> None:
    """Write encoded documents as another engine reads them, or a model as an ONNX graph.

    A vocabulary whose terms would collide in the engine is refused, as is a graph that does not compute what the model
    does. Every command takes the folder of a graph as --model; it needs tilefold[onnx].
    """
    if to == "onnx":
        _common.print_result(*_graph(model, output, quantize, top_k, as_json))
        return
    if vectors is None:
        raise UsageError("--vectors: give the folder of documents that tilefold encode wrote.")
    # of one of the engines
    own = {"field_type": field_type, "dots": dots, "document": document, "namespace": namespace}
    options = {"field": field, **_common.known(own)}
    tokens = _tokens(vectors, model, names, field_type)
    if tokens is None:
        _options.refuse_useless(["dots"], "where terms are called by their numbers")
    started = time.monotonic()
    with _common.heartbeat(f"exporting ({to})"):
        exported = _write(to, vectors, output, tokens, _texts(data, vectors), options)
    seconds = round(time.monotonic() - started, 3)
    result = {"output": str(output), "engine": to, "n_documents": exported.n_documents}
    result |= {"n_weights": exported.n_weights, "files": exported.files, "seconds": seconds}
    first, *others = exported.files
    files = f"{first}, {others[0]}" if len(others) == 1 else f"{first} and {len(others)} bulk files"
    said = f"{exported.n_documents} documents written for {to} in {seconds:.1f} s: {output} ({files})"
    _common.print_result(result, as_json, said)


def _graph(model: str | None, output: Path, quantize: str | None, top_k: int | None, as_json: bool) -> Any:
    """The result of an export to ONNX, and what is said of it."""
    if model is None or model == _models.PACKAGED:
        raise UsageError(f"--model: expected the folder or name of a sparse model to export, got {model or 'none'}.")
    from tilefold.recipes import export_onnx
    from tilefold.recipes.loading import quiet_libraries

    _models.load_model(model, kinds=("sparse",), fast=())  # refuses what is none
    started = time.monotonic()
    try:
        with _common.heartbeat("exporting (onnx)"), quiet_libraries():
            made = export_onnx(model, output, quantize=quantize, top_k=top_k)
    except ImportError as error:
        raise CommandError(f"--to onnx: {error}") from error
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise CommandError(f"--{name.replace('_', '-')}:{rest}") from error
    seconds = round(time.monotonic() - started, 3)
    (name, value), *_ = made.error.items()
    checked = f"{name.replace('_', ' ')} {value:g} on random texts"
    said = f"one graph of {made.bytes / 1e6:.0f} MB in {seconds:.1f} s ({checked}): {output}"
    return {**made._asdict(), "seconds": seconds}, as_json, said, f"next: tilefold serve --model {output}"


def _write(to: str, vectors: Path, output: Path, tokens: Sequence[str] | None, texts: Any, options: Values) -> Any:
    write = retrieval.export_opensearch if to == "opensearch" else retrieval.export_vespa
    try:
        return write(vectors, output, tokens, texts=texts, **options)
    except (DataError, VocabularyMismatchError) as error:
        message = str(error).replace("dots=keep", "--dots keep")
        numbers = message.replace("Leave tokens out, so that terms are named by their numbers", "Give --names numbers")
        raise CommandError(numbers) from error
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise UsageError(f"--{name.replace('_', '-')}:{rest}") from error


def _tokens(vectors: Path, model: str | None, names: str | None, field_type: str | None) -> Sequence[str] | None:
    """The token of each term, or None for numbers."""
    numbers = field_type == "sparse_vector"
    names = names or ("numbers" if numbers else "tokens")
    if names == "numbers":
        _options.refuse(["model"], "gives the names of terms, and they are called by their numbers: leave it out")
        return None
    if numbers:
        raise UsageError("--names: terms of --field-type sparse_vector are numbers; leave the option out.")
    if model is None:
        raise UsageError("--model: give the model that made the vectors, or --names numbers.")
    manifest = retrieval.read_manifest(vectors)
    path = _models.find_model(model, "--model")
    tokenizer: Any
    if model == _models.PACKAGED:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        tokenizer = _models.load_encoder(path).tokenizer
    found = retrieval.vocabulary_fingerprint(tokenizer)
    if manifest.fingerprint and found and manifest.fingerprint != found:
        expected = f"the vocabulary of {vectors} (fingerprint {manifest.fingerprint[:12]})"
        remedy = "Give the model that made the vectors."
        raise CommandError(f"--model: expected {expected}, got that of {model} ({found[:12]}). {remedy}")
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(range(manifest.vocab_size))
    return [token or "" for token in tokens]


def _texts(data: str | None, vectors: Path) -> dict[str, str] | None:
    """The documents of --data, which must be those that were encoded."""
    if data is None:
        return None
    collection = _common.load_data(data, documents_only=True)
    texts, made_of = collection.contents(), retrieval.read_manifest(vectors).provenance
    _check_texts(data, vectors, texts, made_of)
    return texts if made_of.passages is None else Passages.parse(made_of.passages).of(collection.documents)


def _check_texts(data: str, vectors: Path, texts: Mapping[str, str], made_of: Provenance) -> None:
    """Refuse a collection of other texts than those of the vectors, where those are known."""
    if made_of.differs(Provenance(texts_sha256=texts_digest(texts))):
        raise CommandError(f"--data: {data} holds other texts than those that {vectors} was encoded from.")
