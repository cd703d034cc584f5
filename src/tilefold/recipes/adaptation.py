"""The phase before SPLADE training of a causal language model (CSPLADE, arXiv 2504.10816)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tilefold._internal.typing import Model, Network, Tokenizer
from tilefold.recipes._settings import (
    BOOLEAN,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    Settings,
    checked,
    integer,
)
from tilefold.recipes._training import Losses, Progress
from tilefold.recipes.adapters import train_adapters_of_network
from tilefold.recipes.loading import supports_bf16

_DYING = 0.5


@dataclass(frozen=True)
class AdaptationRecipe(Settings):
    """Configuration of the adaptation phase; the defaults are those of the paper."""

    steps: int = checked(10_000, integer())  # of the optimiser
    batch_size: int = checked(32, integer())  # blocks per step
    length: int = checked(2048, integer(2))  # tokens per block of packed text
    learning_rate: float = checked(1e-5, POSITIVE)  # peak of the cosine schedule
    warmup_steps: int = checked(1000, integer(0))  # over which the learning rate rises
    activated_weight: float = checked(1.0, NOT_NEGATIVE)  # of the loss on ``log1p(relu(logits))``
    chunk: int = checked(1024, integer())  # positions whose logits exist at a time
    bf16: bool | None = checked(None, BOOLEAN)  # autocast; None uses it where the hardware has it
    seed: int = checked(0, SEED)  # of the order of blocks


@dataclass(frozen=True)
class AdaptationResult:
    """The report of :func:`adapt`, with losses of the first and the last step."""

    steps: int  # of the optimiser
    first_plain: float  # next-token loss
    plain: float
    first_activated: float  # of ``log1p(relu(logits))``
    activated: float
    first_alive: float  # share of positions with a logit above 0
    alive: float

    @property
    def dying(self) -> bool:
        """Whether more than half of the positions have no logit above 0: SPLADE would not learn
        from them.
        """
        return self.alive < _DYING


def pack_texts(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> list[list[int]]:
    """Token ids of all texts in a row, an end token after each, cut into blocks of `length`; the
    rest is dropped.
    """
    stream: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        stream += ids if ids[-1:] == end else ids + end
    blocks = [
        stream[start : start + length] for start in range(0, len(stream) - length + 1, length)
    ]
    if not blocks:
        got = f"{len(stream)} tokens; give more text, or a smaller length."
        raise ValueError(f"texts must fill at least one block of {length} tokens, got {got}")
    return blocks


def adapt(
    network: Network,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    recipe: AdaptationRecipe | None = None,
    *,
    progress: Progress | None = None,
) -> AdaptationResult:
    """Train a causal language model in place with ``CE(H) + activated_weight *
    CE(log1p(relu(H)))``.

    Causal LM heads give logits that are mostly negative, and relu of them has no gradient: trained
    directly, such models die. Do it before the model is made bidirectional or wrapped for SPLADE;
    then save it, and name the folder as ``base_model``. Attention is causal here, so a
    bidirectional model is refused: it would see the token it predicts.

    Args:
        network: a transformers ``...ForCausalLM``, adapters included, of this `tokenizer`. Its
            active adapters are made trainable, which transformers freezes when it loads them.
        texts: of the collection, or of any corpus; they are packed into blocks.
        progress: called as ``progress(step, steps, losses)`` after every step.

    Raises:
        ValueError: a bidirectional model, one whose logits are not ``head(hidden)``, or too little
            text.
        RuntimeError: the loss is not a number, at the step that is named, or this is one of a
            launcher's processes.
    """
    from transformers import TrainingArguments, default_data_collator

    from tilefold.integrations.transformers import one_gpu

    recipe = recipe or AdaptationRecipe()
    if getattr(network.config, "is_causal", True) is False:
        remedy = "adapt the model first and make it bidirectional afterwards."
        raise ValueError(
            "network must be causal for next-token prediction, got config.is_causal=False; "
            f"{remedy}",
        )
    _check_head(network)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        remedy = "start this without torchrun or accelerate launch."
        raise RuntimeError(
            f"adapt trains in one process, got WORLD_SIZE={os.environ['WORLD_SIZE']}; {remedy}",
        )
    blocks = pack_texts(tokenizer, texts, recipe.length)
    train_adapters_of_network(network)
    seen: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="tilefold-adaptation-") as folder:
        arguments = one_gpu(TrainingArguments)(
            output_dir=folder,
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=recipe.warmup_steps,
            bf16=supports_bf16() if recipe.bf16 is None else recipe.bf16,
            seed=recipe.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=next(network.parameters()).device.type == "cpu",
        )
        rows = [{"input_ids": block} for block in blocks]
        trainer = _trainer_class(recipe, seen, progress)(
            model=network,
            args=arguments,
            train_dataset=rows,
            data_collator=default_data_collator,
        )
        trainer.train()
    steps = trainer.state.global_step
    if steps < recipe.steps:
        raise RuntimeError(
            f"the adaptation ended after {steps:,} of {recipe.steps:,} steps; give more text, or "
            "fewer steps.",
        )
    told = (
        getattr(step, name)
        for name in ("plain", "activated", "alive")
        for step in (seen[0], seen[-1])
    )
    return AdaptationResult(steps, *map(float, told))


def _trainer_class(recipe: AdaptationRecipe, seen: list[Any], progress: Progress | None) -> Any:
    """A trainer that keeps the first and the latest loss in `seen`."""
    from transformers import Trainer

    from tilefold.losses import activated_lm_loss

    class AdaptationTrainer(Trainer):
        def compute_loss(
            self,
            model: Model,
            inputs: Any,
            return_outputs: bool = False,
            **_: Any,
        ) -> Any:
            ids = inputs["input_ids"]
            network = self.accelerator.unwrap_model(model)
            head = network.get_output_embeddings()
            with self.accelerator.autocast():
                hidden = (
                    network.base_model(input_ids=ids, use_cache=False)
                    .last_hidden_state[:, :-1]
                    .flatten(0, 1)
                )
                options: dict[str, Any] = {
                    "activated_weight": recipe.activated_weight,
                    "chunk": recipe.chunk,
                }
                loss = activated_lm_loss(
                    hidden,
                    head.weight,
                    ids[:, 1:].flatten(),
                    head.bias,
                    **options,
                )
            step, steps = self.state.global_step + 1, recipe.steps
            if not bool(loss.total.isfinite()):
                got = f"{float(loss.total)} at step {step} of {steps}; lower learning_rate, or set bf16=False."
                raise RuntimeError(f"the loss must be a finite number, got {got}")
            seen[1:] = [loss._replace(total=loss.total.detach())]
            if progress is not None:
                progress(step, steps, Losses(float(seen[-1].total)))
            return (loss.total, {}) if return_outputs else loss.total

    return AdaptationTrainer


def _check_head(network: Network) -> None:
    """Refuse a model that does more with its logits than its head: soft-capping, a scale."""
    import torch

    from tilefold.integrations.transformers.packed import in_eval_mode
    from tilefold.modules.prosper import linear_head

    head = linear_head(network)
    with in_eval_mode(network), torch.no_grad():
        ids = torch.arange(4, device=head.weight.device)[None] % head.out_features
        hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
        found, expected = (
            network(input_ids=ids, use_cache=False).logits.float(),
            head(hidden).float(),
        )
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        got = f"changed ones in {type(network).__name__} (soft-capping or a scale)"
        raise ValueError(
            f"logits must be those of the LM head, got {got}, which the chunked loss does not "
            "reproduce.",
        )
