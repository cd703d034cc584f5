"""The kind of a saved model, and the model itself: whole, quiet, in the precision of this machine,
ready to encode.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tilefold._internal.sentence_transformers import check_sentence_transformers
from tilefold._internal.typing import Model
from tilefold.recipes._run import LOG, PLOT, newest_step

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "LOG",
    "PLOT",
    "fast_inference",
    "load_saved",
    "newest_step",
    "quiet_libraries",
    "run_fast",
    "saved_kind",
]
__all__ += ["supports_bf16"]

M = TypeVar("M", bound=Model)
_loading = threading.RLock()
LOGGERS = ("sentence_transformers", "accelerate", "datasets", "huggingface_hub")

_KINDS = {
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",  # PyLate's name
    "SentenceTransformer": "dense",
    "CrossEncoder": "cross-encoder",
}


def saved_kind(name_or_path: str) -> str:
    """Return "sparse", "multi-vector", "dense", "cross-encoder", or "backbone" for any other or
    unknown model.
    """
    saved = _read(name_or_path, "config_sentence_transformers.json")
    if isinstance(saved, dict) and (kind := _KINDS.get(str(saved.get("model_type")))):
        return kind
    modules = saved_modules(name_or_path)
    if any(".sparse_encoder." in module for module in modules):
        return "sparse"
    if modules:
        return "dense"
    named = saved_architectures(name_or_path) or []
    if any(name.endswith("ForSequenceClassification") for name in named):
        return "cross-encoder"
    late = any(name == "HF_ColBERT" or name.endswith("ForRetrieval") for name in named)
    return "multi-vector" if late else "backbone"


def check_masked_lm(name_or_path: str) -> None:
    """Refuse a backbone whose configuration names no ``...ForMaskedLM``: stock code would give it a
    random head.
    """
    named = saved_architectures(name_or_path)
    if named is not None and not any(name.endswith("ForMaskedLM") for name in named):
        got = f"its config.json names {', '.join(named) or 'nothing'}), and sparse vectors come from one"
        remedy = "Take a masked language model, or a SparseEncoder that was trained."
        raise ValueError(f"{name_or_path} has no masked-LM head ({got}. {remedy}")


def saved_architectures(name_or_path: str) -> list[str] | None:
    """The classes that ``config.json`` of a model names; None without that file."""
    config = _read(name_or_path, "config.json")
    if not isinstance(config, dict):
        return None
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def saved_modules(name_or_path: str) -> list[str]:
    """The classes that ``modules.json`` of a saved model lists, in order; none without that file."""
    listed = _read(name_or_path, "modules.json")
    if not isinstance(listed, list):
        return []
    return [str(module.get("type", "")) for module in listed if isinstance(module, dict)]


def load_saved(name_or_path: str, kind: str) -> Model:
    """The model of a kind of :func:`saved_kind`, ready to encode, with the attention that it was
    saved with.

    No remote code runs, and a folder is read without a look at the network.

    Raises:
        ImportError: sentence-transformers is not installed, or older than 6.2.
        OSError: no such model, here or on the Hugging Face hub.
        ValueError: a model that was trained with entmax attention and would run softmax; one whose
            weights are not all in its files, or whose tokenizer is another's.
    """
    check_sentence_transformers()
    import sentence_transformers

    from tilefold.integrations import transformers as entmax
    from tilefold.modules import load_encoder

    names = {
        "multi-vector": "MultiVectorEncoder",
        "dense": "SentenceTransformer",
        "cross-encoder": "CrossEncoder",
    }
    if kind == "backbone":
        check_masked_lm(name_or_path)
    entmax.register()
    model = load_whole(
        getattr(sentence_transformers, names[kind]) if kind in names else load_encoder,
        name_or_path,
    )
    entmax.runs_entmax(model)  # refuses a model that has alphas and would run softmax
    model.model_card_data.local_files_only = True
    run_fast(model)
    return model


def load_whole(made: Callable[..., M], name_or_path: str) -> M:
    """The model that `made` loads, without remote code; all its weights and its tokenizer must be
    in its files.
    """
    with whole_weights(name_or_path):
        model = made(
            name_or_path,
            trust_remote_code=False,
            local_files_only=Path(name_or_path).is_dir(),
        )
    _check_tokenizer(model, name_or_path)
    return model


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's random numbers of the CPU from a seed; afterwards they go on where they were."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def local_only(local: bool = True, **options: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of a ``Transformer`` module, which then asks no network if `local`."""
    names = ("model_kwargs", "processor_kwargs", "config_kwargs")
    return {name: {"local_files_only": local, **options.get(name, {})} for name in names}


