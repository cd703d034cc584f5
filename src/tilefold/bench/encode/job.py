"""Texts to sparse vectors as users encode them, beside the stock encoder and the floors (`tilefold bench encode`).

Every way encodes the same documents of 240 tokens with the same model. The floors run on batches that lie on the
device before the clock starts: encoder alone, and encoder, head and rows without anything of the host around them. The
rows that ``encode_collection`` wrote are compared with those of the stock encoder, by error budget.
"""
# ruff: noqa: PLC0415 - sentence-transformers is imported when a case runs

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilefold.bench.encode import ways
from tilefold.bench.encode.gate import Truth
from tilefold.bench.encode.inputs import CASES, make_model, make_texts
from tilefold.bench.jobs import Job, JobCase, JobOptions, Row

STOCK, FLOOR = "stock encode_document", "encoder and head alone"


class Clock:
    """Times ways of encoding one after the other and makes their rows.

    Args:
        case: the model.
        device: where it runs; on a GPU every way runs once before, and the best of two counts.
    """

    def __init__(self, case: JobCase, device: torch.device) -> None:
        self.case, self.device = case, device
        self.per_second: dict[str, float] = {}

    def time(self, what: str, run: Callable[[], Any], texts: int, *, warm: bool = True) -> dict[str, object]:
        """Encode `texts` documents with `run`."""
        on_gpu = self.device.type == "cuda"
        if warm and on_gpu:
            run()
            torch.cuda.reset_peak_memory_stats()
        seconds = min(ways.seconds(run, self.device) for _ in range(2 if warm and on_gpu else 1))
        self.per_second[what] = texts / seconds
        peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else ""
        row = {"case": self.case.name, "what": what, "texts": texts, "seconds": seconds, "peak_mib": peak, "gate": "ok"}
        return row | {"docs_per_s": texts / seconds}

    def beside(self, row: dict[str, object]) -> dict[str, object]:
        """The row with its ratios to the stock encoder and to the floor."""
        mine = self.per_second[str(row["what"])]
        ratios = {"x_stock": mine / self.per_second[STOCK], "of_floor": mine / self.per_second[FLOOR]}
        return row | ratios


def run(case: JobCase, options: JobOptions) -> Iterator[Row]:
    """Rows of one model: the stock encoder, the floors, then ours."""
    from tilefold.integrations.sentence_transformers import accelerate, encode_sparse

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
        prepared = ways.Prepared(model, strings)
        shape: dict[str, object] = {"tokens": prepared.tokens / len(texts), "note": prepared.note}
        yield clock.time("the Rust tokenizer alone", lambda: prepared.rust(strings), len(texts), warm=False) | shape
        yield clock.time("tokenising alone", lambda: prepared.tokenise(strings), len(texts), warm=False) | shape
        yield clock.time("encoder alone", prepared.encoder, len(texts)) | shape
        yield clock.time(FLOOR, prepared.kernels, len(texts)) | shape
        prepared.batches.clear()
        written: list[Path] = []

        def to_parquet() -> None:
            written.append(home / f"vectors-{len(written)}")
            ways.to_parquet(model, texts, written[-1])

        row = clock.time("encode_collection, to Parquet", to_parquet, len(texts))
        verdict = truth.check_written(written[-1], list(texts))
        shape |= {"active": ways.mean_terms(written[-1]), "error": verdict.error, "allowed": verdict.allowed}
        shape |= {"gate": "ok" if verdict.passed else verdict.problem or "rows differ from those of the stock encoder"}
        busy = ways.busy_share(to_parquet, options.device)
        yield clock.beside(row) | shape | ({} if busy is None else {"gpu_busy": busy})
        document = {"batch_size": 256, "show_progress_bar": False}
        row = clock.time("encode_document, accelerated", lambda: model.encode_document(strings, **document), len(texts))
        yield clock.beside(row) | shape
        encode_all = partial(encode_sparse, model, strings, task="document")
        yield clock.beside(clock.time("encode_sparse", encode_all, len(texts), warm=False)) | shape


JOB = Job(
    "encode",
    CASES,
    ("case", "what"),
    ("what", "texts", "tokens", "active", "seconds", "docs_per_s", "x_stock", "of_floor", "gpu_busy", "peak_mib",
     "error", "allowed", "gate"),
    run,
)  # fmt: skip
