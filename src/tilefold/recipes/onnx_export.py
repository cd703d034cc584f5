"""Export of a trained SparseEncoder as ONNX graphs, which compute scores from token ids.

The graphs are compared with the model before the export is written.
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

from tilefold._internal.arguments import ArgumentError, check_integer, path_of
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
# largest allowed error of a graph, as a multiple of the model's own error in fp32
ERROR_FACTOR = 8.0
MIN_COSINE = 0.9  # smallest allowed cosine of the vectors of an 8-bit graph and the model
FP32_EPSILON = 2.0**-23
TEXT_LENGTHS = (1, 3, 12, 40, 200, 700)  # numbers of tokens of the random texts


class ExportedGraph(NamedTuple):
    """Result of :func:`export_onnx`.

    Attributes:
        output: folder of the exported model.
        graphs: number of graphs in the folder.
        bytes: size of all files of the folder.
        quantize: ``"int8"``, or ``None`` for fp32.
        error: ``{"budget_used": share}``, the largest error divided by the allowed error; or
            ``{"least_cosine": cosine}`` of an 8-bit graph.
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
    """Export a ``SparseEncoder`` to a folder, with an ONNX graph of Transformer and SpladePooling.

    The graph computes ``scores`` ``[B, V]`` from ``input_ids`` and ``attention_mask`` ``[B, S]``,
    with dynamic B and S. Other modules, such as the static queries of a Router, are kept. The
    folder is a ``SparseEncoder`` with a module :class:`tilefold.modules.OnnxGraph`, so commands and
    :func:`tilefold.modules.load_encoder` can load it like any model.

    The graph is compared with the model in fp64 on random texts of 1 to 700 tokens. Its largest
    error may be 8 times the error of the model in fp32, or 8 fp32 epsilons of the largest score if
    that is more. Each vector of an 8-bit graph must have a cosine of at least 0.9.

    Args:
        model: model of modules of sentence-transformers, with max or sum pooling; or its folder or
            name.
        output: folder that is created.
        quantize: ``"int8"`` for matrix products in 8 bits: weights with one scale per output, and
            activations with one scale per batch. ``None`` for fp32.
        top_k: number of heaviest entries of a row that the graph returns, as ``indices`` and
            ``weights`` ``[B, top_k]``, heaviest first; ``None`` returns all scores.

    Raises:
        ImportError: if onnx, onnxscript or onnxruntime is not installed.
        ValueError: if the model has no Transformer with a SpladePooling, is accelerated, or cannot
            be exported by torch, or if its graph computes other scores; nothing is written then.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> graph = export_onnx(model, "onnx-model")  # a folder that commands take as --model
    """
    _check_packages()
    output = path_of("output", output)
    if top_k is not None:
        check_integer("top_k", top_k)  # the range is checked when the vocabulary is known
    if quantize not in (None, "int8"):
        raise ArgumentError("quantize", f"expected 'int8' or None, got {quantize!r}.")
    if isinstance(model, str):
        model = load_complete(load_encoder, model)
    if not isinstance(model, SparseEncoder):
        raise ArgumentError("model", f"expected a SparseEncoder, got a {type(model).__name__}.")
    if "encode_sparse_batch" in vars(model):
        raise ArgumentError(
            "model",
            "must not be accelerated. Call restore(model) first.",
        )
    # The model object itself is not copied, because it may have been changed, as by autocast.
    plain_model = _with_modules(model, copy.deepcopy(list(model.children()))).float()
    vocab_size = _encode_both_sides(plain_model, ["a"]).size(1)
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ArgumentError("top_k", f"expected 1 to {vocab_size}, the vocabulary, got {top_k}.")
    with tempfile.TemporaryDirectory() as scratch:
        exporter = _GraphExporter(
            Path(scratch),
            vocab_size,
            quantize,
            top_k,
            _provenance_of(model, quantize),
        )
        exported = _with_modules(model, exporter.replace_modules(plain_model))
        if not exporter.graphs:
            names = ", ".join(type(module).__name__ for module in plain_model)
            raise ArgumentError(
                "model",
                f"expected a Transformer with an LM head before a SpladePooling, got {names}.",
            )
        error = _compare(plain_model, exported, quantize, top_k)
        for graph in exporter.graphs:
            graph.error = error
        # The comparison converted modules that both models share, such as static queries, to fp64.
        exported.float()
        exported.max_active_dims = model.max_active_dims
        with atomic_directory(output, own_names=(), overwrite=False) as folder:
            exported.save_pretrained(str(folder), create_model_card=False)
    n_bytes = sum(file.stat().st_size for file in Path(output).rglob("*") if file.is_file())
    return ExportedGraph(str(output), len(exporter.graphs), n_bytes, quantize, error)


