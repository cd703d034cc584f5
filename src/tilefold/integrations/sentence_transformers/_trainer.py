"""``accelerate`` for trainers of sentence-transformers.

A training is made of parts that can be fast: scores, tokens, batches, CUDA graphs and compiled
layers. Each part is switched on if its conditions hold. Otherwise it has a reason, which the handle
and a line of the log state.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from sentence_transformers.base.losses.gradcache import uses_gradient_cache
from sentence_transformers.base.trainer import BaseTrainer
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from tilefold._internal.typing import Model
from tilefold.distributed.ranks import has_other_ranks
from tilefold.integrations._patches import replacements
from tilefold.integrations.sentence_transformers import multi_vector
from tilefold.integrations.sentence_transformers._accelerate import (
    accelerate as accelerate_model,
)
from tilefold.integrations.sentence_transformers._accelerate import (
    is_accelerated,
    padded_reasons,
)
from tilefold.integrations.sentence_transformers._accelerate import (
    restore as restore_model,
)
from tilefold.integrations.sentence_transformers._ahead import prepare_training
from tilefold.integrations.sentence_transformers._heads import (
    is_dense,
    is_multi_vector,
    pipelines_of,
)
from tilefold.integrations.sentence_transformers.graphs.captured_state import ModelStructure
from tilefold.integrations.sentence_transformers.graphs.training import StepGraphs
from tilefold.integrations.sentence_transformers.packing.accelerate import (
    PackedForward,
    use_column_graphs,
)
from tilefold.integrations.sentence_transformers.packing.collator import (
    AheadCollator,
    collate_in_thread,
    has_one_packed_encoder,
)
from tilefold.ops.implementations import SWITCH, switched_off

# The names of the parts, in the order in which they are reported.
FUSED_SCORES = "fused scores"
PACKED_TOKENS = "packed tokens"
AHEAD_BATCHES = "batches made ahead"
CUDA_GRAPHS = "CUDA graphs"
COMPILED_LAYERS = "compiled layers"
PARTS = (FUSED_SCORES, PACKED_TOKENS, AHEAD_BATCHES, CUDA_GRAPHS, COMPILED_LAYERS)
# The fewest steps of a training whose layers are compiled. Compiling takes ten to twenty seconds
# once, and less if torch finds the results in its cache. That is outweighed after one to three
# thousand steps. The limit is lower so that short runs measure the steps that a long run has.
MIN_STEPS_TO_COMPILE = 100

# The reason of every part after :meth:`TrainerAcceleration.restore`.
RESTORED = "the trainer was restored"

_logger = logging.getLogger(__name__)


class TrainerAcceleration:
    """Handle of an accelerated trainer.

    ``print(handle)`` says which parts are active, and why others are not. As a context manager, it
    returns the trainer and restores it on exit.

    Attributes:
        trainer: the trainer, changed in place.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        graphs: bool | None = None,
        compiled: bool | None = None,
    ) -> None:
        """Store the options of the caller; nothing is changed yet.

        Args:
            trainer: the trainer.
            graphs: whether to use CUDA graphs; None uses them if they are possible.
            compiled: whether to compile layers; None compiles them if that is possible and the
                training is long enough.
        """
        self.trainer = trainer
        # True and False are the choice of the caller. With None, the conditions decide.
        self._graphs_option = graphs
        self._compiled_option = compiled
        self._undo = ExitStack()
        self._is_restored = False
        # Why parts are inactive, by the name of the part, where this is known before the training.
        # The reasons of CUDA graphs and compiled layers are computed when they are asked for.
        self._fixed_reasons: dict[str, str] = {}
        # The steps of the training; None before it begins.
        self._n_steps: int | None = None

    @property
    def inactive(self) -> dict[str, str]:
        """The parts that are not active, each with the reason."""
        reasons = {part: self._reason(part) for part in PARTS}
        return {part: reason for part, reason in reasons.items() if reason is not None}

    @property
    def active(self) -> tuple[str, ...]:
        """The parts that are active."""
        return tuple(part for part in PARTS if part not in self.inactive)

    def restore(self) -> None:
        """Undo the acceleration of the trainer, its loss and its model."""
        self._is_restored = True
        self._undo.close()

    def __enter__(self) -> BaseTrainer:
        return self.trainer

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        """Return one line with all active parts, and the reasons for those that are not."""
        if self._is_restored:
            return f"tilefold: nothing active, because {RESTORED}"
        line = f"tilefold: {', '.join(self.active) or 'nothing'} active"
        if self.inactive:
            reasons = [f"{part} ({reason})" for part, reason in self.inactive.items()]
            line += f"; not active: {', '.join(reasons)}"
        return line

    def __repr__(self) -> str:
        return f"TrainerAcceleration({type(self.trainer).__name__}, active={self.active})"

    def _reason(self, part: str) -> str | None:
        """Return why a part is not active, or None if it is.

        Args:
            part: one of :data:`PARTS`.
        """
        if self._is_restored:
            return RESTORED
        if part in self._fixed_reasons:
            return self._fixed_reasons[part]
        if part == CUDA_GRAPHS:
            return self._reason_against_graphs()
        if part == COMPILED_LAYERS:
            return self._reason_against_compiling()
        return None

    def _reason_against_graphs(self) -> str | None:
        """Return why training steps do not run as CUDA graphs, or None if they do.

        The reason is that of the first obstacle in the order below.
        """
        trainer = self.trainer
        model = trainer.model
        graphs = list(_graphs_of(model))
        obstacles = (
            (self._graphs_option is False, "graphs=False was chosen"),
            (model.device.type != "cuda", f"the model is on a {model.device.type.upper()}"),
            (PACKED_TOKENS in self._fixed_reasons, "the encoder needs packed tokens"),
            (
                trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
                "parameters are sharded",
            ),
            (
                trainer.args.gradient_checkpointing or _has_gradient_checkpointing(model),
                "gradient checkpointing runs layers again",
            ),
            (_has_hooks(model), "hooks on layers run in each step"),
            (any(map(uses_gradient_cache, _losses_of(trainer))), "the loss caches gradients"),
            (trainer.args.torch_compile, "torch_compile=True compiles the whole model"),
            (
                has_other_ranks() and not self._joins_columns(),
                "several ranks need one encoder and batches that are made ahead",
            ),
            (any(graph.failed for graph in graphs), "a capture failed"),
            (any(graph.lacks_memory for graph in graphs), "too little memory is free"),
        )
        return _first_reason(obstacles)

    def _reason_against_compiling(self) -> str | None:
        """Return why ``torch.compile`` does not compile layers, or None if it does.

        The reason is that of the first obstacle in the order below. ``compiled=None`` leaves the
        choice to the number of training steps, which is not known before the training begins.
        """
        args = self.trainer.args
        is_half_precision = args.bf16 or args.fp16 or self.trainer.model.dtype.itemsize == 2
        is_automatic = self._compiled_option is None
        n_steps = self._n_steps or 0
        # Graphs turn this off for themselves if a capture with compiled layers fails.
        is_compiled = [graphs.compiled for graphs in _graphs_of(self.trainer.model)]
        obstacles = (
            (self._compiled_option is False, "compiled=False was chosen"),
            (self._reason_against_graphs() is not None, "only CUDA graphs use them"),
            (not is_half_precision, "torch compiles them for bf16=True or fp16=True only"),
            (is_automatic and self._n_steps is None, "decided when the training begins"),
            (
                is_automatic and n_steps < MIN_STEPS_TO_COMPILE,
                f"it needs at least {MIN_STEPS_TO_COMPILE} steps, got {n_steps}",
            ),
            (self._n_steps is not None and not all(is_compiled), "a layer did not compile"),
        )
        return _first_reason(obstacles)

    def prepare(self, model_options: dict[str, Any]) -> None:
        """Switch on all parts whose conditions hold.

        Args:
            model_options: arguments of :func:`accelerate` for the model.
        """
        if switched_off():
            self._fixed_reasons = dict.fromkeys(PARTS, f"{SWITCH} is set")
            return
        with ExitStack() as undo:
            self._undo = undo
            self._prepare_model(model_options)
            self._prepare_loss()
            self._prepare_batches()
            self._prepare_graphs()
            callback = AccelerationCallback(self)
            self.trainer.add_callback(callback)
            undo.callback(self.trainer.remove_callback, callback)
            self._undo = undo.pop_all()  # an error above undoes everything

    def _prepare_model(self, model_options: dict[str, Any]) -> None:
        """Accelerate the model, and store why its encoders run on padded batches, if they do.

        A model that the caller has accelerated is accelerated again only with options of the model.

        Args:
            model_options: arguments of :func:`accelerate` for the model; empty for the defaults.
        """
        model = self.trainer.model
        if model_options or not is_accelerated(model):
            may_use_graphs = self._graphs_option is not False  # None stands for "if possible"
            accelerate_model(model, graphs=may_use_graphs, **model_options)
            self._undo.callback(restore_model, model)
        padded_names = [type(encoder.model).__name__ for encoder in _padded_encoders(model)]
        if not padded_names:
            return
        message = f"{', '.join(padded_names)} runs on padded batches"
        # Empty for a deep copy of an accelerated model, for which no reasons were recorded.
        reasons = padded_reasons(model)
        if reasons:
            message += f": {'; '.join(reasons.values())}"
        self._fixed_reasons[PACKED_TOKENS] = message

    def _prepare_loss(self) -> None:
        """Let losses of a MultiVectorEncoder compute MaxSim without storing token similarities.

        The similarity function of each loss is replaced by ours. A function of the user has no
        counterpart: it stays, and the trainer reports it as the reason.
        """
        if is_dense(self.trainer.model):
            self._fixed_reasons[FUSED_SCORES] = "one vector per text has no large matrix of scores"
        if not is_multi_vector(self.trainer.model):
            return
        for loss in _losses_of(self.trainer):
            for module in loss.modules():
                function = getattr(module, "similarity_fct", None)
                if function is None or _is_fused(function):
                    continue
                fused_function = _fused_similarity(function)
                if fused_function is None:
                    name = getattr(function, "__name__", type(function).__name__)
                    self._fixed_reasons[FUSED_SCORES] = f"the loss scores with {name}"
                else:
                    self._set(module, "similarity_fct", fused_function)

    def _prepare_batches(self) -> None:
        """Let a background thread make the next batches, if this process makes batches itself.

        Otherwise the reason is stored: worker processes of the data loader make the batches, or
        rank 0 makes those of all ranks.
        """
        trainer = self.trainer
        args = trainer.args
        # This filter of the Trainer makes the CPU wait for the loss of each step. Without it, a
        # loss of NaN is logged as NaN.
        self._set(args, "logging_nan_inf_filter", False)
        if args.dataloader_num_workers > 0:
            n_workers = args.dataloader_num_workers
            self._fixed_reasons[AHEAD_BATCHES] = f"{n_workers} workers of the data loader make them"
            return
        if args.torch_compile:
            self._fixed_reasons[AHEAD_BATCHES] = "torch_compile=True compiles the whole model"
            return
        loader_settings = trainer.accelerator.dataloader_config
        datasets = (trainer.train_dataset, trainer.eval_dataset)
        is_streamed = any(isinstance(dataset, IterableDataset) for dataset in datasets)
        is_dispatched = loader_settings.dispatch_batches
        if is_dispatched is None:
            is_dispatched = is_streamed  # the default of Hugging Face's accelerate
        if is_dispatched and has_other_ranks():
            self._fixed_reasons[AHEAD_BATCHES] = (
                "one rank makes the batches of all (dispatch_batches)"
            )
            return
        if is_dispatched:
            # One process needs no dispatch, which would concatenate tensors.
            self._set(loader_settings, "dispatch_batches", False)
        self._undo.callback(setattr, trainer, "data_collator", trainer.data_collator)
        collate_in_thread(trainer, join=True)
        self._undo.callback(_stop_collator, trainer.data_collator)

    def _prepare_graphs(self) -> None:
        """Let the encoder run as CUDA graphs in training, on a GPU.

        One graph runs all columns of a batch, such as queries and documents, if their tokens can be
        concatenated. Otherwise each column has graphs of its own.

        Raises:
            ValueError: if the caller asked for graphs that are not possible.
        """
        reason = self._reason_against_graphs()
        if self._graphs_option and reason is not None:
            raise ValueError(
                f"graphs must be None or False for this training, got True, but {reason}; leave "
                "it out to use graphs if they are possible.",
            )
        if reason is not None:
            return
        model = self.trainer.model
        if self._joins_columns():
            graphs = StepGraphs(model[0], divides_backward=has_other_ranks())
            self._set(model[0].forward, "graphs", graphs)
        else:
            for forward in _packed_forwards(model):
                self._undo.callback(setattr, forward, "column_graphs", forward.column_graphs)
            use_column_graphs(model)

    def _set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute until the trainer is restored.

        Args:
            owner: the object with the attribute.
            name: the name of the attribute.
            value: its new value.
        """
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _joins_columns(self) -> bool:
        """Whether the columns of a batch are concatenated and go through the encoder together."""
        return AHEAD_BATCHES not in self._fixed_reasons and has_one_packed_encoder(
            self.trainer.model
        )

    def begin_training(self, n_steps: int) -> None:
        """Decide whether layers are compiled, and log which parts of the acceleration are active.

        Args:
            n_steps: the number of steps of the training.
        """
        self._n_steps = n_steps
        is_compiled = self._compiles_layers()
        for replacement in _packed_forwards(self.trainer.model):
            for graphs in (replacement.graphs, replacement.column_graphs):
                if graphs is not None:
                    graphs.compiled = is_compiled
        prepare_training(self.trainer, is_compiled)
        _logger.info("%s", self)

    def _compiles_layers(self) -> bool:
        """Whether the conditions for compiled layers hold in the training that begins."""
        # An earlier training may have turned this off, which would count as a failed compilation.
        for graphs in _graphs_of(self.trainer.model):
            graphs.compiled = True
        return self._reason_against_compiling() is None


class AccelerationCallback(TrainerCallback):
    """Callback of a trainer that passes on the number of steps when a training begins.

    Args:
        acceleration: the acceleration.
    """

    def __init__(self, acceleration: TrainerAcceleration) -> None:
        self.acceleration = acceleration

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the number of steps, which is known now.

        Args:
            args: the arguments of the trainer.
            state: the state of the trainer.
            control: the flow of the training.
            **kwargs: what the trainer passes to all callbacks.
        """
        self.acceleration.begin_training(state.max_steps)


