"""Adapters of Hugging Face's PEFT, such as LoRA: training them on, and merging them exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tilefold._internal.typing import Model, Module, Network, SparseEncoder, Tensor

_PROBE_TOKENS = 8
# largest difference of outputs before and after a merge, as a share of the largest output
_TOLERANCE = 1e-4
_TOLERANCE_16_BITS = 0.03  # the sum of a weight and its update is rounded again


def train_adapters(model: Model) -> tuple[str, ...]:
    """Make the active adapters of a model trainable, as they were when they were trained.

    transformers freezes an adapter that it loads, and all weights below it. A training would end in
    an error of torch, or train the modules after the network alone.

    Returns:
        The names of the adapters; none for a model without adapters.
    """
    names: list[str] = []
    for network in _trained_networks(model):
        names += train_adapters_of_network(network)
    return tuple(dict.fromkeys(names))


def train_adapters_of_network(network: Network) -> list[str]:
    """Make the active adapters of a transformers model trainable, and return their names."""
    if not getattr(network, "_hf_peft_config_loaded", False):
        return []
    active: list[str] = network.active_adapters()
    network.set_adapter(active)
    for name in active:
        _train_biases(network, getattr(network.peft_config[name], "bias", "none"))
    return active


def _train_biases(network: Network, biases: str) -> None:
    """Make the biases trainable that an adapter has trained: ``none``, ``all`` or ``lora_only``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if biases == "all":
        for name, parameter in network.named_parameters():
            if name.rpartition(".")[2] == "bias":
                parameter.requires_grad_(True)
    elif biases == "lora_only":
        for module in network.modules():
            bias = module.get_base_layer().bias if isinstance(module, BaseTunerLayer) else None
            if bias is not None:
                bias.requires_grad_(True)


def _trained_networks(model: Model) -> Iterator[Network]:
    """The transformers models in a model, but for those that are frozen on purpose."""
    from sentence_transformers.base.modules import Transformer

    from tilefold.modules import FrozenTransformer

    for module in model.modules():
        if isinstance(module, Transformer) and not isinstance(module, FrozenTransformer):
            yield module.model


def count_weights(model: Model) -> tuple[int, int]:
    """Numbers in all trained parameters of a model, and in all its parameters."""
    trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
    return trained, sum(tensor.numel() for tensor in model.parameters())


def check_trainable(model: Model) -> None:
    """Raise a ``ValueError`` for a model of which nothing would be trained."""
    trained, in_all = count_weights(model)
    if not trained:
        raise ValueError(
            f"base_model must have weights to train, got a model whose {in_all:,} weights are all "
            "frozen. Take a model with trainable weights, or call requires_grad_(True) before it "
            "is "
            "saved.",
        )


def merge_adapters(model: SparseEncoder) -> int:
    """Merge every active adapter into the weights of its network, and drop the adapters.

    A LoRA update is added to its weight. A module that was trained as a copy (``modules_to_save``)
    takes the place of the original. A head that is tied to the embeddings gets a weight of its own
    where only one of both has an update, and ``config.tie_word_embeddings`` becomes False.

    Returns:
        The number of modules with an adapter.

    Raises:
        ValueError: for an adapter that cannot be merged exactly, or an accelerated model; the
            model is not changed.
        RuntimeError: if the outputs of the merged network differ.
    """
    from sentence_transformers.base.modules import Transformer

    from tilefold.integrations.sentence_transformers import is_accelerated

    try:
        import peft  # noqa: F401
    except ImportError:
        return 0
    networks = [module.model for module in model.modules() if isinstance(module, Transformer)]
    adapted = [(network, _adapted_modules(network)) for network in networks]
    if is_accelerated(model) and any(names for _, names in adapted):
        raise ValueError(
            "model must not be accelerated while adapters are merged, whose modules are replaced; "
            "call restore(model) before, and accelerate(model) after.",
        )
    for network, names in adapted:
        _check_mergeable(network, names)
    for network, names in adapted:
        if names:
            _merge_network(network, names)
    return sum(len(names) for _, names in adapted)


