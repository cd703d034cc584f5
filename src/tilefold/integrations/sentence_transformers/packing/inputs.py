"""Packed inputs of an accelerated Transformer, from texts or from padded features.

``preprocess`` returns padded features by default, equal to those of sentence-transformers' own
method, because data loaders, Hugging Face's accelerate and losses also read them.
The encoder then removes the padding. Within :func:`packed_inputs` only the encoder reads the
features, so ``preprocess`` returns packed tokens directly.
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

from tilefold._internal.tokenizer_copies import copy_tokenizer
from tilefold._internal.typing import Model, Transformer
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers.packing.forward import PooledCount
from tilefold.integrations.transformers.packed import (
    OFFSET_NAMES,
    packed_arguments,
    padding_position,
    position_ids_of,
    register_packed,
)
from tilefold.modules.echo import POOLED_COUNT, POOLING_MASK
from tilefold.modules.fused_pooling import Features
from tilefold.ops.packed_attention import token_positions
from tilefold.pipeline.ragged import Int64, offsets_of
from tilefold.pipeline.truncation import current_truncation, ignoring_truncation

# Probes: texts for which the features of a plan are compared with sentence-transformers' features.
_PROBES = ("a", "", "Cats, dogs \u00e9t\u00e9 \u4e2d\u6587 x1-y2?")
# The position of the empty text among them.
_EMPTY_PROBE = 1
# Truncation is compared, too, if texts are truncated to this number of tokens or fewer.
_LONGEST_PROBE = 8192
# The words of a text that is truncated exceed the limit by this number.
_WORDS_ABOVE_LIMIT = 8
# Names of the tensors of packed features.
PACKED = frozenset({"input_ids", "position_ids", *OFFSET_NAMES})
# Name of the tensor that marks the mask tokens of expanded ColBERT queries.
EXPANDED = "query_expansion_positions"
# Names of the tensors of padded features that a plan can make.
_TOKEN_TENSORS = frozenset({"input_ids", "attention_mask", "token_type_ids"})
# Names of the tensors of padded features that can be packed.
_PACKABLE_TENSORS = _TOKEN_TENSORS | {POOLING_MASK}
# Arguments of ``preprocess`` that a plan supports, besides texts and prompt.
_PLANNED_ARGUMENTS = frozenset({"task", "max_length"})
# The form of inputs in this thread: "packed", "padded" or "either".
_input_form: ContextVar[str] = ContextVar("tilefold_form_of_inputs", default="either")


@contextmanager
def _inputs(form: str) -> Iterator[None]:
    """Let texts be tokenised to features of a form, while the context is open.

    Args:
        form: the form.
    """
    token = _input_form.set(form)
    try:
        yield
    finally:
        _input_form.reset(token)


def packed_inputs() -> AbstractContextManager[None]:
    """Let accelerated models preprocess texts to packed tokens in this thread."""
    return _inputs("packed")


def padded_inputs() -> AbstractContextManager[None]:
    """Let accelerated models run on padded tokens in this thread, as other models do."""
    return _inputs("padded")


def pads_inputs() -> bool:
    """Return whether this thread is within :func:`padded_inputs`."""
    return _input_form.get() == "padded"


class _Padding(NamedTuple):
    """How sentence-transformers' ``preprocess`` pads texts to the longest one of a batch.

    Attributes:
        names: the names of its features, in their order.
        token_id: the id of padding tokens.
        is_left: whether padding comes before the tokens of a text.
    """

    names: tuple[str, ...]
    token_id: int
    is_left: bool


class _Plan(NamedTuple):
    """How to make the features of texts without sentence-transformers, which is slower.

    A plan is valid for one prompt, task and maximum length.

    Attributes:
        truncation: the truncation settings of the Rust tokenizer; ``None`` if texts are not
            truncated.
        constants: the features that are not tensors and are the same for every batch, such as the
            length of the prompt.
        padding_position_id: the position id of padding tokens, in models like RoBERTa that have
            one; ``None`` in other models.
        expansion: features of an expanded ColBERT query, which mask tokens fill to the length L,
            without tokens of a text, ``[1, L]``; ``None`` if texts are not expanded.
        padding: how texts are padded; ``None`` if sentence-transformers must pad them.
    """

    truncation: Features | None
    constants: Features
    padding_position_id: int | None
    expansion: Features | None = None
    padding: _Padding | None = None


class _TokenizedTexts:
    """Tokens of texts, from which features are made later.

    Args:
        encodings: one ``tokenizers.Encoding`` per text.
        plan: the plan with which the texts were tokenised.
        is_packed: whether the features are packed. Those of expanded queries never are.
    """

    def __init__(self, encodings: list[Any], plan: _Plan, is_packed: bool) -> None:
        self._encodings = encodings
        self._plan = plan
        self._is_packed = is_packed

    def features(self) -> Features:
        """Return the features of the texts. This may be called once, since it frees the tokens."""
        encodings, self._encodings = self._encodings, []
        if self._is_packed or self._plan.padding is None:
            return _make_features(encodings, self._plan)
        return _make_padded_features(encodings, self._plan.padding, self._plan.constants)


class PackedInputs(Replacement):
    """Replaces ``preprocess`` of one Transformer: within :func:`packed_inputs` it packs tokens.

    Texts go through a copy of the Rust tokenizer, if its features equal those of the original
    ``preprocess`` for a few probes: sentence-transformers' method takes several times as long,
    since it makes Python lists of all tokens. Otherwise sentence-transformers' method tokenises,
    and its padding is removed within :func:`packed_inputs`. Inputs other than texts stay padded. So
    do expanded ColBERT queries, because their mask tokens are scored.
    """

    def __init__(self, transformer: Transformer) -> None:
        super().__init__(transformer)
        self._reset()

    def _reset(self) -> None:
        """Forget all plans, and what belongs to another process."""
        self._plans: dict[tuple[object, ...], _Plan | None] = {}
        # A copy of the Rust tokenizer, because calls of the original change its padding and
        # truncation.
        self._backend_copy: Any = None
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
        """Return the features of inputs, with the arguments of ``Transformer.preprocess``.

        Args:
            inputs: the inputs, such as texts.
            prompt: text that is put before every input.
            processing_kwargs: options of the tokenizer or processor.
            **kwargs: other arguments of ``Transformer.preprocess``.
        """
        if processing_kwargs is not None:
            kwargs["processing_kwargs"] = processing_kwargs
        make_features = self.tokenize(inputs, prompt, **kwargs)
        return make_features()

    def tokenize(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        **kwargs: object,
    ) -> Callable[[], Features]:
        """Tokenise inputs, and return a function that makes their features.

        Tokenising mostly releases the GIL, while the returned function holds it. So one thread can
        tokenise the next texts while another one makes features.

        Args:
            inputs: the inputs.
            prompt: text that is put before every input.
            **kwargs: other arguments of ``Transformer.preprocess``.

        Returns:
            A function that returns the features, to be called once.
        """
        expansion = self._query_expansion(kwargs)
        is_packed = _input_form.get() == "packed"
        are_texts = {*map(type, inputs)} == {str}
        if are_texts and kwargs.keys() <= _PLANNED_ARGUMENTS and not pads_inputs():
            tokenized = self._tokenize_by_plan(inputs, prompt, kwargs, expansion, is_packed)
            if tokenized is not None:
                return tokenized.features
        features = self._library_features(inputs, prompt, kwargs)
        # The mask tokens of expanded queries look like padding, but stay.
        if is_packed and expansion is None and inputs:
            features = pack_features(features, padding_position(self.owner.model))
        return lambda: features

    def _query_expansion(self, kwargs: dict[str, object]) -> dict[str, Any] | None:
        """Return the settings of ColBERT's query expansion, or None if a call does not expand."""
        if kwargs.get("task") != "query":
            return None
        expansion: dict[str, Any] | None = getattr(self.owner, "query_expansion", None)
        return expansion

    def _tokenize_by_plan(
        self,
        texts: Sequence[str],
        prompt: str | None,
        kwargs: dict[str, object],
        expansion: dict[str, Any] | None,
        is_packed: bool,
    ) -> _TokenizedTexts | None:
        """Tokenise texts with a copy of the Rust tokenizer, if that gives the right features.

        It does if the model has a plan: how to make the features of texts from their tokens.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            kwargs: other arguments of ``Transformer.preprocess``.
            expansion: settings of ColBERT's query expansion, if the texts are expanded queries.
            is_packed: whether the features are to be packed.

        Returns:
            The tokens, or None if sentence-transformers' method must tokenise the texts.
        """
        with self._lock_of_this_process():
            plan = self._plan_for(prompt, kwargs, expansion)
            if plan is None:
                return None
            if not is_packed and plan.expansion is None and plan.padding is None:
                return None
            encodings = self._encode_texts(texts, prompt, plan)
            if plan.expansion is not None:
                expanded_length = plan.expansion["input_ids"].size(1)
                if max(map(len, encodings)) >= expanded_length:
                    # sentence-transformers' method warns that a query is too long to be expanded.
                    return None
            truncation = current_truncation()
            if truncation is not None:
                truncation.add_encodings(encodings, plan.truncation)
            return _TokenizedTexts(encodings, plan, is_packed)

    def _lock_of_this_process(self) -> threading.Lock:
        """Return the lock, or a new one in a forked process.

        The fork may have copied a lock that is held, and nothing would release the copy.
        """
        if self._process != os.getpid():
            self._reset()
        return self._lock

    def _library_features(
        self,
        inputs: Sequence[object],
        prompt: str | None,
        kwargs: dict[str, object],
    ) -> Features:
        """Tokenise texts with sentence-transformers' ``preprocess``.

        Args:
            inputs: the texts.
            prompt: text that is put before every text.
            kwargs: other arguments of ``Transformer.preprocess``.
        """
        preprocess = type(self.owner).preprocess
        features: Features = preprocess(self.owner, inputs, prompt=prompt, **kwargs)
        return features

    def _plan_for(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        expansion: dict[str, Any] | None,
    ) -> _Plan | None:
        """Return how to make the features of texts from their tokens, cached or newly found out.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            expansion: settings of ColBERT's query expansion; ``None`` if texts are not expanded.

        Returns:
            The plan, or None if sentence-transformers' method must tokenise.
        """
        tokenizer = self.owner.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        has_rust_tokenizer = hasattr(backend, "encode_batch")
        expands_to_fixed_length = expansion is None or expansion["strategy"] == "fixed"
        if not has_rust_tokenizer or not expands_to_fixed_length:
            return None
        # If the user sets another tokenizer or adds tokens to it, all plans and its copy are
        # invalid.
        source = (backend, len(tokenizer))
        if self._copied_from != source:
            self._plans = {}
            self._backend_copy = None
            self._copied_from = source
        key = self._plan_key(prompt, kwargs, expansion)
        if key not in self._plans:
            self._plans[key] = self._make_plan(prompt, kwargs, backend, expansion)
        return self._plans[key]

    def _plan_key(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        expansion: dict[str, Any] | None,
    ) -> tuple[object, ...]:
        """Return all settings of a call that change the tokens of a text.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            expansion: settings of ColBERT's query expansion; ``None`` if texts are not expanded.
        """
        tokenizer = self.owner.tokenizer
        settings = [
            tokenizer.model_max_length,
            tokenizer.truncation_side,
            tokenizer.padding_side,
            tokenizer.pad_token_id,
            repr(getattr(self.owner, "processing_kwargs", None)),
            getattr(self.owner, "query_length", None),
            getattr(self.owner, "document_length", None),
        ]
        if expansion is not None:
            settings += [tokenizer.mask_token_id, *expansion.values()]
        return (prompt, *settings, *sorted(kwargs.items()))

    def _make_plan(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        backend: Any,
        expansion: dict[str, Any] | None,
    ) -> _Plan | None:
        """Find out how to make the features of texts, and check them for a few texts.

        The features must equal those of sentence-transformers' ``preprocess``.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            backend: the Rust tokenizer of the Transformer.
            expansion: settings of ColBERT's query expansion; ``None`` if texts are not expanded.

        Returns:
            The plan, or None if its features differ from sentence-transformers' features.
        """
        is_expanded = expansion is not None
        texts = self._make_probe_texts(prompt, kwargs, backend, is_expanded)
        if is_expanded and "" not in texts:  # the empty text shows the tokens of an expansion
            return None
        with padded_inputs(), ignoring_truncation():
            expected = self._library_features(texts, prompt, kwargs)
        if not _are_supported(expected, is_expanded):
            return None
        plan = _Plan(
            truncation=backend.truncation,
            constants={
                name: value for name, value in expected.items() if not isinstance(value, Tensor)
            },
            padding_position_id=padding_position(self.owner.model),
        )
        if expansion is None:
            expected = pack_features(expected, plan.padding_position_id)
        elif expected["input_ids"].size(1) == expansion["length"]:
            plan = plan._replace(expansion=_make_empty_expanded_query(expected))
        else:
            return None
        if self._backend_copy is None:
            self._backend_copy = copy_tokenizer(backend)
            self._backend_copy.no_padding()
        features = _make_features(self._encode_texts(texts, prompt, plan), plan)
        if not _are_equal(features, expected):
            return None
        if not is_expanded:
            plan = plan._replace(padding=self._find_padding(texts, prompt, kwargs, plan))
        return plan

    def _find_padding(
        self,
        probe_texts: list[str],
        prompt: str | None,
        kwargs: dict[str, object],
        plan: _Plan,
    ) -> _Padding | None:
        """Return how sentence-transformers pads texts, or None if it must pad them itself.

        Args:
            probe_texts: the texts whose features are compared.
            prompt: text that is put before every text.
            kwargs: other arguments of ``Transformer.preprocess``.
            plan: how to make packed features, which equal those of sentence-transformers.
        """
        tokenizer = self.owner.tokenizer
        if tokenizer.pad_token_id is None:
            return None
        # Batches of one short text show whether texts are padded to more than the longest one: to a
        # maximum length, or to a multiple of some number.
        batches = [["a"], [""], probe_texts] if "" in probe_texts else [["a"], probe_texts]
        for texts in batches:
            with padded_inputs(), ignoring_truncation():
                expected = self._library_features(texts, prompt, kwargs)
            padding = _Padding(
                names=tuple(expected),
                token_id=tokenizer.pad_token_id,
                is_left=tokenizer.padding_side == "left",
            )
            encodings = self._encode_texts(texts, prompt, plan)
            features = _make_padded_features(encodings, padding, plan.constants)
            if not _are_equal(features, expected):
                return None
        return padding

    def _make_probe_texts(
        self,
        prompt: str | None,
        kwargs: dict[str, object],
        backend: Any,
        is_expanded: bool,
    ) -> list[str]:
        """Return texts that show how a call tokenises, one of them to be truncated if possible.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of the call.
            backend: the Rust tokenizer of the Transformer.
            is_expanded: whether the texts are expanded queries. A query that is truncated fills
                the expansion, so none is returned.
        """
        texts = list(_PROBES)
        if not self._library_accepts_empty_texts(prompt, kwargs):
            texts.remove("")
        with padded_inputs(), ignoring_truncation():
            # This call sets the truncation of the tokenizer, which is read below.
            self._library_features(texts[:1], prompt, kwargs)
        limit = (backend.truncation or {}).get("max_length")
        if limit is not None and limit <= _LONGEST_PROBE and not is_expanded:
            texts.append("word " * (limit + _WORDS_ABOVE_LIMIT))
        return texts

    def _library_accepts_empty_texts(self, prompt: str | None, kwargs: dict[str, object]) -> bool:
        """Return whether ``Transformer.preprocess`` of sentence-transformers accepts an empty text.

        The method raises an error for a causal language model whose tokenizer adds no special
        tokens, because an empty text then ends in a padding token.

        Args:
            prompt: text that is put before every text.
            kwargs: other arguments of ``Transformer.preprocess``.
        """
        try:
            with padded_inputs(), ignoring_truncation():
                self._library_features([""], prompt, kwargs)
        except (ValueError, IndexError):
            return False
        return True

    def _encode_texts(self, texts: Sequence[str], prompt: str | None, plan: _Plan) -> list[Any]:
        """Tokenise texts with the copy of the Rust tokenizer.

        Args:
            texts: the texts.
            prompt: text that is put before every text.
            plan: the plan, whose truncation is set in the tokenizer.

        Returns:
            One ``tokenizers.Encoding`` per text.
        """
        backend = self._backend_copy
        if backend.truncation != plan.truncation:
            if plan.truncation is None:
                backend.no_truncation()
            else:
                backend.enable_truncation(**plan.truncation)
        # The fast method of newer releases does not compute where tokens are in the text.
        encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
        prompted = [prompt + text for text in texts] if prompt else list(texts)
        encodings: list[Any] = encode(prompted, add_special_tokens=True)
        return encodings


