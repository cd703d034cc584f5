"""Forwards of Transformers on packed tokens: which models take them, and why others stay padded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import is_multi_vector, pipelines_of
from tilefold.integrations.sentence_transformers._self_check import (
    TOLERANCE,
    as_evaluated,
    tiny_batch,
)
from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
from tilefold.integrations.sentence_transformers.packing.inputs import (
    PackedInputs,
    pack_features,
    packed_features,
    packed_inputs,
    padded_inputs,
    pads_inputs,
)
from tilefold.integrations.transformers.networks import largest_difference
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    padding_position,
    stop_packed,
    use_packed,
)
from tilefold.losses.base_splade import JOINED
from tilefold.modules.fused_pooling import Features
from tilefold.ops.packed_attention import token_positions
from tilefold.pipeline.rows import to_device

# Names of packed features that padded ones do not have.
PACKED_KEYS = (*OFFSET_NAMES, *LONGEST_NAMES, "position_ids")
# Largest difference of packed and padded outputs in 16 bits that may come from rounding, relative
# to their norm. In bf16, 12 layers of random weights differ by 0.05 to 0.11, and a token of another
# text by 0.5.
MAX_ROUNDING_DIFFERENCE = 0.25
# Parts of reasons to stay padded that no user needs a warning for.
_EXPECTED_REASONS = ("is no encoder", "was chosen", "of its own")

# The modules that an input passes, of which the first one is a Transformer.
Route = list[Any]


def pack_inputs(model: Model, check: bool) -> dict[str, str]:
    """Let Transformers of a model run on packed tokens, where all modules after them accept these.

    Args:
        model: a SparseEncoder or MultiVectorEncoder.
        check: whether packed and padded outputs are compared, in two forward passes of each
            network and two of each route.

    Returns:
        Reasons why networks stay padded, by the names of their classes.
    """
    routes_by_transformer: dict[int, list[Route]] = {}
    for route in pipelines_of(model):
        if route and isinstance(route[0], Transformer):
            routes_by_transformer.setdefault(id(route[0]), []).append(route)
    padded: dict[str, str] = {}
    for routes in routes_by_transformer.values():
        if is_multi_vector(model) and not all(_has_mask(route) for route in routes):
            reason: str | None = (
                "a MultiVectorEncoder takes packed tokens with a MultiVectorMask only, and no "
                "module is one"
            )
        else:
            reason = _pack_transformer(routes, check)
        if reason is None:
            continue
        transformer = routes[0][0]  # every route begins with it
        name = type(transformer.model).__name__
        padded[name] = reason
        is_expected = any(expected in reason for expected in _EXPECTED_REASONS)
        if _is_stock(routes) and not is_expected:
            warnings.warn(f"{name} runs on padded batches: {reason}.", UserWarning, stacklevel=4)
    return padded


def _is_stock(routes: list[Route]) -> bool:
    """Whether all modules are sentence-transformers' own.

    Modules of other libraries need not know packed batches, so that padded ones are no surprise.
    """
    return all(
        type(module).__module__.startswith("sentence_transformers.")
        for route in routes
        for module in route
    )


def _is_mask(module: object) -> bool:
    return type(module).__name__ == "MultiVectorMask"


def _has_mask(route: Route) -> bool:
    return any(_is_mask(module) for module in route)


def _pack_transformer(routes: list[Route], check: bool) -> str | None:
    """Let a Transformer run on packed tokens, if its network and the modules after it support them.

    Its ``preprocess`` and forward are replaced, and the forwards of masks of token vectors after
    it.

    Args:
        routes: all routes of the model that begin with this Transformer.
        check: whether packed and padded outputs are compared.

    Returns:
        Why the Transformer stays padded; nothing is changed then. ``None`` if it takes packed
        tokens.
    """
    transformer = routes[0][0]
    reason = _unsupported_reason(transformer)
    if reason is None:
        reason = use_packed(transformer.model, check=check)
    if reason is not None:
        return reason
    if transformer.model_forward_params is not None:
        # Names of the features that the stock forward passes to the network.
        transformer.model_forward_params = {*transformer.model_forward_params, *PACKED_KEYS}
    transformer.preprocess = PackedInputs(transformer)
    transformer.forward = PackedForward(transformer)
    for route in routes:
        for module in route:
            if _is_mask(module) and "forward" not in vars(module):
                module.forward = PackedMask(module)
    if not check:
        return None
    for route in routes:
        reason = _mismatch_reason(route)
        if reason is not None:
            del transformer.preprocess
            del transformer.forward
            stop_packed(transformer.model)
            return reason
    return None


def _unsupported_reason(transformer: Transformer) -> str | None:
    """Return the reason why a Transformer cannot take packed tokens, or ``None`` without one.

    Only its class and settings are examined. Nothing runs.

    Args:
        transformer: the Transformer module.
    """
    kind = type(transformer)
    is_replaced = "preprocess" in vars(transformer) or "forward" in vars(transformer)
    if kind.preprocess is not Transformer.preprocess or is_replaced:
        return f"{kind.__name__} has a preprocess or a forward of its own"
    if transformer.backend != "torch" or set(transformer.modality_config) != {"text"}:
        return (
            f"only text on the backend 'torch' is packed, got {transformer.backend!r} and "
            f"{transformer.modalities}"
        )
    if transformer.can_flatten_inputs:
        return (
            "a flash-attn implementation was chosen, with which sentence-transformers flattens "
            "inputs itself"
        )
    if transformer.unpad_inputs is False:
        return "unpad_inputs=False was chosen"
    return None


def _mismatch_reason(route: Route) -> str | None:
    """Compare packed and padded outputs of two short texts, in two forward passes of a route.

    Rounding in 16 bits grows with layers and vocabulary, so that no tolerance separates it from a
    fault. If outputs in 16 bits differ by what may be rounding, a copy in fp32 decides, in two more
    passes.

    Args:
        route: a Transformer and all modules after it, whose forwards are replaced already.

    Returns:
        How the outputs disagree, or why the texts could not be run; ``None`` if they agree.
    """
    try:
        packed, padded = _run_both_ways(route)
        if packed.shape != padded.shape:
            return (
                f"packed batches gave {list(packed.shape)} numbers, padded ones "
                f"{list(padded.shape)}"
            )
        if _agree(packed, padded):
            return None
        # In 16 bits, rounding alone may exceed the tolerance. A copy in fp32 then decides.
        difference = largest_difference(packed, padded)
        relative_difference = float((packed - padded).norm() / padded.norm().clamp(min=1e-6))
        is_16_bit = next(route[0].parameters()).dtype.itemsize == 2
        if is_16_bit and relative_difference <= MAX_ROUNDING_DIFFERENCE:
            fp32_route = [module.float() for module in copy.deepcopy(route)]
            fp32_packed, fp32_padded = _run_both_ways(fp32_route)
            if _agree(fp32_packed, fp32_padded):
                return None
    except Exception as error:
        return f"two short texts could not be run ({type(error).__name__}: {error})"
    return f"packed and padded batches disagree by {difference:.3g} on two short texts"


def _agree(packed: Tensor, padded: Tensor) -> bool:
    allowed = TOLERANCE * max(1.0, float(padded.abs().max()))
    return largest_difference(packed, padded) <= allowed


def _run_both_ways(route: Route) -> tuple[Tensor, Tensor]:
    """Return the outputs of packed and of padded batches, in fp32."""
    with as_evaluated(route):
        with padded_inputs():
            padded = _run_route(route)
        with packed_inputs():
            packed = _run_route(route)
    return packed.float(), padded.float()


def _run_route(route: Route) -> Tensor:
    """Return embeddings of two short texts: dense ``[2, V]``, or token vectors ``[T, D]``.

    Args:
        route: a Transformer and all modules after it.
    """
    features = tiny_batch(route[0])
    for module in route:
        features = module(features)
    if "sentence_embedding" in features:
        scores: Tensor = features["sentence_embedding"]
        return scores.to_dense()
    token_vectors: Tensor = features["token_embeddings"][features["attention_mask"].bool()]
    return token_vectors


class PackedForward(Replacement):
    """Replaces the forward of one Transformer, which then runs on packed tokens.

    Columns of a training batch that ``collate_ahead`` joined go through the Transformer in one
    forward.

    Attributes:
        graphs: runs joined columns in training, where it can; ``None`` runs them eagerly.
    """

    graphs: StepGraphs | None = None

    def __call__(self, features: Features, **kwargs: object) -> Features:
        """Return the features with the output of the Transformer.

        The output is packed, except within :func:`padded_inputs`.

        Args:
            features: input of the Transformer, packed or padded.
            **kwargs: other arguments of its forward.
        """
        transformer = self.owner
        # The joined columns of the batch, and the position of this column among them.
        columns, position = features.pop(JOINED, (None, 0))
        # A part of a column, such as a mini-batch of a loss, is another tensor, and runs by itself.
        is_joined = columns is not None and features["input_ids"] is columns.input_ids[position]
        returns_layers = getattr(transformer.model.config, "output_hidden_states", False)
        if not is_joined or kwargs or returns_layers:
            return self._run(features, kwargs)
        features[transformer.module_output_name] = columns.embeddings(
            position,
            transformer,
            self.graphs,
        )
        return features

    def _run(self, features: Features, kwargs: Features) -> Features:
        """Remove padding and run the stock forward.

        Args:
            features: input of the Transformer, packed or padded; it is changed in place.
            kwargs: other arguments of its forward.
        """
        transformer = self.owner
        if OFFSETS not in features and not pads_inputs() and not _is_recorded():
            packed = pack_features(features, padding_position(transformer.model))
            if packed is not features:
                features.clear()
                features.update(packed)
        if OFFSETS in features:
            offsets: Tensor = features[OFFSETS]
            device = features["input_ids"].device
            if offsets.device != device:  # offsets of joined rows are on the CPU
                features.update(dict.fromkeys(OFFSET_NAMES, to_device(offsets.numpy(), device)))
            if features["input_ids"].size(1) == 0:
                return self._run_without_tokens(features, kwargs)
            _check_all_offsets(features)
        outputs: Features = type(transformer).forward(transformer, features, **kwargs)
        return outputs

    def _run_without_tokens(self, features: Features, kwargs: Features) -> Features:
        """Run the stock forward for texts without any token, which encoders cannot reshape.

        One token runs instead, and is cut off its output. So the result has the dtype of the
        network's output and its shape for 0 tokens, and gradients are zero.

        Args:
            features: packed features without tokens, which get the output.
            kwargs: other arguments of the forward.
        """
        transformer = self.owner
        ids = features["input_ids"]
        one_token = packed_features(
            ids=ids.new_zeros(1),
            lengths=features[OFFSETS].new_ones(1).long(),
            padding=padding_position(transformer.model),
            longest=1,
        )
        outputs = type(transformer).forward(transformer, {**features, **one_token}, **kwargs)
        name = transformer.module_output_name
        features[name] = outputs[name][:, :0]
        layers = outputs.get("all_layer_embeddings")
        if layers is not None:
            features["all_layer_embeddings"] = tuple(layer[:, :0] for layer in layers)
        return features


def _is_recorded() -> bool:
    """Whether the current forward is traced by ``torch.compile``, or captured in a CUDA graph.

    The number of tokens, which packing needs on the CPU, is not known then.
    """
    if torch.compiler.is_compiling():
        return True
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return has_cuda and torch.cuda.is_current_stream_capturing()


def _check_all_offsets(features: Features) -> None:
    """Raise ``ValueError`` if packed features were sliced along their first dimension.

    Libraries that divide a batch would slice ``[B + 1]`` offsets, but not ``[1, T]`` tokens. The
    tokens are then too many for the sequences. Only sizes are compared, so that the CPU does not
    wait for the GPU.

    Args:
        features: packed features.
    """
    longest = features.get(LONGEST)
    if longest is None:
        return
    n_tokens = features["input_ids"].size(1)
    n_sequences = features[OFFSETS].numel() - 1
    if n_tokens > n_sequences * longest:
        raise ValueError(
            "packed features must hold all offsets of their sequences, got "
            f"{n_sequences} sequences of up to {longest} tokens for {n_tokens} tokens: the batch "
            "was cut by its first dim. Leave batches whole (dispatch_batches=False), or preprocess "
            "texts outside of packed_inputs().",
        )


class PackedMask(Replacement):
    """Replaces the forward of one ``MultiVectorMask``, which takes padded token vectors only.

    The stock forward would cut packed token vectors one text at a time.
    """

    def __call__(self, features: Features, task: str | None = None) -> Features:
        """Pad packed features, and run the stock forward, which masks tokens that are not scored.

        Args:
            features: output of the modules before, packed or padded.
            task: ``"query"`` or ``"document"``.
        """
        if OFFSETS in features:
            repad(features)
        module = self.owner
        skipped_ids = getattr(module, "_skiplist_ids", None)  # of tokens such as punctuation
        ids = features.get("input_ids")
        if skipped_ids is not None and ids is not None and skipped_ids.device != ids.device:
            # The capture of a CUDA graph cannot copy them from the CPU.
            module._skiplist_ids = skipped_ids.to(ids.device)
        outputs: Features = type(module).forward(module, features, task=task)
        return outputs


def repad(features: Features) -> None:
    """Replace packed token vectors and ids by padded ones with a mask, in place.

    Args:
        features: packed ``token_embeddings`` ``[1, T, D]`` and ``input_ids`` ``[1, T]`` with their
            offsets. Afterwards they are ``[B, S, D]`` and ``[B, S]``, with a bool
            ``attention_mask`` ``[B, S]``.
    """
    cu_seqlens: Tensor = features[OFFSETS]
    n_texts = cu_seqlens.numel() - 1
    longest = int(features[LONGEST])
    ids = features["input_ids"][0]
    vectors = features["token_embeddings"][0]
    # Each token goes to row ``sequence * S + position`` of the flattened padded tensors.
    sequences, positions = token_positions(cu_seqlens, ids.numel())
    rows = sequences * longest + positions
    padded_ids = ids.new_zeros(n_texts * longest).index_copy(0, rows, ids)
    dim = vectors.size(1)
    padded_vectors = vectors.new_zeros(n_texts * longest, dim).index_copy(0, rows, vectors)
    features["input_ids"] = padded_ids.view(n_texts, longest)
    features["token_embeddings"] = padded_vectors.view(n_texts, longest, dim)
    lengths = cu_seqlens.diff()
    features["attention_mask"] = torch.arange(longest, device=ids.device) < lengths[:, None]
    for key in PACKED_KEYS:
        features.pop(key, None)
