"""Models that options name: the packaged one, folders, and names on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tilefold._internal.garbage import (
    exempt_from_garbage_collection,
    garbage_collection_paused,
)
from tilefold._internal.lean_imports import lean_imports
from tilefold._internal.precision import Dtype, precision_of
from tilefold._internal.typing import Model, SparseEncoder
from tilefold.cli._common import CommandError, UsageError, first_line, note
from tilefold.cli._options import errors_name_options
from tilefold.retrieval.common.files import kind_of_folder

PACKAGED = "minilm"
# A folder with one of these files may be a model.
_MODEL_FILES = ("modules.json", "config.json", "adapter_config.json")
# Options that take a model or a folder of vectors, which is checked when it is read.
_OPTIONS_OF_VECTORS = ("--rerank", "--tokens")
# Kind of vectors -> kind of the models that compute them.
KINDS = {"sparse": "sparse", "tokens": "multi-vector", "dense": "dense"}
# Kind of models -> the name of their vectors in messages.
VECTORS = {"sparse": "sparse vectors", "multi-vector": "token vectors", "dense": "dense vectors"}
# Kinds of models that tilefold can run with its own kernels (accelerate).
FUSED = ("sparse", "multi-vector", "dense")
SHOWN = 5  # cached models that a message lists
HUB_TIMEOUT = 5.0  # seconds until the hub must begin to answer
_NAMES = {
    "sparse": "a SparseEncoder",
    "multi-vector": "a multi-vector model",
    "dense": "a dense model",
    "cross-encoder": "a cross-encoder",
    "backbone": "a plain transformers model",
}


def _looks_like_path(name: str) -> bool:
    """Return whether the user probably meant a local folder, not a model on the Hugging Face hub.

    Models on the hub are called NAME or OWNER/NAME.

    Args:
        name: value of an option that takes a folder or a name on the hub.
    """
    path = Path(name)
    begins_like_path = name.startswith((".", "~")) or path.is_absolute()
    has_too_many_parts = name.count("/") > 1
    # "runs/modle" is a typing error rather than a model of the owner "runs" if runs/ exists here.
    begins_with_existing_folder = len(path.parts) > 1 and Path(path.parts[0]).exists()
    return begins_like_path or has_too_many_parts or begins_with_existing_folder


def checked_model_name(name: str, option: str) -> str:
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
        raise UsageError(f"{option}: expected a folder or a name, got an empty name.")
    if path.is_dir():
        if option not in _OPTIONS_OF_VECTORS:
            _check_model_folder(path, option)
        return name
    if path.exists():
        raise UsageError(f"{option}: expected the folder of a model, got the file {name}.")
    _refuse_unfinished_training(path, option)
    if _looks_like_path(name):
        raise UsageError(f"{option}: there is no folder {name}; train a model with: tilefold train")
    problem = _hub_problem(name)
    if problem is not None:
        raise UsageError(
            f"{option}: there is no folder {name}, and {problem}; {PACKAGED} needs no download"
            f"{list_cached_models()}; train one with: tilefold train",
        )
    return name


def _refuse_unfinished_training(folder: Path, option: str) -> None:
    """Raise ``UsageError`` if the training of a model that does not exist has been interrupted.

    Args:
        folder: the folder that ``tilefold train`` writes when it has finished.
        option: the option that names the model, for the message.
    """
    from tilefold.recipes.loading import newest_step

    step = newest_step(folder)
    if step is not None:
        raise UsageError(
            f"{option}: the training of {folder} is unfinished, at step {step}: run the same "
            "tilefold train again to finish it.",
        )


def _check_model_folder(folder: Path, option: str) -> None:
    """Raise ``UsageError`` for a folder of vectors, an index or a collection in place of a model.

    Args:
        folder: an existing folder.
        option: the option that names the model, for the message.
    """
    if any((folder / name).is_file() for name in _MODEL_FILES):
        return
    kind = kind_of_folder(folder)
    if kind is not None:
        raise UsageError(f"{option}: expected the folder of a model, got {kind}: {folder}.")


def list_cached_models() -> str:
    """Return a list of the models in the Hugging Face cache, to be appended to a message.

    Returns:
        The names in parentheses, after a space; an empty text if no model is cached.
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


def check_model_names(options: Mapping[str, str | None]) -> None:
    """Raise ``UsageError`` for the first option whose model does not exist.

    Args:
        options: option -> a folder, a Hugging Face name or the name of the packaged model; None if
            the option was not given.
    """
    for option, name in options.items():
        if name is not None:
            checked_model_name(name, option)


