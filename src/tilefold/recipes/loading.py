"""Loading of saved models: their kind, checks of their files, precision and quiet libraries."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tilefold._internal.arguments import check_choice, path_of
from tilefold._internal.lean_imports import lean_imports
from tilefold._internal.precision import DTYPES, Dtype, set_precision
from tilefold._internal.sentence_transformers import check_sentence_transformers
from tilefold._internal.typing import Model
from tilefold.recipes._run import LOG, PLOT, newest_step

__all__ = [
    "LOG",
    "PLOT",
    "load_saved",
    "newest_step",
    "quiet_libraries",
    "saved_kind",
    "supports_bf16",
]

M = TypeVar("M", bound=Model)
_patch_lock = threading.RLock()  # is held while a method of transformers is replaced
LOGGERS = ("sentence_transformers", "accelerate", "datasets", "huggingface_hub")

# allowed ratios of the number of tokens to the number of word embeddings
MIN_TOKENS_PER_EMBEDDING = 0.5  # embeddings may be padded
MAX_TOKENS_PER_EMBEDDING = 1.1  # tokens may have been added
KINDS = ("sparse", "multi-vector", "dense", "cross-encoder", "backbone")
_KIND_OF_CLASS = {
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",  # PyLate's name
    "SentenceTransformer": "dense",
    "CrossEncoder": "cross-encoder",
}


def saved_kind(name_or_path: str) -> str:
    """Return the kind of a saved model, from its configuration files.

    Files of sentence-transformers take precedence over the classes in ``config.json``.

    Args:
        name_or_path: a folder or a Hugging Face name.

    Returns:
        ``"sparse"``, ``"multi-vector"``, ``"dense"``, ``"cross-encoder"``, or ``"backbone"`` for
        any other or unknown model.

    Raises:
        TypeError: if `name_or_path` is not a string or a path.
    """
    path_of("name_or_path", name_or_path)  # raises the TypeError
    config = _read_json_file(name_or_path, "config_sentence_transformers.json")
    if isinstance(config, dict):
        kind = _KIND_OF_CLASS.get(str(config.get("model_type")))
        if kind is not None:
            return kind
    modules = saved_modules(name_or_path)
    if any(".sparse_encoder." in module for module in modules):
        return "sparse"
    if modules:  # multi-vector models have a model_type in the first file
        return "dense"
    architectures = saved_architectures(name_or_path) or []
    for name in architectures:
        if name.endswith("ForSequenceClassification"):
            return "cross-encoder"
    for name in architectures:
        if name == "HF_ColBERT" or name.endswith("ForRetrieval"):
            return "multi-vector"
    return "backbone"


def check_masked_lm(name_or_path: str) -> None:
    """Raise an error if a model has no masked-LM head.

    transformers would initialize the missing head randomly.

    Args:
        name_or_path: a folder or a Hugging Face name. A model without ``config.json`` is not
            checked.

    Raises:
        ValueError: if the configuration of the model lists no ``...ForMaskedLM`` class.
    """
    architectures = saved_architectures(name_or_path)
    if architectures is None:
        return
    if not any(name.endswith("ForMaskedLM") for name in architectures):
        names = ", ".join(architectures) or "no architecture"
        raise ValueError(
            f"{name_or_path} has no masked-LM head (its config.json lists {names}), which sparse "
            "vectors are computed with. Use a masked language model, or a trained SparseEncoder.",
        )


def saved_architectures(name_or_path: str) -> list[str] | None:
    """Return the classes that a model's ``config.json`` lists, or ``None`` without the file."""
    config = _read_json_file(name_or_path, "config.json")
    if not isinstance(config, dict):
        return None
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def saved_modules(name_or_path: str) -> list[str]:
    """Return the classes that a model's ``modules.json`` lists; empty without the file."""
    modules = _read_json_file(name_or_path, "modules.json")
    if not isinstance(modules, list):
        return []
    return [str(module.get("type", "")) for module in modules if isinstance(module, dict)]


