"""Models of a service: their tokenizers, limits and prompts, and the encoding of batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.precision import inference_precision
from tilefold._internal.tokenizer_copies import copy_tokenizer
from tilefold._internal.typing import Model, Tokenizer
from tilefold._internal.vocabulary import TermNames
from tilefold.integrations.sentence_transformers import is_accelerated
from tilefold.integrations.sentence_transformers.graphs.encoding import graphs_of
from tilefold.integrations.sentence_transformers.packing.inputs import (
    PackedInputs,
    on_device,
    pack_features,
)
from tilefold.integrations.sentence_transformers.streaming.stream import prompt_of
from tilefold.integrations.transformers.packed import padding_position
from tilefold.retrieval.encoding.pages import encode_images, encodes_images
from tilefold.retrieval.encoding.sparse import encode_with_model_method
from tilefold.retrieval.encoding.truncation import TokenizerCall, counting_truncation, shorten_texts
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.serve.bodies import (
    Row,
    ServeError,
    Vector,
    empty_input_error,
    invalid_input_error,
    keep_largest,
    split_rows,
)
from tilefold.serve.images import ImageInput

Kind = Literal["sparse", "multi-vector", "dense"]
Side = Literal["query", "document"]
SIDES: tuple[Side, ...] = ("query", "document")
# Length in tokens of the longest text for which the warm-up captures CUDA graphs.
_MAX_GRAPH_TOKENS = 64
# transformers reports a limit of 1e30 tokens for a tokenizer that has no limit.
_UNLIMITED = 1 << 30
# Number of tokens of a text that are read if the tokenizer has no limit.
_DEFAULT_LIMIT = 512


class TextTokens:
    """Copy of a model's tokenizer that neither truncates nor pads; safe to use from any thread.

    Attributes:
        special_ids: ids of special tokens such as ``[CLS]``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Copy the fast backend of a tokenizer, without truncation and padding.

        Args:
            tokenizer: the model's tokenizer, of transformers.

        Raises:
            ValueError: if the tokenizer has no fast backend.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ArgumentError(
                "model",
                f"expected a model with a fast tokenizer, got {type(tokenizer).__name__}. Save its "
                "tokenizer.json (transformers.AutoTokenizer with use_fast=True), and serve that.",
            )
        self._tokenizer = copy_tokenizer(backend)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_ids = set(tokenizer.all_special_ids)

    @functools.cached_property
    def term_names(self) -> TermNames:
        """The names of the model's terms."""
        return TermNames(
            self._tokenizer.get_vocab(with_added_tokens=True),
            self._tokenizer.id_to_token,
        )

    def lengths(
        self,
        texts: Sequence[str],
        prompt: str = "",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the number of tokens of each text with a prompt before it.

        Args:
            texts: the texts.
            prompt: text that is put before each of them.
            add_special_tokens: whether special tokens are added and counted.
        """
        full_texts = [prompt + text for text in texts]
        return list(map(len, self._encode(full_texts, add_special_tokens)))

    def tokenize(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        prompt: str = "",
        *,
        in_bytes: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """Return the tokens of each text in the format of ``/tokenize``.

        Args:
            texts: the texts.
            add_special_tokens: whether special tokens such as ``[CLS]`` are added.
            prompt: text that is put before each text.
            in_bytes: whether offsets count bytes of UTF-8, instead of code points.

        Returns:
            For each text, a dictionary for each token: its id, its text, whether it is special, and
            its start and stop in the prompt and the text.
        """
        full_texts = [prompt + text for text in texts]
        encodings = self._encode(full_texts, add_special_tokens)
        token_lists = []
        for text, encoding in zip(full_texts, encodings, strict=True):
            offsets = _byte_offsets(text) if in_bytes else range(len(text) + 1)
            token_lists.append(_describe_tokens(text, encoding, offsets))
        return token_lists

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ``ServeError`` if no token has one of the ids."""
        for id_ in ids:
            if not self.term_names.has_token(id_):
                largest = self.term_names.id_bound - 1
                raise ServeError(
                    "Tokenizer",
                    f"token ids: expected numbers from 0 to {largest} that a token has, got {id_}",
                )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        if not ids:
            raise empty_input_error("input_ids")
        self.check_ids(ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def term_name(self, term: int) -> str:
        """Return the name of a term: its token, or a name that no other term has."""
        return self.term_names[term]

    def token_ids(self, text: str) -> set[int]:
        """Return the ids of the tokens of a text, without special tokens."""
        (encoding,) = self._encode([text], add_special_tokens=False)
        return set(encoding.ids) - self.special_ids

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        """Tokenize texts.

        Args:
            texts: the texts.
            add_special_tokens: whether special tokens such as ``[CLS]`` are added.

        Returns:
            An ``Encoding`` of the package `tokenizers` for each text.

        Raises:
            ServeError: if the tokenizer refuses a text.
        """
        try:
            if len(texts) == 1:
                # encode() holds the GIL. encode_batch() releases it, and must wait to get it back.
                encoding = self._tokenizer.encode(texts[0], add_special_tokens=add_special_tokens)
                return [encoding]
            encodings: list[Any] = self._tokenizer.encode_batch(
                list(texts),
                add_special_tokens=add_special_tokens,
            )
            return encodings
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust tokenizer is not an Exception
            raise ServeError("Tokenizer", f"Tokenization error: {type(error).__name__}") from error


def _describe_tokens(text: str, encoding: Any, offsets: Sequence[int]) -> list[dict[str, Any]]:
    """Return the tokens of a text in the format of ``/tokenize``.

    Args:
        text: the text.
        encoding: the text's ``Encoding`` of the package `tokenizers`. Its offsets count code
            points.
        offsets: offsets of each code point and of the end of the text, in the unit of the response.

    Returns:
        A dictionary for each token: its id, its text, whether it is special, and its start and
        stop. Special tokens such as ``[CLS]`` are not part of the text, and have no offsets.
    """
    tokens = zip(
        encoding.ids,
        encoding.tokens,
        encoding.special_tokens_mask,
        encoding.offsets,
        strict=True,
    )
    return [
        {
            "id": token_id,
            "text": token if is_special else text[start:stop],
            "special": bool(is_special),
            "start": None if is_special else offsets[start],
            "stop": None if is_special else offsets[stop],
        }
        for token_id, token, is_special, (start, stop) in tokens
    ]


def _byte_offsets(text: str) -> Sequence[int]:
    """Return the offsets of each code point and of the end of a text in its UTF-8 bytes."""
    if text.isascii():  # one byte per code point
        return range(len(text) + 1)
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # A code point has one byte in UTF-8, and another one for each of these values that it exceeds.
    byte_counts = np.ones(len(code_points), np.int64)
    for largest in (0x7F, 0x7FF, 0xFFFF):
        byte_counts += code_points > largest
    return [0, *np.cumsum(byte_counts).tolist()]


class BatchKey(NamedTuple):
    """How an input is encoded. Inputs with equal keys may share a batch.

    Attributes:
        model: the model. While a model is replaced, batches of the old and the new one may wait.
        side: whether inputs are encoded as queries or as documents.
        prompt_name: name of a prompt that replaces the prompt of the side.
        truncation_side: end from which an input that is too long is truncated.
        normalize: whether a dense model normalises its vectors, if it does so by default.
        has_token_ids: whether inputs are token ids, which are encoded without a prompt and special
            tokens. Otherwise inputs are texts or images.
        has_images: whether inputs are images.
    """

    model: Served
    side: Side
    prompt_name: str | None = None
    truncation_side: Literal["left", "right"] = "right"
    normalize: bool = True
    has_token_ids: bool = False
    has_images: bool = False


@dataclass(eq=False)
class Served:
    """Model of a service.

    Attributes:
        model: the model, which may be accelerated.
        kind: kind of the model.
        name: name that clients see. If it is the path of a folder, clients see its last part.
        tokenizer: the tokenizer.
        prompts: prompt name -> prompt.
    """

    model: Model
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        """Put the model into eval mode, and find out how it tokenises queries and documents.

        For this, it preprocesses a sample, and the call of its tokenizer is recorded.
        """
        path = Path(self.name)
        is_local_folder = path.is_dir() or path.is_absolute()
        if is_local_folder:  # clients are not told where it is
            self.name = path.resolve().name
        self.tokenizer = TextTokens(self.model.tokenizer)
        self.prompts: dict[str, str] = {
            key: value or "" for key, value in (self.model.prompts or {}).items()
        }
        self.model.eval()
        query_call = self._sample_call("query")
        # A model of page images encodes texts as queries only. Its documents are images.
        document_call = query_call if self.takes_images else self._sample_call("document")
        self._calls: dict[Side, TokenizerCall] = {"query": query_call, "document": document_call}

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

    @property
    def invariant(self) -> dict[str, str] | None:
        """The device and the libraries that decide the bits of vectors.

        It is None unless the model computes the same bits for a text in every batch.
        """
        invariance = getattr(self.model, "invariance", None)  # set by accelerate(invariant=True)
        return None if invariance is None else dict(invariance.environment())

    @property
    def acceleration(self) -> dict[str, object] | None:
        """Whether batches have no padding, and the number of CUDA graphs that encode few texts.

        It is None for a model that is not accelerated.
        """
        if not is_accelerated(self.model):
            return None
        graphs = graphs_of(self.model)
        return {
            "packed": any(map(_runs_packed, self.model.modules())),
            "graphs": 0 if graphs is None else len(graphs.graphs),
        }

    def _sample_call(self, side: Side) -> TokenizerCall:
        """Preprocess a text to learn how the model calls its tokenizer for queries or documents.

        The options of that call, such as the largest number of tokens, are not stored anywhere else
        in the model.
        """
        with counting_truncation() as counts:  # records the calls of tokenizers
            self.model.preprocess(["a"], task=side)
        return counts.calls[-1] if counts.calls else TokenizerCall(1, (), None)

    def limit(self, side: Side) -> int:
        """Return the largest number of tokens that the model reads of a query or document."""
        limit = self._calls[side].max_length
        if limit is None or not 0 < limit < _UNLIMITED:
            return _DEFAULT_LIMIT
        return limit

    @property
    def takes_images(self) -> bool:
        """Whether the model encodes images to token vectors."""
        return self.kind == "multi-vector" and encodes_images(self.model)

    def image_tokens(self, image: ImageInput) -> int:
        """Return the number of tokens of an image from its size, without preprocessing it.

        Any thread may call this. The method of transformers was added for vLLM.

        Raises:
            ServeError: if the model refuses images of this size, for example very narrow ones.
        """
        width, height = image.image.size
        try:
            counts = self.model.processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        except ValueError as error:
            raise ServeError(
                "Validation",
                f"the model takes no image of {width} x {height} pixels: {error}",
            ) from error
        return int(counts["num_image_tokens"][0])

    def is_quick(self, tokens: int) -> bool:
        """Return whether a CUDA graph encodes a text of this length in about a millisecond."""
        graphs = graphs_of(self.model)
        return tokens <= _MAX_GRAPH_TOKENS and graphs is not None and bool(graphs.graphs)

    def lengths(self, key: BatchKey, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text with its prompt, before truncation.

        Any thread may call this.
        """
        add_special_tokens = self._calls[key.side].add_special_tokens
        return self.tokenizer.lengths(texts, self.prompt(key), add_special_tokens)

    def batch_key(
        self,
        side: Side,
        prompt_name: str | None,
        truncation_side: Literal["left", "right"] = "right",
        normalize: bool = True,
    ) -> BatchKey:
        """Return the batch key for texts of a request. Requests with equal keys share batches.

        Args:
            side: side of the route.
            prompt_name: name of a prompt; or ``"query"`` or ``"document"``, which override the side
                of the route.
            truncation_side: end from which inputs are truncated.
            normalize: whether a dense model normalises its vectors.

        Raises:
            ServeError: if the model has no such prompt.
        """
        if prompt_name in SIDES:
            side = prompt_name
            prompt_name = None
        elif prompt_name is not None and prompt_name not in self.prompts:
            names = ", ".join(dict.fromkeys([*SIDES, *self.prompts]))
            raise invalid_input_error(f"`prompt_name` expected one of {names}; got {prompt_name!r}")
        return BatchKey(
            self,
            side,
            prompt_name=prompt_name,
            truncation_side=truncation_side,
            normalize=normalize,
        )

    def prompt(self, key: BatchKey) -> str:
        """Return the prompt that is put before every text of a batch; it may be empty."""
        return prompt_of(self.model, key.side, key.prompt_name) or ""

    @property
    def type(self) -> dict[str, Any]:
        """Type of the model in the response of ``/info``, in text-embeddings-inference's format.

        That format has no type for late-interaction models. They are reported as rerankers with
        transformers' default label.
        """
        if self.kind == "multi-vector":
            return {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
        pooling = "splade" if self.kind == "sparse" else self._dense_pooling()
        return {"embedding": {"pooling": pooling}}

    def _dense_pooling(self) -> str:
        """Return text-embeddings-inference's name for the pooling of a dense model."""
        modes = [getattr(module, "pooling_mode", None) for module in self.model.modules()]
        # The last module that pools determines the vector.
        mode = next((mode for mode in reversed(modes) if mode), "mean")
        name = mode if isinstance(mode, str) else "+".join(mode)
        return name.replace("lasttoken", "last_token")

    def encode(self, key: BatchKey, inputs: Sequence[Any]) -> list[Any]:
        """Encode a batch. Only one thread at a time may call this.

        Args:
            key: how all inputs are encoded.
            inputs: texts, lists of token ids if ``key.has_token_ids``, or instances of
                :class:`ImageInput` if ``key.has_images``.

        Returns:
            For each input on the CPU, a sparse :class:`Row`, token vectors ``[tokens, D]``, or a
            dense vector ``[D]``.
        """
        encode_kind: dict[Kind, Callable[[BatchKey, Sequence[Any]], list[Any]]] = {
            "sparse": self._encode_sparse,
            "multi-vector": self._encode_tokens,
            "dense": self._encode_dense,
        }
        tokenizer = self.model.tokenizer
        default_truncation_side = tokenizer.truncation_side
        tokenizer.truncation_side = key.truncation_side
        try:
            with nullcontext() if key.normalize else _without_normalization(self.model):
                return encode_kind[self.kind](key, inputs)
        finally:
            tokenizer.truncation_side = default_truncation_side

    def _encode_sparse(self, key: BatchKey, inputs: Sequence[Any]) -> list[Row]:
        """Return the sparse vector of each input.

        Args:
            key: how all inputs are encoded.
            inputs: texts, or lists of token ids if ``key.has_token_ids``.
        """
        if key.has_token_ids:
            return self._sparse_rows_of_token_ids(key, inputs)
        if hasattr(self.model, "encode_sparse_batch"):
            return self._accelerated_sparse_rows(key, inputs)
        matrix = encode_with_model_method(
            self.model,
            inputs,
            key.side,
            prompt_name=key.prompt_name,
            convert_to_tensor=True,
            convert_to_sparse_tensor=False,
        )
        return _sparse_rows_of(matrix)

    def _accelerated_sparse_rows(self, key: BatchKey, texts: Sequence[str]) -> list[Row]:
        """Encode texts with an accelerated model, whose sparse vectors are packed (CSR).

        No matrix ``[B, V]`` is created, which would take longer than copying the active terms.

        Args:
            key: how all texts are encoded: their side, prompt and truncation.
            texts: the texts.
        """
        model: Any = self.model
        packed = model.encode_sparse_batch.encode_rows(
            shorten_texts(model, texts),
            task=key.side,
            prompt_name=key.prompt_name,
        )
        weights = packed.values.float().numpy()
        _check_weights(weights)
        return split_rows(
            [0, *packed.counts.cumsum(0).tolist()],
            packed.columns.to(torch.int32).numpy(),
            weights,
        )

    def _sparse_rows_of_token_ids(
        self,
        key: BatchKey,
        inputs: Sequence[Sequence[int]],
    ) -> list[Row]:
        """Encode lists of token ids, by calling the model's modules, to sparse vectors.

        Args:
            key: how all inputs are encoded: their side and truncation.
            inputs: lists of token ids.
        """
        features = self._forward_token_ids(key, inputs)
        rows = _sparse_rows_of(features["sentence_embedding"].to_dense().float().cpu())
        # `encode` of sentence-transformers, which would limit the terms, was not called.
        max_terms = self.model.max_active_dims
        return [keep_largest(row, max_terms, threshold=None) for row in rows]

    def _encode_tokens(self, key: BatchKey, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the token vectors ``[tokens, D]`` of each input, in fp32 on the CPU.

        Args:
            key: how all inputs are encoded.
            inputs: texts, lists of token ids, or images, as `key` says.
        """
        if key.has_images:
            encoded = encode_images(self.model, [item.image for item in inputs], key.side)
        elif key.has_token_ids:
            features = self._forward_token_ids(key, inputs)
            masks = features["attention_mask"].bool()
            encoded = [
                vectors[mask]
                for vectors, mask in zip(features["token_embeddings"], masks, strict=True)
            ]
        else:
            encoded = encode_with_model_method(
                self.model, inputs, key.side, prompt_name=key.prompt_name
            )
        rows = [row.detach().float().cpu() for row in encoded]
        _check_finite(rows, "token vectors")
        return rows

    def _encode_dense(self, key: BatchKey, inputs: Sequence[Any]) -> list[Vector]:
        """Return the dense vector ``[D]`` of each input, in fp32.

        Args:
            key: how all inputs are encoded.
            inputs: texts, or lists of token ids if ``key.has_token_ids``.
        """
        if key.has_token_ids:
            embeddings = self._forward_token_ids(key, inputs)["sentence_embedding"]
            # `encode` of sentence-transformers, which would truncate vectors, was not called.
            encoded = embeddings[:, : self.model.truncate_dim].float().cpu().numpy()
        else:
            encoded = encode_with_model_method(
                self.model,
                inputs,
                key.side,
                prompt_name=key.prompt_name,
                convert_to_numpy=True,  # a CUDA graph has copied them to the CPU already
            )
        vectors = np.asarray(encoded, np.float32)
        if not np.isfinite(vectors).all():
            _check_finite(list(torch.from_numpy(vectors)), "vectors")
        return list(vectors)

    def _forward_token_ids(self, key: BatchKey, inputs: Sequence[Sequence[int]]) -> Any:
        """Call the model with token ids, without a prompt, special tokens or query expansion.

        Args:
            key: how all inputs are encoded: their side, and the end from which they are truncated.
            inputs: token ids of each input, which are truncated to the model's limit.

        Returns:
            The model's features: ``sentence_embedding`` ``[B, D]``, or ``token_embeddings``
            ``[B, S, D]`` with ``attention_mask`` ``[B, S]``.
        """
        limit = self.limit(key.side)
        truncated = []
        for ids in inputs:
            kept_ids = ids[:limit] if key.truncation_side == "right" else ids[-limit:]
            truncated.append(torch.tensor(kept_ids, device="cpu"))
        masks = [torch.ones_like(ids) for ids in truncated]
        padding_id = self.model.tokenizer.pad_token_id or 0
        features: dict[str, Any] = {
            "input_ids": pad_sequence(truncated, batch_first=True, padding_value=padding_id),
            "attention_mask": pad_sequence(masks, batch_first=True),
            "modality": "text",
            "task": key.side,
        }
        if _runs_packed(self.model[0]):  # it reads texts without padding
            features = pack_features(features, padding_position(self.model[0].model))
        with torch.inference_mode():
            return self.model(on_device(features, self.model.device), task=key.side)


def _runs_packed(module: torch.nn.Module) -> bool:
    """Whether ``accelerate`` lets a module read texts without padding."""
    return isinstance(vars(module).get("preprocess"), PackedInputs)


def _sparse_rows_of(matrix: torch.Tensor) -> list[Row]:
    """Return the non-zero entries of each row of a dense matrix ``[B, V]``."""
    vectors = SparseVectors.from_torch([str(row) for row in range(len(matrix))], matrix)
    return split_rows(vectors.indptr.tolist(), vectors.indices, vectors.data)


def _check_weights(weights: Vector) -> None:
    """Raise a ``ValueError`` if a weight is negative, infinite or NaN."""
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
    """Check that the encoded inputs have finite numbers only.

    Args:
        rows: the vector or token vectors of each input.
        content: description of the rows, for the error message.

    Raises:
        ValueError: if a number is infinite or NaN. The message has the position of its input.
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
def _without_normalization(model: Model) -> Iterator[None]:
    """Skip the ``Normalize`` modules at the end of a model while the context is open.

    Their ``forward`` methods are replaced by a function that returns its input. ``Normalize``
    modules in the middle of the model still run. CUDA graphs, which have captured the replaced
    methods, are not used.
    """
    skipped: list[Any] = []
    for module in reversed(list(model.children())):
        if type(module).__name__ != "Normalize":
            break
        skipped.append(module)
    # A forward that was set on the instance, as `accelerate(invariant=True)` does, must be set
    # again afterwards. It is None for a module with the method of its class.
    replaced_forwards = [vars(module).get("forward") for module in skipped]
    graphs = graphs_of(model)
    without_graphs: AbstractContextManager[None] = nullcontext()
    if skipped and graphs is not None:
        without_graphs = graphs.paused()
    for module in skipped:
        module.forward = lambda features, **_: features
    try:
        with without_graphs:
            yield
    finally:
        for module, forward in zip(skipped, replaced_forwards, strict=True):
            if forward is None:
                del module.forward  # the instance's attribute, which has hidden the class's method
            else:
                module.forward = forward
