"""Training steps of random shapes for minutes on end: memory that must come back, losses that must
be numbers.

    python -m benchmarks.train_soak --minutes 10 --output FOLDER

Rounds of stock trainers (SPLADE and ColBERT; graphs, packed, padded), each with a batch of another
size and ragged pairs of its own, take turns with single steps of the operators over random shapes,
dtypes and layouts. A row per round has its steps, values that were not finite (losses, results,
gradients, and the weights at the end), what was allocated on the GPU after it, and the memory of
the process. Ends with 1 if a value was not finite, or if more was allocated after a round than
after the first by more than `SLACK` bytes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.train_data import BASE, MAX_LENGTH, TINY, load_tokenizer, made_pairs, make_encoder
from benchmarks.train_run import GRAPHS, make_loss, make_trainer
from tilefold.bench.results import collect, write_csv
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead
from tilefold.ops import entmax, maxsim, token_scatter
from tilefold.testing.entmax_attention import entmax_attention_inputs, entmax_attention_results
from tilefold.testing.lsr_head import lsr_head_inputs, lsr_head_results
from tilefold.testing.maxsim import maxsim_inputs

SLACK = (
    1 << 20
)  # bytes: small tensors that live as long as a kernel or a size that was met for the first time
STEPS, CALLS = 120, 20  # of a trainer, and of the operators, in a round
LAYOUTS = ("full", "right", "holes", "packed")
ALPHAS = (1.5, 2.0, 1.3)
ROUNDS = tuple(itertools.product(("splade", "colbert"), ("graphs", "packed", "padded")))


def trained(
    kind: str,
    side: str,
    seed: int,
    options: argparse.Namespace,
    device: torch.device,
) -> tuple[int, int]:
    """Steps of a stock trainer, and how many losses and weights were not finite."""
    chosen, steps = np.random.default_rng(seed), 4 if options.tiny else STEPS
    batch = int(chosen.integers(2, 8 if options.tiny else 160))
    tokenizer = load_tokenizer(None)
    model = make_encoder(
        kind,
        len(tokenizer),
        TINY if options.tiny else BASE,
        tokenizer,
        MAX_LENGTH,
        device=device,
    )
    accelerate(model, packed=side != "padded")
    loss, bad = make_loss(kind, model, side), torch.zeros((), dtype=torch.int64, device=device)

    def saw(_: Any, __: Any, out: Any) -> None:
        for part in out.values() if isinstance(out, dict) else [out]:
            bad.add_((~part.detach().isfinite()).sum())

    loss.register_forward_hook(saw)
    with tempfile.TemporaryDirectory(prefix="tilefold-bench-") as folder:
        from datasets import Dataset
        from transformers import PrinterCallback

        rows = Dataset.from_dict(made_pairs(tokenizer, batch * steps, ragged=True, seed=seed))
        trainer = make_trainer(kind, model, loss, folder, batch, rows, steps, device.type == "cuda")
        trainer.remove_callback(PrinterCallback)
        if side in GRAPHS:
            collate_ahead(trainer, graphs=True)
        trainer.train()
    return steps, int(bad) + sum(not bool(weight.isfinite().all()) for weight in model.parameters())


def called(seed: int, device: torch.device) -> int:
    """A forward and a backward of each operator over random shapes; how many tensors had values
    that are not finite.
    """
    chosen = np.random.default_rng(seed)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[chosen.integers(3)]
    given: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed}
    sizes = chosen.integers(1, (12, 200, 40, 48, 5000, 9000, 40000)).tolist()
    batch, length, documents, tokens, wide, words, vocab = sizes
    dim = (16, 48, 128)[chosen.integers(3)]
    layout = LAYOUTS[chosen.integers(len(LAYOUTS))]
    made: list[Tensor] = []
    head = lsr_head_inputs(batch, length, dim, words, layout=layout, **given)
    made += lsr_head_results(head).values()
    heads = entmax_attention_inputs(batch, 4, length, 64, layout=layout, **given)
    seen = entmax_attention_results(heads, alpha=ALPHAS[chosen.integers(3)])
    made += [
        seen[name] for name in ("out", "dq", "dk", "dv")
    ]  # a row without keys has no finite threshold
    late = maxsim_inputs(batch, documents, tokens, length, dim, layout=layout, **given)
    leaves = [late.queries.requires_grad_(), late.documents.requires_grad_()]
    scores = maxsim(*leaves, **late.layout)
    made += [scores.detach(), *torch.autograd.grad(scores, leaves, late.dscores.to(scores.dtype))]
    rows = torch.randn(batch, wide, device=device).to(dtype).requires_grad_()
    chances: Any = entmax(rows, ALPHAS[chosen.integers(3)])
    made += [chances.detach(), *torch.autograd.grad(chances, rows, torch.randn_like(chances))]
    weights = rows.detach()[:, :300].abs().requires_grad_()
    summed = token_scatter(
        weights,
        torch.randint(vocab, weights.shape, device=device),
        vocab_size=vocab,
    )
    made += [summed, *torch.autograd.grad(summed, weights, torch.randn_like(summed))]
    return sum(not bool(tensor.isfinite().all()) for tensor in made if tensor.is_floating_point())


def rounds(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows until the time is over."""
    began = time.monotonic()
    for seed in itertools.count(options.first):
        kind, side = ROUNDS[seed % len(ROUNDS)]
        first = CALLS * seed
        works: list[tuple[str, Callable[[], tuple[int, int]]]] = [
            (f"{kind}, {side}", lambda: trained(kind, side, seed, options, device)),  # noqa: B023
            (
                "operators",
                lambda: (CALLS, sum(called(at, device) for at in range(first, first + CALLS))),  # noqa: B023
            ),
        ]
        for name, work in works:
            if time.monotonic() - began > 60 * options.minutes:
                return
            steps, bad = work()
            yield {
                "round": seed,
                "work": name,
                "steps": steps,
                "not_finite": bad,
                **memory(device),
            } | {"seconds": time.monotonic() - began}


def memory(device: torch.device) -> dict[str, int]:
    """Bytes after what can be let go was let go: allocated and reserved on the GPU, and of the
    process.
    """
    gc.collect()
    found = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {**found, "process": 4096 * pages}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="round, where several processes share the rounds",
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a tiny model, and four steps of a trainer",
    )
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    provenance = collect(device)
    seen: list[dict[str, Any]] = []
    for row in rounds(options, device):
        seen.append(row)
        print(row, flush=True)
        write_csv(options.output / "train_soak.csv", [row], provenance, ("round", "work"))
    least = seen[0].get("allocated", 0) + SLACK
    grown = [row for row in seen if row.get("allocated", 0) > least]
    return 1 if grown or any(row["not_finite"] for row in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