def accelerate_trainer(
    trainer: BaseTrainer,
    *,
    graphs: bool | None = None,
    compiled: bool | None = None,
    **model_options: Any,
) -> TrainerAcceleration:
    """Switch on every acceleration whose conditions hold for a trainer.

    Args:
        trainer: the trainer, changed in place.
        graphs: whether to use CUDA graphs; None uses them if they are possible.
        compiled: whether to compile layers; None compiles them if that is possible and the
            training has at least :data:`MIN_STEPS_TO_COMPILE` steps.
        **model_options: arguments of :func:`accelerate` for the model. Without any, a model that is
            accelerated already does not change.

    Returns:
        The handle; as a context manager, it restores the trainer on exit.

    Raises:
        TypeError: if the trainer has no data collator, or its model cannot be accelerated.
        ValueError: if the trainer makes its model itself (``model_init``), if ``graphs`` is True
            and not possible, if ``compiled`` is True without graphs, or if the model cannot be
            accelerated.
    """
    if getattr(trainer, "model_init", None) is not None:
        raise ValueError(
            "trainer must have a model, got one with model_init, which makes a new model for each "
            "training; call accelerate(model) in model_init.",
        )
    if compiled and graphs is False:
        raise ValueError("compiled must be None or False without graphs, got True.")
    restore_trainer(trainer)
    acceleration = TrainerAcceleration(trainer, graphs, compiled)
    acceleration.prepare(model_options)
    return acceleration


