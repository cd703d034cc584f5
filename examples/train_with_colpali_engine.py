"""How do I use the losses of colpali-engine without the similarities of all token pairs?

Needs: pip install tilefold colpali-engine==0.3.18
Run:   python examples/train_with_colpali_engine.py
It takes seconds on two CPU cores. Random features take the place of the page images and of the
vision model, so that nothing is downloaded; the projection after them is trained.
"""

import torch
from colpali_engine.loss import ColbertPairwiseCELoss

from tilefold.integrations.colpali import accelerate

N_PAGES, PATCHES_PER_PAGE, TOKENS_PER_QUERY = 16, 64, 8
FEATURE_SIZE, VECTOR_SIZE = 256, 128

# Each query is about some patches of its page, with noise.
torch.manual_seed(0)
pages = torch.randn(N_PAGES, PATCHES_PER_PAGE, FEATURE_SIZE)
noise = torch.randn(N_PAGES, TOKENS_PER_QUERY, FEATURE_SIZE)
queries = pages[:, :TOKENS_PER_QUERY] + 2.0 * noise

projection = torch.nn.Linear(FEATURE_SIZE, VECTOR_SIZE)
optimizer = torch.optim.AdamW(projection.parameters(), lr=1e-3)
loss_function = ColbertPairwiseCELoss()


def embed(features: torch.Tensor) -> torch.Tensor:
    """Return unit vectors, as the models of colpali-engine do."""
    return torch.nn.functional.normalize(projection(features), dim=-1)


with accelerate():  # the losses and score_multi_vector of colpali-engine now run MaxSim of tilefold
    for step in range(20):
        loss = loss_function(embed(queries), embed(pages))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 19):
            print(f"step {step + 1}: loss {loss.item():.4f}")
