"""Time how texts become sparse vectors, from strings to files.

    python -m benchmarks.encode --shape bert-base

Timed: documents of 240 tokens with one model, by the wall clock, to the end of what the device got.
The ways are to Parquet (``encode_collection``), to a matrix (``encode_document``) and to tensors
(``encode_sparse``).

Baseline: the stock encoder of sentence-transformers. The floor is the encoder and the head alone,
on batches that are on the device before the clock starts.

Gate: the rows that ``encode_collection`` wrote are compared with those of the stock encoder. Their
error must be within that of the stock encoder itself against fp32, times a small factor.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.encode_data import CASES, make_model, make_texts
from benchmarks.job import Job, JobCase, JobOptions, Row, main
from benchmarks.train_run import busy_seconds
from tilefold.modules.fused_pooling import SparseOptions

STOCK = "stock encode_document"
FLOOR = "encoder and head alone"
# texts that are tokenized together, as of a shard
WINDOW = 1024
# texts of a case that the gate compares
CHECKED = 96
# allowed error over that of the stock encoder against fp32: products are summed in another order
ERROR_FACTOR = 2.0
# allowed error of an fp32 model as a share of the largest weight
FP32_ERROR = 2e-4
MIB = 2**20


class Truth:
    """Sparse rows of the stock model in fp32, and the error that other rows may have.

    Args:
        model: a stock SparseEncoder, not accelerated.
        texts: texts by id. The first :data:`CHECKED` are encoded.
    """

    def __init__(self, model: Any, texts: Mapping[str, str]) -> None:
        """Encode the first texts with the stock model, in fp32 if it is in 16 bits.

        Args:
            model: the stock model.
            texts: texts by id.
        """
        self.ids = list(texts)
        checked_texts = [texts[name] for name in self.ids[:CHECKED]]
        stock_rows = _dense_rows(model, checked_texts)
        if next(model.parameters()).dtype == torch.float32:
            self.rows = stock_rows
            self.allowed = FP32_ERROR * float(stock_rows.abs().max())
        else:
            self.rows = _dense_rows(copy.deepcopy(model).float(), checked_texts)
            self.allowed = ERROR_FACTOR * float((stock_rows - self.rows).abs().max())

    def check(self, folder: Path) -> dict[str, object]:
        """Compare a folder of sparse vectors with the rows.

        Returns:
            Cells of the results: the largest error, the allowed one, and the gate.
        """
        from tilefold.retrieval import read_vectors

        vectors = read_vectors(folder)
        if vectors.ids != self.ids:
            gate = f"expected {len(self.ids)} ids in their order, got {len(vectors.ids)} ids"
            return {"error": float("nan"), "allowed": self.allowed, "gate": gate}
        rows = torch.zeros_like(self.rows)
        for position in range(len(rows)):
            terms, weights = vectors.row(position)
            rows[position, torch.from_numpy(terms).long()] = torch.from_numpy(weights)
        error = float((rows - self.rows).abs().max())
        gate = "ok" if error <= self.allowed else "rows differ from those of the stock encoder"
        return {"error": error, "allowed": self.allowed, "gate": gate}


def _dense_rows(model: Any, texts: list[str]) -> Tensor:
    """Encode texts as dense rows ``[N, V]``, fp32 on the CPU."""
    scores: Tensor = model.encode_document(
        texts,
        batch_size=8,
        convert_to_sparse_tensor=False,
        show_progress_bar=False,
    )
    return scores.float().cpu()


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Time one call, until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def busy_share(run: Callable[[], Any], device: torch.device) -> float | None:
    """Measure the share of the time of a call in which the GPU runs a kernel or a copy.

    Args:
        run: the call.
        device: its device.

    Returns:
        The share by torch's profiler, or None on a CPU, or if nothing ran.
    """
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        seconds = seconds_of(run, device)
    return busy_seconds(profiler) / seconds or None


class PreparedBatches:
    """Tokenized batches of texts on the device, for the floors.

    Args:
        model: an accelerated SparseEncoder in eval mode.
        texts: the texts.

    Attributes:
        batches: the features of each batch.
        tokens: the number of tokens of all texts.
        note: a remark for the results.
    """

    def __init__(self, model: Any, texts: Sequence[str]) -> None:
        """Tokenise texts, and copy all batches to the device.

        Args:
            model: an accelerated model.
            texts: the texts.
        """
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
        self.note = ""
        if not self.stream.packed:
            self.note = "padded: this model does not take packed tokens here"

    def _add(self, batch: Any) -> None:
        """Move a batch of the stream to the device."""
        if batch.ids is not None:
            self.tokens += len(batch.ids.ids)
            self.batches.append(self.stream.packed_features(batch.ids))
            return
        self.tokens += int(batch.features["attention_mask"].sum())
        features = {}
        for name, value in batch.features.items():
            is_tensor = isinstance(value, Tensor)
            features[name] = value.to(self.stream.device) if is_tensor else value
        self.batches.append(features)

    def run_encoder(self) -> None:
        """Run the encoder without the head."""
        with torch.inference_mode():
            for batch in self.batches:
                self.model[0](dict(batch), task="document")

    def run_model(self) -> None:
        """Run the encoder and the head, which writes rows of fixed capacity (CSR on a CPU)."""
        from tilefold.integrations.sentence_transformers._pooling import sparse_scores

        with torch.inference_mode(), sparse_scores(SparseOptions(None, 0.0), self.stream.capacity):
            for batch in self.batches:
                self.model(dict(batch), task="document")

    def tokenize(self, texts: Sequence[str]) -> None:
        """Make batches of packed token ids on all cores, as the stream does."""
        with self.stream.token_batches(self._windows(texts)) as batches:
            for _ in batches:
                pass

    def run_tokenizer(self, texts: Sequence[str]) -> None:
        """Run the Rust tokenizer, and do not use its results."""
        for _ in self.stream._tokenize_windows(self._windows(texts)):
            pass

    @staticmethod
    def _windows(texts: Sequence[str]) -> Iterator[Any]:
        """Divide texts into windows of the stream."""
        from tilefold.pipeline.rows import Window

        for start in range(0, len(texts), WINDOW):
            yield Window(texts[start : start + WINDOW])


class Clock:
    """Times ways of encoding, and makes their rows.

    Args:
        case: the case.
        device: the device.
    """

    def __init__(self, case: JobCase, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.texts_per_second: dict[str, float] = {}

    def time(
        self,
        name: str,
        run: Callable[[], Any],
        texts: int,
        *,
        warm: bool = True,
    ) -> dict[str, object]:
        """Time a way of encoding.

        Args:
            name: the name of the way.
            run: a function that encodes the documents.
            texts: the number of documents.
            warm: on a GPU, whether to run once before, and to count the faster of two runs.

        Returns:
            The row of the results.
        """
        on_gpu = self.device.type == "cuda"
        n_runs = 1
        if warm and on_gpu:
            n_runs = 2
            run()
            torch.cuda.reset_peak_memory_stats()
        seconds = min(seconds_of(run, self.device) for _ in range(n_runs))
        self.texts_per_second[name] = texts / seconds
        return {
            "case": self.case.name,
            "what": name,
            "texts": texts,
            "seconds": seconds,
            "peak_mib": torch.cuda.max_memory_allocated() / MIB if on_gpu else "",
            "gate": "ok",
            "docs_per_s": texts / seconds,
        }

    def with_ratios(self, row: dict[str, object]) -> dict[str, object]:
        """Return a row with the ratios of its rate to the stock encoder and to the floor."""
        rate = self.texts_per_second[str(row["what"])]
        return {
            **row,
            "x_stock": rate / self.texts_per_second[STOCK],
            "of_floor": rate / self.texts_per_second[FLOOR],
        }


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Time the stock encoder, the floors, then tilefold.

    Args:
        case: the case.
        options: the options of the command line.

    Yields:
        The rows of a model.
    """
    from tilefold.integrations.sentence_transformers import accelerate

    texts = {f"d{i}": text for i, text in enumerate(make_texts(case.numbers["texts"]))}
    clock = Clock(case, options.device)
    with tempfile.TemporaryDirectory(prefix="tilefold-encode-") as name:
        folder = Path(name)
        model_folder = folder / "model"
        model_folder.mkdir()
        model = make_model(case, list(texts.values()), model_folder, options.device)
        truth = Truth(model, texts)
        yield _time_stock(clock, model, list(texts.values()))
        accelerate(model)
        model.eval()
        prepared = PreparedBatches(model, list(texts.values()))
        facts: dict[str, object] = {
            "tokens": prepared.tokens / len(texts),
            "note": prepared.note,
        }
        for row in _time_floors(clock, prepared, list(texts.values())):
            yield row | facts
        # their memory is free for tilefold
        prepared.batches.clear()
        for row in _time_tilefold(clock, model, texts, truth, folder):
            yield row | facts


