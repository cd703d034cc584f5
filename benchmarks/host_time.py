"""CPU microseconds of eager calls: the time before a call returns, with nothing to wait for.

    python -m benchmarks.host_time --output results.csv

Timed: ``--calls`` calls on an idle device, fewer than its queue holds, divided by their number.
Between samples the script waits for the device. Tensors are tiny, so that the device always keeps
up. Training is a call and the gradients of its inputs through ``torch.autograd.grad``. Python's
garbage collector is off meanwhile.

Baseline: a yardstick after each sample, and the ratio of both, because machines differ by a factor
of two and change their pace while they measure. For inference it is an in-place addition, one
launch by torch itself. For training it is an autograd function that saves its inputs and launches
nothing.

Gate: none, since no result is compared. A call that raises an error, or whose package is missing,
has the error in place of times.

``--output`` keeps rows of other calls that a file already has.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilefold.bench.results import collect, write_csv
from tilefold.ops import entmax, entmax_attention, lsr_head, maxsim, quantize_tokens, token_scatter

Call = Callable[[], object]
Shape = tuple[int, ...]
# device of all inputs, which host_steps sets to "cpu"
DEVICE = "cuda"
# calls that compile, tune, plan, and fill the allocator's pool
WARMUP_CALLS = 10
# first samples that are not counted
WARMUP_SAMPLES = 5
MAX_NOTE_LENGTH = 200
# end of the names of calls with gradients: forward and backward
TRAINING_SUFFIX = "f+b"


@dataclass(frozen=True)
class HostRow:
    """A row of the results.

    Attributes:
        call: the name of the call.
        p20_us: 20th percentile of the samples, in microseconds per call.
        median_us: the median of the samples.
        p80_us: 80th percentile of the samples.
        yardstick_us: the median of the yardstick.
        ratio: the median of the ratios of a sample and the yardstick's sample after it.
        calls: the calls per sample.
        samples: the number of samples.
        note: the error of a call that failed. It then has no times.
    """

    call: str
    p20_us: float | str = ""
    median_us: float | str = ""
    p80_us: float | str = ""
    yardstick_us: float | str = ""
    ratio: float | str = ""
    calls: int = 0
    samples: int = 0
    note: str = ""


def main() -> int:
    """Time every call, print and write the rows.

    Returns:
        The exit code: 1 without a GPU.
    """
    options = parse_arguments()
    if not torch.cuda.is_available():
        print("host_time.py needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 1
    provenance = collect(torch.device("cuda"))
    print(
        f"{provenance.device}, {provenance.cpu}, torch {provenance.torch}, triton "
        f"{provenance.triton}; microseconds\n",
    )
    print(f"{'call':44s} {'p20':>8s} {'median':>8s} {'p80':>8s} {'yardstick':>10s} {'ratio':>8s}")
    inference_yardstick = _addition()
    training_yardstick = _empty_function()
    for name, prepare in cases():
        if options.only and not any(text in name for text in options.only):
            continue
        is_training = name.endswith(TRAINING_SUFFIX)
        row = time_call(
            name,
            prepare,
            yardstick=training_yardstick if is_training else inference_yardstick,
            calls=options.calls,
            samples=options.samples,
        )
        # after each one, because a later case may end the process
        if options.output is not None:
            write_csv(options.output, [asdict(row)], provenance, ("call",))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
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
    return options


def time_call(
    name: str,
    prepare: Callable[[], Call],
    yardstick: Call,
    calls: int,
    samples: int,
) -> HostRow:
    """Time a call and its yardstick in turns, and print the row.

    Args:
        name: the name of the call.
        prepare: a function that creates the inputs and returns the call.
        yardstick: the call to compare with.
        calls: the calls per sample.
        samples: the number of samples.

    Returns:
        The row, which has a note in place of times if the call raised an error.
    """
    try:
        times, yardstick_times = sample_in_turns((prepare(), yardstick), calls, samples)
    except Exception as error:
        note = f"{type(error).__name__}: {error}".splitlines()[0][:MAX_NOTE_LENGTH]
        print(f"{name:44s} {note}", flush=True)
        return HostRow(call=name, calls=calls, samples=samples, note=note)
    p20, _, _, p80 = statistics.quantiles(times, n=5)
    median = statistics.median(times)
    yardstick_median = statistics.median(yardstick_times)
    ratio = statistics.median(
        time / yardstick_time for time, yardstick_time in zip(times, yardstick_times, strict=True)
    )
    print(
        f"{name:44s} {p20:8.1f} {median:8.1f} {p80:8.1f} {yardstick_median:10.1f} {ratio:8.2f}",
        flush=True,
    )
    return HostRow(
        call=name,
        p20_us=round(p20, 2),
        median_us=round(median, 2),
        p80_us=round(p80, 2),
        yardstick_us=round(yardstick_median, 2),
        ratio=round(ratio, 3),
        calls=calls,
        samples=samples,
    )


def sample_in_turns(
    functions: tuple[Call, ...],
    calls: int,
    samples: int,
) -> tuple[list[float], ...]:
    """Measure how long calls take to return, while the device is idle.

    Args:
        functions: the calls to measure. They take turns.
        calls: the calls per sample.
        samples: the number of samples of each.

    Returns:
        Microseconds per call of each sample, for each function.
    """
    for function in functions:
        for _ in range(WARMUP_CALLS):
            function()
    times: tuple[list[float], ...] = tuple([] for _ in functions)
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples + WARMUP_SAMPLES):
            for function, function_times in zip(functions, times, strict=True):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    function()
                function_times.append(1e6 * (time.perf_counter() - begin) / calls)
        torch.cuda.synchronize()
    finally:
        gc.enable()
    return tuple(function_times[WARMUP_SAMPLES:] for function_times in times)


def cases() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield the name of every call, and the function that prepares it."""
    yield "torch add_ (one launch)", _addition
    yield "empty autograd.Function, f+b", _empty_function
    for maxsim_case in MAXSIM_CASES:
        yield f"maxsim {maxsim_case.name}, inference", partial(_maxsim, maxsim_case, False)
    for dtype in ("int8", "fp8"):
        yield f"maxsim {dtype}, inference", partial(_quantized_maxsim, dtype)
    for maxsim_case in MAXSIM_CASES:
        yield f"maxsim {maxsim_case.name}, f+b", partial(_maxsim, maxsim_case, True)
    yield "maxsim all pairs fp16, f+b", partial(_maxsim, ALL_PAIRS, True, torch.float16)
    for training in (False, True):
        mode = _mode(training)
        yield f"entmax, {mode}", partial(_entmax, False, training)
        yield f"entmax learned alpha, {mode}", partial(_entmax, True, training)
        yield f"entmax_attention N=128, {mode}", partial(_entmax_attention, training)
        for token_case in LSR_HEAD_CASES:
            yield f"lsr_head{token_case.suffix}, {mode}", partial(_lsr_head, token_case, training)
        for token_case in TOKEN_SCATTER_CASES:
            yield (
                f"token_scatter{token_case.suffix}, {mode}",
                partial(_token_scatter, token_case, training),
            )
    for package, prepare in (
        ("flash_maxsim", _flash_maxsim),
        ("late_interaction_kernels", _late_interaction_kernels),
    ):
        for training in (False, True):
            yield f"{package}, {_mode(training)}", partial(prepare, training)


