"""A trained SparseEncoder as an ONNX graph from token ids to scores, compared with the model before
it is kept.
"""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.files import atomic_directory, sha256_file
from tilefold._internal.typing import Model
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold._version import __version__
from tilefold.modules import load_encoder
from tilefold.modules.fused_pooling import STOCK_ACTIVATIONS, activate
from tilefold.modules.onnx_graph import GRAPH, OnnxGraph
from tilefold.recipes.loading import load_complete, quiet_loggers
from tilefold.retrieval.common.provenance import model_fingerprint, model_settings

OPSET = 18
ALLOWED = 8.0  # times the error of the model's own fp32 against fp64
LEAST_COSINE = 0.9  # of a vector of an 8-bit graph with the model's
EPSILON = 2.0**-23
LENGTHS = (1, 3, 12, 40, 200, 700)  # words of the random texts


class ExportedGraph(NamedTuple):
    """Result of :func:`export_onnx`: ``error`` has the part of the budget that was used, or the
    least cosine.
    """

    output: str
    graphs: int
    bytes: int
    quantize: str | None
    error: dict[str, float]


def export_onnx(
    model: Model | str,
    output: str | Path,
    *,
    quantize: str | None = None,
    top_k: int | None = None,
) -> ExportedGraph:
    """Write a ``SparseEncoder`` to a folder in which each Transformer with its SpladePooling is one
    ONNX graph.

    The graph goes from ``input_ids`` and ``attention_mask`` ``[B, S]``, B and S free, to ``scores``
    ``[B, V]``: network, LM head, activation (once per score, after a max) and pooling. Other
    modules, such as the static queries of a Router, stay what they are. The folder is a
    ``SparseEncoder`` whose module is a :class:`tilefold.modules.OnnxGraph`, so that commands and
    :func:`tilefold.modules.load_encoder` take it as any model.

    After the export the folder is loaded, and random texts of 1 to 700 words are encoded by it and
    by the model in fp64: their largest difference may be 8 times that between the model's fp32 and
    its fp64, or 8 roundings of the largest score where that is more. Each vector of an 8-bit graph
    must have a cosine of at least 0.9.

    Args:
        model: with stock modules, max or sum pooling; or its folder or name.
        output: a new folder.
        quantize: ``"int8"`` multiplies by 8-bit weights (7 bits of each, by output, so that no CPU
            without VNNI saturates) and activations that are rounded by one scale for the whole
            batch.
        top_k: give the heaviest entries of a row only, as ``indices`` and ``weights`` ``[B,
            top_k]``, heaviest first.

    Raises:
        ImportError: without onnx, onnxscript and onnxruntime.
        ValueError: for a model that has no such pair of modules, is accelerated, cannot be exported
            by torch, or whose graph computes something else; nothing is written then.
    """
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'an export to ONNX needs {error.name}: pip install "tilefold[onnx]".',
        ) from error
    if quantize not in {None, "int8"}:
        raise ArgumentError("quantize", f"expected 'int8' or None, got {quantize!r}.")
    if isinstance(model, str):
        model = load_complete(load_encoder, model)
    if not isinstance(model, SparseEncoder):
        raise ArgumentError("model", f"expected a SparseEncoder, got a {type(model).__name__}.")
    if "encode_sparse_batch" in vars(model):
        raise ArgumentError(
            "model",
            "expected a stock model, got an accelerated one. Call restore(model) first.",
        )
    # of modules alone: what was put on the model itself, such as autocast, stays out
    stock = _with_modules(model, copy.deepcopy(list(model.children()))).float()
    vocab_size = _encoded(stock, ["a"]).size(1)
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ArgumentError("top_k", f"expected 1 to {vocab_size}, the vocabulary, got {top_k}.")
    made_of: dict[str, Any] = {"model": model_fingerprint(model), "settings": model_settings(model)}
    made_of |= {"vocabulary": vocabulary_fingerprint(model.tokenizer), "quantize": quantize}
    made_of |= {"opset": OPSET, "tilefold": __version__, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        maker = _Maker(Path(scratch), vocab_size, quantize, top_k, made_of)
        exported = _with_modules(model, maker.modules_of(stock))
        if not maker.made:
            names = ", ".join(type(module).__name__ for module in stock)
            raise ArgumentError(
                "model",
                f"expected a Transformer with an LM head before a SpladePooling, got {names}.",
            )
        errors = _compared(stock, exported, quantize, top_k)
        for graph in maker.made:
            graph.error = errors
        exported.float().max_active_dims = (
            model.max_active_dims
        )  # whose other modules are those that were compared
        with atomic_directory(Path(output), own_names=(), overwrite=False) as folder:
            exported.save_pretrained(str(folder), create_model_card=False)
    size = sum(file.stat().st_size for file in Path(output).rglob("*") if file.is_file())
    return ExportedGraph(str(output), len(maker.made), size, quantize, errors)


def _with_modules(model: Model, modules: list[nn.Module]) -> Model:
    """A model of other modules with the settings of `model`, but for ``max_active_dims``."""
    settings = {
        name: getattr(model, name)
        for name in ("prompts", "default_prompt_name", "similarity_fn_name")
    }
    return type(model)(modules=modules, device="cpu", **settings).eval()


def _encoded(model: Model, texts: list[str]) -> Tensor:
    """Texts as queries and as documents, ``[2 n, V]`` fp64, in the model's own precision."""
    how: dict[str, Any] = {
        "convert_to_tensor": True,
        "convert_to_sparse_tensor": False,
        "show_progress_bar": False,
    }
    with torch.no_grad():
        return torch.cat(
            [
                encode(texts, **how).double()
                for encode in (model.encode_query, model.encode_document)
            ],
        )


class _Maker:
    """Puts a graph in the place of each Transformer with its pooling, once for each pair."""

    def __init__(
        self,
        scratch: Path,
        vocab_size: int,
        quantize: str | None,
        top_k: int | None,
        made_of: dict[str, Any],
    ) -> None:
        self.scratch, self.vocab_size, self.quantize, self.top_k = (
            scratch,
            vocab_size,
            quantize,
            top_k,
        )
        self.made_of, self.made = made_of, list[OnnxGraph]()

    def modules_of(self, pipeline: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        for module in pipeline.children():
            if isinstance(module, Router):
                routes = {
                    name: self.modules_of(route) for name, route in module.sub_modules.items()
                }
                options = {
                    name: getattr(module, name) for name in ("default_route", "allow_empty_key")
                }
                found.append(Router(routes, route_mappings=module.route_mappings, **options))
            elif type(module) is SpladePooling and found and isinstance(found[-1], Transformer):
                found[-1] = self._graph(found[-1], module)
            else:
                found.append(module)
        if any(isinstance(module, Transformer) for module in found):
            names = " -> ".join(type(module).__name__ for module in pipeline.children())
            raise ArgumentError(
                "model",
                f"expected a SpladePooling right after its Transformer, got {names}.",
            )
        return found

    def _graph(self, transformer: Any, pooling: Any) -> OnnxGraph:
        if getattr(transformer, "query_expansion", None) is not None:
            raise ArgumentError(
                "model",
                "expected texts as they are, got a Transformer that expands queries.",
            )
        folder = self.scratch / str(len(self.made))
        folder.mkdir()
        path = folder / GRAPH
        scorer = _Scorer(transformer, pooling, self.top_k, own_head=self.quantize is not None)
        _write(scorer, path if self.quantize is None else folder / "fp32.onnx")
        if self.quantize is not None:
            _quantize(folder / "fp32.onnx", path)
        lengths = {
            name: getattr(transformer, name, None) for name in ("query_length", "document_length")
        }
        graph = OnnxGraph(
            copy.deepcopy(transformer.tokenizer),
            path,
            vocab_size=self.vocab_size,
            sha256=sha256_file(path),
            max_seq_length=transformer.max_seq_length,
            top_k=self.top_k,
            pooling=pooling.pooling_strategy,
            activation=pooling.activation_function,
            quantize=self.quantize,
            made_of=self.made_of,
            **lengths,
        )
        self.made.append(graph)
        return graph


class _Scorer(nn.Module):
    """A copy of a masked language model in fp32, with activation and pooling, as one function of
    token ids.
    """

    def __init__(self, transformer: Any, pooling: Any, top_k: int | None, own_head: bool) -> None:
        super().__init__()
        self.network: Any = copy.deepcopy(transformer.model).float().cpu().eval()
        head = self.network.get_output_embeddings()
        if own_head:  # quantisation leaves alone a matrix that is an embedding, too
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self.pooling, self.top_k = pooling.pooling_strategy, top_k
        self.activation = STOCK_ACTIVATIONS[pooling.activation_function]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """``[B, V]`` scores, or indices and weights ``[B, top_k]``."""
        logits = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        logits = logits.masked_fill(
            attention_mask[..., None] == 0,
            -torch.inf,
        )  # of which every activation is 0
        if self.pooling == "max":
            scores = activate(logits.amax(dim=1), self.activation)
        else:
            scores = activate(logits, self.activation).sum(dim=1)
        if self.top_k is None:
            return scores
        best = scores.topk(self.top_k, dim=1)
        return best.indices, best.values


def _write(scorer: _Scorer, path: Path) -> None:
    """Export by torch's own exporter, with free sizes of batch and sequence."""
    ids = torch.arange(2 * 7).view(2, 7) % 5 + 1
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    names = ["scores"] if scorer.top_k is None else ["indices", "weights"]
    try:
        with warnings.catch_warnings(), quiet_loggers("torch.onnx"), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                scorer,
                (ids, mask),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=(sizes, sizes),
                verbose=False,
                input_names=["input_ids", "attention_mask"],
                output_names=names,
            )
            program.save(path)
    except Exception as error:
        kind, why = type(scorer.network).__name__, str(error).strip().partition("\n")[0]
        raise ArgumentError(
            "model",
            f"torch cannot export a {kind} to ONNX ({type(error).__name__}: {why}).",
        ) from error


def _quantize(path: Path, to: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    large = path.with_name(path.name + ".data").exists()
    with quiet_loggers(None):  # it advises through the root logger
        quantize_dynamic(
            path,
            to,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            use_external_data_format=large,
        )


def _compared(
    stock: Model,
    exported: Model,
    quantize: str | None,
    top_k: int | None,
) -> dict[str, float]:
    """Encode random texts by both, and refuse a graph that computes something else."""
    drawn, special = random.Random(0), set(stock.tokenizer.all_special_ids)  # noqa: S311 - no secret
    ids = sorted(set(stock.tokenizer.get_vocab().values()) - special)
    texts = [stock.tokenizer.decode(drawn.choices(ids, k=length)) for length in LENGTHS]
    try:
        rounded, exact = _encoded(stock, texts), _encoded(stock.double(), texts)
    except Exception as error:
        why = f"{type(error).__name__}: {error}; set its max_seq_length if it has fewer positions"
        raise ArgumentError(
            "model",
            f"expected one that encodes texts of {max(LENGTHS)} words, got {why}.",
        ) from error
    if not bool(exact.any()):
        raise ArgumentError(
            "model",
            "expected weights above 0 of random texts, got empty vectors. Train the model first.",
        )
    got = _encoded(exported, texts)
    if top_k is not None:  # entries that tie with the last one may be others
        last = exact.topk(top_k, dim=1).values[:, -1:]
        kept = got > 0
        exact, rounded = (torch.where(kept | (each > last), each, 0) for each in (exact, rounded))
    if quantize is not None:
        cosine = float(
            torch.nn.functional.cosine_similarity(got, exact, dim=1)[exact.any(dim=1)].min(),
        )
        if not cosine >= LEAST_COSINE:
            remedy = "This model loses too much in 8 bits: export it without quantize."
            raise ArgumentError(
                "quantize",
                f"expected a cosine of at least {LEAST_COSINE}, got {cosine:.3g}. {remedy}",
            )
        return {"least_cosine": round(cosine, 6)}
    own, largest = float((rounded - exact).abs().max()), float(exact.abs().max())
    allowed = ALLOWED * max(own, EPSILON * largest)
    if not (difference := float((got - exact).abs().max())) <= allowed:
        expected = f"scores of the model within {allowed:.3g} on random texts"
        raise ArgumentError(
            "model",
            f"expected {expected}, got a difference of {difference:.3g}. Leave it as it is.",
        )
    return {"budget_used": round(difference / allowed, 4)}
