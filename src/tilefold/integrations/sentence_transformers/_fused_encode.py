"""``encode`` of an accelerated SparseEncoder or MultiVectorEncoder: many texts in a stream, all else as stock."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from tilefold._typing import Model
from tilefold.integrations.sentence_transformers._batch import sparse_options
from tilefold.integrations.sentence_transformers._many import batches_of, encode_many
from tilefold.integrations.sentence_transformers._packed_inputs import packed_inputs
from tilefold.integrations.sentence_transformers._pooling import FusedForward, StockPooling
from tilefold.integrations.sentence_transformers._token_stream import VectorStream

_USUAL = 32  # the stock batch size, from which on batches are cut by tokens


class StreamedEncode(ABC):
    """Replaces ``encode`` of one model; not a module, so the state dict does not change.

    More texts than ``batch_size`` go through a stream. A ``batch_size`` below 32 bounds the texts of a batch; otherwise
    batches hold a number of tokens that suits the device. What the stream cannot serve (other inputs than strings,
    several processes, options of the processor) goes to the stock method.

    Args:
        model: the model.
        logger: of the stock method, whose level decides about progress bars.
    """

    def __init__(self, model: Model, logger: str) -> None:
        self.model, self.logger = model, logging.getLogger(f"sentence_transformers.{logger}.model")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and result of the stock ``encode``."""
        model, stock = self.model, type(self.model).encode
        asked = _asked_of(stock, model, args, kwargs)
        if asked is None or not _serves_texts(model, asked) or not self._serves(asked):
            with packed_inputs():
                return stock(model, *args, **kwargs)
        model.eval()
        size: int = asked["batch_size"]
        prompt = model._resolve_prompt(asked["prompt"], asked["prompt_name"])
        return self._encoded(asked, prompt, size if size < _USUAL else None)

    @abstractmethod
    def _serves(self, asked: dict[str, Any]) -> bool:
        """Whether the stream gives what is asked for."""

    @abstractmethod
    def _encoded(self, asked: dict[str, Any], prompt: str | None, batch_size: int | None) -> Any:
        """The result, by the stream."""

    def _bar(self, asked: dict[str, Any], title: str) -> Any:
        """A progress bar of texts; by default where the stock method shows one."""
        from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]  # the one of stock

        show = asked["show_progress_bar"]
        show = self.logger.getEffectiveLevel() <= logging.INFO if show is None else show
        return tqdm(total=len(asked["inputs"]), desc=title, disable=not show)


class FusedEncode(StreamedEncode):
    """``encode`` of a SparseEncoder; poolings other than SpladePooling go to the stock method.

    Args:
        model: the SparseEncoder.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model, "sparse_encoder")

    def _serves(self, asked: dict[str, Any]) -> bool:
        if set(asked["kwargs"]) - {"task"}:
            return False
        forwards = [vars(module).get("forward") for module in self.model.modules() if "forward" in vars(module)]
        fused = [forward for forward in forwards if isinstance(forward, FusedForward)]
        return bool(fused) and all(isinstance(forward.pooling, StockPooling) and forward.last for forward in fused)

    def _encoded(self, asked: dict[str, Any], prompt: str | None, batch_size: int | None) -> Any:
        options = sparse_options(self.model, asked["max_active_dims"], 0.0)
        task, limits = asked["kwargs"].get("task"), {"batch_size": batch_size}
        with self._bar(asked, "Texts") as shown:
            rows = encode_many(self.model, asked["inputs"], task, prompt, options, limits, 0, shown.update)
        found = _as_coo(rows, torch.device("cpu") if asked["save_to_cpu"] else self.model.device)
        if not asked["convert_to_sparse_tensor"]:
            found = found.to_dense()
        return found if asked["convert_to_tensor"] else list(found)


class FusedTokenEncode(StreamedEncode):
    """``encode`` of a MultiVectorEncoder; raw features, and pooling of tokens for this call, go to the stock method.

    Args:
        model: the MultiVectorEncoder.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model, "multi_vector_encoder")

    def _serves(self, asked: dict[str, Any]) -> bool:
        plain = asked.get("output_value") == "token_embeddings" and asked.get("token_pooling") is None
        return plain and not asked["kwargs"]

    def _encoded(self, asked: dict[str, Any], prompt: str | None, batch_size: int | None) -> Any:
        texts, numpy, task = asked["inputs"], bool(asked["convert_to_numpy"]), asked["task"]
        kept = {"to_host": numpy, "normalize": bool(asked["normalize_embeddings"])}
        stream = VectorStream(self.model, **kept, task=task, prompt=prompt, batch_size=batch_size)
        found: list[Any] = [None] * len(texts)
        with self._bar(asked, f"Encoding {'queries' if task == 'query' else 'documents'}") as shown:
            for batch in batches_of(stream, texts, shown.update):
                for place, vectors in zip(batch.places, batch.rows, strict=True):
                    found[place] = _as_numpy(vectors) if numpy else vectors
        return found


def _asked_of(stock: Any, model: Model, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a call of `stock` by name, None for a wrong call, of which the stock method tells."""
    try:
        given = inspect.signature(stock).bind(model, *args, **kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    return given.arguments


def _serves_texts(model: Model, asked: dict[str, Any]) -> bool:
    """Whether a call is for more than one batch of strings, on the model's device, in this process."""
    texts, size = asked.get("inputs"), asked["batch_size"]
    many = isinstance(texts, list) and isinstance(size, int) and len(texts) > size > 0
    if not many or not all(isinstance(text, str) for text in texts or ()):
        return False
    here = asked.get("device") is None or asked["device"] in (model.device, str(model.device))
    return here and asked.get("pool") is None and getattr(model, "_distributed_inference", None) is None


def _as_coo(rows: Tensor, device: torch.device) -> Tensor:
    """CSR on the CPU as coalesced COO on `device`, as ``encode`` returns it."""
    counts = rows.crow_indices().diff()
    of_row = torch.repeat_interleave(torch.arange(rows.size(0)), counts)
    indices = torch.stack([of_row, rows.col_indices().long()]).to(device)
    return torch.sparse_coo_tensor(
        indices, rows.values().to(device), tuple(rows.shape), is_coalesced=True, check_invariants=False
    )


def _as_numpy(vectors: Tensor) -> Any:
    return (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).numpy()
