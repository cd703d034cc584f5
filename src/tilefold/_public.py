"""The public names of the operators, each with its room under ``tilefold.ops``."""

_NAMES = {
    "entmax": "entmax sparsemax",
    "entmax_attention": "entmax_attention",
    "lsr_head": "QuantizedWeight lsr_head lsr_head_sparse quantize_weight",
    "maxsim": "QuantizedTokens maxsim maxsim_contrastive_loss maxsim_topk quantize_tokens xtr_scores",
    "token_scatter": "token_scatter token_scatter_sparse",
}
ROOM_OF = dict(sorted((name, room) for room, names in _NAMES.items() for name in names.split()))