def _time_stock(clock: Clock, model: Any, texts: list[str]) -> dict[str, object]:
    """Time the stock encoder on the first texts, since it is slow.

    Args:
        clock: measures the times.
        model: the stock model.
        texts: all texts.
    """
    batch_size = clock.case.numbers["stock_batch"]
    stock_texts = texts[: clock.case.numbers["stock_texts"]]

    def encode(some: list[str]) -> None:
        model.encode_document(some, batch_size=batch_size, show_progress_bar=False)

    encode(stock_texts[: 2 * batch_size])
    return clock.time(STOCK, lambda: encode(stock_texts), len(stock_texts), warm=False)


def _time_floors(
    clock: Clock,
    prepared: PreparedBatches,
    texts: list[str],
) -> Iterator[dict[str, object]]:
    """Time the parts of encoding one by one, and yield their rows.

    Args:
        clock: measures the times.
        prepared: the model with batches of texts that are tokenised already.
        texts: all texts.
    """
    yield clock.time(
        "the Rust tokenizer alone",
        lambda: prepared.run_tokenizer(texts),
        len(texts),
        warm=False,
    )
    yield clock.time("tokenising alone", lambda: prepared.tokenize(texts), len(texts), warm=False)
    yield clock.time("encoder alone", prepared.run_encoder, len(texts))
    yield clock.time(FLOOR, prepared.run_model, len(texts))


