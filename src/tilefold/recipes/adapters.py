"""PEFT adapters, such as LoRA: continuing their training, and merging them exactly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tilefold._internal.arguments import check_instance
from tilefold._internal.typing import Model, Module, Network, SparseEncoder, Tensor

PROBE_TOKENS = 8  # number of tokens whose outputs are compared before and after a merge
# largest difference of outputs before and after a merge in fp32, relative to the largest output
TOLERANCE = 1e-4


def unfreeze_adapters(model: Model) -> tuple[str, ...]:
    """Unfreeze the active adapters of a model, so that training continues them.

    transformers freezes an adapter that it loads, and all weights below it. Without this function,
    training would fail, or would train only the modules after the network.

    Args:
        model: model whose networks may have PEFT adapters, such as LoRA.

    Returns:
        The names of the adapters; none for a model without adapters.
    """
    _check_is_model(model)
    names: list[str] = []
    for network in _trained_networks(model):
        names += unfreeze_network_adapters(network)
    return tuple(dict.fromkeys(names))


def unfreeze_network_adapters(network: Network) -> list[str]:
    """Make the active adapters of a transformers model trainable, and return their names."""
    if not getattr(network, "_hf_peft_config_loaded", False):
        return []
    active: list[str] = network.active_adapters()
    network.set_adapter(active)
    for name in active:
        _unfreeze_biases(network, getattr(network.peft_config[name], "bias", "none"))
    return active


def _unfreeze_biases(network: Network, biases: str) -> None:
    """Unfreeze the biases that a PEFT adapter trains.

    Args:
        network: network with the adapter.
        biases: field ``bias`` of the adapter's configuration: ``"all"`` for all biases of the
            network, ``"lora_only"`` for the biases of layers with an adapter, or ``"none"``.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if biases == "all":
        for name, parameter in network.named_parameters():
            if name.rpartition(".")[2] == "bias":
                parameter.requires_grad_(True)
    elif biases == "lora_only":
        for module in network.modules():
            if not isinstance(module, BaseTunerLayer):
                continue
            bias = module.get_base_layer().bias
            if bias is not None:
                bias.requires_grad_(True)


def _trained_networks(model: Model) -> Iterator[Network]:
    """Yield the transformers models in a model, except for those that are frozen on purpose."""
    from sentence_transformers.base.modules import Transformer

    from tilefold.modules import FrozenTransformer

    for module in model.modules():
        if isinstance(module, Transformer) and not isinstance(module, FrozenTransformer):
            yield module.model


def _check_is_model(model: object) -> None:
    """Raise ``TypeError`` if `model` is not a torch module, such as the name of a model."""
    from torch import nn

    check_instance("model", model, nn.Module, "a loaded model, such as load_encoder(folder)")


def count_weights(model: Model) -> tuple[int, int]:
    """Return the number of trained weights of a model, and the number of all its weights."""
    _check_is_model(model)
    n_trained = 0
    n_weights = 0
    for parameter in model.parameters():
        n_weights += parameter.numel()
        if parameter.requires_grad:
            n_trained += parameter.numel()
    return n_trained, n_weights


def check_trainable(model: Model) -> None:
    """Raise a ``ValueError`` if all weights of a model are frozen."""
    n_trained, n_weights = count_weights(model)
    if not n_trained:
        raise ValueError(
            f"base_model must have weights to train, got a model whose {n_weights:,} weights are "
            "all frozen. Use a model with trainable weights, or call requires_grad_(True) before "
            "it is saved.",
        )


def merge_adapters(model: SparseEncoder) -> int:
    """Merge every active adapter into the weights of its network, and drop the adapters.

    A LoRA update is added to its weight. A module that was trained as a copy (``modules_to_save``)
    replaces the original. If the LM head shares the weight of the embeddings, and only one of the
    two has an update, they are untied, and ``config.tie_word_embeddings`` becomes False.

    The sum is computed in fp32, and every weight keeps its dtype. A 16-bit weight is therefore
    rounded once: it differs from the sum by at most half a unit in the last place (a relative
    error of 2^-9 in bf16 and 2^-12 in fp16). Call ``model.float()`` before the merge to avoid this.
    While a 16-bit network is merged, it needs as much memory as in fp32.

    Args:
        model: a loaded model, changed in place.

    Returns:
        The number of modules that had an adapter.

    Raises:
        ValueError: if an adapter cannot be merged exactly, the model is accelerated, or its weights
            are quantized; the model is not changed.
        RuntimeError: if the merge in fp32 changes the outputs of the network.

    Warns:
        UserWarning: if a sum is too large for fp16. The network then stays in fp32.
    """
    from sentence_transformers.base.modules import Transformer

    from tilefold.integrations.sentence_transformers import is_accelerated

    _check_is_model(model)
    try:
        import peft  # noqa: F401
    except ImportError:
        return 0
    networks = [module.model for module in model.modules() if isinstance(module, Transformer)]
    adapted = [(network, _adapted_modules(network)) for network in networks]
    if is_accelerated(model) and any(names for _, names in adapted):
        raise ValueError(
            "model must not be accelerated while adapters are merged, because the merge replaces "
            "modules; call restore(model) before, and accelerate(model) after.",
        )
    for network, names in adapted:
        _check_mergeable(network, names)
    for network, names in adapted:
        if names:
            _merge_network(network, names)
    return sum(len(names) for _, names in adapted)


