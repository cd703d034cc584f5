"""``tilefold encode``: encodes documents or queries to sparse vectors or to token vectors, depending on the model."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._files import read_json
from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

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
        typer.Option(help="sparse or tokens: what to make; by default what the model makes, with minilm sparse."),
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
        float, typer.Option(min=0, help="What is done of a shard is kept after this time, and on Ctrl-C.")
    ] = 1.0,
    jsonl: Annotated[
        Path | None, typer.Option(help="Sparse: also write the vectors as JSON lines (Anserini form).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Keep what an interrupted run has encoded.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as JSON on stdout.")] = False,
) -> None:
    """Encode a collection to sparse vectors, or to token vectors with a multi-vector model (for --rerank).

    --model minilm is the packaged all-MiniLM-L6-v2 without training: as SPLADE, the start that train --steps 0 makes
    from the documents of --data; with --kind tokens, its own token states.

    The same command again resumes an interrupted run from what was kept last.
    """
    if split is not None and not queries:
        raise _common.UsageError("--split chooses queries: give it together with --queries.")
    if storage is not None and storage not in STORAGES:
        raise _common.UsageError(f"--storage: expected one of {', '.join(STORAGES)}, got {storage!r}.")
    if kind is not None and kind not in KINDS:
        raise _common.UsageError(f"--kind: expected one of {', '.join(KINDS)}, got {kind!r}.")
    _common.check_at_least_one(top_k=top_k, batch_size=batch_size, batch_tokens=batch_tokens, shard_size=shard_size)
    _models.find_model(model, "--model")
    collection = _common.load_data(data, documents_only=not queries, drop_unknown=True)
    texts = _texts(collection, data, queries, split)
    encoder, made = _load(model, kind, collection)
    _check_options(model, made, {
        "--top-k": top_k, "--no-special-tokens": special_tokens, "--jsonl": jsonl, "--storage": storage,
    })  # fmt: skip
    _common.keeps(lambda: _has_vectors(output))
    with _common.progress_bar("encoding") as update:
        options: dict[str, Any] = {
            "kind": "query" if queries else "document",
            "batch_size": batch_size,
            "batch_tokens": batch_tokens,
            "shard_size": shard_size,
            "save_minutes": save_minutes,
            "progress": lambda done, total: update(done, total, ""),
            "resume": resume,
        }
        if made == "multi-vector":
            result, failed = _tokens(encoder, model, texts, output, storage or STORAGES[0], options)
        else:
            result, failed = _sparse(
                encoder,
                texts,
                output,
                jsonl,
                options | {"top_k": top_k, "special_tokens": special_tokens is not False},
            )
    if as_json:
        _common.print_json(result | {"failed": failed})
        return
    if made == "multi-vector":
        each = f"{result['mean_tokens']:.0f} of {result['dimension']} entries in {result['storage']}"
        typer.echo(f"token vectors of {result['n']} texts, {each} each on average: {output}")
    else:
        typer.echo(f"{result['n']} vectors, {result['mean_active_terms']:.0f} terms each on average: {output}")
    for name, reason in list(failed.items())[:5]:
        _common.note(f"not encoded: {name}: {reason}")
    if len(failed) > 5:
        _common.note(f"and {len(failed) - 5} more; see {output / 'manifest.json'}")


def _load(model: str, kind: str | None, collection: Collection) -> tuple[Any, str]:
    """The model that makes vectors of `kind`, and its own kind; minilm is a sparse one unless tokens are asked for."""
    if model != _models.PACKAGED or kind == "tokens":
        return _models.load_model(model, kinds=tuple(KINDS.values()) if kind is None else (KINDS[kind],))
    from tilefold.retrieval.provenance import texts_digest

    documents = collection.contents()
    what = f"the documents of {collection.name}"
    return _models.load_untrained(texts_digest(documents), lambda: documents, what), "sparse"


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
    return bool(manifest.get("shards") or manifest.get("partial"))


def _check_options(model: str, kind: str, given: dict[str, Any]) -> None:
    """Raise an error for options of the other kind of model."""
    foreign = ("--top-k", "--no-special-tokens", "--jsonl") if kind == "multi-vector" else ("--storage",)
    for name in foreign:
        if given[name] is not None:
            other = "sparse" if kind == "multi-vector" else "multi-vector"
            raise _common.UsageError(f"{name} is for {other} models, and {model} is a {kind} one: leave it out.")


def _sparse(
    encoder: Any, texts: Mapping[str, str], output: Path, jsonl: Path | None, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    from tilefold.retrieval import encode_collection, export_jsonl, read_vectors

    manifest = encode_collection(encoder, texts, output, **options)
    if jsonl is not None:
        tokens = encoder.tokenizer.convert_ids_to_tokens(range(manifest.vocab_size))
        export_jsonl(read_vectors(output), jsonl, tokens, contents=texts)
    nonzeros = sum(shard["nonzeros"] for shard in manifest.shards)
    result = {
        "output": str(output),
        "n": manifest.n_documents,
        "kind": manifest.kind,
        "vocab_size": manifest.vocab_size,
        "mean_active_terms": nonzeros / max(1, manifest.n_documents),
        "shards": len(manifest.shards),
    }
    return result, manifest.failed


def _tokens(
    encoder: Any, model: str, texts: Mapping[str, str], output: Path, storage: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.retrieval import encode_tokens

    accelerate(encoder)
    is_path = model != _models.PACKAGED and Path(model).is_dir()
    source = str(Path(model).resolve()) if is_path else model
    manifest = encode_tokens(encoder, texts, output, storage=storage, source=source, **options)
    result = {
        "output": str(output),
        "n": manifest.n_documents,
        "kind": manifest.kind,
        "dimension": manifest.dimension,
        "storage": manifest.storage,
        "n_tokens": manifest.n_tokens,
        "mean_tokens": manifest.n_tokens / max(1, manifest.n_documents),
        "shards": len(manifest.shards),
    }
    return result, manifest.failed
