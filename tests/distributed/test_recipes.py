"""Recipes on several ranks train like one process, and survive the death of a rank.

Functions that take a :class:`Rank` run in every process of a group.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
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
from tests.distributed.ranks import SECONDS, Rank, Ranks
from tests.ports import free_ports
from tests.processes import ROOT, environment
from tests.recipes.small import small_collection, tiny_masked_lm, with_dev
from tilefold._internal.files import LOCK
from tilefold.distributed.world import RESUME_HINT
from tilefold.recipes import ColbertRecipe, get_recipe, train
from tilefold.recipes._run import newest_step
from tilefold.recipes._watch import Watcher

pytest.importorskip("datasets")
# Three epochs of whole batches: there are 12 pairs, and a step takes 6 of them.
SMALL: dict[str, Any] = {
    "max_steps": 6,
    "batch_size": 6,
    "max_length": 24,
    "bf16": False,
    "save_steps": 2,
    "learning_rate": 1e-3,
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model without dropout, which would differ between ranks."""
    folder = tiny_masked_lm(tmp_path_factory.mktemp("base"), small_collection(), layers=1, bias=0.1)
    config = json.loads((folder / "config.json").read_text())
    config["hidden_dropout_prob"] = 0.0
    config["attention_probs_dropout_prob"] = 0.0
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def exact_base(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model in fp64.

    In fp32 the gradients of some terms are nothing but rounding, and Adam makes whole steps of
    them.
    """
    folder = shutil.copytree(base, tmp_path_factory.mktemp("exact") / "base")
    AutoModelForMaskedLM.from_pretrained(base, dtype=torch.float64).save_pretrained(folder)
    return str(folder)


def recipe_of(kind: str, base: str) -> Any:
    """A short training run of a recipe.

    Args:
        kind: ``"colbert"``, ``"grouped"`` (SPLADE on texts of similar length) or the name of a
            recipe.
        base: Folder of the model to train.
    """
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


def run_recipe(
    rank: Rank, recipe: Any, folder: Path, collection: Any = None, **options: Any
) -> Any:
    """Train as torchrun would start it.

    Returns:
        The result of this rank, or the type and the text of its error.
    """
    environment = {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29401",
    }
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # none reaches a user
        try:
            return asdict(train(recipe, collection or small_collection(), folder, **options))
        except (ValueError, RuntimeError, FileExistsError) as error:
            return type(error).__name__, str(error)


def run_with_killed_rank(
    rank: Rank,
    recipe: Any,
    folder: Path,
    killed_rank: int,
    step: int,
) -> Any:
    """:func:`run_recipe`, except that a rank kills itself after a step."""
    on_step_end = Watcher.on_step_end

    def on_step_end_or_die(
        self: Any,
        args: object,
        state: Any,
        *arguments: Any,
        **options: Any,
    ) -> None:
        if rank.rank == killed_rank and state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        on_step_end(self, args, state, *arguments, **options)

    with mock.patch.object(Watcher, "on_step_end", on_step_end_or_die):
        return run_recipe(rank, recipe, folder)


def run_out_of_time(rank: Rank, recipe: Any, folder: Path) -> Any:
    return run_recipe(rank, recipe, folder, hours=1e-9)


def run_with_evaluation(
    rank: Rank,
    recipe: Any,
    folder: Path,
    evaluator: Any = SparseInformationRetrievalEvaluator,
) -> tuple[Any, int]:
    """:func:`run_recipe` with a dev split, and how often this rank evaluates it."""
    with mock.patch.object(
        evaluator,
        "__call__",
        autospec=True,
        side_effect=evaluator.__call__,
    ) as calls:
        return run_recipe(rank, recipe, folder, with_dev()), calls.call_count


def run_with_seed_of_rank(rank: Rank, recipe: Any, folder: Path) -> Any:
    return run_recipe(rank, replace(recipe, seed=rank.rank), folder)


def logged_losses(folder: Path) -> list[dict[str, float]]:
    """Losses and penalties of every logged step."""
    steps = []
    for line in (folder / "training_log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        steps.append(
            {name: value for name, value in entry.items() if "loss" in name or "penalty" in name},
        )
    return steps


def assert_same_losses(folder: Path, expected_folder: Path) -> None:
    """Check the losses of two runs, which are logged with four decimals."""
    pairs = zip(logged_losses(folder), logged_losses(expected_folder), strict=True)
    for step, expected in pairs:
        assert step == pytest.approx(expected, rel=2e-4)


def assert_near(folder: Path, expected_folder: Path) -> None:
    """Check that weights are the same, except for sums in another order.

    Adam amplifies their differences, so the tolerance is a part of the learning rate.
    """
    files = sorted(path.relative_to(folder) for path in folder.rglob("model.safetensors"))
    assert files
    for file in files:
        weights = load_file(folder / file)
        expected_weights = load_file(expected_folder / file)
        for name, value in weights.items():
            torch.testing.assert_close(
                expected_weights[name],
                value,
                # The best checkpoint of a projection is loaded in fp32.
                rtol=torch.finfo(torch.float32).eps,
                atol=SMALL["learning_rate"] * tolerance_of(value.dtype),
                msg=f"{file}: {name}",
            )


def tolerance_of(dtype: torch.dtype) -> float:
    """How much weights may differ, as a part of the learning rate."""
    return 1e-5 if dtype == torch.float64 else 1 / 20


def train_until_interrupted(recipe: Any, folder: Path, last_step: int) -> None:
    """Train in this process, and interrupt it at a step, as the end of the process would."""

    def interrupt(step: int, *_: object) -> None:
        if step == last_step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, small_collection(), folder, progress=interrupt)
    # The lock ends with its process.
    (folder.with_name(f"{folder.name}.training") / LOCK).unlink()


@pytest.mark.parametrize(
    "kind",
    [
        "splade",
        "colbert",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("grouped", "deepct", "splade-doc", "prosper")
        ),
    ],
)
def test_several_ranks_have_the_losses_of_one_process(
    two_ranks: Ranks,
    kind: str,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(kind, base)
    expected = train(recipe, small_collection(), tmp_path / "one")
    results = two_ranks.run(run_recipe, recipe, tmp_path / "two")
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert expected.ranks == 1
    for result in results:
        assert result["ranks"] == 2
        assert result["pairs"] == 6
        assert result["negatives"] == expected.negatives
    assert results[0]["truncated"] == asdict(expected)["truncated"]
    _, second_result = two_ranks.run(run_recipe, recipe, tmp_path / "one")
    assert second_result["reused"]


@pytest.mark.parametrize("kind", ["splade", pytest.param("colbert", marks=pytest.mark.slow)])
def test_mini_batches_have_the_losses_of_whole_batches(
    two_ranks: Ranks,
    kind: str,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_of(kind, base)
    train(recipe, small_collection(), tmp_path / "whole")
    mini_batches = replace(recipe, mini_batch_size=2)
    train(mini_batches, small_collection(), tmp_path / "one")
    two_ranks.run(run_recipe, mini_batches, tmp_path / "two")
    assert_same_losses(tmp_path / "one", tmp_path / "whole")
    assert_same_losses(tmp_path / "two", tmp_path / "whole")


@pytest.mark.slow
def test_rank_0_evaluates_and_all_ranks_stop_and_return_the_best_step(
    two_ranks: Ranks,
    exact_base: str,
    tmp_path: Path,
) -> None:
    recipe = replace(
        recipe_of("splade", exact_base),
        max_steps=20,
        batch_size=4,
        learning_rate=1e-2,
        evaluate_steps=2,
        patience=2,
    )
    expected = train(recipe, with_dev(), tmp_path / "one")
    assert expected.steps < 20
    results = two_ranks.run(run_with_evaluation, recipe, tmp_path / "two")
    assert [n_evaluations for _, n_evaluations in results] == [len(expected.evaluations), 0]
    for result, _ in results:
        assert result["steps"] == expected.steps
        assert result["kept_step"] == expected.kept_step
        for measures, expected_measures in zip(
            result["evaluations"],
            expected.evaluations,
            strict=True,
        ):
            assert measures == pytest.approx(expected_measures)
    assert_near(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("killed_rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_one_process_resumes(
    two_ranks: Ranks,
    killed_rank: int,
    exact_base: str,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe_of("splade", exact_base), batch_size=4, save_steps=2)
    output = tmp_path / "m"
    futures = two_ranks.start(run_with_killed_rank, recipe, output, killed_rank, 5)
    other_rank = 1 - killed_rank
    error, message = futures[other_rank].result(timeout=SECONDS)
    with pytest.raises(BrokenProcessPool, match="terminated abruptly"):
        futures[killed_rank].result()
    two_ranks.close()
    assert error == "RankError"
    assert message.startswith(f"rank {other_rank}: another rank ended, or")
    assert RESUME_HINT in message
    assert newest_step(output) == 4
    assert not output.exists()
    train(recipe, small_collection(), tmp_path / "one")
    assert train(recipe, small_collection(), output).resumed_from == 4
    assert_near(output, tmp_path / "one")


def test_two_ranks_resume_where_one_process_stopped(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = replace(recipe_of("colbert", base), max_steps=8)
    output = tmp_path / "m"
    train_until_interrupted(recipe, output, last_step=5)
    # The ranks agree on the time that is over a step later.
    for error, message in two_ranks.run(run_out_of_time, recipe, output):
        assert error == "OutOfTimeError"
        assert "at step 6 of 8" in message
    for result in two_ranks.run(run_recipe, recipe, output):
        assert result["resumed_from"] == 6
    train(recipe, small_collection(), tmp_path / "one")
    assert_near(output, tmp_path / "one")


def test_an_epoch_has_as_many_steps_on_two_ranks_as_in_one_process(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = replace(
        recipe_of("splade", base),
        batch_size=8,
        max_steps=None,
        epochs=3,
        save_steps=3,
    )
    train_until_interrupted(recipe, tmp_path / "m", last_step=4)
    for result in two_ranks.run(run_recipe, recipe, tmp_path / "m"):
        assert (result["resumed_from"], result["steps"]) == (3, 6)
        # 8 + 4 + 8 pairs in one process, then full batches of the 12 pairs
        assert (result["trained_pairs"], result["fewest_pairs"]) == (44, 4)


@pytest.mark.parametrize(
    ("batch_size", "message"),
    [
        pytest.param(
            7,
            "batch_size: must be a multiple of the 2 ranks, got 7; use 6",
            id="no multiple of the ranks",
        ),
        pytest.param(
            14,
            "batch_size: must be at most the 12 rows of the data, because several ranks",
            id="more than rows",
        ),
    ],
)
def test_batch_sizes_that_ranks_cannot_share_are_refused_on_all(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
    batch_size: int,
    message: str,
) -> None:
    recipe = replace(recipe_of("splade", base), batch_size=batch_size)
    for error, text in two_ranks.run(run_recipe, recipe, tmp_path / "m"):
        assert error == "ArgumentError"
        assert message in text
    assert not list(tmp_path.iterdir())


def test_batches_of_more_than_the_different_queries_are_refused_on_all_ranks(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    collection = small_collection()
    for number in range(12):  # 12 pairs of 4 query texts
        collection.queries[f"q{number}"] = collection.queries[f"q{number % 4}"]
    recipe = recipe_of("splade", base)
    for error, message in two_ranks.run(run_recipe, recipe, tmp_path / "m", collection):
        assert error == "ArgumentError"
        assert (
            "batch_size: must be at most the 4 different queries of the training pairs" in message
        )
    assert not list(tmp_path.iterdir())


def test_recipes_that_differ_between_ranks_are_refused_on_all(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    recipe = recipe_of("splade", base)
    for _, message in two_ranks.run(run_with_seed_of_rank, recipe, tmp_path / "m"):
        assert "recipe and data must be the same on all ranks" in message
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_files_is_refused_on_all_ranks(
    two_ranks: Ranks,
    base: str,
    tmp_path: Path,
) -> None:
    output = tmp_path / "notes"
    output.mkdir()
    (output / "notes.txt").write_text("notes")
    results = two_ranks.run(run_recipe, recipe_of("splade", base), output)
    (error, message), (other_error, other_message) = results
    assert error == "FileExistsError"
    assert other_error == "RankError"
    assert other_message == f"rank 0: FileExistsError: {message}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]


def train_command(base: str, tmp_path: Path, *options: str) -> list[Any]:
    """Arguments of Python for ``tilefold train`` on two ranks, with its data in ``tmp_path``."""
    if not (tmp_path / "data").exists():
        small_collection().save_beir(tmp_path / "data")
    arguments: list[Any] = ["-m", "tilefold.cli", "train", "--json", "--fp32"]
    arguments += ["--model", base]
    arguments += ["--data", tmp_path / "data"]
    arguments += ["--output", tmp_path / "m"]
    arguments += ["--batch-size", "4"]
    arguments += ["--max-length", "24"]
    arguments += ["--save-steps", "2"]
    arguments += ["--devices", "2"]
    return [*arguments, *options]


# A rank that torchrun has started: it trains, and prints the threads of gloo that are left.
TRAIN_AND_PRINT_THREADS = """
import sys
from pathlib import Path
from tests.recipes.small import small_collection
from tilefold.recipes import get_recipe, train

base, output = sys.argv[1:]
recipe = get_recipe("splade", base_model=base, batch_size=4, max_steps=2, bf16=False)
train(recipe, small_collection(), output)
threads = Path("/proc/self/task").glob("*/comm")
print([name for name in (file.read_text().strip() for file in threads) if "gloo" in name])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_no_thread_of_a_process_group_outlives_a_training(base: str, tmp_path: Path) -> None:
    (free_port,) = free_ports(1)
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            variables = environment(
                ROOT,
                TORCHELASTIC_RUN_ID="threads",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(free_port),
                CUDA_VISIBLE_DEVICES="",
            )
            command = ("-c", TRAIN_AND_PRINT_THREADS, base, tmp_path / "m")
            process = programs.start(*command, env=variables, stdout=programs.PIPE)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        outputs = [process.stdout.read() for process in ranks]
    assert outputs == ["[]\n", "[]\n"]


@pytest.mark.slow
def test_the_command_reports_a_killed_rank_and_starts_again(base: str, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    command = train_command(base, tmp_path, "--steps", "100000")
    with programs.start(*command, cwd=ROOT, stderr=errors) as process:
        try:
            while not newest_step(tmp_path / "m"):
                assert process.poll() is None
                time.sleep(0.1)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[1]), signal.SIGKILL)
            assert process.wait(SECONDS) == 1
        finally:
            process.kill()
    message = r"Error: rank \d was ended by signal 9\. Run the same"
    assert re.search(message, errors.read_text())
    assert newest_step(tmp_path / "m")
    command = train_command(base, tmp_path, "--steps", "4", "--fresh")
    with programs.start(*command, cwd=ROOT, stdout=programs.PIPE) as process:
        assert process.stdout is not None
        result = json.loads(process.stdout.read())
    assert (result["steps"], result["ranks"]) == (4, 2)
    assert (result["pairs"], result["negatives"]) == (4, 3)
    assert SparseEncoder(result["model_dir"], device="cpu").encode(["a text"]).shape[0] == 1
