"""Forwards of Transformers on packed tokens, and the reasons why some models stay padded."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import (
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
)
from torch import Tensor, nn

from tilefold._internal.typing import Model
from tilefold.integrations._patches import Replacement, replacements
from tilefold.integrations.sentence_transformers._heads import (
    is_dense,
    is_multi_vector,
    pipelines_of,
)
from tilefold.integrations.sentence_transformers._self_check import (
    TOLERANCE,
    short_texts_features,
    temporarily_evaluating,
)
from tilefold.integrations.sentence_transformers.graphs.training import ColumnGraphs, StepGraphs
from tilefold.integrations.sentence_transformers.packing.forward import (
    keep_pooled_tokens,
    original_forward,
)
from tilefold.integrations.sentence_transformers.packing.inputs import (
    EXPANDED,
    PackedInputs,
    pack_features,
    packed_features,
    packed_inputs,
    padded_inputs,
    pads_inputs,
)
from tilefold.integrations.sentence_transformers.packing.norms import fuse_norms, separate_norms
from tilefold.integrations.transformers.networks import largest_difference
from tilefold.integrations.transformers.packed import (
    LONGEST,
    LONGEST_NAMES,
    OFFSET_NAMES,
    OFFSETS,
    TOKEN_NAMES,
    ExpectedReason,
    FailedCheck,
    may_differ_by_rounding,
    padding_position,
    stop_packed,
    use_packed,
)
from tilefold.losses.base_splade import JOINED
from tilefold.modules.echo import POOLING_MASK
from tilefold.modules.fused_pooling import Features, pass_hidden_states
from tilefold.ops.packed_attention import token_positions
from tilefold.ops.row_groups import (
    LEAST_GPU_ROWS,
    LinearLayers,
    filled_row_count,
    padded_row_count,
)
from tilefold.pipeline.rows import to_device

# Frames between a warning of ``pack_inputs`` and the caller of ``accelerate``.
_STACKLEVEL_OF_CALLER = 5
# Names of packed features that padded ones do not have.
PACKED_KEYS = (*OFFSET_NAMES, *LONGEST_NAMES, "position_ids")

# Modules that treat every token by itself, so that they accept packed token vectors.
_TOKENWISE = (Dense, Dropout, LayerNorm, Normalize)

# The modules through which an input passes, of which the first one is a Transformer.
Route = list[Any]


def pack_inputs(model: Model, check: bool) -> dict[str, str]:
    """Let the Transformers of a model run on packed tokens, if all modules after them accept these.

    Args:
        model: a SparseEncoder, MultiVectorEncoder or SentenceTransformer.
        check: whether packed and padded outputs are compared, in two forward passes of each
            network and two of each route: a sequence of modules through which a text passes.

    Returns:
        The reasons why networks stay padded, by the name of the network's class.
    """
    routes_by_transformer: dict[int, list[Route]] = {}
    for route in pipelines_of(model):
        if route and isinstance(route[0], Transformer):
            routes_by_transformer.setdefault(id(route[0]), []).append(route)
    padded: dict[str, str] = {}
    for routes in routes_by_transformer.values():
        reason = _reason_against_routes(model, routes)
        if reason is None:
            reason = _pack_transformer(routes, check)
        if reason is None:
            continue
        transformer = routes[0][0]  # every route begins with it
        name = type(transformer.model).__name__
        padded[name] = reason
        if _belongs_to_sentence_transformers(routes) and not isinstance(reason, ExpectedReason):
            warnings.warn(
                f"{name} runs on padded batches: {reason}.",
                UserWarning,
                stacklevel=_STACKLEVEL_OF_CALLER,
            )
    return padded


def use_column_graphs(model: Model) -> None:
    """Let the packed Transformers of a model run training batches as CUDA graphs.

    Each column of a batch, such as the queries or the documents, has graphs of its own.

    Args:
        model: a model after :func:`pack_inputs`.
    """
    for forward in packed_forwards(model):
        forward.column_graphs = ColumnGraphs(forward.owner)


def require_packed(model: Model) -> None:
    """Let the packed Transformers of a model refuse texts that cannot be packed.

    Args:
        model: a model after :func:`pack_inputs`.
    """
    for forward in packed_forwards(model):
        forward.requires_packed = True


def packed_forwards(model: Model) -> list[PackedForward]:
    """Return the forwards on packed tokens of the Transformers of a model.

    Args:
        model: a model after :func:`pack_inputs`.
    """
    all_replacements = (replacement for _, _, replacement in replacements(model))
    return [forward for forward in all_replacements if isinstance(forward, PackedForward)]


def _belongs_to_sentence_transformers(routes: list[Route]) -> bool:
    """Whether all modules belong to sentence-transformers.

    Modules of other libraries rarely accept packed batches, so users expect them to run padded.
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


