"""Time and memory of EPIC's pooling: with logits, fused, and the fused head without importance.

    python -m benchmarks.epic_head --batch 32 --length 256 --width 768 --vocab 30522 --dtype bf16

Prints CSV: implementation, milliseconds of forward, of forward and backward, peak MB of the latter
(on a GPU).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefold.modules import EpicPooling
from tilefold.modules.fused_pooling import Head, Wanted
from tilefold.ops import lsr_head

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    """Run the three and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in (
        ("batch", 32),
        ("length", 256),
        ("width", 768),
        ("vocab", 30522),
        ("repeats", 20),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[asked.dtype]}
    torch.manual_seed(0)
    hidden, states = (
        torch.randn(asked.batch, asked.length, asked.width, **options).requires_grad_()
        for _ in range(2)
    )
    weight = (torch.randn(asked.vocab, asked.width, **options) * asked.width**-0.5).requires_grad_()
    bias = torch.zeros(asked.vocab, **options).requires_grad_()
    mask = torch.ones(asked.batch, asked.length, dtype=torch.int64, device=device)
    pooling = EpicPooling(asked.width).to(**options)

    def features(tokens: Tensor) -> dict[str, Any]:
        return {
            "token_embeddings": tokens,
            "attention_mask": mask,
            "all_layer_embeddings": (states,),
        }

    def logits() -> Tensor:
        found: Tensor = pooling(features(torch.nn.functional.linear(hidden, weight, bias)))[
            "sentence_embedding"
        ]
        return found

    def fused() -> Tensor:
        head = Head(hidden, weight, bias)
        found: Tensor = pooling.fused_scores(features(hidden), head, Wanted())
        return found

    def plain_head() -> Tensor:
        return lsr_head(hidden, weight, bias, attention_mask=mask, activation="softplus")

    print("implementation,forward_ms,forward_backward_ms,peak_mb")
    leaves = [hidden, states, weight, bias, *pooling.parameters()]
    for name, call in (("logits", logits), ("fused", fused), ("head_alone", plain_head)):
        forward = _milliseconds(call, asked.repeats, device)
        whole = partial(_backward, call, leaves)
        both = _milliseconds(whole, asked.repeats, device)
        print(f"{name},{forward:.3f},{both:.3f},{_peak_mb(whole, device)}")


def _backward(call: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    torch.autograd.grad(call().float().sum(), leaves, allow_unused=True)


def _milliseconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    times = []
    for turn in range(repeats + 3):  # the first ones compile and warm up
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        if turn >= 3:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _peak_mb(call: Callable[[], Any], device: str) -> str:
    if device == "cpu":
        return ""
    _wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    _wait(device)
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
