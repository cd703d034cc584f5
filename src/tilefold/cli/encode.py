"""``tilefold encode``: documents or queries to sparse, token or dense vectors."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tilefold import retrieval
from tilefold._internal.files import read_json
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import CommandError, UsageError, note
from tilefold.cli._options import DocumentFieldOptions, option, positive, refuse_options
from tilefold.distributed.ranks import first_rank_first, has_other_ranks, join_ranks

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.data.passages import Passages
    from tilefold.retrieval.data.shard_texts import Texts
    from tilefold.retrieval.encoding.sparse import Encoding

SAVE_MINUTES = 1.0
SHOWN_FAILURES = 5
# Approximate number of texts whose tokens a dry run counts.
SAMPLED_TEXTS = 512
# Largest number of texts that a dry run encodes, by device.
TIMED_TEXTS = {"cpu": 32, "cuda": 4096}
TIMED_RUNS = 2


@dataclass(frozen=True, kw_only=True)
class EncodeRequest(_retrievers.PassageOptions, DocumentFieldOptions):
    """Options of ``tilefold encode``."""

    model: Annotated[
        str,
        option(
            "Folder or name of a SparseEncoder, a MultiVectorEncoder or a dense model; or minilm.",
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
            "By default that of the model, with minilm sparse.",
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
            "With --queries: only those of this split.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        positive(
            "Sparse: keep only this many terms per text.",
            panel="Encoding",
        ),
    ] = None
    special_tokens: Annotated[
        bool | None,
        option(
            "Sparse: keep weights of special tokens such as [CLS], which match in every text "
            "(default), or not.",
            "--special-tokens/--no-special-tokens",
            panel="Encoding",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        positive(
            "Tokens read of a text, at most; by default as many as the model reads.",
            panel="Encoding",
        ),
    ] = None
    storage: Annotated[
        Literal["fp32", "fp16", "int8"] | None,
        option(
            "Tokens: by default fp16; dense: fp32; int8 is half of fp16.",
            panel="Encoding",
        ),
    ] = None
    dimension: Annotated[
        int | None,
        positive(
            "Dense: keep only the first entries of a vector, for a Matryoshka model.",
            panel="Encoding",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        positive(
            "Texts per batch, at most; by default batches are cut by tokens.",
            panel="Encoding",
        ),
    ] = None
    batch_tokens: Annotated[
        int | None,
        positive(
            "Tokens per batch; by default what suits the device.",
            panel="Encoding",
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
            "The part of a shard that is done is saved this often, and on Ctrl-C.",
            min=0,
            panel="Shards and processes",
        ),
    ] = SAVE_MINUTES
    devices: Annotated[
        str | None,
        option(
            "GPUs to use, a number or all: a process for each. Without GPUs, processes.",
            panel="Shards and processes",
        ),
    ] = None
    jsonl: Annotated[
        Path | None,
        option(
            "Sparse: also write the vectors as JSON lines (Anserini form).",
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
            "This process, or workers on this machine or on a cluster.",
            panel="Shards and processes",
        ),
    ] = "local"
    address: Annotated[
        str | None,
        option(
            "Ray: host:port of a cluster, auto for the one of this machine; by default this "
            "machine.",
            panel="Shards and processes",
        ),
    ] = None
    workers: Annotated[
        int | None,
        positive(
            "Ray: models at a time, at most; by default as many as fit, one per GPU.",
            panel="Shards and processes",
        ),
    ] = None
    worker_cpus: Annotated[
        int | None,
        positive(
            "Ray: cores of each worker.",
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
            "With --dry-run: texts per second of a worker, instead of what is measured.",
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
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.queries:
            refuse_options(
                {"--passages": self.passages},
                "cuts documents, and --queries encodes queries",
            )
        else:
            refuse_options(
                {"--split": self.split},
                "chooses queries: give it together with --queries",
            )
        if self.rate is not None and not (self.dry_run and self.rate > 0):
            raise UsageError("--rate: expected a number above 0 together with --dry-run.")
        if self.jsonl is None:
            refuse_options(
                {"--overwrite": self.overwrite},
                "goes with --jsonl, which it replaces; to encode again there is --fresh",
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
                "does nothing with --dry-run, which writes nothing and measures here: leave it out",
            )
        self._check_engine()

    def _check_engine(self) -> None:
        """Raise ``UsageError`` for options that the engine of the request does not read.

        The engines are Ray, on this machine or a cluster, and processes of this machine.
        """
        if self.engine == "ray":
            self.refuse_save_minutes()
            refuse_options(
                {"--jsonl": self.jsonl},
                "is written from all vectors in memory: leave it out with --engine ray",
            )
        else:
            refuse_options(
                {"--address": self.address, "--worker-cpus": self.worker_cpus},
                "is for --engine ray",
            )
            if not self.dry_run:
                refuse_options({"--workers": self.workers}, "is for --engine ray and --dry-run")
        if self.engine == "ray" or self.dry_run:
            refuse_options(
                {"--devices": self.devices},
                "is for encoding in processes of this machine: with Ray give --workers",
            )

    def refuse_save_minutes(self) -> None:
        """Refuse ``--save-minutes`` if several processes encode."""
        refuse_options(
            {"--save-minutes": self.save_minutes != SAVE_MINUTES},
            "does nothing where several processes share the work, which keep whole shards: leave "
            "it out",
        )


def encode(request: EncodeRequest) -> None:
    """Encode a collection to sparse or dense vectors, or to token vectors (for --rerank).

    --model minilm is the packaged all-MiniLM-L6-v2 without training: as SPLADE, the start that
    train --steps 0 makes from the documents of --data; with --kind tokens, its own token states;
    with --kind dense, the model itself.

    The same command again resumes an interrupted run from what was kept last, with either engine.
    With --devices, or under torchrun, several processes share the work; the result is that of one.

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
    _models.find_model(request.model, "--model")
    exit_code = _options.run_on_devices(request.devices)
    if exit_code is not None:
        raise typer.Exit(exit_code)
    with join_ranks() as rank:
        _encode_on_rank(request, splitter, rank)


