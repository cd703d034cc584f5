"""Echo inputs (arXiv 2402.15449): a causal model reads every text twice, and only the second copy
is pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tilefold.modules.fused_pooling import Features

__all__ = ["DOCUMENT_TEMPLATE", "QUERY_TEMPLATE", "EchoTransformer"]

QUERY_TEMPLATE = "Query:{text}\nQuery again:{text}"
DOCUMENT_TEMPLATE = "Document:{text}\nDocument again:{text}"
_SLOT = "{text}"


class EchoTransformer(Transformer):
    """A ``Transformer`` that reads ``<template with the text twice><eos>`` and offers the second
    copy for pooling.

    Tokens are joined before padding: ``bos, before, t_1..t_n, between, t_1..t_n, after, eos``. A
    text is cut to ``n = (max_seq_length - others) // 2`` tokens first, so both copies are equal
    whatever its length. The ``attention_mask`` that leaves this module marks the second copy only,
    so that every pooling module, plain or accelerated, pools over it; a row of an empty text has no
    token there and gets the scores 0. A prompt stands before the template, once. Without a task
    (``encode``), the document's template is used.

    Args:
        model_name_or_path, options: as in ``Transformer``.
        query_template: for ``task="query"``, with ``{text}`` twice.
        document_template: for every other task.

    Raises:
        TypeError: in the call, for inputs that are not texts.
        ValueError: for a template that does not have ``{text}`` twice; in the call, for a length
            without room for one token of each copy, and for features that :meth:`preprocess` did
            not make.
    """

    config_keys: list[str] = [*Transformer.config_keys, "query_template", "document_template"]  # noqa: RUF012 - the attribute of the stock base class

    def __init__(
        self,
        model_name_or_path: str,
        *,
        query_template: str = QUERY_TEMPLATE,
        document_template: str = DOCUMENT_TEMPLATE,
        **options: Any,
    ) -> None:
        super().__init__(model_name_or_path, **options)
        self.query_template = _checked(query_template, "query_template")
        self.document_template = _checked(document_template, "document_template")

    def preprocess(
        self,
        inputs: Sequence[str],
        prompt: str | None = None,
        **kwargs: Any,
    ) -> Features:
        """``input_ids``, ``attention_mask`` and ``pooling_mask`` of texts, each ``[B, S]`` int64."""
        if not inputs:
            return {}
        if not all(isinstance(text, str) for text in inputs):
            found = next(type(text).__name__ for text in inputs if not isinstance(text, str))
            raise TypeError(f"inputs must be texts, got {found}; echo inputs have no other form.")
        task = kwargs.get("task")
        template = self.query_template if task == "query" else self.document_template
        before, between, after = template.split(_SLOT)
        bos, eos = self._ends()
        head, middle, tail = (
            bos + self._ids((prompt or "") + before),
            self._ids(between),
            self._ids(after) + eos,
        )
        others = len(head) + len(middle) + len(tail)
        limit = self._limit(task, kwargs.get("max_length"))
        room = None if limit is None else (limit - others) // 2
        if room is not None and room < 1:
            got = f"{limit}; use {others + 2} or more."
            raise ValueError(f"max_seq_length must leave room for two copies of a text, got {got}")
        texts = [text.lower() for text in inputs] if self.do_lower_case else list(inputs)
        rows, marks = [], []
        for ids in self.tokenizer(
            texts,
            add_special_tokens=False,
            truncation=room is not None,
            max_length=room,
            return_attention_mask=False,
        )["input_ids"]:
            before_second = [*head, *ids, *middle]
            rows.append([*before_second, *ids, *tail])
            marks.append([*[0] * len(before_second), *[1] * len(ids), *[0] * len(tail)])
        padded = {
            "input_ids": self._padded(rows, self.tokenizer.pad_token_id or 0),
            "attention_mask": self._padded([[1] * len(row) for row in rows], 0),
            "pooling_mask": self._padded(marks, 0),
        }
        # all logits are kept: one alone could not be pooled
        keeps = {"logits_to_keep": 0} if self.transformer_task == "text-generation" else {}
        return {**padded, "modality": "text", **keeps}

    def forward(self, features: Features, **kwargs: Any) -> Features:
        """The features of ``Transformer``, with an ``attention_mask`` of the second copy, in a new
        dictionary.
        """
        if "pooling_mask" not in features:
            got = f"{sorted(features)}; make them with preprocess(texts)."
            raise ValueError(f"features must hold pooling_mask, got {got}")
        own = {key: value for key, value in features.items() if key != "pooling_mask"}
        out: Features = super().forward(own, **kwargs)
        return {**out, "attention_mask": features["pooling_mask"]}

    def _can_flatten_inputs(self) -> bool:
        return False

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before and after a text; at the end there is
        always one.
        """
        made = self.tokenizer("a", return_special_tokens_mask=True)
        ids, special = made["input_ids"], made["special_tokens_mask"]
        text = special.index(0)
        bos, eos = ids[:text], ids[text + special[text:].count(0) :]
        if not eos and self.tokenizer.eos_token_id is not None:
            eos = [self.tokenizer.eos_token_id]
        return list(bos), list(eos)

    def _limit(self, task: str | None, max_length: int | None) -> int | None:
        """The most tokens of a row, both copies and the template together."""
        side = {"query": self.query_length, "document": self.document_length}.get(task or "")
        limits = [max_length if max_length is not None else side, self.max_seq_length]
        return min(
            (limit for limit in limits if limit is not None and limit < 1 << 30),
            default=None,
        )

    def _padded(self, rows: list[list[int]], fill: int) -> Tensor:
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        return pad_sequence(
            tensors,
            batch_first=True,
            padding_value=fill,
            padding_side=self.tokenizer.padding_side,
        )


def _checked(template: str, name: str) -> str:
    if not isinstance(template, str) or template.count(_SLOT) != 2:
        raise ValueError(f"{name} must hold {_SLOT} twice, got {template!r}.")
    return template