def _mode(training: bool) -> str:
    """Return the end of the name of a call with or without gradients."""
    return TRAINING_SUFFIX if training else "inference"


@dataclass(frozen=True)
class MaxSimCase:
    """A call of ``maxsim``.

    Attributes:
        name: the name of the case.
        queries: the shape of the queries.
        documents: the shape of the documents.
        query_mask: the shape of a mask that keeps all query tokens, or None.
        document_mask: the shape of a mask that keeps all document tokens, or None.
        packed_queries: number and length of packed queries, or None.
        packed_documents: number and length of packed documents, or None.
        options: further keyword arguments.
    """

    name: str
    queries: Shape = (2, 32, 128)
    documents: Shape = (4, 64, 128)
    query_mask: Shape | None = None
    document_mask: Shape | None = None
    packed_queries: tuple[int, int] | None = None
    packed_documents: tuple[int, int] | None = None
    options: dict[str, Any] | None = None


ALL_PAIRS = MaxSimCase("all pairs")
MAXSIM_CASES = (
    ALL_PAIRS,
    MaxSimCase("all pairs, masked", query_mask=(2, 32), document_mask=(4, 64)),
    MaxSimCase("all pairs, mean", options={"reduction": "mean"}),
    MaxSimCase("all pairs, normalised", options={"normalize": True}),
    MaxSimCase("all pairs, temperature", options={"temperature": 0.1}),
    MaxSimCase("packed documents", documents=(256, 128), packed_documents=(4, 64)),
    MaxSimCase(
        "packed",
        queries=(64, 128),
        documents=(256, 128),
        packed_queries=(2, 32),
        packed_documents=(4, 64),
    ),
    MaxSimCase("aligned", queries=(4, 32, 128), options={"pairing": "aligned"}),
    MaxSimCase("grouped", documents=(2, 2, 64, 128), options={"pairing": "grouped"}),
)


