"""SPLADE and its descendants, and ColBERT."""

from __future__ import annotations

from tilefold.recipes._entry import Entry
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.encoders import EncoderSpec
from tilefold.recipes.lsr import LsrRecipe, RegularizerSpec
from tilefold.recipes.splade import SpladeRecipe

__all__ = ["ENTRIES"]

_NONE = RegularizerSpec("none", weight=0.0)

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "splade",
        "SPLADE for a small collection: in-batch negatives, both sides share the weights",
        "2107.05720",
        SpladeRecipe(),
        published="see splade-v2; these are the settings of tilefold demo",
    ),
    Entry(
        "splade-v2",
        "SPLADE v2, max pooling: in-batch negatives, FLOPS on both sides",
        "2109.10086",
        LsrRecipe("splade-v2"),
        published="distilbert, lr 2e-5, batch 128, 150k steps, warm-up 6k, length 256, FLOPS q 3e-4 d 1e-4 (T 50k)",
        publishes="MRR@10 .340 on MS MARCO dev (SPLADE-max)",
    ),
    Entry(
        "splade-pp",
        "SPLADE++: MarginMSE on a teacher's margins, one mined negative per query",
        "2205.04733",
        LsrRecipe(
            "splade-pp",
            loss={"margin_mse": 0.2},
            negatives=1,
        ),
        published="distilbert or cocondenser, lr 2e-5, batch 128, 150k steps, length 256, FLOPS q .5 d .4 (T 50k)",
        publishes="MRR@10 .380 on MS MARCO dev (CoCondenser-EnsembleDistil)",
    ),
    Entry(
        "splade-v3",
        "SPLADE-v3: KL and MarginMSE on an ensemble of teachers, 8 mined negatives per query",
        "2403.06789",
        LsrRecipe("splade-v3", loss={"kl": 1.0, "margin_mse": 0.05}, negatives=8, batch_size=16),
        published="from SPLADE++SelfDistil, 8 of 100 mined negatives per step (50 of the top 50, 50 of the top 1000), "
        "teachers: MiniLM and four rerankers; weights of both losses not published",
        publishes="MRR@10 .402 on MS MARCO dev",
    ),
    Entry(
        "splade-doc",
        "SPLADE documents, binary queries: no model runs at query time",
        "2109.10086",
        LsrRecipe("splade-doc", query=EncoderSpec("binary", scale=1.0), query_regularizer=_NONE),
        published="as splade-v2, FLOPS on documents alone",
        publishes="MRR@10 .322 on MS MARCO dev (SPLADE-doc)",
    ),
    Entry(
        "efficient-splade",
        "Efficient SPLADE: a small query model of its own, L1 on queries, KL on a teacher",
        "2207.03834",
        LsrRecipe(
            "efficient-splade",
            query=EncoderSpec("mlm", layers=2),
            loss={"kl": 1.0},
            negatives=8,
            batch_size=16,
            query_regularizer=RegularizerSpec("l1", weight=5e-3),
        ),
        published="MLM+FLOPS middle-trained distilbert, BERT-tiny for queries, 250k steps, L1 q 5e-3 (L 5e-4), "
        "FLOPS d 5e-3 (M and L 5e-4)",
        publishes="MRR@10 .380 on MS MARCO dev (VI, BT-SPLADE-L)",
    ),
    Entry(
        "inference-free",
        "OpenSearch's inference-free sparse retrieval: IDF queries, double log1p, row threshold, teacher ensemble",
        "2411.04403",
        LsrRecipe(
            "inference-free",
            query=EncoderSpec("idf", trainable=True),
            document=EncoderSpec(activation="log1p_log1p_relu"),
            loss={"kl": 1.0},
            negatives=8,
            batch_size=16,
            query_regularizer=_NONE,
            document_regularizer=RegularizerSpec(threshold=150),
            idf_learning_rate=1e-3,
        ),
        published="co-condenser, KL on stored scores of 2 documents per query, FLOPS d .08 (T 40k), threshold 150, "
        "batch 20 x 8 GPUs, 100k steps, lr 2e-5, length 256 (l0 and threshold: arXiv 2504.14839)",
        publishes="nDCG@10 .504 on BEIR-13 (v2-distill)",
    ),
    Entry(
        "colbert",
        "ColBERT: a vector per token, for reranking",
        "2004.12832",
        ColbertRecipe(),
        published="bert-base, dimension 128, lr 3e-6, batch 32, 200k steps, triples of MS MARCO",
        publishes="MRR@10 .349 on MS MARCO dev (reranking)",
        base="encoder",
    ),
)
