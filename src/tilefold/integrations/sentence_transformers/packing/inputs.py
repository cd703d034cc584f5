"""Packed inputs of an accelerated Transformer.

They are made of texts, by the Rust tokenizer, or of padded features, by their attention mask.

``preprocess`` returns padded features like the stock method, because many others read them: data
loaders, Hugging Face's accelerate, losses. Their padding is removed where the encoder begins.
Within :func:`packed_inputs` only the encoder reads them, and ``preprocess`` returns packed tokens.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers.base.model import BaseModel
from torch import Tensor

from tilefold._internal.typing import Model, Transformer
from tilefold.integrations._patches import Replacement
from tilefold.integrations.transformers.packed import (
    OFFSET_NAMES,
    packed_arguments,
    padding_position,
    position_ids_of,
    register_packed,
)
from tilefold.modules.fused_pooling import Features
from tilefold.ops.packed_attention import token_positions
from tilefold.pipeline.ragged import Int64, offsets_of
from tilefold.pipeline.truncation import current_truncation, ignoring_truncation

# Texts for which the packed tokenisation of a plan is compared with the stock one.
_PROBES = ("a", "", "Cats, dogs \u00e9t\u00e9 \u4e2d\u6587 x1-y2?")
_LONGEST_PROBE = 8192  # tokens of the probe that shows where texts are truncated
# Names of the tensors of packed features.
PACKED = frozenset({"input_ids", "position_ids", *OFFSET_NAMES})
# Name of the tensor that marks the expansion of ColBERT queries, which all have one length.
EXPANDED = "query_expansion_positions"
_TOKEN_TENSORS = frozenset({"input_ids", "attention_mask", "token_type_ids"})
_PLANNED_ARGUMENTS = frozenset({"task", "max_length"})  # arguments of preprocess that a plan covers
# Form of the inputs in this thread: "packed", "padded" or "either".
_form: ContextVar[str] = ContextVar("tilefold_form_of_inputs", default="either")


@contextmanager
def _inputs(form: str) -> Iterator[None]:
    token = _form.set(form)
    try:
        yield
    finally:
        _form.reset(token)


def packed_inputs() -> AbstractContextManager[None]:
    """Let accelerated models preprocess texts to packed tokens in this thread."""
    return _inputs("packed")


def padded_inputs() -> AbstractContextManager[None]:
    """Let accelerated models run on padded tokens in this thread, like stock models."""
    return _inputs("padded")


def pads_inputs() -> bool:
    """Return whether this thread is within :func:`padded_inputs`."""
    return _form.get() == "padded"


class _Plan(NamedTuple):
    """How texts with one prompt, task and maximum length are tokenised.

    Attributes:
        truncation: truncation settings of the Rust tokenizer; ``None`` if texts are not truncated.
        others: features that are no tensors and are the same for every batch, such as the length of
            the prompt.
        padding: :func:`padding_position` of the model.
        expansion: features of an expanded query without any token, ``[1, L]``; ``None`` if queries
            are not expanded.
    """

    truncation: Features | None
    others: Features
    padding: int | None
    expansion: Features | None = None


class PackedInputs(Replacement):
    """Replaces ``preprocess`` of one Transformer: within :func:`packed_inputs` it packs tokens.

    Texts then go through a copy of the Rust tokenizer, if that agrees with the stock ``preprocess``
    on a few probes. Otherwise the stock method tokenises, and its padding is removed. Inputs other
    than texts stay padded, and so does ColBERT's query expansion, whose padding is scored.
    """

    def __init__(self, transformer: Transformer) -> None:
        super().__init__(transformer)
        self._reset()

    def _reset(self) -> None:
        self._plans: dict[tuple[object, ...], _Plan | None] = {}
        # A copy, because calls of the stock tokenizer change padding and truncation.
        self._backend: Any = None
        self._copied_from: object = None
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __getstate__(self) -> Features:
        return {"owner": self.owner}

    def __setstate__(self, state: Features) -> None:
        self.owner = state["owner"]
        self._reset()
        register_packed()

    def __call__(
        self,
        inputs: Sequence[object],
        prompt: str | None = None,
        processing_kwargs: object = None,
        **kwargs: object,
    ) -> Features:
        """Return features of the inputs, with the arguments of ``Transformer.preprocess``.

        Args:
            inputs: the inputs, such as texts.
            prompt: text that is put before every input.
            processing_kwargs: options of the tokenizer or processor.
            **kwargs: other arguments of ``Transformer.preprocess``.
        """
        if processing_kwargs is not None:
            kwargs["processing_kwargs"] = processing_kwargs
        return self.begin(inputs, prompt, **kwargs)()

    def begin(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        **kwargs: object,
    ) -> Callable[[], Features]:
        """Tokenise inputs, and return a function that makes features of the tokens.

        The tokenizer mostly runs without the GIL, the function with it. So a thread can tokenise
        the next texts while another one makes features.

        Args:
            inputs: the inputs.
            prompt: text that is put before every input.
            **kwargs: other arguments of ``Transformer.preprocess``.
        """
        if _form.get() != "packed" or not inputs:
            features = self._stock_features(inputs, prompt, kwargs)
            return lambda: features
        expansion = None  # settings of ColBERT's query expansion
        if kwargs.get("task") == "query":
            expansion = getattr(self.owner, "query_expansion", None)
        are_texts = {*map(type, inputs)} == {str}
        if are_texts and kwargs.keys() <= _PLANNED_ARGUMENTS:
            finish = self._begin_planned(inputs, prompt, kwargs, expansion)
            if finish is not None:
                return finish
        features = self._stock_features(inputs, prompt, kwargs)
        if expansion is None:
            features = pack_features(features, padding_position(self.owner.model))
        return lambda: features

    def _begin_planned(
        self,
        texts: Sequence[str],
        prompt: str | None,
        kwargs: dict[str, object],
        expansion: dict[str, Any] | None,
    ) -> Callable[[], Features] | None:
        """Tokenise texts by the copy of the Rust tokenizer, if a plan for such texts exists.

        A plan says how texts with one prompt, task and maximum length are tokenised.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            kwargs: other arguments of ``Transformer.preprocess``.
            expansion: settings of ColBERT's query expansion, if the texts are expanded queries.

        Returns:
            A function that makes the features, to be called once; ``None`` if the stock method must
            tokenise the texts.
        """
        if self._process != os.getpid():
            # A forked process may have a copy of a locked lock, which nothing would release.
            self._reset()
        with self._lock:
            plan = self._plan(prompt, kwargs, expansion)
            if plan is None:
                return None
            encodings = self._encodings(texts, prompt, plan)
            if plan.expansion is not None:
                expanded_length = plan.expansion["input_ids"].size(1)
                if max(map(len, encodings)) >= expanded_length:
                    return None  # a query fills the expansion, about which the stock method warns
            truncation = current_truncation()
            if truncation is not None:
                truncation.add_encodings(encodings, plan.truncation)
            # ``pop`` frees the encodings as soon as their features are made, although the returned
            # function may live longer.
            holder = [encodings]
            del encodings
            return lambda: self._features(holder.pop(), plan)

    def _stock_features(
        self,
        inputs: Sequence[object],
        prompt: str | None,
        kwargs: dict[str, object],
    ) -> Features:
        """Call the stock ``preprocess``."""
        preprocess = type(self.owner).preprocess
        features: Features = preprocess(self.owner, inputs, prompt=prompt, **kwargs)
        return features

    def _plan(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        expansion: dict[str, Any] | None,
    ) -> _Plan | None:
        """Return the plan for a call from the cache, or make it.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            expansion: settings of ColBERT's query expansion; ``None`` if texts are not expanded.

        Returns:
            The plan, or None if the stock method must tokenise.
        """
        tokenizer = self.owner.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "encode_batch"):
            return None
        # Another tokenizer, or added tokens, make all plans and the copy invalid.
        source = (backend, len(tokenizer))
        if self._copied_from != source:
            self._plans = {}
            self._backend = None
            self._copied_from = source
        # All settings that change the tokens of a text are part of a plan's key.
        settings = [
            tokenizer.model_max_length,
            tokenizer.truncation_side,
            getattr(self.owner, "query_length", None),
            getattr(self.owner, "document_length", None),
        ]
        expanded_length = None
        if expansion is not None:
            if expansion["strategy"] != "fixed":
                return None
            settings += [tokenizer.mask_token_id, *expansion.values()]
            expanded_length = expansion["length"]
        key = (prompt, *settings, *sorted(kwargs.items()))
        if key not in self._plans:
            self._plans[key] = self._make_plan(prompt, kwargs, backend, expanded_length)
        return self._plans[key]

    def _make_plan(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        backend: Any,
        expanded_length: int | None,
    ) -> _Plan | None:
        """Make a plan, and compare its features with stock ones for a few probes.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            backend: the Rust tokenizer of the Transformer.
            expanded_length: length L of expanded queries, if they are expanded.

        Returns:
            The plan, or None if the features differ.
        """
        probes, stock = self._probe(prompt, kwargs, backend, expanded_length is not None)
        tensor_names = {name for name, value in stock.items() if isinstance(value, Tensor)}
        supported_names = set(_TOKEN_TENSORS)
        if expanded_length is not None:
            supported_names.add(EXPANDED)
        has_supported_names = {"input_ids", "attention_mask"} <= tensor_names <= supported_names
        if not has_supported_names or stock.get("modality") != "text":
            return None
        others = {name: value for name, value in stock.items() if name not in tensor_names}
        plan = _Plan(backend.truncation, others, padding_position(self.owner.model))
        if expanded_length is not None and stock["input_ids"].size(1) == expanded_length:
            tensors = {name: stock[name] for name in sorted(tensor_names)}
            plan = plan._replace(expansion=_expansion_of(tensors))
        if self._backend is None:
            self._backend = type(backend).from_str(backend.to_str())
            self._backend.no_padding()
        expected = pack_features(stock, plan.padding) if expanded_length is None else stock
        features = self._features(self._encodings(probes, prompt, plan), plan)
        return plan if _are_equal(features, expected) else None

    def _probe(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        backend: Any,
        is_expanded: bool,
    ) -> tuple[list[str], Features]:
        """Tokenise a few texts by the stock method.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            backend: the Rust tokenizer of the Transformer.
            is_expanded: whether the texts are expanded queries.

        Returns:
            The texts, of which one is truncated if there is a limit, and their features.
        """
        probes = list(_PROBES)
        with padded_inputs(), ignoring_truncation():
            # The first call sets the truncation of the tokenizer.
            self._stock_features([probes[0]], prompt, kwargs)
            limit = (backend.truncation or {}).get("max_length", _LONGEST_PROBE + 1)
            if limit <= _LONGEST_PROBE and not is_expanded:
                text_above_limit = "word " * (limit + 8)
                probes.append(text_above_limit)
            return probes, self._stock_features(probes, prompt, kwargs)

    def _encodings(self, texts: Sequence[str], prompt: str | None, plan: _Plan) -> list[Any]:
        """Tokenise texts by the copy of the Rust tokenizer.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            plan: the plan, whose truncation is set in the tokenizer.

        Returns:
            One ``tokenizers.Encoding`` per text.
        """
        backend = self._backend
        if backend.truncation != plan.truncation:
            if plan.truncation is None:
                backend.no_truncation()
            else:
                backend.enable_truncation(**plan.truncation)
        # The fast method leaves out offsets in the text.
        encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        encodings: list[Any] = encode(prompted, add_special_tokens=True)
        return encodings

    def _features(self, encodings: list[Any], plan: _Plan) -> Features:
        """Return packed features of encodings, or padded ones of expanded queries.

        Args:
            encodings: one ``tokenizers.Encoding`` per text.
            plan: the plan with which the texts were tokenised.
        """
        if len(encodings) == 1 and plan.expansion is None:
            token_ids = encodings[0].ids
            if plan.padding not in token_ids:
                return _single_text_features(token_ids, plan)
        flat = array("i")
        for encoding in encodings:
            # The fastest way that was tried: 29 ns a token, 24 of them for the list.
            flat.fromlist(encoding.ids)
        ids = np.array(flat, np.int64)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        if plan.expansion is not None:
            return _expanded_features(ids, lengths, plan.expansion) | plan.others
        # Position ids as models count them: padding tokens have the position `padding`, and others
        # follow it. Models without such a position begin at 0, after a `padding` of -1, which is no
        # token's id.
        padding = -1 if plan.padding is None else plan.padding
        offsets = offsets_of(lengths)
        is_counted = ids != padding
        n_counted_before = offsets_of(is_counted)  # counted tokens before each token, and in all
        n_before_text = np.repeat(n_counted_before[offsets[:-1]], lengths)
        n_counted_in_text = n_counted_before[1:] - n_before_text
        positions = n_counted_in_text * is_counted + padding
        packed = packed_arguments(
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            torch.from_numpy(offsets.astype(np.int32)),
            int(lengths.max(initial=0)),
        )
        return packed | plan.others


def _single_text_features(token_ids: list[int], plan: _Plan) -> Features:
    """Return packed features of one text without padding tokens.

    Args:
        token_ids: ids of the text's tokens.
        plan: the plan with which the text was tokenised.
    """
    length = len(token_ids)
    start = 0 if plan.padding is None else plan.padding + 1
    packed = packed_arguments(
        torch.from_numpy(np.array(token_ids, np.int64)),
        torch.from_numpy(np.arange(start, start + length, dtype=np.int64)),
        torch.from_numpy(np.array([0, length], np.int32)),
        length,
    )
    return packed | plan.others


def _are_equal(features: Features, expected: Features) -> bool:
    """Return whether two sets of features have the same names and values."""
    if features.keys() != expected.keys():
        return False
    for name, value in expected.items():
        if isinstance(value, Tensor):
            if not torch.equal(value, features[name]):
                return False
        elif value != features[name]:
            return False
    return True


def _expansion_of(stock: dict[str, Tensor]) -> Features:
    """Return features of an expanded ColBERT query without any token of a text, ``[1, L]``.

    Expansion fills a query up to length L with mask tokens. The last position of the empty probe is
    such a token. It is repeated L times.

    Args:
        stock: tensors ``[B, L]`` of the probes, of which the second one is empty.
    """
    return {name: tensor[1:2, -1:].expand(1, tensor.size(1)) for name, tensor in stock.items()}


def _expanded_features(ids: Int64, lengths: Int64, expansion: Features) -> Features:
    """Return padded features ``[B, L]`` of expanded ColBERT queries.

    The tokens of a query replace the first mask tokens of the expansion.

    Args:
        ids: packed token ids, ``[T]``.
        lengths: number of tokens of each query, ``[B]``.
        expansion: features of a query without any token, ``[1, L]``.
    """
    n_queries = len(lengths)
    features = {
        name: np.repeat(tensor.numpy(), n_queries, axis=0) for name, tensor in expansion.items()
    }
    is_token = np.arange(features[EXPANDED].shape[1]) < lengths[:, None]
    features["input_ids"][is_token] = ids
    features["attention_mask"][is_token] = 1
    features[EXPANDED][is_token] = False
    return {name: torch.from_numpy(values) for name, values in features.items()}


def texts_to(model: Model) -> PackedInputs | None:
    """Return the replaced ``preprocess`` of the model's first module, to tokenise texts directly.

    The model's own ``preprocess`` examines the type of each input before it calls that of the first
    module. For texts this can be left out.

    Args:
        model: the model.

    Returns:
        The replacement, or None if the model's own ``preprocess`` must run.
    """
    is_stock = type(model).preprocess is BaseModel.preprocess and "preprocess" not in vars(model)
    first_module: Any = next(iter(model.children()), None)
    if first_module is None or not is_stock:
        return None
    preprocess = vars(first_module).get("preprocess")
    return preprocess if isinstance(preprocess, PackedInputs) else None


def on_device(features: Mapping[str, object], device: torch.device | str) -> Features:
    """Return features with their tensors moved to a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in features.items()
    }


