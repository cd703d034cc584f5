"""Train SPLADE models on decoders of 1 and 4 billion weights on one GPU and on several.

    python -m benchmarks.decoder_scale --devices 2 --run 4b-lora --run 4b-all --output two
    python -m benchmarks.decoder_scale --devices 1 --run 1b-curve-0 --run 1b-curve-1 --output one
    python -m benchmarks.decoder_scale --devices 2 --run 1b-curve-0 --output two --one one

Timed: :func:`tilefold.recipes.train` with the recipe `causal-splade`, as `tilefold train` runs it,
on ragged pairs and under bf16 autocast. `4b-lora` trains LoRA updates on a copy of the decoder on
each GPU, `4b-all` trains all weights with `fsdp` and `split_vocabulary`. Layers are computed again
in the backward pass. Weights are random, and drawn on each GPU from the same seed. A row has the
milliseconds of the timed steps, with data loader and optimizer, between two waits for the device,
and the peak of allocated memory since the process began, on the GPU with the most. Neither
checkpoints nor the model are saved: those of 4 billion weights have 53 GB.

Baseline: one GPU, whose rows are in the folder `--one`.

Gate: the losses of every step of `1b-curve-SEED`, which trains all weights of a decoder of a
billion weights in the order of the seed. On several GPUs, the run uses `fsdp` and
`split_vocabulary`. Its curve may not differ from the mean curve of one GPU by more than three
standard deviations of one more seed, pooled over the steps. `--device cpu --tiny` shows that all of
it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.train_data import MAX_LENGTH, load_tokenizer
from benchmarks.train_scale import (
    SEEDS,
    compare_rates_and_curves,
    make_collection,
    rows_of_one_device,
)
from tilefold.bench.results import collect, write_csv
from tilefold.distributed.ranks import first_rank_first, is_rank, join_ranks, run_ranks

FILE = "decoder_scale.csv"
GIB = 2**30
# over V, factor of scores: those of fresh weights are dense, and grow with V
SCALE = 30.0
PENALTY = 1e-7
LORA_RANK = 64
# of a curve, whose losses fall in few steps
CURVE_LEARNING_RATE = 3e-5
# of other runs, whose losses are not compared
LEARNING_RATE = 1e-6
# a number of steps after which nothing is saved
NEVER = 10**6
# pairs per step with --tiny
TINY_PAIRS = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama whose head is not tied to its word embeddings.

    Attributes:
        hidden: hidden size.
        layers: number of layers.
        heads: attention heads.
        key_heads: attention heads of keys and values.
        head_size: dimension of an attention head.
        intermediate: hidden size of the MLP.
        vocab: size of the vocabulary.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    intermediate: int
    vocab: int


# Qwen3-4B and Llama-3.2-1B, with a head of its own
SHAPE_4B = Shape(2560, 36, 32, 8, 128, 9728, 151_936)
SHAPE_1B = Shape(2048, 16, 32, 8, 64, 8192, 128_256)
TINY_SHAPE = Shape(64, 2, 4, 2, 16, 128, 31_000)


@dataclass(frozen=True)
class DecoderRun:
    """A training.

    Attributes:
        shape: sizes of the decoder.
        batch: the pairs per step on all GPUs together.
        warm: steps before those that are timed.
        timed: the steps that are timed.
        lora: rank of LoRA updates. None to train all weights.
        sharded: whether several GPUs divide the weights and the vocabulary among them.
        seed: the seed of a curve. None for other runs.
    """

    shape: Shape
    batch: int
    warm: int
    timed: int
    lora: int | None = None
    sharded: bool = False
    seed: int | None = None

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.warm + self.timed

    def tiny(self) -> DecoderRun:
        """Return the run with a tiny decoder and few pairs."""
        return replace(self, shape=TINY_SHAPE, batch=TINY_PAIRS, warm=2, timed=4)


RUNS = {
    "4b-lora": DecoderRun(SHAPE_4B, 32, 6, 10, lora=LORA_RANK),
    "4b-all": DecoderRun(SHAPE_4B, 32, 4, 8, sharded=True),
}
RUNS |= {
    f"1b-curve-{seed}": DecoderRun(SHAPE_1B, 64, 2, 10, sharded=True, seed=seed) for seed in SEEDS
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a process for each device, or train if this is one of them.

    Returns:
        The exit code: 1 if a run failed or a gate refused it.
    """
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if not is_rank() and options.devices > 1:
        return run_ranks(
            [sys.executable, "-m", "benchmarks.decoder_scale", *sys.argv[1:]],
            options.devices,
        )
    passed = True
    with join_ranks(training=True) as rank:
        for name in options.run:
            run = RUNS[name].tiny() if options.tiny else RUNS[name]
            try:
                row = measure(run, options, name)
                row.update(compare_with_one(name, row, options))
            except (RuntimeError, ValueError) as error:
                # all ranks raise it alike, and the other runs are measured
                traceback.print_exc()
                row = {"gate": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            if rank == 0:
                row = {"run": name, "devices": options.devices, "gate": "ok", **row}
                passed &= row["gate"] == "ok"
                save(row, options)
    return 0 if passed else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run",
        action="append",
        required=True,
        choices=list(RUNS),
        help="a training; repeat for several",
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny decoder, and few pairs")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {FILE}")
    parser.add_argument("--one", type=Path, help="folder of the rows of one device")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of a WordPiece tokenizer, by default that of the packaged MiniLM",
    )
    return parser.parse_args(arguments)


