"""An untrained masked language model that matches tokens: the start of benchmarks that have no
pretrained weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilefold._internal.typing import Model, Tokenizer
from tilefold.recipes._settings import integer
from tilefold.recipes.backbone import GELU_SHIFT
from tilefold.recipes.loading import seeded

_BRANCH_STD = 1e-3


def fresh_masked_lm(
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    width: int = 384,
    layers: int = 4,
    heads: int = 6,
    max_length: int = 512,
    seed: int = 0,
) -> Path:
    """Save an untrained ``BertForMaskedLM`` over `tokenizer`'s vocabulary, with the tokenizer, in
    `folder`.

    ``SparseEncoder(folder)`` makes a SPLADE encoder of it, and every recipe for masked language
    models takes it as ``base_model``. It has ``V * width`` parameters of embeddings, tied to the
    decoder: 96 million at V = 250,002. Untrained, the vector of a text has the tokens that stand in
    it, with equal weights. Equal seeds give equal models.

    Raises:
        ValueError: for sizes that do not fit together, or a tokenizer without a padding and a mask
            token.
    """
    from transformers import BertConfig, BertForMaskedLM

    for name, value in (
        ("width", width),
        ("layers", layers),
        ("heads", heads),
        ("max_length", max_length),
    ):
        integer()(name, value)
    if width % heads:
        raise ValueError(f"width must be a multiple of heads ({heads}), got {width}.")
    if tokenizer.pad_token_id is None or tokenizer.mask_token_id is None:
        raise ValueError(
            "tokenizer must have a padding and a mask token, which a masked LM is trained with.",
        )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        type_vocab_size=2,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["BertForMaskedLM"],
    )
    with seeded(seed):
        model = BertForMaskedLM(config)
        _start_lexical(model, config)
    folder = Path(folder)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def _start_lexical(model: Model, config: Any) -> None:
    import torch

    sigma = config.initializer_range  # a token's own logit is about sigma D, others sigma sqrt(D)
    head, embeddings = model.cls.predictions, model.bert.embeddings
    with torch.no_grad():
        embeddings.word_embeddings.weight.normal_(std=sigma)
        embeddings.position_embeddings.weight.normal_(std=sigma / 10)
        embeddings.token_type_embeddings.weight.zero_()
        for layer in (
            model.bert.encoder.layer
        ):  # which add almost nothing to their input: a token's own embedding
            layer.attention.output.dense.weight.normal_(std=_BRANCH_STD)
            layer.output.dense.weight.normal_(std=_BRANCH_STD)
        head.transform.dense.weight.copy_(torch.eye(config.hidden_size))
        head.transform.dense.bias.fill_(GELU_SHIFT)
        own = (
            sigma * config.hidden_size
        )  # a token's own logit: norms sqrt(D) and sigma sqrt(D), one direction
        head.bias.fill_(-own / 2)
    model.tie_weights()
