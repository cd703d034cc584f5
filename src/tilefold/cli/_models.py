"""Models that options name: the packaged one, folders and Hugging Face names, refused at once where
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._internal.typing import Model, SparseEncoder
from tilefold.cli._common import CommandError, UsageError, first_line, note
from tilefold.retrieval.common.provenance import texts_digest

if TYPE_CHECKING:
    from tilefold.retrieval.data.collection import Collection

PACKAGED = "minilm"
KINDS = {
    "sparse": "sparse",
    "tokens": "multi-vector",
    "dense": "dense",
}  # of vectors, and of the models that make them
VECTORS = {"sparse": "sparse vectors", "multi-vector": "token vectors", "dense": "dense vectors"}
FUSED = ("sparse", "multi-vector")  # kinds of models that encode faster than stock ones
SHOWN = 5  # models of the cache
HUB_TIMEOUT = 5.0  # seconds for the first word from the hub
_NAMES = {
    "sparse": "a SparseEncoder",
    "multi-vector": "a multi-vector model",
    "dense": "a dense model",
    "cross-encoder": "a cross-encoder",
    "backbone": "a plain transformers model",
}


def find_model(name: str, option: str) -> str:
    """The folder of a model, or a Hugging Face name of which the hub or its local cache knows."""
    if name == PACKAGED:
        from tilefold.recipes.backbone import minilm_path

        return str(minilm_path())
    path = Path(name)
    if not name.strip():
        raise UsageError(f"{option}: expected a folder or a name, got an empty text.")
    if path.is_dir():
        return name
    if path.exists():
        raise UsageError(f"{option}: expected the folder of a model, got the file {name}.")
    parent_is_here = len(path.parts) > 1 and Path(path.parts[0]).exists()  # it was meant as a path
    if name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1 or parent_is_here:
        raise UsageError(f"{option}: there is no folder {name}; train a model with: tilefold train")
    if problem := _hub_problem(name):
        here = f"{PACKAGED} needs no download{cached()}"
        raise UsageError(
            f"{option}: there is no folder {name}, and {problem}; {here}; train one with: tilefold "
            "train",
        )
    return name


def cached() -> str:
    """Models of the Hugging Face cache of this machine, as the end of a sentence; empty without
    one.
    """
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return ""
    found = Path(HF_HUB_CACHE).glob("models--*/snapshots/*/config.json")
    names = sorted({path.parts[-4].removeprefix("models--").replace("--", "/") for path in found})
    return f" (in the cache of this machine: {', '.join(names[:SHOWN])})" if names else ""


def find_models(options: Mapping[str, str | None]) -> None:
    """Refuse, before any work, options that name no model and no folder; see :func:`find_model`."""
    for option, name in options.items():
        if name is not None:
            find_model(name, option)


@cache
def _hub_problem(name: str) -> str | None:
    """Why `name` cannot be had from the hub, or None; one question without retries."""
    try:
        from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    except ImportError:
        return None  # loading the model says what to install

    problem = None
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except errors.EntryNotFoundError:
        pass  # the model is there, without a file of that name
    except errors.HFValidationError:
        problem = "no model can have that name"
    except errors.GatedRepoError:
        problem = (
            "the model of that name on the Hugging Face hub is gated: log in with hf auth login"
        )
    except errors.RepositoryNotFoundError:
        problem = "no model of that name on the Hugging Face hub"
    except Exception as error:  # by the library's version: of requests, httpx or its own
        problem = (
            f"the Hugging Face hub could not be asked for one of that name ({first_line(error)})"
        )
    return problem


def load_encoder(name: str) -> SparseEncoder:
    """A SparseEncoder, with the fused head where its architecture allows."""
    return load_model(name, kinds=("sparse",))[0]


def load_untrained(
    texts_sha256: str,
    texts: Callable[[], Mapping[str, str]] | None,
    what: str,
) -> SparseEncoder:
    """The packaged model as a SparseEncoder without training, for the documents with this
    fingerprint.

    `texts` gives them, where the command has them, and `what` says in messages which documents are
    meant.
    """
    find_model(PACKAGED, "--model")
    check_sentence_transformers()
    from tilefold.recipes.splade import untrained_splade

    start = f"--model: {PACKAGED} is the untrained start, made from {what}"
    try:
        model = untrained_splade(texts_sha256, texts)
    except LookupError as error:
        remedy = "give the documents with --data, or the folder of the model that made the vectors."
        raise UsageError(f"{start}, and not in the cache of this machine: {remedy}") from error
    except ValueError as error:
        other = "another collection, or one that has changed since. Give its own collection with --data."
        raise CommandError(f"{start}, and --data holds others: {other}") from error
    _accelerate(model)
    return model


def load_model(
    name: str,
    option: str = "--model",
    kinds: tuple[str, ...] = ("sparse", "multi-vector"),
    fast: tuple[str, ...] = ("sparse",),
) -> tuple[Any, str]:
    """A model of one of `kinds` (``"sparse"``, ``"multi-vector"``, ``"dense"``), and its kind; of
    `fast`, accelerated.

    The packaged name is a dense model, or a multi-vector one where only those are of use; as a
    sparse one it depends on documents, see :func:`load_untrained`. No remote code runs, and a
    folder is read without a look at the network.
    """
    path = find_model(name, option)
    check_sentence_transformers()
    from safetensors import SafetensorError

    from tilefold.recipes.colbert import untrained_colbert
    from tilefold.recipes.loading import load_saved, quiet_libraries, saved_kind

    with quiet_libraries():
        late = name == PACKAGED and kinds == ("multi-vector",)
        saved = "multi-vector" if late else saved_kind(path)
        kind = "sparse" if saved == "backbone" else saved
        if kind not in kinds:
            expected = " or ".join(_NAMES[wanted] for wanted in kinds)
            raise UsageError(
                f"{option}: {name} is {_NAMES[saved]}; expected {expected}. "
                f"{_remedy(name, kind, kinds)}",
            )
        try:
            model = untrained_colbert() if late else load_saved(path, saved)
        except OSError as error:
            raise CommandError(
                f"{option}: {name} could not be loaded ({first_line(error)}).",
            ) from error
        except SafetensorError as error:
            damaged = f"damaged ({first_line(error)}); fetch or train it again."
            raise CommandError(f"{option}: the weights in {name} are {damaged}") from error
        except ValueError as error:
            raise CommandError(f"{option}: {error}") from error
        if kind in fast:
            _accelerate(model)
    return model, kind


def limit_length(model: Any, max_length: int | None) -> None:
    """Let a model read at most so many tokens of a text or pair, no more than it can."""
    name = (
        "max_seq_length" if hasattr(type(model), "max_seq_length") else "max_length"
    )  # of a cross-encoder
    if max_length is None:
        return
    if (own := getattr(model, name)) is not None and max_length > own:
        raise UsageError(
            f"--max-length: expected at most {own}, the tokens that the model reads, got "
            f"{max_length}.",
        )
    setattr(model, name, max_length)


def load_kind(model: str, kind: str | None, collection: Collection | None) -> tuple[Any, str]:
    """The model that makes vectors of `kind`, and its own kind; minilm is a sparse one unless
    another is asked for.
    """
    if model != PACKAGED or kind in ("tokens", "dense"):
        kinds = tuple(KINDS.values()) if kind is None else (KINDS[kind],)
        return load_model(absolute(model), kinds=kinds, fast=FUSED)
    if collection is None:
        remedy = "Save it first: tilefold train --steps 0"
        raise UsageError(
            f"--model: {model} as a sparse model is made from the documents, by one process. "
            f"{remedy}",
        )
    documents = collection.contents()
    what = f"the documents of {collection.name}"
    return load_untrained(texts_digest(documents), lambda: documents, what), "sparse"


@cache
def load_once(name: str, kinds: tuple[str, ...]) -> Any:
    """The model of a worker."""
    return load_model(name, kinds=kinds, fast=FUSED)[0]


def absolute(model: str) -> str:
    """The name of a model as other machines know it."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _remedy(name: str, kind: str, kinds: tuple[str, ...]) -> str:
    """Remedies where a model of `kind` was given and one of `kinds` is needed."""
    colbert = "tilefold train --recipe colbert"
    if kind == "dense":
        itself = f"To score it as it is: tilefold evaluate --model {name}; to store its vectors: encode --kind dense. "
        sparse = f"For sparse vectors: tilefold train with a masked language model, or --model {PACKAGED}."
        tokens = f"For token vectors: {colbert} --model {name} (--steps 0 --dimension 0 for its own), or {PACKAGED}. "
        return tokens if kinds == ("multi-vector",) else itself + tokens + sparse
    if kinds == ("multi-vector",):
        return f"Train one with: {colbert}"
    if kind == "multi-vector":
        return f"Its token vectors rerank what an index found: --rerank {name}."
    if kind == "sparse":
        return "It searches an index of its own vectors: tilefold encode, tilefold index, then --model with --index."
    return f"A cross-encoder scores what training reads: tilefold score MINED --teacher {name}."


def _accelerate(model: Model) -> None:
    from tilefold.integrations.sentence_transformers import accelerate

    try:
        accelerate(model)
    except ValueError as error:
        note(f"encoding with the plain head: {first_line(error)}")


def check_sentence_transformers() -> None:
    """Import sentence-transformers, or say what to install."""
    from tilefold._internal import sentence_transformers as _sentence_transformers

    try:
        _sentence_transformers.check_sentence_transformers()
    except ImportError as error:
        raise CommandError(str(error)) from error
