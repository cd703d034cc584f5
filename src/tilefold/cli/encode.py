"""``tilefold encode``: documents or queries to sparse, token or dense vectors."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import typer

from tilefold import retrieval
from tilefold._internal.files import read_json
from tilefold._internal.precision import inference_precision
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import (
    DocumentFieldOptions,
    DtypeOptions,
    option,
    positive,
    refuse_options,
)
from tilefold.distributed.ranks import first_rank_first, has_other_ranks, join_ranks

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.data.documents import Content
    from tilefold.retrieval.data.passages import Passages
    from tilefold.retrieval.data.shard_texts import Texts
    from tilefold.retrieval.encoding.sparse import Encoding

SAVE_MINUTES = 1.0
SHOWN_FAILURES = 5
PYDOCS = "pydocs"  # the value of --data for the packaged collection
# Approximate number of texts whose tokens a dry run counts.
SAMPLED_TEXTS = 512
# Largest number of texts that a dry run encodes, by device.
TIMED_TEXTS = {"cpu": 32, "cuda": 4096}
TIMED_RUNS = 2


@dataclass(frozen=True, kw_only=True)
class EncodingOptions(DtypeOptions):
    """Options of how a model encodes texts."""

    HELP_PANEL: ClassVar[str | None] = "Encoding"

    top_k: Annotated[
        int | None,
        positive(
            "Sparse: keep only this many terms per text.",
        ),
    ] = None
    special_tokens: Annotated[
        bool | None,
        option(
            "Sparse: keep the weights of special tokens such as [CLS], which match every text "
            "(default), or drop them.",
            "--special-tokens/--no-special-tokens",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        positive(
            "Maximum tokens per text; by default the maximum of the model.",
        ),
    ] = None
    storage: Annotated[
        Literal["fp32", "fp16", "int8"] | None,
        option(
            "Data type of token vectors (by default fp16) and dense vectors (by default fp32).",
        ),
    ] = None
    pool_factor: Annotated[
        float | None,
        option(
            "Token vectors: merge similar vectors of a document. Their number is divided by this "
            "factor.",
        ),
    ] = None
    dimension: Annotated[
        int | None,
        positive(
            "Dense: keep only the first entries of a vector, for a Matryoshka model.",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        positive(
            "Maximum texts per batch; by default batches are limited by tokens.",
        ),
    ] = None
    batch_tokens: Annotated[
        int | None,
        positive(
            "Tokens per batch; by default a number for the device.",
        ),
    ] = None
    fp8: Annotated[
        bool,
        option(
            "Multiply in fp8 in the linear layers of the trunk: faster on a GPU of compute "
            "capability 8.9 or higher, with vectors that differ by a few percent.",
            "--fp8",
        ),
    ] = False
    invariant: Annotated[
        bool,
        option(
            "Compute the same bits for a text in every batch, on one device with one release of "
            "its libraries; see `tilefold verify`.",
            "--invariant",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for conflicting options."""
        super().validate()
        if self.invariant:
            refuse_options(
                {"--fp8": self.fp8},
                "cannot be combined with --invariant: products of fp8 are not known to keep their "
                "bits",
            )

    def refuse_options_of_other_models(self, model: str, model_kind: str) -> None:
        """Raise ``UsageError`` if an option of another kind of model was given.

        Args:
            model: the name of the model, for the message.
            model_kind: ``"sparse"``, ``"multi-vector"`` or ``"dense"``.
        """
        remedy = f"{model} is a {model_kind} model: leave it out"
        if model_kind != "sparse":
            refuse_options(
                {
                    "--top-k": self.top_k,
                    "--no-special-tokens": self.special_tokens is not None,
                },
                f"requires a sparse model; {remedy}",
            )
        if model_kind not in ("multi-vector", "dense"):
            refuse_options(
                {"--storage": self.storage},
                f"requires a multi-vector or dense model; {remedy}",
            )
        if model_kind != "multi-vector":
            refuse_options(
                {"--pool-factor": self.pool_factor},
                f"requires a multi-vector model; {remedy}",
            )
        if model_kind != "dense":
            refuse_options({"--dimension": self.dimension}, f"requires a dense model; {remedy}")

    def encoding(
        self,
        model: str,
        model_kind: str,
        kind: Literal["query", "document"] = "document",
    ) -> Encoding:
        """Return how a model encodes texts, such as the tokens per batch, from these options.

        Args:
            model: the name or folder of the model, which the vectors record.
            model_kind: ``"sparse"``, ``"multi-vector"`` or ``"dense"``.
            kind: whether queries or documents are encoded.

        Raises:
            UsageError: if an option of another kind of model is given.
        """
        self.refuse_options_of_other_models(model, model_kind)

        from tilefold.retrieval.encoding.sparse import SparseEncoding
        from tilefold.retrieval.encoding.tokens import DenseEncoding, TokenEncoding

        if model_kind == "sparse":
            return SparseEncoding(
                kind=kind,
                batch_size=self.batch_size,
                batch_tokens=self.batch_tokens,
                max_length=self.max_length,
                top_k=self.top_k,
                special_tokens=self.special_tokens is not False,  # None, the default, keeps them
            )
        source = model if model == _models.PACKAGED else _models.absolute(model)
        if model_kind == "dense":
            return DenseEncoding(
                kind=kind,
                batch_size=self.batch_size,
                batch_tokens=self.batch_tokens,
                max_length=self.max_length,
                source=source,
                storage=self.storage or DenseEncoding.storage,
                dimension=self.dimension,
            )
        return TokenEncoding(
            kind=kind,
            batch_size=self.batch_size,
            batch_tokens=self.batch_tokens,
            max_length=self.max_length,
            source=source,
            storage=self.storage or TokenEncoding.storage,
            pool_factor=self.pool_factor,
        )