def _are_supported(features: Features, is_expanded: bool) -> bool:
    """Whether features are texts, with no other tensors than those that this module can make.

    Args:
        features: features of sentence-transformers' ``preprocess``.
        is_expanded: whether the texts are expanded ColBERT queries.
    """
    tensor_names = {name for name, value in features.items() if isinstance(value, Tensor)}
    supported_names = _TOKEN_TENSORS | {EXPANDED} if is_expanded else _TOKEN_TENSORS
    has_supported_names = {"input_ids", "attention_mask"} <= tensor_names <= supported_names
    return has_supported_names and features.get("modality") == "text"


def _make_features(encodings: list[Any], plan: _Plan) -> Features:
    """Return packed features of texts, or padded features of expanded ColBERT queries.

    Args:
        encodings: one ``tokenizers.Encoding`` per text.
        plan: how the features are made, with the settings of the tokenisation.
    """
    if len(encodings) == 1 and plan.expansion is None:
        token_ids = encodings[0].ids
        if plan.padding_position_id not in token_ids:  # so that positions are consecutive numbers
            return _make_single_text_features(token_ids, plan)
    ids, lengths = _flatten_ids(encodings)
    if plan.expansion is not None:
        return _make_expanded_features(ids, lengths, plan.expansion) | plan.constants
    offsets = offsets_of(lengths)
    packed = packed_arguments(
        torch.from_numpy(ids),
        torch.from_numpy(_compute_position_ids(ids, offsets, plan.padding_position_id)),
        torch.from_numpy(offsets.astype(np.int32)),
        int(lengths.max(initial=0)),
    )
    return packed | plan.constants


