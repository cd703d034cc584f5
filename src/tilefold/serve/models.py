"""Models of a service: their tokens, limits and prompts, and how they encode a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.precision import inference_precision
from tilefold._internal.typing import Model, Tokenizer
from tilefold._internal.vocabulary import TermNames
from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.integrations.sentence_transformers.packing.inputs import (
    PackedInputs,
    on_device,
    pack_features,
)
from tilefold.integrations.sentence_transformers.streaming.stream import prompt_of
from tilefold.integrations.transformers.packed import padding_position
from tilefold.retrieval.encoding.sparse import encode_with_model_method
from tilefold.retrieval.encoding.truncation import TokenizerCall, counting_truncation, cut_texts
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.serve.bodies import Row, ServeError, Vector, empty, invalid, rows_of, strongest

Kind = Literal["sparse", "multi-vector", "dense"]
Side = Literal["query", "document"]
SIDES: tuple[Side, ...] = ("query", "document")
# Tokens of the longest text for which the warm-up captures CUDA graphs.
_MAX_GRAPH_TOKENS = 64
# A limit of at least this many tokens is none: transformers reports 1e30 for a tokenizer without.
_UNLIMITED = 1 << 30
# Tokens of a text that are read if the tokenizer has no limit.
_DEFAULT_LIMIT = 512


class TextTokens:
    """Copy of a model's tokenizer that neither truncates nor pads; safe to use from any thread.

    Args:
        tokenizer: tokenizer of a model.

    Raises:
        ValueError: if the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Copy the fast backend of a tokenizer, without truncation and padding.

        Args:
            tokenizer: tokenizer of a model, as of transformers.
        """
        from tokenizers import Tokenizer  # a dependency of transformers

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ArgumentError(
                "model",
                f"expected a model with a fast tokenizer, got {type(tokenizer).__name__}. Save its "
                "tokenizer.json (transformers.AutoTokenizer with use_fast=True), and serve that.",
            )
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_ids = set(tokenizer.all_special_ids)
        self.term_names = TermNames(
            self._tokenizer.get_vocab(with_added_tokens=True),
            self._tokenizer.id_to_token,
        )

    def lengths(self, texts: Sequence[str], prompt: str = "", special: bool = True) -> list[int]:
        """Return the number of tokens of each text with the prompt before it."""
        return list(map(len, self._encode([prompt + text for text in texts], special)))

    def tokenize(
        self,
        texts: Sequence[str],
        special: bool,
        prompt: str = "",
        *,
        in_bytes: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """Return the tokens of each text, as ``/tokenize`` answers.

        Args:
            texts: the texts.
            special: whether special tokens such as ``[CLS]`` are added.
            prompt: text before each of the texts.
            in_bytes: whether offsets count bytes of UTF-8, instead of code points.

        Returns:
            For each text its tokens: id, text, whether it is special, and where it starts and stops
            in the prompt and the text.
        """
        full_texts = [prompt + text for text in texts]
        token_lists = []
        for text, encoding in zip(full_texts, self._encode(full_texts, special), strict=True):
            offsets = _byte_offsets(text) if in_bytes else range(len(text) + 1)
            token_lists.append(_describe_tokens(text, encoding, offsets))
        return token_lists

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ``ServeError`` for an id that no token has."""
        for id_ in ids:
            if not self.term_names.has_token(id_):
                largest = self.term_names.id_bound - 1
                raise ServeError(
                    "Tokenizer",
                    f"token ids: expected numbers from 0 to {largest} that a token has, got {id_}",
                )

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of token ids."""
        if not ids:
            raise empty("input_ids")
        self.check_ids(ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, id_: int) -> str:
        """Return the name of a term: its token, or a name that no other term has."""
        return self.term_names[id_]

    def token_ids(self, text: str) -> set[int]:
        """Return the ids of the tokens of a text, without special tokens."""
        (encoding,) = self._encode([text], special=False)
        return set(encoding.ids) - self.special_ids

    def _encode(self, texts: Sequence[str], special: bool) -> list[Any]:
        """Tokenize texts, with or without special tokens such as ``[CLS]``.

        Returns:
            An ``Encoding`` of the package `tokenizers` for each text.

        Raises:
            ServeError: if the tokenizer refuses a text.
        """
        try:
            # For one text, ``encode`` keeps Python's lock, which ``encode_batch`` would wait for.
            if len(texts) == 1:
                return [self._tokenizer.encode(texts[0], add_special_tokens=special)]
            return list(self._tokenizer.encode_batch(list(texts), add_special_tokens=special))
        except Exception as error:
            raise ServeError("Tokenizer", f"Tokenization error: {type(error).__name__}") from error


def _describe_tokens(text: str, encoding: Any, offsets: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tokens of a text, as ``/tokenize`` answers.

    Args:
        text: the text.
        encoding: its encoding by the package `tokenizers`, whose offsets count code points.
        offsets: offset of each code point of the text, and of its end, in the unit of the answer.

    Returns:
        For each token its id and text, whether it is special, and its first offset and its end.
        Special tokens such as ``[CLS]`` have no offsets, because they are no part of the text.
    """
    rows = zip(
        encoding.ids,
        encoding.tokens,
        encoding.special_tokens_mask,
        encoding.offsets,
        strict=True,
    )
    tokens: list[dict[str, Any]] = []
    for token_id, token, is_special, (start, stop) in rows:
        if is_special:
            tokens.append(
                {"id": token_id, "text": token, "special": True, "start": None, "stop": None},
            )
        else:
            tokens.append(
                {
                    "id": token_id,
                    "text": text[start:stop],
                    "special": False,
                    "start": offsets[start],
                    "stop": offsets[stop],
                },
            )
    return tokens


