"""Packed token ids of an accelerated Transformer: of texts by the Rust tokenizer, of padded
features by their mask.

Between ``preprocess`` and the model, features have many readers (data loaders, Hugging Face's
accelerate, losses), so ``preprocess`` gives what the stock one gives, and padding is taken out
where the encoder begins. Within :func:`packed_inputs`, whose features go to the encoder and nowhere
else, texts become packed ids at once.
"""

from __future__ import annotations

import functools
import os
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers.base.model import BaseModel
from torch import Tensor

from tilefold._internal.typing import Model, Transformer
from tilefold.integrations._patches import Replacement
from tilefold.integrations.transformers import packed as packed_attention
from tilefold.integrations.transformers.packed import (
    packed_arguments,
    padding_position,
    register_packed,
)
from tilefold.modules.fused_pooling import Features
from tilefold.ops.packed_attention import token_positions
from tilefold.pipeline.ragged import Int64, offsets_of
from tilefold.pipeline.truncation import current_truncation, ignoring_truncation

_PROBES = ("a", "", "Cats, dogs \u00e9t\u00e9 \u4e2d\u6587 x1-y2?")
_LONGEST_PROBE = 8192  # tokens of the probe that shows where texts are truncated
PACKED = frozenset(
    {"input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"},
)  # tensors of packed features
EXPANDED = "query_expansion_positions"  # of ColBERT queries, which all have one length
_OF_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids"})
_PLANNED = frozenset({"task", "max_length"})  # arguments of preprocess that a plan covers
_form: ContextVar[str] = ContextVar("tilefold_form_of_inputs", default="either")


@contextmanager
def _inputs(form: str) -> Iterator[None]:
    token = _form.set(form)
    try:
        yield
    finally:
        _form.reset(token)


# within it, in this thread, accelerated models preprocess texts to packed tokens, for the encoder
# alone
packed_inputs = functools.partial(_inputs, "packed")
# within it, in this thread, accelerated models run on padded tokens, as stock ones do
padded_inputs = functools.partial(_inputs, "padded")


def pads_inputs() -> bool:
    """Whether :func:`padded_inputs` is in force."""
    return _form.get() == "padded"


class _Plan(NamedTuple):
    """Tokenisation plan of texts of one prompt, task and maximal length."""

    truncation: Features | None  # of the Rust tokenizer; None = texts are not cut
    others: Features  # no tensors; they go with every batch, such as the length of the prompt
    padding: int | None  # :func:`padding_position` of the model
    expanded: Features | None = None  # features of an expanded query without a token, [1, L] each


