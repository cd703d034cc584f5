"""``tilefold verify``: whether a model still computes the vectors of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _models
from tilefold.cli._common import UsageError, note
from tilefold.cli._options import DocumentFieldOptions, argument, option, positive, refuse_options

if TYPE_CHECKING:
    from tilefold.retrieval.data.documents import Content
    from tilefold.retrieval.encoding.verification import Verification

# Kind of the model by the layout of its vectors.
_MODEL_KINDS = {"sparse": "sparse", "tokens": "multi-vector", "dense": "dense"}
# Largest difference that is called rounding: values around 1 that are stored in fp16.
_MAX_ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(DocumentFieldOptions):
    """Options of ``tilefold verify``."""

    vectors: Annotated[
        Path,
        argument(
            "Folder of vectors that `tilefold encode` has written.",
        ),
    ]
    model: Annotated[
        str,
        option(
            "Folder or name of the model that has computed the vectors.",
        ),
    ]
    data: Annotated[
        str,
        option(
            "The --data of `tilefold encode`: a folder in the BEIR layout, a file of documents, a "
            "folder of page images, or pydocs.",
        ),
    ]
    split: Annotated[
        str | None,
        option(
            "The --split of `tilefold encode`, for queries.",
        ),
    ] = None
    sample: Annotated[
        int,
        positive(
            "Number of texts or pages to encode again.",
        ),
    ] = 100
    seed: Annotated[
        int,
        option(
            "Equal seeds select equal texts or pages.",
            min=0,
        ),
    ] = 0
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False


def verify(request: VerifyRequest) -> None:
    """Encode a sample of texts or pages again, and compare the bits with the vectors of a folder.

    The exit code is 1 if the model has changed, or if vectors of `encode --invariant` differ.
    Other vectors may differ in their last bits.

    Example:
        tilefold verify VECTORS --model MODEL --data DATA --sample 100
    """
    from tilefold.retrieval.encoding.job import INVARIANT
    from tilefold.retrieval.encoding.verification import manifest_of, verify_vectors

    _models.checked_model_name(request.model, "--model")
    manifest = manifest_of(request.vectors)
    if manifest.kind != "query":
        refuse_options({"--split": request.split}, "requires vectors of queries")
    contents = _load_contents(request, manifest)
    model, _ = _models.load_model(
        request.model,
        kinds=(_MODEL_KINDS[manifest.layout],),
        fast=_models.FUSED,
        invariant=INVARIANT in manifest.settings,
        advice=f"Pass the model that has computed {request.vectors}.",
    )
    verification = verify_vectors(
        request.vectors,
        model,
        contents,
        sample=request.sample,
        seed=request.seed,
    )
    result = {**asdict(verification), "passed": verification.passed}
    _common.print_result(result, request.as_json, *_lines_of(verification))
    if not verification.passed:
        raise typer.Exit(1)


def _load_contents(request: VerifyRequest, manifest: Any) -> Mapping[str, Content]:
    """Return the texts or pages that were encoded, by id.

    Args:
        request: the options of the command.
        manifest: the manifest of the vectors, which tells documents, passages and queries apart.
    """
    from tilefold.retrieval.data.passages import Passages

    is_query = manifest.kind == "query"
    collection = _common.load_data(
        request.data,
        drop_unknown=True,
        documents_only=not is_query,
        splits=None if request.split is None else [request.split],
    )
    if not is_query:
        passages = manifest.provenance.passages
        if passages is None:
            return collection.content()
        return Passages.parse(passages).of(collection.documents)
    if not collection.queries:
        raise UsageError(
            f"--data: expected a collection with queries, as the vectors are of queries, got "
            f"{request.data}, which has none. Pass the collection that was encoded.",
        )
    if request.split is None:
        return collection.queries
    _common.check_split(collection, request.split)
    return collection.split_queries(request.split)


def _describe_comparison(verification: Verification) -> str:
    """Describe how many vectors differ when they are computed again, and by how much.

    The ids of the first different vectors follow.

    Args:
        verification: the result of computing a sample of vectors again.
    """
    n_compared = verification.n_compared
    n_different = verification.n_different
    if n_different == 0:
        return f"{n_compared} vectors have the same bits"
    largest = verification.largest_difference
    has_other_model = "model" in verification.changes
    # Without the option `invariant`, the rounding of a vector depends on its batch.
    is_rounding = not verification.invariant and not has_other_model and largest <= _MAX_ROUNDING
    cause = ", which is rounding" if is_rounding else ""
    ids = [*verification.different_ids]
    if n_different > len(ids):
        ids.append("...")
    return (
        f"{n_different} of {n_compared} vectors differ, by at most {largest:.3g}{cause}: "
        f"{', '.join(ids)}"
    )


def _lines_of(verification: Verification) -> list[str]:
    """Describe a verification: what has changed since the vectors were made, and what differs.

    Args:
        verification: the result of computing a sample of vectors again.
    """
    changes = {
        name: f"{name} has changed: {change}" for name, change in verification.changes.items()
    }
    model_change = changes.pop("model", None)
    # Another model explains every difference, so it comes first.
    lines = [] if model_change is None else [model_change]
    lines.append(_describe_comparison(verification))
    lines += changes.values()
    if verification.n_different and not verification.invariant and model_change is None:
        note(
            "these vectors were encoded without --invariant, so their last bits may depend on the "
            "batch",
        )
    return lines
