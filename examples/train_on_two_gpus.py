"""How do I train on two GPUs, with the documents of both as negatives?

Needs: pip install "tilefold[demo]", and two GPUs; without them, two processes share the CPU
Run:   torchrun --standalone --nproc-per-node 2 examples/train_on_two_gpus.py
It takes seconds. The model is saved in the folder two-gpu-model. On a machine with one GPU,
CUDA_VISIBLE_DEVICES= before the command tries it on the CPU.
"""

import os
from pathlib import Path

from tilefold.recipes import get_recipe, train
from tilefold.retrieval import load_collection

rank = int(os.environ.get("RANK", "0"))  # torchrun sets it
recipe = get_recipe(
    "splade",
    base_model="minilm",  # or the folder or Hugging Face name of a model
    batch_size=4,  # of both GPUs together, as in one process
    max_steps=5,
    max_length=64,
)
# Every rank makes this call. Rank 0 writes the model; the same command resumes a killed training.
result = train(
    recipe,
    load_collection(Path(__file__).parent / "data" / "bank"),
    "two-gpu-model",
    overwrite=True,
)
if rank == 0:
    print(f"{result.ranks} ranks, {result.pairs} pairs per step, {result.negatives} negatives")