class PackedInputs(Replacement):
    """Replaces ``preprocess`` of one Transformer of sentence-transformers: within
    :func:`packed_inputs`, packed tokens.

    Texts then go through a copy of the Rust tokenizer if that gives what the stock ``preprocess``
    gives for a few probes; else the stock one tokenises, and its padding is taken out. What is no
    list of texts, and ColBERT's query expansion, which scores padding, stay padded.
    """

    def __init__(self, transformer: Transformer) -> None:
        super().__init__(transformer)
        self._forget()

    def _forget(self) -> None:
        self._plans: dict[tuple[object, ...], _Plan | None] = {}
        self._backend: Any = (
            None  # a copy, because calls of the stock tokenizer change padding and truncation
        )
        self._copied: object = None
        self._lock, self._process = threading.Lock(), os.getpid()

    def __getstate__(self) -> Features:
        return {"owner": self.owner}

    def __setstate__(self, state: Features) -> None:
        self.owner = state["owner"]
        self._forget()
        register_packed()

    def __call__(
        self,
        inputs: Sequence[object],
        prompt: str | None = None,
        processing_kwargs: object = None,
        **kwargs: object,
    ) -> Features:
        """Features of the inputs, with the arguments of ``Transformer.preprocess``."""
        if processing_kwargs is not None:
            kwargs["processing_kwargs"] = processing_kwargs
        return self.begin(inputs, prompt, **kwargs)()

    def begin(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        **kwargs: object,
    ) -> Callable[[], Features]:
        """The tokenizer's part of a call, which holds Python's lock for a moment only; the rest is
        what it returns.
        """
        if _form.get() != "packed" or not inputs:
            features = self._stock(inputs, prompt, kwargs)
            return lambda: features
        expansion = (
            getattr(self.owner, "query_expansion", None) if kwargs.get("task") == "query" else None
        )  # ColBERT's
        if kwargs.keys() <= _PLANNED and {*map(type, inputs)} == {str}:
            if (
                self._process != os.getpid()
            ):  # a forked process may have a copy of a lock that nobody will open
                self._forget()
            with self._lock:
                if (plan := self._plan(prompt, kwargs, expansion)) is not None:
                    encodings = [self._encodings(inputs, prompt, plan)]
                    # of a query without room for a token of the expansion, stock warns
                    if plan.expanded is None or max(map(len, encodings[0])) < plan.expanded[
                        "input_ids"
                    ].size(1):
                        if (watch := current_truncation()) is not None:
                            watch.add_encodings(encodings[0], plan.truncation)
                        return lambda: self._features(encodings.pop(), plan)
        features = self._stock(inputs, prompt, kwargs)
        if expansion is None:
            features = pack_features(features, padding_position(self.owner.model))
        return lambda: features

    def _stock(
        self,
        inputs: Sequence[object],
        prompt: str | None,
        kwargs: dict[str, object],
    ) -> Features:
        transformer = self.owner
        found: Features = type(transformer).preprocess(transformer, inputs, prompt=prompt, **kwargs)
        return found

    def _plan(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        expansion: dict[str, Any] | None,
    ) -> _Plan | None:
        tokenizer = self.owner.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "encode_batch"):
            return None
        now = (backend, len(tokenizer))
        if self._copied != now:
            self._plans, self._backend, self._copied = {}, None, now
        lengths = [getattr(self.owner, name, None) for name in ("query_length", "document_length")]
        settings = (tokenizer.model_max_length, tokenizer.truncation_side, *lengths)
        if expansion is not None:
            if expansion["strategy"] != "fixed":
                return None
            settings = (*settings, tokenizer.mask_token_id, *expansion.values())
        if (key := (prompt, *settings, *sorted(kwargs.items()))) not in self._plans:
            self._plans[key] = self._planned(
                prompt,
                kwargs,
                backend,
                expansion["length"] if expansion else None,
            )
        return self._plans[key]

    def _planned(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        backend: Any,
        expanded: int | None,
    ) -> _Plan | None:
        with padded_inputs(), ignoring_truncation():
            self._stock([_PROBES[0]], prompt, kwargs)
            limit = (backend.truncation or {}).get("max_length", _LONGEST_PROBE + 1)
            cut = limit <= _LONGEST_PROBE and not expanded
            probes = [*_PROBES, "word " * (limit + 8)] if cut else list(_PROBES)
            stock = self._stock(probes, prompt, kwargs)
        tensors = {key for key, value in stock.items() if isinstance(value, Tensor)}
        known = _OF_TOKENS | ({EXPANDED} if expanded else set())
        if (
            not {"input_ids", "attention_mask"} <= tensors <= known
            or stock.get("modality") != "text"
        ):
            return None
        others = {key: value for key, value in stock.items() if key not in tensors}
        plan = _Plan(backend.truncation, others, padding_position(self.owner.model))
        if (
            expanded and stock["input_ids"].size(1) == expanded
        ):  # what stands behind the tokens of the shortest probe
            last = {
                name: stock[name][1:2, -1:].expand(1, stock[name].size(1))
                for name in sorted(tensors)
            }
            plan = plan._replace(expanded=last)
        if self._backend is None:
            self._backend = type(backend).from_str(backend.to_str())
            self._backend.no_padding()
        expected = stock if expanded else pack_features(stock, plan.padding)
        got = self._features(self._encodings(probes, prompt, plan), plan)
        same = expected.keys() == got.keys() and all(
            torch.equal(value, got[key]) if isinstance(value, Tensor) else value == got[key]
            for key, value in expected.items()
        )
        return plan if same else None

    def _encodings(self, texts: Sequence[str], prompt: str | None, plan: _Plan) -> list[Any]:
        backend = self._backend
        if backend.truncation != plan.truncation:
            if plan.truncation is None:
                backend.no_truncation()
            else:
                backend.enable_truncation(**plan.truncation)
        encode = getattr(
            backend,
            "encode_batch_fast",
            backend.encode_batch,
        )  # fast: without offsets
        found: list[Any] = encode(
            [prompt + text for text in texts] if prompt else list(texts),
            add_special_tokens=True,
        )
        return found

    def _features(self, encodings: list[Any], plan: _Plan) -> Features:
        if (
            len(encodings) == 1
            and plan.expanded is None
            and plan.padding not in (first := encodings[0].ids)
        ):
            begin, size = 0 if plan.padding is None else plan.padding + 1, len(first)
            numbers = np.array(first, np.int64), np.arange(begin, begin + size, dtype=np.int64)
            tokens, places, cu_seqlens = map(
                torch.from_numpy,
                (*numbers, np.array([0, size], np.int32)),
            )
            return packed_arguments(tokens, places, cu_seqlens, size) | plan.others
        flat = array("i")
        for encoding in encodings:
            flat.fromlist(
                encoding.ids,
            )  # the quickest of what was tried: 29 ns a token, 24 of them for the list
        ids = np.array(flat, np.int64)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        if plan.expanded is not None:
            return _expanded(ids, lengths, plan.expanded) | plan.others
        offsets, padding = offsets_of(lengths), -1 if plan.padding is None else plan.padding
        counted = ids != padding
        before = offsets_of(counted)
        positions = (before[1:] - np.repeat(before[offsets[:-1]], lengths)) * counted + padding
        tokens, places, cu_seqlens = map(
            torch.from_numpy,
            (ids, positions, offsets.astype(np.int32)),
        )
        return (
            packed_arguments(tokens, places, cu_seqlens, int(lengths.max(initial=0))) | plan.others
        )


