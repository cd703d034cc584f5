"""``encode``, ``encode_sparse_batch`` and ``encode_token_batch`` of an accelerated model: texts through a stream."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from tilefold._typing import Model
from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import base_linear, is_multi_vector
from tilefold.integrations.sentence_transformers._pooling import FusedForward, StockPooling
from tilefold.integrations.sentence_transformers.packed_inputs import packed_inputs
from tilefold.integrations.sentence_transformers.stream import (
    SparseStream,
    TextStream,
    TokenStream,
    VectorStream,
    as_csr,
    encode_batch,
)
from tilefold.integrations.transformers.packed import in_eval_mode
from tilefold.modules.fused_pooling import Options, SparseOptions
from tilefold.pipeline.rows import Batch, Begun, Item, Window, WindowEnd
from tilefold.pipeline.truncated import watched

FIRST_TEXTS = 512  # of the first window, so that the device need not wait long for it
WINDOW_TEXTS = 2048
_USUAL = 32  # the stock batch size, from which on batches are cut by tokens


def sparse_options(model: Model, top_k: int | None, min_weight: float) -> SparseOptions:
    """Options of a row: by default the model's ``max_active_dims`` entries are kept."""
    return SparseOptions(model.max_active_dims if top_k is None else top_k, min_weight)


def prompt_of(model: Model, task: str | None, prompt_name: str | None = None) -> str | None:
    """The prompt that ``encode``, ``encode_query`` and ``encode_document`` choose."""
    if prompt_name is not None:
        if prompt_name not in model.prompts:
            raise ValueError(f"prompt_name must be one of {list(model.prompts)}, got {prompt_name!r}.")
        return str(model.prompts[prompt_name])
    names = {"query": ["query"], "document": ["document", "passage", "corpus"]}.get(task or "", [])
    found = next((name for name in names if name in model.prompts), model.default_prompt_name)
    prompt: str | None = model.prompts.get(found)
    return prompt


def fused_vocab_size(model: Model) -> int | None:
    """V of an accelerated model with an LM head, else None."""
    heads = [fused.head for fused in fused_forwards(model) if fused.head is not None]
    return base_linear(heads[0]).out_features if heads else None


def fused_forwards(model: Model) -> list[FusedForward]:
    """The forwards of an accelerated model's poolings."""
    found = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in found if isinstance(forward, FusedForward)]


def batches_of(stream: TextStream, texts: Sequence[str], progress: Callable[[int], object]) -> Iterator[Batch]:
    """Batches of texts through a stream, longest first; ``places`` are those in `texts`.

    Raises what the model raised for the first text that could not be encoded; `progress` gets numbers of new texts.
    """
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort(descending=True, stable=True)
    starts = [0, *range(FIRST_TEXTS, len(texts), WINDOW_TEXTS), len(texts)]
    windows = [order[start:stop].tolist() for start, stop in itertools.pairwise(starts)]
    with closing(stream(Window([texts[i] for i in window]) for window in windows)) as items:
        for item in items:
            if isinstance(item, (Begun, WindowEnd)):
                continue
            if isinstance(item.rows, Exception):
                raise item.rows
            if (watch := watched()) is not None:  # of who called, whose thread tokenises nothing itself
                watch.add(len(item.places), item.cut, item.max_length)
            window = windows[item.window]
            yield item._replace(places=[window[place] for place in item.places])
            progress(len(item.places))


class SparseBatchEncoder(Replacement):
    """``encode_sparse_batch`` of an accelerated SparseEncoder, by which others need not know tilefold."""

    def __call__(
        self, texts: Sequence[str], *, task: str | None = None, top_k: int | None = None, min_weight: float = 0.0
    ) -> Tensor:
        """``[len(texts), V]`` CSR on the CPU, in one forward pass; arguments as in ``encode_sparse``."""
        options = sparse_options(self.owner, top_k, min_weight)
        with in_eval_mode(self.owner):
            batch = encode_batch(self.owner, texts, task, prompt_of(self.owner, task), options)
        return as_csr([batch], len(texts), 0)

    @property
    def vocab_size(self) -> int | None:
        """V, if the model has an LM head."""
        return fused_vocab_size(self.owner)

    def stream(
        self,
        windows: Iterable[Window],
        *,
        task: str | None = None,
        top_k: int | None = None,
        min_weight: float = 0.0,
        **limits: int | None,
    ) -> Generator[Item, None, None]:
        """Rows of many texts; ``batch_size`` and ``batch_tokens`` as :class:`TextStream` takes them."""
        options = sparse_options(self.owner, top_k, min_weight)
        with in_eval_mode(self.owner):
            stream = SparseStream(self.owner, options, task=task, prompt=prompt_of(self.owner, task), **limits)
            yield from stream(windows)


