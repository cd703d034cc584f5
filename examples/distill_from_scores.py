"""How do I train a SPLADE model on the scores of a teacher?

Needs: pip install "tilefold[demo]"
Run:   python examples/distill_from_scores.py
It takes seconds on two CPU cores, and uses a GPU if there is one. The model is saved in the folder
distilled-model.
"""

from pathlib import Path

from tilefold.recipes import get_recipe, train
from tilefold.retrieval import load_collection, read_training_rows

DATA = Path(__file__).parent / "data"
# A line has a query, its relevant document and negatives, each document with the teacher's score:
# ["q1", ["cards", 9.5], ["pin", 4.5], ["abroad", 3.5]]
# `tilefold mine` and `tilefold score` write such rows for your collection.
scores = DATA / "training" / "distillation.jsonl"
print(f"{len(read_training_rows(scores).queries)} queries with scores of a teacher")

recipe = get_recipe(
    "splade",
    base_model="minilm",  # or the folder or Hugging Face name of a model
    loss={"kl": 1.0},  # the divergence from the teacher's distribution; or "margin_mse"
    negatives=2,  # per query and step
    batch_size=4,
    max_steps=5,
    max_length=64,
)
result = train(
    recipe,
    load_collection(DATA / "bank"),
    "distilled-model",
    negatives=scores,
    overwrite=True,
)
print(f"{result.steps} steps, loss {result.loss:.3f}")
