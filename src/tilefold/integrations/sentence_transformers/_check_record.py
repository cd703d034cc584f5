"""Records of passed self-checks in the cache, so that ``accelerate`` checks a model once."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilefold._internal.cache_folder import default_cache_dir
from tilefold._internal.files import InUseError, read_json, write_json
from tilefold._internal.typing import Model
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold._version import __version__
from tilefold.ops.implementations import cpu_matmul_precision, matmul_precision

# With the value "always", every call of ``accelerate`` runs its self-checks.
SELF_CHECK_VARIABLE = "TILEFOLD_SELF_CHECK"
# Folder of the records in the cache.
_FOLDER = "self-checks"
_PACKAGE = Path(__file__).resolve().parents[2]
# Libraries whose release identifies the code of their classes.
_LIBRARIES = ("sentence_transformers", "transformers", "torch", "peft", "pylate", "tilefold")
# Other distributions whose release may change the numbers that a model computes.
_OTHER_DISTRIBUTIONS = ("triton", "tokenizers")
# Attributes that ``nn.Module`` itself defines. Weights are part of the model's fingerprint, and
# submodules are described one by one.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# The smallest number of values that are read from a tensor which has more.
_SAMPLES_PER_TENSOR = 1024
# Part of the names of attributes that only describe a model to its users.
_MODEL_CARD = "model_card"
# Types of parameters and buffers whose values can be read on this device.
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
# Attributes of ``nn.Module`` that hold its hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class CheckRecord:
    """The record that a model has passed the self-checks of ``accelerate`` on this machine.

    The key of a record covers everything that decides the outcome of the checks, so that a record
    never stands for a model that would fail:

    - names, shapes, dtypes and sampled values of the weights. They matter because a module may
      multiply logits by a learned factor, which passes at its initial value of 1 only. A step of
      training changes the samples, and reading them takes milliseconds, where reading all weights
      of a large model would take longer than the checks.
    - the class and the attributes of every module, such as the prompts of the model, the
      configuration of its network, its tokenizer and its active adapter.
    - the releases of the libraries that define these classes. The files of tilefold are compared
      by size and time, because a checkout changes without a new release.
    - the devices, and the settings of torch that change a product of matrices.
    - the arguments of ``accelerate``.

    A model with other code has no record: a class of another library or of the user, a hook, or a
    method that was replaced on an instance could change unnoticed.

    Attributes:
        key: the SHA-256 of what the record covers.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    @classmethod
    def of(cls, model: Model, options: dict[str, object]) -> CheckRecord | None:
        """Return the record of a model, whether or not it is in the cache.

        Args:
            model: a model that is not accelerated.
            options: the arguments of ``accelerate``.

        Returns:
            The record, or None if the model runs code that no release identifies, or its weights
            cannot be read on this device.
        """
        if not _is_identified(model):
            return None
        description = {
            "weights": _digest_of_weights(model),
            "modules": {name: _describe_module(module) for name, module in model.named_modules()},
            "releases": _releases(),
            "devices": sorted({_device_name(tensor.device) for tensor in _tensors(model)}),
            "settings": _settings_of_torch(model),
            "options": options,
        }
        text = json.dumps(description, sort_keys=True, default=_describe_attribute)
        return cls(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())

    @property
    def _path(self) -> Path:
        return default_cache_dir() / _FOLDER / f"{self.key}.json"

    def exists(self) -> bool:
        """Whether the cache has the record. A damaged or unreadable file counts as none."""
        content = read_json(self._path)
        return content is not None and content.get("passed") == self.key

    def save(self) -> None:
        """Write the record to the cache; errors of writing are ignored.

        Several processes may write the same record at the same time, since each replaces the file
        atomically by the same content.
        """
        with suppress(OSError, InUseError):
            write_json(self._path, {"passed": self.key})


def checks_are_repeated() -> bool:
    """Whether the environment asks for self-checks at every call of ``accelerate``."""
    return os.environ.get(SELF_CHECK_VARIABLE, "") == "always"


def _tensors(model: Model) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]


