"""``encode`` of an accelerated SparseEncoder: many texts in a stream, everything else as stock."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers._batch import sparse_options
from tilefold.integrations.sentence_transformers._many import Limits, encode_many
from tilefold.integrations.sentence_transformers._packed_inputs import packed_inputs
from tilefold.integrations.sentence_transformers._pooling import FusedForward, StockPooling

_logger = logging.getLogger("sentence_transformers.sparse_encoder.model")  # whose level decides about progress bars
_USUAL = 32  # the stock batch size, from which on batches are cut by tokens


class FusedEncode:
    """Replaces ``encode`` of one SparseEncoder; not a module, so the state dict does not change.

    More texts than ``batch_size`` go through :class:`SparseStream`; what it cannot serve (other inputs than strings,
    several processes, options of the processor, poolings other than SpladePooling) goes to the stock method.

    Args:
        model: the SparseEncoder.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments and result of ``SparseEncoder.encode``.

        A ``batch_size`` below 32 bounds the texts of a batch; otherwise batches hold a number of tokens that suits the
        device.
        """
        model, stock = self.model, type(self.model).encode
        asked = asked_of(stock, model, args, kwargs)
        if asked is None or not self._serves(asked):
            with packed_inputs():
                return stock(model, *args, **kwargs)
        model.eval()
        prompt = prompt_of_call(model, asked)
        options = sparse_options(model, asked["max_active_dims"], 0.0)
        limits = Limits(usual(asked))
        texts, task = asked["inputs"], asked["kwargs"].get("task")
        with bar(len(texts), asked["show_progress_bar"], _logger, "Texts") as shown:
            rows = encode_many(model, texts, task, prompt, options, limits, 0, shown.update)
        device = torch.device("cpu") if asked["save_to_cpu"] else model.device
        found = _as_coo(rows, device)
        if not asked["convert_to_sparse_tensor"]:
            found = found.to_dense()
        return found if asked["convert_to_tensor"] else list(found)

    def _serves(self, asked: dict[str, Any]) -> bool:
        if set(asked["kwargs"]) - {"task"} or not serves_texts(self.model, asked):
            return False
        forwards = [vars(module).get("forward") for module in self.model.modules() if "forward" in vars(module)]
        fused = [forward for forward in forwards if isinstance(forward, FusedForward)]
        return bool(fused) and all(isinstance(forward.pooling, StockPooling) and forward.last for forward in fused)


def asked_of(stock: Any, model: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a call of `stock` by name, None for a wrong call, of which the stock method tells."""
    try:
        given = inspect.signature(stock).bind(model, *args, **kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    return given.arguments


def serves_texts(model: Any, asked: dict[str, Any]) -> bool:
    """Whether a call is for more than one batch of strings, on the model's device, in this process."""
    texts, size = asked.get("inputs"), asked["batch_size"]
    many = isinstance(texts, list) and isinstance(size, int) and len(texts) > size > 0
    if not many or not all(isinstance(text, str) for text in texts or ()):
        return False
    here = asked.get("device") is None or asked["device"] in (model.device, str(model.device))
    return here and asked.get("pool") is None and getattr(model, "_distributed_inference", None) is None


def usual(asked: dict[str, Any]) -> int | None:
    """Texts of a batch, at most; None for a ``batch_size`` from the stock one on, where tokens decide."""
    size: int = asked["batch_size"]
    return size if size < _USUAL else None


def prompt_of_call(model: Any, asked: dict[str, Any]) -> str | None:
    """The prompt that the stock method would put before each text."""
    resolved: str | None = model._resolve_prompt(asked["prompt"], asked["prompt_name"])
    return resolved


def bar(total: int, show: bool | None, logger: logging.Logger, title: str) -> Any:
    """A progress bar of texts; `show` by default where the stock method shows one."""
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - the one that is shown by stock

    show = logger.getEffectiveLevel() <= logging.INFO if show is None else show
    return tqdm(total=total, desc=title, disable=not show)


def _as_coo(rows: Tensor, device: torch.device) -> Tensor:
    """CSR on the CPU as coalesced COO on `device`, as ``encode`` returns it."""
    counts = rows.crow_indices().diff()
    of_row = torch.repeat_interleave(torch.arange(rows.size(0)), counts)
    indices = torch.stack([of_row, rows.col_indices().long()]).to(device)
    return torch.sparse_coo_tensor(
        indices, rows.values().to(device), tuple(rows.shape), is_coalesced=True, check_invariants=False
    )