@dataclass(frozen=True)
class TokenCase:
    """A call of ``lsr_head`` or ``token_scatter`` with two texts of 16 tokens.

    Attributes:
        suffix: the end of the name of the call.
        masked: whether the texts have a mask, which keeps all tokens.
        packed: whether the texts are packed.
        options: further keyword arguments.
    """

    suffix: str = ""
    masked: bool = False
    packed: bool = False
    options: dict[str, Any] | None = None


N_TEXTS = 2
TEXT_LENGTH = 16
HIDDEN_SIZE = 64
VOCAB_SIZE = 512
LSR_HEAD_CASES = (
    TokenCase(),
    TokenCase(" masked", masked=True),
    TokenCase(" packed", packed=True),
    TokenCase(" sum", options={"pooling": "sum"}),
    TokenCase(" mean masked", masked=True, options={"pooling": "mean"}),
    TokenCase(" cls", options={"pooling": "cls"}),
    TokenCase(" last masked", masked=True, options={"pooling": "last"}),
    TokenCase(" last packed", packed=True, options={"pooling": "last"}),
)
TOKEN_SCATTER_CASES = (
    TokenCase(),
    TokenCase(" masked", masked=True),
    TokenCase(" packed", packed=True),
    TokenCase(" sum", options={"reduce": "sum", "ignore_ids": (0, 1)}),
)