def packed_features(ids: Tensor, lengths: Tensor, padding: int | None, longest: int) -> Features:
    """Return features of packed tokens, with the names of sentence-transformers' flattened inputs.

    Args:
        ids: token ids, ``[T]``.
        lengths: number of tokens of each text, ``[B]``.
        padding: :func:`padding_position` of the model.
        longest: number of tokens of the longest text.
    """
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=ids.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
    return packed_arguments(
        ids,
        position_ids_of(ids, cu_seqlens, padding),
        cu_seqlens,
        longest,
    )


def pack_features(features: Features, padding: int | None) -> Features:
    """Remove the padding of padded features.

    It waits for the GPU once, if the features are there.

    Args:
        features: output of ``preprocess``.
        padding: :func:`padding_position` of the model.

    Returns:
        Packed features; the same features if they are not padded texts, or a mask has holes.
    """
    mask = features.get("attention_mask")
    ids = features.get("input_ids")
    tensor_names = {name for name, value in features.items() if isinstance(value, Tensor)}
    tensor_names.discard("prompt_length")
    if mask is None or ids is None or not tensor_names <= _TOKEN_TENSORS or mask.dim() != 2:
        return features
    is_token = mask != 0
    lengths = is_token.sum(1)
    token_types = features.get("token_type_ids")
    facts = _mask_facts(is_token, lengths, token_types)
    if facts.max_runs > 1:
        return features
    sources = lengths[:0]  # positions of all tokens in the flattened padded tensors
    if facts.n_tokens > 0:
        # ``nonzero`` would wait for the GPU once more, to know the number of tokens.
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        text, position = token_positions(cu_seqlens, facts.n_tokens)
        first_tokens = is_token.long().argmax(1)  # positions after padding on the left
        padded_length = is_token.size(1)
        sources = text * padded_length + first_tokens[text] + position
    packed_ids = ids.long().flatten()[sources]
    packed = packed_features(packed_ids, lengths, padding, facts.longest)
    if token_types is not None and facts.has_types:  # models use zeros by default
        packed["token_type_ids"] = token_types.flatten()[sources][None]
    others = {name: value for name, value in features.items() if name not in tensor_names}
    return packed | others


