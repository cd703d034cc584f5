"""Alpha-entmax attention, and packed tokens, for stock models of transformers 5.

Both go through the library's own registries. For example::

    from tilefold.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(name, attn_implementation="entmax")
"""

try:
    import transformers.masking_utils  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"{__name__} needs transformers 5.0 or later; pip install transformers.",
    ) from error

from tilefold.integrations.transformers.alpha import (
    AlphaSchedule,
    learn_alpha,
    load_alpha,
    runs_entmax,
    set_alpha,
    use_entmax,
    use_softmax,
)
from tilefold.integrations.transformers.attention import (
    LayerSparsity,
    SparsityRecord,
    entmax_attention_forward,
    entmax_mask,
    record_sparsity,
    register,
    unregister,
)
from tilefold.integrations.transformers.packed import (
    packed_hidden_states,
    stop_packed,
    use_packed,
)
from tilefold.integrations.transformers.trainers import one_gpu

__all__ = [
    "AlphaSchedule",
    "LayerSparsity",
    "SparsityRecord",
    "entmax_attention_forward",
    "entmax_mask",
    "learn_alpha",
    "load_alpha",
    "one_gpu",
    "packed_hidden_states",
    "record_sparsity",
    "register",
    "runs_entmax",
    "set_alpha",
    "stop_packed",
    "unregister",
    "use_entmax",
    "use_packed",
    "use_softmax",
]
