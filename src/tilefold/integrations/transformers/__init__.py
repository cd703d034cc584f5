"""transformers 5: alpha-entmax attention for stock models, by the library's own registries.

from tilefold.integrations.transformers import register

register()
model = AutoModel.from_pretrained(name, attn_implementation="entmax")
"""

try:
    import transformers.masking_utils  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tilefold.integrations.transformers needs transformers 5.0 or later; pip install transformers."
    ) from error

from tilefold.integrations.transformers._alpha import learn_alpha, set_alpha
from tilefold.integrations.transformers._attention import entmax_attention_forward, entmax_mask, register, unregister

__all__ = ["entmax_attention_forward", "entmax_mask", "learn_alpha", "register", "set_alpha", "unregister"]
