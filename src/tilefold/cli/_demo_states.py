"""Mean token states, which the dense model of the demo takes over from its multi-vector model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold._internal.typing import Model
from tilefold.integrations.transformers.packed import OFFSETS

Features = dict[str, Any]


class SharedStates:
    """Mean token states of texts, which one model computes and another one reuses.

    The dense all-MiniLM-L6-v2 and the multi-vector model of the demo have the same network. A dense
    vector is the mean of the token states that the multi-vector model computes anyway, so the
    network needs to run only once per text. Texts are recognised by their token ids, which also
    tell apart texts that are truncated at different lengths.
    """

    def __init__(self) -> None:
        self._mean_by_ids: dict[bytes, Tensor] = {}

    def record(self, model: Model) -> None:
        """Store the mean state of each text that a model encodes from now on.

        Args:
            model: a ``MultiVectorEncoder``, plain or accelerated, that begins with a Transformer.
        """

        def store(transformer: Any, inputs: Any, features: Features) -> None:
            for ids, states in zip(
                _split_by_text(features, "input_ids"),
                _split_by_text(features, "token_embeddings"),
                strict=True,
            ):
                self._mean_by_ids[_key(ids)] = states.float().mean(dim=0).cpu()

        model[0].register_forward_hook(store)

    def reuse(self, model: Model) -> None:
        """Let a dense model take stored means from now on, instead of running its network.

        A batch runs through the network if one of its texts has no stored mean.

        Args:
            model: a ``SentenceTransformer`` of a Transformer with the recorded model's weights, the
                mean over tokens, and any modules after it. Its ``forward`` is replaced.
        """
        run_network = model.forward
        modules_after_mean = list(model)[2:]

        def forward(features: Features, **kwargs: object) -> Features:
            """Replace ``model.forward``: use stored means if all texts have one."""
            means = [
                self._mean_by_ids.get(_key(ids)) for ids in _split_by_text(features, "input_ids")
            ]
            stored_means = [mean for mean in means if mean is not None]
            if len(stored_means) < len(means):
                outputs: Features = run_network(features, **kwargs)
                return outputs
            device = features["input_ids"].device
            features["sentence_embedding"] = torch.stack(stored_means).to(device)
            for module in modules_after_mean:
                features = module(features)
            return features

        model.forward = forward


def _key(ids: Tensor) -> bytes:
    """Return the token ids of a text in a form that a dictionary can look up."""
    return ids.to("cpu", torch.int64).numpy().tobytes()


def _split_by_text(features: Features, name: str) -> list[Tensor]:
    """Divide a feature of all tokens of a batch by text, without padding.

    Args:
        features: the packed or padded features of a batch.
        name: the feature: ``[1, T]`` or ``[1, T, D]`` of T packed tokens, or ``[B, S]`` or
            ``[B, S, D]`` of padded texts.

    Returns:
        A tensor ``[tokens]`` or ``[tokens, D]`` for each text.
    """
    values: Tensor = features[name]
    if OFFSETS in features:
        n_tokens = features[OFFSETS].diff().tolist()
        return list(torch.split(values[0], n_tokens))
    masks = features["attention_mask"].bool()
    return [row[mask] for row, mask in zip(values, masks, strict=True)]
