"""Which package under ``tilefold.ops`` defines each public name of the operators."""

PACKAGE_OF = {
    "QuantizedTokens": "maxsim",
    "QuantizedWeight": "lsr_head",
    "entmax": "entmax",
    "entmax_attention": "entmax_attention",
    "lsr_head": "lsr_head",
    "lsr_head_sparse": "lsr_head",
    "maxsim": "maxsim",
    "maxsim_contrastive_loss": "maxsim",
    "maxsim_topk": "maxsim",
    "quantize_tokens": "maxsim",
    "quantize_weight": "lsr_head",
    "sparsemax": "entmax",
    "token_scatter": "token_scatter",
    "token_scatter_sparse": "token_scatter",
    "xtr_scores": "maxsim",
}
