"""``tilefold encode``: sparse vectors of documents or queries, in Parquet shards."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilefold.cli import _common


def encode(
    model: Annotated[str, typer.Option(help="Folder or Hugging Face name of a SparseEncoder.")],
    output: Annotated[Path, typer.Option(help="Folder for the vectors.")],
    data: Annotated[str, typer.Option(help="pydocs, or a folder in the BEIR layout.")] = "pydocs",
    queries: Annotated[bool, typer.Option("--queries", help="Encode queries instead of documents.")] = False,
    split: Annotated[str | None, typer.Option(help="With --queries: only those of this split.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep only this many terms of a text.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts in a batch.")] = 32,
    shard_size: Annotated[int, typer.Option(help="Texts in a shard, which is saved at once.")] = 1024,
    jsonl: Annotated[Path | None, typer.Option(help="Also write the vectors as JSON lines (Anserini form).")] = None,
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Keep the shards of a killed run.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The manifest as JSON on stdout.")] = False,
) -> None:
    """Encode a collection; a killed run goes on from its last shard when the same command is given again."""
    if split is not None and not queries:
        raise _common.UsageError("--split chooses queries: give it together with --queries.")
    from tilefold.retrieval import encode_collection, export_jsonl, read_vectors

    collection = _common.load_data(data)
    if split is not None:
        _common.check_split(collection, split)
    if queries:
        texts = collection.queries if split is None else collection.split_queries(split)
    else:
        texts = {name: document.contents for name, document in collection.documents.items()}
    encoder = _common.load_encoder(model)
    with _common.progress_bar("encoding") as update, _common.fast_inference():
        manifest = encode_collection(
            encoder,
            texts,
            output,
            kind="query" if queries else "document",
            batch_size=batch_size,
            shard_size=shard_size,
            top_k=top_k,
            progress=lambda done, total: update(done, total, ""),
            resume=resume,
        )
    if jsonl is not None:
        tokens = encoder.tokenizer.convert_ids_to_tokens(range(manifest.vocab_size))
        export_jsonl(read_vectors(output), jsonl, tokens)
    nonzeros = sum(shard["nonzeros"] for shard in manifest.shards)
    mean = nonzeros / max(1, manifest.n_documents)
    if as_json:
        _common.print_json(
            {
                "output": str(output),
                "n": manifest.n_documents,
                "kind": manifest.kind,
                "vocab_size": manifest.vocab_size,
                "mean_active_terms": mean,
                "shards": len(manifest.shards),
                "failed": manifest.failed,
            }
        )
        return
    typer.echo(f"{manifest.n_documents} vectors, {mean:.0f} terms each on average: {output}")
    for name, reason in list(manifest.failed.items())[:5]:
        _common.note(f"not encoded: {name}: {reason}")
    if len(manifest.failed) > 5:
        _common.note(f"and {len(manifest.failed) - 5} more; see {output / 'manifest.json'}")