def _reason_against_routes(model: Model, routes: list[Route]) -> str | None:
    """Return why the modules after a Transformer cannot take packed tokens, or None if they can.

    Args:
        model: the model.
        routes: all routes (sequences of modules) of the model that begin with this Transformer.
    """
    if is_multi_vector(model) and not all(_has_mask(route) for route in routes):
        return (
            "a MultiVectorEncoder takes packed tokens with a MultiVectorMask only, and it has no "
            "such module"
        )
    if is_dense(model) and not all(_pools_tokens(route) for route in routes):
        return (
            "a SentenceTransformer takes packed tokens with a Pooling that only Dense, Dropout, "
            "LayerNorm and Normalize precede, and it has other modules"
        )
    return None


def _pools_tokens(route: Route) -> bool:
    """Whether a route has a Pooling, and only modules before it that accept packed tokens."""
    for module in route[1:]:
        if type(module) is Pooling:
            return True
        if type(module) not in _TOKENWISE:
            return False
    return False


def _pack_transformer(routes: list[Route], check: bool) -> str | None:
    """Let a Transformer run on packed tokens, if its network and the modules after it support this.

    Args:
        routes: all routes (sequences of modules) of the model that begin with this Transformer.
        check: whether packed and padded outputs are compared.

    Returns:
        The reason why the Transformer stays padded, or None if it now runs on packed tokens.
    """
    transformer = routes[0][0]
    reason = _reason_against_packing(transformer)
    if reason is None:
        reason = use_packed(transformer.model, check=check)
    if reason is not None:
        return reason
    _install_packed_methods(routes)
    if not check:
        return None
    for route in routes:
        reason = _compare_packed_and_padded(route)
        if reason is not None:
            _remove_packed_methods(transformer)
            return reason
    return None


def _install_packed_methods(routes: list[Route]) -> None:
    """Replace the methods that handle packed tokens in a Transformer and the modules after it.

    These are ``preprocess`` and ``forward`` of the Transformer, and ``forward`` of its RMSNorms, of
    masks of token vectors and of poolings of a SentenceTransformer.

    Args:
        routes: all routes (sequences of modules) of the model that begin with this Transformer.
    """
    transformer = routes[0][0]
    if transformer.model_forward_params is not None:
        # The original forward passes only the features with these names to the network.
        transformer.model_forward_params = {*transformer.model_forward_params, *PACKED_KEYS}
    transformer.preprocess = PackedInputs(transformer)
    transformer.forward = PackedForward(transformer)
    fuse_norms(transformer.model)
    for route in routes:
        for module in route:
            if "forward" in vars(module):  # replaced already, for example on another route
                continue
            if _is_mask(module):
                module.forward = PackedMask(module)
            elif type(module) is Pooling:
                module.forward = PackedPooling(module)


def _remove_packed_methods(transformer: Transformer) -> None:
    """Let a Transformer run on padded tokens again.

    The replaced masks and poolings stay, and the names of packed features: they have no effect on
    padded tokens.
    """
    del transformer.preprocess
    del transformer.forward
    separate_norms(transformer.model)
    stop_packed(transformer.model)


