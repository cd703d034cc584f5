"""Texts to sparse vectors as users encode them, beside the stock encoder and the floors.

Every way encodes the same documents of 240 tokens with the same model. The floors run on batches
that lie on the device before the clock starts: encoder alone, and encoder, head and rows without
anything of the host around them. The rows that ``encode_collection`` wrote are compared with those
of the stock encoder, by error budget.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.encode_data import CASES, make_model, make_texts
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from benchmarks.train_run import busy_seconds
from tilefold.modules.fused_pooling import SparseOptions

STOCK, FLOOR = "stock encode_document", "encoder and head alone"
WINDOW = 1024  # texts that are tokenised together: a shard
CHECKED = 96  # texts of a case that the gate compares
FACTOR = (
    2.0  # over the stock encoder's own error against fp32: products are summed in another order
)
FP32 = 2e-4  # of the largest weight, where the stock encoder is the truth itself


class Truth:
    """Rows of the stock model for the first texts, in fp32 and in the model's dtype.

    Args:
        model: a stock SparseEncoder, not accelerated.
        texts: id -> text.
    """

    def __init__(self, model: Any, texts: Mapping[str, str]) -> None:
        self.ids = list(texts)
        chosen = [texts[name] for name in self.ids[:CHECKED]]
        self.rows = stock = _dense(model, chosen)
        self.allowed = FP32 * float(stock.abs().max())
        if next(model.parameters()).dtype != torch.float32:
            self.rows = _dense(copy.deepcopy(model).float(), chosen)
            self.allowed = FACTOR * float((stock - self.rows).abs().max())

    def check(self, folder: Path) -> dict[str, object]:
        """The error of a folder of vectors, what was allowed, and whether the gate is open."""
        from tilefold.retrieval import read_vectors

        vectors = read_vectors(folder)
        if vectors.ids != self.ids:
            gate = f"expected {len(self.ids)} ids in their order, got {len(vectors.ids)} ids"
            return {"error": float("nan"), "allowed": self.allowed, "gate": gate}
        rows = torch.zeros_like(self.rows)
        for i in range(len(rows)):
            terms, weights = vectors.row(i)
            rows[i, torch.from_numpy(terms).long()] = torch.from_numpy(weights)
        error = float((rows - self.rows).abs().max())
        gate = "ok" if error <= self.allowed else "rows differ from those of the stock encoder"
        return {"error": error, "allowed": self.allowed, "gate": gate}


def _dense(model: Any, texts: list[str]) -> Tensor:
    """``[N, V]`` fp32 on the CPU."""
    found = model.encode_document(
        texts,
        batch_size=8,
        convert_to_sparse_tensor=False,
        show_progress_bar=False,
    )
    rows: Tensor = found.float().cpu()
    return rows


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, to the end of what it gave the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def busy_share(run: Callable[[], Any], device: torch.device) -> float | None:
    """Share of the time of ``run`` in which a kernel or a copy ran on the GPU, seen by torch's
    profiler.
    """
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        took = seconds_of(run, device)
    return busy_seconds(profiler) / took or None


class Prepared:
    """Batches as the stream cuts them, on the device before any clock runs.

    Args:
        model: accelerated, in eval mode.
        texts: to encode.
    """

    def __init__(self, model: Any, texts: Sequence[str]) -> None:
        from tilefold.integrations.sentence_transformers.streaming.stream import (
            SparseStream,
            TokenBatch,
        )

        self.model = model
        self.stream = SparseStream(model, SparseOptions(None, 0.0), task="document", prompt=None)
        self.tokens = 0
        self.batches: list[dict[str, Any]] = []
        tokenized = filter(None, self.stream._tokenize_windows(self._windows(texts)))
        for batch in self.stream._divide_windows(tokenized):
            if isinstance(batch, TokenBatch):
                self._add(batch)
        self.note = (
            "" if self.stream.packed else "padded: this model does not take packed tokens here"
        )

    def _add(self, work: Any) -> None:
        if work.ids is not None:
            self.tokens += len(work.ids.ids)
            self.batches.append(self.stream.packed_features(work.ids))
            return
        self.tokens += int(work.features["attention_mask"].sum())
        device = self.stream.device
        moved = {
            key: v.to(device) if isinstance(v, Tensor) else v for key, v in work.features.items()
        }
        self.batches.append(moved)

    def encoder(self) -> None:
        """Encoder without head."""
        with torch.inference_mode():
            for batch in self.batches:
                self.model[0](dict(batch), task="document")

    def kernels(self) -> None:
        """Encoder, head, and rows of fixed capacity (on a CPU: CSR rows)."""
        from tilefold.integrations.sentence_transformers._pooling import sparse_scores

        with torch.inference_mode(), sparse_scores(SparseOptions(None, 0.0), self.stream.capacity):
            for batch in self.batches:
                self.model(dict(batch), task="document")

    def tokenise(self, texts: Sequence[str]) -> None:
        """Texts to batches of packed ids, on all cores, as the stream does it."""
        with self.stream.token_batches(self._windows(texts)) as batches:
            for _ in batches:
                pass

    def rust(self, texts: Sequence[str]) -> None:
        """The Rust tokenizer's part of that, without a look at its results."""
        for _ in self.stream._tokenize_windows(self._windows(texts)):
            pass

    @staticmethod
    def _windows(texts: Sequence[str]) -> Iterator[Any]:
        from tilefold.pipeline.rows import Window

        return (Window(texts[i : i + WINDOW]) for i in range(0, len(texts), WINDOW))


