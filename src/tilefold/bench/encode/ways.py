"""What is timed: whole jobs, the stock encoder, and the floors of both halves of the machine."""
# ruff: noqa: PLC0415 - sentence-transformers is imported when a case runs

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tilefold.modules.fused_pooling import SparseOptions

WINDOW = 1024  # texts that are tokenised together: a shard


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one call, to the end of what it gave the device."""
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


class Prepared:
    """Batches as the stream cuts them, on the device before any clock runs.

    Args:
        model: accelerated, in eval mode.
        texts: to encode.
    """

    def __init__(self, model: Any, texts: Sequence[str]) -> None:
        from tilefold.integrations.sentence_transformers.stream import SparseStream, Work

        self.model = model
        self.stream = SparseStream(model, SparseOptions(None, 0.0), task="document", prompt=None)
        windows = self._windows(texts)
        self.tokens = 0
        self.batches: list[dict[str, Any]] = []
        for work in self.stream._works(self.stream._begun(windows)):
            if isinstance(work, Work):
                self._add(work)
        self.note = "" if self.stream.packed else "padded: this model does not take packed tokens here"

    def _add(self, work: Any) -> None:
        if work.ids is not None:
            self.tokens += len(work.ids.ids)
            self.batches.append(self.stream.packed_features(work.ids))
            return
        features = work.features
        self.tokens += int(features["attention_mask"].sum())
        device = self.stream.device
        self.batches.append({key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in features.items()})

    def encoder(self) -> None:
        """Encoder without head."""
        with torch.inference_mode():
            for batch in self.batches:
                self.model[0](dict(batch), task="document")

    def kernels(self) -> None:
        """Encoder, head, and rows of fixed capacity (on a CPU: CSR rows)."""
        from tilefold.integrations.sentence_transformers.stream import sparse_scores

        with torch.inference_mode(), sparse_scores(SparseOptions(None, 0.0), self.stream.capacity):
            for batch in self.batches:
                self.model(dict(batch), task="document")

    def tokenise(self, texts: Sequence[str]) -> None:
        """Texts to batches of packed ids, on all cores, as the stream does it."""
        for _ in self.stream.tokenised(self._windows(texts)):
            pass

    def rust(self, texts: Sequence[str]) -> None:
        """What the Rust tokenizer takes of that, without a look at what it gives."""
        for begun in self.stream._begun(self._windows(texts)):
            del begun

    @staticmethod
    def _windows(texts: Sequence[str]) -> Iterator[Any]:
        from tilefold.pipeline.rows import Window

        return (Window(texts[i : i + WINDOW]) for i in range(0, len(texts), WINDOW))


def to_parquet(model: Any, texts: dict[str, str], folder: Path) -> None:
    """``encode_collection`` into a new folder."""
    from tilefold.retrieval import encode_collection

    encode_collection(model, texts, folder)


def mean_terms(folder: Path) -> float:
    """Weights of a text in a folder of vectors, on average."""
    from tilefold.retrieval import read_manifest

    manifest = read_manifest(folder)
    return float(sum(int(shard["nonzeros"]) for shard in manifest.shards) / manifest.n_documents)


def busy_share(run: Callable[[], Any], device: torch.device) -> float | None:
    """Share of the time of ``run`` in which a kernel or a copy ran on the GPU, seen by torch's profiler."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        took = seconds(run, device)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
    busy = end = 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6 / took if spans else None
