"""The examples in docstrings run, and the names that are used most have one.

An example runs in a folder of its own, in which ``bank`` is a small collection, ``splade-model`` a
``SparseEncoder``, and ``masked-lm`` a masked language model.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.small import tiny_masked_lm
from tilefold.retrieval import load_collection

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src"
BANK = ROOT / "examples" / "data" / "bank"
# Examples of trainers and exports, which take seconds.
SLOW = {
    "tilefold.integrations.sentence_transformers.packing.collator.collate_ahead",
    "tilefold.recipes._training.train",
    "tilefold.recipes.onnx_export.export_onnx",
}
# Public names that must have an example, by the package from which users import them.
REQUIRED = {
    "tilefold.ops": (
        "QuantizedTokens entmax entmax_attention lsr_head lsr_head_sparse maxsim maxsim_contrastive_loss "
        "maxsim_topk quantize_tokens quantize_weight sparsemax token_scatter token_scatter_sparse "
        "xtr_scores"
    ),
    "tilefold.nn": "EntmaxAlpha LSRHead TokenWeightHead",
    "tilefold.losses": (
        "AntiZeroLoss DFFlopsLoss GlobalFlopsLoss PairwiseSoftmaxLoss PositionSum RegularizerSum "
        "TermRecallLoss WeightedLosses activated_lm_loss anti_zero df_weights flops l1 l2"
    ),
    "tilefold.integrations.sentence_transformers": (
        "accelerate collate_ahead encode_sparse is_accelerated restore set_precision"
    ),
    "tilefold.integrations.transformers": (
        "packed_hidden_states record_sparsity set_alpha use_entmax"
    ),
    "tilefold.modules": "HeadPooling load_encoder",
    "tilefold.integrations.pylate": "colbert_kd_scores colbert_scores",
    "tilefold.integrations.colpali": "maxsim_inbatch",
    "tilefold.retrieval": (
        "BM25Index Collection DenseIndex Document DocumentFields Feedback Filter LateIndex Passages "
        "best_passages expand_sparse export_jsonl export_opensearch export_vespa merge_vectors "
        "SearchRequest Searcher SparseVectors TokenVectors build_index compare encode_collection encode_queries "
        "evaluate evaluate_per_query hits_to_run interpolate load_beir load_collection "
        "load_documents load_index load_queries mean_of mine_negatives reciprocal_rank_fusion "
        "read_trec_run read_vectors rerank update_index write_trec_run write_vectors"
    ),
    "tilefold.recipes": "export_onnx get_recipe train",
    "tilefold.pipeline.ragged": "batches_by_tokens gather_positions offsets_of",
    "tilefold.testing": "assert_within_budget budget",
}
REQUIRED_NAMES = [
    pytest.param(package, name, id=f"{package}.{name}")
    for package, names in REQUIRED.items()
    for name in names.split()
]


def documented_names() -> Iterator[str]:
    """Yield the paths of functions and classes whose docstrings have an example."""
    for file in sorted(SOURCES.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if ">>> " not in text:
            continue
        parts = file.relative_to(SOURCES).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if ">>> " in (ast.get_docstring(node) or ""):
                yield f"{module}.{node.name}"


def with_marks(path: str) -> Any:
    """The parameter of an example, which is marked slow if it is."""
    return pytest.param(path, marks=[pytest.mark.slow] if path in SLOW else [], id=path)


@pytest.fixture(scope="module")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_masked_lm(tmp_path_factory.mktemp("examples") / "masked-lm", load_collection(BANK))


@pytest.fixture(scope="module")
def splade_model(masked_lm: Path) -> Path:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    modules = [MLMTransformer(str(masked_lm)), SpladePooling("max")]
    folder = masked_lm.with_name("splade-model")
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("path", [with_marks(path) for path in documented_names()])
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_a_docstring_prints_what_it_shows(
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    module, _, name = path.rpartition(".")
    documented = getattr(importlib.import_module(module), name)
    docstring = inspect.getdoc(documented) or ""
    shutil.copytree(BANK, tmp_path / "bank")
    for fixture, folder in (("splade_model", "splade-model"), ("masked_lm", "masked-lm")):
        if f'"{folder}"' in docstring:
            (tmp_path / folder).symlink_to(request.getfixturevalue(fixture))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    # Readers import what an example needs, except the name that it explains.
    namespace = {name: documented}
    example = doctest.DocTestParser().get_doctest(docstring, namespace, path, None, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    results = runner.run(example, out=report.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(report)


@pytest.mark.parametrize(("package", "name"), REQUIRED_NAMES)
def test_a_name_that_is_used_often_has_an_example(package: str, name: str) -> None:
    docstring = inspect.getdoc(getattr(importlib.import_module(package), name)) or ""
    assert "\nExamples:\n    >>> " in docstring