def _reason_against_packing(transformer: Transformer) -> str | None:
    """Return why a Transformer cannot run on packed tokens, or None if it can.

    Only its class and settings are examined. Nothing runs.

    Args:
        transformer: the Transformer module.
    """
    transformer_class = type(transformer)
    is_replaced = "preprocess" in vars(transformer) or "forward" in vars(transformer)
    overrides_methods = (
        transformer_class.preprocess is not Transformer.preprocess
        or transformer_class.forward is not Transformer.forward
    )
    # Classes of tilefold that override methods say by ``forward_packed`` that they can run packed.
    is_overridden = overrides_methods and not hasattr(transformer_class, "forward_packed")
    if is_overridden or is_replaced:
        return ExpectedReason(
            f"{transformer_class.__name__} has a preprocess or a forward of its own",
        )
    if transformer.backend != "torch" or set(transformer.modality_config) != {"text"}:
        return (
            f"only text on the backend 'torch' is packed, got {transformer.backend!r} and "
            f"{transformer.modalities}"
        )
    if transformer.can_flatten_inputs:
        return ExpectedReason(
            "a flash-attn implementation was chosen, with which sentence-transformers flattens "
            "inputs itself",
        )
    if transformer.unpad_inputs is False:
        return ExpectedReason("unpad_inputs=False was chosen")
    return None


def _compare_packed_and_padded(route: Route) -> FailedCheck | None:
    """Compare the outputs of two short texts as a packed and as a padded batch.

    Args:
        route: a Transformer and all modules after it, whose methods for packed tokens are
            installed.

    Returns:
        How the outputs differ, or why the texts could not be run; None if the outputs agree.
    """
    try:
        packed, padded = _run_both_ways(route)
        if packed.shape != padded.shape:
            return FailedCheck(
                f"packed batches gave shape {list(packed.shape)}, padded ones {list(padded.shape)}",
            )
        if _agree(packed, padded) or _differ_by_rounding(route, packed, padded):
            return None
        difference = largest_difference(packed, padded)
    except Exception as error:
        return FailedCheck(f"two short texts could not be run ({type(error).__name__}: {error})")
    return FailedCheck(
        f"packed and padded batches disagree by {difference:.3g} on two short texts",
    )


def _differ_by_rounding(route: Route, packed: Tensor, padded: Tensor) -> bool:
    """Whether rounding is the only reason why packed and padded outputs differ, for 16-bit models.

    Rounding grows with the number of layers and the vocabulary, so no fixed tolerance can tell it
    from a bug. If the difference is small enough to be rounding, a copy in fp32 decides.

    Args:
        route: a Transformer and all modules after it.
        packed: the output of a packed batch.
        padded: the output of the same batch with padding.
    """
    if not may_differ_by_rounding(route[0], packed, padded):
        return False
    fp32_route = [module.float() for module in copy.deepcopy(route)]
    fp32_packed, fp32_padded = _run_both_ways(fp32_route)
    return _agree(fp32_packed, fp32_padded)


def _agree(packed: Tensor, padded: Tensor) -> bool:
    """Whether the outputs of a packed and of a padded batch are equal up to the tolerance."""
    allowed = TOLERANCE * max(1.0, float(padded.abs().max()))
    return largest_difference(packed, padded) <= allowed


def _run_both_ways(route: Route) -> tuple[Tensor, Tensor]:
    """Return the outputs of a packed and of a padded batch of short texts, in fp32."""
    with temporarily_evaluating(route):
        with padded_inputs():
            padded = _run_route(route)
        with packed_inputs():
            packed = _run_route(route)
    return packed.float(), padded.float()


def _run_route(route: Route) -> Tensor:
    """Return the output of a route for two short texts.

    Args:
        route: a Transformer and all modules after it.

    Returns:
        The scores ``[2, V]`` as a dense tensor, or the token vectors ``[T, D]`` if the route has no
        pooling.
    """
    features = short_texts_features(route[0])
    for module in route:
        features = module(features)
    if "sentence_embedding" in features:
        scores: Tensor = features["sentence_embedding"]
        return scores.to_dense()
    token_vectors: Tensor = features["token_embeddings"][features["attention_mask"].bool()]
    return token_vectors


