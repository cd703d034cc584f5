"""Tensor parallelism of the modules, as styles for ``parallelize_module`` of torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tilefold.nn.heads import LSRHead


class VocabularyParallel(ParallelStyle):
    """Shard the vocabulary of a :class:`tilefold.nn.LSRHead` over the ranks of a mesh.

    Each rank holds ``ceil(V / ranks)`` rows of ``weight`` and ``bias`` (the last ranks fewer),
    computes those columns of the scores, and keeps their gradients; only the gradient of ``hidden``
    is summed over the ranks. Every rank must call the head with the same ``hidden``, mask and
    offsets, and must compute the same loss from the scores::

        parallelize_module(model, mesh["tp"], {"head": VocabularyParallel()})

    Weights that were tied before are no longer: tie them again, to a DTensor with the same
    placement.

    Args:
        output_layouts: placement of the ``[B, V]`` scores: ``Shard(1)`` leaves the columns on their
            ranks, ``Replicate()`` gathers them.
        use_local_output: return this rank's part of the scores as a plain tensor, for code that
            does not support DTensor. With ``Replicate()`` that is all of them.

    Raises:
        TypeError: when it is applied to a module that is not an LSRHead.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        """Store the layout of the head's output.

        Args:
            output_layouts: placement of the scores ``[B, V]``; by default columns are sharded.
            use_local_output: whether the head returns a plain tensor with this rank's part.
        """
        super().__init__()
        self.output_layouts: Placement = Shard(1) if output_layouts is None else output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the parameters of a head over the ranks, and convert its input and output.

        ``parallelize_module`` of torch calls this method.

        Args:
            module: the head, changed in place.
            device_mesh: the ranks, in one dimension.

        Returns:
            The head.

        Raises:
            TypeError: if the module is not an LSRHead.
        """
        if not isinstance(module, LSRHead):
            raise TypeError(
                "VocabularyParallel must be applied to a tilefold.nn.LSRHead, "
                f"got {type(module).__name__}; name the head in the plan of parallelize_module, "
                "for instance {'head': VocabularyParallel()}.",
            )
        source_rank = getattr(self, "src_data_rank", 0)  # the rank whose parameters are sharded
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(
                parameter.detach(),
                device_mesh,
                [Shard(0)],  # rows of the weight, which are terms
                src_data_rank=source_rank,
            )
            module.register_parameter(
                name,
                nn.Parameter(shard, requires_grad=parameter.requires_grad),
            )

        def replicate_hidden(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Convert the hidden states, an argument of the head, to a replicated DTensor."""
            if "hidden" in kwargs:
                return args, {**kwargs, "hidden": as_replica(kwargs["hidden"], device_mesh)}
            return (as_replica(args[0], device_mesh), *args[1:]), kwargs

        def lay_out_scores(_: nn.Module, args: tuple[Any, ...], scores: DTensor) -> Tensor:
            """Convert the scores, whose columns are sharded, to the layout that was asked for."""
            if tuple(scores.placements) != (self.output_layouts,):
                scores = scores.redistribute(placements=[self.output_layouts])
            return scores.to_local() if self.use_local_output else scores

        module.register_forward_pre_hook(replicate_hidden, with_kwargs=True)
        module.register_forward_hook(lay_out_scores)
        return module

    def __repr__(self) -> str:
        return (
            f"VocabularyParallel(output_layouts={self.output_layouts!r}, "
            f"use_local_output={self.use_local_output})"
        )


def as_replica(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``hidden`` as a ``Replicate()`` DTensor of a one-dimensional mesh.

    Args:
        hidden: a plain tensor that is equal on every rank, or a DTensor, whose shards are gathered.
        mesh: the ranks.
    """
    if not isinstance(hidden, DTensor):
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return hidden.redistribute(placements=[Replicate()] * mesh.ndim)