def _expanded(ids: Int64, lengths: Int64, alone: Features) -> Features:
    """Features ``[B, L]`` of queries before what is to stand behind their tokens."""
    features = {
        name: np.repeat(value.numpy(), len(lengths), axis=0) for name, value in alone.items()
    }
    tokens = np.arange(features[EXPANDED].shape[1]) < lengths[:, None]
    for name, filled in (("input_ids", ids), ("attention_mask", 1), (EXPANDED, False)):
        features[name][tokens] = filled
    return {name: torch.from_numpy(value) for name, value in features.items()}


def texts_to(model: Model) -> PackedInputs | None:
    """The ``preprocess`` of the first module, which a model need not look at each text for; None if
    it is another.
    """
    first: Any = next(iter(model.children()), None)
    shortcut = None if first is None else vars(first).get("preprocess")
    stock = type(model).preprocess is BaseModel.preprocess and "preprocess" not in vars(model)
    return shortcut if stock and isinstance(shortcut, PackedInputs) else None


def on_device(features: Mapping[str, object], device: torch.device | str) -> Features:
    """Features whose tensors are there."""
    return {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in features.items()
    }


def packed_features(ids: Tensor, lengths: Tensor, padding: int | None, longest: int) -> Features:
    """Features of packed tokens ``[T]``, under the names that sentence-transformers gives flattened
    ones.
    """
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=ids.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
    return packed_arguments(
        ids,
        packed_attention.position_ids_of(ids, cu_seqlens, padding),
        cu_seqlens,
        longest,
    )


def pack_features(features: Features, padding: int | None) -> Features:
    """Padded features of texts without their padding; anything else, and masks with holes, as they
    are.

    Waits for the GPU once, if they are there. `padding` is :func:`padding_position` of the model.
    """
    mask, ids = features.get("attention_mask"), features.get("input_ids")
    tensors = {key for key, value in features.items() if isinstance(value, Tensor)} - {
        "prompt_length",
    }
    if mask is None or ids is None or not tensors <= _OF_TOKENS or mask.dim() != 2:
        return features
    keep = mask != 0
    begins = keep & ~torch.nn.functional.pad(keep, (1, 0))[:, :-1]
    lengths, types = keep.sum(1), features.get("token_type_ids")
    typed = lengths if types is None else types.sum(1)
    facts = (
        [lengths.sum(), *(n.amax() for n in (lengths, begins.sum(1), typed.long()))]
        if keep.numel()
        else []
    )
    tokens, most, parts, marked = torch.stack(facts).tolist() if facts else (0, 0, 0, 0)
    if parts > 1:
        return features
    at = lengths[:0]
    if tokens:  # ``nonzero`` would wait for the GPU to know how many they are
        sequence, place = token_positions(
            torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            tokens,
        )
        at = sequence * keep.size(1) + keep.long().argmax(1)[sequence] + place
    found = packed_features(ids.long().flatten()[at], lengths, padding, most)
    if types is not None and marked:  # models take zeros where none are given
        found["token_type_ids"] = types.flatten()[at][None]
    return found | {key: value for key, value in features.items() if key not in tensors}