def restore_trainer(trainer: BaseTrainer) -> None:
    """Undo :func:`accelerate_trainer`; a trainer that is not accelerated does not change.

    Args:
        trainer: the trainer.
    """
    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, AccelerationCallback):
            callback.acceleration.restore()


def _first_reason(obstacles: Iterable[tuple[bool, str]]) -> str | None:
    """Return the reason of the first obstacle that exists, or None.

    Args:
        obstacles: whether each obstacle exists, and the reason that it gives.
    """
    return next((reason for exists, reason in obstacles if exists), None)


def _packed_forwards(model: Model) -> Iterator[PackedForward]:
    """Yield the forwards of a model's Transformers that run on packed tokens."""
    for _, _, replacement in replacements(model):
        if isinstance(replacement, PackedForward):
            yield replacement


def _graphs_of(model: Model) -> Iterator[StepGraphs]:
    """Yield all graphs of a model's Transformers, for joined and for single columns."""
    for forward in _packed_forwards(model):
        if forward.graphs is not None:
            yield forward.graphs
        if forward.column_graphs is not None:
            yield from forward.column_graphs.graphs


def _padded_encoders(model: Model) -> list[Any]:
    """Return the Transformers of a model that run on padded batches."""
    encoders = {id(route[0]): route[0] for route in pipelines_of(model) if route}
    return [
        encoder
        for encoder in encoders.values()
        if hasattr(encoder, "model") and not isinstance(vars(encoder).get("forward"), PackedForward)
    ]


