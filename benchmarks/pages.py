"""Time the encoding and the search of page images on one GPU.

    python -m benchmarks.pages [--only encode] [--pages 512] [--tiny]

* ``encode``: pages per second of a model with the shape of ColPali and random weights, from image
  and PDF files to token vectors on disk, for several numbers of worker processes. The floor is the
  trunk alone: the forward pass over batches that are prepared and on the device.
* ``search``: exact search of 100,000 pages of 1,030 int8 tokens by a query of 20 tokens. The floor
  is a copy of as many bytes on the device.

The gate of ``encode`` compares stored vectors with ``encode_document`` of sentence-transformers,
that of ``search`` the scores of the best pages with fp64. ``--tiny`` shows that all of it runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilefold.ops import maxsim_topk, quantize_tokens
from tilefold.retrieval import encode_tokens, load_collection, open_tokens
from tilefold.retrieval.encoding.pages import encode_features, image_features
from tilefold.testing.page_models import COLPALI_3B, PageModelSize, save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

PAGE_TOKENS = 1030
QUERY_TOKENS = 20
DIMENSION = 128
WORKERS = (0, 4, 8, 15)
BATCH_SIZES = (8, 32)
REPEATS = 7
MAX_ERROR = 2e-3  # relative, of vectors in fp16 and of scores of int8 tokens


def seconds_of(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median seconds of a call, until the device has finished, after a first call."""
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
    """Build and load a model of random weights in bf16, or in fp32 on a CPU."""
    from sentence_transformers import MultiVectorEncoder

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        save_page_model(folder, "colpali", size=size, dtype=dtype)
    return MultiVectorEncoder(str(folder), device=device, model_kwargs={"dtype": dtype})


def time_encoding(folder: Path, n_pages: int, *, tiny: bool, device: str) -> None:
    """Print pages per second of the trunk alone, and from files to token vectors on disk."""
    size = PageModelSize() if tiny else COLPALI_3B
    model = load_page_model(folder / "model", size, device)
    page_size = (124, 175) if tiny else (1240, 1754)  # A4 at 150 dots per inch
    drawn = random_pages(n_pages, random_words(500), size=page_size, font_size=page_size[0] // 30)
    save_page_collection(folder / "pages", drawn, pages_per_pdf=8)
    contents = dict(load_collection(folder / "pages", folder / "cache").content())
    pages = list(contents.values())
    check_vectors(model, dict(list(contents.items())[:4]), folder / "gate")
    for batch_size in BATCH_SIZES:
        images = [page.image() for page in pages[:batch_size]]
        features = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in image_features(model, images).items()
        }

        def run_trunk(features: dict[str, Any] = features) -> list[Tensor]:
            return encode_features(model, features)

        floor = len(images) / seconds_of(run_trunk)
        print(f"batch {batch_size}: trunk alone {floor:.1f} pages/s")
        for n_workers in WORKERS:
            output = folder / f"vectors-{batch_size}-{n_workers}"
            started = time.perf_counter()
            encode_tokens(
                model,
                contents,
                output,
                storage="int8",
                batch_size=batch_size,
                page_workers=n_workers,
            )
            rate = n_pages / (time.perf_counter() - started)
            print(f"  {n_workers:2d} workers: {rate:.1f} pages/s, {rate / floor:.0%} of the trunk")


def check_vectors(model: Any, contents: dict[str, Any], output: Path) -> None:
    """Compare the stored vectors of a few pages with those of sentence-transformers."""
    images = [page.image() for page in contents.values()]
    expected = torch.cat(model.encode_document(images, batch_size=len(images))).float().cpu()
    encode_tokens(model, contents, output, batch_size=len(images))
    stored = open_tokens(output).read(list(contents)).values.float()
    error = float((stored - expected).norm() / expected.norm())
    print(f"gate of encode: relative error {error:.1e}")
    if error > MAX_ERROR:
        raise RuntimeError("the vectors differ from those of sentence-transformers")


def time_search(n_pages: int, device: str) -> None:
    """Print the time of an exact search, and the share of the rate of copies."""
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
    """Compare the scores of the best pages with fp64."""
    chosen = best[0]
    tokens = documents.values[chosen].double() * documents.scales[chosen].double().unsqueeze(-1)
    expected = (query[0].double() @ tokens.transpose(1, 2)).amax(dim=2).sum(dim=1)
    error = float((scores[0].double() - expected).abs().max() / expected.abs().max())
    print(f"gate of search: relative error {error:.1e}")
    if error > MAX_ERROR:
        raise RuntimeError("the scores differ from those in fp64")


def main() -> None:
    """Run the benchmarks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("encode", "search"))
    parser.add_argument("--pages", type=int, default=512, help="number of encoded pages")
    parser.add_argument("--indexed-pages", type=int, default=100_000)
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    if options.only in (None, "search"):
        time_search(options.indexed_pages, device)
    if options.only in (None, "encode"):
        with tempfile.TemporaryDirectory(prefix="tilefold-pages-") as folder:
            time_encoding(Path(folder), options.pages, tiny=options.tiny, device=device)


if __name__ == "__main__":
    main()
