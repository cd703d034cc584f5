"""Echo inputs (arXiv 2402.15449): a causal model reads a text twice and pools the second copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tilefold.modules.fused_pooling import Features

__all__ = [
    "DOCUMENT_TEMPLATE",
    "POOLED_COUNT",
    "POOLING_MASK",
    "QUERY_TEMPLATE",
    "EchoTransformer",
]

QUERY_TEMPLATE = "Query:{text}\nQuery again:{text}"
DOCUMENT_TEMPLATE = "Document:{text}\nDocument again:{text}"
# name of the feature that marks the second copy of a text
POOLING_MASK = "pooling_mask"
# name of the number of marked tokens in packed features
POOLED_COUNT = "pooled_count"
_SLOT = "{text}"
# tokenizers without a limit have a model_max_length above this, such as 10^30
_UNLIMITED = 2**30


class EchoTransformer(Transformer):
    """A ``Transformer`` that reads every text twice in a template, and pools the second copy.

    In the second copy, causal attention has access to the complete text (echo embeddings).
    Tokens are joined before padding: ``bos, before, t_1..t_n, between, t_1..t_n, after, eos``. A
    text is truncated to ``n = (max_seq_length - others) // 2`` tokens first, so that both copies
    are always equal. The ``attention_mask`` of the output marks the second copy only, so that every
    pooling module, plain or accelerated, pools over it. The row of an empty text has no token there
    and gets the scores 0. A prompt comes before the template, once. Without a task (``encode``),
    the document's template is used.

    Args:
        model_name_or_path, options: arguments of ``Transformer``.
        query_template: template of ``task="query"``, with ``{text}`` twice.
        document_template: template of every other task, with ``{text}`` twice.

    Raises:
        TypeError: in the call, if an input is not a text.
        ValueError: for a template that does not have ``{text}`` twice; in the call, for a length
            without room for one token of each copy, and for features that :meth:`preprocess` did
            not make.
    """

    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        *Transformer.config_keys,
        "query_template",
        "document_template",
    ]

    def __init__(
        self,
        model_name_or_path: str,
        *,
        query_template: str = QUERY_TEMPLATE,
        document_template: str = DOCUMENT_TEMPLATE,
        **options: Any,
    ) -> None:
        """Load the model, and check the templates.

        A template repeats the text, so that causal attention sees all of it in the second copy.

        Args:
            model_name_or_path: a folder or a Hugging Face name.
            query_template: template of queries, with ``{text}`` twice.
            document_template: template of all other texts, with ``{text}`` twice.
            options: other arguments of ``Transformer``.
        """
        super().__init__(model_name_or_path, **options)
        self.query_template = _checked_template(query_template, "query_template")
        self.document_template = _checked_template(document_template, "document_template")

    def preprocess(
        self,
        inputs: Sequence[str],
        prompt: str | None = None,
        **kwargs: Any,
    ) -> Features:
        """Tokenise texts in their template, which contains every text twice.

        Args:
            inputs: texts.
            prompt: text before the template.
            kwargs: ``task`` (``"query"`` or ``"document"``) and ``max_length``, in tokens.

        Returns:
            ``input_ids``, ``attention_mask`` and ``pooling_mask``, each int64 ``[B, S]``. The
            pooling mask marks the second copy.

        Raises:
            TypeError: if an input is not a text.
            ValueError: if the length limit leaves no token for each copy.
        """
        if not inputs:
            return {}
        for text in inputs:
            if not isinstance(text, str):
                raise TypeError(
                    f"inputs must be texts, got {type(text).__name__}; "
                    "echo inputs have no other form.",
                )
        task = kwargs.get("task")
        template = self.query_template if task == "query" else self.document_template
        before, between, after = template.split(_SLOT)
        bos, eos = self._special_tokens()
        ids_before = bos + self._token_ids((prompt or "") + before)
        ids_between = self._token_ids(between)
        ids_after = self._token_ids(after) + eos
        copy_limit = self._copy_limit(
            n_template_tokens=len(ids_before) + len(ids_between) + len(ids_after),
            max_tokens=self._max_tokens(task, kwargs.get("max_length")),
        )
        texts = [text.lower() for text in inputs] if self.do_lower_case else list(inputs)
        text_ids = self.tokenizer(
            texts,
            add_special_tokens=False,
            truncation=copy_limit is not None,
            max_length=copy_limit,
            return_attention_mask=False,
        )["input_ids"]
        rows = []
        pooling_masks = []
        for ids in text_ids:
            before_second_copy = [*ids_before, *ids, *ids_between]
            rows.append([*before_second_copy, *ids, *ids_after])
            pooling_masks.append(
                [0] * len(before_second_copy) + [1] * len(ids) + [0] * len(ids_after),
            )
        features: Features = {
            "input_ids": self._padded(rows, self.tokenizer.pad_token_id or 0),
            "attention_mask": self._padded([[1] * len(row) for row in rows], 0),
            POOLING_MASK: self._padded(pooling_masks, 0),
            "modality": "text",
        }
        if self.transformer_task == "text-generation":
            # keep the logits of all tokens, because pooling needs those of the second copy
            features["logits_to_keep"] = 0
        return features

    def _copy_limit(self, n_template_tokens: int, max_tokens: int | None) -> int | None:
        """Return the maximum number of tokens of a text, which a row holds twice.

        Args:
            n_template_tokens: number of tokens of the template, besides the two copies.
            max_tokens: maximum number of tokens of a row; None for no limit.

        Returns:
            Maximum number of tokens per copy, or None for no limit.

        Raises:
            ValueError: if the limit leaves no token for each copy.
        """
        if max_tokens is None:
            return None
        copy_limit = (max_tokens - n_template_tokens) // 2
        if copy_limit < 1:
            raise ValueError(
                f"max_seq_length must leave room for two copies of a text, got {max_tokens}; "
                f"use {n_template_tokens + 2} or more.",
            )
        return copy_limit

    def forward(self, features: Features, **kwargs: Any) -> Features:
        """Run the ``Transformer``, and let the pooling after it read the second copy only.

        A row holds the text twice, and the Transformer attends to both copies. The
        ``attention_mask`` of its output is then replaced by a mask of the second copy. The input is
        not changed.

        Args:
            features: ``input_ids``, ``attention_mask`` and ``pooling_mask``, each ``[B, S]``.
            kwargs: arguments of the ``Transformer``.

        Raises:
            ValueError: if :meth:`preprocess` did not make the features.
        """
        if POOLING_MASK not in features:
            raise ValueError(
                f"features must hold pooling_mask, got {sorted(features)}; "
                "make them with preprocess(texts).",
            )
        inputs = {key: value for key, value in features.items() if key != POOLING_MASK}
        out: Features = super().forward(inputs, **kwargs)
        return {**out, "attention_mask": features[POOLING_MASK]}

    def forward_packed(self, features: Features, **kwargs: Any) -> Features:
        """Run the ``Transformer`` on packed tokens of both copies.

        ``accelerate`` calls this, and then removes the tokens that are not pooled.

        Args:
            features: packed features, to which the output ``[1, T, D]`` is added.
            kwargs: arguments of the ``Transformer``.
        """
        inputs = {
            key: value for key, value in features.items() if key not in (POOLING_MASK, POOLED_COUNT)
        }
        out: Features = super().forward(inputs, **kwargs)
        features[self.module_output_name] = out[self.module_output_name]
        return features

    def _can_flatten_inputs(self) -> bool:
        return False

    def _token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens."""
        if not text:
            return []
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the ids of the special tokens that the tokenizer puts before and after a text.

        They are read off the encoding of a short text. If there are none after it, the
        end-of-sequence token is used.

        Returns:
            Ids before a text, and ids after it.
        """
        encoding = self.tokenizer("a", return_special_tokens_mask=True)
        ids = encoding["input_ids"]
        special = encoding["special_tokens_mask"]
        text_start = special.index(0)
        text_end = text_start + special[text_start:].count(0)
        bos = list(ids[:text_start])
        eos = list(ids[text_end:])
        if not eos and self.tokenizer.eos_token_id is not None:
            eos = [self.tokenizer.eos_token_id]
        return bos, eos

    def _max_tokens(self, task: str | None, max_length: int | None) -> int | None:
        """Return the maximum number of tokens of a row, which holds the text twice.

        Limits of 2^30 or more are placeholders of tokenizers without a limit, and are ignored.

        Args:
            task: ``"query"`` or ``"document"``, which may have a limit of its own; or None.
            max_length: limit of this call, which replaces the task's limit; or None.

        Returns:
            The smallest limit, or None for no limit.
        """
        task_lengths = {"query": self.query_length, "document": self.document_length}
        requested = max_length if max_length is not None else task_lengths.get(task or "")
        limits = [
            limit
            for limit in (requested, self.max_seq_length)
            if limit is not None and limit < _UNLIMITED
        ]
        return min(limits, default=None)

    def _padded(self, rows: list[list[int]], fill: int) -> Tensor:
        """Pad rows to ``[B, S]`` int64, on the tokenizer's side."""
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        return pad_sequence(
            tensors,
            batch_first=True,
            padding_value=fill,
            padding_side=self.tokenizer.padding_side,
        )


def _checked_template(template: str, name: str) -> str:
    """Return `template`, or raise ``ValueError`` unless it has the text twice."""
    if not isinstance(template, str) or template.count(_SLOT) != 2:
        raise ValueError(f"{name} must hold {_SLOT} twice, got {template!r}.")
    return template
