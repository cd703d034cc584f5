"""Sparse encoders of causal language models, PROSPER, BGE-M3 and SPLATE."""

from __future__ import annotations

from tilefold.recipes._entry import Entry
from tilefold.recipes._lsr_recipe import LsrRecipe, RegularizerSpec
from tilefold.recipes.encoders import EncoderSpec

__all__ = ["ENTRIES"]

_NONE = RegularizerSpec("none", weight=0.0)

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "causal-splade",
        "SPLADE on a causal language model; document.kind=echo or =bidirectional lets tokens see what follows them",
        "2504.10816",
        LsrRecipe(
            "causal-splade",
            document=EncoderSpec("causal", lora=64),
            query_regularizer=RegularizerSpec(weight=3e-3),
            document_regularizer=RegularizerSpec(weight=3e-3),
            epochs=3.0,
            learning_rate=5e-5,
            warmup_ratio=0.05,
        ),
        published="CSPLADE 1B: adaptation on MS MARCO (tilefold.recipes.adaptation), InfoNCE with 15 mined negatives "
        "and those of the batch, batch 32, LoRA 64, lr 5e-5, 3 epochs, FLOPS .003 (8B: LoRA 16, lr 1e-4, 1 epoch, "
        ".03); Mistral-SPLADE (2408.11119): echo, LoRA 16, its other settings are not published",
        publishes="MRR@10 on MS MARCO dev, 1B: causal .382, echo .388, bidirectional .404",
        base="causal-lm",
    ),
    Entry(
        "prosper",
        "PROSPER: last token, literal residual network, a window on both sides, length 1 of queries alone",
        "2510.18527",
        LsrRecipe(
            "prosper",
            query=EncoderSpec("prosper", top_k=256, normalize="l2", shared_network=True),
            document=EncoderSpec("prosper", top_k=512),
            query_regularizer=RegularizerSpec(weight=5e-3),
            document_regularizer=RegularizerSpec(weight=1e-3),
            start_percentile=97.0,  # one token alone has fewer terms than the largest logits of all tokens
        ),
        published="Qwen2.5-3B, InfoNCE with in-batch negatives, FLOPS on base weights q 5e-3 d 1e-3 over 1.5 epochs, "
        "lr 3e-5, weight decay .1, 64 x 8 pairs, 5 epochs, lengths 64; windows 256 and 512",
        publishes="Hit@1 .253 on Multi-CPR e-commerce (.236 with BERT, .184 SPLADE-v2); .133 without the windows",
    ),
    Entry(
        "bge-m3",
        "The sparse vectors of BGE-M3: a weight for each token, no expansion, any vocabulary",
        "2402.03216",
        LsrRecipe("bge-m3", document=EncoderSpec("bge_m3"), query_regularizer=_NONE, document_regularizer=_NONE),
        published="trained with dense and multi-vector scores, which share the encoder: (L_dense + L_all + .1 "
        "L_sparse + L_colbert) / 4, then self-distillation; temperature .02. Here the sparse part alone",
        publishes="nDCG@10 .539 on MIRACL, 18 languages (sparse)",
        base="encoder",
    ),
    Entry(
        "splate",
        "SPLATE: a trained adapter makes sparse vectors of a frozen ColBERT, which reranks what they find",
        "2404.13950",
        LsrRecipe(
            "splate",
            document=EncoderSpec("splate", trainable=True),
            loss={"kl": 1.0},
            negatives=8,
            batch_size=16,
        ),
        published="ColBERTv2, distillation, adapter alone; 50 candidates reranked",
        publishes="the effectiveness of PLAID with 50 candidates found in less than 10 ms (abstract)",
        base="multi-vector",
    ),
)
