"""``tilefold warmup``: builds the kernels that a model needs before anybody waits for them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from tilefold.ops.warm_up import Built

PRECISIONS = ("bf16", "fp16", "fp32")


def warmup(
    model: Annotated[str, typer.Option(help="A SparseEncoder or multi-vector model: folder or Hugging Face name.")],
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of the longest text of a batch; may be repeated, first that of queries. [32, 256]"),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts per batch: kernels are chosen by shape.")] = 32,
    inference: Annotated[bool, typer.Option("--inference/--no-inference", help="Kernels of scores alone.")] = True,
    training: Annotated[bool, typer.Option("--training/--no-training", help="Kernels of gradients too.")] = True,
    precision: Annotated[str, typer.Option(help="Of autocast: bf16, fp16, or fp32 for none.")] = "bf16",
    workers: Annotated[int | None, typer.Option(help="Kernels built at a time; by default one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was built as JSON on stdout.")] = False,
) -> None:
    """Build the kernels that a model needs on this GPU, several at a time, into Triton's cache on the disk.

    A first call of an operator otherwise waits seconds for a compiler. Later processes of this user load what was
    built, as long as Triton, its settings and the GPU stay the same.
    """
    if precision not in PRECISIONS:
        raise _common.UsageError(f"--precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}.")
    lengths = length or [32, 256]
    for value in lengths:
        _common.check_at_least_one(length=value)
    _common.check_at_least_one(batch_size=batch_size, workers=workers)
    if not (inference or training):
        raise _common.UsageError("--no-inference and --no-training together leave nothing to build.")
    _models.find_model(model, "--model")
    from tilefold.ops.warm_up import check_kernels_can_be_built

    check_kernels_can_be_built()
    import torch

    from tilefold.integrations.sentence_transformers import warm_up

    loaded, _ = _models.load_model(model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    built = warm_up(
        loaded.to("cuda"), lengths, batch_size, inference=inference, training=training, dtype=dtype, workers=workers
    )
    if as_json:
        _common.print_json(facts(built))
        return
    for line in report(built):
        typer.echo(line)


def facts(built: Built) -> dict[str, Any]:
    """The kernels that were built, JSON-ready."""
    return asdict(built) | {"cache": str(built.cache), "count": built.count}


def report(built: Built) -> list[str]:
    """The kernels that were built, in lines."""
    names = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in sorted(built.kernels.items()))
    slowest = max(built.first_calls, default=0.0)
    lines = [f"{built.count} kernels in {built.seconds:.1f} s: {names or 'none'}", f"in {built.cache}"]
    lines += [f"not built: {message}" for message in built.failed]
    return [*lines, f"first calls take up to {slowest:.2f} s now"]