class _MaskFacts(NamedTuple):
    """Properties of padded texts that packing needs on the CPU.

    Attributes:
        n_tokens: number of tokens of all texts.
        longest: number of tokens of the longest text.
        max_runs: largest number of separate runs of tokens in a text: 1 without holes.
        has_types: whether a text has a token type other than 0.
    """

    n_tokens: int = 0
    longest: int = 0
    max_runs: int = 0
    has_types: bool = False


def _mask_facts(is_token: Tensor, lengths: Tensor, token_types: Tensor | None) -> _MaskFacts:
    """Compute what packing must know about padded texts on the CPU, with one copy from the device.

    Args:
        is_token: bool ``[B, S]``.
        lengths: number of tokens of each text, ``[B]``.
        token_types: ``[B, S]``, if there are any.
    """
    if is_token.numel() == 0:
        return _MaskFacts()
    # A run of tokens begins at a token that follows padding, or at the first position.
    has_token_before = torch.nn.functional.pad(is_token, (1, 0))[:, :-1]
    n_runs = (is_token & ~has_token_before).sum(1)
    # Without token types, `lengths` takes their place, and ``has_types`` is not read.
    type_sums = lengths if token_types is None else token_types.sum(1)
    facts = [lengths.sum(), lengths.amax(), n_runs.amax(), type_sums.long().amax()]
    n_tokens, longest, max_runs, largest_type_sum = torch.stack(facts).tolist()
    return _MaskFacts(n_tokens, longest, max_runs, largest_type_sum != 0)
