"""``tilefold info``: versions, devices and what runs on them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import typer
from typer.testing import CliRunner

import tilefold
from tests.inside import fallback, releases
from tests.kernels import triton_installed
from tilefold import ops
from tilefold.cli.info import OPTIONAL_PACKAGES, collect, info
from tilefold.ops.implementations import kernel_of
from tilefold.ops.lsr_head import configs


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(info)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_json_and_text_say_what_auto_runs_on_every_device_and_what_is_installed() -> None:
    facts = json.loads(run("--json"))
    assert facts["tilefold"] == tilefold.__version__
    assert facts["torch"] == torch.__version__
    assert facts["operators"]["lsr_head"]["cpu"]["auto"] == "tiled"
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert set(facts["packages"]) == set(OPTIONAL_PACKAGES)
    others = {"QuantizedTokens", "QuantizedWeight", "quantize_tokens", "quantize_weight", "token_scatter_sparse"}
    assert set(facts["operators"]) == set(ops.__all__) - others, "only what takes impl"
    printed = run()
    for name in (f"tilefold {tilefold.__version__}", "lsr_head_sparse", "sentence-transformers"):
        assert name in printed


def test_it_says_which_kernels_run_on_each_architecture_and_why_no_faster_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "release", lambda: (3, 5))
    kernels = json.loads(run("--json"))["triton"]["kernels_by_compute_capability"]
    assert kernels["9.0"]["lsr_head"][0] == "portable kernel with TMA"
    assert "Triton 3.5 cannot give warps roles" in kernels["9.0"]["lsr_head"][1]
    assert kernels["12.0"]["lsr_head"][0] == "portable kernel"
    assert "Triton 3.5" in run() and "roles" in run()
    monkeypatch.setattr(releases, "release", lambda: (3, 9))
    kernels = json.loads(run("--json"))["triton"]["kernels_by_compute_capability"]
    assert kernels["9.0"]["lsr_head"] == ["kernel whose warps load or compute", None]
    monkeypatch.setattr(releases, "release", lambda: (4, 0))
    assert "not tested with" in run().replace("\n", " ")


def test_asking_warns_of_nothing_and_gives_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = SimpleNamespace(name="a Hopper GPU", major=9, minor=0, total_memory=2**36, multi_processor_count=132)
    monkeypatch.setattr(releases, "release", lambda: (3, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a Hopper GPU")
    given_up = dict(fallback.GIVEN_UP)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fallback.FallbackWarning)
        facts = collect()
        run()
    assert given_up == fallback.GIVEN_UP
    assert facts["configs"]["lsr_head"]["bfloat16"]["use_tma"]
    assert not facts["configs"]["lsr_head"]["bfloat16"]["warp_roles"]
    if triton_installed():
        assert "cannot give warps roles" in facts["operators"]["lsr_head"]["cuda"]["why_not_faster"]


def test_a_kernel_that_was_given_up_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(releases, "release", lambda: (3, 9))
    monkeypatch.setitem(fallback.GIVEN_UP, (configs.BY_ROLES, device), "no such instruction")
    assert kernel_of("lsr_head", (9, 0), device) == ("portable kernel with TMA", "no such instruction")


def test_a_plan_says_what_fits_and_what_encoding_takes(tmp_path: Path) -> None:
    transformers.BertConfig(vocab_size=250002).save_pretrained(str(tmp_path))
    asked = ("plan", "--model", str(tmp_path), "--length", "256", "--gpu-memory", "40")
    found = json.loads(run(*asked, "--json"))
    assert found["training"]["largest_batch"] == pytest.approx(306, rel=0.05), "as measured with XLM-R-base"
    assert found["training_checkpointed"]["largest_batch"] > 4 * found["training"]["largest_batch"]
    printed = run(*asked, "--documents", "1000000000")
    assert "at most 3" in printed and "encoding 1,000,000,000 documents" in printed and "not measured" in printed
