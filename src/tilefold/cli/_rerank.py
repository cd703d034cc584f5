"""``--rerank``: late interaction over the candidates of an index, for search, evaluate and serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from tilefold.retrieval.reranking import Reranking
    from tilefold.retrieval.tokens import TokenStore

DEPTH_HELP = "Best candidates per query to rerank."
RERANK = Annotated[
    str | None,
    typer.Option(
        help="Rerank by late interaction: token vectors (tilefold encode), or a multi-vector model, which encodes "
        "candidates; minilm takes the token states of the packaged one."
    ),
]
MODEL = Annotated[
    str | None,
    typer.Option(help="Multi-vector model for the queries, or minilm; by default the one that made the token vectors."),
]
WEIGHT = Annotated[
    float | None,
    typer.Option(
        help="Weight of MaxSim in [0, 1] beside the first scores, both from 0 to 1 per query; by default MaxSim alone."
    ),
]


def request(asked: Mapping[str, Any], depth: int | None = None) -> Reranking | None:
    """Reranking by --rerank-depth, else `depth`, --rerank-tail and --rerank-weight; None without --rerank."""
    if asked["rerank"] is None:
        return None
    from tilefold.retrieval.reranking import Reranking

    values = {name: asked.get(f"rerank_{name}") for name in ("depth", "tail", "weight")}
    with _common.as_options(depth="--rerank-depth", tail="--rerank-tail", weight="--rerank-weight"):
        return Reranking(**({"depth": depth} | _common.known(values)))


def load_late(source: str, model: str | None, texts: bool, option: str = "--rerank") -> tuple[Any, TokenStore | None]:
    """The multi-vector model that `source` and `model` name, and the token vectors at `source`, if it is not the model.

    Args:
        source: of `option`: a folder of token vectors, or a model.
        model: of the option's ``-model``: made the token vectors.
        texts: whether the texts of candidates are known, which a model encodes.
        option: ``--rerank`` or ``--tokens``.
    """
    folder, packaged = Path(source), source == _models.PACKAGED
    if not packaged and (folder / "manifest.json").is_file():
        return _stored(folder, model, option)
    if (
        not packaged
        and folder.is_dir()
        and not any((folder / f"{name}.json").is_file() for name in ("config", "modules"))
    ):
        raise _common.UsageError(
            f"{option}: {source} holds neither token vectors nor a model; make token vectors with: "
            "tilefold encode --model MULTI_VECTOR_MODEL"
        )
    if model is not None:
        raise _common.UsageError(f"{option}-model goes with token vectors in {option}, which here is a model itself.")
    if not texts:
        raise _common.UsageError(
            f"{option} with a model encodes the candidates' texts: give the collection with --data."
        )
    return _models.load_multi_vector(source, option), None


def _stored(folder: Path, model: str | None, option: str) -> tuple[Any, TokenStore]:
    from tilefold.retrieval import open_tokens

    store = open_tokens(folder)
    source = model or store.manifest.model_source
    if source is None or (model is None and Path(source).is_absolute() and not Path(source).is_dir()):
        where = "unknown" if source is None else f"no longer in {source}"
        raise _common.UsageError(f"{option}: the model that made {folder} is {where}; name it with {option}-model.")
    return _models.load_multi_vector(source, f"{option}-model"), store