class Clock:
    """Times ways of encoding one after the other; on a GPU every way runs once before, and the best
    of two counts.
    """

    def __init__(self, case: JobCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.per_second: dict[str, float] = {}

    def time(
        self,
        what: str,
        run: Callable[[], Any],
        texts: int,
        *,
        warm: bool = True,
    ) -> dict[str, object]:
        """The row of encoding `texts` documents with `run`."""
        on_gpu = self.device.type == "cuda"
        if warm and on_gpu:
            run()
            torch.cuda.reset_peak_memory_stats()
        seconds = min(seconds_of(run, self.device) for _ in range(2 if warm and on_gpu else 1))
        self.per_second[what] = texts / seconds
        peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else ""
        row = {
            "case": self.case.name,
            "what": what,
            "texts": texts,
            "seconds": seconds,
            "peak_mib": peak,
            "gate": "ok",
        }
        return row | {"docs_per_s": texts / seconds}

    def beside(self, row: dict[str, object]) -> dict[str, object]:
        """The row with its ratios to the stock encoder and to the floor."""
        mine = self.per_second[str(row["what"])]
        return row | {
            "x_stock": mine / self.per_second[STOCK],
            "of_floor": mine / self.per_second[FLOOR],
        }


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of one model: the stock encoder, the floors, then ours."""
    from tilefold.integrations.sentence_transformers import accelerate, encode_sparse
    from tilefold.retrieval import encode_collection, read_manifest

    texts = {f"d{i}": text for i, text in enumerate(make_texts(case.numbers["texts"]))}
    strings = list(texts.values())
    clock = Clock(case, options.device)
    with tempfile.TemporaryDirectory(prefix="tilefold-encode-") as name:
        home = Path(name)
        (home / "model").mkdir()
        model = make_model(case, strings, home / "model", options.device)
        truth = Truth(model, texts)
        batch = case.numbers["stock_batch"]
        stock: dict[str, Any] = {"batch_size": batch, "show_progress_bar": False}
        some = strings[: case.numbers["stock_texts"]]
        model.encode_document(some[: 2 * batch], **stock)
        yield clock.time(STOCK, lambda: model.encode_document(some, **stock), len(some), warm=False)
        accelerate(model)
        model.eval()
        prepared = Prepared(model, strings)
        shape: dict[str, object] = {"tokens": prepared.tokens / len(texts), "note": prepared.note}
        yield (
            clock.time(
                "the Rust tokenizer alone",
                lambda: prepared.rust(strings),
                len(texts),
                warm=False,
            )
            | shape
        )
        yield (
            clock.time(
                "tokenising alone",
                lambda: prepared.tokenise(strings),
                len(texts),
                warm=False,
            )
            | shape
        )
        yield clock.time("encoder alone", prepared.encoder, len(texts)) | shape
        yield clock.time(FLOOR, prepared.kernels, len(texts)) | shape
        prepared.batches.clear()
        written: list[Path] = []

        def to_parquet() -> None:
            written.append(home / f"vectors-{len(written)}")
            encode_collection(model, texts, written[-1])

        row = clock.time("encode_collection, to Parquet", to_parquet, len(texts))
        shards = read_manifest(written[-1]).shards
        shape |= {
            "active": sum(int(shard["nonzeros"]) for shard in shards) / len(texts),
        } | truth.check(written[-1])
        busy = busy_share(to_parquet, options.device)
        yield clock.beside(row) | shape | ({} if busy is None else {"gpu_busy": busy})
        document = {"batch_size": 256, "show_progress_bar": False}
        row = clock.time(
            "encode_document, accelerated",
            lambda: model.encode_document(strings, **document),
            len(texts),
        )
        yield clock.beside(row) | shape
        encode_all = partial(encode_sparse, model, strings, task="document")
        yield clock.beside(clock.time("encode_sparse", encode_all, len(texts), warm=False)) | shape


JOB = Job(
    "encode",
    CASES,
    ("case", "what"),
    (
        "what",
        "texts",
        "tokens",
        "active",
        "seconds",
        "docs_per_s",
        "x_stock",
        "of_floor",
        "gpu_busy",
        "peak_mib",
        "error",
        "allowed",
        "gate",
    ),
    run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
