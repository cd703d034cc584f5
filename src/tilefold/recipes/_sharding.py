"""Training with weights, gradients and optimiser state divided among ranks, by FSDP2 of torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tilefold._internal.typing import Model, Module, Tensor
from tilefold.distributed.vocabulary import SharedVocabulary
from tilefold.distributed.world import World

if TYPE_CHECKING:
    from transformers import Trainer

_STEP = "step"  # entry of an optimiser's state that is a number, and not one per weight


class ShardedModel:
    """A plain model, and a copy of it whose parameters are divided among the ranks.

    The copy is trained. The plain model has the complete weights on the CPU of rank 0, and is what
    checkpoints are saved from and loaded into. So they are the checkpoints of one process, from
    which any number of ranks resumes.

    Args:
        plain: the model of this rank. Ranks must have equal weights.
        world: all ranks.

    Attributes:
        plain: the plain model.
        model: the copy. It has no shards before :meth:`shard`.
    """

    def __init__(self, plain: Model, world: World) -> None:
        """Copy the modules of a model, without its weights.

        Args:
            plain: the model of this rank.
            world: all ranks.
        """
        self.plain = plain
        self._world = world
        # Both models have the same parameters until `shard`. They keep one model card. deepcopy()
        # does not copy the objects of this dictionary.
        shared = {id(parameter): parameter for parameter in plain.parameters()}
        shared[id(plain.model_card_data)] = plain.model_card_data
        self.model: Model = copy.deepcopy(plain, shared)

    def shard(self, *, bf16: bool, split_vocabulary: bool = False) -> None:
        """Divide the parameters of the copy, and move those of the plain model to the CPU.

        Each layer gathers its weights from all ranks while it runs. Embeddings and head stay
        gathered from the forward to the backward pass, unless the vocabulary is split.

        Args:
            bf16: whether layers compute with weights in bf16. Shards, their gradients and sums of
                gradients are fp32.
            split_vocabulary: whether a rank computes only the scores of its part of the vocabulary
                (:class:`tilefold.distributed.vocabulary.SharedVocabulary`).

        Raises:
            ValueError: if the vocabulary cannot be split.
        """
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from tilefold.integrations.sentence_transformers.vocabulary import divide_head

        device_type = next(self.plain.parameters()).device.type
        # All FSDP modules share this mesh.
        mesh = init_device_mesh(device_type, (self._world.size,))
        # The weights of a layer would otherwise be gathered in fp32, and autocast would keep a
        # second copy in bf16 until the backward pass.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
            cast_forward_inputs=False,
        )
        cpu_weights = {  # by the id of the parameter
            id(parameter): parameter.detach().to("cpu", copy=True)
            for parameter in self.plain.parameters()
        }
        vocabulary_parameters: set[Any] = set()  # divided by vocabulary entry, and not by FSDP
        if split_vocabulary:
            vocabulary = SharedVocabulary(mesh, self._world.gather)
            vocabulary_parameters = divide_head(self.model, vocabulary)
        for module in [*_layers_of(self.model), self.model]:
            # Layers that are divided already have new parameters, which are left out here.
            parameters = [
                parameter for parameter in module.parameters() if id(parameter) in cpu_weights
            ]
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                ignored_params=vocabulary_parameters,
            )
            # The module now has shards of its own. Only the plain model still has the former
            # parameters, whose complete weights are moved to the CPU.
            for parameter in parameters:
                parameter.data = cpu_weights[id(parameter)]
        # The parameters of a split vocabulary were not moved in the loop above.
        for parameter in self.plain.parameters():
            parameter.data = cpu_weights[id(parameter)]

    def gather(self) -> None:
        """Copy the trained weights of all shards into the plain model of rank 0.

        The plain model has complete weights. All ranks must call this method.
        """
        import torch

        plain_parameters = dict(self.plain.named_parameters())
        self._reshard()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if not parameter.requires_grad:
                    continue  # a frozen weight, which the plain model has
                weight = _gather_tensor(parameter.detach())
                if self._world.rank == 0:
                    plain_parameters[name].copy_(weight)

    def scatter(self) -> None:
        """Copy the weights of the plain model into the shards of its copy.

        Every rank has loaded the plain model, with complete weights, from a checkpoint.
        """
        import torch

        plain_parameters = dict(self.plain.named_parameters())
        self._reshard()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                shard = _divide_like(plain_parameters[name].detach(), parameter)
                parameter.to_local().copy_(shard.to_local())

    def attach(self, trainer: Trainer) -> None:
        """Prepare a trainer for the sharded copy of the model.

        The trainer evaluates the copy on all ranks, saves and loads checkpoints with complete
        weights, and does not wrap the copy in DDP.

        Args:
            trainer: the trainer, whose methods are replaced.
        """
        self._train_unwrapped(trainer)
        self._evaluate_on_all_ranks(trainer)
        self._save_plain_model(trainer)
        self._load_plain_model(trainer)
        self._save_complete_optimizer(trainer)
        self._load_complete_optimizer(trainer)

    def _reshard(self) -> None:
        """Free gathered weights, so that the parameters of the copy are its shards."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _train_unwrapped(self, trainer: Any) -> None:
        """Keep a trainer from wrapping the model in DDP, because FSDP averages the gradients.

        The trainer then only prepares autocast.
        """
        prepare_model = trainer.accelerator.prepare_model

        def prepare_sharded_model(
            model: Model,
            device_placement: bool | None = None,
            evaluation_mode: bool = False,
        ) -> Model:
            """Prepare a model as for an evaluation, which needs no DDP."""
            return prepare_model(model, device_placement=False, evaluation_mode=True)

        trainer.accelerator.prepare_model = prepare_sharded_model

    def _evaluate_on_all_ranks(self, trainer: Any) -> None:
        """Replace ``evaluation_loop``, so that every rank encodes all texts of the evaluation.

        A layer gathers its weights from all ranks, so that all must run the same batches. The
        trainer of sentence-transformers would give every rank other texts.
        """
        evaluation_loop = trainer.evaluation_loop

        def evaluate_on_all_ranks(*arguments: Any, **options: Any) -> Any:
            """Evaluate as if the trainer had sharded the model itself."""
            trainer.is_fsdp_enabled = True  # every rank then encodes all texts
            try:
                return evaluation_loop(*arguments, **options)
            finally:
                trainer.is_fsdp_enabled = False

        trainer.evaluation_loop = evaluate_on_all_ranks

    @contextmanager
    def _plain_model_in(self, trainer: Any) -> Iterator[None]:
        """Let a trainer save or load the plain model in place of its copy."""
        trainer.model = self.plain
        try:
            yield
        finally:
            trainer.model = self.model

    def _save_plain_model(self, trainer: Any) -> None:
        """Replace ``save_model``, which runs on every rank and writes on rank 0."""
        save_model = trainer.save_model

        def save_plain_model(*arguments: Any, **options: Any) -> None:
            """Gather the weights, and save the plain model."""
            self.gather()
            with self._plain_model_in(trainer):
                save_model(*arguments, **options)

        trainer.save_model = save_plain_model

    def _load_plain_model(self, trainer: Any) -> None:
        """Replace ``_load_from_checkpoint``, by which a training resumes."""
        load_from_checkpoint = trainer._load_from_checkpoint

        def load_plain_model(*arguments: Any, **options: Any) -> None:
            """Load the plain model on every rank, and scatter its weights."""
            with self._plain_model_in(trainer):
                load_from_checkpoint(*arguments, **options)
            self.scatter()

        trainer._load_from_checkpoint = load_plain_model

    def _save_complete_optimizer(self, trainer: Any) -> None:
        """Replace ``_save_optimizer_and_scheduler``, in which rank 0 writes the state."""
        save_optimizer_and_scheduler = trainer._save_optimizer_and_scheduler

        def save_complete_optimizer(output_dir: str) -> None:
            """Gather the state of the optimiser, and save it."""
            state = self._gather_state(trainer.optimizer)
            trainer.optimizer.state_dict = lambda: state
            try:
                save_optimizer_and_scheduler(output_dir)
            finally:
                del trainer.optimizer.state_dict  # uncovers the method of the class

        trainer._save_optimizer_and_scheduler = save_complete_optimizer

    def _load_complete_optimizer(self, trainer: Any) -> None:
        """Replace ``_load_optimizer_and_scheduler``, by which a training resumes."""
        load_optimizer_and_scheduler = trainer._load_optimizer_and_scheduler

        def load_complete_optimizer(checkpoint: str | None) -> None:
            """Load the state of the optimiser, and divide it among the ranks."""
            optimizer = trainer.optimizer
            load_state_dict = optimizer.load_state_dict

            def load_sharded_state(state: dict[str, Any]) -> None:
                """Load this rank's shards of a complete state."""
                load_state_dict(_divide_state(state, optimizer))

            optimizer.load_state_dict = load_sharded_state
            try:
                load_optimizer_and_scheduler(checkpoint)
            finally:
                del optimizer.load_state_dict  # uncovers the method of the class

        trainer._load_optimizer_and_scheduler = load_complete_optimizer

    def _gather_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimiser as one process would have it.

        Args:
            optimizer: the optimiser of the shards. All ranks must call this method.

        Returns:
            The ``state_dict``. On rank 0, it has complete tensors on the CPU. The other ranks save
            nothing, and get no tensors.
        """
        state_dict: dict[str, Any] = optimizer.state_dict()
        complete: dict[int, dict[str, Any]] = {}
        for index, entries in state_dict["state"].items():
            complete[index] = {}
            for name, value in entries.items():
                gathered = _gather_tensor(value)
                if self._world.rank == 0:
                    complete[index][name] = _copy_to_cpu(gathered)
        return {**state_dict, "state": complete}


def _layers_of(model: Model) -> list[Module]:
    """Return the layers of the Transformers of a model, each of which is divided on its own.

    Args:
        model: the model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _gather_tensor(value: Any) -> Any:
    """Return the complete tensor of a DTensor, and any other value unchanged."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _copy_to_cpu(value: Any) -> Any:
    """Return a copy of a tensor on the CPU, and any other value unchanged."""
    import torch

    return value.cpu() if isinstance(value, torch.Tensor) else value


def _divide_like(complete: Tensor, parameter: Any) -> Any:
    """Divide a tensor among the ranks in the way in which a parameter is divided.

    Every rank has the complete tensor, so that no rank sends anything.

    Args:
        complete: a tensor of the shape of the complete parameter.
        parameter: the parameter, a DTensor.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        complete.to(parameter.device, parameter.dtype),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,  # each rank takes its shard from its own tensor
    )


def _divide_state(state_dict: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """Divide the complete state of an optimiser among the ranks, like the parameters.

    Args:
        state_dict: the state as one process saves it, which every rank has loaded.
        optimizer: the optimiser of the shards.
    """
    import torch

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded: dict[int, dict[str, Any]] = {}
    for index, entries in state_dict["state"].items():
        sharded[index] = {}
        for name, value in entries.items():
            is_per_weight = isinstance(value, torch.Tensor) and name != _STEP
            if is_per_weight:
                sharded[index][name] = _divide_like(value, parameters[index])
            else:
                sharded[index][name] = value
    return {**state_dict, "state": sharded}
