"""The sparse head of BGE-M3 (arXiv 2402.03216): one weight per token, and its published weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilefold._typing import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SPARSE_LINEAR", "find_sparse_linear", "load_sparse_linear", "silent_ids"]

SPARSE_LINEAR = ("sparse_linear.safetensors", "sparse_linear.pt")  # beside the weights; the first that exists is read


def find_sparse_linear(name_or_path: str) -> str | None:
    """The file of a model's sparse head, in a folder or a Hugging Face repository; ``None`` if it has none."""
    from sentence_transformers.util import load_file_path

    for name in SPARSE_LINEAR:
        found = load_file_path(name_or_path, name, local_files_only=Path(name_or_path).is_dir())
        if found is not None:
            return str(found)
    return None


def load_sparse_linear(path: str | Path) -> dict[str, Tensor]:
    """``{"weight": [1, D], "bias": [1]}`` of an ``nn.Linear(D, 1)``, as FlagEmbedding saves it.

    A ``.pt`` file is a pickle: it is read as tensors alone (``weights_only=True``), and runs no code.

    Args:
        path: ``sparse_linear.pt`` or a safetensors file.

    Raises:
        ValueError: for a file that holds anything else.
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


def silent_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that get no weight: those of CLS, SEP, BOS, EOS, PAD and UNK."""
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    return sorted({value for name in names if (value := getattr(tokenizer, name, None)) is not None})