def load_saved(name_or_path: str, kind: str, dtype: Dtype = "auto") -> Model:
    """Load a saved model for encoding, with the attention that it was saved with.

    No remote code runs, and a folder is read without network access.

    Args:
        name_or_path: a folder or a Hugging Face name.
        kind: kind of the model: ``"sparse"``, ``"multi-vector"``, ``"dense"``, ``"cross-encoder"``,
            or ``"backbone"`` for a masked language model.
        dtype: the dtype in which the model computes, see
            :func:`tilefold.integrations.sentence_transformers.set_precision`. By default bf16 on
            GPUs that have it, and fp32 elsewhere.

    Raises:
        ImportError: if sentence-transformers is not installed, or older than 6.2.
        OSError: if there is no such model, locally or on the Hugging Face hub.
        TypeError: if `name_or_path` is not a string or a path.
        ValueError: if weights are missing, the tokenizer belongs to another model, the model was
            trained with entmax attention but would run softmax, or it cannot compute in `dtype`.
    """
    path_of("name_or_path", name_or_path)  # raises the TypeError
    check_choice("kind", kind, KINDS)
    check_choice("dtype", dtype, DTYPES)
    check_sentence_transformers()
    import sentence_transformers

    from tilefold.integrations import transformers as entmax
    from tilefold.modules import load_encoder

    loaders: dict[str, Callable[..., Any]] = {
        "sparse": load_encoder,
        "backbone": load_encoder,
        "multi-vector": sentence_transformers.MultiVectorEncoder,
        "dense": sentence_transformers.SentenceTransformer,
        "cross-encoder": sentence_transformers.CrossEncoder,
    }
    if kind == "backbone":
        check_masked_lm(name_or_path)
    entmax.register()  # lets transformers load models with entmax attention
    with lean_imports():  # the model's card asks for the release of `datasets`
        model = load_complete(loaders[kind], name_or_path)
    entmax.runs_entmax(model)  # raises an error if the model has alphas but would run softmax
    model.model_card_data.local_files_only = True
    set_precision(model, dtype)
    return model


def load_complete(load: Callable[..., M], name_or_path: str) -> M:
    """Load a model, and raise an error if its files lack weights or its tokenizer.

    transformers would only warn, and initialize missing weights randomly.

    Args:
        load: function or class that loads the model, with the arguments of ``SparseEncoder``. Its
            arguments forbid running code from the model's files.
        name_or_path: a folder or a Hugging Face name.

    Raises:
        ValueError: if weights are missing, or if the tokenizer belongs to another model.
    """
    with complete_weights(name_or_path):
        model = load(
            name_or_path,
            trust_remote_code=False,
            local_files_only=Path(name_or_path).is_dir(),
        )
    _check_tokenizer(model, name_or_path)
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU in this context, and restore their state after it."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def local_only(local: bool = True, **options: Mapping[str, object]) -> dict[str, Any]:
    """Return the loading arguments of a ``Transformer`` module, which may forbid network access.

    Args:
        local: whether only local files are read.
        options: argument -> further options, such as ``config_kwargs={...}``.
    """
    names = ("model_kwargs", "processor_kwargs", "config_kwargs")
    return {name: {"local_files_only": local, **options.get(name, {})} for name in names}


def stay_offline(model: M) -> M:
    """Let a model write its card without network access and without examples, and return it."""
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    return model


@contextmanager
def complete_weights(name_or_path: str) -> Iterator[None]:
    """Raise an error at the end of this context if a model was loaded that lacks weights.

    In the context, ``PreTrainedModel.from_pretrained`` is replaced by a method that records missing
    weights. Weights of poolers may be missing, because they are never read here.

    Args:
        name_or_path: name of the model, for the error message.

    Raises:
        ValueError: if weights are not in the model's files.
    """
    from transformers import PreTrainedModel

    missing_names: list[str] = []
    # Without the lock, threads would restore each other's method and overlook missing weights.
    with _patch_lock:
        # the classmethod object itself, which attribute access would bind to the class
        original_method = PreTrainedModel.__dict__["from_pretrained"]
        PreTrainedModel.from_pretrained = _recording_method(original_method, missing_names)
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = original_method
    if missing_names:
        raise ValueError(
            f"{name_or_path}: {len(missing_names)} weights are not in its files and would be "
            f"random, {missing_names[0]} first. Download the model again, or save it again with "
            "the class that config.json names.",
        )


