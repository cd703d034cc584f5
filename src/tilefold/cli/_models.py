"""Models that options name: the packaged one, folders, and names on the Hugging Face hub."""

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
# Kind of vectors -> kind of the models that make them.
KINDS = {"sparse": "sparse", "tokens": "multi-vector", "dense": "dense"}
# Kind of models -> their vectors in messages.
VECTORS = {"sparse": "sparse vectors", "multi-vector": "token vectors", "dense": "dense vectors"}
# Kinds of models that are accelerated.
FUSED = ("sparse", "multi-vector")
SHOWN = 5  # models of the cache that a message lists
HUB_TIMEOUT = 5.0  # seconds until the hub must begin to answer
_NAMES = {
    "sparse": "a SparseEncoder",
    "multi-vector": "a multi-vector model",
    "dense": "a dense model",
    "cross-encoder": "a cross-encoder",
    "backbone": "a plain transformers model",
}


def find_model(name: str, option: str) -> str:
    """Return the folder of a model, or its name if the hub or the local cache has the model.

    Args:
        name: a folder, a Hugging Face name, or the name of the packaged model.
        option: the option that names the model, for messages.

    Raises:
        UsageError: if there is no such model.
    """
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
    parent_exists = len(path.parts) > 1 and Path(path.parts[0]).exists()
    is_path = name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1
    if is_path or parent_exists:
        raise UsageError(f"{option}: there is no folder {name}; train a model with: tilefold train")
    problem = _hub_problem(name)
    if problem is not None:
        raise UsageError(
            f"{option}: there is no folder {name}, and {problem}; {PACKAGED} needs no download"
            f"{cached_models()}; train one with: tilefold train",
        )
    return name


def cached_models() -> str:
    """Return a remark for messages that lists the models in the Hugging Face cache.

    Returns:
        Names in parentheses, after a space; empty if no model is cached.
    """
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return ""
    names = set()
    for config in Path(HF_HUB_CACHE).glob("models--*/snapshots/*/config.json"):
        model_folder = config.parents[2].name  # such as models--OWNER--NAME
        names.add(model_folder.removeprefix("models--").replace("--", "/"))
    if not names:
        return ""
    return f" (in the cache of this machine: {', '.join(sorted(names)[:SHOWN])})"


def find_models(options: Mapping[str, str | None]) -> None:
    """Raise ``UsageError`` for the first of some options that names no model.

    Args:
        options: value by option; None was not given. See :func:`find_model`.
    """
    for option, name in options.items():
        if name is not None:
            find_model(name, option)


@cache
def _hub_problem(name: str) -> str | None:
    """Return why a model cannot be downloaded from the Hugging Face hub.

    The hub is asked for the metadata of ``config.json`` once, without retries.

    Args:
        name: name of the model, such as ``"OWNER/NAME"``.

    Returns:
        The problem in words, or None if the model can be downloaded or is cached.
    """
    try:
        from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    except ImportError:
        return None  # loading the model says what to install

    problem = None
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except errors.EntryNotFoundError:
        pass  # the hub has the model, which has no config.json
    except errors.HFValidationError:
        problem = "no model can have that name"
    except errors.GatedRepoError:
        problem = (
            "the model of that name on the Hugging Face hub is gated: log in with hf auth login"
        )
    except errors.RepositoryNotFoundError:
        problem = "no model of that name on the Hugging Face hub"
    except Exception as error:
        # The class depends on the library's version: an error of requests, of httpx or its own.
        problem = (
            f"the Hugging Face hub could not be asked for one of that name ({first_line(error)})"
        )
    return problem


def load_encoder(name: str) -> SparseEncoder:
    """Load a SparseEncoder, with the fused head where its architecture allows it."""
    model, _ = load_model(name, kinds=("sparse",))
    encoder: SparseEncoder = model
    return encoder


def load_untrained(
    texts_sha256: str,
    texts: Callable[[], Mapping[str, str]] | None,
    source: str,
) -> SparseEncoder:
    """Load the packaged model as a SparseEncoder without training.

    This model is made from the documents of a collection. A cache keeps earlier models by the
    fingerprint of their documents.

    Args:
        texts_sha256: fingerprint of the documents.
        texts: loads the documents; None if the command does not have them.
        source: the documents in messages, such as ``"the documents of INDEX"``.

    Raises:
        UsageError: if the model is not cached and there are no documents to make it from.
        CommandError: if the documents have another fingerprint.
    """
    find_model(PACKAGED, "--model")
    check_sentence_transformers()
    from tilefold.recipes.splade import untrained_splade

    description = f"--model: {PACKAGED} is the untrained start, made from {source}"
    try:
        model = untrained_splade(texts_sha256, texts)
    except LookupError as error:
        raise UsageError(
            f"{description}, and not in the cache of this machine: give the documents with --data, "
            "or the folder of the model that made the vectors.",
        ) from error
    except ValueError as error:
        raise CommandError(
            f"{description}, and --data holds others: another collection, or one that has changed "
            "since. Give its own collection with --data.",
        ) from error
    _accelerate(model)
    return model


