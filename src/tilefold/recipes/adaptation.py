"""The phase before SPLADE training of a causal language model (CSPLADE, arXiv 2504.10816)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilefold._internal.arguments import check_count, check_instance, check_tokenizer, list_of_texts
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
from tilefold.recipes._steps import FEW_STEPS, PairCounts, format_count, format_range
from tilefold.recipes._training import Losses, Progress
from tilefold.recipes.adapters import unfreeze_network_adapters
from tilefold.recipes.loading import supports_bf16

if TYPE_CHECKING:
    from tilefold.losses.functional import ActivatedLmLoss

DYING_SHARE = 0.5  # SPLADE hardly learns if fewer positions have a logit above 0
HEAD_TOLERANCE = 1e-2  # relative and absolute (of the largest logit), for logits in bf16


@dataclass(frozen=True)
class AdaptationRecipe(Settings):
    """Configuration of the adaptation phase, with the settings of the paper as defaults.

    Attributes:
        steps: optimiser steps.
        batch_size: blocks per step.
        length: tokens per block of packed text.
        learning_rate: peak of the cosine schedule.
        warmup_steps: steps over which the learning rate rises.
        activated_weight: weight of the loss on ``log1p(relu(logits))``.
        chunk: positions whose logits are in memory at a time.
        bf16: whether to train with bf16 autocast; ``None`` uses it if the hardware supports it.
        seed: seed of the order of blocks.
    """

    steps: int = checked(10_000, integer())
    batch_size: int = checked(32, integer())
    length: int = checked(2048, integer(2))
    learning_rate: float = checked(1e-5, POSITIVE)
    warmup_steps: int = checked(1000, integer(0))
    activated_weight: float = checked(1.0, NOT_NEGATIVE)
    chunk: int = checked(1024, integer())
    bf16: bool | None = checked(None, BOOLEAN)
    seed: int = checked(0, SEED)


@dataclass(frozen=True)
class AdaptationResult:
    """Result of :func:`adapt`.

    Attributes:
        steps: optimiser steps, as many as the recipe has.
        first_plain_loss: next-token loss of the first step.
        plain_loss: next-token loss of the last step.
        first_activated_loss: loss on ``log1p(relu(logits))`` of the first step.
        activated_loss: loss on ``log1p(relu(logits))`` of the last step.
        first_alive_share: share of positions with a logit above 0 in the first step.
        alive_share: share of positions with a logit above 0 in the last step.
        text_blocks: number of blocks that the texts fill.
        most_blocks: number of blocks of the largest step; a full step has ``batch_size`` blocks.
        fewest_blocks: number of blocks of the smallest step. The last step of an epoch may be
            short.
        trained_blocks: number of blocks of all steps, including repetitions.
        planned_blocks: number of blocks of all steps if each is full.
        warnings: problems of the training, with remedies.
    """

    steps: int
    first_plain_loss: float
    plain_loss: float
    first_activated_loss: float
    activated_loss: float
    first_alive_share: float
    alive_share: float
    text_blocks: int
    most_blocks: int
    fewest_blocks: int
    trained_blocks: int
    planned_blocks: int
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the steps, losses and warnings of the training, one per line."""
        blocks = format_range(self.fewest_blocks, self.most_blocks)
        lines = [
            f"{format_count(self.steps, 'step')} of {blocks} blocks, {self.trained_blocks:,} in "
            f"all ({self.planned_blocks:,} in full steps; the texts fill {self.text_blocks:,})",
            f"next-token loss {self.first_plain_loss:.3f} to {self.plain_loss:.3f}, of activated "
            f"logits {self.first_activated_loss:.3f} to {self.activated_loss:.3f}",
            f"positions with a logit above 0: {self.first_alive_share:.1%} to "
            f"{self.alive_share:.1%}",
            *(f"warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)

    @property
    def dying(self) -> bool:
        """Whether more than half of the positions have no logit above 0.

        SPLADE would not learn from these positions.
        """
        return self.alive_share < DYING_SHARE


def pack_texts(tokenizer: Tokenizer, texts: Iterable[str], length: int) -> list[list[int]]:
    """Pack the token ids of texts into blocks of one length, with an end token after each text.

    Args:
        tokenizer: a transformers tokenizer.
        texts: the texts, in the order of the blocks.
        length: number of tokens of a block. Tokens after the last full block are dropped.

    Returns:
        The token ids of each block, `length` of them.

    Raises:
        TypeError: if the tokenizer has another type, or a text is not a string.
        ValueError: if the texts do not fill one block.
    """
    check_tokenizer("tokenizer", tokenizer)
    check_count("length", length, least=2)
    packed: list[int] = []
    end_id = tokenizer.eos_token_id
    for text in list_of_texts("texts", texts):
        token_ids = tokenizer(text, truncation=False, verbose=False)["input_ids"]
        packed += token_ids
        ends_with_end_token = token_ids[-1:] == [end_id]  # some tokenizers add it
        if end_id is not None and not ends_with_end_token:
            packed.append(end_id)
    starts = range(0, len(packed) - length + 1, length)
    blocks = [packed[start : start + length] for start in starts]
    if not blocks:
        raise ValueError(
            f"texts must fill at least one block of {length} tokens, got {len(packed)} tokens; "
            "give more text, or a smaller length.",
        )
    return blocks


def adapt(
    network: Network,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    recipe: AdaptationRecipe | None = None,
    *,
    progress: Progress | None = None,
) -> AdaptationResult:
    """Train a causal language model to predict next tokens from activated logits, in place.

    The loss is ``CE(H) + activated_weight * CE(log1p(relu(H)))`` of the logits H, where CE is the
    cross-entropy. The logits of causal LM heads are mostly negative, and relu of them has no
    gradient, so that SPLADE cannot train such models directly. Adapt a model before it is made
    bidirectional or wrapped for SPLADE, save it, and use the folder as ``base_model``.

    Args:
        network: a transformers ``...ForCausalLM``, which may have adapters. Active adapters are
            trained. A bidirectional model is refused, because it attends to the token that it
            predicts.
        tokenizer: the tokenizer of the network.
        texts: texts of the collection, or of any corpus; they are packed into blocks.
        recipe: settings; ``None`` for the settings of the paper.
        progress: called as ``progress(step, steps, losses)`` after every step.

    Returns:
        The steps, blocks, losses and warnings of the training; ``print`` shows them in words.

    Raises:
        TypeError: if `network` or `recipe` has another type, such as a name.
        ValueError: if the model is bidirectional, its logits are not the outputs of its LM head,
            or the texts are too short.
        RuntimeError: if the loss is not finite, or if a launcher started several processes.
    """
    from transformers import default_data_collator
    from transformers.trainer_callback import PrinterCallback

    if recipe is None:
        recipe = AdaptationRecipe()
    _check_arguments(network, tokenizer, recipe)
    _check_head(network)
    n_processes = int(os.environ.get("WORLD_SIZE") or 1)
    if n_processes > 1:
        raise RuntimeError(
            f"adapt trains in one process, got WORLD_SIZE={n_processes}; start this without "
            "torchrun or accelerate launch.",
        )
    blocks = pack_texts(tokenizer, texts, recipe.length)
    unfreeze_network_adapters(network)
    log = _StepLog()
    with tempfile.TemporaryDirectory(prefix="tilefold-adaptation-") as folder:
        rows = [{"input_ids": block} for block in blocks]
        trainer = _trainer_class(recipe, log, progress)(
            model=network,
            args=_training_arguments(recipe, network, folder),
            train_dataset=rows,
            data_collator=default_data_collator,
        )
        trainer.remove_callback(PrinterCallback)  # it prints a dictionary of timings
        trainer.train()
    steps = trainer.state.global_step
    if steps < recipe.steps:
        raise RuntimeError(
            f"the adaptation ended after {steps:,} of {recipe.steps:,} steps; give more text, or "
            "fewer steps.",
        )
    return _create_result(recipe, log, len(blocks))


def _check_arguments(network: Network, tokenizer: Tokenizer, recipe: AdaptationRecipe) -> None:
    """Raise an error if :func:`adapt` does not accept one of its arguments.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if the network is bidirectional.
    """
    from transformers import PreTrainedModel

    check_instance(
        "network",
        network,
        PreTrainedModel,
        "AutoModelForCausalLM.from_pretrained(name)",
    )
    if not callable(tokenizer):
        raise TypeError(
            f"tokenizer: expected a tokenizer of transformers, got {type(tokenizer).__name__}; "
            "pass AutoTokenizer.from_pretrained(name).",
        )
    check_instance("recipe", recipe, AdaptationRecipe, "AdaptationRecipe(steps=1000)")
    if getattr(network.config, "is_causal", True) is False:
        raise ValueError(
            "network must be causal for next-token prediction, got config.is_causal=False; adapt "
            "the model first and make it bidirectional afterwards.",
        )


def _training_arguments(recipe: AdaptationRecipe, network: Network, folder: str) -> Any:
    """Return the ``TrainingArguments`` of an adaptation, which saves and logs nothing.

    Args:
        recipe: the settings.
        network: the network, whose device decides where the training runs.
        folder: a temporary folder, which the trainer requires.
    """
    from transformers import TrainingArguments

    from tilefold.integrations.transformers import one_gpu

    return one_gpu(TrainingArguments)(
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


@dataclass
class _StepLog:
    """Log of the steps of an adaptation.

    Attributes:
        first: losses of the first step.
        last: losses of the latest step.
        counts: number of steps, and numbers of blocks in them.
    """

    first: ActivatedLmLoss | None = None
    last: ActivatedLmLoss | None = None
    counts: PairCounts = field(default_factory=PairCounts)

    def add(self, loss: ActivatedLmLoss, n_blocks: int) -> None:
        """Add the losses of a step, and the number of its blocks."""
        if self.first is None:
            self.first = loss
        self.last = loss
        self.counts = self.counts.add_step(n_blocks)


def _create_result(recipe: AdaptationRecipe, log: _StepLog, text_blocks: int) -> AdaptationResult:
    """Return the result of a finished adaptation, with the losses of its first and last step.

    Args:
        recipe: settings of the adaptation.
        log: losses of the first and the last step, and numbers of blocks.
        text_blocks: number of blocks that the texts fill.

    Raises:
        RuntimeError: if no step ran.
    """
    if log.first is None or log.last is None:
        raise RuntimeError("no adaptation step ran, and the network is unchanged.")
    return AdaptationResult(
        steps=log.counts.steps,
        first_plain_loss=float(log.first.plain),
        plain_loss=float(log.last.plain),
        first_activated_loss=float(log.first.activated),
        activated_loss=float(log.last.activated),
        first_alive_share=float(log.first.alive),
        alive_share=float(log.last.alive),
        text_blocks=text_blocks,
        most_blocks=log.counts.most,
        fewest_blocks=log.counts.fewest,
        trained_blocks=log.counts.total,
        planned_blocks=recipe.steps * recipe.batch_size,
        warnings=_create_warnings(recipe, log.counts, text_blocks),
    )


def _create_warnings(
    recipe: AdaptationRecipe,
    counts: PairCounts,
    text_blocks: int,
) -> tuple[str, ...]:
    """Return warnings if an adaptation had few steps or no full step.

    Args:
        recipe: settings of the adaptation.
        counts: number of steps, and numbers of blocks in them.
        text_blocks: number of blocks that the texts fill.
    """
    warnings = []
    if counts.steps < FEW_STEPS:
        warnings.append(
            f"the adaptation had {format_count(counts.steps, 'step')}, which hardly change a "
            "model: train for more steps.",
        )
    if text_blocks < recipe.batch_size:
        warnings.append(
            f"the texts fill {format_count(text_blocks, 'block')}, fewer than batch_size "
            f"({recipe.batch_size:,}), so no step was full: give more text, or a smaller length "
            "or batch_size.",
        )
    return tuple(warnings)


def _trainer_class(recipe: AdaptationRecipe, log: _StepLog, progress: Progress | None) -> Any:
    """Return a trainer class whose loss is the next-token loss of plain and activated logits.

    Args:
        recipe: settings of the adaptation, with the weight of the activated loss.
        log: log to which the losses of every step are added.
        progress: function that is called after every step; ``None`` for no function.
    """
    from transformers import Trainer

    from tilefold.losses import activated_lm_loss

    class AdaptationTrainer(Trainer):
        """Trainer whose loss is the next-token loss of plain and activated logits."""

        def compute_loss(
            self,
            model: Model,
            inputs: Any,
            return_outputs: bool = False,
            **_: Any,
        ) -> Any:
            """Compute the next-token loss of a batch of blocks, and log it.

            Args:
                model: the causal language model, which accelerate may have wrapped.
                inputs: dictionary whose ``"input_ids"`` are the blocks ``[B, length]``.
                return_outputs: whether to return a dictionary of outputs as well, which is empty.

            Returns:
                The loss; with `return_outputs`, the loss and the dictionary.

            Raises:
                RuntimeError: if the loss is not finite.
            """
            token_ids = inputs["input_ids"]
            network = self.accelerator.unwrap_model(model)
            head = network.get_output_embeddings()
            with self.accelerator.autocast():
                output = network.base_model(input_ids=token_ids, use_cache=False)
                hidden = output.last_hidden_state[:, :-1]  # the last token has no next one
                next_ids = token_ids[:, 1:]
                loss = activated_lm_loss(
                    hidden.flatten(0, 1),
                    head.weight,
                    next_ids.flatten(),
                    head.bias,
                    activated_weight=recipe.activated_weight,
                    chunk=recipe.chunk,
                )
            step = self.state.global_step + 1
            if not bool(loss.total.isfinite()):
                raise RuntimeError(
                    f"the loss must be a finite number, got {float(loss.total)} at step {step} of "
                    f"{recipe.steps}; lower learning_rate, or set bf16=False.",
                )
            total = loss.total.detach()
            log.add(loss._replace(total=total), n_blocks=token_ids.size(0))
            if progress is not None:
                progress(step, recipe.steps, Losses(float(total)))
            return (loss.total, {}) if return_outputs else loss.total

    return AdaptationTrainer


def _check_head(network: Network) -> None:
    """Raise an error if the logits of a model are not simply the outputs of its LM head.

    The loss of the adaptation computes logits in chunks, from hidden states and the head's weight.
    Some models then cap the logits or multiply them by a number, which the loss does not do. The
    check compares the logits of four tokens.

    Args:
        network: a causal language model.

    Raises:
        ValueError: if the logits differ from the head's outputs for the last hidden states.
    """
    import torch

    from tilefold.integrations.transformers.networks import in_eval_mode
    from tilefold.modules.prosper import linear_head

    head = linear_head(network)
    with in_eval_mode(network), torch.no_grad():
        vocab_size = head.out_features  # of a tiny model, it may be below 4
        token_ids = torch.arange(4, device=head.weight.device)[None] % vocab_size
        hidden = network.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = network(input_ids=token_ids, use_cache=False).logits.float()
        expected = head(hidden).float()
    absolute_tolerance = HEAD_TOLERANCE * float(expected.abs().max())
    if not torch.allclose(logits, expected, rtol=HEAD_TOLERANCE, atol=absolute_tolerance):
        raise ValueError(
            f"logits must be the outputs of the LM head, but {type(network).__name__} changes them "
            "(soft-capping or a scale), which the chunked loss does not reproduce.",
        )