def _encode_on_rank(request: EncodeRequest, splitter: Passages | None, rank: int) -> None:
    """Load data and model, encode the share of this rank, and print the result on rank 0.

    With ``--dry-run``, only an estimate is printed.

    Args:
        request: options of the command.
        splitter: how documents are split into passages; None encodes whole documents.
        rank: rank of this process.
    """
    if rank != 0:
        # The import takes seconds, in which rank 0 downloads what the other ranks read.
        _models.check_sentence_transformers()
    rank_0_writes_first = request.model == _models.PACKAGED or request.data == "pydocs"
    with first_rank_first() if rank_0_writes_first else nullcontext():
        collection = _load_collection(request, splitter)
        texts = None if collection is None else _texts(collection, request, splitter)
        model, kind = _models.load_kind(
            request.model,
            request.kind,
            None if request.engine == "ray" else collection,
        )
    with _options.option_errors(storage="--storage"):
        encoding = _encoding_of(request, kind)
    if rank == 0 and splitter is not None and collection is not None and texts is not None:
        note(
            f"{len(collection.documents):,} documents in {len(texts):,} passages of at most "
            f"{request.passages} words",
        )
    if request.dry_run:
        estimate = _estimate(model, encoding, _source(request.data, texts), request)
        _common.print_result(asdict(estimate), request.as_json, _format_estimate(estimate))
        return
    manifest = _encode_texts(request, encoding, model, kind, texts, rank)
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
    _print_manifest(manifest, request.output, request.as_json)


def _encode_texts(
    request: EncodeRequest,
    encoding: Encoding,
    model: Model,
    kind: str,
    texts: Mapping[str, str] | None,
    rank: int,
) -> Any:
    """Encode with the engine of the request, and return the manifest of the folder.

    Args:
        request: options of the command.
        encoding: how the model encodes.
        model: encodes without Ray, whose workers load it themselves.
        kind: kind of the model.
        texts: texts by id; None reads them from the file of ``--data``, for Ray.
        rank: rank of this process. Rank 0 shows the progress.
    """
    _common.finished_work_checks.append(lambda: _has_vectors(request.output))
    bar: Any = nullcontext()  # its `update` is None
    if rank == 0:
        bar = _common.progress_bar("encoding", resumes=_common.FRESH)
    option_errors = _options.option_errors(max_length="--max-length", dimension="--dimension")
    with bar as update, option_errors:
        if request.engine == "ray":
            source = _source(request.data, texts)
            return _encode_on_ray(request, encoding, kind, source, update)
        return _encode_here(request, encoding, model, texts or {}, update)


