"""The alphas of a model's attention layers: setting, learning, annealing and loading them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.trainer_callback import TrainerCallback

from tilefold.integrations.transformers import attention
from tilefold.integrations.transformers.networks import check_network
from tilefold.nn.heads import EntmaxAlpha

# The names of the parameters of learned alphas end with this, in state dicts and checkpoints.
THETA_SUFFIX = f".{attention.ALPHA}.theta"
# The files of a checkpoint that may hold weights, in the order of transformers.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SHAPES = ("linear", "cosine")
# Options of ``from_pretrained`` that say where a checkpoint is.
_HUB_OPTIONS = ("subfolder", "revision", "token", "cache_dir", "local_files_only")


def set_alpha(model: nn.Module, alpha: float | Sequence[float]) -> None:
    """Set the alpha of every attention layer of a model: one number, or one per layer.

    The alphas are stored in the model's configuration and so in its checkpoints. Learned alphas are
    removed.

    Args:
        model: a transformers model, or any module that contains one, such as a model of
            sentence-transformers.
        alpha: one number for all layers, or one for each, in [1, 2]. Alpha 1 is softmax.

    Raises:
        ValueError: if a list has the wrong length, a number is outside [1, 2], or the model has no
            attention layers.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> from tilefold.integrations.transformers import use_entmax
        >>> config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2, intermediate_size=64)
        >>> model = BertModel(config)
        >>> use_entmax(model)
        >>> set_alpha(model, [1.5, 2.0])  # one per layer
    """
    modules = attention.checked_attention_modules(model)
    alphas = check_alphas(alpha, len(modules))
    # Each configuration stores the alphas of its own layers, and a model may have several, such as
    # one per encoder.
    layers_of_config: dict[int, dict[nn.Module, float]] = {}  # by the id of the configuration
    for module, value in zip(modules, alphas, strict=True):
        _delete_alpha(module)
        layers_of_config.setdefault(id(module.config), {})[module] = value
    for alpha_of_layer in layers_of_config.values():
        _store_alphas(alpha_of_layer)


def _store_alphas(alpha_of_layer: dict[nn.Module, float]) -> None:
    """Write the alphas of attention modules to the configuration that all these modules share.

    ``config.entmax_alpha`` becomes one number if all alphas are equal. Otherwise it becomes a list
    with one alpha per layer, from which a module reads its alpha by its ``layer_idx``. Modules that
    do not number their layers 0, 1, 2 and so on also get an attribute, which they read first.

    Args:
        alpha_of_layer: the alpha of each attention module, first layer first.
    """
    modules = list(alpha_of_layer)
    alphas = list(alpha_of_layer.values())
    shared_config = modules[0].config
    are_equal = len(set(alphas)) == 1
    setattr(shared_config, attention.ALPHA, alphas[0] if are_equal else alphas)
    if are_equal:
        return
    layer_numbers = [getattr(module, "layer_idx", None) for module in modules]
    if layer_numbers != list(range(len(modules))):
        for module, alpha in alpha_of_layer.items():
            setattr(module, attention.ALPHA, alpha)


def learn_alpha(
    model: nn.Module,
    initial: float | Sequence[float] = attention.DEFAULT,
) -> list[EntmaxAlpha]:
    """Give every attention layer of a model one learned alpha per head.

    Each attention module gets a parameter ``entmax_alpha.theta``. Create the optimiser after this
    call, so that it includes these parameters. The configuration records that alphas are learned.
    A model that is loaded without them raises an error when it runs, until :func:`load_alpha` has
    loaded them. A model of sentence-transformers loads them by itself.

    Args:
        model: a transformers model, or any module that contains one.
        initial: the alpha at the start, strictly between 1 and 2; one number, or one per layer.

    Returns:
        The new modules, one per layer.

    Raises:
        ValueError: if the model has no attention layers, or ``initial`` is outside (1, 2).
    """
    n_heads_by_module = attention.checked_attention_modules(model)
    starts = check_alphas(initial, len(n_heads_by_module))
    alphas = [
        EntmaxAlpha(n_heads, start)
        for n_heads, start in zip(n_heads_by_module.values(), starts, strict=True)
    ]
    for module, alpha in zip(n_heads_by_module, alphas, strict=True):
        # The new parameters belong on the device of the layer's weights.
        parameter = next(module.parameters(), None)
        if parameter is not None:
            alpha.to(parameter.device)
        _delete_alpha(module)
        setattr(module, attention.ALPHA, alpha)
        setattr(module.config, attention.ALPHA, attention.LEARNED)
    _use_entmax_transformers(model)
    return alphas


def _use_entmax_transformers(model: nn.Module) -> None:
    """Make every Transformer module of sentence-transformers load learned alphas with its weights.

    The modules become instances of a subclass, whose name their checkpoints store.

    Args:
        model: any module.
    """
    for module in model.modules():
        # The class is compared by name, because sentence-transformers need not be installed.
        module_class = type(module)
        is_transformer_module = (
            module_class.__name__ == "Transformer"
            and module_class.__module__.startswith("sentence_transformers.")
        )
        if is_transformer_module:
            module.__class__ = entmax_transformer()


def load_alpha(model: nn.Module, name_or_path: str | Path, **hub: object) -> list[EntmaxAlpha]:
    """Load the learned alphas of a checkpoint into a model, one alpha per head.

    Call it after ``from_pretrained``, which reports ``entmax_alpha.theta`` as unexpected weights
    and leaves them out. The model refuses to run without them.

    Args:
        model: a transformers model, of the saved class or another one of its architecture.
        name_or_path: the folder, or the name on the Hugging Face hub, from which the model was
            loaded.
        hub: ``subfolder``, ``revision``, ``token``, ``cache_dir``, ``local_files_only`` as for
            ``from_pretrained``.

    Returns:
        The new modules, one per attention layer.

    Raises:
        ValueError: if the checkpoint has no learned alphas for these layers.
        OSError: if there is no checkpoint.
    """
    check_network(model)
    # A learned alpha is computed from its parameter theta.
    thetas = _read_thetas(str(name_or_path), hub)
    layers = attention.checked_attention_modules(model)
    layer_names = [name for name, module in model.named_modules() if module in layers]
    theta_by_layer: dict[str, Tensor] = {}
    for name in layer_names:
        theta = _matching_theta(name, thetas)
        if theta is not None:
            theta_by_layer[name] = theta
    missing = [name for name in layer_names if name not in theta_by_layer]
    if missing:
        raise ValueError(
            f"name_or_path {str(name_or_path)!r} must hold learned alphas of {len(layer_names)} "
            f"attention layers, got {len(thetas)}, and none for {', '.join(missing[:3])}; use "
            "set_alpha or learn_alpha to start with new ones.",
        )
    alphas = learn_alpha(model)
    for alpha, (name, theta) in zip(alphas, theta_by_layer.items(), strict=True):
        if theta.shape != alpha.theta.shape:
            raise ValueError(
                f"theta of {name} must have shape {list(alpha.theta.shape)}, got "
                f"{list(theta.shape)} in {name_or_path}.",
            )
        with torch.no_grad():
            alpha.theta.copy_(theta)
    return alphas


def use_entmax(
    model: nn.Module,
    alpha: float | list[float] = attention.DEFAULT,
    *,
    learn: bool = False,
) -> None:
    """Switch a model in memory, and its checkpoints, to alpha-entmax attention.

    ``config.json`` then holds ``"attn_implementation": "entmax"`` and the alphas. A checkpoint
    loads with entmax attention if :func:`register` was called before. Otherwise loading raises an
    error, so that the model never runs softmax silently.

    Args:
        model: a transformers model, or any module that contains one.
        alpha: one number for all layers, or one for each, in [1, 2]. Alpha 1 is softmax.
        learn: whether to learn one alpha per head, starting at ``alpha``, as :func:`learn_alpha`
            does.

    Raises:
        ValueError: if alphas are invalid, or the attention of the model does not use transformers'
            attention interface.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2, intermediate_size=64)
        >>> model = BertModel(config)
        >>> use_entmax(model, alpha=1.5)
        >>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
        >>> model.config._attn_implementation
        'entmax'
    """
    check_network(model)
    attention.register()
    for outer_model in _find_outer_models(model):
        outer_model.set_attn_implementation(attention.NAME)
    modules = attention.checked_attention_modules(model)
    unchanged = {
        type(module).__name__ for module in modules if _attention_name(module) != attention.NAME
    }
    if unchanged:
        raise ValueError(
            "model must support choosing its attention, but these classes do not, got "
            f"{sorted(unchanged)}.",
        )
    if learn:
        learn_alpha(model, alpha)
    else:
        set_alpha(model, alpha)
    for config in _distinct_configs(model):
        setattr(config, attention.MARK, attention.NAME)


def use_softmax(model: nn.Module, attn_implementation: str = "sdpa") -> None:
    """Undo :func:`use_entmax`: remove the alphas, so that later checkpoints have none.

    Args:
        model: a transformers model, or any module that contains one.
        attn_implementation: the attention implementation of transformers to use afterwards.
    """
    for module in attention.checked_attention_modules(model):
        _delete_alpha(module)
    for outer_model in _find_outer_models(model):
        outer_model.set_attn_implementation(attn_implementation)
    for config in _distinct_configs(model):
        for name in (attention.MARK, attention.ALPHA):
            if name in vars(config):
                delattr(config, name)


def runs_entmax(model: nn.Module) -> bool:
    """Whether a model runs entmax attention in every layer whose configuration has alphas.

    Args:
        model: the model.

    Returns:
        True if some layers run entmax attention, False if the model has nothing to do with it.

    Raises:
        ValueError: if the configuration of a layer has alphas, but the layer runs another
            attention, such as softmax.
    """
    function_by_implementation = AttentionInterface._global_mapping
    runs_any = False
    other_implementations = []  # of layers that should run entmax attention
    for module in attention.attention_modules(model):
        implementation = _attention_name(module)
        function = function_by_implementation.get(implementation)
        if function is attention.entmax_attention_forward:
            runs_any = True
        elif hasattr(module.config, attention.ALPHA):
            other_implementations.append(implementation)
    if other_implementations:
        raise ValueError(
            "model must run entmax attention in every layer whose configuration has "
            f"entmax_alpha, got {len(other_implementations)} layers with "
            f"attn_implementation={other_implementations[0]!r}; call use_entmax(model, alpha), "
            "or use_softmax(model).",
        )
    return runs_any


def has_learned_alpha(model: nn.Module) -> bool:
    """Whether the configuration of a model records that its alphas are learned."""
    return any(
        getattr(config, attention.ALPHA, None) == attention.LEARNED
        for config in _distinct_configs(model)
    )


def check_alphas(alpha: float | Sequence[float], layers: int) -> list[float]:
    """Return one alpha in [1, 2] per layer.

    Args:
        alpha: one number for all layers, or one for each.
        layers: the number of layers.

    Raises:
        ValueError: if the number of alphas is wrong, or one is outside [1, 2].
    """
    alphas: list[Any] = list(alpha) if isinstance(alpha, (list, tuple)) else [alpha] * layers
    if len(alphas) != layers:
        raise ValueError(
            f"alpha must be one number or {layers}, one for every attention layer, got {alphas}.",
        )
    for value in alphas:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 1 <= value <= 2:
            raise ValueError(f"alpha must lie in [1, 2], got {alphas}.")
    return [float(value) for value in alphas]


class AlphaSchedule(TrainerCallback):
    """Anneal alpha from softmax to a target during training, as AdaSplash's encoders do.

    This is a callback for ``transformers.Trainer`` and the trainers of sentence-transformers,
    ``callbacks=[AlphaSchedule()]``. The model must run entmax attention, see :func:`use_entmax`.
    Alpha follows the number of finished optimiser steps, also in checkpoints, evaluations and
    resumed runs, and stays at the target after ``until``. Alpha 1 is softmax. The method is that of
    arXiv 2502.12082.

    Args:
        alpha: the target, in [1, 2]; one number, or one per attention layer.
        start: the alpha at the first step.
        until: when the target is reached: a float in (0, 1] is a fraction of all steps, an integer
            a number of steps.
        shape: ``"linear"``, or ``"cosine"``, which starts and ends slowly.

    Raises:
        ValueError: if a value is out of range; when training starts, if the model does not run
            entmax attention, has learned alphas or another number of layers, or if ``until`` is
            after the last step.
    """

    def __init__(
        self,
        alpha: float | Sequence[float] = 1.5,
        *,
        start: float = 1.0,
        until: float = 0.5,
        shape: str = "linear",
    ) -> None:
        """Check and store the schedule.

        Args:
            alpha: the target, in [1, 2]; one number, or one per attention layer.
            start: the alpha at the first step.
            until: the fraction of all steps in (0, 1], or the number of steps, at which the target
                is reached.
            shape: ``"linear"`` or ``"cosine"``.
        """
        n_targets = len(alpha) if isinstance(alpha, Sequence) else 1
        self.targets = check_alphas(alpha, n_targets)
        self.alpha = alpha
        (self.start,) = check_alphas(start, 1)
        is_share = isinstance(until, float) and 0 < until <= 1
        is_count = isinstance(until, int) and not isinstance(until, bool) and until >= 1
        if not is_share and not is_count:
            raise ValueError(
                "until must be a share of the steps in (0, 1] or a whole number of them, got "
                f"{until!r}.",
            )
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(map(repr, SHAPES))}, got {shape!r}.")
        self.until = until
        self.shape = shape

    def alpha_at(self, step: int, steps: int) -> float | list[float]:
        """Return the alpha of the schedule after ``step`` of ``steps`` optimiser steps.

        Progress goes from 0 at the first step to 1 at ``until``, and alpha follows it from start to
        target, linearly or along half a cosine.

        Args:
            step: the number of finished steps.
            steps: the number of all steps of the training.

        Returns:
            One alpha, or a list with one per layer if the target is a list.
        """
        progress = min(1.0, step / max(1, self._steps_to_target(steps)))
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        if progress == 1:
            alphas = list(self.targets)  # exactly, without a rounding error
        else:
            alphas = [self.start + progress * (target - self.start) for target in self.targets]
        return alphas if isinstance(self.alpha, Sequence) else alphas[0]

    def _steps_to_target(self, steps: int) -> float:
        """Return the number of steps after which alpha is the target."""
        is_fraction = isinstance(self.until, float)
        return math.ceil(self.until * steps) if is_fraction else self.until

    def on_train_begin(
        self,
        args: object,
        state: Any,
        control: object,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Check the model, and set the alpha of the step at which training starts or resumes.

        Args:
            args: the training arguments; not used.
            state: the state of the trainer, with the numbers of finished steps and of all steps.
            control: not used.
            model: the model in training.

        Raises:
            ValueError: if the model does not run entmax attention or has learned alphas, or if
                ``until`` is after the last step.
        """
        if model is None:
            raise ValueError("model must be passed to the callback by its trainer, got None.")
        if not runs_entmax(model):
            raise ValueError(
                "model must run entmax attention, got one that runs none; call use_entmax(model) "
                "first.",
            )
        if has_learned_alpha(model):
            raise ValueError(
                "model must not have learned alphas, got some; a schedule would overwrite them.",
            )
        if isinstance(self.until, int) and self.until > state.max_steps:
            raise ValueError(
                f"until must not lie after the last step, {state.max_steps}, got {self.until}.",
            )
        set_alpha(model, self.alpha_at(state.global_step, state.max_steps))

    def on_step_end(
        self,
        args: object,
        state: Any,
        control: object,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Set the alpha of the next step.

        Args:
            args: the training arguments; not used.
            state: the state of the trainer, with the numbers of finished steps and of all steps.
            control: not used.
            model: the model in training.
        """
        if model is not None:
            set_alpha(model, self.alpha_at(state.global_step, state.max_steps))


def _delete_alpha(module: nn.Module) -> None:
    """Remove the alpha of an attention module, if it has one of its own."""
    if attention.ALPHA in vars(module) or attention.ALPHA in module._modules:
        delattr(module, attention.ALPHA)


@functools.cache
def entmax_transformer() -> type:
    """Return the class ``EntmaxTransformer``, which needs sentence-transformers."""
    from sentence_transformers.base.modules import Transformer

    class EntmaxTransformer(Transformer):
        """``Transformer`` of sentence-transformers that also loads learned alphas from checkpoints.

        :func:`learn_alpha` gives this class to the modules of a model. A checkpoint stores the name
        of the class in ``modules.json``. Version 6 of sentence-transformers loads classes of other
        packages only with ``trust_remote_code=True``, although it runs the installed tilefold and
        no code of the checkpoint.
        """

        # Checkpoints and pickles look for the class under this name.
        __module__ = "tilefold.integrations.sentence_transformers.entmax"
        __qualname__ = "EntmaxTransformer"

        def __init__(self, model_name_or_path: str | Path, **kwargs: Any) -> None:
            """Load a checkpoint, with its learned alphas if it has any.

            Args:
                model_name_or_path: the folder, or the name on the Hugging Face hub.
                **kwargs: other arguments of the stock ``Transformer``.
            """
            attention.register()
            super().__init__(model_name_or_path, **kwargs)
            if has_learned_alpha(self.model):
                model_kwargs = kwargs.get("model_kwargs") or {}
                hub_options = {
                    name: model_kwargs[name] for name in _HUB_OPTIONS if name in model_kwargs
                }
                load_alpha(self.model, model_name_or_path, **hub_options)

    return EntmaxTransformer


def _attention_name(module: nn.Module) -> object:
    return getattr(module.config, "_attn_implementation", None)


def _find_outer_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost transformers models in a module.

    A transformers model often contains others, such as the encoder below an LM head.

    Args:
        model: the module, which may be a transformers model itself.
    """
    inner_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inner_ids:
            inner_ids.update(id(submodule) for submodule in module.modules())
            yield module


def _distinct_configs(model: nn.Module) -> list[Any]:
    """Return each distinct configuration within a module that may hold ``entmax_alpha``.

    These are the configurations of transformers models, and those of other modules that have
    ``entmax_alpha``.

    Args:
        model: the module.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        if not hasattr(module, "config"):
            continue
        if isinstance(module, PreTrainedModel) or attention.ALPHA in vars(module.config):
            configs[id(module.config)] = module.config
    return list(configs.values())


def _matching_theta(name: str, thetas: dict[str, Tensor]) -> Tensor | None:
    """Find the parameter theta of an attention module among those of a checkpoint, by its name.

    A learned alpha is computed from theta, which has one number per head. The names of one module
    may differ in their prefix: the model may have ``"layers.0.attn"`` where the checkpoint has
    ``"model.layers.0.attn"``, or the other way round.

    Args:
        name: the name of the attention module in its model.
        thetas: the parameters theta, by their full names in the checkpoint.

    Returns:
        The tensor; None if no name matches, or several do.
    """
    if name + THETA_SUFFIX in thetas:
        return thetas[name + THETA_SUFFIX]
    # Names are compared with a leading dot, so that only whole parts between dots agree.
    name_in_model = f".{name}{THETA_SUFFIX}"
    matches = []
    for key in thetas:
        name_in_checkpoint = f".{key}"
        has_longer_prefix = name_in_checkpoint.endswith(name_in_model)
        has_shorter_prefix = name_in_model.endswith(name_in_checkpoint)
        if has_longer_prefix or has_shorter_prefix:
            matches.append(key)
    return thetas[matches[0]] if len(matches) == 1 else None


def _read_thetas(name_or_path: str, hub: dict[str, object]) -> dict[str, Tensor]:
    """Read the parameters theta of learned alphas from a checkpoint in one or several files.

    Args:
        name_or_path: a folder, or a name on the Hugging Face hub.
        hub: options of ``from_pretrained`` that say where the checkpoint is.

    Returns:
        The tensors by their names in the checkpoint.

    Raises:
        OSError: if there are no weights.
    """
    # Imported here, because it imports the client of the Hugging Face hub.
    from transformers.utils import cached_file

    for name in WEIGHT_FILES:
        path = cached_file(
            name_or_path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=True,
            **hub,
        )
        if path is None:
            continue
        if not name.endswith("index.json"):
            return _thetas_in(path)
        # The index names the file of each weight.
        file_by_weight = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        files = {file for weight, file in file_by_weight.items() if weight.endswith(THETA_SUFFIX)}
        thetas: dict[str, Tensor] = {}
        for file in sorted(files):
            thetas.update(_thetas_in(cached_file(name_or_path, file, **hub)))
        return thetas
    existing_names = sorted(path.name for path in Path(name_or_path).glob("*"))
    existing = ", ".join(existing_names[:3]) or "no such file"
    raise OSError(
        f"{name_or_path} must hold one of {', '.join(WEIGHT_FILES)}, got {existing}; save the "
        "model there.",
    )


def _thetas_in(path: str) -> dict[str, Tensor]:
    """Read the parameters theta of learned alphas from one file of weights.

    Args:
        path: a safetensors file, or a file written by ``torch.save``, from which only tensors are
            loaded.

    Returns:
        The tensors by their names in the file; empty if the file has none.
    """
    if path.endswith(".safetensors"):
        from safetensors import safe_open  # comes with transformers

        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.endswith(THETA_SUFFIX)]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {name: tensor for name, tensor in weights.items() if name.endswith(THETA_SUFFIX)}
