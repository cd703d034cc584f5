"""The systems of the unified framework (arXiv 2303.13416): any query encoder with any document encoder.

Its common setting distils a cross-encoder's margins (DistilBERT, batch 128, 150k steps, warm-up 6k, length 250); the
entries here train on pairs alone where the system's own loss allows it, so that they can be compared on any collection.
"""

from __future__ import annotations

from typing import Any

from tilefold.recipes._entry import Entry
from tilefold.recipes._lsr_recipe import LsrRecipe, RegularizerSpec
from tilefold.recipes.encoders import EncoderSpec

__all__ = ["ENTRIES"]

_NONE = RegularizerSpec("none", weight=0.0)
_NO_PENALTY: dict[str, Any] = {"query_regularizer": _NONE, "document_regularizer": _NONE}
_BINARY = EncoderSpec("binary", trainable=True)
_MLM = EncoderSpec("mlm", drop_special_tokens=True)
_WEIGHTS = EncoderSpec("mlp")
_LOG_WEIGHTS = EncoderSpec("mlp", activation="log1p_relu")
_UNREAD = "not looked up"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        "unicoil",
        "uniCOIL: a learned weight for each token of query and document, no expansion",
        "2106.14807",
        LsrRecipe("unicoil", document=_WEIGHTS, **_NO_PENALTY),
        published="multiple negatives, on documents expanded with doc2query-T5",
        publishes="MRR@10 .352 on MS MARCO dev (expanded documents)",
    ),
    Entry(
        "deepimpact",
        "DeepImpact: a learned weight for each token of the document, binary queries",
        "2104.12016",
        LsrRecipe("deepimpact", query=_BINARY, document=_WEIGHTS, **_NO_PENALTY),
        published="cross-entropy of 1 negative, batch 32, lr 3e-6, 100k steps, on documents expanded with doc2query-T5",
        publishes="MRR@10 .326 on MS MARCO dev (expanded documents)",
    ),
    Entry(
        "deepct",
        "DeepCT: token weights that predict the share of relevant queries with the term",
        "1910.10687",
        # DeepCT ranks by BM25: the queries carry its IDF, and 100 * recall is a frequency that saturates with k1 = 10.
        # Without the saturation the few terms of high recall drown the others, and ranking is worse than before.
        LsrRecipe(
            "deepct",
            query=EncoderSpec("idf"),
            document=EncoderSpec("mlp", activation="none", saturation=0.1),
            loss={"term_recall": 1.0},
            learning_rate=2e-5,
            **_NO_PENALTY,
        ),
        published="mean squared error of term recall, batch 16, lr 2e-5, 3 epochs (its code; 2303.13416: 32, 5e-6, 5); "
        "BM25 on 100 times the weights as frequencies",
        publishes="MRR@10 .243 on MS MARCO dev (weights as BM25 frequencies)",
    ),
    Entry(
        "tilde",
        "TILDE: the logits of the document's first token, binary queries",
        "",
        # a bias for each term: one for all leaves the first token with [CLS] alone, and nothing to learn from
        LsrRecipe("tilde", query=_BINARY, document=EncoderSpec("cls_mlm"), start_deviations=2.0, **_NO_PENALTY),
        published="SIGIR 2021 (Zhuang and Zuccon): likelihood of the query's and the document's tokens, for reranking",
        publishes=_UNREAD,
    ),
    Entry(
        "tildev2",
        "TILDEv2: DeepImpact's model on documents that TILDE expanded (here: as they are)",
        "2108.08513",
        LsrRecipe("tildev2", query=_BINARY, document=_WEIGHTS, **_NO_PENALTY),
        published="cross-entropy, documents expanded with the 200 best terms of TILDE",
        publishes=_UNREAD,
    ),
    Entry(
        "sparta",
        "SPARTA: the largest logit of the document's tokens, binary queries, no penalty",
        "2009.13013",
        LsrRecipe("sparta", query=_BINARY, document=_MLM, **_NO_PENALTY),
        published="cross-entropy of 3 negatives, batch 8, lr 3e-5, 5 epochs",
        publishes=_UNREAD,
    ),
    Entry(
        "epic",
        "EPIC: logits weighted by token importance, times text quality; weighted query tokens",
        "2004.14245",
        LsrRecipe(
            "epic",
            query=EncoderSpec("mlp", activation="log1p_softplus"),
            document=EncoderSpec("epic"),
            loss={"pairwise_softmax": 1.0},
            negatives=1,
            **_NO_PENALTY,
        ),
        published="1 - P(relevant) of 1 negative, batch 16, constant lr 2e-5, 2,432 steps; 1,000 terms per document",
        publishes=_UNREAD,
    ),
    Entry(
        "splade-asm",
        "SPLADE with an encoder of its own for each side",
        "2303.13416",
        LsrRecipe("splade-asm", query=_MLM, document=_MLM),
        published="MarginMSE, FLOPS q .1 d .08 (T 50k); or contrastive, FLOPS q .01 d .05, lr 5e-6, batch 8 x 8",
        publishes=_UNREAD,
    ),
    Entry(
        "splade-qmlp",
        "SPLADE documents, weighted query tokens: no query expansion",
        "2303.13416",
        LsrRecipe("splade-qmlp", query=_LOG_WEIGHTS, document=_MLM, query_regularizer=_NONE),
        published="MarginMSE, FLOPS d .08 (T 50k)",
        publishes=_UNREAD,
    ),
    Entry(
        "splade-dmlp",
        "SPLADE queries, weighted document tokens: no document expansion",
        "2303.13416",
        LsrRecipe("splade-dmlp", query=_MLM, document=_LOG_WEIGHTS, document_regularizer=_NONE),
        published="MarginMSE, FLOPS q .1 (T 50k)",
        publishes=_UNREAD,
    ),
    Entry(
        "splade-dbin",
        "SPLADE queries, binary documents: no document weighting",
        "2303.13416",
        LsrRecipe("splade-dbin", query=_MLM, document=_BINARY, document_regularizer=_NONE),
        published="MarginMSE, FLOPS q .1 (T 50k)",
        publishes=_UNREAD,
    ),
)