def _load_collection(request: EncodeRequest, splitter: Passages | None) -> Collection | None:
    """Load the collection, unless its documents are read from their file one by one.

    Workers of Ray, and the estimate of ``--dry-run``, read whole documents of a file where they
    need them. Queries and passages are always made from a collection in memory.

    Args:
        request: options of the command.
        splitter: how documents are split into passages; None encodes whole documents.

    Returns:
        The collection, or None if documents are read from the file.
    """
    may_read_from_file = request.engine == "ray" or request.dry_run
    encodes_documents = not request.queries and splitter is None
    is_file = request.data != "pydocs" and Path(request.data).exists()
    if may_read_from_file and encodes_documents and is_file:
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
    """Encode with workers of Ray, on this machine or on a cluster, and return the manifest.

    Args:
        request: options of the command.
        encoding: how the model encodes.
        kind: kind of the model, which each worker loads once.
        texts: texts that workers read their shards from.
        progress: function that shows the number of texts that are done.
    """
    from tilefold.retrieval.encoding.on_ray import RayCluster, encode_on_ray

    load_model = functools.partial(
        _models.load_once,
        _models.absolute(request.model),
        (kind,),
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


def _encode_here(
    request: EncodeRequest,
    encoding: Encoding,
    model: Model,
    texts: Mapping[str, str],
    progress: Callable[..., None] | None,
) -> Any:
    """Encode in this process, together with the other ranks if there are any.

    Args:
        request: options of the command.
        encoding: how the model encodes.
        model: encodes.
        texts: texts by id, of which each rank encodes its share.
        progress: function that shows the number of texts that are done; None on ranks but 0.

    Returns:
        The manifest of the folder.
    """
    from tilefold.retrieval.encoding.sparse import Output, encode_to_folder

    output = Output(
        request.output,
        shard_size=request.shard_size,
        resume=request.resume,
        progress=progress,
        save_minutes=request.save_minutes,
    )
    return encode_to_folder(encoding, model, texts, output, "world")  # shared by all ranks


def _print_manifest(manifest: Any, output: Path, as_json: bool) -> None:
    """Print a summary of a folder of vectors, and the texts that could not be encoded.

    Args:
        manifest: of sparse, dense or token vectors.
        output: the folder.
        as_json: print JSON.
    """
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    passages = manifest.provenance.passages
    report_manifest_truncation(
        manifest.kind if passages is None else "passage",
        manifest.n_texts,
        manifest.truncated,
    )
    if passages is not None and manifest.truncated.get("count"):
        note(
            "what was cut off a passage is never found: give --passages fewer words, or another "
            "model",
        )
    facts, summary = _describe_vectors(manifest)
    summary += f": {output}"
    if manifest.precision is not None:
        summary += f" (computed in {manifest.precision})"
    lines = [summary]
    failed = manifest.failed
    if failed:
        lines.append(
            f"{manifest.n_texts} texts = {manifest.n_documents} encoded + {len(failed)} not "
            "encoded",
        )
    if manifest.kind == "document":
        lines.append(_index_command(manifest.layout, output))
    result = {
        "output": str(output),
        "n": manifest.n_documents,
        "kind": manifest.kind,
        **facts,
        "shards": len(manifest.shards),
        "texts": manifest.n_texts,
        "truncated": manifest.truncated,
        "precision": manifest.precision,
        "failed": failed,
    }
    _common.print_result(result, as_json, *lines)
    if as_json:
        return
    for name, reason in list(failed.items())[:SHOWN_FAILURES]:
        note(f"not encoded: {name}: {reason}")
    if len(failed) > SHOWN_FAILURES:
        note(f"and {len(failed) - SHOWN_FAILURES} more; see {output / 'manifest.json'}")


def _describe_vectors(manifest: Any) -> tuple[dict[str, Any], str]:
    """Return the facts of a folder of vectors by name, and a summary in words.

    Args:
        manifest: of sparse, dense or token vectors. Only that of sparse ones has a vocabulary.
    """
    n_documents = manifest.n_documents
    if hasattr(manifest, "vocab_size"):
        nonzeros = sum(shard["nonzeros"] for shard in manifest.shards)
        mean_terms = nonzeros / max(1, n_documents)
        facts = {"vocab_size": manifest.vocab_size, "mean_active_terms": mean_terms}
        return facts, f"{n_documents} vectors, {mean_terms:.0f} terms each on average"
    shape = f"{manifest.dimension} entries in {manifest.storage}"
    if manifest.layout == "dense":
        facts = {
            "dimension": manifest.dimension,
            "storage": manifest.storage,
            "similarity": manifest.similarity,
        }
        return facts, f"{n_documents} dense vectors of {shape}, {manifest.similarity}"
    mean_tokens = manifest.n_tokens / max(1, n_documents)
    facts = {
        "dimension": manifest.dimension,
        "storage": manifest.storage,
        "n_tokens": manifest.n_tokens,
        "mean_tokens": mean_tokens,
    }
    summary = f"token vectors of {n_documents} texts, {mean_tokens:.0f} of {shape} each on average"
    return facts, summary


def _index_command(layout: str, vectors: Path) -> str:
    """Return the line with the command that indexes encoded documents of a layout."""
    source = ["--vectors"]
    if layout == "tokens":
        source = ["--backend", "late", "--tokens"]
    return _common.next_command("index", *source, vectors, "--output", "INDEX")


def _encoding_of(request: EncodeRequest, model_kind: str) -> Encoding:
    """Return the encoding of a kind of model, and refuse options of other kinds.

    Args:
        request: options of the command.
        model_kind: ``"sparse"``, ``"multi-vector"`` or ``"dense"``.
    """
    remedy = f"{request.model} is a {model_kind} one: leave it out"
    if model_kind != "sparse":
        refuse_options(
            {
                "--top-k": request.top_k,
                "--no-special-tokens": request.special_tokens is not None,
                "--jsonl": request.jsonl,
            },
            f"is for sparse models, and {remedy}",
        )
    if model_kind not in ("multi-vector", "dense"):
        refuse_options(
            {"--storage": request.storage},
            f"is for multi-vector and dense models, and {remedy}",
        )
    if model_kind != "dense":
        refuse_options({"--dimension": request.dimension}, f"is for dense models, and {remedy}")

    from tilefold.retrieval.encoding.sparse import SparseEncoding
    from tilefold.retrieval.encoding.tokens import DenseEncoding, TokenEncoding

    kind: Literal["query", "document"] = "query" if request.queries else "document"
    if model_kind == "sparse":
        return SparseEncoding(
            kind=kind,
            batch_size=request.batch_size,
            batch_tokens=request.batch_tokens,
            max_length=request.max_length,
            top_k=request.top_k,
            special_tokens=request.special_tokens is not False,
        )
    source = request.model if request.model == _models.PACKAGED else _models.absolute(request.model)
    if model_kind == "dense":
        return DenseEncoding(
            kind=kind,
            batch_size=request.batch_size,
            batch_tokens=request.batch_tokens,
            max_length=request.max_length,
            source=source,
            storage=request.storage or DenseEncoding.storage,
            dimension=request.dimension,
        )
    return TokenEncoding(
        kind=kind,
        batch_size=request.batch_size,
        batch_tokens=request.batch_tokens,
        max_length=request.max_length,
        source=source,
        storage=request.storage or TokenEncoding.storage,
    )


def _texts(
    collection: Collection,
    request: EncodeRequest,
    splitter: Passages | None,
) -> Mapping[str, str]:
    """Return the texts that are encoded by id: documents, their passages, or queries.

    Args:
        collection: documents and queries.
        request: chooses queries with ``--queries``, and those of a split with ``--split``.
        splitter: how documents are split into passages; None takes whole documents.

    Raises:
        UsageError: for a collection without queries, or without the split.
    """
    if not request.queries:
        if splitter is None:
            return collection.contents()
        return splitter.of(collection.documents)
    if not collection.queries:
        raise UsageError(f"--queries: {request.data} has no queries.")
    if request.split is None:
        return collection.queries
    _common.check_split(collection, request.split)
    return collection.split_queries(request.split)


def _has_vectors(output: Path) -> bool:
    """Whether an interrupted run kept a shard, or a part of one."""
    manifest = read_json(output / "manifest.json") or {}
    return bool(
        manifest.get("shards")
        or manifest.get("partial")
        or any(output.glob("part-*.receipt.json")),
    )


def _source(data: str, texts: Mapping[str, str] | None) -> Texts:
    """Return the texts that shards are read from.

    Args:
        data: file of the documents.
        texts: the loaded texts by id; None reads each document from the file when it is needed.
    """
    from tilefold.retrieval.data.collection import documents_table
    from tilefold.retrieval.data.shard_texts import FileTexts, InMemoryTexts

    if texts is not None:
        return InMemoryTexts(texts)
    return FileTexts(documents_table(Path(data)), _common.fields_of_documents())


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of encoding a collection, measured on a sample.

    Attributes:
        texts: number of texts.
        shards: number of shards.
        shard_size: texts per shard.
        tokens: tokens of all texts.
        tokens_per_text: mean over the sample.
        sampled_texts: texts of the sample that the tokenizer accepts.
        refused_texts: texts of the sample that it does not.
        bytes_per_text: size of the vectors of a text.
        gigabytes: size of all vectors.
        texts_per_second: rate of one worker.
        rate_from: where the rate is from, in words.
        workers: number of workers.
        hours: time of all workers together.
        reading_seconds: time to read all texts once.
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
        model: encodes the sample.
        encoding: how it encodes.
        texts: texts of the collection.
        request: size of shards, workers, and ``--rate`` instead of the rate that is measured.

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
    rate_from = _describe_device(device)
    if request.rate is not None:
        rate = request.rate
        rate_from = "given with --rate"
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
        rate_from=rate_from,
        workers=workers,
        hours=survey.count / (rate * workers) / 3600,
        reading_seconds=reading_seconds,
    )