class PackedForward(Replacement):
    """Replaces the forward of one Transformer, which then runs on packed tokens.

    If ``collate_ahead`` has concatenated the columns of a training batch (queries and documents),
    all of them go through the Transformer in one forward.

    Attributes:
        graphs: CUDA graphs that run concatenated columns in training; ``None`` for no graphs.
        column_graphs: CUDA graphs that run single columns in training; ``None`` for no graphs.
        requires_packed: whether texts that cannot be packed are refused. The attention of padded
            texts depends on the batch.
    """

    graphs: StepGraphs | None = None
    column_graphs: ColumnGraphs | None = None
    requires_packed = False
    # The network that was examined last, and its padding position.
    _examined: tuple[Any, int | None] = (None, None)
    # The network that was examined last, and its linear layers of each shape.
    _examined_layers: tuple[Any, list[list[nn.Linear]]] = (None, [])

    def __call__(self, features: Features, **kwargs: object) -> Features:
        """Return the features with the output of the Transformer.

        The output is packed, except within :func:`padded_inputs`. If the features are a column of a
        training batch that ``collate_ahead`` has made, all columns of the batch run in one forward.

        Args:
            features: the input of the Transformer, packed or padded.
            **kwargs: other arguments of its forward.
        """
        transformer = self.owner
        output_name = transformer.module_output_name
        if POOLING_MASK in features:
            # keep_pooled_tokens removes tokens, and a loss may run the same features again.
            features = dict(features)
        link = features.pop(JOINED, None)  # to the concatenated columns of the training batch
        returns_layers = getattr(transformer.model.config, "output_hidden_states", False)
        if link is None or kwargs or returns_layers:
            return self._run(features, kwargs)
        columns = link.columns
        # A loss that splits a column into mini-batches makes other tensors. They run one by one.
        is_whole_column = features["input_ids"] is columns.input_ids[link.position]
        if not is_whole_column:
            return self._run(features, kwargs)
        features[output_name] = columns.run_column(link.position, transformer, self.graphs)
        keep_pooled_tokens(features, output_name)
        return features

    def _run(self, features: Features, kwargs: Features) -> Features:
        """Remove padding if possible, and run the original forward.

        Args:
            features: the input of the Transformer, packed or padded; it is changed in place.
            kwargs: other arguments of its forward.
        """
        transformer = self.owner
        is_packed = OFFSETS in features
        if not is_packed and not pads_inputs() and not _is_traced_or_captured():
            packed = pack_features(features, self._padding_position())
            if packed is not features:
                features.clear()
                features.update(packed)
        if OFFSETS in features:
            _move_offsets(features)
            if features["input_ids"].size(1) == 0:
                return self._run_without_tokens(features, kwargs)
            _check_all_offsets(features)
            if self.requires_packed and _takes_filler_text(features):
                outputs = self._run_with_filler(features, kwargs)
            else:
                outputs = self._run_packed(features, kwargs)
            keep_pooled_tokens(outputs, transformer.module_output_name)
            return outputs
        # Expanded ColBERT queries may stay padded, since all batches pad them to one length.
        if self.requires_packed and EXPANDED not in features and not pads_inputs():
            raise ValueError(
                "with invariant=True, features must be texts whose tokens are contiguous, got "
                f"{', '.join(sorted(features))} that cannot be packed; pass texts, or call "
                "accelerate(model) without invariant=True.",
            )
        return original_forward(transformer, features, **kwargs)

    def _run_packed(self, features: Features, kwargs: Features) -> Features:
        """Run the original forward on packed features, as a CUDA graph if possible.

        Args:
            features: the packed features, to which the output is added.
            kwargs: other arguments of the forward.
        """
        if self.column_graphs is None or _is_traced_or_captured():
            return original_forward(self.owner, features, **kwargs)
        # The encoder does not read this mask, and graphs have no input for it.
        pooling_mask = features.pop(POOLING_MASK, None)
        outputs = self.column_graphs(features, **kwargs)
        if pooling_mask is not None:
            outputs[POOLING_MASK] = pooling_mask
        return outputs

    def _padding_position(self) -> int | None:
        """Return the position id of padding tokens, or None if the network has none; computed once.

        Models like RoBERTa have one.
        """
        network = self.owner.model
        examined_network, position = self._examined
        if examined_network is not network:
            position = padding_position(network)
            # One assignment, so that other threads never see a network without its position.
            self._examined = (network, position)
        return position

    def padded_token_count(self, n_tokens: int) -> int:
        """Return to how many tokens a small batch of a batch-invariant model is padded on a GPU.

        For equal bits in every batch, linear layers multiply at least some number of rows, which
        depends on their shape. Padding the batch once saves the padding of rows in most layers.

        Args:
            n_tokens: the number of tokens of the batch.
        """
        if n_tokens >= LEAST_GPU_ROWS:
            return n_tokens
        layers = [
            LinearLayers(
                weight=layers_of_shape[0].weight,
                has_bias=layers_of_shape[0].bias is not None,
                n_layers=len(layers_of_shape),
            )
            for layers_of_shape in self._layers_by_shape()
        ]
        return padded_row_count(layers, n_tokens)

    def _layers_by_shape(self) -> list[list[nn.Linear]]:
        """Return the linear layers of the network in one list per shape; computed once."""
        network = self.owner.model
        examined_network, layers = self._examined_layers
        if examined_network is not network:
            layers = _layers_by_shape(network)
            # One assignment, so that other threads never see a network without its layers.
            self._examined_layers = (network, layers)
        return layers

    def _run_with_filler(self, features: Features, kwargs: Features) -> Features:
        """Run the forward of a batch-invariant model with one more text of padding (a filler text).

        For equal bits in every batch, linear layers multiply certain numbers of rows only. With
        such a number of tokens, most layers need not pad their rows.

        Args:
            features: packed features, to which the output is added.
            kwargs: other arguments of the forward.
        """
        n_tokens = features["input_ids"].size(1)
        if n_tokens < LEAST_GPU_ROWS:
            n_padded = self.padded_token_count(n_tokens)
        else:
            n_padded = filled_row_count(n_tokens)
        if n_padded == n_tokens:
            return self._run_packed(features, kwargs)
        filled = with_filler_text(features, n_padded)
        outputs = self._run_packed(filled, kwargs)
        name = self.owner.module_output_name
        outputs = {**outputs, **features, name: outputs[name][:, :n_tokens]}
        layers = outputs.get("all_layer_embeddings")
        if layers is not None:
            outputs["all_layer_embeddings"] = tuple(layer[:, :n_tokens] for layer in layers)
        return outputs

    def _run_without_tokens(self, features: Features, kwargs: Features) -> Features:
        """Run the original forward for texts without any token.

        Networks fail on empty input, so one dummy token runs and is removed from the output. This
        keeps the dtype, the shape and the autograd graph of the output.

        Args:
            features: packed features without tokens, to which the output is added.
            kwargs: other arguments of the forward.
        """
        transformer = self.owner
        ids = features["input_ids"]
        dummy = packed_features(
            ids=ids.new_zeros(1),
            lengths=features[OFFSETS].new_ones(1).long(),
            padding_position_id=self._padding_position(),
            max_seqlen=1,
        )
        outputs = original_forward(transformer, {**features, **dummy}, **kwargs)
        name = transformer.module_output_name
        features[name] = outputs[name][:, :0]
        layers = outputs.get("all_layer_embeddings")
        if layers is not None:
            features["all_layer_embeddings"] = tuple(layer[:, :0] for layer in layers)
        return features