def _provenance_of(model: SparseEncoder, quantize: str | None) -> dict[str, Any]:
    """Return what determines the graph of a model, which is stored with the graph.

    Args:
        model: the model that is exported.
        quantize: ``"int8"``, or ``None`` for fp32.
    """
    return {
        "model": model_fingerprint(model),
        "settings": model_settings(model),
        "vocabulary": vocabulary_fingerprint(model.tokenizer),
        "quantize": quantize,
        "opset": OPSET,
        "tilefold": __version__,
        "torch": torch.__version__,
    }


def _check_packages() -> None:
    """Raise an ``ImportError`` with a remedy if a package for ONNX is not installed."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'an export to ONNX needs {error.name}: pip install "tilefold[onnx]".',
        ) from error


def _with_modules(model: Model, modules: list[nn.Module]) -> Model:
    """Create a model from modules, with the prompts and the similarity of another model.

    Args:
        model: the other model.
        modules: modules of the new model, which runs on the CPU.
    """
    return type(model)(
        modules=modules,
        device="cpu",
        prompts=model.prompts,
        default_prompt_name=model.default_prompt_name,
        similarity_fn_name=model.similarity_fn_name,
    ).eval()


def _encode_both_sides(model: Model, texts: list[str]) -> Tensor:
    """Encode n texts as queries and as documents, which a model may encode differently.

    Args:
        model: the model, which computes in its own precision.
        texts: the n texts.

    Returns:
        Vectors ``[2 n, V]`` in fp64: first the query vectors, then the document vectors.
    """
    vectors = []
    with torch.no_grad():
        for encode in (model.encode_query, model.encode_document):
            rows = encode(
                texts,
                convert_to_tensor=True,
                convert_to_sparse_tensor=False,
                show_progress_bar=False,
            )
            vectors.append(rows.double())
    return torch.cat(vectors)


class _GraphExporter:
    """Replaces each Transformer and its pooling in a model by an ONNX graph.

    Args:
        scratch: folder for the files of the graphs.
        vocab_size: size of the vocabulary.
        quantize: ``"int8"``, or ``None`` for fp32.
        top_k: number of entries that a graph returns, or ``None`` for all scores.
        provenance: metadata of the model and the export, which is stored in each graph.

    Attributes:
        graphs: the graphs that have been exported.
    """

    def __init__(
        self,
        scratch: Path,
        vocab_size: int,
        quantize: str | None,
        top_k: int | None,
        provenance: dict[str, Any],
    ) -> None:
        """Store the options of the export.

        Args:
            scratch: folder for the files of the graphs.
            vocab_size: size of the vocabulary.
            quantize: ``"int8"``, or ``None`` for fp32.
            top_k: number of entries that a graph returns, or ``None`` for all scores.
            provenance: metadata of the model and the export, which is stored in each graph.
        """
        self.scratch = scratch
        self.vocab_size = vocab_size
        self.quantize = quantize
        self.top_k = top_k
        self.provenance = provenance
        self.graphs: list[OnnxGraph] = []

    def replace_modules(self, pipeline: nn.Module) -> list[nn.Module]:
        """Return the modules of a pipeline, with ONNX graphs for Transformers and their poolings.

        Each Transformer and the pooling after it become one graph, also in the routes of a Router.
        Other modules are kept.

        Args:
            pipeline: a model or a route of a Router, whose child modules run one after another.

        Raises:
            ValueError: if a Transformer has no SpladePooling right after it.
        """
        modules: list[nn.Module] = []
        for module in pipeline.children():
            previous = modules[-1] if modules else None
            if isinstance(module, Router):
                modules.append(self._replace_routes(module))
            # A subclass of SpladePooling may compute something else than the graph.
            elif type(module) is SpladePooling and isinstance(previous, Transformer):
                modules[-1] = self._export(previous, module)  # replaces the Transformer
            else:
                modules.append(module)
        if any(isinstance(module, Transformer) for module in modules):
            names = " -> ".join(type(module).__name__ for module in pipeline.children())
            raise ArgumentError(
                "model",
                f"expected a SpladePooling right after its Transformer, got {names}.",
            )
        return modules

    def _replace_routes(self, router: Any) -> Router:
        """Return a Router with ONNX graphs in its routes."""
        routes = {name: self.replace_modules(route) for name, route in router.sub_modules.items()}
        return Router(
            routes,
            route_mappings=router.route_mappings,
            default_route=router.default_route,
            allow_empty_key=router.allow_empty_key,
        )

    def _export(self, transformer: Any, pooling: Any) -> OnnxGraph:
        """Export a Transformer with its pooling as one graph, and return a module that runs it.

        The graph is written into the scratch folder, and quantized if `quantize` is set.

        Args:
            transformer: the Transformer, which has an LM head.
            pooling: the ``SpladePooling`` after the Transformer.

        Raises:
            ValueError: if the Transformer adds tokens to queries, or torch cannot export it.
        """
        if getattr(transformer, "query_expansion", None) is not None:
            raise ArgumentError(
                "model",
                "must not add tokens to texts, got a Transformer that expands queries.",
            )
        folder = self.scratch / str(len(self.graphs))
        folder.mkdir()
        path = folder / GRAPH
        scorer = _Scorer(
            transformer,
            pooling,
            self.top_k,
            untie_head=self.quantize is not None,
        )
        if self.quantize is None:
            _write_graph(scorer, path)
        else:
            fp32_path = folder / "fp32.onnx"
            _write_graph(scorer, fp32_path)
            _quantize(fp32_path, path)
        graph = OnnxGraph(
            copy.deepcopy(transformer.tokenizer),
            path,
            vocab_size=self.vocab_size,
            sha256=sha256_file(path),
            max_seq_length=transformer.max_seq_length,
            query_length=getattr(transformer, "query_length", None),
            document_length=getattr(transformer, "document_length", None),
            top_k=self.top_k,
            pooling=pooling.pooling_strategy,
            activation=pooling.activation_function,
            quantize=self.quantize,
            made_of=self.provenance,
        )
        self.graphs.append(graph)
        return graph


class _Scorer(nn.Module):
    """Masked language model with activation and pooling, which computes scores in fp32.

    Args:
        transformer: the Transformer, whose network is copied.
        pooling: the ``SpladePooling`` after the Transformer.
        top_k: number of entries that are returned, or ``None`` for all scores.
        untie_head: whether to copy the weight that the LM head shares with the embeddings.
            Quantization would skip a shared weight.
    """

    def __init__(
        self,
        transformer: Any,
        pooling: Any,
        top_k: int | None,
        untie_head: bool,
    ) -> None:
        """Create the function that is exported, on the CPU and in fp32.

        Args:
            transformer: the Transformer, whose network is copied.
            pooling: the ``SpladePooling`` after the Transformer.
            top_k: number of entries that are returned, or ``None`` for all scores.
            untie_head: whether to copy the weight that the LM head shares with the embeddings.
                Quantization would skip a shared weight.
        """
        super().__init__()
        self.network: Any = copy.deepcopy(transformer.model).float().cpu().eval()
        head = self.network.get_output_embeddings()
        if untie_head:
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        self.pooling = pooling.pooling_strategy
        self.top_k = top_k
        self.activation = STOCK_ACTIVATIONS[pooling.activation_function]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Compute the sparse vectors of B texts; torch exports this method as the ONNX graph.

        Args:
            input_ids: token ids ``[B, S]``.
            attention_mask: ``[B, S]``, 0 for padding.

        Returns:
            Scores ``[B, V]`` or, with ``top_k``, indices and weights ``[B, top_k]``, heaviest
            first.
        """
        logits = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        # Every activation of minus infinity is 0.
        logits = logits.masked_fill(attention_mask[..., None] == 0, -torch.inf)
        if self.pooling == "max":
            # The activation is monotone, so it can be applied after the maximum.
            scores = activate(logits.amax(dim=1), self.activation)
        else:
            scores = activate(logits, self.activation).sum(dim=1)
        if self.top_k is None:
            return scores
        heaviest = scores.topk(self.top_k, dim=1)
        return heaviest.indices, heaviest.values