def _time_tilefold(
    clock: Clock,
    model: Any,
    texts: dict[str, str],
    truth: Truth,
    folder: Path,
) -> Iterator[dict[str, object]]:
    """Time tilefold's ways of encoding.

    Args:
        clock: has timed the stock encoder and the floors.
        model: an accelerated SparseEncoder.
        texts: texts by id.
        truth: the exact vectors, which check the written ones.
        folder: the folder for the vectors.

    Yields:
        The rows. All carry the result of the gate.
    """
    from tilefold.integrations.sentence_transformers import encode_sparse
    from tilefold.retrieval import encode_collection, read_manifest

    strings = list(texts.values())
    outputs: list[Path] = []

    def to_parquet() -> None:
        outputs.append(folder / f"vectors-{len(outputs)}")
        encode_collection(model, texts, outputs[-1])

    def to_matrix() -> None:
        model.encode_document(strings, batch_size=256, show_progress_bar=False)

    def to_tensors() -> None:
        encode_sparse(model, strings, task="document")

    row = clock.time("encode_collection, to Parquet", to_parquet, len(texts))
    shards = read_manifest(outputs[-1]).shards
    n_weights = sum(int(shard["nonzeros"]) for shard in shards)
    checks = {"active": n_weights / len(texts), **truth.check(outputs[-1])}
    busy = busy_share(to_parquet, clock.device)
    row = clock.with_ratios(row) | checks
    if busy is not None:
        row["gpu_busy"] = busy
    yield row
    row = clock.time("encode_document, accelerated", to_matrix, len(texts))
    yield clock.with_ratios(row) | checks
    row = clock.time("encode_sparse", to_tensors, len(texts), warm=False)
    yield clock.with_ratios(row) | checks


JOB = Job(
    name="encode",
    cases=CASES,
    key=("case", "what"),
    shown=(
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
    run=run,
)

if __name__ == "__main__":
    sys.exit(main(JOB, __doc__))
