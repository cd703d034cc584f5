"""``tilefold export``: files for other engines, and a model as one graph."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tilefold import retrieval
from tilefold.cli import _common, _models, _options, _scores
from tilefold.cli._common import CommandError, UsageError
from tilefold.cli._options import DocumentFieldOptions, option, refuse_options
from tilefold.retrieval.data.passages import Passages
from tilefold.retrieval.errors import DataError, VocabularyMismatchError


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
        _common.print_result(
            *_graph(request.model, request.output, request.quantize, request.top_k, request.as_json)
        )
        return
    if request.vectors is None:
        raise UsageError("--vectors: give the folder of documents that tilefold encode wrote.")
    # of one of the engines
    own = {
        "field_type": request.field_type,
        "dots": request.dots,
        "document": request.document,
        "namespace": request.namespace,
    }
    options = {"field": request.field, "overwrite": request.overwrite, **_common.known(own)}
    if (
        tokens := _tokens(request.vectors, request.model, request.names, request.field_type)
    ) is None:
        refuse_options(
            {"--dots": request.dots},
            "does nothing where terms are called by their numbers: leave it out",
        )
    started = time.monotonic()
    with _common.heartbeat(f"exporting ({request.to})"):
        exported = _write(
            request.to,
            request.vectors,
            request.output,
            tokens,
            _texts(request.data, request.vectors),
            options,
        )
    seconds = round(time.monotonic() - started, 3)
    result = {
        "output": str(request.output),
        "engine": request.to,
        "n_documents": exported.n_documents,
    }
    result |= {"n_weights": exported.n_weights, "files": exported.files, "seconds": seconds}
    first, *others = exported.files
    files = f"{first}, {others[0]}" if len(others) == 1 else f"{first} and {len(others)} bulk files"
    said = f"{exported.n_documents} documents written for {request.to} in {seconds:.1f} s: {request.output} ({files})"
    _common.print_result(result, request.as_json, said)


def _graph(
    model: str | None,
    output: Path,
    quantize: str | None,
    top_k: int | None,
    as_json: bool,
) -> Any:
    """The result of an export to ONNX, and what is said of it."""
    if model is None or model == _models.PACKAGED:
        raise UsageError(
            "--model: expected the folder or name of a sparse model to export, got "
            f"{model or 'none'}.",
        )
    from tilefold.recipes import export_onnx
    from tilefold.recipes.loading import quiet_libraries

    _models.load_model(model, kinds=("sparse",), fast=())  # refuses what is none
    started = time.monotonic()
    try:
        in_options = _options.option_errors(model="--model", quantize="--quantize", top_k="--top-k")
        with _common.heartbeat("exporting (onnx)"), quiet_libraries(), in_options:
            made = export_onnx(model, output, quantize=quantize, top_k=top_k)
    except ImportError as error:
        raise CommandError(f"--to onnx: {error}") from error
    seconds = round(time.monotonic() - started, 3)
    (name, value), *_ = made.error.items()
    checked = f"{name.replace('_', ' ')} {value:g} on random texts"
    said = f"one graph of {made.bytes / 1e6:.0f} MB in {seconds:.1f} s ({checked}): {output}"
    return (
        {**made._asdict(), "seconds": seconds},
        as_json,
        said,
        _common.next_command("serve", "--model", output),
    )


def _write(
    to: str,
    vectors: Path,
    output: Path,
    tokens: Sequence[str] | None,
    texts: Any,
    options: dict[str, Any],
) -> Any:
    write = retrieval.export_opensearch if to == "opensearch" else retrieval.export_vespa
    try:
        with _options.option_errors(
            field="--field",
            field_type="--field-type",
            dots="--dots",
            document="--document",
            namespace="--namespace",
            overwrite="--overwrite",
        ):
            return write(vectors, output, tokens, texts=texts, **options)
    except (DataError, VocabularyMismatchError) as error:
        message = str(error).replace("dots=keep", "--dots keep")
        numbers = message.replace(
            "Leave tokens out, so that terms are named by their numbers",
            "Give --names numbers",
        )
        raise CommandError(numbers) from error


def _tokens(
    vectors: Path,
    model: str | None,
    names: str | None,
    field_type: str | None,
) -> Sequence[str] | None:
    """The token of each term, or None for numbers."""
    numbers = field_type == "sparse_vector"
    if (names := names or ("numbers" if numbers else "tokens")) == "numbers":
        refuse_options(
            {"--model": model},
            "gives the names of terms, and they are called by their numbers: leave it out",
        )
        return None
    if numbers:
        raise UsageError(
            "--names: terms of --field-type sparse_vector are numbers; leave the option out.",
        )
    if model is None:
        raise UsageError("--model: give the model that made the vectors, or --names numbers.")
    manifest = retrieval.read_manifest(vectors)
    path = _models.find_model(model, "--model")
    tokenizer: Any
    if model == _models.PACKAGED:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
    else:
        tokenizer = _models.load_encoder(path).tokenizer
    found = retrieval.vocabulary_fingerprint(tokenizer)
    if manifest.fingerprint and found and manifest.fingerprint != found:
        expected = f"the vocabulary of {vectors} (fingerprint {manifest.fingerprint[:12]})"
        remedy = "Give the model that made the vectors."
        raise CommandError(
            f"--model: expected {expected}, got that of {model} ({found[:12]}). {remedy}",
        )
    term_names: Sequence[str] = retrieval.term_names(tokenizer, manifest.vocab_size)
    return term_names


def _texts(data: str | None, vectors: Path) -> Mapping[str, str] | None:
    """The documents of --data, which must be those that were encoded."""
    if data is None:
        return None
    collection = _common.load_data(data, documents_only=True)
    made_of = retrieval.read_manifest(vectors).provenance
    _scores.check_texts(f"--vectors {vectors}", made_of, collection, _scores.texts_of(collection))
    cut = made_of.passages
    return collection.contents() if cut is None else Passages.parse(cut).of(collection.documents)
