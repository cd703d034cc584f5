"""Compare the bits of vectors of ``accelerate(invariant=True)`` on several GPUs of one machine.

    python -m benchmarks.invariance_devices --devices 2 --output results

A SPLADE model and a ColBERT of random weights, with the sizes of BERT-base, encode ragged texts on
each GPU, in batches of several sizes, in bf16 and in fp32. A row counts the texts whose vectors
differ from those of the first GPU and the first batch size.

Gate: no text differs. `--device cpu --tiny` shows that it runs.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.train_data import (
    BASE,
    MAX_LENGTH,
    TINY,
    load_tokenizer,
    made_pairs,
    make_encoder,
)
from tilefold._internal.precision import Dtype, set_precision
from tilefold.bench.results import collect, write_csv
from tilefold.integrations.sentence_transformers import accelerate

FILE = "invariance_devices.csv"
KINDS = ("splade", "colbert")
DTYPES = ("bf16", "fp32")
VOCAB_SIZE = 30_522
N_TEXTS = 48
TINY_TEXTS = 12
# texts per batch
BATCH_SIZES = (48, 7, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the vectors of both kinds of model, and write the rows.

    Returns:
        The exit code: 1 if a vector differs.
    """
    options = parse_arguments(arguments)
    tokenizer = load_tokenizer(options.tokenizer)
    texts = made_pairs(tokenizer, TINY_TEXTS if options.tiny else N_TEXTS, ragged=True)["document"]
    sizes = TINY if options.tiny else BASE
    passed = True
    for kind in KINDS:
        model = make_encoder(kind, VOCAB_SIZE, sizes, tokenizer, MAX_LENGTH)
        for dtype in DTYPES:
            cells = compare(model, cast(Dtype, dtype), texts, options)
            row = {"kind": kind, "dtype": dtype, **cells}
            passed &= row["gate"] == "ok"
            print(row, flush=True)
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                provenance = collect(torch.device(options.device))
                write_csv(options.output / FILE, [row], provenance, ("kind", "dtype", "devices"))
    return 0 if passed else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help=f"folder for {FILE}")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models and few texts")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of a WordPiece tokenizer, by default that of the packaged MiniLM",
    )
    return parser.parse_args(arguments)


def compare(
    model: Any,
    dtype: Dtype,
    texts: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Encode texts on all devices in all batch sizes, and count the texts that differ.

    Args:
        model: the model, which is copied.
        dtype: the dtype in which the copies compute.
        texts: the texts.
        options: the options of the command line.

    Returns:
        The cells of the row.
    """
    batch_sizes = sorted({min(size, len(texts)) for size in BATCH_SIZES}, reverse=True)
    expected: list[Tensor] = []
    differing_texts: set[int] = set()
    for number in range(options.devices):
        device = "cpu" if options.device == "cpu" else f"cuda:{number}"
        copied = copy.deepcopy(model).to(device)
        set_precision(copied, dtype)
        accelerate(copied, invariant=True)
        for batch_size in batch_sizes:
            vectors = encode(copied, texts, batch_size)
            if not expected:
                expected = vectors
            differing_texts.update(
                index
                for index, vector in enumerate(vectors)
                if not has_same_bits(vector, expected[index])
            )
    n_values = sum(int((vector != 0).sum()) for vector in expected)
    return {
        "devices": options.devices,
        "texts": len(texts),
        "batch_sizes": " ".join(map(str, batch_sizes)),
        "nonzero_values": n_values,
        "differing_texts": len(differing_texts),
        "gate": "ok" if n_values and not differing_texts else "failed",
    }


def has_same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors are equal, with a difference between 0.0 and -0.0.

    Args:
        left: a tensor on the CPU.
        right: another one.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(
        left.contiguous().flatten().view(torch.uint8),
        right.contiguous().flatten().view(torch.uint8),
    )


def encode(model: Any, texts: Sequence[str], batch_size: int) -> list[Tensor]:
    """Encode documents, and return a tensor on the CPU for each.

    Args:
        model: a SparseEncoder, whose vectors become dense, or a MultiVectorEncoder.
        texts: the texts.
        batch_size: texts per batch.
    """
    vectors = model.encode_document(list(texts), batch_size=batch_size)
    if isinstance(vectors, Tensor) and vectors.is_sparse:
        vectors = vectors.to_dense()
    return [vector.cpu() for vector in vectors]


if __name__ == "__main__":
    sys.exit(main())
