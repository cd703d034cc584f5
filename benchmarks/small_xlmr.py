"""Make the model `xlmr-small`, from which recipes for other languages start.

It matches words over 250,002 terms, from random weights.
"""

from __future__ import annotations

import math
from pathlib import Path

HIDDEN_SIZE = 256
LAYERS = 4
ATTENTION_HEADS = 4
# logit of a token's own entry of the vocabulary
OWN_LOGIT = 4.0
# minus the bias, in standard deviations of the logits of all other entries
MARGIN = 5.0
# bias before the activation, in whose neighbourhood gelu is the identity
GELU_SHIFT = 6.0
# bias of special tokens, which no text is about
NEVER_ACTIVE = -100.0


def small_xlmr(folder: Path, tokenizer: str, max_length: int, seed: int) -> Path:
    """Save the model as a stock SparseEncoder. Equal seeds give equal weights.

    The head is `LayerNorm(gelu(W h + b))` before the tied embeddings. With `W = I` and `b = 6` it
    is where gelu is the identity, and the LayerNorm removes the shift. With token embeddings of
    length 1, a token's own entry has a logit of about ``OWN_LOGIT``, and the others have noise of
    ``OWN_LOGIT / sqrt(D)``, which the bias makes negative.

    Args:
        folder: the folder for the model.
        tokenizer: the folder of the tokenizer.
        max_length: the tokens of a text that are read.
        seed: the seed of the random weights.

    Returns:
        ``folder``.
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
            hidden_size=HIDDEN_SIZE,
            num_hidden_layers=LAYERS,
            num_attention_heads=ATTENTION_HEADS,
            intermediate_size=4 * HIDDEN_SIZE,
            max_position_embeddings=514,
            type_vocab_size=1,
            pad_token_id=reader.pad_token_id,
        )
        network = XLMRobertaForMaskedLM(config)
        scale = OWN_LOGIT / math.sqrt(HIDDEN_SIZE)
        with torch.no_grad():
            embeddings = network.roberta.embeddings
            embeddings.word_embeddings.weight.normal_(std=1 / math.sqrt(HIDDEN_SIZE))
            embeddings.word_embeddings.weight[reader.pad_token_id] = 0
            embeddings.position_embeddings.weight.mul_(0.25)
            embeddings.token_type_embeddings.weight.zero_()
            head = network.lm_head
            head.dense.weight.copy_(torch.eye(HIDDEN_SIZE))
            head.dense.bias.fill_(GELU_SHIFT)
            head.layer_norm.weight.fill_(scale)
            head.bias.fill_(-MARGIN * scale)
            for token in reader.all_special_ids:
                head.bias[token] = NEVER_ACTIVE
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
