"""``tilefold export``: files for other engines, and a model as one graph."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tilefold import retrieval
from tilefold.cli import _common, _models, _scores
from tilefold.cli._common import CommandError, UsageError
from tilefold.cli._options import DocumentFieldOptions, option, refuse_options
from tilefold.retrieval.data.passages import Passages


@dataclass(frozen=True, kw_only=True)
class ExportRequest(DocumentFieldOptions):
    """Options of ``tilefold export``."""

    to: Annotated[
        Literal["opensearch", "vespa", "onnx"],
        option(
            "Bulk files and a mapping, a feed and a schema, or a graph.",
        ),
    ]
    vectors: Annotated[
        Path | None,
        option(
            "Folder of documents that tilefold encode wrote.",
        ),
    ] = None
    output: Annotated[
        Path,
        option(
            "Folder for the files.",
        ),
    ]
    model: Annotated[
        str | None,
        option(
            "The SparseEncoder that made the vectors, for the names of its terms; onnx: to export.",
        ),
    ] = None
    names: Annotated[
        Literal["tokens", "numbers"] | None,
        option(
            "What terms are called: by default tokens, with --model; numbers never collide.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "The documents, to send texts along. " + _common.DOCUMENTS_HELP,
        ),
    ] = None
    field: Annotated[
        str,
        option(
            "Field of the vectors in the engine.",
        ),
    ] = "sparse"
    field_type: Annotated[
        Literal["rank_features", "sparse_vector"] | None,
        option(
            "opensearch: by default rank_features (exact); sparse_vector is for Seismic, numbers "
            "only.",
        ),
    ] = None
    dots: Annotated[
        Literal["refuse", "keep"] | None,
        option(
            "opensearch: tokens with a dot; keep is for neural_sparse queries.",
        ),
    ] = None
    document: Annotated[
        str | None,
        option(
            "vespa: document type and schema (doc).",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        option(
            "vespa: namespace of the document ids (tilefold).",
        ),
    ] = None
    quantize: Annotated[
        str | None,
        option(
            "onnx: 8-bit products, several times as fast and less exact.",
            metavar="int8",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        option(
            "onnx: entries that the graph gives of a text; by default all.",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        option(
            "opensearch, vespa: replace an earlier export in --output.",
            "--overwrite",
        ),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        if self.to != "opensearch":
            refuse_options(
                {"--field-type": self.field_type, "--dots": self.dots},
                "goes with --to opensearch",
            )
        if self.to != "vespa":
            refuse_options(
                {"--document": self.document, "--namespace": self.namespace},
                "goes with --to vespa",
            )
        if self.to == "onnx":
            refuse_options(
                {"--overwrite": self.overwrite},
                "goes with --to opensearch and vespa; a graph needs a new folder",
            )
            refuse_options(
                {"--vectors": self.vectors, "--names": self.names, "--data": self.data},
                "goes with --to opensearch and vespa; onnx reads --model",
            )
        else:
            refuse_options(
                {"--quantize": self.quantize, "--top-k": self.top_k},
                "goes with --to onnx",
            )
            if self.vectors is None:
                raise UsageError(
                    "--vectors: give the folder of documents that tilefold encode wrote."
                )


def export(request: ExportRequest) -> None:
    """Write encoded documents as another engine reads them, or a model as an ONNX graph.

    A vocabulary whose terms would collide in the engine is refused, as is a graph that does not
    compute what the model does. Every command takes the folder of a graph as --model; it needs
    tilefold[onnx].

    Example:
        tilefold export --to opensearch --vectors VECTORS --model MODEL \\
            --output EXPORT
    """
    if request.to == "onnx":
        _export_graph(request)
    else:
        _export_documents(request)


def _export_documents(request: ExportRequest) -> None:
    """Write the documents of ``--vectors`` for OpenSearch or Vespa, and print what was written.

    Args:
        request: options of the command.

    Raises:
        UsageError: for options that do not fit together.
    """
    if request.vectors is None:
        raise UsageError("--vectors: give the folder of documents that tilefold encode wrote.")
    tokens = _tokens(request, request.vectors)
    if tokens is None:
        refuse_options(
            {"--dots": request.dots},
            "does nothing where terms are called by their numbers: leave it out",
        )
    texts = _texts(request.data, request.vectors)
    started = time.monotonic()
    with _common.heartbeat(f"exporting ({request.to})"):
        if request.to == "opensearch":
            exported = retrieval.export_opensearch(
                request.vectors,
                request.output,
                tokens,
                texts=texts,
                field=request.field,
                field_type=request.field_type or "rank_features",
                dots=request.dots or "refuse",
                overwrite=request.overwrite,
            )
        else:
            exported = retrieval.export_vespa(
                request.vectors,
                request.output,
                tokens,
                texts=texts,
                document=request.document or "doc",
                namespace=request.namespace or "tilefold",
                field=request.field,
                overwrite=request.overwrite,
            )
    seconds = round(time.monotonic() - started, 3)
    result = {
        "output": str(request.output),
        "engine": request.to,
        "n_documents": exported.n_documents,
        "n_weights": exported.n_weights,
        "files": exported.files,
        "seconds": seconds,
    }
    line = (
        f"{exported.n_documents} documents written for {request.to} in {seconds:.1f} s: "
        f"{request.output} ({_describe_files(exported.files)})"
    )
    _common.print_result(result, request.as_json, line)


def _describe_files(files: Sequence[str]) -> str:
    """Return the files of an export in words: the schema, and the feed or the bulk files."""
    schema = files[0]
    if len(files) == 2:
        return f"{schema}, {files[1]}"
    return f"{schema} and {len(files) - 1} bulk files"


def _export_graph(request: ExportRequest) -> None:
    """Write the model as one ONNX graph, and print its size, time and numerical error.

    Args:
        request: options of the command.

    Raises:
        UsageError: without a sparse model.
        CommandError: if packages that write ONNX are not installed.
    """
    if request.model is None or request.model == _models.PACKAGED:
        raise UsageError(
            "--model: expected the folder or name of a sparse model to export, got "
            f"{request.model or 'none'}.",
        )
    from tilefold.recipes import export_onnx
    from tilefold.recipes.loading import quiet_libraries

    _models.load_model(request.model, kinds=("sparse",), fast=())  # refuses other models
    started = time.monotonic()
    try:
        with _common.heartbeat("exporting (onnx)"), quiet_libraries():
            graph = export_onnx(
                request.model,
                request.output,
                quantize=request.quantize,
                top_k=request.top_k,
            )
    except ImportError as error:
        raise CommandError(f"--to onnx: {error}") from error
    seconds = round(time.monotonic() - started, 3)
    error_name, error_value = next(iter(graph.error.items()))
    _common.print_result(
        {**graph._asdict(), "seconds": seconds},
        request.as_json,
        f"one graph of {graph.bytes / 1e6:.0f} MB in {seconds:.1f} s "
        f"({error_name.replace('_', ' ')} {error_value:g} on random texts): {request.output}",
        _common.next_command("serve", "--model", request.output),
    )


def _tokens(request: ExportRequest, vectors: Path) -> Sequence[str | None] | None:
    """Return the names of the terms of vectors, which are tokens of the model's vocabulary.

    Args:
        request: options of the command.
        vectors: folder of the vectors.

    Returns:
        One name per term; None for a term without a token. None instead of the names if terms are
        called by their numbers.

    Raises:
        UsageError: for options that contradict one another, or tokens without a model.
        CommandError: for a model with another vocabulary than that of the vectors.
    """
    needs_numbers = request.field_type == "sparse_vector"
    default_names = "numbers" if needs_numbers else "tokens"
    names_choice = request.names or default_names
    if names_choice == "numbers":
        refuse_options(
            {"--model": request.model},
            "gives the names of terms, and they are called by their numbers: leave it out",
        )
        return None
    if needs_numbers:
        raise UsageError(
            "--names: terms of --field-type sparse_vector are numbers; leave the option out.",
        )
    if request.model is None:
        raise UsageError("--model: give the model that made the vectors, or --names numbers.")
    manifest = retrieval.read_manifest(vectors)
    tokenizer = _load_tokenizer(request.model)
    fingerprint = retrieval.vocabulary_fingerprint(tokenizer)
    if manifest.fingerprint and fingerprint and manifest.fingerprint != fingerprint:
        raise CommandError(
            f"--model: expected the vocabulary of {vectors} (fingerprint "
            f"{manifest.fingerprint[:12]}), got that of {request.model} ({fingerprint[:12]}). "
            "Give the model that made the vectors.",
        )
    names: Sequence[str | None] = retrieval.term_names(tokenizer, manifest.vocab_size)
    return names


def _load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a sparse model, or of the packaged one."""
    path = _models.find_model(model, "--model")
    if model != _models.PACKAGED:
        return _models.load_encoder(path).tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _texts(data: str | None, vectors: Path) -> Mapping[str, str] | None:
    """Return the texts of ``--data`` by id, of passages if these were encoded.

    Args:
        data: value of ``--data``; None returns None.
        vectors: folder of the vectors.

    Raises:
        CommandError: if other documents were encoded.
    """
    if data is None:
        return None
    collection = _common.load_data(data, documents_only=True)
    provenance = retrieval.read_manifest(vectors).provenance
    _scores.check_texts(
        f"--vectors {vectors}", provenance, collection, _scores.texts_of(collection)
    )
    if provenance.passages is None:
        return collection.contents()
    return Passages.parse(provenance.passages).of(collection.documents)
