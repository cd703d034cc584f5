"""The sparse vectors of BGE-M3 (arXiv 2402.03216): a weight for each token."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tilefold._internal.arguments import path_of
from tilefold._internal.typing import Module, Tensor, Transformer
from tilefold.recipes._encoder_spec import Base, SharableSpec
from tilefold.recipes._masked_encoders import load_transformer
from tilefold.recipes.loading import seeded

HEAD_FILES = ("sparse_linear.safetensors", "sparse_linear.pt")
"""Files with the sparse head, next to BGE-M3's weights; the first existing one is read."""
UNWEIGHTED_TOKENS = ("cls", "sep", "bos", "eos", "pad", "unk")
NEW_HEAD_WEIGHT_FACTOR = 0.1  # scales the random weights of a new head


@dataclass(frozen=True, kw_only=True)
class BgeM3Spec(SharableSpec, kind="bge_m3"):
    """Configuration of an encoder with the sparse head of BGE-M3, which computes token weights.

    A base model without such a head gets a new one.
    """

    transformer_task: ClassVar[str] = "feature-extraction"  # no LM head

    def build(self, base: Base) -> list[Module]:
        """Build a transformer and the linear layer that computes a weight for every token.

        The layer is loaded from the base model if it has one, and is new otherwise.

        Args:
            base: the recipe's base model, maximum length and seed. ``base.network`` is the document
                encoder's Transformer, which is reused if `shared_network` is set.

        Returns:
            The transformer without an LM head, and its :class:`tilefold.modules.TokenWeights`.
        """
        import torch

        from tilefold.modules import TokenWeights

        base_model = self.model_name(base)
        if self.shared_network:
            transformer = self.document_network(base)
        else:
            transformer = load_transformer(base_model, base, self.transformer_task)
        vocab_size = transformer.model.get_input_embeddings().num_embeddings
        with seeded(base.seed):
            head = TokenWeights(
                transformer.get_embedding_dimension(),
                vocab_size,
                ignore_ids=_unweighted_ids(transformer),
            )
        head_file = _find_head(base_model)
        if head_file is not None:
            _load_head(head, head_file)
            return [transformer, head]
        # Every token starts with a weight near 1. With a random layer, relu would set all weights
        # of many texts to 0.
        with torch.no_grad():
            head.linear.weight.mul_(NEW_HEAD_WEIGHT_FACTOR)
            head.linear.bias.fill_(1.0)
        return [transformer, head]


def _unweighted_ids(transformer: Transformer) -> list[int]:
    """Return the ids of the special tokens that get no weight, in ascending order."""
    token_ids = set()
    for name in UNWEIGHTED_TOKENS:
        token_id = getattr(transformer.tokenizer, f"{name}_token_id", None)
        if token_id is not None:
            token_ids.add(token_id)
    return sorted(token_ids)


def _find_head(base_model: str) -> str | None:
    """Return the path of the file with a base model's sparse head, downloaded if necessary.

    Args:
        base_model: ``"minilm"``, a folder or a Hugging Face name.

    Returns:
        The path; ``None`` for a model without a sparse head.
    """
    from sentence_transformers.util import load_file_path

    if base_model == "minilm":  # a dense model
        return None
    is_local = Path(base_model).is_dir()
    for file in HEAD_FILES:
        path = load_file_path(base_model, file, local_files_only=is_local)
        if path is not None:
            return str(path)
    return None


def _load_head(head: Module, path: str) -> None:
    """Load the linear layer of a new :class:`tilefold.modules.TokenWeights` from a file.

    Args:
        head: the module, changed in place. Its linear layer maps states of width D to one weight.
        path: file of BGE-M3's sparse head.

    Raises:
        ValueError: if the file has no such layer, or the layer has another width than D.
    """
    state = load_sparse_linear(path)
    shape = list(state["weight"].shape)
    expected_shape = list(head.linear.weight.shape)
    if shape != expected_shape:
        raise ValueError(
            f"{path} has a weight of shape {shape}, expected {expected_shape}; the file belongs to "
            "another model.",
        )
    head.linear.load_state_dict(state)


def load_sparse_linear(path: str | Path) -> dict[str, Tensor]:
    """Read the sparse head of BGE-M3 from a file, as FlagEmbedding saves it.

    A ``.pt`` file is a pickle. Only tensors are read from it, and no code in it runs.

    Args:
        path: ``.safetensors`` or ``.pt`` file of the state of an ``nn.Linear(D, 1)``.

    Returns:
        ``{"weight": [1, D], "bias": [1]}`` in fp32.

    Raises:
        ValueError: if the file holds anything else, or numbers that are not finite.
    """
    path = path_of("path", path)
    state = _read_tensors(path)
    _check_linear(state, path)
    return {name: value.float() for name, value in state.items()}


def _read_tensors(path: Path) -> Any:
    """Read a file of tensors without running code in it.

    Args:
        path: ``.safetensors`` file, or a file of ``torch.save``.

    Returns:
        The content, which should be a dictionary of tensors.

    Raises:
        ValueError: if the file cannot be read, or holds something other than tensors.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, "cpu", weights_only=True)
    except (
        pickle.UnpicklingError,
        SafetensorError,
        RuntimeError,
        EOFError,
        AttributeError,
    ) as error:
        raise ValueError(
            f"{path} must hold only tensors, but cannot be read as such; no code in it was run. If "
            "you trust the file, load it yourself, and save its state_dict with safetensors as "
            "sparse_linear.safetensors.",
        ) from error


def _check_linear(state: Any, path: Path) -> None:
    """Raise an error if a file does not hold the finite weights of a linear layer with one output.

    Args:
        state: content of the file, which should be a dictionary of tensors.
        path: path of the file, for the error message.

    Raises:
        ValueError: if names and shapes differ from ``weight [1, D]`` and ``bias [1]``, or if a
            number is NaN or infinite.
    """
    import torch

    shapes: dict[str, list[int]] = {}
    if isinstance(state, dict):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                shapes[name] = list(value.shape)
    width = shapes.get("weight", [0])[-1]
    if shapes != {"weight": [1, width], "bias": [1]}:
        raise ValueError(
            f"{path} must hold `weight` [1, D] and `bias` [1] of a linear layer with one output, "
            f"got {shapes or type(state)}.",
        )
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise ValueError(
            f"{path} must hold finite numbers, got NaN or infinity; download the file again.",
        )