def _write_graph(scorer: _Scorer, path: Path) -> None:
    """Write a scorer as an ONNX graph, with dynamic batch and sequence sizes.

    Args:
        scorer: module that computes scores from token ids and a mask.
        path: file of the graph, which is created.

    Raises:
        ValueError: if torch cannot export the scorer's network.
    """
    # torch traces the scorer with an example batch: two sequences, one of them padded. The ids 1 to
    # 5 are in every vocabulary.
    n_texts = 2
    n_tokens = 7
    token_ids = torch.arange(n_texts * n_tokens).view(n_texts, n_tokens) % 5 + 1
    mask = torch.ones(n_texts, n_tokens, dtype=torch.int64)
    mask[1, 4:] = 0
    dynamic_sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    output_names = ["scores"] if scorer.top_k is None else ["indices", "weights"]
    try:
        with warnings.catch_warnings(), quiet_loggers("torch.onnx"), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                scorer,
                (token_ids, mask),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=(dynamic_sizes, dynamic_sizes),
                verbose=False,
                input_names=["input_ids", "attention_mask"],
                output_names=output_names,
            )
            program.save(path)
    except Exception as error:
        network = type(scorer.network).__name__
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(
            "model",
            f"torch cannot export a {network} to ONNX ({type(error).__name__}: {reason}).",
        ) from error