def _byte_offsets(text: str) -> Sequence[int]:
    """Return the offset of each code point of a text in its UTF-8, and of the end of the text."""
    if text.isascii():
        return range(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # UTF-8 takes a second, third and fourth byte from these code points on.
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return [0, *np.cumsum(sizes).tolist()]


class BatchKey(NamedTuple):
    """Encoding of an input; inputs with equal keys share batches.

    Attributes:
        kind: kind of the model.
        side: encode as queries or as documents.
        prompt: name of a prompt that replaces the side's.
        direction: end from which an input that is too long is truncated.
        normalize: whether a dense model normalises its vectors, if it does so by default.
        ids: whether inputs are token ids, which are encoded without a prompt and special tokens.
    """

    kind: Kind
    side: Side
    prompt: str | None = None
    direction: Literal["left", "right"] = "right"
    normalize: bool = True
    ids: bool = False


@dataclass
class Served:
    """Model of a service.

    Attributes:
        model: the model, accelerated where that helps.
        kind: kind of the model.
        name: name that clients see; of a folder the last part of its path.
    """

    model: Model
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        path = Path(self.name)
        self.name = path.resolve().name if path.is_dir() or path.is_absolute() else self.name
        self.text = TextTokens(self.model.tokenizer)
        self.prompts: dict[str, str] = {
            key: value or "" for key, value in (self.model.prompts or {}).items()
        }
        self.model.eval()
        self._calls = {side: self._call(side) for side in SIDES}

    @functools.cached_property
    def device(self) -> str:
        """Device of the model."""
        return str(self.model.device)

    @property
    def dtype(self) -> str:
        """Dtype of the weights, such as ``"float32"``."""
        dtypes = (parameter.dtype for parameter in self.model.parameters())
        return str(next(dtypes, torch.float32)).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """Dtype of the matrix products, such as ``"bf16"``, which may differ from the weights'."""
        return inference_precision(self.model)

    def _call(self, side: Side) -> TokenizerCall:
        """Return the tokenizer call of the model for a text of a side."""
        with counting_truncation() as counts:
            self.model.preprocess(["a"], task=side)
        return counts.calls[-1] if counts.calls else TokenizerCall(1, (), None)

    def limit(self, side: Side) -> int:
        """Return the largest number of tokens that the model reads of a text."""
        limit = self._calls[side].max_length
        if limit is None or not 0 < limit < _UNLIMITED:
            return _DEFAULT_LIMIT
        return limit

    def is_quick(self, tokens: int) -> bool:
        """Return whether a text of ``tokens`` tokens takes about a millisecond, by a CUDA graph."""
        graphs = graphs_of(self.model)
        return tokens <= _MAX_GRAPH_TOKENS and graphs is not None and bool(graphs.graphs)

    def lengths(self, key: BatchKey, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text with its prompt, before truncation.

        It may be called in any thread.
        """
        return self.text.lengths(texts, self.prompt(key), self._calls[key.side].add_special_tokens)

    def batch_key(
        self,
        side: Side,
        prompt_name: str | None,
        direction: Literal["left", "right"] = "right",
        normalize: bool = True,
    ) -> BatchKey:
        """Return the batch key of a request.

        Args:
            side: side of the route.
            prompt_name: name of a prompt, or a side that replaces that of the route.
            direction: end from which inputs are truncated.
            normalize: whether a dense model normalises its vectors.

        Raises:
            ServeError: if the model has no such prompt.
        """
        if prompt_name in SIDES:
            # The other side's encoding, with its own prompt.
            return BatchKey(self.kind, prompt_name, None, direction, normalize)
        if prompt_name is not None and prompt_name not in self.prompts:
            names = ", ".join(dict.fromkeys([*SIDES, *self.prompts]))
            raise invalid(f"`prompt_name` expected one of {names}; got {prompt_name!r}")
        return BatchKey(self.kind, side, prompt_name, direction, normalize)

    def prompt(self, key: BatchKey) -> str:
        """Return the prompt before every text of a batch; empty without one."""
        return prompt_of(self.model, key.side, key.prompt) or ""

    @property
    def type(self) -> dict[str, Any]:
        """Type as in the answer of ``/info``: a reranker, or an embedding with its pooling.

        The form is that of text-embeddings-inference. A late-interaction model is a reranker, whose
        only class has the name that transformers gives by default.
        """
        if self.kind == "multi-vector":
            return {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
        if self.kind == "sparse":
            return {"embedding": {"pooling": "splade"}}
        pooling: str | Sequence[str] = "mean"
        for module in self.model.modules():  # the last pooling counts
            pooling = getattr(module, "pooling_mode", None) or pooling
        if not isinstance(pooling, str):
            pooling = "+".join(pooling)
        return {"embedding": {"pooling": pooling.replace("lasttoken", "last_token")}}

    def encode(self, key: BatchKey, inputs: Sequence[Any]) -> list[Any]:
        """Encode a batch. Only one thread at a time may call this.

        Args:
            key: encoding of all inputs.
            inputs: texts, or lists of token ids.

        Returns:
            One row per input on the CPU: sparse ``(indices, weights)``, token vectors
            ``[tokens, D]``, or a dense vector ``[D]``.
        """
        encode_kind: dict[Kind, Callable[[BatchKey, Sequence[Any]], list[Any]]] = {
            "sparse": self._sparse,
            "multi-vector": self._tokens,
            "dense": self._dense,
        }
        tokenizer = self.model.tokenizer
        previous_side = tokenizer.truncation_side  # state that threads share
        tokenizer.truncation_side = key.direction
        try:
            with nullcontext() if key.normalize else _unnormalized(self.model):
                return encode_kind[self.kind](key, inputs)
        finally:
            tokenizer.truncation_side = previous_side

    def _sparse(self, key: BatchKey, inputs: Sequence[Any]) -> list[Row]:
        """Return the sparse vector of each input.

        There are three ways. An accelerated model encodes texts to packed rows, without a matrix
        ``[B, V]``, which would take longer to create than the rows to copy. Any other model encodes
        texts as sentence-transformers does. Token ids go through the model's modules directly.

        Args:
            key: encoding of all inputs.
            inputs: texts, or lists of token ids if ``key.ids``.
        """
        fused = getattr(self.model, "encode_sparse_batch", None)
        if fused is not None and not key.ids:
            encoded: Any = fused.batch(
                cut_texts(self.model, inputs),
                task=key.side,
                prompt_name=key.prompt,
            ).rows
            offsets = [0, *encoded.counts.cumsum(0).tolist()]
            indices = encoded.columns.to(torch.int32).numpy()
            weights = encoded.values.float().numpy()
            _check_weights(weights)
            return rows_of(offsets, indices, weights)
        if key.ids:
            features = self._forward_token_ids(key, inputs)
            matrix = features["sentence_embedding"].to_dense().float().cpu()
        else:
            matrix = encode_with_model_method(
                self.model,
                inputs,
                key.side,
                prompt_name=key.prompt,
                convert_to_tensor=True,
                convert_to_sparse_tensor=False,
            )
        vectors = SparseVectors.from_torch([str(row) for row in range(len(inputs))], matrix)
        rows = rows_of(vectors.indptr.tolist(), vectors.indices, vectors.data)
        if not key.ids:
            return rows
        # The number of terms is limited by `encode` of sentence-transformers, which was not called.
        return [strongest(row, self.model.max_active_dims, threshold=None) for row in rows]

    def _tokens(self, key: BatchKey, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the token vectors of each input, ``[tokens, D]`` in fp32 on the CPU."""
        if key.ids:
            features = self._forward_token_ids(key, inputs)
            masks = features["attention_mask"].bool()
            encoded = [
                row[mask] for row, mask in zip(features["token_embeddings"], masks, strict=True)
            ]
        else:
            encoded = encode_with_model_method(self.model, inputs, key.side, prompt_name=key.prompt)
        rows = [row.detach().float().cpu() for row in encoded]
        _check_finite(rows, "token vectors")
        return rows

    def _dense(self, key: BatchKey, inputs: Sequence[Any]) -> list[Vector]:
        """Return the dense vector of each input, ``[D]`` in fp32."""
        if key.ids:
            embeddings = self._forward_token_ids(key, inputs)["sentence_embedding"]
            # `encode` of sentence-transformers, which was not called, truncates the dimensions.
            encoded = embeddings[:, : self.model.truncate_dim]
        else:
            encoded = encode_with_model_method(
                self.model,
                inputs,
                key.side,
                prompt_name=key.prompt,
                convert_to_tensor=True,
            )
        rows = list(encoded.detach().float().cpu())
        _check_finite(rows, "vectors")
        return [row.numpy() for row in rows]

    def _forward_token_ids(self, key: BatchKey, inputs: Sequence[Sequence[int]]) -> Any:
        """Call the model with token ids, without a prompt, special tokens or query expansion.

        Args:
            key: encoding of all inputs.
            inputs: token ids of each input; they are truncated to the model's limit.

        Returns:
            The model's features: ``sentence_embedding`` ``[B, D]``, or ``token_embeddings``
            ``[B, S, D]`` with ``attention_mask`` ``[B, S]``.
        """
        limit = self.limit(key.side)
        truncated = []
        for ids in inputs:
            kept_ids = ids[:limit] if key.direction == "right" else ids[-limit:]
            truncated.append(torch.tensor(kept_ids, device="cpu"))
        masks = [torch.ones_like(ids) for ids in truncated]
        padding_id = self.model.tokenizer.pad_token_id or 0
        features: dict[str, Any] = {
            "input_ids": pad_sequence(truncated, batch_first=True, padding_value=padding_id),
            "attention_mask": pad_sequence(masks, batch_first=True),
            "modality": "text",
            "task": key.side,
        }
        preprocess = getattr(self.model[0], "preprocess", None)
        if isinstance(preprocess, PackedInputs):
            # An accelerated model reads texts one after another, without padding.
            features = pack_features(features, padding_position(self.model[0].model))
        with torch.inference_mode():
            return self.model(on_device(features, self.model.device), task=key.side)


def _check_weights(weights: Vector) -> None:
    """Raise a ``ValueError`` for weights that are negative, infinite or NaN."""
    if not weights.size:
        return
    lowest = weights.min()  # NaN if there is a NaN
    highest = weights.max()
    if not 0 <= lowest <= highest < np.inf:
        raise ArgumentError(
            "texts",
            f"expected finite weights of at least 0, got {lowest} to {highest}. Check the model.",
        )


def _check_finite(rows: list[torch.Tensor], content: str) -> None:
    """Raise an error if a number of the encoded inputs is infinite or NaN.

    Args:
        rows: one row per input.
        content: description of the rows, for the error message.

    Raises:
        ValueError: naming the first number that is not finite, and the position of its input.
    """
    for position, row in enumerate(rows):
        not_finite = row[~row.isfinite()]
        if not_finite.numel():
            raise ArgumentError(
                "texts",
                f"expected finite {content}, got {not_finite[0].item()} for input "
                f"{position}. Check the model.",
            )


@contextmanager
def _unnormalized(model: Model) -> Iterator[None]:
    """Skip the normalising modules at the end of a model in this context.

    The ``forward`` of each is replaced by a function that returns its input, and restored at the
    end. Modules called ``Normalize`` in the middle of a model still run.
    """
    skipped: list[Any] = []
    for module in reversed(list(model.children())):
        if type(module).__name__ != "Normalize":
            break
        skipped.append(module)
    for module in skipped:
        module.forward = lambda features, **_: features
    try:
        yield
    finally:
        for module in skipped:
            del module.forward  # the attribute of the instance, which hid the method of the class
