"""The LSR head as ``torch.library`` operators: schema, fake kernels and autograd, for full-graph ``torch.compile``."""

from tilefold.ops.lsr_head._library.cu_seqlens import broken_cu_seqlens, check_cu_seqlens, checked_cu_seqlens
from tilefold.ops.lsr_head._library.max_pooling import max_head, scores_again
from tilefold.ops.lsr_head._library.one_token import token_head
from tilefold.ops.lsr_head._library.quantized import quantized_max_head
from tilefold.ops.lsr_head._library.sum_pooling import sum_head

__all__ = [
    "broken_cu_seqlens",
    "check_cu_seqlens",
    "checked_cu_seqlens",
    "max_head",
    "quantized_max_head",
    "scores_again",
    "sum_head",
    "token_head",
]