def _losses_of(trainer: BaseTrainer) -> list[nn.Module]:
    """Return the losses of a trainer, which may have one for each data set."""
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    return list(losses)


def _has_gradient_checkpointing(model: Model) -> bool:
    """Whether a network of a model runs its layers again in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _has_hooks(model: Model) -> bool:
    """Whether modules of a packed network have hooks, which a graph would not run."""
    networks = [forward.owner.model for forward in _packed_forwards(model)]
    return any(ModelStructure(network).has_hooks_or_checkpointing() for network in networks)


def _stop_collator(collator: object) -> None:
    """End the thread of a collator, after the batches that it has begun."""
    if isinstance(collator, AheadCollator):
        collator.close()


def _is_fused(function: Any) -> bool:
    """Whether a similarity of a loss is one of tilefold's."""
    if isinstance(function, functools.partial):
        return _is_fused(function.func)
    module_name = getattr(function, "__module__", type(function).__module__)
    return bool(module_name == multi_vector.__name__)


def _fused_similarity(function: Any) -> Any:
    """Return the counterpart of a similarity of sentence-transformers, or None if there is none.

    Args:
        function: a function of ``sentence_transformers.multi_vector_encoder.scoring``, a partial of
            one, or an ``XTRScores`` or ``XTRKDScores``. Anything else has no counterpart.
    """
    from sentence_transformers.multi_vector_encoder import scoring

    if isinstance(function, functools.partial):
        fused_function = _fused_similarity(function.func)
        if fused_function is None:
            return None
        return functools.partial(fused_function, *function.args, **function.keywords)
    class_name = type(function).__name__
    if type(function) in {scoring.XTRScores, scoring.XTRKDScores}:
        fused_class = getattr(multi_vector, class_name)
        return fused_class(function.top_k, chunk_elements=function.chunk_elements)
    name = getattr(function, "__name__", class_name)
    if getattr(scoring, name, None) is not function:
        return None
    return getattr(multi_vector, name, None)