def _adapted_modules(network: Network) -> list[str]:
    """Return the names of the modules in a network that PEFT has wrapped.

    A wrapped module inside another wrapped module is left out.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    names: list[str] = []
    for name, module in network.named_modules():  # outer modules come before inner ones
        is_nested = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not is_nested:
            names.append(name)
    return names


def _check_mergeable(network: Network, names: list[str]) -> None:
    """Raise an error if an adapter cannot be merged exactly into the weights of its network.

    Args:
        network: network with the adapters.
        names: names of the modules with an adapter.

    Raises:
        ValueError: if the network is a ``PeftModel`` or quantized, or if an adapter cannot be
            merged.
    """
    from peft import PeftModel

    if isinstance(network, PeftModel):
        raise ValueError(
            "adapters must be added by the model's own add_adapter to be merged, got a PeftModel; "
            "call its merge_and_unload and put the result into the Transformer module.",
        )
    if names and getattr(network, "is_quantized", False):
        raise ValueError(
            "adapters must be on floating-point weights to be merged, got a quantized "
            f"{type(network).__name__}; save the model with its adapter instead.",
        )
    for name in names:
        _check_module_mergeable(network, name)


def _check_module_mergeable(network: Network, name: str) -> None:
    """Raise an error if the adapter of one module cannot be merged exactly.

    Args:
        network: network with the module.
        name: name of the module.

    Raises:
        ValueError: if the adapter is disabled, is neither LoRA nor ``modules_to_save``, or changes
            a weight that other modules share.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

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
    shared_names = _names_of_shared_weights(network, name)
    # Input embeddings and LM head may share a weight, because they can be untied.
    if shared_names - _tied_embedding_names(network):
        raise ValueError(
            f"adapters must not change a weight that other modules share, got {name}, which shares "
            f"its weight with {', '.join(sorted(shared_names))}; save the model with its adapter.",
        )


def _merge_network(network: Network, names: list[str]) -> None:
    """Merge the adapters of one network in fp32, then cast all weights to their original dtypes.

    The outputs for a few tokens are compared before and after the merge in fp32.

    Args:
        network: the network with the adapters, changed in place.
        names: names of the modules with an adapter.

    Raises:
        RuntimeError: if the outputs differ.
    """
    original_dtypes = _dtypes_without_adapters(network)
    _convert_to_fp32(network)
    expected = _probe_outputs(network)
    for name in names:
        network.set_submodule(name, _merge_module(network, name))
    # From now on, transformers treats the network as one without adapters.
    network._hf_peft_config_loaded = False
    vars(network).pop("peft_config", None)
    network.requires_grad_(True)  # transformers had frozen the weights below the adapters
    _untie_head_if_changed(network)
    difference = float((_probe_outputs(network) - expected).abs().max())
    largest_output = float(expected.abs().max())
    if not difference <= TOLERANCE * largest_output:
        raise RuntimeError(
            f"merged adapters must not change outputs, got a difference of {difference:.3g} for "
            f"values up to {largest_output:.3g}; save the model with its adapter.",
        )
    _convert_to_dtypes(network, original_dtypes)


def _merge_module(network: Network, name: str) -> Module:
    """Merge the PEFT adapter of a module into its weight.

    Args:
        network: network with the module.
        name: name of the module, a ``LoraLayer`` or a ``ModulesToSaveWrapper``.

    Returns:
        The module without its adapter, which the caller puts into the network.
    """
    from peft.utils import ModulesToSaveWrapper

    module = network.get_submodule(name)
    if isinstance(module, ModulesToSaveWrapper):
        # This adapter is a trained copy of the whole module, which needs no merge.
        return module.modules_to_save[module.active_adapters[0]]
    if _names_of_shared_weights(network, name):
        # LoRA's merge changes the weight in place. Other modules must keep the original values.
        _unshare(module.get_base_layer())
    module.merge(safe_merge=True)
    return module.get_base_layer()


def _named_tensors(network: Network) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers with their names. A shared tensor has several names."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


def _dtypes_without_adapters(network: Network) -> dict[str, Any]:
    """Return name -> dtype of each tensor, with the names that tensors have after a merge."""
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor.dtype
        for name, tensor in _named_tensors(network)
    }


def _convert_to_fp32(network: Network) -> None:
    """Convert the 16-bit tensors of a network to fp32, without a change of their values."""
    import torch

    for _, tensor in _named_tensors(network):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()


