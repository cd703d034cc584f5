"""The start `xlmr-small` of effectiveness and recipes: matches words over 250,002 terms, from
random weights.
"""

from __future__ import annotations

import math
from pathlib import Path

# hidden size, layers and attention heads
HIDDEN, LAYERS, HEADS = 256, 4, 4
OWN_LOGIT, MARGIN = (
    4.0,
    5.0,
)  # logit of a token's own entry; the bias in standard deviations of all other logits


def small_xlmr(folder: Path, tokenizer: str, max_length: int, seed: int) -> Path:
    """Save the `xlmr-small` start as a stock SparseEncoder; equal seeds give equal weights.

    The head is `LayerNorm(gelu(W h + b))` before the tied embeddings. `W = I` and `b = 6` keep it
    where gelu is the identity, and the LayerNorm takes the shift out again; token embeddings of
    length 1 then give every token's own entry a logit of about ``OWN_LOGIT`` and the others noise
    of ``OWN_LOGIT / sqrt(D)``, which the bias cuts off.
    """
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from transformers import AutoTokenizer, XLMRobertaConfig, XLMRobertaForMaskedLM

    from tilefold.recipes.loading import quiet_libraries

    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reader = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        reader.model_max_length = max_length
        config = XLMRobertaConfig(
            vocab_size=len(reader),
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=4 * HIDDEN,
            max_position_embeddings=514,
            type_vocab_size=1,
            pad_token_id=reader.pad_token_id,
        )
        network = XLMRobertaForMaskedLM(config)
        scale = OWN_LOGIT / math.sqrt(HIDDEN)
        with torch.no_grad():
            embeddings = network.roberta.embeddings
            embeddings.word_embeddings.weight.normal_(std=1 / math.sqrt(HIDDEN))
            embeddings.word_embeddings.weight[reader.pad_token_id] = 0
            embeddings.position_embeddings.weight.mul_(0.25)
            embeddings.token_type_embeddings.weight.zero_()
            head = network.lm_head
            head.dense.weight.copy_(torch.eye(HIDDEN))
            head.dense.bias.fill_(6.0)
            head.layer_norm.weight.fill_(scale)
            head.bias.fill_(-MARGIN * scale)
            for token in reader.all_special_ids:
                head.bias[token] = -100.0  # no text is about them
        network.save_pretrained(str(folder))
        reader.save_pretrained(str(folder))
        transformer = Transformer(
            str(folder),
            transformer_task="fill-mask",
            max_seq_length=max_length,
            model_kwargs={"local_files_only": True},
            processor_kwargs={"local_files_only": True},
        )
        SparseEncoder(modules=[transformer, SpladePooling("max")], device="cpu").save_pretrained(
            str(folder),
        )
    return folder