def measure(run: DecoderRun, options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train a decoder.

    Args:
        run: the training.
        options: the options of the command line.
        name: the name of the run.

    Returns:
        The cells of the row. Times and losses are those of rank 0; other ranks have none.
    """
    import torch

    from tilefold.recipes import train

    work = options.output / "work"
    base = work / f"base-{options.devices}"
    with first_rank_first():
        save_tiny_base(base, options.tokenizer)
    recipe = make_recipe(run, base)
    pairs = make_collection(
        # the last batch of an epoch, which one GPU would leave short, is not reached
        2 * run.batch * run.steps,
        queries_from_documents=True,
        tokenizer_folder=options.tokenizer,
    )
    on_gpu = options.device == "cuda"
    clock = Clock(run, on_gpu)
    if on_gpu:
        # the model of the previous run is in reference cycles
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with drawn_weights(run.shape, options.device), nothing_saved() as log:
        train(recipe, pairs, work / f"{name}-{options.devices}", progress=clock, resume=False)
    peak_gib = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    reserved_gib = torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0
    return {
        "batch": run.batch,
        "steps": run.steps,
        "weights": "LoRA" if run.lora else "all",
        "sharded": run.sharded and options.devices > 1,
        **clock.cells(),
        "losses": " ".join(f"{entry['loss']:.6g}" for entry in log if "loss" in entry),
        "peak_gib": most_of_ranks(peak_gib),
        "reserved_gib": most_of_ranks(reserved_gib),
    }


def save_tiny_base(folder: Path, tokenizer_folder: Path | None) -> None:
    """Save the tokenizer and a tiny decoder, whose network is replaced when it is loaded.

    Args:
        folder: the folder. Nothing is done if it exists.
        tokenizer_folder: folder of the tokenizer. None for that of the packaged MiniLM.
    """
    if folder.exists():
        return
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.model_max_length = MAX_LENGTH
    draw_network(TINY_SHAPE, "cpu").save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def draw_network(shape: Shape, device: str) -> Any:
    """Draw the weights of a decoder on a device, with the same seed on every rank.

    Args:
        shape: the sizes of the decoder.
        device: the type of the device.

    Returns:
        A ``LlamaForCausalLM`` in bf16, as language models are published.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.intermediate,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=101,
        eos_token_id=102,
    )
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    # 4 billion weights in fp32 would be the peak of the memory
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default_dtype)


@contextmanager
def drawn_weights(shape: Shape, device: str) -> Iterator[None]:
    """Let recipes train a decoder whose weights are drawn, and not read from a folder.

    Reading 4 billion weights on every rank would take longer than the measurement.

    Args:
        shape: the sizes of the decoder.
        device: the type of the device.
    """
    from tilefold.recipes import decoders

    load_transformer = decoders.causal_transformer

    def load_with_drawn_weights(*arguments: Any, **options: Any) -> Any:
        """Load the tiny decoder, and replace its network."""
        transformer = load_transformer(*arguments, **options)
        transformer.model = draw_network(shape, device)
        return transformer

    with mock.patch.object(decoders, "causal_transformer", load_with_drawn_weights):
        yield