@cache
def _hub_problem(name: str) -> str | None:
    """Return why a model cannot be downloaded from the Hugging Face hub.

    The hub is asked once, without retries, for the metadata of ``config.json``.

    Args:
        name: the name of the model, such as ``"OWNER/NAME"``.

    Returns:
        The reason, or None if the model is cached or can be downloaded.
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
        pass  # the model exists, but has no config.json
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


def load_encoder(name: str, dtype: Dtype = "auto") -> SparseEncoder:
    """Load a SparseEncoder, with tilefold's fused kernel for its head if that supports the model.

    Args:
        name: a folder, a Hugging Face name, or the name of the packaged model.
        dtype: the value of ``--dtype``.
    """
    model, _ = load_model(name, kinds=("sparse",), dtype=dtype)
    encoder: SparseEncoder = model
    return encoder


def load_model(
    name: str,
    option: str = "--model",
    kinds: tuple[str, ...] = ("sparse", "multi-vector"),
    fast: tuple[str, ...] = ("sparse",),
    dtype: Dtype = "auto",
    invariant: bool = False,
    advice: str | None = None,
) -> tuple[Any, str]:
    """Load a model of an accepted kind, and let it run with tilefold's kernels (accelerate it).

    The packaged model is loaded as a dense model, or as an untrained sparse or multi-vector model
    if only that kind is accepted. No remote code runs, and a folder is read without access to the
    network.

    Args:
        name: a folder, a Hugging Face name, or the name of the packaged model.
        option: the option that names the model, for messages.
        kinds: the accepted kinds, such as ``"sparse"``, ``"multi-vector"``, ``"dense"``.
        fast: the kinds that are accelerated. Models of other kinds keep their original code.
        dtype: the value of ``--dtype``.
        invariant: whether the vector of a text must have the same bits in every batch. A model of
            any kind is accelerated then.
        advice: what to do if the kind is not accepted, for the error; None says what a model of
            that kind is good for.

    Returns:
        The model and its kind.

    Raises:
        UsageError: if there is no such model, its kind is not accepted, it cannot compute in
            `dtype`, or `invariant` is not supported for it.
        CommandError: if the files of the model cannot be read.
    """
    path = checked_model_name(name, option)
    check_sentence_transformers()
    from safetensors import SafetensorError

    from tilefold.recipes.loading import load_saved, quiet_libraries, saved_kind

    with quiet_libraries():
        is_untrained = name == PACKAGED and kinds in (("sparse",), ("multi-vector",))
        stored_kind = kinds[0] if is_untrained else saved_kind(path)
        # A plain masked language model is loaded as a sparse model.
        kind = "sparse" if stored_kind == "backbone" else stored_kind
        if kind not in kinds:
            expected = " or ".join(_NAMES[accepted] for accepted in kinds)
            raise UsageError(
                f"{option}: {name} is {_NAMES[stored_kind]}; expected {expected}. "
                f"{advice or _advice_for_kind(name, kind, kinds)}",
            )
        try:
            with errors_name_options(dtype="--dtype"):
                if is_untrained:
                    model = _build_untrained(kind, dtype)
                else:
                    model = load_saved(path, stored_kind, dtype)
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
        from tilefold.retrieval.encoding.pages import encodes_images

        if invariant:
            make_invariant(model, name)
        # Models of images run on padded batches, which acceleration would warn about.
        elif kind in fast and not encodes_images(model):
            _accelerate(model, kind)
    return model, kind


def _build_untrained(kind: str, dtype: Dtype) -> Any:
    """Build the packaged model as an untrained sparse or multi-vector model.

    Args:
        kind: ``"sparse"`` or ``"multi-vector"``.
        dtype: the value of ``--dtype``.
    """
    if kind == "sparse":
        from tilefold.recipes.splade import untrained_splade

        return untrained_splade(dtype)
    from tilefold.recipes.colbert import untrained_colbert

    return untrained_colbert(dtype)


def print_precision(name: str, model: Model) -> None:
    """Print in which dtype a model computes, on which device, and why.

    Args:
        name: the name of the model in the line.
        model: the model.
    """
    note(f"{name} computes in {precision_of(model)}")


def limit_length(model: Any, max_length: int | None) -> None:
    """Limit how many tokens a model reads per text, or a cross-encoder per pair of texts.

    Args:
        model: the model, which is changed in place.
        max_length: the value of ``--max-length``; None changes nothing.

    Raises:
        UsageError: if the limit exceeds that of the model.
    """
    if max_length is None:
        return
    # Only cross-encoders of sentence-transformers do not have `max_seq_length`.
    is_cross_encoder = not hasattr(type(model), "max_seq_length")
    attribute = "max_length" if is_cross_encoder else "max_seq_length"
    model_limit = getattr(model, attribute)
    if model_limit is not None and max_length > model_limit:
        raise UsageError(
            f"--max-length: expected at most {model_limit}, the maximum of the model, got "
            f"{max_length}.",
        )
    setattr(model, attribute, max_length)


def load_kind(
    model: str,
    kind: str | None,
    dtype: Dtype = "auto",
    *,
    fp8: bool = False,
    invariant: bool = False,
) -> tuple[Any, str]:
    """Load a model that encodes texts to vectors, and check the kind of its vectors.

    Args:
        model: a folder, a Hugging Face name, or the name of the packaged model.
        kind: ``"sparse"``, ``"tokens"`` or ``"dense"`` vectors. None takes those of the model, and
            sparse ones of the packaged model.
        dtype: the value of ``--dtype``.
        fp8: the value of ``--fp8``.
        invariant: the value of ``--invariant``.

    Returns:
        The model and its kind: ``"sparse"``, ``"multi-vector"`` or ``"dense"``.
    """
    if model == PACKAGED and kind is None:
        kind = "sparse"
    kinds = tuple(KINDS.values()) if kind is None else (KINDS[kind],)
    loaded, loaded_kind = load_model(
        absolute(model),
        kinds=kinds,
        fast=FUSED,
        dtype=dtype,
        invariant=invariant,
    )
    if fp8:
        _use_fp8(loaded)
    return loaded, loaded_kind


@cache
def load_once(
    name: str,
    kinds: tuple[str, ...],
    dtype: Dtype = "auto",
    *,
    fp8: bool = False,
    invariant: bool = False,
) -> Any:
    """Load a model with tilefold's kernels, or return it if this process has loaded it before.

    Args:
        name: a folder, a Hugging Face name, or the name of the packaged model.
        kinds: the accepted kinds of models.
        dtype: the value of ``--dtype``.
        fp8: the value of ``--fp8``.
        invariant: the value of ``--invariant``.
    """
    model, _ = load_model(name, kinds=kinds, fast=FUSED, dtype=dtype, invariant=invariant)
    if fp8:
        _use_fp8(model)
    return model


def _use_fp8(model: Model) -> None:
    """Let the linear layers of a model's transformer multiply in fp8.

    Args:
        model: a model that runs with tilefold's kernels.

    Raises:
        UsageError: if its device or its layers do not allow it.
    """
    from tilefold.integrations.sentence_transformers import accelerate

    try:
        accelerate(model, fp8=True)
    except ValueError as error:
        raise UsageError(f"--fp8: {error}") from error


def absolute(model: str) -> str:
    """Return the absolute path of a model's folder, or the unchanged name of a hub model."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() else model