def _recording_method(original_method: Any, missing_names: list[str]) -> Any:
    """Return a replacement of ``from_pretrained`` that records the names of missing weights.

    Args:
        original_method: the classmethod object of transformers.
        missing_names: list to which the names are added.
    """
    load = original_method.__func__

    def from_pretrained(cls: Any, /, *args: object, **kwargs: object) -> Any:
        """Load a model as transformers does, and record the names of missing weights."""
        returns_info = kwargs.pop("output_loading_info", False)
        model, info = load(cls, *args, output_loading_info=True, **kwargs)
        has_adapter = bool(getattr(model, "peft_config", None))
        if not has_adapter:  # for an adapter, the info lists only the adapter's weights
            names = sorted(info["missing_keys"])
            missing_names.extend(name for name in names if "pooler" not in name)
        return (model, info) if returns_info else model

    return classmethod(from_pretrained)


def _check_tokenizer(model: Model, name_or_path: str) -> None:
    """Raise an error if a model's tokenizer does not suit the size of its word embeddings.

    The tokenizer's files are then missing, or belong to another model. The limits allow padded
    vocabularies and added tokens.

    Args:
        model: the loaded model. A model without a tokenizer or word embeddings is not checked.
        name_or_path: name of the model, for the error message.

    Raises:
        ValueError: if the tokenizer has far fewer or more tokens than there are embeddings.
    """
    try:
        n_tokens = len(model.tokenizer)
        n_rows = model[0].model.get_input_embeddings().num_embeddings
    except (AttributeError, TypeError, NotImplementedError):
        return  # static embeddings, two encoders, or images: there is nothing to compare
    fewest_tokens = MIN_TOKENS_PER_EMBEDDING * n_rows
    most_tokens = MAX_TOKENS_PER_EMBEDDING * n_rows
    if not fewest_tokens <= n_tokens <= most_tokens:
        raise ValueError(
            f"{name_or_path}: its tokenizer has {n_tokens} tokens, but there are {n_rows} word "
            "embeddings: the tokenizer's files are missing or belong to another model. Copy its "
            "own tokenizer files next to the weights.",
        )


def _read_json_file(name_or_path: str, file: str) -> object:
    """Return the content of a model's JSON file, or ``None`` if it is missing or damaged."""
    from sentence_transformers.util import load_file_path

    try:
        path = load_file_path(name_or_path, file, local_files_only=Path(name_or_path).is_dir())
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def supports_bf16() -> bool:
    """Return whether to train in bf16: the GPU, or the CPU without one, has bf16 instructions.

    CPUs need AMX or AVX512-BF16. On other CPUs, torch emulates bf16, which is slow.
    """
    import torch

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    # ATEN_CPU_CAPABILITY=avx2 makes torch emulate bf16 on any CPU
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        is_supported = getattr(torch.cpu, name, None)  # some releases of torch lack one of them
        if is_supported is not None and is_supported():
            return True
    return False


@contextmanager
def quiet_libraries(verbose: bool = False) -> Iterator[None]:
    """Silence progress bars, logs and warnings of torch and Hugging Face libraries in this context.

    Errors are still logged, and the previous settings are restored at the end.

    Args:
        verbose: True changes nothing.
    """
    if verbose:
        yield
        return
    from transformers.utils import logging as hf_logging

    previous_level = hf_logging.get_verbosity()
    had_progress_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with quiet_loggers(*LOGGERS), warnings.catch_warnings():
            for package in (
                "transformers",
                "sentence_transformers",
                "accelerate",
                "datasets",
                "torch",
            ):
                warnings.filterwarnings("ignore", module=rf"{package}(\..*)?")
            yield
    finally:
        hf_logging.set_verbosity(previous_level)
        if had_progress_bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_loggers(*names: str | None) -> Iterator[None]:
    """Let loggers log only errors in this context.

    Args:
        names: names of the loggers; ``None`` is the root logger.
    """
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
