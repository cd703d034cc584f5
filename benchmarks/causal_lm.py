"""Make a small causal language model offline, with and without CSPLADE's adaptation, for the claims
about decoders.

    python -m benchmarks.causal_lm --data FOLDER --output MODELS [--steps 2000] [--adaptation-steps 500]
    python -m benchmarks.recipes --data scifact=FOLDER --base causal-lm=MODELS/adapted --seeds 0 1 2 --recipe \\
        "causal-splade;document.lora=null;learning_rate=2e-4" \\
        "causal-splade;document.lora=null;learning_rate=2e-4;document.kind=bidirectional" \\
        "causal-splade;document.lora=null;learning_rate=2e-4;document.kind=echo;max_length=512"

A Llama of random layers over the vocabulary and the word embeddings of the packaged MiniLM learns
to predict the next token of the collection's documents (`MODELS/plain`), then also from
``log1p(relu(logits))`` (`MODELS/adapted`). It has seen one small collection: what it says of
causal, bidirectional and echo inputs is a comparison on equal terms, not what a language model of
billions of tokens reaches.
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
import transformers

from benchmarks import small_lm
from tilefold.recipes import Losses
from tilefold.recipes.adaptation import AdaptationRecipe, AdaptationResult, adapt
from tilefold.retrieval import load_collection


def main(argv: Sequence[str]) -> int:
    """Both models; the exit code is 1 if the adapted one is dying."""
    options = parse(argv)
    texts = list(load_collection(options.data).contents().values())[: options.documents]
    tokenizer, network = start(options)
    network.to(options.device)
    plain = train("plain", 0.0, options.steps, network, tokenizer, texts, options)
    adapted = train("adapted", 1.0, options.adaptation_steps, network, tokenizer, texts, options)
    print(json.dumps({"plain": asdict(plain), "adapted": asdict(adapted)}, indent=1))
    return 1 if adapted.dying else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = small_lm.arguments(__doc__, batch_size=32, length=256, learning_rate=1e-3)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for the models plain and adapted",
    )
    parser.add_argument(
        "--adaptation-steps",
        type=int,
        default=500,
        help="after --steps, with activated logits too",
    )
    return parser.parse_args(argv)


def start(options: argparse.Namespace) -> tuple[Any, Any]:
    """MiniLM's tokenizer, and a Llama over its word embeddings."""
    tokenizer, embeddings = small_lm.minilm_words()
    tokenizer.eos_token = tokenizer.sep_token
    torch.manual_seed(options.seed)
    config = transformers.LlamaConfig(
        vocab_size=embeddings.size(0),
        hidden_size=embeddings.size(1),
        intermediate_size=1024,
        num_hidden_layers=options.layers,
        num_attention_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    network = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        network.get_input_embeddings().weight.copy_(embeddings)
    return tokenizer, network


def train(
    name: str,
    weight: float,
    steps: int,
    network: Any,
    tokenizer: Any,
    texts: list[str],
    options: argparse.Namespace,
) -> AdaptationResult:
    """One phase, saved."""
    recipe = AdaptationRecipe(
        steps=steps,
        batch_size=options.batch_size,
        length=options.length,
        learning_rate=options.learning_rate,
        warmup_steps=steps // 10,
        activated_weight=weight,
        seed=options.seed,
    )

    def progress(step: int, total: int, losses: Losses | None) -> None:
        if step % 100 == 0:
            print(f"{name}: step {step} of {total}, {losses}", file=sys.stderr)

    result = adapt(network, tokenizer, texts, recipe, progress=progress)
    network.save_pretrained(str(options.output / name))
    tokenizer.save_pretrained(str(options.output / name))
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
