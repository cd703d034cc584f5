"""``tilefold encode``: encodes documents or queries to sparse vectors or to token vectors, depending on the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._files import read_json
from tilefold._ranks import first_rank_first, joined, several
from tilefold.cli import _common, _encode_at_scale, _models, _several

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.encodings import Encoding

STORAGES = ("fp16", "int8")
KINDS = {"sparse": "sparse", "tokens": "multi-vector"}  # of vectors, and of the models that make them


def encode(
    model: Annotated[
        str,
        typer.Option(
            help="Folder or Hugging Face name of a SparseEncoder or a MultiVectorEncoder; or minilm, without training."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the vectors.")],
    data: Annotated[str, typer.Option(help=_common.DOCUMENTS_HELP)] = "pydocs",
    kind: Annotated[
        str | None,
        typer.Option(help="sparse or tokens: kind of vectors; by default that of the model, with minilm sparse."),
    ] = None,
    queries: Annotated[bool, typer.Option("--queries", help="Encode queries instead of documents.")] = False,
    split: Annotated[str | None, typer.Option(help="With --queries: only those of this split.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sparse: keep only this many terms per text.")] = None,
    special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--special-tokens/--no-special-tokens",
            help="Sparse: keep weights of special tokens such as [CLS], which match in every text (default), or not.",
        ),
    ] = None,
    storage: Annotated[str | None, typer.Option(help="Token vectors: fp16, or int8 for half the bytes.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Texts per batch, at most; by default batches are cut by tokens.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per batch; by default what suits the device.")
    ] = None,
    shard_size: Annotated[int, typer.Option(help="Texts per shard; each shard is saved when it is full.")] = 1024,
    save_minutes: Annotated[
        float, typer.Option(min=0, help="The part of a shard that is done is saved this often, and on Ctrl-C.")
    ] = 1.0,
    devices: Annotated[str | None, typer.Option(help=_several.HELP)] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="Sparse: also write the vectors as JSON lines (Anserini form).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Keep what an interrupted run has encoded.")] = True,
    engine: Annotated[
        str, typer.Option(help="local, this process; or ray: workers on this machine or on a cluster.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Ray: host:port of a cluster, auto for the one of this machine; by default this machine."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Ray: models at a time, at most; by default as many as fit, one per GPU.")
    ] = None,
    worker_cpus: Annotated[int | None, typer.Option(help="Ray: cores of each worker.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate shards, tokens, hours and gigabytes.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="With --dry-run: texts per second of a worker, instead of what is measured.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as JSON on stdout.")] = False,
) -> None:
    """Encode a collection to sparse vectors, or to token vectors with a multi-vector model (for --rerank).

    --model minilm is the packaged all-MiniLM-L6-v2 without training: as SPLADE, the start that train --steps 0 makes
    from the documents of --data; with --kind tokens, its own token states.

    The same command again resumes an interrupted run from what was kept last, with either engine. With --devices, or
    under torchrun, several processes share the work; the result is that of one.
    """
    if split is not None and not queries:
        raise _common.UsageError("--split chooses queries: give it together with --queries.")
    for option, value, allowed in (("--storage", storage, STORAGES), ("--kind", kind, tuple(KINDS)),
                                   ("--engine", engine, _encode_at_scale.ENGINES)):  # fmt: skip
        if value is not None and value not in allowed:
            raise _common.UsageError(f"{option}: expected one of {', '.join(allowed)}, got {value!r}.")
    _common.check_at_least_one(
        top_k=top_k, batch_size=batch_size, batch_tokens=batch_tokens, shard_size=shard_size, workers=workers,
        worker_cpus=worker_cpus,
    )  # fmt: skip
    _check_engine(engine, dry_run, address, workers, worker_cpus, rate, jsonl)
    _models.find_model(model, "--model")
    if devices is not None and (engine == "ray" or dry_run):
        raise _common.UsageError("--devices is for encoding in processes of this machine: with Ray give --workers.")
    if (code := _several.run_on(devices)) is not None:
        raise typer.Exit(code)
    with joined() as rank:
        stored = (engine == "ray" or dry_run) and not queries and data != "pydocs" and Path(data).exists()
        if rank:  # while the first one makes what this one finds
            _models.check_sentence_transformers()
        with first_rank_first() if model == _models.PACKAGED or data == "pydocs" else nullcontext():
            collection = None if stored else _common.load_data(data, documents_only=not queries, drop_unknown=True)
            texts = None if collection is None else _texts(collection, data, queries, split)
            encoder, made = _load(model, kind, None if engine == "ray" else collection)
        _check_options(model, made, {
            "--top-k": top_k, "--no-special-tokens": special_tokens, "--jsonl": jsonl, "--storage": storage,
        })  # fmt: skip
        encoding = _encoding(made, model, storage, {
            "kind": "query" if queries else "document", "batch_size": batch_size, "batch_tokens": batch_tokens,
        }, {"top_k": top_k, "special_tokens": special_tokens is not False})  # fmt: skip
        if dry_run:
            given = _encode_at_scale.source(data, texts)
            found = _encode_at_scale.dry_run(encoder, encoding, given, shard_size, workers or 1, rate)
            _common.print_json(asdict(found)) if as_json else _encode_at_scale.print_dry_run(found)
            return
        _common.keeps(lambda: _has_vectors(output))
        with nullcontext(_nothing) if rank else _common.progress_bar("encoding", resumes=_common.FRESH) as update:
            options: dict[str, Any] = {
                "shard_size": shard_size,
                "progress": lambda done, total: update(done, total, ""),
                "resume": resume,
            }
            if engine == "ray":
                cluster = {"address": address, "workers": workers, "worker_cpus": worker_cpus}
                given = _encode_at_scale.source(data, texts)
                manifest = _encode_at_scale.on_ray(model, made, given, output, encoding, cluster, options)
            else:
                from tilefold.retrieval.encodings import Output, encode_to_folder

                where = Output(output, save_minutes=save_minutes, **options)
                manifest = encode_to_folder(encoding, encoder, texts or {}, where, "world")
        if jsonl is not None and rank == 0:
            from tilefold.retrieval import export_jsonl, read_vectors

            tokens = encoder.tokenizer.convert_ids_to_tokens(range(manifest.vocab_size))
            export_jsonl(read_vectors(output), jsonl, tokens, contents=texts)
        if rank == 0:
            _print(manifest, output, as_json)


def _nothing(done: int, total: int, remark: str) -> None:
    """Progress that another rank shows."""


def _print(manifest: Any, output: Path, as_json: bool) -> None:
    """Print a summary of the folder, and the texts that are not in it."""
    from tilefold.retrieval.truncation import tell_truncated

    tell_truncated(manifest.kind, manifest.n_texts, manifest.truncated)
    if not manifest.truncated:
        _common.note("an earlier version wrote a part and did not count the texts that were cut; --fresh counts them")
    result, failed = {"output": str(output), "n": manifest.n_documents, "kind": manifest.kind}, manifest.failed
    if hasattr(manifest, "vocab_size"):
        nonzeros = sum(shard["nonzeros"] for shard in manifest.shards)
        mean = nonzeros / max(1, manifest.n_documents)
        result |= {"vocab_size": manifest.vocab_size, "mean_active_terms": mean}
        line = f"{manifest.n_documents} vectors, {mean:.0f} terms each on average: {output}"
    else:
        mean = manifest.n_tokens / max(1, manifest.n_documents)
        shape = {"dimension": manifest.dimension, "storage": manifest.storage}
        result |= {**shape, "n_tokens": manifest.n_tokens, "mean_tokens": mean}
        each = f"{mean:.0f} of {manifest.dimension} entries in {manifest.storage}"
        line = f"token vectors of {manifest.n_documents} texts, {each} each on average: {output}"
    if as_json:
        counts = {"shards": len(manifest.shards), "texts": manifest.n_texts}
        _common.print_json(result | counts | {"truncated": manifest.truncated, "failed": failed})
        return
    typer.echo(line)
    typer.echo(f"{manifest.n_texts} texts = {manifest.n_documents} encoded + {len(failed)} not encoded")
    for name, reason in list(failed.items())[:5]:
        _common.note(f"not encoded: {name}: {reason}")
    if len(failed) > 5:
        _common.note(f"and {len(failed) - 5} more; see {output / 'manifest.json'}")


def _check_engine(
    engine: str,
    dry_run: bool,
    address: str | None,
    workers: int | None,
    worker_cpus: int | None,
    rate: float | None,
    jsonl: Path | None,
) -> None:
    """Raise an error for options that do nothing with this engine, or in a dry run."""
    if dry_run:
        useless = ("jsonl", "address", "worker_cpus", "save_minutes", "resume")
        _common.refuse_useless(useless, "with --dry-run, which writes nothing and measures here")
    if engine == "ray" or several():
        _common.refuse_useless(["save_minutes"], "where several processes share the work, which keep whole shards")
    if engine == "ray":
        _common.refuse(["jsonl"], "is written from all vectors in memory: leave it out with --engine ray")
    else:
        _common.refuse(("address", "worker_cpus"), "is for --engine ray")
        if not dry_run:
            _common.refuse(["workers"], "is for --engine ray and --dry-run")
    if rate is not None and not (dry_run and rate > 0):
        raise _common.UsageError("--rate: expected a number above 0 together with --dry-run.")


def _load(model: str, kind: str | None, collection: Collection | None) -> tuple[Any, str]:
    """The model that makes vectors of `kind`, and its own kind; minilm is a sparse one unless tokens are asked for."""
    if model != _models.PACKAGED or kind == "tokens":
        kinds = tuple(KINDS.values()) if kind is None else (KINDS[kind],)
        return _models.load_model(_encode_at_scale.absolute(model), kinds=kinds, fast=kinds)
    if collection is None:
        raise _common.UsageError(
            f"--model: {model} as a sparse model is made from the documents, by one process. Save it first: "
            "tilefold train --steps 0"
        )
    from tilefold.retrieval.provenance import texts_digest

    documents = collection.contents()
    what = f"the documents of {collection.name}"
    return _models.load_untrained(texts_digest(documents), lambda: documents, what), "sparse"


def _encoding(made: str, model: str, storage: str | None, shared: dict[str, Any], sparse: dict[str, Any]) -> Encoding:
    """The record of what is made of texts; `shared` are fields of every kind, `sparse` those of sparse vectors."""
    if made == "multi-vector":
        from tilefold.retrieval.token_encoding import TokenEncoding

        source = model if model == _models.PACKAGED else _encode_at_scale.absolute(model)
        return TokenEncoding(storage=storage or STORAGES[0], source=source, **shared)
    from tilefold.retrieval.encoding import SparseEncoding

    return SparseEncoding(**shared, **sparse)


def _texts(collection: Collection, data: str, queries: bool, split: str | None) -> dict[str, str]:
    """Id -> text of the documents, or of the queries."""
    if not queries:
        return collection.contents()
    if not collection.queries:
        raise _common.UsageError(f"--queries: {data} has no queries.")
    if split is None:
        return collection.queries
    _common.check_split(collection, split)
    return collection.split_queries(split)


def _has_vectors(output: Path) -> bool:
    """Whether an interrupted run kept a shard, or a part of one."""
    manifest = read_json(output / "manifest.json") or {}
    return bool(manifest.get("shards") or manifest.get("partial") or any(output.glob("part-*.receipt.json")))


def _check_options(model: str, kind: str, given: dict[str, Any]) -> None:
    """Raise an error for options of the other kind of model."""
    foreign = ("--top-k", "--no-special-tokens", "--jsonl") if kind == "multi-vector" else ("--storage",)
    for name in foreign:
        if given[name] is not None:
            other = "sparse" if kind == "multi-vector" else "multi-vector"
            raise _common.UsageError(f"{name} is for {other} models, and {model} is a {kind} one: leave it out.")
