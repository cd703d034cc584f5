"""A sparse encoder as one ONNX graph, which ONNX Runtime runs on the CPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import InputModule
from sentence_transformers.util import load_file_path
from torch import Tensor

from tilefold._internal.arguments import path_of
from tilefold._internal.files import sha256_file
from tilefold._internal.typing import Tokenizer
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    Options,
    ScoreOptions,
    load_tokenizer,
    location_arguments,
)

__all__ = ["OnnxGraph"]

GRAPH = "model.onnx"
# holds the weights of a graph that is larger than 2 GB
WEIGHTS = "model.onnx.data"


class OnnxGraph(FusedPooling, InputModule):
    """A sparse encoder that runs the ONNX graph of :func:`tilefold.recipes.export_onnx`.

    The graph contains the network, LM head, activation and pooling. Its inputs are ``input_ids``
    and ``attention_mask``, int64 ``[B, S]``; its output is ``scores``,
    fp32 ``[B, V]``, or with a `top_k` ``indices`` and ``weights``, ``[B, top_k]``. It runs on the
    CPU in as many threads as torch uses when it is first called, has no weights for torch, and is
    not trained.

    Args:
        tokenizer: tokenizer of the exported model.
        path: file of the graph.
        settings: V (``vocab_size``); the ``sha256`` of the graph; ``max_seq_length``,
            ``query_length`` and ``document_length`` of the model's ``Transformer``; entries that
            the graph gives of a row (``top_k``, None for all); the names of the ``SpladePooling``
            (``pooling``, ``activation``); ``quantize``, None or ``"int8"``; fingerprints of the
            model, its settings and vocabulary, and versions (``made_of``); and how far it was from
            the model (``error``).

    Raises:
        ImportError: if onnxruntime is not installed, when it first encodes.
        ValueError: if the file is not the one that was exported.
    """

    reads_logits = False
    config_file_name = "onnx_config.json"
    config_keys: list[str] = [  # noqa: RUF012 - the attribute of the class in sentence-transformers
        "vocab_size",
        "sha256",
        "max_seq_length",
        "query_length",
        "document_length",
        "top_k",
        "pooling",
        "activation",
        "quantize",
        "made_of",
        "error",
    ]

    def __init__(
        self,
        tokenizer: Tokenizer,
        path: str | Path,
        *,
        sha256: str | None = None,
        **settings: Any,
    ) -> None:
        """Check the file by its digest, and store the settings as attributes.

        The graph is opened by the first call.

        Args:
            tokenizer: tokenizer of the exported model.
            path: file of the graph.
            sha256: SHA-256 of the file that was exported.
            settings: values of the other ``config_keys``, such as ``vocab_size``.
        """
        super().__init__()
        self.tokenizer = tokenizer
        self.path = path_of("path", path)
        self._session = None
        for name in self.config_keys:
            setattr(self, name, settings.get(name))
        self.sha256 = sha256
        file_sha256 = sha256_file(self.path)
        if file_sha256 != sha256:
            raise ValueError(
                f"{path}: expected the graph with SHA-256 {str(sha256)[:12]}, "
                f"got {file_sha256[:12]}. Export the model again: tilefold export --to onnx.",
            )

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> Features:
        """Tokenise texts, and truncate them as the exported model does.

        Args:
            inputs: texts.
            prompt: text that is put before every text.
            kwargs: ``task`` (``"query"`` or ``"document"``), which may have a limit of its own, and
                ``max_length``, which replaces all other limits. Both are optional.

        Returns:
            ``input_ids`` and ``attention_mask``, int64 ``[B, S]``.
        """
        task_lengths = {"query": self.query_length, "document": self.document_length}
        task_length = task_lengths.get(kwargs.get("task") or "")
        texts = self._prepend_prompt(inputs, prompt) if prompt else list(inputs)
        encoding = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=kwargs.get("max_length") or task_length or self.max_seq_length,
            return_tensors="pt",
        )
        return {name: encoding[name] for name in ("input_ids", "attention_mask")}

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Run the graph, and return its scores as a dense tensor.

        :class:`FusedPooling` defines the name and the arguments, for modules that compute a head
        and its pooling in one operator.

        Args:
            features: ``input_ids`` and ``attention_mask``, ``[B, S]``.
            head: ignored, because the graph contains the head.
            score_options: ignored; the graph was exported with its options.

        Returns:
            Scores ``[B, V]`` in fp32, on the device of the ids.

        Raises:
            RuntimeError: in training mode, since a graph has no gradients.
        """
        if torch.is_grad_enabled() and self.training:
            raise RuntimeError(
                "an ONNX graph cannot be trained, got a forward in training mode; train the model "
                "that it was exported from.",
            )
        ids = features["input_ids"]
        inputs = {
            "input_ids": ids.cpu().long().numpy(),
            "attention_mask": features["attention_mask"].cpu().long().numpy(),
        }
        outputs = [torch.from_numpy(array) for array in self._open_session().run(None, inputs)]
        if self.top_k is None:
            (scores,) = outputs
        else:
            indices, weights = outputs
            scores = torch.zeros(len(ids), self.vocab_size).scatter_(1, indices, weights)
        return scores.to(ids.device)

    def _open_session(self) -> Any:
        """Return the session of ONNX Runtime that runs the graph, and open it at the first call.

        Raises:
            ImportError: if onnxruntime is not installed.
        """
        if self._session is None:
            try:
                import onnxruntime
            except ImportError as error:
                raise ImportError(
                    'an ONNX graph needs onnxruntime: pip install "tilefold[onnx]".',
                ) from error
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            # threads that wait for work in a loop would take cores from the tokenizer
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self._session = onnxruntime.InferenceSession(
                self.path,
                options,
                providers=["CPUExecutionProvider"],
            )
        return self._session

    def __getstate__(self) -> Options:
        # copies, and other processes, open the file themselves
        return {**self.__dict__, "_session": None}

    def get_embedding_dimension(self) -> int:
        return int(self.vocab_size)

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write the tokenizer and the settings, and copy the graph.

        Args:
            output_path: folder of the module. A graph that is already in it is not copied.
            args: ignored.
            kwargs: ignored.
        """
        self.save_tokenizer(output_path)
        self.save_config(output_path)
        for name in (GRAPH, WEIGHTS):  # large graphs keep their weights in a second file
            source = self.path.with_name(name)
            is_in_output = source.parent.resolve() == Path(output_path).resolve()
            if source.exists() and not is_in_output:
                shutil.copy(source, output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> OnnxGraph:
        """Load a saved graph with its tokenizer and settings, and download them if necessary.

        Args:
            model_name_or_path: the checkpoint.
            subfolder: folder of the module in the checkpoint.
            kwargs: arguments of sentence-transformers, some of which locate files.

        Raises:
            ValueError: if the graph is missing.
        """
        location = location_arguments(kwargs)
        config = cls.load_config(model_name_or_path, subfolder=subfolder, **location)
        # Large graphs keep their weights in a separate file: download it next to the graph.
        load_file_path(model_name_or_path, os.fspath(Path(subfolder, WEIGHTS)), **location)
        path = load_file_path(model_name_or_path, os.fspath(Path(subfolder, GRAPH)), **location)
        if path is None:
            raise ValueError(
                f"{model_name_or_path}: expected {GRAPH} next to its settings, got no such file. "
                "Export the model again.",
            )
        tokenizer = load_tokenizer(model_name_or_path, subfolder, location)
        return cls(tokenizer, path, **config)

    def __repr__(self) -> str:
        return (
            f"OnnxGraph(vocab_size={self.vocab_size}, quantize={self.quantize!r}, "
            f"top_k={self.top_k})"
        )