def _convert_to_dtypes(network: Network, dtypes: Mapping[str, Any]) -> None:
    """Cast each tensor of a network to the given dtype, unless a value would overflow in fp16.

    In that case a warning is issued, and no tensor of the network is cast.

    Args:
        network: the merged network, whose 16-bit tensors are in fp32; changed in place.
        dtypes: name of a parameter or buffer -> its new dtype.

    Warns:
        UserWarning: if a value would overflow in fp16.
    """
    import torch

    # All tensors are checked before the first one is cast.
    for name, tensor in _named_tensors(network):
        if dtypes[name] != torch.float16:
            continue
        overflows = tensor.half().isinf() & tensor.isfinite()
        if overflows.any():
            largest = float(tensor.detach()[overflows].abs().max())
            warnings.warn(
                f"the merged weight {name} has a value of magnitude {largest:.3g}, too large for "
                "fp16, so the network stays in fp32. To choose another dtype, convert the model to "
                "bf16 or fp32 before the merge.",
                stacklevel=4,  # the caller of merge_adapters
            )
            return
    for name, tensor in _named_tensors(network):
        if tensor.dtype != dtypes[name]:
            tensor.data = tensor.data.to(dtypes[name])


def _names_of_shared_weights(network: Network, name: str) -> set[str]:
    """Return the names of parameters of other modules that are the weight of an adapted module.

    For example, the weight of the LM head often is the weight of the input embeddings.

    Args:
        network: network with the module.
        name: name of the module.

    Returns:
        Names of parameters of other modules; empty if the weight is not shared.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    module = network.get_submodule(name)
    if not isinstance(module, BaseTunerLayer):  # PEFT trains modules_to_save as unshared copies
        return set()
    weight = getattr(module.get_base_layer(), "weight", None)
    if weight is None:
        return set()
    return {
        parameter_name
        for parameter_name, parameter in network.named_parameters(remove_duplicate=False)
        if parameter is weight and not parameter_name.startswith(f"{name}.")
    }


def _tied_embedding_names(network: Network) -> set[str]:
    """Return the parameter names of the weight that input embeddings and LM head share.

    The field ``tie_word_embeddings`` of the configuration can untie the two. There is no such field
    for other modules that share a weight.

    Args:
        network: a transformers model.

    Returns:
        The names; empty if the model has no head, or if the head has its own weight.
    """
    embeddings = network.get_input_embeddings()
    head = network.get_output_embeddings()
    if embeddings is None or head is None or head.weight is not embeddings.weight:
        return set()
    return {
        name
        for name, parameter in network.named_parameters(remove_duplicate=False)
        if parameter is head.weight
    }


def _unshare(module: Module) -> None:
    """Replace the weight of a module by a copy, which no other module shares."""
    from torch.nn import Parameter

    module.weight = Parameter(module.weight.detach().clone())


def _untie_head_if_changed(network: Network) -> None:
    """Untie the LM head from the embeddings for good, if the two no longer share their weight.

    Otherwise transformers would tie them again when the saved network is loaded.

    Args:
        network: the network, changed in place. Its configuration is set to untied, and the bias of
            the head becomes a copy.
    """
    from torch.nn import Parameter

    embeddings = network.get_input_embeddings()
    head = network.get_output_embeddings()
    text_config = network.config.get_text_config()
    is_tied_by_config = getattr(text_config, "tie_word_embeddings", False)
    if head is None or not is_tied_by_config or head.weight is embeddings.weight:
        return
    text_config.tie_word_embeddings = False
    network.config.tie_word_embeddings = False
    if hasattr(network, "all_tied_weights_keys"):  # read when the network is saved
        network.all_tied_weights_keys = {}
    # BERT's head shares its bias with the module around it. A shared tensor that is not declared as
    # tied cannot be saved.
    if head.bias is not None:
        head.bias = Parameter(head.bias.detach().clone())


def _probe_outputs(network: Network) -> Tensor:
    """Return the outputs ``[1, PROBE_TOKENS, V or D]`` of a network for its first token ids.

    Args:
        network: a transformers model in fp32 or wider, with V logits or D states per token.
    """
    import torch

    from tilefold.integrations.transformers.networks import in_eval_mode

    device = next(network.parameters()).device
    embeddings: Any = network.get_input_embeddings()
    token_ids = torch.arange(embeddings.weight.size(0), device=device)
    padding_id = getattr(getattr(embeddings, "base_layer", embeddings), "padding_idx", None)
    if padding_id is not None:
        # The embedding of padding is 0. A network that divides it by its norm would return NaN.
        token_ids = token_ids[token_ids != padding_id]
    # A vocabulary of fewer tokens is repeated.
    token_ids = token_ids[torch.arange(PROBE_TOKENS, device=device) % len(token_ids)][None]
    with in_eval_mode(network), _without_flash_attention(network), torch.no_grad():
        output: Any = network(input_ids=token_ids)
    return output[0].float()  # type: ignore[no-any-return]


@contextmanager
def _without_flash_attention(network: Network) -> Iterator[None]:
    """Replace FlashAttention, which does not support fp32, by torch's attention in this context.

    Args:
        network: the network. Other attention implementations are not replaced.
    """
    attention = getattr(network.config, "_attn_implementation", None)
    if attention is None or "flash" not in attention:
        yield
        return
    network.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        network.set_attn_implementation(attention)
