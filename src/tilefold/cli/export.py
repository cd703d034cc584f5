"""``tilefold export``: files for other engines, and a model as one graph."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilefold import retrieval
from tilefold.cli import _common, _models, _scores
from tilefold.cli._common import CommandError, UsageError
from tilefold.cli._options import DocumentFieldOptions, option, refuse_options
from tilefold.retrieval.data.passages import Passages

if TYPE_CHECKING:
    from tilefold.retrieval.vectors.export import Exported


@dataclass(frozen=True, kw_only=True)
class ExportRequest(DocumentFieldOptions):
    """Options of ``tilefold export``."""

    to: Annotated[
        Literal["opensearch", "vespa", "onnx"],
        option(
            "OpenSearch (bulk files and a mapping), Vespa (a feed and a schema), or an ONNX graph.",
        ),
    ]
    vectors: Annotated[
        Path | None,
        option(
            "Folder of documents of tilefold encode.",
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
            "The SparseEncoder that encoded the vectors, for the names of its terms; onnx: the "
            "model to export.",
        ),
    ] = None
    names: Annotated[
        Literal["tokens", "numbers"] | None,
        option(
            "Names of terms: tokens of --model (default), or numbers, which never collide.",
        ),
    ] = None
    data: Annotated[
        str | None,
        option(
            "The documents, to export their texts, too. " + _common.DOCUMENTS_HELP,
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
            "opensearch: by default rank_features (exact); sparse_vector is for Seismic, and names "
            "terms by numbers.",
        ),
    ] = None
    dots: Annotated[
        Literal["refuse", "keep"] | None,
        option(
            "opensearch: whether tokens with a dot are refused (default) or kept, for "
            "neural_sparse queries.",
        ),
    ] = None
    document: Annotated[
        str | None,
        option(
            "vespa: document type and schema; by default doc.",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        option(
            "vespa: namespace of the document ids; by default tilefold.",
        ),
    ] = None
    quantize: Annotated[
        str | None,
        option(
            "onnx: products in 8 bits, which are several times as fast and less exact.",
            metavar="int8",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        option(
            "onnx: number of weights that the graph returns per text; by default all.",
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
        """Raise ``UsageError`` for options that the target does not use, or missing vectors."""
        super().validate()
        if self.to != "opensearch":
            refuse_options(
                {"--field-type": self.field_type, "--dots": self.dots},
                "requires --to opensearch",
            )
        if self.to != "vespa":
            refuse_options(
                {"--document": self.document, "--namespace": self.namespace},
                "requires --to vespa",
            )
        if self.to == "onnx":
            refuse_options(
                {"--overwrite": self.overwrite},
                "requires --to opensearch or vespa; a graph needs a new folder",
            )
            refuse_options(
                {"--vectors": self.vectors, "--names": self.names, "--data": self.data},
                "requires --to opensearch or vespa; onnx reads --model",
            )
        else:
            refuse_options(
                {"--quantize": self.quantize, "--top-k": self.top_k},
                "requires --to onnx",
            )
            if self.vectors is None:
                raise UsageError(
                    "--vectors: give the folder of documents that tilefold encode wrote.",
                )


def export(request: ExportRequest) -> None:
    """Write encoded documents in the format of another engine, or a model as an ONNX graph.

    A vocabulary whose terms would collide in the engine is refused, and so is a graph that does not
    compute the same as the model. Commands accept the folder of a graph as --model if
    tilefold[onnx] is installed.

    Example:
        tilefold export --to opensearch --vectors VECTORS --model MODEL \\
            --output EXPORT
    """
    if request.to == "onnx":
        _export_graph(request)
    else:
        _export_documents(request)


def _write_export(
    request: ExportRequest,
    vectors: Path,
    term_names: Sequence[str | None] | None,
    texts: Mapping[str, str] | None,
) -> Exported:
    """Write the schema and the documents for OpenSearch or Vespa.

    Args:
        request: the options of the command. Options that were not given have their defaults.
        vectors: the folder of the vectors.
        term_names: a name per term; None names terms by their numbers.
        texts: document id -> text; None writes no texts.
    """
    exported: Exported
    if request.to == "opensearch":
        exported = retrieval.export_opensearch(
            vectors,
            request.output,
            term_names,
            texts=texts,
            field=request.field,
            field_type=request.field_type or "rank_features",
            dots=request.dots or "refuse",
            overwrite=request.overwrite,
        )
    else:
        exported = retrieval.export_vespa(
            vectors,
            request.output,
            term_names,
            texts=texts,
            document=request.document or "doc",
            namespace=request.namespace or "tilefold",
            field=request.field,
            overwrite=request.overwrite,
        )
    return exported


def _export_documents(request: ExportRequest) -> None:
    """Write the documents of ``--vectors`` for OpenSearch or Vespa, and print a summary.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if options do not fit together.
    """
    if request.vectors is None:
        raise UsageError("--vectors: give the folder of documents that tilefold encode wrote.")
    term_names = None  # terms are named by their numbers
    if _names_terms_by_tokens(request):
        term_names = _read_term_names(request.model, request.vectors)
    else:
        refuse_options(
            {"--model": request.model, "--dots": request.dots},
            "has no effect if terms are named by their numbers: leave it out",
        )
    texts = _load_texts(request.data, request.vectors)
    started = time.monotonic()
    with _common.heartbeat(f"exporting ({request.to})"):
        exported = _write_export(request, request.vectors, term_names, texts)
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
    """Describe the files of an export: the schema, and the files of documents.

    Args:
        files: the names of the files, with the schema first.
    """
    schema, *documents = files
    if len(documents) == 1:
        return f"{schema}, {documents[0]}"
    return f"{schema} and {len(documents)} bulk files"


def _export_graph(request: ExportRequest) -> None:
    """Write the model as one ONNX graph, and print its size, time and numerical error.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if ``--model`` is missing, the packaged model, or not a sparse model.
        CommandError: if a package that writes ONNX is not installed.
    """
    # The packaged model is not a folder, which the export reads.
    if request.model is None or request.model == _models.PACKAGED:
        raise UsageError(
            "--model: expected the folder or name of a sparse model to export, got "
            f"{request.model or 'none'}.",
        )
    from tilefold.recipes import export_onnx
    from tilefold.recipes.loading import quiet_libraries

    # Raises an error unless the model is sparse; the export loads it again.
    _models.load_model(request.model, kinds=("sparse",), fast=())
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
    error_name, error_value = next(iter(graph.error.items()))  # the only numerical error
    _common.print_result(
        {**graph._asdict(), "seconds": seconds},
        request.as_json,
        f"one graph of {graph.bytes / 1e6:.0f} MB in {seconds:.1f} s "
        f"({error_name.replace('_', ' ')} {error_value:g} on random texts): {request.output}",
        _common.next_command("serve", "--model", request.output),
    )


def _names_terms_by_tokens(request: ExportRequest) -> bool:
    """Return whether terms are named by tokens of the vocabulary, instead of by numbers.

    Raises:
        UsageError: if ``--names tokens`` is given for a type of field that only takes numbers.
    """
    needs_numbers = request.field_type == "sparse_vector"
    if needs_numbers and request.names == "tokens":
        raise UsageError(
            "--names: terms of --field-type sparse_vector are numbers; leave the option out.",
        )
    return not needs_numbers and request.names != "numbers"


def _read_term_names(model: str | None, vectors: Path) -> Sequence[str | None]:
    """Return the tokens that name the terms of sparse vectors, from the vocabulary of a model.

    Args:
        model: the value of ``--model``.
        vectors: the folder of the vectors.

    Returns:
        A name per term; None for a term without a token.

    Raises:
        UsageError: if there is no model.
        CommandError: if the vocabulary of the model is not that of the vectors.
    """
    if model is None:
        raise UsageError("--model: give the model that made the vectors, or --names numbers.")
    manifest = retrieval.read_manifest(vectors)
    tokenizer = _load_tokenizer(model)
    fingerprint = retrieval.vocabulary_fingerprint(tokenizer)
    if manifest.fingerprint and fingerprint and manifest.fingerprint != fingerprint:
        raise CommandError(
            f"--model: expected the vocabulary of {vectors} (fingerprint "
            f"{manifest.fingerprint[:12]}), got that of {model} ({fingerprint[:12]}). "
            "Give the model that made the vectors.",
        )
    names: Sequence[str | None] = retrieval.term_names(tokenizer, manifest.vocab_size)
    return names


def _load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a sparse model, or of the packaged model."""
    path = _models.checked_model_name(model, "--model")
    if model != _models.PACKAGED:
        return _models.load_encoder(path).tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _load_texts(data: str | None, vectors: Path) -> Mapping[str, str] | None:
    """Load the texts of ``--data``, which the engine stores with the vectors.

    Args:
        data: the value of ``--data``; None returns None.
        vectors: the folder of the vectors.

    Returns:
        Id -> text, of documents or of the passages that the vectors are of.

    Raises:
        CommandError: if the vectors were not made from these documents.
    """
    if data is None:
        return None
    collection = _common.load_data(data, documents_only=True)
    provenance = retrieval.read_manifest(vectors).provenance
    _scores.check_made_from(collection, f"--vectors {vectors}", provenance)
    if provenance.passages is None:
        return collection.contents()
    return Passages.parse(provenance.passages).of(collection.documents)
