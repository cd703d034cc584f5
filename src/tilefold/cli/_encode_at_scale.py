"""The engines of ``encode``, and its dry run."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilefold._typing import Model
from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from tilefold.retrieval.encodings import Encoding
    from tilefold.retrieval.text_ranges import Texts

ENGINES = ("local", "ray")
_SAMPLE = 512  # texts whose tokens a dry run counts, about
_TIMED = {"cpu": 32, "cuda": 4096}  # texts that it encodes, at most


@functools.cache
def _load(name: str, kinds: tuple[str, ...]) -> Any:
    """The model of a worker, which loads it once."""
    return _models.load_model(name, kinds=kinds, fast=kinds)[0]


def absolute(model: str) -> str:
    """The name of a model as other machines know it."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def source(data: str, texts: Mapping[str, str] | None) -> Texts:
    """`texts`, or where they are None the documents of a table, which are not loaded."""
    from tilefold.retrieval.collection import documents_table
    from tilefold.retrieval.text_ranges import HeldTexts, StoredTexts

    return HeldTexts(texts) if texts is not None else StoredTexts(documents_table(Path(data)))


def on_ray(
    model: str,
    made: str,
    texts: Texts,
    output: Path,
    encoding: Encoding,
    where: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """The manifest of vectors that workers wrote; `where` are fields of ``RayCluster``."""
    from tilefold.retrieval.on_ray import RayCluster, encode_on_ray

    load = functools.partial(_load, absolute(model), (made,))
    return encode_on_ray(load, texts, output, encoding, cluster=RayCluster(**where), **options)


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run; the fields are those of ``--json``."""

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


def dry_run(
    model: Model, encoding: Encoding, texts: Texts, shard_size: int, workers: int, rate: float | None
) -> DryRun:
    """Estimate what encoding `texts` takes, from a sample of them; nothing is written but to a temporary folder.

    Raises:
        CommandError: the tokenizer takes no text of the sample.
    """
    from tilefold.retrieval.truncation import token_counts

    began = time.monotonic()
    survey = texts.survey(shard_size, sample=_SAMPLE)
    reading = time.monotonic() - began
    counts = token_counts(model, survey.sample)
    sample = [text for text, count in zip(survey.sample, counts, strict=True) if isinstance(count, int)]
    if not sample:
        problem = next(_common.first_line(count) for count in counts if isinstance(count, Exception))
        raise _common.CommandError(f"--data: the tokenizer refuses all {len(counts)} texts of the sample ({problem}).")
    tokens = sum(count for count in counts if isinstance(count, int)) / len(sample)
    device = model.device.type
    here, size = _encoded(model, encoding, sample[: _TIMED.get(device, 32)])
    measured = f"measured here on {device_name(device)}" if rate is None else "given with --rate"
    per_second = here if rate is None else rate
    return DryRun(
        texts=survey.count,
        shards=len(survey.ranges),
        shard_size=shard_size,
        tokens=round(tokens * survey.count),
        tokens_per_text=tokens,
        sampled_texts=len(sample),
        refused_texts=len(survey.sample) - len(sample),
        bytes_per_text=size,
        gigabytes=size * survey.count / 1e9,
        texts_per_second=per_second,
        rate_from=measured,
        workers=workers,
        hours=survey.count / (per_second * workers) / 3600,
        reading_seconds=reading,
    )


def device_name(kind: str) -> str:
    """The device of this machine, in words."""
    import torch

    if kind == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{kind} with {torch.get_num_threads()} threads"


def _encoded(model: Model, encoding: Encoding, sample: list[str]) -> tuple[float, float]:
    """Texts per second and bytes per text of a sample, encoded twice; the faster run counts."""
    from tilefold.retrieval.encodings import Output, encode_to_folder

    texts = {str(number): text for number, text in enumerate(sample)}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tilefold-dry-run-") as name:
        for turn in range(2):
            folder, began = Path(name) / str(turn), time.perf_counter()
            manifest = encode_to_folder(encoding, model, texts, Output(folder, len(texts)))
            seconds.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in folder.glob("part-*"))
    return len(texts) / min(seconds), size / max(1, manifest.n_documents)


def print_dry_run(found: DryRun) -> None:
    """Lines for people."""
    refused = f"; {found.refused_texts} others are none that the tokenizer takes" if found.refused_texts else ""
    one = "1 worker" if found.workers == 1 else f"{found.workers} workers"
    typer.echo(
        f"{found.texts:,} texts in {found.shards:,} shards of {found.shard_size:,}\n"
        f"{found.tokens:,} tokens, about ({found.tokens_per_text:.0f} each in {found.sampled_texts} texts{refused})\n"
        f"{found.gigabytes:.3g} GB, about ({found.bytes_per_text:,.0f} bytes each)\n"
        f"{found.hours:.3g} hours, about, with {one} "
        f"({found.texts_per_second:,.0f} texts per second each, {found.rate_from})\n"
        "assumed: the other texts are like the sample; workers do not slow one another down. Starting them, loading\n"
        f"models and reading all texts once ({found.reading_seconds:.1f} s here) come on top. Nothing was written."
    )
