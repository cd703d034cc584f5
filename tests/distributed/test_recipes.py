"""Recipes on several ranks: the batches, negatives and penalties of one process, one writer, and
what a kill leaves.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator
from transformers import AutoModelForMaskedLM

from tests import programs
from tests.distributed.ranks import Rank, Ranks
from tests.processes import ROOT
from tests.recipes.small import small_collection, tiny_masked_lm, with_dev
from tests.refusals import refused
from tilefold._internal.files import LOCK
from tilefold.distributed.world import KEPT
from tilefold.recipes import ColbertRecipe, get_recipe, train
from tilefold.recipes._run import newest_step
from tilefold.recipes._watch import Watcher

pytest.importorskip("datasets")
# three epochs of whole batches: 12 pairs, 6 of them a step
SMALL: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 6,
    "max_length": 24,
    "bf16": False,
    "save_steps": 2,
}
SMALL |= {"learning_rate": 1e-3}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without dropout, of which every rank draws its own."""
    folder = tiny_masked_lm(tmp_path_factory.mktemp("base"), small_collection(), layers=1, bias=0.1)
    config = json.loads((folder / "config.json").read_text())
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config | rates))
    return str(folder)


@pytest.fixture(scope="session")
def exact_base(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same in fp64: of gradients that are rounding, as those of some terms are in fp32, Adam
    makes whole steps.
    """
    folder = shutil.copytree(base, tmp_path_factory.mktemp("exact") / "base")
    AutoModelForMaskedLM.from_pretrained(base, dtype=torch.float64).save_pretrained(folder)
    return str(folder)


def recipe_of(kind: str, base: str) -> Any:
    if kind == "colbert":
        return ColbertRecipe(base, dimension=16, **SMALL)
    if kind == "splade":
        return get_recipe(
            "splade",
            base_model=base,
            query_regularizer=0.3,
            document_regularizer=0.2,
            **SMALL,
        )
    if kind == "grouped":
        return get_recipe("splade", base_model=base, group_by_length=True, **SMALL)
    return get_recipe(kind, base_model=base, **SMALL)


def run_of(rank: Rank, recipe: Any, folder: Path, collection: Any = None, **options: Any) -> Any:
    """The result of this rank, as torchrun would start it, or the kind and the text of its error."""
    place = {
        "RANK": rank.rank,
        "LOCAL_RANK": rank.rank,
        "WORLD_SIZE": rank.size,
        "MASTER_PORT": 29401,
    }
    given = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, given), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # none reaches a user
        try:
            return asdict(train(recipe, collection or small_collection(), folder, **options))
        except (ValueError, RuntimeError, FileExistsError) as error:
            return type(error).__name__, str(error)


def dying_run(rank: Rank, recipe: Any, folder: Path, dead: int, step: int) -> Any:
    """:func:`run_of` where a rank ends by itself after a step."""
    stock = Watcher.on_step_end

    def on_step_end(self: Any, args: object, state: Any, *others: Any, **more: Any) -> None:
        if rank.rank == dead and state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        stock(self, args, state, *others, **more)

    with mock.patch.object(Watcher, "on_step_end", on_step_end):
        return run_of(rank, recipe, folder)


def hurried_run(rank: Rank, recipe: Any, folder: Path) -> Any:
    return run_of(rank, recipe, folder, hours=1e-9)


def evaluated_run(rank: Rank, recipe: Any, folder: Path) -> Any:
    """:func:`run_of` with a split to evaluate, and how often this rank evaluates it."""
    made = SparseInformationRetrievalEvaluator
    with mock.patch.object(made, "__call__", autospec=True, side_effect=made.__call__) as calls:
        return run_of(rank, recipe, folder, with_dev()), calls.call_count


def other_runs(rank: Rank, recipe: Any, folder: Path) -> Any:
    return run_of(rank, replace(recipe, seed=rank.rank), folder)


def curve(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if "loss" in name or "penalty" in name}
        for row in rows
    ]


def assert_near(one: Path, other: Path) -> None:
    """The same weights, but for sums in another order and what Adam makes of them."""
    left, right = (load_file(folder / "model.safetensors") for folder in (one, other))
    for name, value in left.items():
        apart = SMALL["learning_rate"] * (1e-6 if value.dtype == torch.float64 else 1 / 20)
        torch.testing.assert_close(right[name], value, rtol=0, atol=apart, msg=name)


@pytest.mark.parametrize(
    "kind",
    ["splade", "grouped", "colbert", "deepct", "splade-doc", "prosper"],
)
def test_several_ranks_have_the_losses_of_one_process(
    two_ranks: Ranks,
    kind: str,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(kind, base)
    alone = train(recipe, small_collection(), tmp_path / "one")
    results = two_ranks.run(run_of, recipe, tmp_path / "two")
    for row, expected in zip(curve(tmp_path / "two"), curve(tmp_path / "one"), strict=True):
        assert row == pytest.approx(expected, rel=2e-4)  # of numbers with four decimals
    assert [found["ranks"] for found in results] == [2, 2] and alone.ranks == 1
    assert [(found["pairs"], found["negatives"]) for found in results] == [(6, alone.negatives)] * 2
    assert results[0]["truncated"] == asdict(alone)["truncated"]
    assert two_ranks.run(run_of, recipe, tmp_path / "one")[1]["reused"]


@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_mini_batches_have_the_losses_of_whole_ones(
    two_ranks: Ranks,
    kind: str,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(kind, base)
    train(recipe, small_collection(), tmp_path / "whole")
    cached = replace(recipe, mini_batch_size=2)
    train(cached, small_collection(), tmp_path / "one")
    two_ranks.run(run_of, cached, tmp_path / "two")
    for name in ("one", "two"):
        for row, expected in zip(curve(tmp_path / name), curve(tmp_path / "whole"), strict=True):
            assert row == pytest.approx(expected, rel=2e-4)


def test_the_first_rank_evaluates_and_all_stop_and_keep_the_best(
    two_ranks: Ranks,
    exact_base: str,
    tmp_path: Path,
) -> None:
    changed = {
        "max_steps": 20,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "evaluate_steps": 2,
        "patience": 2,
    }
    recipe = replace(recipe_of("splade", exact_base), **changed)
    alone = train(recipe, with_dev(), tmp_path / "one")
    for rank, (found, calls) in enumerate(two_ranks.run(evaluated_run, recipe, tmp_path / "two")):
        assert calls == len(alone.evaluations) * (rank == 0)
        assert (found["steps"], found["kept_step"]) == (alone.steps, alone.kept_step) and found[
            "steps"
        ] < 20
        for row, expected in zip(found["evaluations"], alone.evaluations, strict=True):
            assert row == pytest.approx(expected)
    assert_near(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank_ends_the_others_and_one_process_goes_on(
    two_ranks: Ranks,
    dead: int,
    exact_base: str,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe_of("splade", exact_base), batch_size=4, save_steps=2)
    futures = two_ranks.start(dying_run, recipe, tmp_path / "m", dead, 5)
    kind, told = futures[1 - dead].result(timeout=100)
    refused(BrokenProcessPool, "terminated abruptly", futures[dead].result)
    two_ranks.close()
    assert (
        kind == "RankError"
        and told.startswith(f"rank {1 - dead}: another rank ended, or")
        and KEPT in told
    )
    assert newest_step(tmp_path / "m") == 4 and not (tmp_path / "m").exists()
    train(recipe, small_collection(), tmp_path / "one")
    assert train(recipe, small_collection(), tmp_path / "m").resumed_from == 4
    assert_near(tmp_path / "m", tmp_path / "one")


def test_two_ranks_go_on_where_one_process_stopped(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    def stop(step: int, *_: object) -> None:
        if step == 5:
            raise KeyboardInterrupt

    recipe = replace(recipe_of("colbert", base), max_steps=8)
    refused(
        KeyboardInterrupt,
        "^$",
        train,
        recipe,
        small_collection(),
        tmp_path / "m",
        progress=stop,
    )
    (tmp_path / "m.training" / LOCK).unlink()  # which ends with its process
    for kind, told in two_ranks.run(
        hurried_run,
        recipe,
        tmp_path / "m",
    ):  # the ranks agree a step later
        assert kind == "OutOfTimeError" and "at step 6 of 8" in told
    assert [found["resumed_from"] for found in two_ranks.run(run_of, recipe, tmp_path / "m")] == [
        6,
        6,
    ]
    train(recipe, small_collection(), tmp_path / "one")
    assert_near(tmp_path / "m", tmp_path / "one")


def test_an_epoch_has_as_many_steps_on_two_ranks_as_in_one_process(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    def stop(step: int, *_: object) -> None:
        if step == 4:
            raise KeyboardInterrupt

    recipe = replace(
        recipe_of("splade", base),
        batch_size=8,
        max_steps=None,
        epochs=3,
        save_steps=3,
    )
    refused(
        KeyboardInterrupt,
        "^$",
        train,
        recipe,
        small_collection(),
        tmp_path / "m",
        progress=stop,
    )
    (tmp_path / "m.training" / LOCK).unlink()  # which ends with its process
    for result in two_ranks.run(run_of, recipe, tmp_path / "m"):
        assert (result["resumed_from"], result["steps"]) == (3, 6)
        # 8 + 4 + 8 pairs in one process, then full batches of the 12 pairs
        assert (result["trained_pairs"], result["fewest_pairs"]) == (44, 4)


def test_what_ranks_cannot_share_is_refused_on_all_of_them(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_of("splade", base)
    for kind, told in two_ranks.run(run_of, replace(recipe, batch_size=7), tmp_path / "m"):
        assert kind == "ArgumentError"
        assert "batch_size: must be a multiple of the 2 ranks, got 7; take 6" in told
    for _, told in two_ranks.run(run_of, replace(recipe, batch_size=14), tmp_path / "m"):
        assert "batch_size: must be at most the 12 rows of the data, because several ranks" in told
    repeated = small_collection()
    for number in range(12):  # 12 pairs of 4 query texts
        name = f"q{number}"
        repeated.queries[name] = repeated.queries[f"q{number % 4}"]
    for kind, told in two_ranks.run(run_of, recipe, tmp_path / "m", repeated):
        assert kind == "ArgumentError"
        assert "batch_size: must be at most the 4 different queries of the training pairs" in told
    for _, told in two_ranks.run(other_runs, recipe, tmp_path / "m"):
        assert "recipe and data must be the same on all ranks" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (kind, first), (other, second) = two_ranks.run(run_of, recipe, tmp_path / "mine")
    assert (kind, other) == (
        "FileExistsError",
        "RankError",
    ) and second == f"rank 0: FileExistsError: {first}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_the_command_starts_ranks_and_says_when_one_was_killed(base: str, tmp_path: Path) -> None:
    small_collection().save_beir(tmp_path / "data")
    command = [
        "-m",
        "tilefold.cli",
        "train",
        "--model",
        base,
        "--data",
        tmp_path / "data",
        "--output",
        tmp_path / "m",
    ]
    command += [
        "--batch-size",
        "4",
        "--max-length",
        "24",
        "--fp32",
        "--save-steps",
        "2",
        "--devices",
        "2",
        "--json",
    ]
    with programs.start(
        *command,
        "--steps",
        "2000",
        cwd=ROOT,
        stderr=tmp_path / "errors",
    ) as process:
        while not newest_step(tmp_path / "m"):
            assert process.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        assert process.wait(100) == 1
    assert re.search(
        r"Error: rank \d was ended by signal 9\. Run the same",
        (tmp_path / "errors").read_text(),
    )
    assert newest_step(tmp_path / "m")
    with programs.start(
        *command,
        "--steps",
        "4",
        "--fresh",
        cwd=ROOT,
        stdout=programs.PIPE,
    ) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    assert (found["steps"], found["ranks"], found["pairs"], found["negatives"]) == (4, 2, 4, 3)
    assert SparseEncoder(found["model_dir"], device="cpu").encode(["a text"]).shape[0] == 1
