"""A whole sparse encoder (network, LM head, activation, pooling) as one ONNX graph, run by ONNX
Runtime on the CPU.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import InputModule
from sentence_transformers.util import load_file_path
from torch import Tensor
from transformers import AutoTokenizer

from tilefold._internal.files import sha256_file
from tilefold._internal.typing import Tokenizer
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    Options,
    Wanted,
    place_of_files,
)

__all__ = ["OnnxGraph"]

GRAPH, WEIGHTS = "model.onnx", "model.onnx.data"  # the second of more than 2 GB


class OnnxGraph(FusedPooling, InputModule):
    """Texts to ``[B, V]`` scores by the graph that :func:`tilefold.recipes.export_onnx` made of a
    model.

    Its inputs are ``input_ids`` and ``attention_mask``, int64 ``[B, S]``; its output is ``scores``,
    fp32 ``[B, V]``, or with a `top_k` ``indices`` and ``weights``, ``[B, top_k]``. It runs on the
    CPU in as many threads as torch uses when it is first called, has no weights for torch, and is
    not trained.

    Args:
        tokenizer: of the model.
        path: of the graph.
        settings: V (``vocab_size``); the ``sha256`` of the graph; ``max_seq_length``,
            ``query_length`` and ``document_length`` of the model's ``Transformer``; entries that
            the graph gives of a row (``top_k``, None for all); the names of the ``SpladePooling``
            (``pooling``, ``activation``); ``quantize``, None or ``"int8"``; fingerprints of the
            model, its settings and vocabulary, and versions (``made_of``); and how far it was from
            the model (``error``).

    Raises:
        ImportError: without onnxruntime, when it first encodes.
        ValueError: for a file that is not the one that was exported.
    """

    reads_logits = False
    config_file_name = "onnx_config.json"
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the stock base class
        *(
            "vocab_size",
            "sha256",
            "max_seq_length",
            "query_length",
            "document_length",
            "top_k",
            "pooling",
        ),
        *("activation", "quantize", "made_of", "error"),
    ]

    def __init__(self, tokenizer: Tokenizer, path: str | Path, **settings: Any) -> None:
        super().__init__()
        self.tokenizer, self.path, self._session = tokenizer, Path(path), None
        for name in self.config_keys:
            setattr(self, name, settings.get(name))
        if (found := sha256_file(self.path)) != self.sha256:
            got = f"{found[:12]}. Export the model again: tilefold export --to onnx."
            raise ValueError(
                f"{path}: expected the graph with SHA-256 {str(self.sha256)[:12]}, got {got}",
            )

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> Features:
        """``input_ids`` and ``attention_mask`` of texts, cut as the model cuts them."""
        own = {"query": self.query_length, "document": self.document_length}.get(
            kwargs.get("task") or "",
        )
        limit = kwargs.get("max_length") or own or self.max_seq_length
        texts = self._prepend_prompt(inputs, prompt) if prompt else list(inputs)
        found = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=limit,
            return_tensors="pt",
        )
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        ids = features["input_ids"]
        if torch.is_grad_enabled() and self.training:
            raise RuntimeError(
                "an ONNX graph is not trained, got a forward in training; train the model it is of.",
            )
        fed = {
            name: features[name].cpu().long().numpy() for name in ("input_ids", "attention_mask")
        }
        found = [torch.from_numpy(array) for array in self._running().run(None, fed)]
        if self.top_k is not None:
            found = [torch.zeros(len(ids), self.vocab_size).scatter_(1, found[0], found[1])]
        return found[0].to(ids.device)

    def _running(self) -> Any:
        if self._session is None:
            try:
                import onnxruntime
            except ImportError as error:
                raise ImportError(
                    'an ONNX graph needs onnxruntime: pip install "tilefold[onnx]".',
                ) from error
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            # threads that wait for work in a loop take the cores of those who tokenise
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self._session = onnxruntime.InferenceSession(
                self.path,
                options,
                providers=["CPUExecutionProvider"],
            )
        return self._session

    def __getstate__(self) -> Options:
        return {
            **self.__dict__,
            "_session": None,
        }  # copies, and other processes, open the file themselves

    def get_embedding_dimension(self) -> int:
        return int(self.vocab_size)

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write the tokenizer and the settings, and copy the graph."""
        self.save_tokenizer(output_path)
        self.save_config(output_path)
        for name in (GRAPH, WEIGHTS):
            if (found := self.path.with_name(name)).exists() and found.parent.resolve() != Path(
                output_path,
            ).resolve():
                shutil.copy(found, output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> OnnxGraph:
        given = place_of_files(kwargs)
        config = cls.load_config(model_name_or_path, subfolder=subfolder, **given)
        load_file_path(model_name_or_path, os.fspath(Path(subfolder, WEIGHTS)), **given)
        if (
            path := load_file_path(model_name_or_path, os.fspath(Path(subfolder, GRAPH)), **given)
        ) is None:
            raise ValueError(
                f"{model_name_or_path}: expected {GRAPH} beside its settings, got none. Export it again.",
            )
        cache = {"cache_dir": given.pop("cache_folder")} if "cache_folder" in given else {}
        tokenizer = AutoTokenizer.from_pretrained(
            model_name_or_path,
            subfolder=subfolder,
            **given,
            **cache,
        )
        return cls(tokenizer, path, **config)

    def __repr__(self) -> str:
        return f"OnnxGraph(vocab_size={self.vocab_size}, quantize={self.quantize!r}, top_k={self.top_k})"
