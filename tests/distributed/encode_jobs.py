"""What ranks run in ``test_encoding.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from tests.distributed.ranks import Rank
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.retrieval import _meeting, encode_collection, encode_tokens
from tilefold.retrieval._made import Shard
from tilefold.retrieval.errors import RankError

OPTIONS: dict[str, Any] = {"shard_size": 8, "top_k": 20, "batch_tokens": 60}
TEXTS: dict[str, Any] = {
    **{f"d{i}": "cats sleep and dogs run " * (i % 7) + f"text {i}" for i in range(70)},
    "number": 3,
    "half": "cats \ud800",
    "last": "dogs",
}


class SlowTexts(dict[str, Any]):
    """Texts that it takes a while to list."""

    def __iter__(self) -> Iterator[str]:
        time.sleep(1)
        return super().__iter__()


def load(folder: Path, fast: bool, kind: str = "sparse") -> Any:
    """The model, on the CPU."""
    model: Any = (SparseEncoder if kind == "sparse" else MultiVectorEncoder)(str(folder), device="cpu")
    if fast:
        accelerate(model)
    return model


def encode(rank: Rank, model_folder: Path, output: Path, changed: dict[str, Any] | None = None) -> Any:
    """The manifest, or the name and the text of what was raised, and what was reported."""
    calls: list[tuple[int, int]] = []
    options = {**OPTIONS, **(changed or {})}
    stop_at, fast = options.pop("stop_at", None), options.pop("fast", True)
    texts = options.pop("texts", [TEXTS, TEXTS])[rank.rank]

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if stop_at is not None and done >= stop_at:
            raise KeyboardInterrupt

    try:
        manifest = encode_collection(load(model_folder, fast), texts, output, progress=progress, **options)
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), calls
    return asdict(manifest), "", calls


def encode_token_vectors(rank: Rank, model_folder: Path, output: Path) -> Any:
    """The manifest of token vectors."""
    model = load(model_folder, True, "tokens")
    return asdict(encode_tokens(model, few_texts(), output, storage="int8", shard_size=4, batch_tokens=60))


def few_texts() -> dict[str, Any]:
    """Those for a larger model."""
    return dict(list(TEXTS.items())[60:71])


def one_does_not_come(rank: Rank, model_folder: Path, output: Path) -> str:
    """What the first rank is told when it calls alone."""
    if rank.rank:
        return ""
    usual, _meeting.MEET_SECONDS = _meeting.MEET_SECONDS, 1.0
    try:
        encode_collection(load(model_folder, True), TEXTS, output, **OPTIONS)
    except RankError as error:
        return str(error)
    finally:
        _meeting.MEET_SECONDS = usual
    return "nothing"


def alone(rank: Rank, model_folder: Path, output: Path) -> Any:
    """Each rank on its own, into a folder of its own."""
    return asdict(encode_collection(load(model_folder, True), TEXTS, output / str(rank.rank), group=None, **OPTIONS))


def dies(rank: int, model: Any, folder: Path, meet: Path) -> str:
    """The second of two forked ranks ends by itself after some batches; what the first one raises, and how soon."""
    import os
    import signal

    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    if rank:
        take, left = Shard.take, [3]

        def kill(self: Any, batch: Any, job: Any) -> None:
            left[0] -= 1
            if not left[0]:
                (folder / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            take(self, batch, job)

        Shard.take = kill  # type: ignore[method-assign, assignment]
    reported = [0]
    try:
        encode_collection(model, TEXTS, folder / "v", progress=lambda done, total: reported.append(done), **OPTIONS)
    except RankError as error:
        waited = time.time() - float((folder / "died").read_text())
        return f"{waited:.2f} {reported[-1]} {error}"
    return "nothing was raised"


torch.set_num_threads(1)