def _move_offsets(features: Features) -> None:
    """Move the offsets of packed features to the device of the tokens, in place.

    They are on the CPU if a loss has reordered the texts of a batch.
    """
    offsets: Tensor = features[OFFSETS]
    device = features["input_ids"].device
    if offsets.device != device:
        features.update(dict.fromkeys(OFFSET_NAMES, to_device(offsets.numpy(), device)))


def _layers_by_shape(network: nn.Module) -> list[list[nn.Linear]]:
    """Return the linear layers for each shape of weights, and with or without a bias.

    Args:
        network: the network of a Transformer. A fused LM head, which multiplies nothing, is left
            out.
    """
    layers: dict[tuple[torch.Size, bool], list[nn.Linear]] = {}
    for module in network.modules():
        if isinstance(module, nn.Linear) and vars(module).get("forward") is not pass_hidden_states:
            shape = (module.weight.shape, module.bias is not None)
            layers.setdefault(shape, []).append(module)
    return list(layers.values())


def _takes_filler_text(features: Features) -> bool:
    """Whether a filler text (of padding) can be added to packed features, and saves time.

    It does on a GPU, where linear layers of a batch-invariant model pad their rows.

    Args:
        features: the packed features.
    """
    is_on_gpu = features["input_ids"].device.type == "cuda"
    return is_on_gpu and POOLING_MASK not in features and not torch.is_grad_enabled()