def load_model(
    name: str,
    option: str = "--model",
    kinds: tuple[str, ...] = ("sparse", "multi-vector"),
    fast: tuple[str, ...] = ("sparse",),
) -> tuple[Any, str]:
    """Load a model of one of some kinds, accelerated if its kind is one of `fast`.

    The packaged name is a dense model, or a multi-vector one if `kinds` has no other. As a sparse
    model it depends on documents, see :func:`load_untrained`. No remote code runs, and a folder is
    read without access to the network.

    Args:
        name: a folder, a Hugging Face name, or the name of the packaged model.
        option: the option that names the model, for messages.
        kinds: accepted kinds, of ``"sparse"``, ``"multi-vector"``, ``"dense"``.
        fast: kinds that are accelerated.

    Returns:
        The model and its kind.

    Raises:
        UsageError: if there is no such model, or it is of another kind.
        CommandError: if its files cannot be read.
    """
    path = find_model(name, option)
    check_sentence_transformers()
    from safetensors import SafetensorError

    from tilefold.recipes.colbert import untrained_colbert
    from tilefold.recipes.loading import load_saved, quiet_libraries, saved_kind

    with quiet_libraries():
        is_packaged_colbert = name == PACKAGED and kinds == ("multi-vector",)
        stored_kind = "multi-vector" if is_packaged_colbert else saved_kind(path)
        kind = "sparse" if stored_kind == "backbone" else stored_kind
        if kind not in kinds:
            expected = " or ".join(_NAMES[accepted] for accepted in kinds)
            raise UsageError(
                f"{option}: {name} is {_NAMES[stored_kind]}; expected {expected}. "
                f"{_remedy(name, kind, kinds)}",
            )
        try:
            model = untrained_colbert() if is_packaged_colbert else load_saved(path, stored_kind)
        except OSError as error:
            raise CommandError(
                f"{option}: {name} could not be loaded ({first_line(error)}).",
            ) from error
        except SafetensorError as error:
            raise CommandError(
                f"{option}: the weights in {name} are damaged ({first_line(error)}); fetch or "
                "train it again.",
            ) from error
        except ValueError as error:
            raise CommandError(f"{option}: {error}") from error
        if kind in fast:
            _accelerate(model)
    return model, kind


def limit_length(model: Any, max_length: int | None) -> None:
    """Limit the tokens that a model reads of a text, or a cross-encoder of a pair.

    Args:
        model: the model, which is changed.
        max_length: value of ``--max-length``; None changes nothing.

    Raises:
        UsageError: for more tokens than the model can read.
    """
    if max_length is None:
        return
    is_cross_encoder = not hasattr(type(model), "max_seq_length")
    attribute = "max_length" if is_cross_encoder else "max_seq_length"
    model_limit = getattr(model, attribute)
    if model_limit is not None and max_length > model_limit:
        raise UsageError(
            f"--max-length: expected at most {model_limit}, the tokens that the model reads, got "
            f"{max_length}.",
        )
    setattr(model, attribute, max_length)


def load_kind(model: str, kind: str | None, collection: Collection | None) -> tuple[Any, str]:
    """Load the model that makes vectors of a kind.

    The packaged model can make vectors of all kinds. By default it is a sparse model, which is made
    from the documents.

    Args:
        model: a folder, a Hugging Face name, or the name of the packaged model.
        kind: kind of the vectors, a key of ``KINDS``; None takes that of the model.
        collection: the documents; None if this process does not have them.

    Returns:
        The model and its kind.

    Raises:
        UsageError: for the packaged model as a sparse one without documents.
    """
    if model != PACKAGED or kind in ("tokens", "dense"):
        kinds = tuple(KINDS.values()) if kind is None else (KINDS[kind],)
        return load_model(absolute(model), kinds=kinds, fast=FUSED)
    if collection is None:
        raise UsageError(
            f"--model: {model} as a sparse model is made from the documents, by one process. "
            "Save it first: tilefold train --steps 0",
        )
    documents = collection.contents()
    encoder = load_untrained(
        texts_digest(documents),
        lambda: documents,
        f"the documents of {collection.name}",
    )
    return encoder, "sparse"


@cache
def load_once(name: str, kinds: tuple[str, ...]) -> Any:
    """Load a model once for all work of a worker process."""
    model, _ = load_model(name, kinds=kinds, fast=FUSED)
    return model


def absolute(model: str) -> str:
    """Return the absolute path of a model's folder, or the name of a model of the hub."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() else model


def _remedy(name: str, kind: str, kinds: tuple[str, ...]) -> str:
    """Return the advice of an error about a model of another kind than a command expects.

    Args:
        name: the model.
        kind: its kind.
        kinds: the kinds that the command accepts.
    """
    if kind == "dense":
        token_vectors = (
            f"For token vectors: tilefold train --recipe colbert --model {name} (--steps 0 "
            f"--dimension 0 for its own), or {PACKAGED}. "
        )
        if kinds == ("multi-vector",):
            return token_vectors
        return (
            f"To score it as it is: tilefold evaluate --model {name}; to store its vectors: "
            f"encode --kind dense. {token_vectors}For sparse vectors: tilefold train with a "
            f"masked language model, or --model {PACKAGED}."
        )
    if kinds == ("multi-vector",):
        return "Train one with: tilefold train --recipe colbert"
    if kind == "multi-vector":
        return f"Its token vectors rerank what an index found: --rerank {name}."
    if kind == "sparse":
        return (
            "It searches an index of its own vectors: tilefold encode, tilefold index, then "
            "--model with --index."
        )
    return f"A cross-encoder scores what training reads: tilefold score MINED --teacher {name}."


def _accelerate(model: Model) -> None:
    """Accelerate a model, or print a note why its stock forward is used."""
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