def _flatten_ids(encodings: list[Any]) -> tuple[Int64, Int64]:
    """Return the token ids of texts, ``[T]``, and the number of tokens of each text, ``[B]``."""
    flat_ids = array("i")
    for encoding in encodings:
        # The fastest of the ways tried: 29 ns per token, of which ``encoding.ids`` takes 24.
        flat_ids.fromlist(encoding.ids)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    return np.array(flat_ids, np.int64), lengths


def _make_padded_features(encodings: list[Any], padding: _Padding, constants: Features) -> Features:
    """Return features ``[B, S]`` of texts, padded to the longest one.

    Args:
        encodings: one ``tokenizers.Encoding`` per text.
        padding: how sentence-transformers pads texts, with the names of its features.
        constants: the features that are not tensors, such as the modality.
    """
    ids, lengths = _flatten_ids(encodings)
    longest = int(lengths.max(initial=0))
    positions = np.arange(longest)
    if padding.is_left:
        is_token = positions >= longest - lengths[:, None]
    else:
        is_token = positions < lengths[:, None]
    padded_ids = np.full(is_token.shape, padding.token_id)
    padded_ids[is_token] = ids  # row by row, the order of ``ids``
    values = {
        "input_ids": padded_ids,
        "attention_mask": is_token.astype(np.int64),
        "token_type_ids": np.zeros_like(padded_ids),
    }
    return {
        name: torch.from_numpy(values[name]) if name in values else constants[name]
        for name in padding.names
    }


