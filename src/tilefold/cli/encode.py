"""``tilefold encode``: encodes documents or queries to sparse, token or dense vectors, depending on
the model.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilefold import retrieval
from tilefold._internal.files import read_json
from tilefold._internal.typing import Model
from tilefold.cli import _common, _models, _options, _retrievers, _scores
from tilefold.cli._common import Asked, CommandError, UsageError, Values, note
from tilefold.cli._options import (
    Count,
    Number,
    Place,
    Text,
    flag,
    option,
    positive,
    preset,
    required,
)
from tilefold.distributed.ranks import first_rank_first, has_other_ranks, join_ranks

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection
    from tilefold.retrieval.data.passages import Passages
    from tilefold.retrieval.data.shard_texts import Texts
    from tilefold.retrieval.encoding.sparse import Encoding

_OF_KINDS = {  # option -> as it is spelled, and the kinds of models that it is for
    "top_k": ("--top-k", ("sparse",)),
    "special_tokens": ("--no-special-tokens", ("sparse",)),
    "jsonl": ("--jsonl", ("sparse",)),
    "storage": ("--storage", ("multi-vector", "dense")),
    "dimension": ("--dimension", ("dense",)),
}
_SAMPLE = 512  # texts whose tokens a dry run counts, about
_TIMED = {"cpu": 32, "cuda": 4096}  # texts that it encodes, at most


def encode(
    model: str = required(
        "Folder or name of a SparseEncoder, a MultiVectorEncoder or a dense model; or minilm.",
    ),
    output: Path = required("Folder for the vectors."),
    data: str = required(_common.DOCUMENTS_HELP),
    kind: Text = option(
        "By default that of the model, with minilm sparse.",
        metavar="sparse|tokens|dense",
    ),
    queries: bool = flag("Encode queries instead of documents.", "--queries"),
    split: Text = option("With --queries: only those of this split."),
    top_k: Count = positive("Sparse: keep only this many terms per text."),
    special_tokens: bool | None = option(
        "Sparse: keep weights of special tokens such as [CLS], which match in every text (default), or not.",
        "--special-tokens/--no-special-tokens",
    ),
    max_length: Count = positive(
        "Tokens read of a text, at most; by default as many as the model reads.",
    ),
    passages: Count = _retrievers.PASSAGES,
    stride: Count = _retrievers.STRIDE,
    cut: Text = _retrievers.CUT,
    storage: Text = option(
        "Tokens: by default fp16; dense: fp32; int8 is half of fp16.",
        metavar="fp32|fp16|int8",
    ),
    dimension: Count = positive(
        "Dense: keep only the first entries of a vector, for a Matryoshka model.",
    ),
    batch_size: Count = positive("Texts per batch, at most; by default batches are cut by tokens."),
    batch_tokens: Count = positive("Tokens per batch; by default what suits the device."),
    shard_size: int = positive(
        "Texts per shard; each shard is saved when it is full.",
        default=1024,
    ),
    save_minutes: float = preset(
        1.0,
        "The part of a shard that is done is saved this often, and on Ctrl-C.",
        min=0,
    ),
    devices: Text = option(
        "GPUs to use, a number or all: a process for each. Without GPUs, processes.",
    ),
    jsonl: Place = option("Sparse: also write the vectors as JSON lines (Anserini form)."),
    overwrite: bool = flag("Replace the file of --jsonl if it exists.", "--overwrite"),
    resume: bool = preset(True, "Keep what an interrupted run has encoded.", "--resume/--fresh"),
    engine: str = preset(
        "local",
        "This process, or workers on this machine or on a cluster.",
        metavar="local|ray",
    ),
    address: Text = option(
        "Ray: host:port of a cluster, auto for the one of this machine; by default this machine.",
    ),
    workers: Count = positive(
        "Ray: models at a time, at most; by default as many as fit, one per GPU.",
    ),
    worker_cpus: Count = positive("Ray: cores of each worker."),
    dry_run: bool = flag("Only estimate shards, tokens, hours and gigabytes.", "--dry-run"),
    rate: Number = option(
        "With --dry-run: texts per second of a worker, instead of what is measured.",
    ),
    as_json: bool = flag("The manifest as JSON on stdout.", "--json"),
) -> None:
    """Encode a collection to sparse or dense vectors, or to token vectors with a multi-vector model
    (for --rerank).

    --model minilm is the packaged all-MiniLM-L6-v2 without training: as SPLADE, the start that
    train --steps 0 makes from the documents of --data; with --kind tokens, its own token states;
    with --kind dense, the model itself.

    The same command again resumes an interrupted run from what was kept last, with either engine.
    With --devices, or under torchrun, several processes share the work; the result is that of one.
    """
    asked = locals()
    if has_other_ranks():
        _options.refuse_useless(
            ["save_minutes"],
            "where several processes share the work, which keep whole shards",
        )
    cuts = _retrievers.passages(asked)
    if rate is not None and not (dry_run and rate > 0):
        raise UsageError("--rate: expected a number above 0 together with --dry-run.")
    _scores.check_output_file(
        jsonl,
        "--jsonl",
        _scores.VECTOR_LINES,
        *_scores.files_of_collection(data),
        overwrite=overwrite,
    )
    _models.find_model(model, "--model")
    if (code := _options.on_devices(devices)) is not None:
        raise typer.Exit(code)
    with join_ranks() as rank:
        stored = (
            (engine == "ray" or dry_run)
            and not queries
            and cuts is None
            and data != "pydocs"
            and Path(data).exists()
        )
        if rank:  # while the first one makes what this one finds
            _models.check_sentence_transformers()
        with first_rank_first() if model == _models.PACKAGED or data == "pydocs" else nullcontext():
            parts: Values = {
                "documents_only": not queries,
                "splits": None if split is None else [split],
            }
            collection = None if stored else _common.load_data(data, drop_unknown=True, **parts)
            texts = None if collection is None else _texts(collection, data, queries, split, cuts)
            encoder, made = _models.load_kind(model, kind, None if engine == "ray" else collection)
        with _options.as_options("storage"):
            encoding = _encoding(made, asked)
        if cuts is not None and collection is not None and not rank:
            note(
                f"{len(collection.documents):,} documents in {len(texts or ()):,} passages of at most {passages} words",
            )
        if dry_run:
            found = _dry_run(
                encoder,
                encoding,
                _source(data, texts),
                shard_size,
                workers or 1,
                rate,
            )
            _common.print_result(found, as_json, _said_of_dry_run(found))
            return
        _common.kept.append(lambda: _has_vectors(output))
        bar = nullcontext() if rank else _common.progress_bar("encoding", resumes=_common.FRESH)
        with bar as update, _options.as_options("max_length"):
            options: Values = {"shard_size": shard_size, "resume": resume, "progress": update}
            if engine == "ray":
                from tilefold.retrieval.encoding.on_ray import RayCluster, encode_on_ray

                load = functools.partial(_models.load_once, _models.absolute(model), (made,))
                cluster = RayCluster(address=address, workers=workers, worker_cpus=worker_cpus)
                manifest: Any = encode_on_ray(
                    load,
                    _source(data, texts),
                    output,
                    encoding,
                    cluster=cluster,
                    **options,
                )
            else:
                from tilefold.retrieval.encoding.sparse import Output, encode_to_folder

                where = Output(output, save_minutes=save_minutes, **options)
                with _options.as_options("dimension"):
                    manifest = encode_to_folder(encoding, encoder, texts or {}, where, "world")
        if jsonl is not None and rank == 0:
            tokens = retrieval.term_names(encoder.tokenizer, manifest.vocab_size)
            retrieval.export_jsonl(retrieval.read_vectors(output), jsonl, tokens, contents=texts)
        if rank == 0:
            _print(manifest, output, as_json)


def _print(manifest: Any, output: Path, as_json: bool) -> None:
    """Print a summary of the folder, and the texts that are not in it."""
    from tilefold.retrieval.encoding.truncation import report_manifest_truncation

    cut = manifest.provenance.passages
    report_manifest_truncation(
        manifest.kind if cut is None else "passage",
        manifest.n_texts,
        manifest.truncated,
    )
    if cut is not None and manifest.truncated.get("count"):
        note(
            "what was cut off a passage is never found: give --passages fewer words, or another model",
        )
    result, failed = (
        {"output": str(output), "n": manifest.n_documents, "kind": manifest.kind},
        manifest.failed,
    )
    if hasattr(manifest, "vocab_size"):
        mean = sum(shard["nonzeros"] for shard in manifest.shards) / max(1, manifest.n_documents)
        result |= {"vocab_size": manifest.vocab_size, "mean_active_terms": mean}
        line = f"{manifest.n_documents} vectors, {mean:.0f} terms each on average: {output}"
    elif manifest.layout == "dense":
        result |= {name: getattr(manifest, name) for name in ("dimension", "storage", "similarity")}
        each = f"{manifest.dimension} entries in {manifest.storage}, {manifest.similarity}"
        line = f"{manifest.n_documents} dense vectors of {each}: {output}"
    else:
        mean = manifest.n_tokens / max(1, manifest.n_documents)
        shape = {"dimension": manifest.dimension, "storage": manifest.storage}
        result |= {**shape, "n_tokens": manifest.n_tokens, "mean_tokens": mean}
        each = f"{mean:.0f} of {manifest.dimension} entries in {manifest.storage}"
        line = f"token vectors of {manifest.n_documents} texts, {each} each on average: {output}"
    result |= {
        "shards": len(manifest.shards),
        "texts": manifest.n_texts,
        "truncated": manifest.truncated,
        "precision": manifest.precision,
    }
    if manifest.precision is not None:
        line += f" (computed in {manifest.precision})"
    lines = [line]
    if failed:
        lines.append(
            f"{manifest.n_texts} texts = {manifest.n_documents} encoded + {len(failed)} not encoded",
        )
    if manifest.kind == "document":
        lines.append(_index_command(manifest.layout, output))
    _common.print_result(result | {"failed": failed}, as_json, *lines)
    if as_json:
        return
    for name, reason in list(failed.items())[:5]:
        note(f"not encoded: {name}: {reason}")
    if len(failed) > 5:
        note(f"and {len(failed) - 5} more; see {output / 'manifest.json'}")


def _index_command(layout: str, vectors: Path) -> str:
    """The line that says how to index documents of a layout."""
    source = ("--backend", "late", "--tokens") if layout == "tokens" else ("--vectors",)
    return _common.next_command("index", *source, vectors, "--output", "INDEX")


def _encoding(made: str, asked: Asked) -> Encoding:
    """The record of what a model of the kind `made` makes of texts; refuses options of the other
    kinds.
    """
    model = asked["model"]
    for name, (spelled, kinds) in _OF_KINDS.items():
        if asked[name] is not None and made not in kinds:
            these = " and ".join(kinds)
            raise UsageError(
                f"{spelled} is for {these} models, and {model} is a {made} one: leave it out.",
            )
    shared: Values = {name: asked[name] for name in ("batch_size", "batch_tokens", "max_length")}
    shared["kind"] = "query" if asked["queries"] else "document"
    if made != "sparse":
        from tilefold.retrieval.encoding.tokens import DenseEncoding, TokenEncoding

        shared["source"] = model if model == _models.PACKAGED else _models.absolute(model)
        shared |= _common.known({name: asked[name] for name in ("storage", "dimension")})
        return (DenseEncoding if made == "dense" else TokenEncoding)(**shared)
    from tilefold.retrieval.encoding.sparse import SparseEncoding

    return SparseEncoding(
        top_k=asked["top_k"],
        special_tokens=asked["special_tokens"] is not False,
        **shared,
    )


def _texts(
    collection: Collection,
    data: str,
    queries: bool,
    split: Text,
    cuts: Passages | None,
) -> Mapping[str, str]:
    """Id -> text of the documents or of their passages, or of the queries."""
    if not queries:
        return collection.contents() if cuts is None else cuts.of(collection.documents)
    if not collection.queries:
        raise UsageError(f"--queries: {data} has no queries.")
    if split is None:
        return collection.queries
    _common.check_split(collection, split)
    return collection.split_queries(split)


def _has_vectors(output: Path) -> bool:
    """Whether an interrupted run kept a shard, or a part of one."""
    manifest = read_json(output / "manifest.json") or {}
    return bool(
        manifest.get("shards")
        or manifest.get("partial")
        or any(output.glob("part-*.receipt.json")),
    )


def _source(data: str, texts: Mapping[str, str] | None) -> Texts:
    """`texts`, or where they are None the documents of a table, which are not loaded."""
    from tilefold.retrieval.data.collection import documents_table
    from tilefold.retrieval.data.shard_texts import FileTexts, InMemoryTexts

    if texts is not None:
        return InMemoryTexts(texts)
    return FileTexts(documents_table(Path(data)), _common.fields_of_documents())


def _dry_run(
    model: Model,
    encoding: Encoding,
    texts: Texts,
    shard_size: int,
    workers: int,
    rate: Number,
) -> Values:
    """Estimate what encoding `texts` takes, from a sample of them; nothing is written but to a
    temporary folder.
    """
    import torch

    from tilefold.retrieval.encoding.truncation import token_counts

    began = time.monotonic()
    survey = texts.plan_shards(shard_size, sample=_SAMPLE)
    reading = time.monotonic() - began
    counts = token_counts(model, survey.sample)
    sample = [
        text for text, count in zip(survey.sample, counts, strict=True) if isinstance(count, int)
    ]
    if not sample:
        problem = next(
            _common.first_line(count) for count in counts if isinstance(count, Exception)
        )
        raise CommandError(
            f"--data: the tokenizer refuses all {len(counts)} texts of the sample ({problem}).",
        )
    tokens = sum(
        min(count, encoding.max_length or count) for count in counts if isinstance(count, int)
    ) / len(sample)
    device = model.device.type
    here, size = _encoded(model, encoding, sample[: _TIMED.get(device, 32)])
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{device} with {torch.get_num_threads()} threads"
    )
    per_second = here if rate is None else rate
    return {
        "texts": survey.count,
        "shards": len(survey.ranges),
        "shard_size": shard_size,
        "tokens": round(tokens * survey.count),
        "tokens_per_text": tokens,
        "sampled_texts": len(sample),
        "refused_texts": len(survey.sample) - len(sample),
        "bytes_per_text": size,
        "gigabytes": size * survey.count / 1e9,
        "texts_per_second": per_second,
        "rate_from": f"measured here on {where}" if rate is None else "given with --rate",
        "workers": workers,
        "hours": survey.count / (per_second * workers) / 3600,
        "reading_seconds": reading,
    }


def _encoded(model: Model, encoding: Encoding, sample: list[str]) -> tuple[float, float]:
    """Texts per second and bytes per text of a sample, encoded twice; the faster run counts."""
    from tilefold.retrieval.encoding.sparse import Output, encode_to_folder

    texts = {str(number): text for number, text in enumerate(sample)}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tilefold-dry-run-") as name:
        for turn in range(2):
            folder, began = Path(name) / str(turn), time.perf_counter()
            manifest = encode_to_folder(encoding, model, texts, Output(folder, len(texts)))
            seconds.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in folder.glob("part-*"))
    return len(texts) / min(seconds), size / max(1, manifest.n_documents)


def _said_of_dry_run(found: Values) -> str:
    refused = (
        f"; {found['refused_texts']} others are none that the tokenizer takes"
        if found["refused_texts"]
        else ""
    )
    one = "1 worker" if found["workers"] == 1 else f"{found['workers']} workers"
    return (
        f"{found['texts']:,} texts in {found['shards']:,} shards of {found['shard_size']:,}\n"
        f"{found['tokens']:,} tokens, about ({found['tokens_per_text']:.0f} each in {found['sampled_texts']} texts"
        f"{refused})\n"
        f"{_common.size(found['gigabytes'] * 1e9)}, about ({found['bytes_per_text']:,.0f} bytes each)\n"
        f"{_common.duration(found['hours'] * 3600)}, about, with {one} "
        f"({found['texts_per_second']:,.0f} texts per second each, {found['rate_from']})\n"
        "assumed: the other texts are like the sample; workers do not slow one another down. Starting them, loading\n"
        f"models and reading all texts once ({found['reading_seconds']:.1f} s here) come on top. Nothing was written."
    )