def _quantize(fp32_path: Path, path: Path) -> None:
    """Quantize the weights of matrix products in a graph to 8-bit integers.

    Args:
        fp32_path: file of the graph in fp32.
        path: file of the quantized graph, which is created.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # torch writes the weights of a large graph into a second file.
    has_external_data = fp32_path.with_name(fp32_path.name + ".data").exists()
    root_logger = None
    with quiet_loggers(root_logger):  # onnxruntime logs advice there
        quantize_dynamic(
            fp32_path,
            path,
            per_channel=True,
            # Weights use 7 of the 8 bits, because CPUs without VNNI add products in 16 bits.
            reduce_range=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            use_external_data_format=has_external_data,
        )


def _compare(
    plain_model: Model,
    exported: Model,
    quantize: str | None,
    top_k: int | None,
) -> dict[str, float]:
    """Compare the vectors of a model and of its ONNX graphs for random texts.

    Args:
        plain_model: the model, which is converted to fp64 in place.
        exported: the model with ONNX graphs.
        quantize: ``"int8"``, or ``None`` for fp32.
        top_k: number of entries that the graphs return, or ``None``.

    Returns:
        ``{"budget_used": share}``, the largest error divided by the allowed error; or
        ``{"least_cosine": cosine}`` of an 8-bit graph.

    Raises:
        ValueError: if the vectors differ too much, all are empty, or the model fails.
    """
    texts = _random_texts(plain_model.tokenizer)
    try:
        fp32_vectors = _encode_both_sides(plain_model, texts)
        exact_vectors = _encode_both_sides(plain_model.double(), texts)
    except Exception as error:
        raise ArgumentError(
            "model",
            f"must encode texts of {max(TEXT_LENGTHS)} tokens, got {type(error).__name__}: "
            f"{error}; set its max_seq_length if it has fewer positions.",
        ) from error
    if not bool(exact_vectors.any()):
        raise ArgumentError(
            "model",
            "must give random texts weights above 0, got empty vectors. Train the model first.",
        )
    vectors = _encode_both_sides(exported, texts)
    if top_k is not None:
        last_weight = exact_vectors.topk(top_k, dim=1).values[:, -1:]
        fp32_vectors = _keep_compared_entries(fp32_vectors, vectors, last_weight)
        exact_vectors = _keep_compared_entries(exact_vectors, vectors, last_weight)
    if quantize is not None:
        return {"least_cosine": _check_cosine(vectors, exact_vectors)}
    return {"budget_used": _check_difference(vectors, exact_vectors, fp32_vectors)}


def _random_texts(tokenizer: Any) -> list[str]:
    """Return one text of random tokens for each of ``TEXT_LENGTHS``, the same in every call."""
    generator = random.Random(0)  # noqa: S311 - reproducible, no secret
    token_ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    return [tokenizer.decode(generator.choices(token_ids, k=length)) for length in TEXT_LENGTHS]


def _keep_compared_entries(expected: Tensor, returned: Tensor, last_weight: Tensor) -> Tensor:
    """Set the entries of vectors to 0 that a graph with `top_k` rightly left out.

    A graph must return all entries that are heavier than the ``top_k``-th one. It may choose among
    several entries with the weight of the ``top_k``-th one.

    Args:
        expected: vectors ``[n, V]`` of the model.
        returned: vectors ``[n, V]`` of the graph.
        last_weight: ``[n, 1]``, weight of the ``top_k``-th entry of the model's vectors.
    """
    is_compared = (returned > 0) | (expected > last_weight)
    return torch.where(is_compared, expected, 0)


def _check_cosine(vectors: Tensor, exact_vectors: Tensor) -> float:
    """Return the smallest cosine between the vectors of an 8-bit graph and of the model.

    Args:
        vectors: vectors ``[n, V]`` of the graph.
        exact_vectors: vectors ``[n, V]`` of the model in fp64, for the same texts.

    Raises:
        ValueError: if a cosine is below 0.9.
    """
    cosines = torch.nn.functional.cosine_similarity(vectors, exact_vectors, dim=1)
    has_terms = exact_vectors.any(dim=1)  # an empty vector has no direction
    least_cosine = float(cosines[has_terms].min())
    is_allowed = least_cosine >= MIN_COSINE  # False for NaN
    if not is_allowed:
        raise ArgumentError(
            "quantize",
            f"must keep a cosine of at least {MIN_COSINE} to the model's vectors, got "
            f"{least_cosine:.3g}; export this model without quantize.",
        )
    return round(least_cosine, 6)


def _check_difference(vectors: Tensor, exact_vectors: Tensor, fp32_vectors: Tensor) -> float:
    """Return the largest error of a graph, divided by the allowed error.

    Errors are differences from the model in fp64. A graph may have 8 times the error of the model
    in fp32, or 8 fp32 epsilons of the largest score if that is more.

    Args:
        vectors: vectors ``[n, V]`` of the graph.
        exact_vectors: vectors ``[n, V]`` of the model in fp64, for the same texts.
        fp32_vectors: vectors ``[n, V]`` of the model in fp32.

    Raises:
        ValueError: if the error is larger than allowed.
    """
    fp32_error = float((fp32_vectors - exact_vectors).abs().max())
    largest_score = float(exact_vectors.abs().max())
    allowed = ERROR_FACTOR * max(fp32_error, FP32_EPSILON * largest_score)
    difference = float((vectors - exact_vectors).abs().max())
    is_allowed = difference <= allowed  # False for NaN
    if not is_allowed:
        raise ArgumentError(
            "model",
            f"the scores of its graph must differ by at most {allowed:.3g} on random texts, got "
            f"{difference:.3g}. Do not export this model.",
        )
    return round(difference / allowed, 4)