def _compute_position_ids(ids: Int64, offsets: Int64, padding_position_id: int | None) -> Int64:
    """Return the position ids of packed tokens within their texts, ``[T]``.

    This is :func:`position_ids_of` for arrays on the CPU.

    Args:
        ids: token ids, ``[T]``.
        offsets: offsets of the texts, ``[B + 1]``.
        padding_position_id: the token id and the position id of padding, in models like RoBERTa.
            Padding is not counted, and the first other token of a text has the next position. None
            in other models.
    """
    if padding_position_id is None:
        # No token has the id -1. So all tokens are counted, and the next position is 0.
        padding_position_id = -1
    is_counted = ids != padding_position_id
    n_counted_before = offsets_of(is_counted)  # before each token, and in total: [T + 1]
    n_before_text = np.repeat(n_counted_before[offsets[:-1]], np.diff(offsets))
    n_counted_in_text = n_counted_before[1:] - n_before_text
    positions: Int64 = n_counted_in_text * is_counted + padding_position_id
    return positions


def _make_single_text_features(token_ids: list[int], plan: _Plan) -> Features:
    """Return packed features of one text without padding tokens.

    Args:
        token_ids: the ids of the text's tokens.
        plan: how the features are made, with the model's position id of padding.
    """
    length = len(token_ids)
    first_position = 0 if plan.padding_position_id is None else plan.padding_position_id + 1
    position_ids = np.arange(first_position, first_position + length, dtype=np.int64)
    packed = packed_arguments(
        ids=torch.from_numpy(np.array(token_ids, np.int64)),
        positions=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(np.array([0, length], np.int32)),
        max_seqlen=length,
    )
    return packed | plan.constants