def with_filler_text(features: Features, n_tokens: int) -> Features:
    """Return packed features with one more text, whose tokens are padding.

    Args:
        features: packed features of fewer tokens.
        n_tokens: the number of tokens of the result.
    """
    n_filler = n_tokens - features["input_ids"].size(1)
    offsets: Tensor = features[OFFSETS]
    filled_offsets = torch.cat([offsets, offsets.new_full([1], n_tokens)])
    filled = {**features, **dict.fromkeys(OFFSET_NAMES, filled_offsets)}
    for name in features.keys() & set(TOKEN_NAMES):
        tokens: Tensor = features[name]  # [1, T]
        filled[name] = torch.cat([tokens, tokens.new_zeros(1, n_filler)], dim=1)
    for name in features.keys() & set(LONGEST_NAMES):
        filled[name] = max(int(features[name]), n_filler)
    return filled


def _is_traced_or_captured() -> bool:
    """Whether ``torch.compile`` traces the current forward, or a CUDA graph captures it.

    Padding cannot be removed then, because the CPU cannot read the number of tokens.
    """
    if torch.compiler.is_compiling():
        return True
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return has_cuda and torch.cuda.is_current_stream_capturing()


def _check_all_offsets(features: Features) -> None:
    """Raise ``ValueError`` if packed features were sliced along their first dimension.

    Libraries that divide a batch slice the offsets ``[B + 1]``, but not the tokens ``[1, T]``. Then
    there are more tokens than the remaining sequences can hold. Only sizes are compared, so that
    the CPU does not wait for the GPU.

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
            "packed features must hold the offsets of all sequences, but the batch was sliced "
            f"along its first dimension, got {n_tokens} tokens, which do not fit into "
            f"{n_sequences} sequences of at most {longest} tokens; leave batches whole "
            "(dispatch_batches=False), or preprocess texts outside of packed_inputs().",
        )


class PackedMask(Replacement):
    """Replaces the forward of one ``MultiVectorMask``, so that it accepts packed token vectors.

    The original forward would split packed token vectors one text at a time.
    """

    def __call__(self, features: Features, task: str | None = None) -> Features:
        """Pad packed features, and run the original forward.

        Args:
            features: the output of the modules before, packed or padded.
            task: ``"query"`` or ``"document"``.
        """
        if OFFSETS in features:
            repad(features)
        module = self.owner
        # The ids of tokens that are not scored, such as punctuation.
        skipped_ids = getattr(module, "_skiplist_ids", None)
        ids = features.get("input_ids")
        if skipped_ids is not None and ids is not None and skipped_ids.device != ids.device:
            # Moved once, because a CUDA graph cannot capture a copy from the CPU at every call.
            module._skiplist_ids = skipped_ids.to(ids.device)
        outputs: Features = type(module).forward(module, features, task=task)
        return outputs


class PackedPooling(Replacement):
    """Replaces the forward of one ``Pooling``, so that texts without tokens get a vector of zeros.

    With packed tokens, the original forward would return the first or last token of a neighbouring
    text for them.
    """

    def __call__(self, features: Features, **kwargs: object) -> Features:
        """Pad packed features, and run the original forward.

        Args:
            features: the output of the modules before, packed or padded.
            **kwargs: other arguments of the forward.
        """
        if OFFSETS in features:
            repad(features, min_length=1)  # the original forward needs a token
        module = self.owner
        outputs: Features = type(module).forward(module, features, **kwargs)
        return outputs


def repad(features: Features, min_length: int = 0) -> None:
    """Replace packed token vectors and ids by padded ones with a mask, in place.

    Args:
        features: packed ``token_embeddings`` ``[1, T, D]`` and ``input_ids`` ``[1, T]`` with their
            offsets. They become ``[B, S, D]`` and ``[B, S]`` with a bool ``attention_mask``
            ``[B, S]``.
        min_length: the least number S of padded tokens, for texts that are all shorter.
    """
    cu_seqlens: Tensor = features[OFFSETS]
    n_texts = cu_seqlens.numel() - 1
    longest = max(int(features[LONGEST]), min_length)
    ids = features["input_ids"][0]
    vectors = features["token_embeddings"][0]
    # Each token goes to row ``sequence * longest + position`` of the flattened padded tensors.
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
