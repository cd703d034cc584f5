"""encode_collection with the ranks of a process group: the bytes of one process, whatever happens
to a rank.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sentence_transformers import MultiVectorEncoder, SparseEncoder

from tests.distributed.ranks import SECONDS, Rank, Ranks
from tests.integrations.multi_vector_models import build_colbert
from tests.refusals import refused
from tilefold._internal.files import LOCK, lock_folder
from tilefold.distributed import rank_store
from tilefold.distributed.rank_store import FINISHED, RESUME_HINT, RankStore
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.sentence_transformers.streaming.stream import SparseStream
from tilefold.retrieval import encode_collection, encode_tokens, read_manifest
from tilefold.retrieval.encoding.pending_shards import PendingShard
from tilefold.retrieval.errors import RankError

pytestmark = pytest.mark.usefixtures("one_thread")
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
    model: Any = (SparseEncoder if kind == "sparse" else MultiVectorEncoder)(
        str(folder),
        device="cpu",
    )
    if fast:
        accelerate(model)
    return model


def encode(
    rank: Rank,
    model_folder: Path,
    output: Path,
    changed: dict[str, Any] | None = None,
) -> Any:
    """The manifest, or the name and the text of what was raised, and what was reported."""
    calls: list[tuple[int, int]] = []
    options = {**OPTIONS, **(changed or {})}
    stop_at, fast = options.pop("stop_at", None), options.pop("fast", True)
    batches = (
        itertools.count()
        if options.pop("stop_inside", False) and rank.rank
        else itertools.repeat(0)
    )
    arrived = SparseStream._fetch

    def interrupted(self: Any, pending: Any) -> Any:
        if next(batches) == 2:
            raise KeyboardInterrupt
        return arrived(self, pending)

    texts = options.pop("texts", [TEXTS, TEXTS])[rank.rank]

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if stop_at is not None and done >= stop_at:
            raise KeyboardInterrupt

    try:
        with mock.patch.object(SparseStream, "_fetch", interrupted):
            manifest = encode_collection(
                load(model_folder, fast),
                texts,
                output,
                progress=progress,
                **options,
            )
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), calls
    return asdict(manifest), "", calls


def encode_token_vectors(rank: Rank, model_folder: Path, output: Path) -> Any:
    """The manifest of token vectors."""
    model = load(model_folder, True, "tokens")
    return asdict(
        encode_tokens(model, few_texts(), output, storage="int8", shard_size=4, batch_tokens=60),
    )


def few_texts() -> dict[str, Any]:
    """Those for a larger model."""
    return dict(list(TEXTS.items())[60:71])


def one_does_not_come(rank: Rank, model_folder: Path, output: Path) -> Any:
    """What the first rank is told when it calls alone."""
    with mock.patch.object(rank_store, "JOIN_SECONDS", 1.0):
        return None if rank.rank else encode(rank, model_folder, output)


def stands_still_at_the_end(rank: Rank, model_folder: Path, output: Path) -> Any:
    """Encode; the second rank goes on a while after it could have seen that the work is complete.

    Rank 0 waits less than this for others after a failure.
    """
    wait_for = RankStore.wait_for

    def stand_still(store: RankStore, key: str) -> Any:
        value = wait_for(store, key)
        if rank.rank and key == FINISHED:
            time.sleep(1)
            return wait_for(store, key)
        return value

    with (
        mock.patch.object(rank_store, "_LEAVE_SECONDS", 0.1),
        mock.patch.object(RankStore, "wait_for", stand_still),
    ):
        return encode(rank, model_folder, output)


def alone(rank: Rank, model_folder: Path, output: Path) -> Any:
    """Each rank on its own, into a folder of its own."""
    return encode(rank, model_folder, output / str(rank.rank), {"group": None})


def dies(rank: Rank, model_folder: Path, folder: Path) -> tuple[float, int, str]:
    """The second rank ends by itself after some batches; how soon the first raises, after what
    progress, and what.
    """
    if rank.rank:
        add_batch, left = PendingShard.add_batch, [3]

        def kill(self: Any, batch: Any, job: Any) -> None:
            left[0] -= 1
            if not left[0]:
                (folder / "died").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            add_batch(self, batch, job)

        PendingShard.add_batch = kill  # type: ignore[method-assign, assignment]
    reported = [0]
    try:
        model = load(model_folder, True)
        encode_collection(
            model,
            TEXTS,
            folder / "v",
            progress=lambda done, total: reported.append(done),
            **OPTIONS,
        )
    except RankError as error:
        return time.time() - float((folder / "died").read_text()), reported[-1], str(error)
    raise AssertionError("nothing was raised")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("alone") / "v"
    encode_collection(load(tiny_folder, True), TEXTS, folder, **OPTIONS)
    return folder


def test_the_bytes_are_those_of_one_process_and_every_rank_gets_the_manifest(
    two_ranks: Ranks,
    tiny_folder: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    (first, _, calls), (second, _, others) = two_ranks.run(encode, tiny_folder, tmp_path / "v")
    assert contents(tmp_path / "v") == contents(whole)
    assert first == second == asdict(read_manifest(whole)) and set(first["failed"]) == {
        "number",
        "half",
    }
    assert (
        calls[0] == (0, 73) and calls[-1] == (73, 73) and calls == sorted(set(calls)) and not others
    )


@pytest.mark.parametrize(
    ("fast", "sizes"),
    [(True, {"shard_size": 2, "batch_tokens": 4096}), (False, {"batch_tokens": None})],
)
def test_shards_of_one_batch_keep_a_rank_going_and_a_plain_model_is_shared_too(
    two_ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
    fast: bool,
    sizes: dict[str, Any],
) -> None:
    encode_collection(load(tiny_folder, fast), TEXTS, tmp_path / "one", **{**OPTIONS, **sizes})
    two_ranks.run(encode, tiny_folder, tmp_path / "two", {"fast": fast, **sizes})
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_token_vectors_are_shared_too(two_ranks: Ranks, tmp_path: Path) -> None:
    build_colbert().save_pretrained(str(tmp_path / "model"), create_model_card=False)
    first, second = two_ranks.run(encode_token_vectors, tmp_path / "model", tmp_path / "two")
    model = load(tmp_path / "model", True, "tokens")
    manifest = encode_tokens(
        model,
        few_texts(),
        tmp_path / "one",
        storage="int8",
        shard_size=4,
        batch_tokens=60,
    )
    assert first == second == asdict(manifest) and set(manifest.failed) == {"number"}
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_ranks_on_their_own_write_folders_of_their_own(
    two_ranks: Ranks,
    tiny_folder: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    two_ranks.run(alone, tiny_folder, tmp_path)
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(whole)


def test_one_process_goes_on_where_two_were_interrupted_and_two_where_one_was(
    two_ranks: Ranks,
    tiny_folder: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    model = load(tiny_folder, True)
    (raised, _, calls), (other, _, _) = two_ranks.run(
        encode,
        tiny_folder,
        tmp_path / "a",
        {"stop_at": 16},
    )
    assert raised == other == "KeyboardInterrupt" and calls[-1][0] >= 16
    assert read_manifest(tmp_path / "a").n_documents >= 16
    (tmp_path / "a" / LOCK).unlink()  # which ends with the first rank's process
    encode_collection(model, TEXTS, tmp_path / "a", **OPTIONS)

    def stop(done: int, total: int) -> None:
        if 16 < done < 22:
            raise KeyboardInterrupt

    few = {**OPTIONS, "batch_size": 2}
    with pytest.raises(KeyboardInterrupt):
        encode_collection(model, TEXTS, tmp_path / "b", progress=stop, save_minutes=0.0, **few)
    assert read_manifest(tmp_path / "b").partial["shard"] == 2
    (tmp_path / "b" / LOCK).unlink()
    two_ranks.run(encode, tiny_folder, tmp_path / "b", {"batch_size": 2})
    encode_collection(model, TEXTS, tmp_path / "c", **few)
    assert contents(tmp_path / "a") == contents(whole) and contents(tmp_path / "b") == contents(
        tmp_path / "c",
    )


def test_ctrl_c_within_the_model_of_one_rank_ends_all_while_a_thread_waits_for_its_next_shard(
    two_ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    options = {"stop_inside": True, "shard_size": 1}
    (first, _, _), (second, _, _) = two_ranks.run(encode, tiny_folder, tmp_path / "v", options)
    assert first == second == "KeyboardInterrupt"


def test_ranks_that_were_given_different_things_are_told(
    two_ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    texts = [{f"d{i}": f"cats {i + rank}" for i in range(20)} for rank in range(2)]
    texts[1] = SlowTexts(texts[1])  # so that the first rank has encoded all before it hears of them
    (kind, first, _), (other, second, _) = two_ranks.run(
        encode,
        tiny_folder,
        tmp_path / "v",
        {"texts": texts},
    )
    assert (kind, other) == ("DataError", "RankError")
    assert "rank 1 encodes something else (texts_sha256: other texts)" in first and first in second
    assert not read_manifest(tmp_path / "v").shards


def test_what_fails_on_one_rank_ends_all(
    two_ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "notes.txt").write_text("mine")
    (kind, first, _), (other, second, _) = two_ranks.run(encode, tiny_folder, tmp_path / "v")
    assert (kind, other) == (
        "FileExistsError",
        "RankError",
    ) and second == f"rank 0: FileExistsError: {first} {RESUME_HINT}"
    texts = [dict.fromkeys((f"d{i}" for i in range(40)), 3)] * 2
    (kind, first, _), (other, second, _) = two_ranks.run(
        encode,
        tiny_folder,
        tmp_path / "w",
        {"texts": texts, "shard_size": 20},
    )
    assert (
        (kind, other) == ("DataError", "RankError")
        and "all 20 of shard 0 failed" in first
        and first in second
    )


def test_a_rank_that_does_not_come_is_missed(
    two_ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    (kind, message, _), _ = two_ranks.run(one_does_not_come, tiny_folder, tmp_path / "v")
    assert (
        kind == "RankError"
        and "expected a call on every rank of the process group within 1 s" in message
        and "group=None" in message
    )
    two_ranks.close()  # gloo is of no use after that


def test_a_rank_that_stands_still_when_all_work_is_done_does_not_fail(
    two_ranks: Ranks,
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    (manifest, _, _), other = two_ranks.run(stands_still_at_the_end, tiny_folder, tmp_path / "v")
    assert other == (manifest, "", [])


def test_a_rank_that_dies_is_told_at_once_and_nothing_that_was_reported_is_lost(
    two_ranks: Ranks,
    tiny_folder: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    first, second = two_ranks.start(dies, tiny_folder, tmp_path)
    waited, reported, message = first.result(timeout=SECONDS)
    refused(BrokenProcessPool, "terminated abruptly", second.result)
    two_ranks.close()
    assert waited < SECONDS / 5, "a time-out should not have ended rank 0"
    assert message == f"rank 1 ended before the work was done. {RESUME_HINT}"
    assert read_manifest(tmp_path / "v").n_documents >= reported - 2
    encode_collection(load(tiny_folder, True), TEXTS, tmp_path / "v", **OPTIONS)
    assert contents(tmp_path / "v") == contents(whole)


def test_a_rank_whose_folder_is_just_being_removed_has_left(tmp_path: Path) -> None:
    lock_folder(tmp_path / "home", reentrant=False).release()
    with mock.patch.object(rank_store, "lock_folder", side_effect=FileNotFoundError):
        assert rank_store.has_left(tmp_path / "home")


def test_of_several_errors_the_first_ends_the_work_of_all(tmp_path: Path) -> None:
    homes = [tmp_path / "first", tmp_path / "second"]
    locks = [lock_folder(home) for home in homes]
    ranks = [RankStore(rank, homes) for rank in (0, 1)]
    for rank, message in ((1, "the cause"), (0, "a consequence")):
        with pytest.raises(ValueError, match=message), ranks[rank].sharing_failures():
            raise ValueError(message)
    for each in ranks:
        refused(RankError, r"^rank 1: ValueError: the cause ", each.raise_failure)
    for lock in locks:
        lock.release()
