"""Make a ModernBERT offline that predicts masked tokens, for the claim about the scale of its head
(arXiv 2606.18811).

    python -m benchmarks.masked_lm --data FOLDER --output MODEL [--steps 2000]
    python -m benchmarks.recipes --data scifact=FOLDER --base scifact=MODEL --seeds 0 1 2 \\
        --recipe splade-v2 "splade-v2;document.logit_scale=1.0"

Random layers over the vocabulary and the word embeddings of the packaged MiniLM learn from the
documents of one collection: what it says of both scales is a comparison on equal terms, not what a
model of trillions of tokens does. Prints the loss, and how large the logits are: their 99th
percentile over terms and tokens, the share above 0, and the mean number of terms of a text with a
logit above 0, which SPLADE starts with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks import small_lm
from tilefold.losses import activated_lm_loss
from tilefold.retrieval import load_collection

MASKED_SHARE = 0.15


def main(argv: Sequence[str]) -> int:
    """Make, train, save, look at the logits; the exit code."""
    options = parse(argv)
    texts = list(load_collection(options.data).contents().values())[: options.documents]
    tokenizer, model = start(options)
    loss = predict_masked(
        model,
        tokenizer,
        texts,
        steps=options.steps,
        batch_size=options.batch_size,
        max_length=options.length,
        learning_rate=options.learning_rate,
        device=options.device,
        seed=options.seed,
    )
    model.save_pretrained(str(options.output))
    tokenizer.save_pretrained(str(options.output))
    print(json.dumps({"loss": loss} | logits_of(model, tokenizer, texts[:16], options), indent=1))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = small_lm.arguments(__doc__, batch_size=64, length=128, learning_rate=5e-4)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    return parser.parse_args(argv)


def start(options: argparse.Namespace) -> tuple[Any, Any]:
    """MiniLM's tokenizer, and a ModernBERT over its word embeddings."""
    tokenizer, embeddings = small_lm.minilm_words()
    torch.manual_seed(options.seed)
    config = ModernBertConfig(
        vocab_size=embeddings.size(0),
        hidden_size=embeddings.size(1),
        intermediate_size=2 * embeddings.size(1),
        num_hidden_layers=options.layers,
        num_attention_heads=6,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        cls_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        sep_token_id=tokenizer.sep_token_id,
        attn_implementation="sdpa",
        architectures=["ModernBertForMaskedLM"],
    )
    model = ModernBertForMaskedLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embeddings)
    return tokenizer, model


def predict_masked(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    steps: int,
    batch_size: int,
    max_length: int,
    learning_rate: float,
    device: str,
    seed: int,
) -> float:
    """Train a BERT or ModernBERT in place; vocabulary-wide logits exist for a chunk of the masked
    tokens alone.

    Returns the loss of the last step.
    """
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    last = float("nan")
    for step in range(steps):
        rows = torch.randint(len(texts), (batch_size,), generator=draw).tolist()
        batch = _read(tokenizer, [texts[row] for row in rows], max_length)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
        chosen = (torch.rand(ids.shape, generator=draw) < MASKED_SHARE) & ~special & (mask != 0)
        masked = ids.masked_fill(chosen, tokenizer.mask_token_id).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            states = model.base_model(
                input_ids=masked,
                attention_mask=mask.to(device),
            ).last_hidden_state
            states = _transform(model)(states[chosen.to(device)])
            labels = ids[chosen].to(device)
            loss = activated_lm_loss(
                states,
                head.weight,
                labels,
                head.bias,
                activated_weight=0.0,
                chunk=2048,
            )
        optimizer.zero_grad()
        torch.autograd.backward(loss.total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 50 == 0 or step == steps - 1:
            last = float(loss.plain)
            print(f"masked tokens: step {step} of {steps}, loss {last:.3f}", file=sys.stderr)
    return last


def _read(tokenizer: Any, texts: Sequence[str], max_length: int) -> Any:
    return tokenizer(
        list(texts),
        padding=True,
        truncation=True,
        max_length=max_length,
        return_tensors="pt",
    )


def _transform(model: Any) -> Any:
    """What stands between the last states and the decoder."""
    return model.head if hasattr(model, "head") else model.cls.predictions.transform


@torch.no_grad()
def logits_of(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    options: argparse.Namespace,
) -> dict[str, float]:
    """How large the logits are that SPLADE starts with."""
    model.eval()
    batch = _read(tokenizer, texts, options.length).to(options.device)
    batch.pop("token_type_ids", None)
    logits: Tensor = model(**batch).logits.float()
    valid = logits[batch["attention_mask"] != 0]
    sample = valid.flatten()[:: max(1, valid.numel() // 1_000_000)]
    pooled = logits.masked_fill(batch["attention_mask"][..., None] == 0, -1e9).amax(dim=1)
    return {
        "logit_99th_percentile": sample.quantile(0.99).item(),
        "share_above_0": (sample > 0).float().mean().item(),
        "terms_above_0": (pooled > 0).sum(dim=1).float().mean().item(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
