"""CPU microseconds of eager calls: the time before a call returns, with nothing to wait for.

    python -m benchmarks.host_time --output results.csv

Tensors are tiny, so that the device always keeps up. A sample is the time to enqueue ``--calls``
calls on an idle device, fewer than its queue holds, divided by their number; between samples the
script waits for the device. Machines differ by two and change their pace while one watches, so each
sample is followed by one of a yardstick, and their ratio is printed too: for inference an in-place
addition, one launch by torch itself, and for training an autograd function that saves its inputs
and launches nothing. Training is a call and the gradients of its inputs through
``torch.autograd.grad``. Rows whose package is missing, or which fail, say why and have no time.
Python's garbage collector is off meanwhile. ``--output`` keeps rows of other calls that a file
already has.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.results import collect, write_csv
from tilefold.ops import entmax, entmax_attention, lsr_head, maxsim, quantize_tokens, token_scatter

Call = Callable[[], object]
DEVICE = "cuda"


def main() -> int:
    """Parse arguments, time every call, print and write the rows; 1 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument(
        "--calls",
        type=int,
        default=16,
        help="calls between two waits for the device",
    )
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="text in the names of the calls to time",
    )
    options = parser.parse_args()
    if options.calls < 1 or options.samples < 2:
        parser.error(
            f"--calls must be at least 1 and --samples at least 2, got {options.calls} and "
            f"{options.samples}.",
        )
    if not torch.cuda.is_available():
        print("host_time.py needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 1
    provenance = collect(torch.device("cuda"))
    print(
        f"{provenance.device}, {provenance.cpu}, torch {provenance.torch}, triton "
        f"{provenance.triton}; microseconds\n",
    )
    print(f"{'call':44s} {'p20':>8s} {'median':>8s} {'p80':>8s} {'yardstick':>10s} {'ratio':>8s}")
    addition, function = _add(), _empty_function()
    for name, prepare in cases():
        if options.only and not any(text in name for text in options.only):
            continue
        found = row(
            name,
            prepare,
            function if name.endswith("f+b") else addition,
            options.calls,
            options.samples,
        )
        if options.output is not None:  # after each: a later case may take the process with it
            write_csv(options.output, [found], provenance, ("call",))
    return 0


def row(
    name: str,
    prepare: Callable[[], Call],
    yardstick: Call,
    calls: int,
    samples: int,
) -> dict[str, object]:
    """One row of the table, printed; a failure is its note."""
    found: dict[str, object] = dict.fromkeys(
        ("p20_us", "median_us", "p80_us", "yardstick_us", "ratio"),
        "",
    )
    found = {"call": name} | found | {"calls": calls, "samples": samples, "note": ""}
    try:
        times, beside = timed((prepare(), yardstick), calls, samples)
    except Exception as error:
        found["note"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(f"{name:44s} {found['note']}", flush=True)
        return found
    p20, _, _, p80 = statistics.quantiles(times, n=5)
    median, measure = statistics.median(times), statistics.median(beside)
    ratio = statistics.median(mine / other for mine, other in zip(times, beside, strict=True))
    found |= {"p20_us": round(p20, 2), "median_us": round(median, 2), "p80_us": round(p80, 2)}
    found |= {"yardstick_us": round(measure, 2), "ratio": round(ratio, 3)}
    print(
        f"{name:44s} {p20:8.1f} {median:8.1f} {p80:8.1f} {measure:10.1f} {ratio:8.2f}",
        flush=True,
    )
    return found


def timed(several: tuple[Call, ...], calls: int, samples: int) -> tuple[list[float], ...]:
    """Microseconds of CPU time of each call, in each sample; they take turns."""
    for call in several:
        for _ in range(10):  # compiles, tunes, plans, and fills the allocator's pool
            call()
    times: tuple[list[float], ...] = tuple([] for _ in several)
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples + 5):
            for call, found in zip(several, times, strict=True):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                found.append(1e6 * (time.perf_counter() - begin) / calls)
        torch.cuda.synchronize()
    finally:
        gc.enable()
    return tuple(found[5:] for found in times)


def cases() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Every call by its name, each prepared when its turn comes."""
    yield "torch add_ (one launch)", _add
    yield "empty autograd.Function, f+b", _empty_function
    for name, (shapes, kwargs) in MAXSIM.items():
        yield f"maxsim {name}, inference", partial(_maxsim, shapes, kwargs, False)
    for kind in ("int8", "fp8"):
        yield f"maxsim {kind}, inference", partial(_quantized, kind)
    for name, (shapes, kwargs) in MAXSIM.items():
        yield f"maxsim {name}, f+b", partial(_maxsim, shapes, kwargs, True)
    yield (
        "maxsim all pairs fp16, f+b",
        partial(_maxsim, MAXSIM["all pairs"][0], {}, True, torch.float16),
    )
    for training in (False, True):
        mode = "f+b" if training else "inference"
        yield f"entmax, {mode}", partial(_entmax, False, training)
        yield f"entmax learned alpha, {mode}", partial(_entmax, True, training)
        yield f"entmax_attention N=128, {mode}", partial(_entmax_attention, training)
        for name, options in LSR_HEAD.items():
            yield f"lsr_head{name}, {mode}", partial(_lsr_head, options, training)
        for name, options in TOKEN_SCATTER.items():
            yield f"token_scatter{name}, {mode}", partial(_token_scatter, options, training)
    for package, peer in (
        ("flash_maxsim", _flash_maxsim),
        ("late_interaction_kernels", _late_interaction_kernels),
    ):
        for training in (False, True):
            yield f"{package}, {'f+b' if training else 'inference'}", partial(peer, training)


def _offsets(count: int, length: int) -> Tensor:
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=DEVICE)


# name: (shapes of queries and documents, what to pass besides)
MAXSIM: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]]] = {
    "all pairs": (((2, 32, 128), (4, 64, 128)), {}),
    "all pairs, masked": (
        ((2, 32, 128), (4, 64, 128)),
        {"query_mask": (2, 32), "document_mask": (4, 64)},
    ),
    "all pairs, mean": (((2, 32, 128), (4, 64, 128)), {"reduction": "mean"}),
    "all pairs, normalised": (((2, 32, 128), (4, 64, 128)), {"normalize": True}),
    "all pairs, temperature": (((2, 32, 128), (4, 64, 128)), {"temperature": 0.1}),
    "packed documents": (((2, 32, 128), (256, 128)), {"cu_seqlens_d": (4, 64)}),
    "packed": (((64, 128), (256, 128)), {"cu_seqlens_q": (2, 32), "cu_seqlens_d": (4, 64)}),
    "aligned": (((4, 32, 128), (4, 64, 128)), {"pairing": "aligned"}),
    "grouped": (((2, 32, 128), (2, 2, 64, 128)), {"pairing": "grouped"}),
}


# what follows the name: what to pass besides hidden, weight and bias
LSR_HEAD: dict[str, dict[str, Any]] = {
    "": {},
    " masked": {"attention_mask": (2, 16)},
    " packed": {"cu_seqlens": (2, 16)},
    " sum": {"pooling": "sum"},
    " mean masked": {"pooling": "mean", "attention_mask": (2, 16)},
    " cls": {"pooling": "cls"},
    " last masked": {"pooling": "last", "attention_mask": (2, 16)},
    " last packed": {"pooling": "last", "cu_seqlens": (2, 16)},
}

# the same of token_scatter
TOKEN_SCATTER: dict[str, dict[str, Any]] = {
    "": {},
    " masked": {"attention_mask": (2, 16)},
    " packed": {"cu_seqlens": (2, 16)},
    " sum": {"reduce": "sum", "ignore_ids": (0, 1)},
}


def _normal(
    shape: tuple[int, ...],
    training: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    values = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
    return values.requires_grad_(training)


def _forward_backward(call: Callable[..., Any], *leaves: Tensor) -> Call:
    dout = torch.randn_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, dout)


def _either(training: bool, call: Callable[..., Any], *leaves: Tensor) -> Call:
    return _forward_backward(call, *leaves) if training else partial(call, *leaves)


def _add() -> Call:
    values = torch.zeros(4, device=DEVICE)
    return lambda: values.add_(1)


class _Nothing(torch.autograd.Function):
    """What autograd itself takes: saves its inputs, and launches nothing."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor) -> Tensor:
        ctx.save_for_backward(queries, documents)
        return queries.new_empty(2, 4)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        queries, documents = ctx.saved_tensors
        return torch.empty_like(queries), torch.empty_like(documents)


def _empty_function() -> Call:
    return _forward_backward(
        _Nothing.apply,
        _normal((2, 32, 128), True),
        _normal((4, 64, 128), True),
    )


def _maxsim(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    kwargs: dict[str, Any],
    training: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Call:
    options = dict(kwargs)
    for name, value in kwargs.items():
        if name.startswith("cu_seqlens"):
            options[name] = _offsets(*value)
        elif name.endswith("mask"):
            options[name] = torch.ones(value, dtype=torch.bool, device=DEVICE)
    return _either(
        training,
        lambda q, d: maxsim(q, d, **options),
        *(_normal(s, training, dtype) for s in shapes),
    )


def _quantized(kind: str) -> Call:
    return partial(maxsim, _normal((1, 32, 128)), quantize_tokens(_normal((4, 64, 128)), kind))


def _entmax(learned: bool, training: bool) -> Call:
    leaves = [_normal((4, 128), training)]
    if learned:
        leaves.append(torch.full((4, 1), 1.3, device=DEVICE, requires_grad=training))
    return _either(training, entmax, *leaves)


def _entmax_attention(training: bool) -> Call:
    return _either(
        training,
        entmax_attention,
        *(_normal((1, 2, 128, 64), training) for _ in range(3)),
    )


def _tokens(options: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape of 32 tokens, and the options with their mask or offsets."""
    options, shape = dict(options), (2, 16)
    if "attention_mask" in options:
        options["attention_mask"] = torch.ones(
            options["attention_mask"],
            dtype=torch.int64,
            device=DEVICE,
        )
    if "cu_seqlens" in options:
        return (32,), options | {"cu_seqlens": _offsets(*options["cu_seqlens"])}
    return shape, options


def _lsr_head(options: dict[str, Any], training: bool) -> Call:
    shape, options = _tokens(options)
    leaves = (
        _normal((*shape, 64), training),
        _normal((512, 64), training),
        _normal((512,), training),
    )
    return _either(training, partial(lsr_head, **options), *leaves)


def _token_scatter(options: dict[str, Any], training: bool) -> Call:
    shape, options = _tokens(options)
    ids = torch.arange(32, device=DEVICE).view(shape) % 24
    weights = _normal(shape, training)
    return _either(training, lambda weights: token_scatter(weights, ids, 512, **options), weights)


def _flash_maxsim(training: bool) -> Call:
    peer: Any = importlib.import_module("flash_maxsim")
    leaves = _normal((2, 32, 128), training), _normal((4, 64, 128), training)
    return _either(
        training,
        peer.flash_maxsim_batched_train if training else peer.flash_maxsim_batched,
        *leaves,
    )


def _late_interaction_kernels(training: bool) -> Call:
    peer: Any = importlib.import_module("late_interaction_kernels")
    return _either(
        training,
        peer.maxsim,
        _normal((2, 32, 128), training),
        _normal((4, 64, 128), training),
    )


if __name__ == "__main__":
    sys.exit(main())
