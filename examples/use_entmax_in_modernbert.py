"""How do I run ModernBERT with entmax attention, and see how sparse it is?

Needs: pip install "tilefold[demo]"
Run:   python examples/use_entmax_in_modernbert.py
It takes seconds on two CPU cores. The network is a small ModernBERT with random weights; examples/
entmax_encoder.py trains one.
"""

import tempfile

import torch
from transformers import AutoModel, AutoTokenizer, ModernBertConfig, ModernBertModel

from tilefold.integrations.transformers import record_sparsity, register, runs_entmax, use_entmax
from tilefold.recipes import minilm_path

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(minilm_path())
config = ModernBertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    global_attn_every_n_layers=2,
    local_attention=16,  # every second layer attends to a window of 16 tokens
    pad_token_id=tokenizer.pad_token_id,
    cls_token_id=tokenizer.cls_token_id,
    sep_token_id=tokenizer.sep_token_id,
    bos_token_id=tokenizer.cls_token_id,
    eos_token_id=tokenizer.sep_token_id,
    initializer_range=0.5,  # larger than usual, so that random weights attend unevenly
)
model = ModernBertModel(config)  # or AutoModel.from_pretrained("answerdotai/ModernBERT-base")
use_entmax(model, alpha=1.5)  # 1 is softmax, 2 is sparsemax; or one alpha per layer

texts = ["Block a lost or stolen card in the app, under Cards.", "A new one comes by post."]
inputs = tokenizer(texts, padding=True, return_tensors="pt")
with record_sparsity(model) as sparsity:
    states = model(**inputs).last_hidden_state
states.square().mean().backward()  # gradients flow through the positive weights
print(sparsity)

# A checkpoint keeps its attention.
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
register()  # tells transformers about "entmax"; use_entmax did so above
print("the saved model runs entmax:", runs_entmax(AutoModel.from_pretrained(folder)))
