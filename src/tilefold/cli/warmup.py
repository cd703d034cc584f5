"""``tilefold warmup``: builds the kernels that a model needs before anybody waits for them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from tilefold.cli import _common, _models
from tilefold.cli._common import Count, option

PRECISIONS = ("bf16", "fp16", "fp32")


def warmup(
    model: Annotated[str, option("A SparseEncoder or multi-vector model: folder or Hugging Face name.")],
    length: Annotated[
        list[int] | None,
        option("Tokens of the longest text of a batch; may be repeated, first that of queries. [32, 256]"),
    ] = None,
    batch_size: Annotated[int, option("Texts per batch: kernels are chosen by shape.")] = 32,
    inference: Annotated[bool, option("Kernels of scores alone.", "--inference/--no-inference")] = True,
    training: Annotated[bool, option("Kernels of gradients too.", "--training/--no-training")] = True,
    precision: Annotated[str, option("Of autocast: bf16, fp16, or fp32 for none.")] = "bf16",
    workers: Annotated[Count, option("Kernels built at a time; by default one per core.")] = None,
    as_json: Annotated[bool, option("What was built as JSON on stdout.", "--json")] = False,
) -> None:
    """Build the kernels that a model needs on this GPU, several at a time, into Triton's cache on the disk.

    A first call of an operator otherwise waits seconds for a compiler. Later processes of this user load what was
    built, as long as Triton, its settings and the GPU stay the same.
    """
    _common.check_choice("--precision", precision, PRECISIONS)
    lengths = length or [32, 256]
    _common.check_at_least_one(length=min(lengths))
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
    names = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in sorted(built.kernels.items()))
    _common.print_result(
        asdict(built) | {"cache": str(built.cache), "count": built.count},
        as_json,
        f"{built.count} kernels in {built.seconds:.1f} s: {names or 'none'}",
        f"in {built.cache}",
        *(f"not built: {message}" for message in built.failed),
        f"first calls take up to {max(built.first_calls, default=0.0):.2f} s now",
    )
