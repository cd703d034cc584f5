"""One forward of an encoder for all columns of a training batch, whose packed tokens are simply joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers._packed_inputs import pack_features, packed_features, pads_inputs
from tilefold.integrations.sentence_transformers._step_graphs import StepGraphs
from tilefold.integrations.transformers.packed import padding_position
from tilefold.modules.fused_pooling import Features

JOINED = "joined_columns"  # key of a column's place among those it was joined with
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_OF_TOKENS = ("input_ids", "position_ids", "token_type_ids")


class Columns:
    """The packed columns of one batch.

    Args:
        features: of all their tokens, one column after the other.
        parts: the ``input_ids`` of each column.
    """

    def __init__(self, features: Features, parts: list[Tensor]) -> None:
        self.features, self.parts = features, parts
        self._waiting: dict[tuple[Any, ...], Tensor] = {}

    def embeddings(self, index: int, transformer: Any, graphs: StepGraphs | None = None) -> Tensor:
        """The embeddings of a column, from the forward of the column before it or from one of all columns."""
        device = self.parts[0].device.type
        autocasts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        mode = (id(transformer), transformer.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        found = self._waiting.pop((index, *mode, autocasts), None)
        if found is None:
            output = None if graphs is None else graphs(self.features)
            if output is None:
                output = type(transformer).forward(transformer, dict(self.features))[transformer.module_output_name]
            parts = output.split([part.size(1) for part in self.parts], dim=1)
            self._waiting = {(i, *mode, autocasts): part for i, part in enumerate(parts) if i != index}
            found = parts[index]
        return found


class PackedForward:
    """Replaces the forward of one Transformer: it sees no padding, and columns that were joined go through it together.

    Args:
        transformer: the module, whose own forward runs on their tokens.

    Attributes:
        graphs: runs joined columns in training, if it can.
    """

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer
        self.graphs: StepGraphs | None = None

    def __call__(self, features: Features, **kwargs: Any) -> Features:
        """The features with the output of the module, packed unless :func:`padded_inputs` is in force."""
        transformer = self.transformer
        columns, index = features.pop(JOINED, (None, 0))
        # a part of a column is another tensor, and has a backward of its own
        if columns is None or kwargs or features["input_ids"] is not columns.parts[index] or self._shows_layers():
            return self._alone(features, kwargs)
        features[transformer.module_output_name] = columns.embeddings(index, transformer, self.graphs)
        return features

    def _alone(self, features: Features, kwargs: Features) -> Features:
        transformer = self.transformer
        if _OFFSETS[0] not in features and not pads_inputs() and not _is_recorded():
            packed = pack_features(features, padding_position(transformer.model))
            if packed is not features:
                features.clear()
                features.update(packed)
        found: Features
        if _OFFSETS[0] not in features or features["input_ids"].size(1):
            _check_whole(features)
            found = type(transformer).forward(transformer, features, **kwargs)
            return found
        # no token at all, which encoders cannot reshape: one that nobody reads gives shape, dtype and gradients of 0
        ids, offsets = features["input_ids"], features[_OFFSETS[0]]
        one = packed_features(ids.new_zeros(1), offsets.new_ones(1).long(), padding_position(transformer.model), 1)
        name = transformer.module_output_name
        found = type(transformer).forward(transformer, {**features, **one}, **kwargs)
        features[name] = found[name][:, :0]
        if (layers := found.get("all_layer_embeddings")) is not None:
            features["all_layer_embeddings"] = tuple(layer[:, :0] for layer in layers)
        return features

    def _shows_layers(self) -> bool:
        return bool(getattr(self.transformer.model.config, "output_hidden_states", False))


def _is_recorded() -> bool:
    """Whether what runs is traced, or captured in a CUDA graph: then nobody knows yet how many tokens there are."""
    if torch.compiler.is_compiling():
        return True
    known = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return known and torch.cuda.is_current_stream_capturing()


def _check_whole(features: Features) -> None:
    """Raise if packed features were cut by their first dimension; by sizes that the host knows, without waiting."""
    if _OFFSETS[0] not in features:
        return
    tokens, sequences = features["input_ids"].size(1), features[_OFFSETS[0]].numel() - 1
    longest = features.get(_LONGEST[0])
    if longest is not None and tokens > sequences * longest:
        raise ValueError(
            f"packed features must hold all offsets of their sequences, got {sequences} sequences of up to {longest} "
            f"tokens for {tokens} tokens: somebody cut a batch by the first dimension of its tensors. Pass what "
            "preprocess returns outside of packed_inputs(), whose rows can be cut, or leave batches whole "
            "(accelerator_config={'dispatch_batches': False})."
        )


class Batch(NamedTuple):
    """A batch of a collator, with packed columns joined.

    Attributes:
        features: all columns; those in ``spans`` have no tensors of tokens in ``joined``'s place.
        joined: features of all their tokens, None if there is nothing to join.
        spans: prefix, first token and end of each column.
    """

    features: Features
    joined: Features | None = None
    spans: tuple[tuple[str, int, int], ...] = ()

    def moved(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with each tensor elsewhere; what occurs twice is moved once."""
        known: dict[int, Tensor] = {}

        def once(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in known:
                known[id(value)] = move(value)
            return known[id(value)]

        joined = None if self.joined is None else {key: once(value) for key, value in self.joined.items()}
        return Batch({key: once(value) for key, value in self.features.items()}, joined, self.spans)

    def columns(self) -> dict[str, Any]:
        """The features as losses take them: the tokens of each column are views of all tokens."""
        if self.joined is None:
            return self.features
        found = dict(self.features)
        for prefix, start, end in self.spans:
            for name in _OF_TOKENS:
                if name in self.joined:
                    found[prefix + name] = self.joined[name][:, start:end]
        together = Columns(self.joined, [found[prefix + "input_ids"] for prefix, _, _ in self.spans])
        for index, (prefix, _, _) in enumerate(self.spans):
            found[prefix + JOINED] = (together, index)
        return found


def join_columns(batch: dict[str, Any]) -> Batch:
    """Join the packed columns of a batch on the host, if there are several of the same kind."""
    prefixes = [key.removesuffix(_OFFSETS[0]) for key in batch if key.endswith("_" + _OFFSETS[0])]
    names = [name for name in _OF_TOKENS if any(prefix + name in batch for prefix in prefixes)]
    if len(prefixes) < 2 or any(prefix + name not in batch for prefix in prefixes for name in names):
        return Batch(batch)
    ends = torch.tensor([batch[prefix + "input_ids"].size(1) for prefix in prefixes]).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    offsets = [batch[prefix + _OFFSETS[0]] for prefix in prefixes]
    shifted = [part[(start > 0) :] + start for part, start in zip(offsets, starts, strict=True)]
    if starts.count(0) > 1:  # an empty first column
        return Batch(batch)
    cu_seqlens = torch.cat(shifted).to(torch.int32)
    longest = max(batch[prefix + _LONGEST[0]] for prefix in prefixes)
    joined: dict[str, Any] = {name: torch.cat([batch[prefix + name] for prefix in prefixes], dim=1) for name in names}
    joined |= dict.fromkeys(_OFFSETS, cu_seqlens) | dict.fromkeys(_LONGEST, longest) | {"modality": "text"}
    spans = tuple(zip(prefixes, starts, ends, strict=True))
    views = {prefix + name for prefix in prefixes for name in names}
    # the keys stay in their order, by which trainers tell queries from documents
    return Batch({key: None if key in views else value for key, value in batch.items()}, joined, spans)
