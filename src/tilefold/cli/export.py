"""``tilefold export``: files that feed encoded documents to OpenSearch or Vespa."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tilefold.cli import _common, _models
from tilefold.cli._common import Text, option

ENGINES = ("opensearch", "vespa")
NAMES = ("tokens", "numbers")


def export(
    to: Annotated[str, option("opensearch (bulk files and a mapping), or vespa (feed and schema).", "--to")],
    vectors: Annotated[Path, option("Folder of documents that tilefold encode wrote.")],
    output: Annotated[Path, option("Folder for the files.")],
    model: Annotated[Text, option("The SparseEncoder that made the vectors, for the names of its terms.")] = None,
    names: Annotated[
        Text, option("What terms are called: tokens (with --model, the default) or numbers, which never collide.")
    ] = None,
    data: Annotated[Text, option("The documents, to send texts along. " + _common.DOCUMENTS_HELP)] = None,
    field: Annotated[str, option("Field of the vectors in the engine.")] = "sparse",
    field_type: Annotated[
        Text, option("opensearch: rank_features (exact, the default), or sparse_vector (Seismic; numbers only).")
    ] = None,
    dots: Annotated[
        Text, option("opensearch: refuse tokens with a dot (the default), or keep them, for neural_sparse queries.")
    ] = None,
    document: Annotated[Text, option("vespa: document type and schema (doc).")] = None,
    namespace: Annotated[Text, option("vespa: namespace of the document ids (tilefold).")] = None,
    as_json: Annotated[bool, option("The result as JSON on stdout.", "--json")] = False,
) -> None:
    """Write encoded documents as another engine reads them; a vocabulary whose terms would collide there is refused."""
    _common.check_choice("--to", to, ENGINES)
    # of one of the engines
    own = {"field_type": field_type, "dots": dots, "document": document, "namespace": namespace}
    options = {"field": field, **_common.known(own)}
    tokens = _tokens(vectors, model, names, field_type)
    if tokens is None:
        _common.refuse_useless(["dots"], "where terms are called by their numbers")
    started = time.monotonic()
    with _common.heartbeat(f"exporting ({to})"):
        exported = _write(to, vectors, output, tokens, _texts(data, vectors), options)
    result = {
        "output": str(output),
        "engine": to,
        "n_documents": exported.n_documents,
        "n_weights": exported.n_weights,
        "files": exported.files,
        "seconds": round(time.monotonic() - started, 3),
    }
    files = exported.files[0] + (
        f", {exported.files[1]}" if len(exported.files) == 2 else f" and {len(exported.files) - 1} bulk files"
    )
    said = f"{exported.n_documents} documents written for {to} in {result['seconds']:.1f} s: {output} ({files})"
    _common.print_result(result, as_json, said)


def _write(
    to: str, vectors: Path, output: Path, tokens: Sequence[str] | None, texts: Any, options: dict[str, Any]
) -> Any:
    from tilefold.retrieval.errors import DataError, VocabularyMismatchError
    from tilefold.retrieval.export import export_opensearch, export_vespa

    write = export_opensearch if to == "opensearch" else export_vespa
    try:
        return write(vectors, output, tokens, texts=texts, **options)
    except (DataError, VocabularyMismatchError) as error:
        message = str(error).replace("dots=keep", "--dots keep")
        numbers = message.replace("Leave tokens out, so that terms are named by their numbers", "Give --names numbers")
        raise _common.CommandError(numbers) from error
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise _common.UsageError(f"--{name.replace('_', '-')}:{rest}") from error


def _tokens(vectors: Path, model: str | None, names: str | None, field_type: str | None) -> Sequence[str] | None:
    """The token of each term, or None for numbers."""
    from tilefold._vocabulary import vocabulary_fingerprint
    from tilefold.retrieval.vectors import read_manifest

    numbers = field_type == "sparse_vector"
    names = names or ("numbers" if numbers else "tokens")
    _common.check_choice("--names", names, NAMES)
    if names == "numbers":
        _common.refuse(["model"], "gives the names of terms, and they are called by their numbers: leave it out")
        return None
    if numbers:
        raise _common.UsageError("--names: terms of --field-type sparse_vector are numbers; leave the option out.")
    if model is None:
        raise _common.UsageError("--model: give the model that made the vectors, or --names numbers.")
    manifest = read_manifest(vectors)
    tokenizer = _tokenizer(model)
    found = vocabulary_fingerprint(tokenizer)
    if manifest.fingerprint and found and manifest.fingerprint != found:
        raise _common.CommandError(
            f"--model: expected the vocabulary of {vectors} (fingerprint {manifest.fingerprint[:12]}), got that of "
            f"{model} ({found[:12]}). Give the model that made the vectors."
        )
    tokens: list[str | None] = tokenizer.convert_ids_to_tokens(range(manifest.vocab_size))
    return [token or "" for token in tokens]


def _tokenizer(model: str) -> Any:
    path = _models.find_model(model, "--model")
    if model != _models.PACKAGED:
        return _models.load_encoder(path).tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _texts(data: str | None, vectors: Path) -> Any:
    """The documents of --data, which must be those that were encoded."""
    if data is None:
        return None
    from tilefold.retrieval.provenance import Provenance, texts_digest
    from tilefold.retrieval.vectors import read_manifest

    texts = _common.load_data(data, documents_only=True).contents()
    if read_manifest(vectors).provenance.differs(Provenance(texts_sha256=texts_digest(texts))):
        raise _common.CommandError(f"--data: {data} holds other texts than those that {vectors} was encoded from.")
    return texts
