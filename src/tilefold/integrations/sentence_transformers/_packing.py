"""Packed inputs for the Transformers of a model whose later modules take them, and why others stay padded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from tilefold.integrations.sentence_transformers._columns import PackedForward
from tilefold.integrations.sentence_transformers._packed_inputs import PackedInputs, padded_inputs
from tilefold.integrations.sentence_transformers._pairs import pipelines_of
from tilefold.integrations.sentence_transformers._repadding import PACKED_KEYS, PackedMask
from tilefold.integrations.sentence_transformers._selfcheck import TEXTS, TOLERANCE
from tilefold.integrations.transformers import stop_packed, use_packed

_EXPECTED = ("is no encoder", "was chosen", "of its own")  # reasons that nobody need be told


def pack_inputs(model: Any, check: bool) -> dict[str, str]:
    """Let the Transformers of ``model`` preprocess texts to packed tokens, where all that follows takes them.

    Returns:
        Why a Transformer stays padded, by the name of its network. Of an encoder whose modules are all of
        sentence-transformers this is told by a warning, too.
    """
    pipelines: dict[int, list[list[Any]]] = {}
    for pipeline in pipelines_of(model):
        if pipeline and isinstance(pipeline[0], Transformer):
            pipelines.setdefault(id(pipeline[0]), []).append(pipeline)
    padded: dict[str, str] = {}
    for routes in pipelines.values():
        why = _pack(routes, check)
        if why is not None:
            name = type(routes[0][0].model).__name__
            padded[name] = why
            if not any(known in why for known in _EXPECTED) and _is_stock(routes):
                warnings.warn(f"{name} runs on padded batches: {why}.", UserWarning, stacklevel=4)
    return padded


def unpack_inputs(model: nn.Module) -> None:
    """Undo :func:`pack_inputs`; does nothing to modules that it did not change."""
    for module in model.modules():
        if isinstance(vars(module).get("preprocess"), PackedInputs):
            _unpack(module)
        if isinstance(vars(module).get("forward"), PackedMask):
            del module.forward


def has_packed_inputs(model: object) -> bool:
    """Whether a Transformer of the model preprocesses texts to packed tokens."""
    return isinstance(model, nn.Module) and any(
        isinstance(vars(module).get("preprocess"), PackedInputs) for module in model.modules()
    )


def _pack(routes: list[list[Any]], check: bool) -> str | None:
    transformer = routes[0][0]
    why = _why_not_by_its_kind(transformer)
    why = use_packed(transformer.model, check=check) if why is None else why
    if why is not None:
        return why
    if transformer.model_forward_params is not None:
        transformer.model_forward_params = {*transformer.model_forward_params, *PACKED_KEYS}
    transformer.preprocess, transformer.forward = PackedInputs(transformer), PackedForward(transformer)
    for module in (module for route in routes for module in route):
        if type(module).__name__ == "MultiVectorMask" and "forward" not in vars(module):
            module.forward = PackedMask(module)
    for route in routes if check else []:
        why = _why_not_by_its_numbers(route)
        if why is not None:
            _unpack(transformer)
            return why
    return None


def _is_stock(routes: list[list[Any]]) -> bool:
    """Whether all modules are sentence-transformers' own: others need not know packed batches."""
    return all(type(module).__module__.startswith("sentence_transformers.") for route in routes for module in route)


def _unpack(transformer: Any) -> None:
    del transformer.preprocess, transformer.forward
    stop_packed(transformer.model)


def _why_not_by_its_kind(transformer: Any) -> str | None:
    kind = type(transformer)
    if kind.preprocess is not Transformer.preprocess or {"preprocess", "forward"} & vars(transformer).keys():
        return f"{kind.__name__} has a preprocess or a forward of its own"
    if transformer.backend != "torch" or set(transformer.modality_config) != {"text"}:
        return f"only text on the backend 'torch' is packed, got {transformer.backend!r} and {transformer.modalities}"
    if transformer.can_flatten_inputs:
        return "a flash-attn implementation was chosen, with which sentence-transformers flattens inputs itself"
    if transformer.unpad_inputs is False:
        return "unpad_inputs=False was chosen"
    return None


def _why_not_by_its_numbers(route: list[Any]) -> str | None:
    """Run two short texts padded and packed through all modules."""
    with _evaluating(route), torch.no_grad():
        try:
            with padded_inputs():
                expected = _run(route, TEXTS)
            got = _run(route, TEXTS)
        except Exception as error:
            return f"two short texts could not be run ({type(error).__name__}: {error})"
    if got.shape != expected.shape:
        return f"packed batches gave {list(got.shape)} numbers, padded ones {list(expected.shape)}"

    def alone() -> Tensor:
        with _evaluating(route), torch.no_grad(), padded_inputs():
            return torch.cat([_run(route, [text]) for text in TEXTS])

    return disagreement(got, expected, alone)


def disagreement(got: Tensor, expected: Tensor, alone: Callable[[], Tensor]) -> str | None:
    """How far packed numbers are from padded ones; None within rounding.

    Rounding is :data:`TOLERANCE` of the largest number or, where a model rounds more (16 bits, many layers, a large
    vocabulary), twice what padding itself changes: ``alone`` gives the numbers of the same texts one by one.
    """
    difference = float((got.float() - expected.float()).abs().max())
    if difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        return None
    single = alone()
    noise = float((single.float() - expected.float()).abs().max()) if single.shape == expected.shape else 0.0
    if difference <= 2 * noise:
        return None
    return f"packed and padded batches disagree by {difference:.3g} on two short texts"


def _run(route: list[Any], texts: list[str]) -> Tensor:
    transformer = route[0]
    device = next(transformer.parameters()).device
    features = transformer.preprocess(texts)
    features = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in features.items()}
    for module in route:
        features = module(features)
    if "sentence_embedding" in features:
        scores: Tensor = features["sentence_embedding"]
        return scores.to_dense()
    kept: Tensor = features["token_embeddings"][features["attention_mask"].bool()]
    return kept


@contextmanager
def _evaluating(route: list[Any]) -> Iterator[None]:
    modes = {module: module.training for root in route for module in root.modules()}
    dimensions = [(module, module.embedding_dimension) for module in route if "embedding_dimension" in vars(module)]
    for module in modes:
        module.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for module, dimension in dimensions:
            module.embedding_dimension = dimension
