"""Time the encoding and the search of page images on one GPU.

    python -m benchmarks.pages [--only encode] [--pages 512] [--tiny]

* ``encode``: pages per second of a model with the shape of ColPali and random weights, from image
  and PDF files to token vectors on disk, for several numbers of worker processes. The floor is the
  trunk alone: the forward pass over batches that are prepared and on the device. The rate of
  workers without the model says whether they are the bottleneck. CPU time is that of the main
  process, which receives pages, launches kernels and stores vectors; workers are not counted.
* ``search``: exact search of 100,000 pages of 1,030 int8 tokens by a query of 20 tokens. The floor
  is a copy of as many bytes on the device.

The gate of ``encode`` compares stored vectors with ``encode_document`` of sentence-transformers,
that of ``search`` the scores of the best pages with fp64. ``--tiny`` shows that all of it runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops import maxsim_topk, quantize_tokens
from tilefold.retrieval import encode_tokens, load_collection, open_tokens
from tilefold.retrieval.data.pages import DEFAULT_DPI, Page
from tilefold.retrieval.encoding.page_workers import prepare_ahead
from tilefold.retrieval.encoding.pages import EncodingStep, encode_features, image_features
from tilefold.testing.page_models import (
    COLPALI_3B,
    PageModelSize,
    build_page_model,
    save_page_model,
)
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

PAGE_TOKENS = 1030
QUERY_TOKENS = 20
DIMENSION = 128
A4_PIXELS = (1240, 1754)  # at 150 dots per inch
PAGES_PER_TASK = 16  # drawn by a process at a time
WORKERS = (0, 4, 8, 15)
BATCH_SIZES = (8, 32)
REPEATS = 7
MAX_ERROR = 2e-3  # relative, of vectors in fp16 and of scores of int8 tokens


def seconds_of(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median seconds of a call, until the device has finished, after a first call.

    Args:
        function: the call.
        repeats: the number of timed calls.
    """
    seconds: list[float] = []
    for _ in range(repeats + 1):
        synchronize()
        started = time.perf_counter()
        function()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def synchronize() -> None:
    """Wait until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load_page_model(folder: Path, size: PageModelSize, device: str) -> Any:
    """Return a model of random weights, in bf16 on a GPU and in fp32 on a CPU.

    Weights of billions of entries are drawn on the device and never saved: a model with the same
    processor and narrow layers is loaded from a folder, and the large one takes its place.

    Args:
        folder: folder of the narrow model.
        size: sizes of the model.
        device: ``"cuda"`` or ``"cpu"``.
    """
    from sentence_transformers import MultiVectorEncoder

    narrow_size = PageModelSize(
        patch_size=size.patch_size,
        image_size=size.image_size,
        embedding_dim=size.embedding_dim,
    )
    save_page_model(folder, "colpali", size=narrow_size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    encoder = MultiVectorEncoder(str(folder), device=device, model_kwargs={"dtype": dtype})
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model, _ = build_page_model("colpali", size=size)
    finally:
        torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # as sentence-transformers loads models
    encoder[0].model = model.eval()
    return encoder


def save_pages(folder: Path, n_pages: int, page_size: tuple[int, int]) -> None:
    """Draw pages by several processes, half of them in PDFs and half as images.

    Args:
        folder: folder of the pages.
        n_pages: number of pages.
        page_size: width and height in pixels.
    """
    starts = range(0, n_pages, PAGES_PER_TASK)
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as executor:
        tasks = [
            executor.submit(
                save_part,
                folder / f"part-{start}",
                min(PAGES_PER_TASK, n_pages - start),
                page_size,
                seed=start,
            )
            for start in starts
        ]
        for task in tasks:
            task.result()


def save_part(folder: Path, n_pages: int, page_size: tuple[int, int], seed: int) -> None:
    """Draw some of the pages.

    Args:
        folder: folder of these pages.
        n_pages: number of pages.
        page_size: width and height in pixels.
        seed: seed of the words.
    """
    pages = random_pages(
        n_pages,
        random_words(500),
        size=page_size,
        font_size=page_size[0] // 30,
        seed=seed,
    )
    save_page_collection(folder, pages, pages_per_pdf=PAGES_PER_TASK // 2, pdf_dpi=DEFAULT_DPI)


def time_encoding(
    folder: Path,
    n_pages: int,
    *,
    batch_sizes: Sequence[int],
    worker_counts: Sequence[int],
    tiny: bool,
    device: str,
) -> None:
    """Print pages per second of the trunk alone, and from files to token vectors on disk.

    Args:
        folder: folder of all files.
        n_pages: number of pages.
        batch_sizes: numbers of pages of a forward pass.
        worker_counts: numbers of processes that decode pages.
        tiny: whether the model and the pages are small.
        device: ``"cuda"`` or ``"cpu"``.
    """
    size = PageModelSize() if tiny else COLPALI_3B
    page_size = (124, 175) if tiny else A4_PIXELS
    save_pages(folder / "pages", n_pages, page_size)
    contents = dict(load_collection(folder / "pages", folder / "cache").content())
    pages = list(contents.values())
    model = load_page_model(folder / "model", size, device)
    check_vectors(model, dict(list(contents.items())[:4]), folder / "gate")
    for batch_size in batch_sizes:
        floor = trunk_rate(model, pages[:batch_size])
        print(f"batch {batch_size}: trunk alone {floor:.1f} pages/s")
        for n_workers in worker_counts:
            alone_started = ProcessTimes.now()
            prepare_pages(model, pages, batch_size, n_workers)
            alone = ProcessTimes.now() - alone_started
            output = folder / f"vectors-{batch_size}-{n_workers}"
            started = ProcessTimes.now()
            encode_tokens(
                model,
                contents,
                output,
                storage="int8",
                batch_size=batch_size,
                page_workers=n_workers,
            )
            encoding = ProcessTimes.now() - started
            rate = n_pages / encoding.seconds
            print(
                f"  {n_workers:2d} workers: {rate:.1f} pages/s, {rate / floor:.0%} of the trunk, "
                f"{1e3 * encoding.cpu_seconds / n_pages:.1f} ms of CPU time per page; "
                f"pages alone {n_pages / alone.seconds:.1f} pages/s, "
                f"{1e3 * alone.cpu_seconds / n_pages:.1f} ms",
                flush=True,
            )


class ProcessTimes(NamedTuple):
    """Clocks of this process, without its workers.

    Attributes:
        seconds: time on the wall.
        cpu_seconds: time of all threads on a core.
    """

    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> ProcessTimes:
        """Read the clocks."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, earlier: ProcessTimes) -> ProcessTimes:
        """Return the time since an earlier reading."""
        return ProcessTimes(
            self.seconds - earlier.seconds,
            self.cpu_seconds - earlier.cpu_seconds,
        )


