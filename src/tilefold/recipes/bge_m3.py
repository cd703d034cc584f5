"""The sparse head of BGE-M3 (arXiv 2402.03216): one weight per token, and its published weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.recipes._builders import Base, load_transformer, shared_network
from tilefold.recipes._settings import EncoderSpec
from tilefold.recipes.loading import seeded

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["build_bge_m3", "load_sparse_linear"]

SPARSE_LINEAR = ("sparse_linear.safetensors", "sparse_linear.pt")  # beside the weights; the first that exists is read
# tokens that get no weight
SILENT = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
FRESH = 0.1  # factor on the random weights of a new head


def load_sparse_linear(path: str | Path) -> dict[str, Tensor]:
    """Read ``{"weight": [1, D], "bias": [1]}`` of an ``nn.Linear(D, 1)``, as FlagEmbedding saves it.

    A ``.pt`` file is a pickle: it is read as tensors alone, and runs no code; a ``ValueError`` for anything else.
    """
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, EOFError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold tensors alone, got a file that cannot be read as such; it was not run. Load it where "
            "you trust it, and save its state_dict with safetensors.torch.save_file as sparse_linear.safetensors."
        ) from error
    shapes = {name: list(value.shape) for name, value in state.items()} if isinstance(state, dict) else {}
    weight = shapes.get("weight", [])
    if set(shapes) != {"weight", "bias"} or len(weight) != 2 or weight[0] != 1 or shapes["bias"] != [1]:
        raise ValueError(
            f"{path} must hold weight [1, D] and bias [1] of a linear layer to one number, got {shapes or type(state)}."
        )
    return {name: value.float() for name, value in state.items()}


def build_bge_m3(spec: EncoderSpec, base: Base) -> list[Any]:
    """A weight for each token; that of the base model if it has one (``sparse_linear.pt``), else a fresh one."""
    import torch
    from sentence_transformers.util import load_file_path

    from tilefold.modules import TokenWeights

    name = spec.base_model or base.base_model
    transformer = (
        shared_network(spec, base, "feature-extraction")
        if spec.shared_network
        else load_transformer(name, base, "feature-extraction")
    )
    rows = transformer.model.get_input_embeddings().num_embeddings
    with seeded(base.seed):
        ids = (getattr(transformer.tokenizer, token, None) for token in SILENT)
        silent = sorted({id_ for id_ in ids if id_ is not None})
        head = TokenWeights(transformer.get_embedding_dimension(), rows, ignore_ids=silent)
    files = SPARSE_LINEAR if name != "minilm" else ()
    local = Path(name).is_dir()
    found = next(filter(None, (load_file_path(name, file, local_files_only=local) for file in files)), None)
    if found is not None:
        state = load_sparse_linear(found)
        if state["weight"].shape != head.linear.weight.shape:
            raise ValueError(
                f"{found} must fit states of width {head.hidden_size}, got {list(state['weight'].shape)}; it belongs "
                "to another model."
            )
        head.linear.load_state_dict(state)
    else:  # every token begins with a weight near 1: relu of a random layer leaves many texts without any
        with torch.no_grad():
            head.linear.weight.mul_(FRESH)
            head.linear.bias.fill_(1.0)
    return [transformer, head]
