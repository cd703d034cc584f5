"""How do I train a SPLADE model faster with the trainer of sentence-transformers?

Needs: pip install "tilefold[demo]"
Run:   python examples/train_splade_with_trainer.py
It takes seconds on two CPU cores, and uses a GPU if there is one. Choose one of several GPUs with
CUDA_VISIBLE_DEVICES=0. The model is saved in the folder splade-model.
"""

from pathlib import Path

from datasets import Dataset
from sentence_transformers import SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import (
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)

from tilefold.integrations.sentence_transformers import accelerate
from tilefold.recipes import minilm_splade
from tilefold.retrieval import load_collection

bank = load_collection(Path(__file__).parent / "data" / "bank")
texts = bank.contents()  # document id -> title and text
pairs = bank.pairs("train")  # (query id, document id)
dataset = Dataset.from_dict(
    {
        "query": [bank.queries[query_id] for query_id, _ in pairs],
        "document": [texts[document_id] for _, document_id in pairs],
    },
)

model = minilm_splade(list(texts.values()))  # or SparseEncoder("naver/splade-v3")
loss = SpladeLoss(
    model,
    SparseMultipleNegativesRankingLoss(model),
    document_regularizer_weight=1e-3,
    query_regularizer_weight=1e-3,
)
arguments = SparseEncoderTrainingArguments(
    "splade-checkpoints",
    max_steps=5,
    per_device_train_batch_size=4,
    learning_rate=5e-5,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = SparseEncoderTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)

print(accelerate(trainer))  # the only line that tilefold adds; it says what is active
trainer.train()
model.save_pretrained("splade-model")

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss of the first step {losses[0]:.3f}, of the last step {losses[-1]:.3f}")