def _adapted_modules(network: Network) -> list[str]:
    """Names of the outermost modules that PEFT put into a network."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    names: list[str] = []
    for name, module in network.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not inside:
            names.append(name)
    return names


def _check_mergeable(network: Network, names: list[str]) -> None:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(network, PeftModel):
        raise ValueError(
            "adapters must be added by the model's own add_adapter to be merged, got a PeftModel; "
            "call its merge_and_unload and put the result into the Transformer module.",
        )
    for name in names:
        module = network.get_submodule(name)
        if not isinstance(module, LoraLayer | ModulesToSaveWrapper):
            raise ValueError(
                "adapters must be LoRA or modules_to_save to be merged exactly, got "
                f"{type(module).__name__} at {name}; save the model with its adapter instead.",
            )
        if module.disable_adapters or not module.active_adapters:
            raise ValueError(
                f"adapters must be active to be merged, got a disabled one at {name}; call "
                "enable_adapters or delete_adapter of the network first.",
            )
        shared = _names_of_shared_weights(network, name)
        if shared - _names_of_embeddings(network):
            raise ValueError(
                f"adapters must not change a weight that other modules share, got {name}, whose "
                f"weight is also {', '.join(sorted(shared))}; save the model with its adapter.",
            )


def _merge_network(network: Network, names: list[str]) -> None:
    from peft.tuners.lora import LoraLayer

    expected = _probe(network)
    tolerance = _tolerance(network)
    for name in names:
        module = network.get_submodule(name)
        if isinstance(module, LoraLayer):
            if _names_of_shared_weights(network, name):
                _unshare(module.get_base_layer())
            module.merge(safe_merge=True)
            merged = module.get_base_layer()
        else:
            merged = module.modules_to_save[module.active_adapters[0]]
        network.set_submodule(name, merged)
    network._hf_peft_config_loaded = False
    vars(network).pop("peft_config", None)
    network.requires_grad_(True)
    _record_untied_head(network)
    difference = float((_probe(network) - expected).abs().max())
    if not difference <= tolerance * float(expected.abs().max()):
        raise RuntimeError(
            f"merged adapters must not change outputs, got a difference of {difference:.3g} beside "
            f"values up to {float(expected.abs().max()):.3g}; save the model with its adapter.",
        )


def _names_of_shared_weights(network: Network, name: str) -> set[str]:
    """Other parameters of a network that are the same tensor as the weight of an adapted module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    module = network.get_submodule(name)
    if not isinstance(module, BaseTunerLayer):
        return set()  # a copy of the original is trained
    weight = getattr(module.get_base_layer(), "weight", None)
    named = network.named_parameters(remove_duplicate=False)
    return {
        other
        for other, parameter in named
        if parameter is weight and not other.startswith(f"{name}.")
    }


def _names_of_embeddings(network: Network) -> set[str]:
    """Names of the weights of input and output embeddings, which a configuration can untie."""
    embeddings = (network.get_input_embeddings(), network.get_output_embeddings())
    weights = [module.weight for module in embeddings if module is not None]
    named = network.named_parameters(remove_duplicate=False)
    tied = len(weights) > 1 and weights[0] is weights[1]
    return {name for name, parameter in named if tied and parameter is weights[0]}


def _unshare(module: Module) -> None:
    """Give a module a weight of its own, with the same values."""
    from torch.nn import Parameter

    module.weight = Parameter(module.weight.detach().clone())


def _record_untied_head(network: Network) -> None:
    """Let the configuration say that the head has a weight of its own, where that is so."""
    from torch.nn import Parameter

    embeddings, head = network.get_input_embeddings(), network.get_output_embeddings()
    config = network.config.get_text_config()
    tied = getattr(config, "tie_word_embeddings", False)
    if head is None or not tied or head.weight is embeddings.weight:
        return
    config.tie_word_embeddings = network.config.tie_word_embeddings = False
    if hasattr(network, "all_tied_weights_keys"):
        network.all_tied_weights_keys = {}
    if head.bias is not None:  # which BERT shares with the module around its decoder
        head.bias = Parameter(head.bias.detach().clone())


def _probe(network: Network) -> Tensor:
    """Outputs of a network for a few tokens, in fp32."""
    import torch

    from tilefold.integrations.transformers.packed import in_eval_mode

    device = next(network.parameters()).device
    n_tokens = network.get_input_embeddings().weight.size(0)
    ids = torch.arange(_PROBE_TOKENS, device=device)[None] % n_tokens
    with in_eval_mode(network), torch.no_grad():
        output: Any = network(input_ids=ids)
    return output[0].float()  # type: ignore[no-any-return]


def _tolerance(network: Network) -> float:
    import torch

    wide = all(
        parameter.dtype in (torch.float32, torch.float64) for parameter in network.parameters()
    )
    return _TOLERANCE if wide else _TOLERANCE_16_BITS
