"""Train a small causal language model offline, as the base of ``causal-splade``.

    python -m benchmarks.causal_lm --data PATH --output MODELS
    python -m benchmarks.recipes --data scifact=PATH --base causal-lm=MODELS/adapted --seeds 0 1 2 \
        --recipe "causal-splade;document.lora=null;learning_rate=2e-4" \
        "causal-splade;document.lora=null;learning_rate=2e-4;fused=false"

A Llama of random layers, over the vocabulary and the word embeddings of the packaged MiniLM, learns
to predict the next token of the collection's documents (``MODELS/plain``), then also from
``log1p(relu(logits))`` (``MODELS/adapted``). The second command compares the packed trunk with the
padded one of the stock model. Such a model has read one small collection: its results compare ways
to train, and are not those of a language model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilefold.recipes import Losses, minilm_path
from tilefold.recipes.adaptation import AdaptationRecipe, AdaptationResult, adapt
from tilefold.retrieval import load_collection

MAX_TOKENS = 512
N_HEADS = 6
INTERMEDIATE_SIZE = 1024
# steps between two lines of progress
PROGRESS_STEPS = 10


def build_model(n_layers: int, seed: int) -> tuple[Any, Any]:
    """Return MiniLM's tokenizer, and a Llama of random layers over its word embeddings.

    Args:
        n_layers: the number of layers.
        seed: the seed of their weights.
    """
    from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = str(minilm_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.model_max_length = MAX_TOKENS
    tokenizer.eos_token = tokenizer.sep_token
    minilm = AutoModel.from_pretrained(path, local_files_only=True)
    embeddings = minilm.get_input_embeddings().weight
    vocab_size, hidden_size = embeddings.shape
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=n_layers,
        num_attention_heads=N_HEADS,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        network.get_input_embeddings().weight.copy_(embeddings)
    return tokenizer, network


def train_phase(
    name: str,
    recipe: AdaptationRecipe,
    network: Any,
    tokenizer: Any,
    texts: list[str],
    output: Path,
) -> AdaptationResult:
    """Train a model on texts, and save it.

    Args:
        name: the name of the phase, and of the folder.
        recipe: the settings of the phase.
        network: the language model, changed in place.
        tokenizer: its tokenizer.
        texts: the documents.
        output: the folder of both models.
    """

    def report(step: int, n_steps: int, losses: Losses | None) -> None:
        """Print the losses of some steps."""
        if step % PROGRESS_STEPS == 0:
            print(f"{name}: step {step} of {n_steps}, {losses}", file=sys.stderr)

    result = adapt(network, tokenizer, texts, recipe, progress=report)
    network.save_pretrained(str(output / name))
    tokenizer.save_pretrained(str(output / name))
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; wrong arguments end the program with a usage line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", required=True, help="a BEIR folder, or pydocs")
    add("--output", type=Path, required=True, help="folder for the models plain and adapted")
    add("--steps", type=int, default=2000, help="steps of next-token prediction")
    add("--adaptation-steps", type=int, default=500, help="further steps with activated logits too")
    add("--batch-size", type=int, default=32, help="blocks of tokens per step")
    add("--length", type=int, default=256, help="tokens of a block")
    add("--layers", type=int, default=6)
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Train and save both models.

    Returns:
        The exit code: 1 if most positions of the adapted model have no positive logit.
    """
    options = parse(argv)
    texts = list(load_collection(options.data).contents().values())
    tokenizer, network = build_model(options.layers, options.seed)
    network.to(options.device)
    results = {}
    for name, n_steps, activated_weight in (
        ("plain", options.steps, 0.0),
        ("adapted", options.adaptation_steps, 1.0),
    ):
        recipe = AdaptationRecipe(
            steps=n_steps,
            batch_size=options.batch_size,
            length=options.length,
            learning_rate=options.learning_rate,
            warmup_steps=n_steps // 10,
            activated_weight=activated_weight,
            seed=options.seed,
        )
        results[name] = train_phase(name, recipe, network, tokenizer, texts, options.output)
    print(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))
    return 1 if results["adapted"].dying else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
