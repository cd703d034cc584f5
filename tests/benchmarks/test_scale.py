"""Tests of the benchmarks on several devices: curves, decoders and bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decoder_scale, invariance_devices, train_scale
from tilefold.bench.results import collect, read_csv, write_csv

CPU = torch.device("cpu")


def test_a_curve_is_compared_with_curves_of_the_same_weights(tmp_path: Path) -> None:
    losses = {
        "curve-0": "9 9",
        "curve-1": "9 8",
        "fresh-curve-0": "2 1",
        "fresh-curve-1": "2 1.1",
    }
    rows = [
        {"run": run, "devices": 1, "gate": "ok", "pairs_per_s": 1.0, "losses": curve}
        for run, curve in losses.items()
    ]
    write_csv(tmp_path / train_scale.FILE, rows, collect(CPU), ("run", "devices"))
    options = train_scale.parse_arguments(["--output", "unused", "--one", str(tmp_path)])
    row = {"pairs_per_s": 1.0, "losses": "2 1.05"}
    cells = train_scale.compare_with_one("fresh-curve-0", row, options)
    assert cells["gate"] == "ok"
    assert cells["from_seeds"] == pytest.approx(0)
    assert train_scale.compare_with_one("curve-0", row, options)["gate"] != "ok"


@pytest.mark.slow
def test_losses_of_a_decoder_are_compared_with_those_of_one_device(tmp_path: Path) -> None:
    one_device, compared = tmp_path / "one", tmp_path / "compared"
    options = ["--device", "cpu", "--tiny", "--run", "1b-curve-0"]
    seeds = [*options, "--run", "1b-curve-1", "--output", str(one_device)]
    assert decoder_scale.main(seeds) == 0
    assert decoder_scale.main([*options, "--output", str(compared), "--one", str(one_device)]) == 0
    (row,) = read_csv(compared / decoder_scale.FILE)
    assert (row["gate"], row["curve_error"]) == ("ok", "0")
    assert len(row["losses"].split()) == int(row["steps"])
    saved = [file.name for file in compared.rglob("*.safetensors")]
    assert saved == ["model.safetensors"]  # of the tiny base model, and no checkpoint


def test_the_sign_of_zero_is_one_of_the_bits() -> None:
    zeros = torch.zeros(3, dtype=torch.bfloat16)

    assert invariance_devices.has_same_bits(zeros, zeros.clone())
    assert not invariance_devices.has_same_bits(zeros, -zeros)


def encode_once_more(differing_call: int) -> Callable[..., list[torch.Tensor]]:
    """Return a replacement of ``encode`` one of whose calls returns other bits of a text."""
    calls = iter(range(100))

    def encode(*arguments: Any) -> list[torch.Tensor]:
        vectors = [torch.ones(2), torch.ones(2)]
        if next(calls) == differing_call:
            vectors[1][0] += 2**-20
        return vectors

    return encode


@pytest.mark.parametrize(
    ("differing_call", "gate"),
    [
        pytest.param(99, "ok", id="equal"),
        pytest.param(1, "failed", id="another batch size"),
        pytest.param(3, "failed", id="another device"),
    ],
)
def test_a_text_with_other_bits_fails_the_gate(
    differing_call: int,
    gate: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(invariance_devices, "encode", encode_once_more(differing_call))
    for name in ("set_precision", "accelerate"):
        monkeypatch.setattr(invariance_devices, name, lambda *arguments, **options: None)
    options = invariance_devices.parse_arguments(["--device", "cpu", "--devices", "2"])
    row = invariance_devices.compare(torch.nn.Linear(1, 1), "fp32", ["a", "b"], options)
    assert (row["gate"], row["differing_texts"]) == (gate, int(gate != "ok"))


@pytest.mark.slow
def test_vectors_have_the_same_bits_on_every_device(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--tiny", "--output", str(tmp_path)]
    assert invariance_devices.main(options) == 0
    rows = read_csv(tmp_path / invariance_devices.FILE)
    assert {(row["kind"], row["dtype"], row["gate"]) for row in rows} == {
        (kind, dtype, "ok")
        for kind in invariance_devices.KINDS
        for dtype in invariance_devices.DTYPES
    }
