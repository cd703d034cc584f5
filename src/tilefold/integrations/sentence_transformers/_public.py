"""``accelerate`` and ``restore`` for a model or for a trainer."""

from __future__ import annotations

from typing import Any, Literal

from tilefold.integrations.sentence_transformers import _accelerate

# The base class of all trainers of sentence-transformers.
_TRAINER = "sentence_transformers.base.trainer.BaseTrainer"
# The options of a model with which a trainer's model stays as it is, if it is accelerated.
_MODEL_DEFAULTS = {
    "impl": "auto",
    "check": True,
    "quantize": None,
    "packed": True,
    "screen": True,
    "fp8": False,
    "invariant": False,
}


def accelerate(
    model: Any,
    *,
    impl: str = "auto",
    check: bool | Literal["always"] = True,
    quantize: str | None = None,
    packed: bool = True,
    screen: bool = True,
    graphs: bool | None = None,
    compiled: bool | None = None,
    fp8: bool = False,
    invariant: bool = False,
) -> Any:
    """Accelerate a trainer or a model, and reduce the memory that it takes.

    With a trainer of sentence-transformers, this is the one call that is needed before
    ``trainer.train()``. It switches on each of these parts whose conditions hold:

    - **fused scores**: SPLADE scores without ``[B, S, V]`` logits, and MaxSim without token
      similarities in the losses of a MultiVectorEncoder;
    - **packed tokens**: the encoder runs without padding;
    - **batches made ahead**: a thread tokenises the next batch during a step, and all columns go
      through the encoder together;
    - **CUDA graphs**: the forward and backward pass of the encoder are replayed, which saves the
      CPU's time;
    - **compiled layers**: ``torch.compile`` compiles the layers, in 16 bits and for trainings of at
      least 100 steps.

    Losses and gradients equal those of the trainer without it up to rounding. Dropout draws
    different numbers. ``print(accelerate(trainer))`` says which parts are active, and why others
    are not. The same line is logged when the training begins, at level INFO.

    With a model, scores are fused, tokens are packed, and ``encode`` tokenises ahead. A
    SentenceTransformer has no scores to fuse, so only its padding is removed. Steps of any
    training loop replay CUDA graphs. The model is changed in place. Its classes, its state dict and
    its checkpoints stay the same, so sentence-transformers alone can load what it saves. Routers,
    tied weights, LoRA, autocast, pickle and deepcopy keep working. A SparseEncoder no longer
    returns the feature ``token_embeddings``. For a MultiVectorEncoder, ``similarity`` and
    ``similarity_pairwise`` are replaced; pass the functions of
    :mod:`tilefold.integrations.sentence_transformers.multi_vector` to its losses and evaluators.
    Call again after an adapter was added to the LM head or merged into it.

    :func:`restore` undoes either. With ``TILEFOLD_DISABLE=1`` in the environment, nothing is
    accelerated.

    Args:
        model: a ``SparseEncoderTrainer``, ``MultiVectorEncoderTrainer`` or
            ``SentenceTransformerTrainer``; or a ``SparseEncoder`` with a SpladePooling or a module
            of :mod:`tilefold.modules`; a ``MultiVectorEncoder``; or a ``SentenceTransformer``. The
            model of a trainer stays as it is if it is accelerated
            already and all options of the model have their defaults.
        impl: the implementation of the operator, see :func:`tilefold.ops.lsr_head`.
        check: whether to compare the model before and after on two short texts. If fused scores
            differ, an error is raised. If packed and padded batches differ, the network stays
            padded. A model that passes is recorded in the cache, and is not compared again until
            its weights, its settings, an argument, a release or the device change. To repeat the
            comparison at every call, pass ``"always"``, or set ``TILEFOLD_SELF_CHECK=always``.
        quantize: ``"fp8"`` rounds the LM head and hidden states to fp8 if no gradient is needed,
            with scores that differ by about 1% (see :func:`tilefold.ops.quantize_weight`), for the
            max pooling of a SparseEncoder.
        packed: whether to run the encoder on packed tokens, if it and all modules after it accept
            them. A warning, and ``padded`` of the handle, say why a network stays padded.
        screen: whether a product in 8 bits first finds the scores of a SpladePooling that can
            be positive, on an H100 or H200 in 16 bits. Results do not change.
        graphs: whether to use CUDA graphs in training. By default they are used if they are
            possible. They take the memory of the weights once or twice more for gradients, and keep
            the activations of a batch. True raises an error for a trainer if they are not possible.
        compiled: whether to compile the layers of a trainer. By default they are compiled if that
            is possible and the training has at least 100 steps. Compiling takes ten to twenty
            seconds, which it outweighs after one to three thousand steps.
        fp8: whether the linear layers of the trunk multiply in fp8 in ``encode``, on a GPU of
            compute capability 8.9 or higher, with vectors that differ by a few percent. A CPU
            computes with the same rounded values, and is not faster. Training does not change.
        invariant: whether the vector of a text has the same bits in every batch: alone or with
            other texts, in any order, on one device with one release of its libraries. Training
            does not change.

    Returns:
        A handle; as a context manager, it restores the trainer or the model on exit. For a model
        it is an :class:`.Acceleration`, with ``heads`` and ``padded``; for a trainer a
        ``TrainerAcceleration``, with ``active`` and ``inactive`` parts.

    Raises:
        TypeError: if ``model`` is neither a trainer nor a model of these kinds.
        ValueError: if the model cannot be accelerated, or an option is not possible for it.
        RuntimeError: if the check cannot run the model on its device.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> acceleration = accelerate(model)  # print it to see what is active
        >>> model.encode(["a lost card"]).shape[0]
        1
        >>> with accelerate(SparseEncoder("splade-model", device="cpu")) as fast:
        ...     scores = model.encode(["a lost card"])  # restored at the end of the block
    """
    options: dict[str, Any] = {
        "impl": impl,
        "check": check,
        "quantize": quantize,
        "packed": packed,
        "screen": screen,
        "fp8": fp8,
        "invariant": invariant,
    }
    if _is_trainer(model):
        from tilefold.integrations.sentence_transformers._trainer import accelerate_trainer

        has_defaults = options == _MODEL_DEFAULTS
        return accelerate_trainer(
            model,
            graphs=graphs,
            compiled=compiled,
            **({} if has_defaults else options),
        )
    if compiled:
        raise ValueError(
            "compiled must be None or False for a model, got True; call accelerate(trainer), or "
            "compile the model with torch.compile.",
        )
    return _accelerate.accelerate(model, graphs=graphs is not False, **options)


def restore(model: Any) -> None:
    """Undo :func:`accelerate` of a trainer or of a model.

    A trainer that was accelerated gets back its data collator, its settings and the similarities of
    its losses. Its model is restored if accelerating the trainer has accelerated it. A trainer or a
    model that is not accelerated does not change.

    Args:
        model: the trainer or the model, which is changed in place.

    Raises:
        TypeError: if ``model`` is neither a trainer nor a ``torch.nn.Module``.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> from tilefold.integrations.sentence_transformers import accelerate, is_accelerated
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> _ = accelerate(model)
        >>> is_accelerated(model)
        True
        >>> restore(model)
        >>> is_accelerated(model)
        False
    """
    if _is_trainer(model):
        from tilefold.integrations.sentence_transformers._trainer import restore_trainer

        restore_trainer(model)
    else:
        _accelerate.restore(model)


def _is_trainer(value: object) -> bool:
    """Whether a value is a trainer of sentence-transformers.

    Base classes are compared by name, because the module of the trainers takes seconds to import.
    """
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}
    return _TRAINER in names