@contextmanager
def nothing_saved() -> Iterator[list[dict[str, float]]]:
    """Train without writing the last checkpoint and the model, in this context.

    Yields:
        A list, which gets the log of a training at its end, on rank 0.
    """
    from transformers import Trainer

    from tilefold.recipes._run import TrainingRun
    from tilefold.recipes._sharding import ShardedModel

    log: list[dict[str, float]] = []

    def keep_log(run: TrainingRun, *arguments: object) -> None:
        """Replace ``finish``, which saves the model."""
        log.extend(run.history)

    with (
        mock.patch.object(Trainer, "_save_checkpoint", do_nothing),
        mock.patch.object(ShardedModel, "gather", do_nothing),
        mock.patch.object(TrainingRun, "finish", keep_log),
    ):
        yield log


def do_nothing(*arguments: object, **options: object) -> None:
    """Replace a method that saves something."""


def make_recipe(run: DecoderRun, base: Path) -> Any:
    """Return the recipe of a run.

    Args:
        run: the training.
        base: the folder of the base model.
    """
    from tilefold.recipes import get_recipe

    is_curve = run.seed is not None
    recipe = get_recipe(
        "causal-splade",
        base_model=str(base),
        max_steps=run.steps,
        batch_size=run.batch,
        max_length=MAX_LENGTH,
        learning_rate=CURVE_LEARNING_RATE if is_curve else LEARNING_RATE,
        similarity_scale=SCALE / run.shape.vocab,
        query_regularizer=PENALTY,
        document_regularizer=PENALTY,
        gradient_checkpointing=True,
        fsdp=run.sharded,
        split_vocabulary=run.sharded,
        seed=run.seed or 0,
        save_steps=NEVER,
        save_minutes=float(NEVER),
        # a loss that is logged waits for the device
        log_steps=1 if is_curve else NEVER,
    )
    return replace(recipe, document=replace(recipe.document, lora=run.lora))


def most_of_ranks(value: float) -> float:
    """Return the largest value of all ranks. All ranks must call this."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class Clock:
    """Measures the timed steps of a training.

    Rank 0 calls it after every step.

    Args:
        run: the training.
        on_gpu: whether it runs on a GPU.
    """

    def __init__(self, run: DecoderRun, on_gpu: bool) -> None:
        self._run = run
        self._on_gpu = on_gpu
        # when the timed steps began and ended
        self._times: list[float] = []

    def __call__(self, step: int, steps: int, losses: object) -> None:
        """Note the time after a step.

        Args:
            step: the number of steps that have ended.
            steps: the number of all steps.
            losses: not used.
        """
        import torch

        if step not in (self._run.warm, steps):
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        self._times.append(time.perf_counter())

    def cells(self) -> dict[str, Any]:
        """Return the cells of the timed steps; none on ranks that were not called."""
        if len(self._times) < 2:
            return {}
        begin, end = self._times
        step_seconds = (end - begin) / self._run.timed
        return {
            "step_ms": 1e3 * step_seconds,
            "pairs_per_s": self._run.batch / step_seconds,
        }


def compare_with_one(
    name: str,
    row: Mapping[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Compare a run with the same run on one device.

    Args:
        name: the name of the run.
        row: its row.
        options: the options of the command line.

    Returns:
        Cells with the ratio of rates, and for a curve its difference and the gate. Nothing if
        there are no rows of one device.
    """
    one_rows = rows_of_one_device(options.one, FILE)
    if "pairs_per_s" not in row or name not in one_rows:
        return {}
    return compare_rates_and_curves(name, row, one_rows)


def save(row: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print a row, and write it to the results."""
    import torch

    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()
    }
    print(json.dumps(rounded), flush=True)
    provenance = collect(torch.device(options.device))
    write_csv(options.output / FILE, [row], provenance, ("run", "devices"))


if __name__ == "__main__":
    sys.exit(main())