def trunk_rate(model: Any, pages: Sequence[Page]) -> float:
    """Return pages per second of the forward pass over a batch that is on the device.

    Args:
        model: the model.
        pages: the pages of the batch.
    """
    features = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in image_features(model, [page.image() for page in pages]).items()
    }
    return len(pages) / seconds_of(lambda: encode_features(model, features))


def prepare_pages(
    model: Any,
    pages: Sequence[Page],
    batch_size: int,
    n_workers: int,
) -> None:
    """Let processes decode and prepare pages for a model.

    Args:
        model: the model, which does not run.
        pages: the pages.
        batch_size: number of pages of a batch.
        n_workers: number of processes.
    """
    steps = [
        EncodingStep(0, pages, range(start, min(start + batch_size, len(pages))))
        for start in range(0, len(pages), batch_size)
    ]
    with prepare_ahead(model, steps, DEFAULT_DPI, n_workers) as prepared_steps:
        for _, prepared in prepared_steps:
            if prepared is None or prepared.failures:
                raise RuntimeError("some pages could not be prepared")


def check_vectors(model: Any, contents: dict[str, Any], output: Path) -> None:
    """Compare the stored vectors of a few pages with those of sentence-transformers.

    Args:
        model: an accelerated model.
        contents: pages by id.
        output: folder for the vectors.

    Raises:
        RuntimeError: if the vectors differ.
    """
    images = [page.image() for page in contents.values()]
    expected = torch.cat(model.encode_document(images, batch_size=len(images))).float().cpu()
    encode_tokens(model, contents, output, batch_size=len(images))
    stored = open_tokens(output).read(list(contents)).values.float()
    error = float((stored - expected).norm() / expected.norm())
    print(f"gate of encode: relative error {error:.1e}")
    if not error <= MAX_ERROR:  # NaN is refused, too
        raise RuntimeError("the vectors differ from those of sentence-transformers")


