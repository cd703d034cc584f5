"""What importing the package costs and needs, each in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "src"
HEAVY = ("triton", "transformers", "sentence_transformers", "datasets", "pyarrow", "matplotlib", "seismic", "bm25s")

# Hides distributions as if they had never been installed: find_spec answers None, import raises.
HIDE = """
import importlib.machinery, sys
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            return None
        return importlib.machinery.PathFinder.find_spec(name, path, target)
sys.meta_path = [Hide if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""

USE = """
import torch, tilefold
hidden = torch.randn(2, 5, 8, requires_grad=True)
weight = torch.randn(11, 8, requires_grad=True)
tilefold.lsr_head(hidden, weight, attention_mask=torch.ones(2, 5)).sum().backward()
assert hidden.grad is not None and weight.grad is not None
assert tilefold.lsr_head_sparse(hidden.detach(), weight.detach(), top_k=3).layout == torch.sparse_csr
tilefold.nn.LSRHead
ids = torch.arange(10).view(2, 5)
tilefold.token_scatter(hidden[..., 0], ids, 11).sum().backward()
assert tilefold.token_scatter_sparse(hidden[..., 0], ids, 11, top_k=3).layout == torch.sparse_csr
"""


def run_python(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter; fails the test with its error if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"the fresh interpreter failed:\n{done.stderr}")
    return done.stdout


def loaded_after(code: str, names: tuple[str, ...]) -> set[str]:
    """Which of ``names`` are in ``sys.modules`` after ``code``."""
    return set(run_python(f"{code}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])").split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import tilefold", (*HEAVY, "torch")) <= {"torch"}


def test_using_the_operators_on_the_cpu_loads_torch_only() -> None:
    # torch imports triton itself for some of its own features: what counts is what it does not bring along
    brought_by_torch = loaded_after("import torch, torch.library, torch.utils.checkpoint", HEAVY)
    assert loaded_after(USE, HEAVY) <= brought_by_torch


def test_the_operators_work_without_triton_and_every_optional_package() -> None:
    hidden = set(HEAVY) | {"typer", "rich", "numpy"}
    run_python(HIDE.format(hidden=hidden) + USE)


def test_asking_for_triton_where_it_is_not_installed_says_so() -> None:
    code = """
import torch, tilefold
try:
    tilefold.lsr_head(torch.randn(1, 2, 4), torch.randn(3, 4), impl="triton")
except RuntimeError as error:
    print(error)
"""
    printed = run_python(HIDE.format(hidden={"triton"}) + code)
    assert "triton is not installed" in printed
    assert "impl='auto'" in printed


def test_help_does_not_load_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
import typer.main
from tilefold import cli
result = CliRunner().invoke(cli.app, ["--help"])
assert result.exit_code == 0, result.output
"""
    assert loaded_after(code, (*HEAVY, "torch")) == set()
