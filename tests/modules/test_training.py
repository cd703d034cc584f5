"""Twenty steps of the stock trainer on a tiny model: the loss falls, fused as plain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments, losses

from tests.modules.tiny import TEXTS
from tests.recipes.small import SUBJECTS
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.losses import NoPenalty, PairwiseSoftmaxLoss, TermRecallLoss
from tilefold.recipes import get_recipe
from tilefold.recipes.encoders import Base, build_encoder


def losses_of(name: str, base: str, folder: Path, fused: bool) -> tuple[list[float], SparseEncoder]:
    """Those of each step, without dropout, and the model."""
    recipe = get_recipe(name)
    model = build_encoder(recipe.query, recipe.document, Base(base, max_length=24, texts=TEXTS), device="cpu")
    for module in model.modules():
        if type(module).__name__ == "Dropout":
            module.p = 0.0
    data = {"query": [f"how do i work with {subject}" for subject in SUBJECTS], "positive": TEXTS}
    ranking: Any = losses.SparseMultipleNegativesRankingLoss(model)
    if name == "epic":
        data["negative"] = TEXTS[3:] + TEXTS[:3]
        ranking = PairwiseSoftmaxLoss()
    if name == "deepct":
        ranking = TermRecallLoss()
    loss = losses.SpladeLoss(
        model, ranking, document_regularizer_weight=0.0, query_regularizer_weight=0.0,
        document_regularizer=NoPenalty(), query_regularizer=NoPenalty(),
    )  # fmt: skip
    arguments = SparseEncoderTrainingArguments(
        str(folder), max_steps=20, per_device_train_batch_size=16, learning_rate=5e-3, logging_steps=1, seed=0,
        lr_scheduler_type="constant", report_to="none", use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True,
        save_strategy="no",
        router_mapping={} if recipe.query is None else {c: "query" if c == "query" else "document" for c in data},
    )  # fmt: skip
    model.model_card_data.widget = [{"text": "x"}]
    trainer = SparseEncoderTrainer(model, args=arguments, train_dataset=Dataset.from_dict(data), loss=loss)
    if fused:
        with accelerate(model):
            trainer.train()
    else:
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], model


@pytest.mark.parametrize("name", ["unicoil", "deepimpact", "deepct", "epic"])
def test_the_loss_falls(name: str, tiny_lm: str, tmp_path: Path) -> None:
    fused, model = losses_of(name, tiny_lm, tmp_path, fused=True)
    assert len(fused) == 20 and fused[-1] < 0.7 * fused[0], fused
    if name in ("unicoil", "epic"):
        plain, _ = losses_of(name, tiny_lm, tmp_path, fused=False)
        assert fused == pytest.approx(plain, rel=0.02, abs=1e-3)
    if name == "deepimpact":
        assert model[0].sub_modules["query"][0].weight.item() != pytest.approx(0.3)  # its one number was learned