def _accepted_texts(
    model: Model,
    encoding: Encoding,
    texts: Sequence[str],
) -> tuple[list[str], int]:
    """Return the texts that the tokenizer of a model accepts, and the sum of their tokens.

    Args:
        model: has the tokenizer.
        encoding: limits the tokens of a text.
        texts: the sample.

    Raises:
        CommandError: if the tokenizer refuses all of them.
    """
    from tilefold.retrieval.encoding.truncation import token_counts

    accepted: list[str] = []
    n_tokens = 0
    errors: list[Exception] = []
    for text, count in zip(texts, token_counts(model, texts), strict=True):
        if isinstance(count, Exception):
            errors.append(count)
            continue
        accepted.append(text)
        n_tokens += min(count, encoding.max_length or count)
    if not accepted:
        raise CommandError(
            f"--data: the tokenizer refuses all {len(errors)} texts of the sample "
            f"({_common.first_line(errors[0])}).",
        )
    return accepted, n_tokens


def _describe_device(device: str) -> str:
    """Return in words where the rate of an estimate was measured."""
    import torch

    if device == "cuda":
        return f"measured here on {torch.cuda.get_device_name()}"
    return f"measured here on {device} with {torch.get_num_threads()} threads"


def _time_encoding(
    model: Model,
    encoding: Encoding,
    sample: list[str],
) -> tuple[float, float]:
    """Encode a sample to a temporary folder, and return its rate and size.

    Args:
        model: encodes the sample.
        encoding: how it encodes.
        sample: texts to encode.

    Returns:
        Texts per second of the fastest run, and bytes per text.
    """
    from tilefold.retrieval.encoding.sparse import Output, encode_to_folder

    texts = {str(number): text for number, text in enumerate(sample)}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tilefold-dry-run-") as name:
        for run in range(TIMED_RUNS):
            folder = Path(name) / str(run)
            started = time.perf_counter()
            manifest = encode_to_folder(encoding, model, texts, Output(folder, len(texts)))
            seconds.append(time.perf_counter() - started)
        n_bytes = sum(file.stat().st_size for file in folder.glob("part-*"))  # of the last run
    return len(texts) / min(seconds), n_bytes / max(1, manifest.n_documents)


def _format_estimate(estimate: Estimate) -> str:
    """Return an estimate in words, with what it assumes."""
    refused = ""
    if estimate.refused_texts:
        refused = f"; {estimate.refused_texts} others are none that the tokenizer takes"
    workers = "1 worker" if estimate.workers == 1 else f"{estimate.workers} workers"
    return (
        f"{estimate.texts:,} texts in {estimate.shards:,} shards of {estimate.shard_size:,}\n"
        f"{estimate.tokens:,} tokens, about ({estimate.tokens_per_text:.0f} each in "
        f"{estimate.sampled_texts} texts"
        f"{refused})\n"
        f"{_common.size(estimate.gigabytes * 1e9)}, about ({estimate.bytes_per_text:,.0f} bytes "
        "each)\n"
        f"{_common.duration(estimate.hours * 3600)}, about, with {workers} "
        f"({estimate.texts_per_second:,.0f} texts per second each, {estimate.rate_from})\n"
        "assumed: the other texts are like the sample; workers do not slow one another down. "
        "Starting them, loading\n"
        f"models and reading all texts once ({estimate.reading_seconds:.1f} s here) come on top. "
        "Nothing was written."
    )
