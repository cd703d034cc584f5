"""Packed inputs for the Transformers of a model whose later modules take them, and why others stay
padded.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import is_multi_vector, pipelines_of
from tilefold.integrations.sentence_transformers._pooling import TOLERANCE, as_evaluated, tiny_batch
from tilefold.integrations.sentence_transformers.packing.collator import PackedForward
from tilefold.integrations.sentence_transformers.packing.inputs import (
    PackedInputs,
    packed_inputs,
    padded_inputs,
)
from tilefold.integrations.transformers.networks import largest_difference
from tilefold.integrations.transformers.packed import (
    LONGEST_NAMES,
    OFFSET_NAMES,
    stop_packed,
    use_packed,
)
from tilefold.modules.fused_pooling import Features
from tilefold.ops.packed_attention import token_positions

PACKED_KEYS = (*OFFSET_NAMES, *LONGEST_NAMES, "position_ids")
# of the norm: rounding in bf16 takes .05 to .11 in 12 layers of random weights, one token of
# another text .5
GROSS = 0.25
_EXPECTED = ("is no encoder", "was chosen", "of its own")  # reasons that nobody need be told


def pack_inputs(model: Model, check: bool) -> dict[str, str]:
    """Let Transformers run on packed tokens where all that follows takes them; why others stay
    padded, by name.
    """
    pipelines: dict[int, list[list[nn.Module]]] = {}
    for pipeline in pipelines_of(model):
        if pipeline and isinstance(pipeline[0], Transformer):
            pipelines.setdefault(id(pipeline[0]), []).append(pipeline)
    padded: dict[str, str] = {}
    for routes in pipelines.values():
        why: str | None = (
            "a MultiVectorEncoder takes packed tokens with a MultiVectorMask only, and no module "
            "is one"
        )
        if not is_multi_vector(model) or all(
            any(_is_mask(module) for module in route) for route in routes
        ):
            why = _pack(routes, check)
        if why is not None:
            name = type(routes[0][0].model).__name__
            padded[name] = why
            # modules of others need not know packed batches
            stock = all(
                type(m).__module__.startswith("sentence_transformers.")
                for route in routes
                for m in route
            )
            if stock and not any(known in why for known in _EXPECTED):
                warnings.warn(f"{name} runs on padded batches: {why}.", UserWarning, stacklevel=4)
    return padded


def _pack(routes: list[list[nn.Module]], check: bool) -> str | None:
    transformer: Any = routes[0][0]
    why = _why_not_by_its_kind(transformer)
    why = use_packed(transformer.model, check=check) if why is None else why
    if why is not None:
        return why
    if transformer.model_forward_params is not None:
        transformer.model_forward_params = {*transformer.model_forward_params, *PACKED_KEYS}
    transformer.preprocess, transformer.forward = (
        PackedInputs(transformer),
        PackedForward(transformer),
    )
    for module in (module for route in routes for module in route):
        if _is_mask(module) and "forward" not in vars(module):
            module.forward = PackedMask(module)
    for route in routes if check else []:
        if (why := _why_not_by_its_numbers(route)) is not None:
            del transformer.preprocess, transformer.forward
            stop_packed(transformer.model)
            return why
    return None


def _why_not_by_its_kind(transformer: Transformer) -> str | None:
    kind = type(transformer)
    if (
        kind.preprocess is not Transformer.preprocess
        or {"preprocess", "forward"} & vars(transformer).keys()
    ):
        return f"{kind.__name__} has a preprocess or a forward of its own"
    if transformer.backend != "torch" or set(transformer.modality_config) != {"text"}:
        return f"only text on the backend 'torch' is packed, got {transformer.backend!r} and {transformer.modalities}"
    if transformer.can_flatten_inputs:
        return "a flash-attn implementation was chosen, with which sentence-transformers flattens inputs itself"
    return "unpad_inputs=False was chosen" if transformer.unpad_inputs is False else None


def _is_mask(module: object) -> bool:
    return type(module).__name__ == "MultiVectorMask"


def _why_not_by_its_numbers(route: list[nn.Module]) -> str | None:
    """Run two short texts padded and packed through all modules; in 16 bits a copy in fp32 decides,
    if need be.

    Rounding in 16 bits grows with layers and vocabulary, and no tolerance tells it from a fault.
    """
    try:
        got, expected = _both_ways(route)
        if got.shape != expected.shape:
            return (
                f"packed batches gave {list(got.shape)} numbers, padded ones {list(expected.shape)}"
            )
        if _agree(got, expected):
            return None
        difference = largest_difference(got, expected)
        far = float((got - expected).norm() / expected.norm().clamp(min=1e-6))
        if next(route[0].parameters()).dtype.itemsize == 2 and far <= GROSS:
            got, expected = _both_ways([module.float() for module in copy.deepcopy(route)])
            if _agree(got, expected):
                return None
    except Exception as error:
        return f"two short texts could not be run ({type(error).__name__}: {error})"
    return f"packed and padded batches disagree by {difference:.3g} on two short texts"


def _agree(got: Tensor, expected: Tensor) -> bool:
    return largest_difference(got, expected) <= TOLERANCE * max(1.0, float(expected.abs().max()))


def _both_ways(route: list[nn.Module]) -> tuple[Tensor, Tensor]:
    """The numbers of packed and of padded batches, in fp32."""
    with as_evaluated(route):
        with padded_inputs():
            expected = _run(route)
        with packed_inputs():
            return _run(route).float(), expected.float()


def _run(route: list[nn.Module]) -> Tensor:
    features = tiny_batch(route[0])
    for module in route:
        features = module(features)
    if "sentence_embedding" in features:
        scores: Tensor = features["sentence_embedding"]
        return scores.to_dense()
    kept: Tensor = features["token_embeddings"][features["attention_mask"].bool()]
    return kept


class PackedMask(Replacement):
    """Replaces the forward of one ``MultiVectorMask``, which would cut packed token vectors one
    text at a time.
    """

    def __call__(self, features: Features, task: str | None = None) -> Features:
        """The features with ``[B, S, ..]`` token vectors and ids, and the mask of the tokens that
        are scored.
        """
        if "cu_seq_lens_q" in features:
            repad(features)
        skipped, ids = getattr(self.owner, "_skiplist_ids", None), features.get("input_ids")
        if skipped is not None and ids is not None and skipped.device != ids.device:
            self.owner._skiplist_ids = skipped.to(ids.device)  # a capture cannot copy them
        found: Features = type(self.owner).forward(self.owner, features, task=task)
        return found


def repad(features: Features) -> None:
    """Put padded ``token_embeddings``, ``input_ids`` and ``attention_mask`` in the place of packed
    ones.
    """
    cu_seqlens: Tensor = features["cu_seq_lens_q"]
    count, longest = cu_seqlens.numel() - 1, int(features["max_length_q"])
    ids, vectors = features["input_ids"][0], features["token_embeddings"][0]
    sequence, place = token_positions(cu_seqlens, ids.numel())
    rows = sequence * longest + place
    features["input_ids"] = (
        ids.new_zeros(count * longest).index_copy(0, rows, ids).view(count, longest)
    )
    padded = vectors.new_zeros(count * longest, vectors.size(1)).index_copy(0, rows, vectors)
    features["token_embeddings"] = padded.view(count, longest, vectors.size(1))
    features["attention_mask"] = (
        torch.arange(longest, device=ids.device) < cu_seqlens.diff()[:, None]
    )
    for key in PACKED_KEYS:
        features.pop(key, None)