def _advice_for_kind(name: str, kind: str, accepted_kinds: tuple[str, ...]) -> str:
    """Return how to use a model whose kind a command does not accept.

    Args:
        name: the name of the model.
        kind: the kind of the model.
        accepted_kinds: the kinds that the command accepts.
    """
    needs_multi_vector = accepted_kinds == ("multi-vector",)
    if kind == "dense":
        make_multi_vector = (
            f"To make a multi-vector model of it: tilefold train --recipe colbert --model {name} "
            "(with --steps 0 --dimension 0 for its own token states)."
        )
        if needs_multi_vector:
            return make_multi_vector
        return (
            f"To evaluate it: tilefold evaluate --model {name}; to store its vectors: tilefold "
            f"encode --kind dense. {make_multi_vector} For sparse vectors, train a masked language "
            f"model with tilefold train, or give --model {PACKAGED}."
        )
    if needs_multi_vector:
        return "Train one with: tilefold train --recipe colbert"
    if kind == "multi-vector":
        return f"It reranks the hits of an index: tilefold search --rerank {name}."
    if kind == "sparse":
        return (
            "It searches an index of its own vectors: tilefold encode, tilefold index, then "
            "--model with --index."
        )
    return (
        f"A cross-encoder scores training data as a teacher: tilefold score MINED --teacher {name}."
    )


def _accelerate(model: Model, kind: str) -> None:
    """Let a model run with tilefold's kernels, or print a note why it keeps its original code.

    Args:
        model: the model, which is changed in place.
        kind: the kind of the model, such as ``"sparse"``.
    """
    from tilefold.integrations.sentence_transformers import accelerate, restore

    try:
        accelerate(model)
    except (ValueError, RuntimeError) as error:  # unsupported, or it fails in a self-check
        restore(model)  # the original code
        plain_part = "head" if kind == "sparse" else "model"
        note(f"encoding with the plain {plain_part}: {first_line(error)}")


def make_invariant(model: Model, name: str) -> None:
    """Let a model compute the same bits for a text in every batch, with kernels of tilefold.

    Args:
        model: the model, which is changed in place.
        name: the name of the model in the message.

    Raises:
        UsageError: if this is not supported for the model.
    """
    from tilefold.integrations.sentence_transformers import accelerate

    try:
        accelerate(model, invariant=True)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--invariant: {name}: {error}") from error


def check_sentence_transformers() -> None:
    """Import sentence-transformers for encoding, without its trainers.

    Raises:
        CommandError: if it is missing or too old, with the command to install it.
    """
    from tilefold._internal.sentence_transformers import check_sentence_transformers as check

    try:
        with garbage_collection_paused(), lean_imports():
            check()
            _import_model_classes()
    except ImportError as error:
        raise CommandError(str(error)) from error


@cache
def _import_model_classes() -> None:
    """Import the modules that load models and run them with tilefold's kernels.

    All of them are imported together, because the caller's :func:`lean_imports` leaves out the
    trainers only until it ends.
    """
    from sentence_transformers import (  # noqa: F401
        CrossEncoder,
        MultiVectorEncoder,
        SentenceTransformer,
        SparseEncoder,
    )

    import tilefold.integrations.sentence_transformers
    import tilefold.recipes.loading  # noqa: F401

    exempt_from_garbage_collection()