def _are_equal(features: Features, expected: Features) -> bool:
    """Whether two sets of features have the same names and values."""
    if features.keys() != expected.keys():
        return False
    for name, value in expected.items():
        if isinstance(value, Tensor):
            if not torch.equal(value, features[name]):
                return False
        elif value != features[name]:
            return False
    return True


def _make_empty_expanded_query(features: Features) -> Features:
    """Return features of an expanded ColBERT query without tokens of a text, ``[1, L]``.

    Expansion fills a query with mask tokens up to length L. So the features of the empty text end
    in a mask token, which is repeated L times.

    Args:
        features: features of B texts, with tensors ``[B, L]``, among them the empty text.
    """
    return {
        name: value[_EMPTY_PROBE, -1].expand(1, value.size(1))
        for name, value in features.items()
        if isinstance(value, Tensor)
    }


def _make_expanded_features(ids: Int64, lengths: Int64, expansion: Features) -> Features:
    """Return padded features ``[B, L]`` of expanded ColBERT queries.

    The tokens of a query replace the first mask tokens of the expansion.

    Args:
        ids: packed token ids, ``[T]``.
        lengths: the number of tokens of each query, ``[B]``.
        expansion: features of a query without tokens of a text, ``[1, L]``.
    """
    n_queries = len(lengths)
    features = {
        name: np.repeat(tensor.numpy(), n_queries, axis=0) for name, tensor in expansion.items()
    }
    is_token = np.arange(features[EXPANDED].shape[1]) < lengths[:, None]
    features["input_ids"][is_token] = ids  # row by row, the order of packed ids
    features["attention_mask"][is_token] = 1
    features[EXPANDED][is_token] = False
    return {name: torch.from_numpy(values) for name, values in features.items()}


