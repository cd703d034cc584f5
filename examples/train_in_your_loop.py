"""How do I use the SPLADE head in a training loop of my own?

Needs: pip install "tilefold[demo]"
Run:   python examples/train_in_your_loop.py
It takes seconds on two CPU cores, and uses a GPU if there is one. The network is a small BERT with
random weights.
"""

from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from tilefold.losses import flops
from tilefold.nn import LSRHead
from tilefold.recipes import minilm_path
from tilefold.retrieval import load_collection

bank = load_collection(Path(__file__).parent / "data" / "bank")
texts = bank.contents()  # document id -> title and text
pairs = bank.pairs("train")  # (query id, document id)
queries = [bank.queries[query_id] for query_id, _ in pairs]
documents = [texts[document_id] for _, document_id in pairs]

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(minilm_path())
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=128,
)
model = BertForMaskedLM(config).to(device)  # or AutoModelForMaskedLM.from_pretrained(...)
head = LSRHead.from_linear(model.get_output_embeddings(), pooling="max")  # shares its weight
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def encode(batch: list[str]) -> torch.Tensor:
    """Return the SPLADE scores [B, V] of texts; the logits [B, S, V] are never stored."""
    inputs = tokenizer(batch, padding=True, return_tensors="pt").to(device)
    hidden = model.bert(**inputs).last_hidden_state
    hidden = model.cls.predictions.transform(hidden)  # the input of the decoder layer
    return head(hidden, inputs["attention_mask"])


for step in range(20):
    query_scores, document_scores = encode(queries), encode(documents)
    similarities = query_scores @ document_scores.T  # the other documents are negatives
    positives = torch.arange(len(queries), device=device)
    ranking_loss = torch.nn.functional.cross_entropy(similarities, positives)
    loss = ranking_loss + 1e-3 * (flops(query_scores) + flops(document_scores))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (0, 19):
        print(f"step {step + 1}: loss {loss.item():.3f}, ranking {ranking_loss.item():.3f}")