def _normal(
    shape: Shape,
    training: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Draw a tensor of normal numbers, which requires a gradient for training.

    Args:
        shape: the shape.
        training: whether a gradient is required.
        dtype: the dtype.
    """
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    values = torch.randn(shape, device=DEVICE, generator=generator).to(dtype)
    return values.requires_grad_(training)


def _offsets(n_texts: int, length: int) -> Tensor:
    """Return the int32 offsets ``[n_texts + 1]`` of packed texts of one length."""
    end = (n_texts + 1) * length
    return torch.arange(0, end, length, dtype=torch.int32, device=DEVICE)


def _call(training: bool, function: Callable[..., Any], *leaves: Tensor) -> Call:
    """Return a call of a function of leaf tensors, for training with the gradients of all."""
    if not training:
        return partial(function, *leaves)
    dout = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, dout)


def _addition() -> Call:
    """Prepare the yardstick of inference: an in-place addition."""
    values = torch.zeros(4, device=DEVICE)
    return lambda: values.add_(1)


class _EmptyFunction(torch.autograd.Function):
    """An autograd function that saves its inputs and launches nothing."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, documents: Tensor) -> Tensor:
        ctx.save_for_backward(queries, documents)
        return queries.new_empty(2, 4)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        queries, documents = ctx.saved_tensors
        return torch.empty_like(queries), torch.empty_like(documents)


def _empty_function() -> Call:
    """Prepare the yardstick of training: an autograd function that does nothing."""
    queries = _normal((2, 32, 128), training=True)
    documents = _normal((4, 64, 128), training=True)
    return _call(True, _EmptyFunction.apply, queries, documents)


def _maxsim(case: MaxSimCase, training: bool, dtype: torch.dtype = torch.bfloat16) -> Call:
    """Prepare a call of ``maxsim``.

    Args:
        case: shapes of the tensors, and options.
        training: whether queries and documents require gradients.
        dtype: their dtype.
    """
    options = dict(case.options or {})
    if case.query_mask is not None:
        options["query_mask"] = torch.ones(case.query_mask, dtype=torch.bool, device=DEVICE)
    if case.document_mask is not None:
        options["document_mask"] = torch.ones(case.document_mask, dtype=torch.bool, device=DEVICE)
    if case.packed_queries is not None:
        options["cu_seqlens_q"] = _offsets(*case.packed_queries)
    if case.packed_documents is not None:
        options["cu_seqlens_d"] = _offsets(*case.packed_documents)
    return _call(
        training,
        lambda queries, documents: maxsim(queries, documents, **options),
        _normal(case.queries, training, dtype),
        _normal(case.documents, training, dtype),
    )


def _quantized_maxsim(dtype: str) -> Call:
    """Prepare a call of ``maxsim`` with documents that are quantised to ``dtype``."""
    documents = quantize_tokens(_normal((4, 64, 128)), dtype)
    return partial(maxsim, _normal((1, 32, 128)), documents)


def _entmax(learned: bool, training: bool) -> Call:
    """Prepare a call of ``entmax``, with an alpha per row if it is learned."""
    leaves = [_normal((4, 128), training)]
    if learned:
        leaves.append(torch.full((4, 1), 1.3, device=DEVICE, requires_grad=training))
    return _call(training, entmax, *leaves)


def _entmax_attention(training: bool) -> Call:
    """Prepare a call of ``entmax_attention`` with 128 tokens."""
    q, k, v = (_normal((1, 2, 128, 64), training) for _ in range(3))
    return _call(training, entmax_attention, q, k, v)


def _layout(case: TokenCase) -> tuple[Shape, dict[str, Any]]:
    """Return the shape of the tokens, and the keyword arguments of the call."""
    options = dict(case.options or {})
    if case.masked:
        shape = (N_TEXTS, TEXT_LENGTH)
        options["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=DEVICE)
    if case.packed:
        options["cu_seqlens"] = _offsets(N_TEXTS, TEXT_LENGTH)
        return (N_TEXTS * TEXT_LENGTH,), options
    return (N_TEXTS, TEXT_LENGTH), options


def _lsr_head(case: TokenCase, training: bool) -> Call:
    """Prepare a call of ``lsr_head``.

    Args:
        case: shapes of the tensors, and options.
        training: whether hidden states and weight require gradients.
    """
    token_shape, options = _layout(case)
    return _call(
        training,
        partial(lsr_head, **options),
        _normal((*token_shape, HIDDEN_SIZE), training),
        _normal((VOCAB_SIZE, HIDDEN_SIZE), training),
        _normal((VOCAB_SIZE,), training),
    )


def _token_scatter(case: TokenCase, training: bool) -> Call:
    """Prepare a call of ``token_scatter``, in which some tokens have the same id.

    Args:
        case: shapes of the tensors, and options.
        training: whether the weights require gradients.
    """
    token_shape, options = _layout(case)
    ids = torch.arange(N_TEXTS * TEXT_LENGTH, device=DEVICE).view(token_shape) % 24
    return _call(
        training,
        lambda weights: token_scatter(weights, ids, VOCAB_SIZE, **options),
        _normal(token_shape, training),
    )


def _flash_maxsim(training: bool) -> Call:
    """Prepare a call of the package ``flash_maxsim``."""
    package: Any = importlib.import_module("flash_maxsim")
    score = package.flash_maxsim_batched_train if training else package.flash_maxsim_batched
    return _call(training, score, _normal((2, 32, 128), training), _normal((4, 64, 128), training))


def _late_interaction_kernels(training: bool) -> Call:
    """Prepare a call of the package ``late_interaction_kernels``."""
    package: Any = importlib.import_module("late_interaction_kernels")
    return _call(
        training,
        package.maxsim,
        _normal((2, 32, 128), training),
        _normal((4, 64, 128), training),
    )


if __name__ == "__main__":
    sys.exit(main())