class TokenBatchEncoder(Replacement):
    """``encode_token_batch`` of an accelerated MultiVectorEncoder."""

    def stream(
        self, windows: Iterable[Window], *, task: str, storage: str, **limits: int | None
    ) -> Generator[Item, None, None]:
        """Token vectors of many texts, stored as ``"fp16"`` or ``"int8"``; limits as for sparse rows."""
        with in_eval_mode(self.owner):
            stream = TokenStream(self.owner, storage, task=task, prompt=prompt_of(self.owner, task), **limits)
            yield from stream(windows)


class FusedEncode(Replacement):
    """Replaces ``encode`` of one model: more texts than ``batch_size`` go through a stream, all else is as stock.

    A ``batch_size`` below 32 bounds the texts of a batch; otherwise batches hold a number of tokens that suits the
    device. The stream serves no inputs but strings, not several processes, and no options of the processor.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Arguments and result of the stock ``encode``."""
        model, stock = self.owner, type(self.owner).encode
        asked = _served(stock, model, args, kwargs)
        if asked is None:
            with packed_inputs():
                return stock(model, *args, **kwargs)
        model.eval()
        size: int = asked["batch_size"]
        prompt = model._resolve_prompt(asked["prompt"], asked["prompt_name"])
        how = {"prompt": prompt, "batch_size": size if size < _USUAL else None}
        show = asked["show_progress_bar"]
        if show is None:
            show = logging.getLogger(stock.__module__).getEffectiveLevel() <= logging.INFO
        return (_vectors if is_multi_vector(model) else _rows)(model, asked, how, show)


def _served(stock: Any, model: Model, args: tuple[object, ...], kwargs: Options) -> Options | None:
    """The arguments of a call by name if it is for more than one batch of strings, on the model's device, here."""
    try:
        given = inspect.signature(stock).bind(model, *args, **kwargs)
    except TypeError:  # of which the stock method tells
        return None
    given.apply_defaults()
    asked = given.arguments
    texts, size = asked.get("inputs"), asked["batch_size"]
    if not (isinstance(texts, list) and isinstance(size, int) and len(texts) > size > 0):
        return None
    here = asked.get("device") is None or asked["device"] in (model.device, str(model.device))
    here = here and asked.get("pool") is None and getattr(model, "_distributed_inference", None) is None
    if not here or not all(isinstance(text, str) for text in texts):
        return None
    if is_multi_vector(model):  # no raw features, and no pooling of tokens for this call
        plain = asked.get("output_value") == "token_embeddings" and asked.get("token_pooling") is None
        return asked if plain and not asked["kwargs"] else None
    fused = fused_forwards(model)
    splade = bool(fused) and all(isinstance(forward.pooling, StockPooling) and forward.last for forward in fused)
    return asked if splade and not set(asked["kwargs"]) - {"task"} else None


def _shown(stream: TextStream, texts: list[str], show: bool, title: str) -> Iterator[Batch]:
    """Batches of the texts, under a progress bar."""
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]  # the one of stock

    with tqdm(total=len(texts), desc=title, disable=not show) as shown:
        yield from batches_of(stream, texts, shown.update)


def _rows(model: Model, asked: Options, how: Options, show: bool) -> object:
    options, texts = sparse_options(model, asked["max_active_dims"], 0.0), asked["inputs"]
    stream = SparseStream(model, options, task=asked["kwargs"].get("task"), **how)
    rows = as_csr(list(_shown(stream, texts, show, "Texts")), len(texts), 0)
    found = _as_coo(rows, torch.device("cpu") if asked["save_to_cpu"] else model.device)
    if not asked["convert_to_sparse_tensor"]:
        found = found.to_dense()
    return found if asked["convert_to_tensor"] else list(found)


def _vectors(model: Model, asked: Options, how: Options, show: bool) -> object:
    texts, task, numpy = asked["inputs"], asked["task"], bool(asked["convert_to_numpy"])
    stream = VectorStream(model, to_host=numpy, normalize=bool(asked["normalize_embeddings"]), task=task, **how)
    found: list[object] = [None] * len(texts)
    for batch in _shown(stream, texts, show, f"Encoding {'queries' if task == 'query' else 'documents'}"):
        for place, vectors in zip(batch.places, batch.rows, strict=True):
            found[place] = _as_numpy(vectors) if numpy else vectors
    return found


def _as_coo(rows: Tensor, device: torch.device) -> Tensor:
    """CSR on the CPU as coalesced COO on `device`, as ``encode`` returns it."""
    counts = rows.crow_indices().diff()
    of_row = torch.repeat_interleave(torch.arange(rows.size(0)), counts)
    indices = torch.stack([of_row, rows.col_indices().long()]).to(device)
    return torch.sparse_coo_tensor(
        indices, rows.values().to(device), tuple(rows.shape), is_coalesced=True, check_invariants=False
    )


def _as_numpy(vectors: Tensor) -> object:
    return (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).numpy()
