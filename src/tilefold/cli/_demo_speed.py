"""Measures the speed of the demo's model on this machine with a few batches, before the demo is planned."""
# ruff: noqa: PLC0415 - heavy packages are imported by the functions that need them

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilefold.cli._demo_plan import Speed, Texts, Work

if TYPE_CHECKING:
    from tilefold.recipes.splade import SpladeRecipe
    from tilefold.retrieval.collection import Collection

ENCODED = 64
ROUNDS = 2  # the first round warms up memory and caches


def measure(recipe: SpladeRecipe, collection: Collection, order: list[str], judged: int) -> tuple[Speed, Work, Texts]:
    """Encode and train a few batches as `recipe` will; also returns the token counts of the collection."""
    from tilefold.integrations.sentence_transformers import accelerate
    from tilefold.recipes.quiet import quiet_libraries
    from tilefold.recipes.splade import load_base_model

    texts = [collection.documents[name].contents for name in order]
    with quiet_libraries():
        model = load_base_model(recipe, texts)
        accelerate(model)
        lengths = [len(ids) for ids in model.tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
        sample = sorted(texts[:: max(1, len(texts) // ENCODED)][:ENCODED], key=len)
        mean = sum(min(length, recipe.max_length) for length in lengths) / len(lengths)
        work = Work.of(model[0].model.config, mean)
        dense, encoding = _inference(model, sample, recipe.batch_size, work)
        training, query_length = _training(model, recipe, collection, sample, work)
    return Speed(dense, encoding, training), work, Texts(lengths, judged, query_length)


def _inference(model: Any, sample: list[str], batch_size: int, work: Work) -> tuple[float, float]:
    """Operations per second of the encoder alone, and of encoding with the head."""
    import torch

    from tilefold.integrations.sentence_transformers import encode_sparse
    from tilefold.recipes.precision import fast_inference

    batches = [_features(model, sample[start : start + batch_size]) for start in range(0, len(sample), batch_size)]
    tokens = sum(_tokens(batch) for batch in batches)
    network = model[0].model.base_model

    def encoder() -> None:
        for batch in batches:
            network(**batch)[0].sum().item()

    def whole() -> None:
        encode_sparse(model, sample, task="document", batch_size=batch_size, top_k=128)

    with torch.no_grad(), fast_inference():
        return tokens * work.encoder / _seconds(encoder), tokens * work.encoding / _seconds(whole)


def _training(
    model: Any, recipe: SpladeRecipe, collection: Collection, sample: list[str], work: Work
) -> tuple[float, float]:
    """Operations per second of forward + backward, and the tokens per query including the padding of its batch."""
    from tilefold.recipes.precision import fast_inference
    from tilefold.recipes.splade import make_loss

    names = sorted(collection.qrels["train"])[: recipe.batch_size]
    middle = max(0, (len(sample) - len(names)) // 2)
    model.max_seq_length = recipe.train_max_length or recipe.max_length
    sides = [
        _features(model, [collection.queries[name] for name in names]),
        _features(model, (sample[middle : middle + len(names)] * len(names))[: len(names)]),
    ]
    loss = make_loss(model, recipe)
    model.train()

    def step() -> None:
        with fast_inference():
            value = loss([dict(side) for side in sides], None)
            sum(value.values()).backward()
        model.zero_grad()

    query_length = _tokens(sides[0]) / len(names)
    tokens = len(names) * query_length + _tokens(sides[1])
    return tokens * work.training / _seconds(step), query_length


def _features(model: Any, texts: list[str]) -> dict[str, Any]:
    features = model.preprocess(texts)
    return {name: value.to(model.device) for name, value in features.items() if hasattr(value, "to")}


def _tokens(features: dict[str, Any]) -> int:
    """Tokens of a batch, without padding."""
    mask = features.get("attention_mask")
    return int(features["input_ids"].numel() if mask is None else mask.sum())


def _seconds(run: Callable[[], None]) -> float:
    """Time of the fastest of a few rounds, synchronised with the GPU if there is one."""
    import torch

    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)
