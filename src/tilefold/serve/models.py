"""The models of a service, each loaded once: their tokens, what they take, and how they encode a
batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

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
from tilefold.retrieval.encoding.sparse import encode_stock
from tilefold.retrieval.encoding.truncation import TokenizerCall, counting_truncation, cut_texts
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.serve.bodies import Row, ServeError, Vector, empty, invalid, rows_of, strongest

Kind = Literal["sparse", "multi-vector", "dense"]
Side = Literal["query", "document"]
SIDES: tuple[Side, ...] = ("query", "document")
_FEW = 64  # tokens, up to which the warm-up captures graphs
_UNLIMITED = 1 << 30  # transformers says 1e30 where a tokenizer has no limit


class TextTokens:
    """A copy of a model's tokenizer that neither truncates nor pads, for any thread; it must have a
    fast backend.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import Tokenizer  # a package of transformers

        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
            remedy = "Save its tokenizer.json (transformers.AutoTokenizer with use_fast=True), and serve that."
            raise ValueError(
                f"model: expected a model with a fast tokenizer, got {type(tokenizer).__name__}. {remedy}",
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
        """Tokens of each text with the prompt before it, with special tokens or without."""
        return list(map(len, self._encode([prompt + text for text in texts], special)))

    def tokenize(
        self,
        texts: Sequence[str],
        special: bool,
        prompt: str = "",
        *,
        in_bytes: bool = False,
    ) -> list[list[dict[str, Any]]]:
        """Tokens as ``/tokenize`` answers: id, text, whether special, and where the others start
        and stop.
        """
        whole = [prompt + text for text in texts]
        return [
            _described(text, encoding, _byte_places(text) if in_bytes else range(len(text) + 1))
            for text, encoding in zip(whole, self._encode(whole, special), strict=True)
        ]

    def known(self, ids: Sequence[int]) -> Sequence[int]:
        """Return token ids as they are.

        Raises:
            ServeError: for an id that no token has.
        """
        for id_ in ids:
            if not self.term_names.has_token(id_):
                largest = self.term_names.id_bound - 1
                raise ServeError(
                    "Tokenizer",
                    f"token ids: expected numbers from 0 to {largest} that a token has, got {id_}",
                )
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """The text of token ids."""
        if not ids:
            raise empty("input_ids")
        return str(self._tokenizer.decode(list(self.known(ids)), skip_special_tokens=skip_special))

    def token(self, id_: int) -> str:
        """Return the name of a term: its token, or a name that no other term has."""
        return self.term_names[id_]

    def words(self, text: str) -> set[int]:
        """The ids of the tokens of a text, without special ones."""
        return set(self._encode([text], False)[0].ids) - self.special_ids

    def _encode(self, texts: Sequence[str], special: bool) -> list[Any]:
        try:
            if len(texts) == 1:  # this keeps Python's lock, for which there is a queue
                return [self._tokenizer.encode(texts[0], add_special_tokens=special)]
            return list(self._tokenizer.encode_batch(list(texts), add_special_tokens=special))
        except Exception as error:
            raise ServeError("Tokenizer", f"Tokenization error: {type(error).__name__}") from error


def _described(text: str, encoding: Any, places: Sequence[int]) -> list[dict[str, Any]]:
    rows = zip(
        encoding.ids,
        encoding.tokens,
        encoding.special_tokens_mask,
        encoding.offsets,
        strict=True,
    )
    return [
        {"id": id_, "text": token, "special": True, "start": None, "stop": None}
        if mask
        else {
            "id": id_,
            "text": text[start:stop],
            "special": False,
            "start": places[start],
            "stop": places[stop],
        }
        for id_, token, mask, (start, stop) in rows
    ]


def _byte_places(text: str) -> Sequence[int]:
    """Offset of each code point of a text in its UTF-8, and where the text ends."""
    if text.isascii():
        return range(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return [0, *np.cumsum(sizes).tolist()]


class BatchKey(NamedTuple):
    """BatchKey of encoding a text: texts that share a key share batches."""

    kind: Kind
    side: Side
    prompt: str | None = None  # the name of one to use instead of the side's own
    direction: Literal["left", "right"] = "right"  # from which end an input that is too long is cut
    normalize: bool = True  # let a dense model normalise its vectors, if it does
    ids: bool = False  # inputs are token ids, which the model reads as they are


@dataclass
class Served:
    """A model and what the service knows of it."""

    model: Model  # accelerated where that helps
    kind: Kind
    name: str  # that clients are told; a folder's own name, without the way to it

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
        return str(self.model.device)

    @property
    def dtype(self) -> str:
        """Dtype of its weights, in the words of text-embeddings-inference."""
        return str(
            next((tensor.dtype for tensor in self.model.parameters()), torch.float32),
        ).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """Number type of its matrix products, such as ``"bf16"``, which may be less than its
        weights'.
        """
        return inference_precision(self.model)

    def _call(self, side: Side) -> TokenizerCall:
        """Tokenizer call of the model for a text of this side."""
        with counting_truncation() as seen:
            self.model.preprocess(["a"], task=side)
        return seen.calls[-1] if seen.calls else TokenizerCall(1, (), None)

    def limit(self, side: Side) -> int:
        """The most tokens that the model reads of a text."""
        limit = self._calls[side].max_length
        return limit if limit is not None and 0 < limit < _UNLIMITED else 512

    def is_quick(self, tokens: int) -> bool:
        """Whether a text of so many tokens takes about a millisecond, by a CUDA graph: some were
        captured before.
        """
        graphs = graphs_of(self.model)
        return tokens <= _FEW and graphs is not None and bool(graphs.graphs)

    def lengths(self, key: BatchKey, texts: Sequence[str]) -> list[int]:
        """Tokens of each text with what stands before it, if it is not cut; may be called in any
        thread.
        """
        return self.text.lengths(texts, self.prompt(key), self._calls[key.side].special)

    def batch_key(
        self,
        side: Side,
        prompt_name: str | None,
        direction: Literal["left", "right"] = "right",
        normalize: bool = True,
    ) -> BatchKey:
        """The way of a request; ``prompt_name`` of "query" or "document" chooses the side."""
        if prompt_name in SIDES:
            return BatchKey(self.kind, prompt_name, None, direction, normalize)
        if prompt_name is not None and prompt_name not in self.prompts:
            known = ", ".join(dict.fromkeys([*SIDES, *self.prompts]))
            raise invalid(f"`prompt_name` expected one of {known}; got {prompt_name!r}")
        return BatchKey(self.kind, side, prompt_name, direction, normalize)

    def prompt(self, key: BatchKey) -> str:
        """Prompt before every text of a key."""
        return prompt_of(self.model, key.side, key.prompt) or ""

    @property
    def type(self) -> dict[str, Any]:
        """Type of the model for text-embeddings-inference: a reranker, or how one vector is pooled."""
        if self.kind == "multi-vector":
            return {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
        if self.kind == "sparse":
            return {"embedding": {"pooling": "splade"}}
        modes = [
            mode
            for module in self.model.modules()
            if (mode := getattr(module, "pooling_mode", None))
        ]
        found = modes[-1:] if not modes or isinstance(modes[-1], str) else modes[-1]
        return {
            "embedding": {"pooling": "+".join(found).replace("lasttoken", "last_token") or "mean"},
        }

    def encode(self, key: BatchKey, inputs: Sequence[Any]) -> list[Any]:
        """One row per input, on the CPU: sparse ``(indices, weights)``, token vectors, or a dense
        vector.
        """
        tokenizer = self.model.tokenizer
        stock = tokenizer.truncation_side  # a state, so that one thread alone may encode
        tokenizer.truncation_side = key.direction
        ways: dict[Kind, Callable[[BatchKey, Sequence[Any]], list[Any]]]
        ways = {"sparse": self._sparse, "multi-vector": self._tokens, "dense": self._dense}
        try:
            with nullcontext() if key.normalize else _unnormalized(self.model):
                return ways[self.kind](key, inputs)
        finally:
            tokenizer.truncation_side = stock

    def _sparse(self, key: BatchKey, inputs: Sequence[Any]) -> list[Row]:
        fused = getattr(self.model, "encode_sparse_batch", None)
        if (
            fused is not None and not key.ids
        ):  # no matrix, which takes longer to make than to copy the rows
            found: Any = fused.batch(
                cut_texts(self.model, inputs),
                task=key.side,
                prompt_name=key.prompt,
            ).rows
            offsets, indices = (
                [0, *found.counts.cumsum(0).tolist()],
                found.columns.to(torch.int32).numpy(),
            )
            weights = found.values.float().numpy()
            if (
                weights.size and not 0 <= weights.min() <= weights.max() < np.inf
            ):  # a NaN is the lowest and the highest
                got = f"{weights.min()} to {weights.max()}. Check the model"
                raise ValueError(f"texts: expected finite weights of at least 0, got {got}.")
            return rows_of(offsets, indices, weights)
        if key.ids:
            rows = self._features(key, inputs)["sentence_embedding"].to_dense().float().cpu()
        else:
            made = {"convert_to_tensor": True, "convert_to_sparse_tensor": False}
            rows = encode_stock(self.model, inputs, key.side, prompt_name=key.prompt, **made)
        vectors = SparseVectors.from_torch([str(row) for row in range(len(inputs))], rows)
        parts = rows_of(vectors.indptr.tolist(), vectors.indices, vectors.data)
        # ids, of which no ``encode`` has kept so many
        return (
            [strongest(row, self.model.max_active_dims, None) for row in parts]
            if key.ids
            else parts
        )

    def _tokens(self, key: BatchKey, inputs: Sequence[Any]) -> list[torch.Tensor]:
        if key.ids:
            found = self._features(key, inputs)
            kept = found["attention_mask"].bool()
            encoded = [row[mask] for row, mask in zip(found["token_embeddings"], kept, strict=True)]
        else:
            encoded = encode_stock(self.model, inputs, key.side, prompt_name=key.prompt)
        return _finite([row.detach().float().cpu() for row in encoded], "token vectors")

    def _dense(self, key: BatchKey, inputs: Sequence[Any]) -> list[Vector]:
        if key.ids:
            encoded = self._features(key, inputs)["sentence_embedding"][
                :,
                : self.model.truncate_dim,
            ]
        else:
            encoded = encode_stock(
                self.model,
                inputs,
                key.side,
                prompt_name=key.prompt,
                convert_to_tensor=True,
            )
        return [row.numpy() for row in _finite(list(encoded.detach().float().cpu()), "vectors")]

    def _features(self, key: BatchKey, inputs: Sequence[Sequence[int]]) -> Any:
        """Features of token ids as they are, after the model: no prompt, no special token, no
        expansion of queries.
        """
        limit, padding = self.limit(key.side), self.model.tokenizer.pad_token_id or 0
        cut = [
            torch.tensor(ids[:limit] if key.direction == "right" else ids[-limit:], device="cpu")
            for ids in inputs
        ]
        features: dict[str, Any] = {
            "input_ids": pad_sequence(cut, batch_first=True, padding_value=padding),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in cut], batch_first=True),
            "modality": "text",
            "task": key.side,
        }
        if isinstance(
            getattr(self.model[0], "preprocess", None),
            PackedInputs,
        ):  # of an accelerated encoder
            features = pack_features(features, padding_position(self.model[0].model))
        with torch.inference_mode():
            return self.model(on_device(features, self.model.device), task=key.side)


def _finite(rows: list[torch.Tensor], what: str) -> list[torch.Tensor]:
    """The rows of the inputs; a ``ValueError`` names the first number that is not finite, and which
    input it is of.
    """
    for at, row in enumerate(rows):
        if (wrong := row[~row.isfinite()]).numel():
            found = f"{wrong[0].item()} for input {at}"
            raise ValueError(f"texts: expected finite {what}, got {found}. Check the model.")
    return rows


@contextmanager
def _unnormalized(model: Model) -> Iterator[None]:
    """The model without the modules at its end that make its vectors of length 1."""
    last = itertools.takewhile(
        lambda module: type(module).__name__ == "Normalize",
        reversed(list(model.children())),
    )
    skipped = list(last)
    for module in skipped:
        module.forward = lambda features, **_: features
    try:
        yield
    finally:
        for module in skipped:
            del module.forward