def _digest_of_weights(model: Model) -> str:
    """Return a digest of all parameters and buffers, with evenly spaced samples of their values."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
        samples = flat[::step].contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(samples.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _is_identified(model: Model) -> bool:
    """Whether the releases of known libraries, and the weights, determine what a model computes.

    They do not for modules of other packages, hooks, replaced methods, and weights that cannot be
    read. Methods that are replaced on the model itself do not matter, because the self-checks call
    its modules.

    Args:
        model: the model.
    """
    for tensor in _tensors(model):
        if type(tensor) not in _PLAIN_TENSORS or tensor.is_meta:
            return False
    for module in model.modules():
        library = type(module).__module__.partition(".")[0]
        if library not in _LIBRARIES or any(getattr(module, name) for name in _HOOKS):
            return False
        if module is not model and _has_replaced_method(module):
            return False
    return True


def _has_replaced_method(module: nn.Module) -> bool:
    """Whether an attribute of a module hides a method of its class."""
    return any(
        callable(value) and callable(getattr(type(module), name, None))
        for name, value in vars(module).items()
    )


def _describe_module(module: nn.Module) -> dict[str, object]:
    """Describe the class and the attributes of a module as values for JSON.

    Args:
        module: the module.
    """
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name not in _MODULE_ATTRIBUTES and _MODEL_CARD not in name
    }
    return {"class": _qualified_name(type(module)), "attributes": _with_text_keys(attributes)}


def _with_text_keys(value: object) -> object:
    """Convert the keys of nested dictionaries to strings, because JSON sorts keys of one type."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_text_keys(item) for item in value]
    return value


def _describe_attribute(value: Any) -> object:
    """Describe a value that JSON cannot hold, the same way in every process.

    Args:
        value: an attribute of a module: a configuration, a tokenizer, a function, or any other
            object, of which only the class is described.
    """
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if hasattr(value, "to_dict") and hasattr(value, "_attn_implementation"):  # a configuration
        configuration = _with_text_keys(value.to_dict())
        return {"configuration": configuration, "attention": value._attn_implementation}
    if hasattr(value, "get_vocab"):
        return {
            "tokenizer": _qualified_name(type(value)),
            "vocabulary": vocabulary_fingerprint(value),
            "padding_side": getattr(value, "padding_side", None),
            "truncation_side": getattr(value, "truncation_side", None),
        }
    return _qualified_name(value if hasattr(value, "__qualname__") else type(value))


def _qualified_name(item: Any) -> str:
    """Return the module and the name of a class or function."""
    return f"{item.__module__}.{item.__qualname__}"


@functools.cache
def _releases() -> dict[str, str | None]:
    """Return the releases of Python and of all libraries that decide how a model computes."""
    releases: dict[str, str | None] = {"python": platform.python_version()}
    for library in (*_LIBRARIES, *_OTHER_DISTRIBUTIONS):
        try:
            releases[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            releases[library] = None
    releases["tilefold"] = __version__
    releases["files of tilefold"] = _digest_of_files(_PACKAGE)
    return releases


def _digest_of_files(package: Path) -> str:
    """Return a digest of the names, sizes and times of the Python files of a package."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        status = file.stat()
        name = file.relative_to(package).as_posix()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _device_name(device: torch.device) -> str:
    """Return a text that differs between devices which may compute other numbers.

    It has the name and architecture of a GPU, or the vector instructions of a CPU.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {major}.{minor} CUDA {torch.version.cuda}"
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


def _settings_of_torch(model: Model) -> dict[str, str | bool]:
    """Return the settings of this process that change how a model computes.

    Args:
        model: the model, whose devices' autocast counts.
    """
    settings: dict[str, str | bool] = {
        "matmul_precision": matmul_precision(),
        "cpu_matmul_precision": cpu_matmul_precision(),
        "triton_interpret": os.environ.get("TRITON_INTERPRET", ""),
    }
    for device_type in {tensor.device.type for tensor in _tensors(model)}:
        is_autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_autocast else None
        settings[f"autocast {device_type}"] = str(dtype)
    return settings