def time_search(n_pages: int, device: str) -> None:
    """Print the time of an exact search, and the share of the rate of copies.

    Args:
        n_pages: the number of pages.
        device: the device.
    """
    generator = torch.Generator(device).manual_seed(0)
    parts = []
    for start in range(0, n_pages, 1000):
        shape = (min(1000, n_pages - start), PAGE_TOKENS, DIMENSION)
        tokens = torch.randn(shape, generator=generator, device=device)
        parts.append(quantize_tokens(torch.nn.functional.normalize(tokens, dim=-1), "int8"))
    documents = type(parts[0])(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
    )
    del parts
    query = torch.randn(1, QUERY_TOKENS, DIMENSION, generator=generator, device=device)
    query = torch.nn.functional.normalize(query, dim=-1).half()
    scores, best = maxsim_topk(query, documents, k=10)
    check_scores(query, documents, scores, best)
    seconds = seconds_of(lambda: maxsim_topk(query, documents, k=10))
    n_bytes = documents.values.numel() + documents.scales.numel() * documents.scales.element_size()
    source = documents.values.view(-1)[: documents.values.numel() // 2]
    target = torch.empty_like(source)
    # A copy reads and writes each byte.
    copy_rate = 2 * source.numel() / seconds_of(lambda: target.copy_(source))
    rate = n_bytes / seconds
    print(
        f"search of {n_pages:,} pages, {n_bytes / 1e9:.1f} GB: {1e3 * seconds:.2f} ms, "
        f"{rate / 1e12:.2f} TB/s, {rate / copy_rate:.0%} of copies at {copy_rate / 1e12:.2f} TB/s",
    )


def check_scores(query: Tensor, documents: Any, scores: Tensor, best: Tensor) -> None:
    """Compare the scores of the best pages with fp64.

    Args:
        query: token vectors of the query.
        documents: int8 token vectors of all pages.
        scores: scores of the best pages, ``[1, k]``.
        best: numbers of the best pages, ``[1, k]``.

    Raises:
        RuntimeError: if they differ.
    """
    chosen = best[0]
    tokens = documents.values[chosen].double() * documents.scales[chosen].double().unsqueeze(-1)
    expected = (query[0].double() @ tokens.transpose(1, 2)).amax(dim=2).sum(dim=1)
    error = float((scores[0].double() - expected).abs().max() / expected.abs().max())
    print(f"gate of search: relative error {error:.1e}")
    if not error <= MAX_ERROR:  # NaN is refused, too
        raise RuntimeError("the scores differ from those in fp64")


def main() -> None:
    """Run the benchmarks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("encode", "search"))
    parser.add_argument("--pages", type=int, default=512, help="number of encoded pages")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--indexed-pages", type=int, default=100_000)
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    if options.only in (None, "search"):
        time_search(options.indexed_pages, device)
    if options.only in (None, "encode"):
        with tempfile.TemporaryDirectory(prefix="tilefold-pages-") as folder:
            time_encoding(
                Path(folder),
                options.pages,
                batch_sizes=options.batch_sizes,
                worker_counts=options.workers,
                tiny=options.tiny,
                device=device,
            )


if __name__ == "__main__":
    main()
