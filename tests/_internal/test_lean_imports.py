"""Imports of sentence-transformers without its trainers, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

pytest.importorskip("sentence_transformers")
ROOT = Path(__file__).resolve().parents[2]

# A module of a user, which uses names of deferred modules that are not listed as deferred.
USER_MODULE = """
import datasets
import sklearn.metrics
from datasets import Dataset, load_dataset
from sklearn.metrics import pairwise_distances
from sklearn.preprocessing import normalize

assert load_dataset is datasets.load_dataset
assert isinstance(Dataset.from_dict({"a": [1]}), Dataset)
assert callable(sklearn.metrics.accuracy_score)
"""
# Scripts that run one after another in one interpreter, because importing sentence-transformers
# takes seconds.
IMPORT_MODEL_CLASSES = """
import sys
from tilefold._internal.lean_imports import lean_imports

with lean_imports():
    from sentence_transformers import MultiVectorEncoder, SparseEncoder
    from sentence_transformers.base import model_card
    from sentence_transformers.util import similarity
loaded = set(sys.modules)
for name in ("datasets", "pandas", "sklearn", "peft", "transformers.trainer"):
    assert name not in loaded, name
assert not [name for name in loaded if name.endswith((".trainer", ".evaluation.reranking"))]
assert not isinstance([], model_card.Dataset)
"""
USE_DEFERRED_NAMES = """
import datasets
import sklearn.metrics

real = datasets.Dataset.from_dict({"a": [1, 2]})
assert isinstance(real, model_card.Dataset)
assert not isinstance(real, model_card.DatasetDict)
assert model_card.Dataset.from_dict({"a": [1]}).num_rows == 1
assert similarity.pairwise_distances is not sklearn.metrics.pairwise_distances
distances = similarity.pairwise_distances([[0.0], [3.0]])
assert distances.tolist() == [[0.0, 3.0], [3.0, 0.0]]
"""
IMPORT_TRAINERS = """
import sentence_transformers
import sentence_transformers.sparse_encoder.model

for name in sentence_transformers.__all__:
    assert getattr(sentence_transformers, name) is not None
assert SparseEncoder is sentence_transformers.sparse_encoder.model.SparseEncoder
from sentence_transformers import SparseEncoderTrainer
from sentence_transformers.base.trainer import BaseTrainer

assert issubclass(SparseEncoderTrainer, BaseTrainer)
try:
    sentence_transformers.no_such_name
except AttributeError as error:
    assert "'sentence_transformers' has no attribute 'no_such_name'" in str(error)
else:
    raise SystemExit("expected an AttributeError")
"""
# The first argument is a folder that the script may fill.
TRAIN = """
from pathlib import Path
from datasets import Dataset
from sentence_transformers import SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import (
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from tests.recipes.small import small_masked_lm

folder = Path(sys.argv[1])
(folder / "masked-lm").mkdir()
model = SparseEncoder(str(small_masked_lm(folder / "masked-lm")), device="cpu")
trainer = SparseEncoderTrainer(
    model=model,
    args=SparseEncoderTrainingArguments(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
    ),
    train_dataset=Dataset.from_dict({"a": ["one", "two"], "b": ["three", "four"]}),
    loss=SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=0.1,
        query_regularizer_weight=0.1,
    ),
)
trainer.train()
model.save_pretrained(str(folder / "model"))
assert "Training Dataset" in (folder / "model" / "README.md").read_text()
"""


def run_python(code: str, *arguments: Path, folder: Path | None = None) -> None:
    """Run code in a fresh interpreter.

    Args:
        code: the script.
        arguments: those of the script.
        folder: a folder whose modules the script can import.
    """
    folders = [] if folder is None else [folder]
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(*folders, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_model_classes_need_no_trainer_and_a_trainer_runs_afterwards(tmp_path: Path) -> None:
    run_python(
        IMPORT_MODEL_CLASSES + USE_DEFERRED_NAMES + IMPORT_TRAINERS + TRAIN,
        tmp_path,
        folder=ROOT,
    )


def test_modules_of_users_get_the_real_modules(tmp_path: Path) -> None:
    (tmp_path / "user_module.py").write_text(USER_MODULE)
    run_python(
        """
import sys
from tilefold._internal.lean_imports import lean_imports

with lean_imports():
    import sentence_transformers.util
    import user_module
import datasets
assert user_module.datasets.Features is datasets.Features
assert type(datasets) is type(sys)
""",
        folder=tmp_path,
    )


def test_a_release_is_known_without_its_import() -> None:
    run_python(
        """
import sys
from importlib.metadata import version
from tilefold._internal.lean_imports import lean_imports

with lean_imports():
    from datasets import __version__
assert __version__ == version("datasets")
assert "datasets" not in sys.modules and "pyarrow" not in sys.modules
""",
    )


@pytest.mark.slow  # imports sentence-transformers twice
def test_a_model_with_an_adapter_is_loaded(tmp_path: Path) -> None:
    run_python(
        f"""
import sys
from pathlib import Path
import torch
from tilefold.recipes.loading import load_saved

build = '''
import sys
from pathlib import Path
import peft
from sentence_transformers import SparseEncoder
from tests.recipes.small import small_masked_lm

folder = Path(sys.argv[1])
(folder / "masked-lm").mkdir()
model = SparseEncoder(str(small_masked_lm(folder / "masked-lm")), device="cpu")
config = peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
model[0].model.add_adapter(config)
model.save_pretrained(str(folder / "adapted"))
'''
import subprocess
subprocess.run([sys.executable, "-c", build, {str(tmp_path)!r}], check=True)
model = load_saved(str(Path({str(tmp_path)!r}) / "adapted"), "sparse")
import peft
layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
assert layers and any(layer.lora_B["default"].weight.any() for layer in layers)
""",
        folder=ROOT,
    )