def stay_offline(model: M) -> M:
    """The model, whose card asks no network and draws no examples."""
    model.model_card_data.local_files_only = True
    model.model_card_data.generate_widget_examples = False
    return model


@contextmanager
def whole_weights(name_or_path: str) -> Iterator[None]:
    """Refuse what transformers loads in this context if weights, but for poolers, are not in the
    files.
    """
    from transformers import PreTrainedModel

    fresh: list[str] = []

    def from_pretrained(cls: Any, /, *args: object, **kwargs: object) -> Any:
        asked = kwargs.pop("output_loading_info", False)
        model, info = stock.__func__(cls, *args, output_loading_info=True, **kwargs)
        if not getattr(model, "peft_config", None):  # then the report is the adapter's
            fresh.extend(sorted(key for key in info["missing_keys"] if "pooler" not in key))
        return (model, info) if asked else model

    with (
        _loading
    ):  # else threads would put back each other's method, and miss weights that are not there
        stock = PreTrainedModel.__dict__["from_pretrained"]
        PreTrainedModel.from_pretrained = classmethod(from_pretrained)
        try:
            yield
        finally:
            PreTrainedModel.from_pretrained = stock
    if fresh:
        got = f"{len(fresh)} weights are not in its files and would be random, {fresh[0]} first"
        remedy = "Fetch it whole, or save it again with the class that config.json names."
        raise ValueError(f"{name_or_path}: {got}. {remedy}")


def _check_tokenizer(model: Model, name_or_path: str) -> None:
    """Refuse a model whose tokenizer has far fewer tokens than its embeddings, as without its
    files, or more.
    """
    try:
        tokens, rows = len(model.tokenizer), model[0].model.get_input_embeddings().num_embeddings
    except (AttributeError, TypeError, NotImplementedError):
        return  # static embeddings, routes, images: nothing to compare
    if (
        not 0.5 * rows <= tokens <= 1.1 * rows
    ):  # padded vocabularies and added tokens are well within
        why = "the tokenizer's files are missing or belong to another model. Put those of its own beside the weights."
        raise ValueError(
            f"{name_or_path}: its tokenizer has {tokens} tokens and its embeddings {rows}: {why}",
        )


def _read(name_or_path: str, file: str) -> object:
    from sentence_transformers.util import load_file_path

    try:
        found = load_file_path(name_or_path, file, local_files_only=Path(name_or_path).is_dir())
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def supports_bf16() -> bool:
    """Whether bf16 autocast is worth it on this machine: a GPU that has it, or a CPU with AMX or
    AVX512-BF16.
    """
    import torch

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    # one that torch uses as one with AVX2 alone (ATEN_CPU_CAPABILITY=avx2) would emulate bf16
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    probes = (
        getattr(torch.cpu, name, None)
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return any(probe() for probe in probes if probe is not None)


@contextmanager
def fast_inference() -> Iterator[None]:
    """Open bf16 autocast where the hardware has it.

    Weights stay as they are. Vectors and scores come from products of bf16 numbers, which have 8
    bits: they differ from those in fp32 by a percent or so.
    :func:`tilefold._internal.precision.inference_precision` tells which of both a model computes.
    """
    import torch

    with torch.autocast(
        "cuda" if torch.cuda.is_available() else "cpu",
        torch.bfloat16,
        enabled=supports_bf16(),
    ):
        yield


def run_fast(model: nn.Module) -> None:
    """Let every forward pass of `model` run in :func:`fast_inference`: a text has one vector in
    every command.
    """
    model.forward = fast_inference()(model.forward)
    vars(model)["inference_context"] = fast_inference  # read by inference_precision


@contextmanager
def quiet_libraries(verbose: bool = False) -> Iterator[None]:
    """Silence progress bars, logs and warnings of the Hugging Face libraries; put them back at the
    end.
    """
    if verbose:
        yield
        return
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with quiet_loggers(*LOGGERS), warnings.catch_warnings():
            for module in (
                "transformers",
                "sentence_transformers",
                "accelerate",
                "datasets",
                "torch",
            ):
                warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def quiet_loggers(*names: str | None) -> Iterator[None]:
    """Let loggers, ``None`` for the root, say nothing but errors; their levels are put back at the
    end.
    """
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