def direct_preprocess_of(model: Model) -> PackedInputs | None:
    """Return the ``preprocess`` that accelerate has put on the model's first module, if any.

    Calling it skips the model's ``preprocess``, which examines the type of every input.

    Args:
        model: the model.

    Returns:
        The replacement, or None if the model's ``preprocess`` must run.
    """
    is_original = type(model).preprocess is BaseModel.preprocess and "preprocess" not in vars(model)
    first_module: Any = next(iter(model.children()), None)
    if first_module is None or not is_original:
        return None
    preprocess = vars(first_module).get("preprocess")
    return preprocess if isinstance(preprocess, PackedInputs) else None


def on_device(features: Mapping[str, object], device: torch.device | str) -> Features:
    """Return features with all tensors moved to a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in features.items()
    }


def packed_features(
    ids: Tensor,
    lengths: Tensor,
    padding_position_id: int | None,
    max_seqlen: int,
) -> Features:
    """Return features of packed tokens, with the names of sentence-transformers' flattened inputs.

    The network takes them as arguments of the same names.

    Args:
        ids: token ids, ``[T]``.
        lengths: the number of tokens of each text, ``[B]``.
        padding_position_id: the position id of padding tokens, in models like RoBERTa that have
            one; None in other models.
        max_seqlen: the number of tokens of the longest text.
    """
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=ids.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
    return packed_arguments(
        ids,
        position_ids_of(ids, cu_seqlens, padding_position_id),
        cu_seqlens,
        max_seqlen,
    )


def pack_features(features: Features, padding_position_id: int | None) -> Features:
    """Convert padded features to packed ones.

    The CPU waits once for the GPU if the features are on a GPU.

    Args:
        features: the output of ``preprocess``.
        padding_position_id: the position id of padding tokens, in models like RoBERTa that have
            one; None in other models.

    Returns:
        Packed features; the features themselves if they are not padded texts, or if there is
        padding between the tokens of a text.
    """
    if not _are_padded_texts(features):
        return features
    is_token = features["attention_mask"] != 0
    lengths = is_token.sum(1)
    token_types = features.get("token_type_ids")
    pooling_mask = features.get(POOLING_MASK)
    summary = _summarize(is_token, lengths, token_types, pooling_mask)
    if summary.max_runs > 1:  # padding between tokens
        return features
    sources = _find_token_sources(is_token, lengths, summary.n_tokens)
    packed_ids = features["input_ids"].long().flatten()[sources]
    packed = packed_features(packed_ids, lengths, padding_position_id, summary.longest)
    if token_types is not None and summary.has_types:  # models use zeros by default
        packed["token_type_ids"] = token_types.flatten()[sources][None]
    if pooling_mask is not None:
        packed[POOLING_MASK] = pooling_mask.flatten()[sources][None]
        packed[POOLED_COUNT] = PooledCount(summary.n_tokens, summary.n_pooled)
    constants = {name: value for name, value in features.items() if name not in _PACKABLE_TENSORS}
    return packed | constants


def _are_padded_texts(features: Features) -> bool:
    """Whether features are padded texts without other tensors that have a value for each token."""
    mask = features.get("attention_mask")
    if mask is None or mask.dim() != 2 or features.get("input_ids") is None:
        return False
    tensor_names = {name for name, value in features.items() if isinstance(value, Tensor)}
    tensor_names.discard("prompt_length")  # has one value
    return tensor_names <= _PACKABLE_TENSORS


def _find_token_sources(is_token: Tensor, lengths: Tensor, n_tokens: int) -> Tensor:
    """Return the position of each token in the flattened padded tensors, ``[T]``.

    ``nonzero`` gives the same, but the CPU would wait for the GPU to learn the number of tokens.

    Args:
        is_token: the mask ``[B, S]``, whose tokens are contiguous in each text.
        lengths: the number of tokens of each text, ``[B]``.
        n_tokens: the number of tokens T of all texts.
    """
    if n_tokens == 0:
        return lengths[:0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    text, position = token_positions(cu_seqlens, n_tokens)
    n_padding_before = is_token.long().argmax(1)  # padding on the left of each text
    padded_length = is_token.size(1)
    return text * padded_length + n_padding_before[text] + position


class _MaskSummary(NamedTuple):
    """Properties of padded texts that packing needs on the CPU.

    Attributes:
        n_tokens: the number of tokens of all texts.
        longest: the number of tokens of the longest text.
        max_runs: the largest number of runs of tokens in a text that padding separates; 1 if the
            tokens of every text are contiguous.
        has_types: whether a token has a type other than 0.
        n_pooled: the number of tokens that are pooled, if not all are.
    """

    n_tokens: int = 0
    longest: int = 0
    max_runs: int = 0
    has_types: bool = False
    n_pooled: int = 0


def _summarize(
    is_token: Tensor,
    lengths: Tensor,
    token_types: Tensor | None,
    pooling_mask: Tensor | None,
) -> _MaskSummary:
    """Compute what packing needs to know of padded texts, with one copy from the device.

    Args:
        is_token: the mask, bool ``[B, S]``.
        lengths: the number of tokens of each text, ``[B]``.
        token_types: the token types ``[B, S]``, if there are any.
        pooling_mask: nonzero for tokens that are pooled ``[B, S]``, if not all are.
    """
    if is_token.numel() == 0:
        return _MaskSummary()
    # A run of tokens begins at a token that follows padding, or at the first position.
    has_token_before = torch.nn.functional.pad(is_token, (1, 0))[:, :-1]
    n_runs = (is_token & ~has_token_before).sum(1)
    zero = lengths.new_zeros(())  # stands for a missing tensor
    has_types = zero if token_types is None else token_types.any().long()
    n_pooled = zero if pooling_mask is None else (is_token & (pooling_mask != 0)).sum()
    values = torch.stack([lengths.sum(), lengths.amax(), n_runs.amax(), has_types, n_pooled])
    n_tokens, longest, max_runs, has_any_type, n_pooled_tokens = values.tolist()
    return _MaskSummary(n_tokens, longest, max_runs, bool(has_any_type), n_pooled_tokens)