@dataclass(frozen=True, kw_only=True)
class EncodeRequest(EncodingOptions, _retrievers.PassageOptions, DocumentFieldOptions):
    """Options of ``tilefold encode``."""

    model: Annotated[
        str,
        option(
            "Folder or name of a SparseEncoder, a MultiVectorEncoder or a dense model; or minilm, "
            "the packaged all-MiniLM-L6-v2: see --kind.",
        ),
    ]
    output: Annotated[
        Path,
        option(
            "Folder for the vectors.",
        ),
    ]
    data: Annotated[
        str,
        option(
            _common.DOCUMENTS_HELP,
        ),
    ]
    kind: Annotated[
        Literal["sparse", "tokens", "dense"] | None,
        option(
            "Kind of the vectors; by default that of the model. minilm makes dense vectors, token "
            "vectors of its token states, or (by default) sparse vectors of an untrained "
            "SPLADE model.",
        ),
    ] = None
    queries: Annotated[
        bool,
        option(
            "Encode queries instead of documents.",
            "--queries",
        ),
    ] = False
    split: Annotated[
        str | None,
        option(
            "With --queries: only the queries of this split.",
        ),
    ] = None
    dpi: Annotated[
        int | None,
        positive(
            "Pages: dots per inch at which PDFs are rendered, by default 150.",
            panel="Encoding",
        ),
    ] = None
    page_workers: Annotated[
        int | None,
        option(
            "Pages: processes that decode them ahead of the model; by default one per spare core, "
            "at most 16.",
            min=0,
            panel="Shards and processes",
        ),
    ] = None
    shard_size: Annotated[
        int,
        positive(
            "Texts per shard; each shard is saved when it is full.",
            panel="Shards and processes",
        ),
    ] = 1024
    save_minutes: Annotated[
        float,
        option(
            "Minutes between saves of an unfinished shard, which Ctrl-C also saves.",
            min=0,
            panel="Shards and processes",
        ),
    ] = SAVE_MINUTES
    devices: Annotated[
        str | None,
        option(
            "Number of GPUs to use, or all, with a process for each; without GPUs, the number of "
            "processes.",
            panel="Shards and processes",
        ),
    ] = None
    jsonl: Annotated[
        Path | None,
        option(
            "Sparse: also write the vectors as JSON lines in the format of Anserini.",
            panel="Output",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            "Replace the file of --jsonl if it exists.",
            "--overwrite",
            panel="Output",
        ),
    ] = False
    resume: Annotated[
        bool,
        option(
            "Keep what an interrupted run has encoded.",
            "--resume/--fresh",
            panel="Shards and processes",
        ),
    ] = True
    engine: Annotated[
        Literal["local", "ray"],
        option(
            "Encode in this process (local), or in workers of Ray on this machine or a cluster.",
            panel="Shards and processes",
        ),
    ] = "local"
    address: Annotated[
        str | None,
        option(
            "Ray: host:port of a cluster, or auto for a running cluster of this machine; by "
            "default a new one on this machine.",
            panel="Shards and processes",
        ),
    ] = None
    workers: Annotated[
        int | None,
        positive(
            "Ray: maximum number of workers; by default as many as fit, one per GPU.",
            panel="Shards and processes",
        ),
    ] = None
    worker_cpus: Annotated[
        int | None,
        positive(
            "Ray: CPU cores per worker.",
            panel="Shards and processes",
        ),
    ] = None
    dry_run: Annotated[
        bool,
        option(
            "Only estimate shards, tokens, hours and gigabytes.",
            "--dry-run",
            panel="Estimates",
        ),
    ] = False
    rate: Annotated[
        float | None,
        option(
            "With --dry-run: texts per second of a worker, instead of a measured rate.",
            panel="Estimates",
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "The manifest as JSON on stdout.",
            "--json",
            panel="Output",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for conflicting options, and for options without effect."""
        super().validate()
        if self.queries:
            refuse_options(
                {"--passages": self.passages},
                "cannot be combined with --queries, because it splits documents",
            )
        else:
            refuse_options(
                {"--split": self.split},
                "requires --queries",
            )
        if not self.dry_run:
            refuse_options({"--rate": self.rate}, "requires --dry-run")
        if self.rate is not None and not self.rate > 0:
            raise UsageError(f"--rate: expected a number above 0, got {self.rate:g}.")
        if self.jsonl is None:
            refuse_options(
                {"--overwrite": self.overwrite},
                "requires --jsonl, whose file it replaces; to encode again, use --fresh",
            )
        if self.dry_run:
            refuse_options(
                {
                    "--jsonl": self.jsonl,
                    "--address": self.address,
                    "--worker-cpus": self.worker_cpus,
                    "--save-minutes": self.save_minutes != SAVE_MINUTES,
                    "--resume/--fresh": not self.resume,
                },
                "has no effect with --dry-run, which measures on this machine and writes nothing: "
                "leave it out",
            )
        self._check_engine()

    def _check_engine(self) -> None:
        """Raise ``UsageError`` for options that the engine of the request does not use.

        The engines are Ray, on this machine or a cluster, and processes of this machine.
        """
        uses_ray = self.engine == "ray"
        if uses_ray:
            self.refuse_save_minutes()
            refuse_options(
                {"--jsonl": self.jsonl},
                "cannot be combined with --engine ray, because it needs all vectors in memory",
            )
            refuse_options(
                {"--devices": self.devices},
                "cannot be combined with --engine ray, which has --workers",
            )
        else:
            refuse_options(
                {"--address": self.address, "--worker-cpus": self.worker_cpus},
                "requires --engine ray",
            )
        if self.dry_run:
            refuse_options({"--devices": self.devices}, "has no effect with --dry-run")
        elif not uses_ray:
            refuse_options({"--workers": self.workers}, "requires --engine ray or --dry-run")

    def refuse_save_minutes(self) -> None:
        """Raise ``UsageError`` for ``--save-minutes``, because several processes encode."""
        refuse_options(
            {"--save-minutes": self.save_minutes != SAVE_MINUTES},
            "has no effect if several processes encode, because they save whole shards: leave "
            "it out",
        )


def encode(request: EncodeRequest) -> None:
    """Encode a collection to sparse vectors, dense vectors, or token vectors (ColBERT).

    Run the same command again to resume an interrupted run. With --devices, or under torchrun,
    several processes share the work; the result is the same as with one process.

    Example:
        tilefold encode --model MODEL --data DATA --output VECTORS --top-k 128
    """
    if has_other_ranks():
        request.refuse_save_minutes()
    splitter = request.passage_splitter()
    _scores.check_output_file(
        request.jsonl,
        "--jsonl",
        _scores.VECTOR_LINES,
        *_scores.files_of_collection(request.data),
        overwrite=request.overwrite,
    )
    _models.checked_model_name(request.model, "--model")
    exit_code = _options.run_on_devices(request.devices)
    if exit_code is not None:
        raise typer.Exit(exit_code)
    with join_ranks() as rank:
        _encode_on_rank(request, splitter, rank)


def _encode_on_rank(request: EncodeRequest, splitter: Passages | None, rank: int) -> None:
    """Load the texts and the model, encode some of the texts, and print the result on rank 0.

    The ranks are the processes of ``--devices`` or torchrun, which divide the texts among them.
    With ``--dry-run``, nothing is encoded to `request.output`, and only an estimate is printed.

    Args:
        request: the options of the command.
        splitter: the splitter of documents into passages; None encodes whole documents.
        rank: the rank of this process.
    """
    if rank != 0:
        # Importing takes seconds; meanwhile rank 0 downloads the files that the other ranks read.
        _models.check_sentence_transformers()
    # Rank 0 writes pydocs to a cache, from which the other ranks read.
    rank_0_fills_cache = request.data == PYDOCS
    with first_rank_first() if rank_0_fills_cache else nullcontext():
        collection = _load_collection(request, splitter)
        texts = None  # those of a large file, which Ray and estimates read one by one
        if collection is not None:
            texts = _select_texts(collection, request, splitter)
        _check_page_options(request, texts)  # --data may be a folder of PDFs and images
        model, kind = _models.load_kind(
            request.model,
            request.kind,
            request.dtype,
            fp8=request.fp8,
            invariant=request.invariant,
        )
    with _options.errors_name_options(storage="--storage"):
        encoding = _create_encoding(request, kind)
    # Workers of Ray load the model again, on devices where `--dtype auto` may be another dtype.
    if rank == 0 and request.engine == "local":
        _models.print_precision(request.model, model)
    if rank == 0 and splitter is not None and collection is not None and texts is not None:
        note(
            f"{len(collection.documents):,} documents were split into {len(texts):,} passages of "
            f"at most {request.passages} words",
        )
    if request.dry_run:
        source = _open_source_of_texts(request.data, texts)
        estimate = _estimate(model, encoding, source, request)
        _common.print_result(asdict(estimate), request.as_json, _format_estimate(estimate))
        return
    manifest = _encode_with_engine(request, encoding, model, kind, texts, rank)
    if rank != 0:
        return
    if request.jsonl is not None:
        retrieval.export_jsonl(
            retrieval.read_vectors(request.output),
            request.jsonl,
            retrieval.term_names(model.tokenizer, manifest.vocab_size),
            contents=texts,
            overwrite=request.overwrite,
        )
    _print_manifest(manifest, request, {} if collection is None else collection.unread_files)


def _encode_with_engine(
    request: EncodeRequest,
    encoding: Encoding,
    model: Model,
    kind: str,
    texts: Mapping[str, Content] | None,
    rank: int,
) -> Any:
    """Encode in workers of Ray or in this process, as ``--engine`` says.

    Args:
        request: the options of the command.
        encoding: how texts are encoded, such as the tokens per batch.
        model: the model; not used with Ray, whose workers load it themselves.
        kind: the kind of the model.
        texts: the texts by id; with Ray, None reads them from the file of ``--data``.
        rank: the rank of this process. Rank 0 shows the progress.

    Returns:
        The manifest of the folder ``--output``, which lists its files of vectors.
    """
    # After an interruption, the user is told whether vectors were saved.
    _common.finished_work_checks.append(lambda: _has_vectors(request.output))
    progress_bar: Any = nullcontext(None)  # the other ranks show no progress
    if rank == 0:
        progress_bar = _common.resumable_progress_bar("encoding", _common.FRESH_HINT)
    option_errors = _options.errors_name_options(
        max_length="--max-length",
        dimension="--dimension",
        pool_factor="--pool-factor",
        texts="--data",
        model="--model",
    )
    with progress_bar as update, option_errors:
        if request.engine == "ray":
            source = _open_source_of_texts(request.data, texts)
            return _encode_on_ray(request, encoding, kind, source, update)
        return _encode_on_ranks(request, encoding, model, texts or {}, update)


def _load_collection(request: EncodeRequest, splitter: Passages | None) -> Collection | None:
    """Load the collection, unless its documents are read from their file one by one.

    Ray workers and ``--dry-run`` read whole documents from the file themselves. Queries and
    passages need a collection in memory.

    Args:
        request: the options of the command.
        splitter: the splitter of documents into passages; None encodes whole documents.

    Returns:
        The collection, or None if documents are read from the file.
    """
    may_read_from_file = request.engine == "ray" or request.dry_run
    encodes_whole_documents = not request.queries and splitter is None
    exists = request.data != PYDOCS and Path(request.data).exists()
    if may_read_from_file and encodes_whole_documents and exists:
        from tilefold.retrieval.data.collection import is_page_collection

        # A folder of PDFs and images has no file of texts.
        if not is_page_collection(Path(request.data)):
            return None
    return _common.load_data(
        request.data,
        drop_unknown=True,
        documents_only=not request.queries,
        splits=None if request.split is None else [request.split],
    )


def _encode_on_ray(
    request: EncodeRequest,
    encoding: Encoding,
    kind: str,
    texts: Texts,
    progress: Callable[..., None] | None,
) -> Any:
    """Encode with workers of Ray, on this machine or on a cluster.

    Args:
        request: the options of the command.
        encoding: how texts are encoded, such as the tokens per batch.
        kind: the kind of the model.
        texts: the source from which workers read the texts of one output file (a shard) at a time.
        progress: a function that shows the number of encoded texts.

    Returns:
        The manifest of the folder ``--output``, which lists its files of vectors.
    """
    from tilefold.retrieval.encoding.on_ray import RayCluster, encode_on_ray

    load_model = functools.partial(
        _models.load_once,
        _models.absolute(request.model),
        kinds=(kind,),
        dtype=request.dtype,
        fp8=request.fp8,
        invariant=request.invariant,
    )
    return encode_on_ray(
        load_model,
        texts,
        request.output,
        encoding,
        cluster=RayCluster(
            address=request.address,
            workers=request.workers,
            worker_cpus=request.worker_cpus,
        ),
        shard_size=request.shard_size,
        resume=request.resume,
        progress=progress,
    )


def _encode_on_ranks(
    request: EncodeRequest,
    encoding: Encoding,
    model: Model,
    texts: Mapping[str, Content],
    progress: Callable[..., None] | None,
) -> Any:
    """Encode the texts to the folder ``--output``, divided among the ranks if there are several.

    The ranks are the processes of ``--devices`` or torchrun.

    Args:
        request: the options of the command.
        encoding: how texts are encoded, such as the tokens per batch.
        model: the model.
        texts: all texts by id. This rank encodes some of them.
        progress: a function that shows the number of encoded texts, on rank 0; otherwise None.

    Returns:
        The manifest of the folder, which lists its files of vectors.
    """
    from tilefold.retrieval.encoding.sparse import Output, encode_to_folder

    output = Output(
        request.output,
        shard_size=request.shard_size,
        resume=request.resume,
        progress=progress,
        save_minutes=request.save_minutes,
    )
    all_ranks = "world"  # the default process group of torch.distributed
    return encode_to_folder(encoding, model, texts, output, group=all_ranks)


def _print_manifest(
    manifest: Any,
    request: EncodeRequest,
    unread_files: Mapping[str, str],
) -> None:
    """Print a summary of a folder of vectors, and the texts that could not be encoded.

    Args:
        manifest: the manifest of the folder, for sparse, dense or token vectors.
        request: the options of the command.
        unread_files: name of a file of pages that could not be opened -> reason.
    """
    _report_truncation(manifest, request)
    properties, summary = _describe_vectors(manifest)
    summary += f": {request.output}"
    if manifest.precision is not None:
        summary += f" (computed in {manifest.precision})"
    is_invariant = "invariant" in manifest.settings
    if is_invariant:
        summary += ", with the same bits in every batch"
    lines = [summary]
    failed = manifest.failed
    if failed:
        lines.append(
            f"{manifest.n_texts} texts = {manifest.n_documents} encoded + {len(failed)} not "
            "encoded",
        )
    if manifest.kind == "document":
        lines.append(_index_command(manifest.layout, request.output, request.data))
    result = {
        "output": str(request.output),
        "n": manifest.n_documents,
        "kind": manifest.kind,
        **properties,
        "shards": len(manifest.shards),
        "texts": manifest.n_texts,
        "truncated": manifest.truncated,
        "precision": manifest.precision,
        "invariant": is_invariant,
        "failed": failed,
    }
    if unread_files:
        result["unread_files"] = dict(unread_files)
    _common.print_result(result, request.as_json, *lines)
    if not request.as_json:  # the JSON object has all failed texts
        _note_failures(failed, request.output)


def _report_truncation(manifest: Any, request: EncodeRequest) -> None:
    """Report how many texts were truncated, and how to encode the rest of documents.

    Args:
        manifest: the manifest of a folder of vectors.
        request: the options of the command.
    """
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    are_passages = manifest.provenance.passages is not None
    report_manifest_truncation(
        "passage" if are_passages else manifest.kind,
        manifest.n_texts,
        manifest.truncated,
    )
    if not manifest.truncated.get("count"):
        return
    if are_passages:
        note(
            "the truncated part of a passage cannot be found: give --passages fewer words, or use "
            "a model that reads more tokens",
        )
    elif manifest.kind == "document":
        remedy = "--passages encodes all of it"
        if request.max_length is not None:
            remedy += ", and a larger --max-length encodes more of it"
        note(f"the truncated part of a document cannot be found: {remedy}")


def _note_failures(failed: Mapping[str, str], output: Path) -> None:
    """Print the first texts that could not be encoded, and how many more there are.

    Args:
        failed: id of a text -> reason.
        output: the folder of the vectors, whose manifest lists all of them.
    """
    for name, reason in list(failed.items())[:SHOWN_FAILURES]:
        note(f"not encoded: {name}: {reason}")
    if len(failed) > SHOWN_FAILURES:
        note(f"and {len(failed) - SHOWN_FAILURES} more; see {output / 'manifest.json'}")


def _describe_vectors(manifest: Any) -> tuple[dict[str, Any], str]:
    """Return the size and storage of encoded vectors, for JSON and as text for the terminal.

    Args:
        manifest: the manifest of a folder of sparse, dense or token vectors.

    Returns:
        A dictionary for JSON, and a sentence.
    """
    n_documents = manifest.n_documents
    if manifest.layout == "sparse":
        nonzeros = sum(shard["nonzeros"] for shard in manifest.shards)
        mean_terms = nonzeros / max(1, n_documents)
        properties = {"vocab_size": manifest.vocab_size, "mean_active_terms": mean_terms}
        vectors = _common.counted(n_documents, "vector")
        return properties, f"{vectors}, {mean_terms:.0f} terms each on average"
    if manifest.layout == "dense":
        properties = {
            "dimension": manifest.dimension,
            "storage": manifest.storage,
            "similarity": manifest.similarity,
        }
        summary = (
            f"{_common.counted(n_documents, 'dense vector')} with {manifest.dimension} entries in "
            f"{manifest.storage}, similarity {manifest.similarity}"
        )
        return properties, summary
    mean_tokens = manifest.n_tokens / max(1, n_documents)
    properties = {
        "dimension": manifest.dimension,
        "storage": manifest.storage,
        "n_tokens": manifest.n_tokens,
        "mean_tokens": mean_tokens,
    }
    noun = "document" if "dpi" in manifest.settings else "text"  # documents may be page images
    summary = (
        f"token vectors of {_common.counted(n_documents, noun)}, on average {mean_tokens:.0f} "
        f"vectors per {noun}, "
        f"with {manifest.dimension} entries in {manifest.storage}"
    )
    return properties, summary


def _index_command(layout: str, vectors: Path, data: str) -> str:
    """Return the line with the command that indexes encoded documents.

    Args:
        layout: the layout of the vectors, such as ``"tokens"``.
        vectors: the folder of the vectors.
        data: the documents, whose metadata the index stores.
    """
    source = ["--vectors"]
    if layout == "tokens":
        source = ["--backend", "late", "--tokens"]
    return _common.next_command("index", *source, vectors, "--data", data, "--output", "INDEX")


def _create_encoding(request: EncodeRequest, model_kind: str) -> Encoding:
    """Return how the model encodes texts, such as the tokens per batch, from the options.

    Args:
        request: the options of the command.
        model_kind: the kind of the model: ``"sparse"``, ``"multi-vector"`` or ``"dense"``.

    Raises:
        UsageError: if an option is given that only another kind of model has.
    """
    request.refuse_options_of_other_models(request.model, model_kind)
    remedy = f"{request.model} is a {model_kind} model: leave it out"
    if model_kind != "sparse":
        refuse_options({"--jsonl": request.jsonl}, f"requires a sparse model; {remedy}")
    if model_kind != "multi-vector":
        refuse_options(
            {"--dpi": request.dpi, "--page-workers": request.page_workers is not None},
            f"requires a multi-vector model; {remedy}",
        )
    encoding = request.encoding(
        request.model,
        model_kind,
        "query" if request.queries else "document",
    )

    from tilefold.retrieval.data.pages import DEFAULT_DPI
    from tilefold.retrieval.encoding.tokens import TokenEncoding

    # Only multi-vector models encode pages. DenseEncoding is a subclass of TokenEncoding.
    if type(encoding) is TokenEncoding:
        return replace(
            encoding,
            dpi=request.dpi or DEFAULT_DPI,
            page_workers=request.page_workers,
        )
    return encoding


def _check_page_options(request: EncodeRequest, texts: Mapping[str, Content] | None) -> None:
    """Raise ``UsageError`` for options that need pages of PDFs, or that do not work with pages.

    Args:
        request: the options of the command.
        texts: the texts or page images by id; None for texts that are read from a file.
    """
    from tilefold.retrieval.encoding.pages import contains_pages

    if texts is None or not contains_pages(texts):
        refuse_options(
            {"--dpi": request.dpi, "--page-workers": request.page_workers is not None},
            f"requires pages, and {request.data} has none: leave it out",
        )
        return
    if request.engine == "ray":
        raise UsageError(
            "--engine ray reads texts; encode pages with --devices, which uses all GPUs of a "
            "machine.",
        )
    if request.dry_run:
        raise UsageError("--dry-run estimates texts; encode a few pages with --pages to time them.")


def _select_texts(
    collection: Collection,
    request: EncodeRequest,
    splitter: Passages | None,
) -> Mapping[str, Content]:
    """Return the queries, the passages or the documents to encode, by id.

    Documents are texts, or page images of a folder of PDFs.

    Args:
        collection: the documents and queries.
        request: the options of the command, with ``--queries`` and ``--split``.
        splitter: the splitter of documents into passages; None takes whole documents.

    Raises:
        UsageError: if the collection has no queries, or does not have the split.
    """
    if not request.queries:
        if splitter is None:
            return collection.content()
        return splitter.of(collection.documents)  # passages
    if not collection.queries:
        raise UsageError(
            f"--queries: expected a collection with queries, got {request.data}, which has none. "
            "Add the file queries.jsonl, or leave --queries out.",
        )
    if request.split is None:
        return collection.queries
    _common.check_split(collection, request.split)
    return collection.split_queries(request.split)


def _has_vectors(output: Path) -> bool:
    """Return whether an interrupted run has saved a shard (a file of vectors), or a part of it."""
    manifest = read_json(output / "manifest.json") or {}
    return bool(
        manifest.get("shards")
        or manifest.get("partial")
        or any(output.glob("part-*.receipt.json")),
    )


def _open_source_of_texts(data: str, texts: Mapping[str, Content] | None) -> Texts:
    """Return a source from which the texts of one output file (a shard) are read at a time.

    Args:
        data: the file of the documents.
        texts: the loaded texts by id; None reads documents from the file when they are needed, with
            the field names of the running command.
    """
    from tilefold.retrieval.data.collection import documents_table
    from tilefold.retrieval.data.shard_texts import FileTexts, InMemoryTexts

    if texts is not None:
        return InMemoryTexts(cast("Mapping[str, str]", texts))  # pages were refused
    return FileTexts(documents_table(Path(data)), _common.current_document_fields())


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of encoding a collection, measured on a sample.

    Attributes:
        texts: the number of texts.
        shards: the number of shards.
        shard_size: the texts per shard.
        tokens: the tokens of all texts.
        tokens_per_text: the mean number of tokens in the sample.
        sampled_texts: the texts of the sample that the tokenizer accepts.
        refused_texts: the texts of the sample that the tokenizer refuses.
        bytes_per_text: the size of the vectors of a text.
        gigabytes: the size of all vectors.
        texts_per_second: the rate of a worker.
        rate_from: a description of where the rate was measured.
        precision: the dtype in which the model computes on this machine.
        workers: the number of workers.
        hours: the hours until all workers have finished.
        reading_seconds: the seconds to read all texts once.
    """

    texts: int
    shards: int
    shard_size: int
    tokens: int
    tokens_per_text: float
    sampled_texts: int
    refused_texts: int
    bytes_per_text: float
    gigabytes: float
    texts_per_second: float
    rate_from: str
    precision: str
    workers: int
    hours: float
    reading_seconds: float


def _estimate(
    model: Model,
    encoding: Encoding,
    texts: Texts,
    request: EncodeRequest,
) -> Estimate:
    """Estimate the cost of encoding texts, from a sample that is encoded to a temporary folder.

    Args:
        model: the model.
        encoding: how texts are encoded, such as the tokens per batch.
        texts: the source of the texts, which are divided into output files (shards).
        request: the options of the command. ``--rate`` replaces the measured rate.

    Raises:
        CommandError: if the tokenizer refuses every text of the sample.
    """
    started = time.monotonic()
    survey = texts.plan_shards(request.shard_size, sample=SAMPLED_TEXTS)
    reading_seconds = time.monotonic() - started
    sample, n_tokens = _accepted_texts(model, encoding, survey.sample)
    tokens_per_text = n_tokens / len(sample)
    device = model.device.type
    timed_texts = sample[: TIMED_TEXTS.get(device, TIMED_TEXTS["cpu"])]
    rate, bytes_per_text = _time_encoding(model, encoding, timed_texts)
    rate_source = _describe_device(device)
    if request.rate is not None:
        rate = request.rate
        rate_source = "given with --rate"
    workers = request.workers or 1
    return Estimate(
        texts=survey.count,
        shards=len(survey.ranges),
        shard_size=request.shard_size,
        tokens=round(tokens_per_text * survey.count),
        tokens_per_text=tokens_per_text,
        sampled_texts=len(sample),
        refused_texts=len(survey.sample) - len(sample),
        bytes_per_text=bytes_per_text,
        gigabytes=bytes_per_text * survey.count / 1e9,
        texts_per_second=rate,
        rate_from=rate_source,
        precision=inference_precision(model),
        workers=workers,
        hours=survey.count / (rate * workers) / 3600,
        reading_seconds=reading_seconds,
    )


def _accepted_texts(
    model: Model,
    encoding: Encoding,
    texts: Sequence[str],
) -> tuple[list[str], int]:
    """Return the texts that the tokenizer of a model accepts, and how many tokens they have.

    Args:
        model: the model with the tokenizer.
        encoding: how texts are encoded. Its `max_length` truncates them.
        texts: the sample of texts.

    Returns:
        The accepted texts, and the number of tokens of all of them together.

    Raises:
        CommandError: if the tokenizer refuses all texts.
    """
    from tilefold.retrieval.encoding.truncation import limited, token_counts

    accepted: list[str] = []
    n_tokens = 0
    errors: list[Exception] = []
    with limited(model, encoding.kind, encoding.max_length):
        counts_or_errors = token_counts(model, texts, encoding.kind)
    for text, count_or_error in zip(texts, counts_or_errors, strict=True):
        if isinstance(count_or_error, Exception):  # the tokenizer has refused the text
            errors.append(count_or_error)
        else:
            accepted.append(text)
            n_tokens += count_or_error
    if not accepted:
        raise CommandError(
            f"--data: the tokenizer refuses all {len(errors)} texts of the sample "
            f"({_common.first_line(errors[0])}).",
        )
    return accepted, n_tokens


def _describe_device(device: str) -> str:
    """Describe the device on which the rate of an estimate was measured."""
    import torch

    if device == "cuda":
        return f"measured on this {torch.cuda.get_device_name()}"
    return f"measured on this {device} with {torch.get_num_threads()} threads"


def _time_encoding(
    model: Model,
    encoding: Encoding,
    sample: list[str],
) -> tuple[float, float]:
    """Encode a sample to a temporary folder, and return the rate and the size of its vectors.

    Args:
        model: the model.
        encoding: how texts are encoded, such as the tokens per batch.
        sample: the texts to encode.

    Returns:
        Texts per second of the fastest run, and bytes per text.
    """
    from tilefold.retrieval.encoding.sparse import Output, encode_to_folder

    texts = {str(number): text for number, text in enumerate(sample)}
    seconds: list[float] = []
    for _ in range(TIMED_RUNS):
        with tempfile.TemporaryDirectory(prefix="tilefold-dry-run-") as name:
            folder = Path(name) / "vectors"
            started = time.perf_counter()
            one_shard = Output(folder, shard_size=len(texts))
            manifest = encode_to_folder(encoding, model, texts, one_shard)
            seconds.append(time.perf_counter() - started)
            n_bytes = sum(file.stat().st_size for file in folder.glob("part-*"))
    return len(texts) / min(seconds), n_bytes / max(1, manifest.n_documents)


def _format_estimate(estimate: Estimate) -> str:
    """Format an estimate as text, with its assumptions."""
    refused = ""
    if estimate.refused_texts:
        refused = f"; the tokenizer refused {estimate.refused_texts} more"
    workers = "1 worker" if estimate.workers == 1 else f"{estimate.workers} workers"
    return (
        f"{estimate.texts:,} texts in {estimate.shards:,} shards of {estimate.shard_size:,}\n"
        f"about {estimate.tokens:,} tokens ({estimate.tokens_per_text:.0f} per text in a sample of "
        f"{estimate.sampled_texts}{refused})\n"
        f"about {_common.format_size(estimate.gigabytes * 1e9)} "
        f"({estimate.bytes_per_text:,.0f} bytes per text)\n"
        f"about {_common.format_duration(estimate.hours * 3600)} with {workers} "
        f"({estimate.texts_per_second:,.0f} texts per second each, {estimate.rate_from})\n"
        "assumed: all texts are like the sample, and workers do not slow one another down. Not "
        "included: starting\n"
        f"workers, loading models, and reading all texts once ({estimate.reading_seconds:.1f} s on "
        "this machine). Nothing was written."
    )
