"""``accelerate`` for models of sentence-transformers, and ``encode_sparse``.

``accelerate(check=True)`` runs self-checks, which :mod:`._self_check` lists, unless the cache has a
record that the model has passed them (:mod:`._check_record`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from torch import Tensor, nn

from tilefold._internal.arguments import check_instance, list_of_texts
from tilefold._internal.typing import Model, Transformer
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.integrations._patches import Replacement, replacements
from tilefold.integrations.sentence_transformers import _pooling
from tilefold.integrations.sentence_transformers._ahead import compile_head_ahead
from tilefold.integrations.sentence_transformers._check_record import (
    CheckRecord,
    checks_are_repeated,
)
from tilefold.integrations.sentence_transformers._fp8 import stop_fp8, use_fp8
from tilefold.integrations.sentence_transformers._heads import (
    check_head,
    find_fusable_poolings,
    is_dense,
    is_multi_vector,
)
from tilefold.integrations.sentence_transformers._invariant import Invariance, make_invariant
from tilefold.integrations.sentence_transformers._self_check import (
    check_fused_head,
    check_fused_similarity,
)
from tilefold.integrations.sentence_transformers.graphs.encoding import (
    GRAPHS,
    EncodingGraphs,
    graphs_of,
)
from tilefold.integrations.sentence_transformers.multi_vector import maxsim, maxsim_pairwise
from tilefold.integrations.sentence_transformers.packing.accelerate import (
    pack_inputs,
    use_column_graphs,
)
from tilefold.integrations.sentence_transformers.packing.inputs import PackedInputs
from tilefold.integrations.sentence_transformers.streaming import encoders as _encoders
from tilefold.integrations.sentence_transformers.streaming.stream import (
    SparseStream,
    as_csr,
    encode_sparse_rows,
    no_rows,
    prompt_of,
)
from tilefold.integrations.transformers import stop_packed
from tilefold.integrations.transformers.networks import in_eval_mode
from tilefold.integrations.transformers.packed import FailedCheck
from tilefold.modules.fused_pooling import SparseOptions, pass_hidden_states
from tilefold.ops.implementations import SWITCH, check_impl, switched_off
from tilefold.pipeline.rows import Batch

# The largest number of texts that are encoded without background threads, and their batch size.
FEW = 32
# The functions that replace the methods of a MultiVectorEncoder, by the name of the method.
_SIMILARITY_FUNCTIONS = {"similarity": maxsim, "similarity_pairwise": maxsim_pairwise}
# The method that torch.nn.DataParallel calls on every module that it copies.
_REPLICATE = "_replicate_for_data_parallel"
# Why networks of accelerated models run on padded batches, by the name of the network's class.
_padded_reasons: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


class FusedSimilarity(Replacement):
    """Replaces ``similarity`` or ``similarity_pairwise`` of one MultiVectorEncoder.

    The model's ``similarity_fn_name`` is read at every call.

    Args:
        model: the model.
        name: the name of the method that is replaced.
        impl: the implementation of :func:`tilefold.ops.maxsim`.
    """

    def __init__(self, model: Model, name: str, impl: str) -> None:
        super().__init__(model)
        self.name = name
        self.impl = impl

    def __call__(self, embeddings1: object, embeddings2: object, **options: Any) -> Tensor:
        """Compute MaxSim scores of queries and documents, ``[Nq, Nd]`` or pairwise ``[N]``.

        Args:
            embeddings1: the token vectors of the queries, in any form that
                :func:`.multi_vector.maxsim` accepts.
            embeddings2: the token vectors of the documents, in any such form.
            **options: keyword arguments of :func:`.multi_vector.maxsim`. By default,
                ``length_normalize`` follows the model, and ``impl`` is the argument of
                :func:`accelerate`.
        """
        function = _SIMILARITY_FUNCTIONS[self.name]
        # The similarity "meanmaxsim" divides MaxSim by the number of query tokens.
        options.setdefault("length_normalize", self.owner.similarity_fn_name == "meanmaxsim")
        options.setdefault("impl", self.impl)
        return function(embeddings1, embeddings2, **options)


class NoReplicas(Replacement):
    """Refuses ``torch.nn.DataParallel``, whose replicas would use the original module's weights.

    It replaces ``_replicate_for_data_parallel``, which DataParallel calls on every module.
    """

    def __call__(self) -> NoReturn:
        """Raise ``RuntimeError`` with the ways to train on one or several GPUs."""
        n_gpus = max(2, torch.cuda.device_count())  # for the command in the message
        raise RuntimeError(
            f"an accelerated {type(self.owner).__name__} must run in one process for each GPU, got "
            "torch.nn.DataParallel, which transformers' Trainer uses if several GPUs are visible. "
            f"To use all GPUs, start the training with `torchrun --nproc-per-node {n_gpus} SCRIPT` "
            "or `accelerate launch`. To use one, set CUDA_VISIBLE_DEVICES=0, or make the trainer's "
            "arguments with tilefold.integrations.transformers.one_gpu.",
        )


@dataclass(repr=False)
class Acceleration:
    """Handle of an accelerated model.

    ``print(handle)`` says which parts are active, and why others are not. As a context manager, it
    returns the model and restores it on exit.

    Attributes:
        model: the SparseEncoder, MultiVectorEncoder or SentenceTransformer, accelerated in place.
        heads: the number of fused LM heads. A Router may have one per route; models with token
            weights, a MultiVectorEncoder and a SentenceTransformer have none.
        padded: the reasons why networks run on padded batches, by the name of the network's class;
            empty if all run packed.
    """

    model: Model
    heads: int
    padded: dict[str, str]

    def __enter__(self) -> Model:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Undo the acceleration of the model."""
        restore(self.model)

    def __str__(self) -> str:
        """Return one line with the active parts, and the reasons for those that are not."""
        if not is_accelerated(self.model):
            reason = f"{SWITCH} is set" if switched_off() else "the model was restored"
            return f"tilefold: nothing active, because {reason}"
        parts = []
        if not is_dense(self.model):
            parts.append("fused scores")
        if not self.padded:
            parts.append("packed tokens")
        clauses = [f"{', '.join(parts)} active"] if parts else []
        if self.padded:
            reasons = [
                reason if network == "all" else f"{network}: {reason}"
                for network, reason in self.padded.items()
            ]
            clauses.append(f"not active: packed tokens ({'; '.join(reasons)})")
        return f"tilefold: {'; '.join(clauses)}"

    def __repr__(self) -> str:
        if is_dense(self.model):
            fused = "no padding" if not self.padded else "padded"
        else:
            fused = f"heads={self.heads}" if self.heads else "similarity"
        return f"Acceleration({type(self.model).__name__}, {fused})"


def accelerate(
    model: Model,
    *,
    impl: str = "auto",
    check: bool | Literal["always"] = True,
    quantize: str | None = None,
    packed: bool = True,
    screen: bool = True,
    graphs: bool = True,
    fp8: bool = False,
    invariant: bool = False,
) -> Acceleration:
    """Make a model compute scores without large intermediate tensors.

    A SparseEncoder then needs no ``[B, S, V]`` logits, and a MultiVectorEncoder no token
    similarities. The model is changed in place. Its classes, its state dict and its checkpoints
    stay the same, so sentence-transformers alone can load what it saves. If ``encode`` gets more
    than one batch of texts, it tokenises ahead and encodes without padding. Its results do not
    change.

    For a SparseEncoder, two forwards are replaced on the instances: the LM head returns its input,
    and the SpladePooling after it, or a pooling of :mod:`tilefold.modules`, applies
    :func:`tilefold.ops.lsr_head`. A ``SparseStaticEmbedding`` of a Router ignores ``[PAD]`` tokens
    in texts. Routers, tied weights, LoRA on the LM head, flattened inputs, autocast, pickle and
    deepcopy keep working. The model no longer returns the feature ``token_embeddings``.

    For a MultiVectorEncoder, ``similarity`` and ``similarity_pairwise`` are replaced on the
    instance by functions of :mod:`tilefold.integrations.sentence_transformers.multi_vector`.
    Evaluators of reranking and distillation call them. Pass the functions of that module to losses
    and other evaluators (``similarity_fct=``, ``score_functions=``).

    A SentenceTransformer has one dense vector per text and no large matrix of scores: only the
    padding is removed, in ``encode`` and in training, and CUDA graphs encode a few texts.

    A second call starts over with its own arguments. If it fails, the model is not accelerated any
    more, and the error says so. Call again after an adapter was added to the LM head or merged into
    it. With ``TILEFOLD_DISABLE=1`` in the environment, the model is not accelerated, and a model
    that was accelerated before is restored.

    Args:
        model: a ``sentence_transformers.SparseEncoder`` with a SpladePooling or a module of
            :mod:`tilefold.modules`, a ``MultiVectorEncoder``, or a ``SentenceTransformer`` with a
            Pooling.
        impl: the implementation of the operator, see :func:`tilefold.ops.lsr_head`.
        check: whether to compare the model before and after on two short texts, in eval mode (for
            the similarity of a MultiVectorEncoder, on four short sequences of vectors). If fused
            scores differ, an error is raised. If packed and padded batches differ, the network
            stays padded. A model that passes is recorded in the cache, and is not compared again
            until its weights, its settings, an argument, a release or the device change. To repeat
            the comparison at every call, pass ``"always"``, or set ``TILEFOLD_SELF_CHECK=always``.
        quantize: ``"fp8"`` rounds the LM head and hidden states to fp8 if no gradient is needed, as
            in ``encode``: 1.6 times the speed of the bf16 head on an H200, with scores that differ
            by about 1% (see :func:`tilefold.ops.quantize_weight`). Training and checkpoints do not
            change. This is supported for the max pooling of a SparseEncoder.
        packed: whether to run the encoder on packed tokens, if it and all modules after it accept
            them. ``preprocess`` does not change: the encoder removes the padding. In training, the
            CPU waits once for the GPU to do so, except for batches that :func:`collate_ahead`
            packs. A warning, and ``padded`` of the handle, say why a network stays padded. Dropout
            draws different numbers than in the padded model.
        screen: whether a product in 8 bits first finds the scores of a SpladePooling that can
            be positive, on an H100 or H200 in 16 bits (see :func:`tilefold.ops.lsr_head`). Rows and
            gradients do not change; with V = 250,002, 1.25 times the documents are encoded per
            second. It is skipped if a sample shows no gain, for example for a fresh model.
        graphs: whether training steps on a GPU replay the packed encoder as CUDA graphs, which
            takes the memory of its weights twice more for gradients. A batch size runs as usual the
            first time, and is captured the second time. Hooks, gradient checkpointing, losses that
            cache gradients, several ranks and too little memory switch graphs off. Dropout draws
            different numbers.
        fp8: whether the linear layers of the trunk multiply in fp8 if no gradient is needed, as in
            ``encode``, on a GPU of compute capability 8.9 or higher. Vectors change by a few
            percent, and the LM head stays exact. A CPU computes with the same rounded values, and
            is not faster. Training and checkpoints do not change.
        invariant: whether ``encode`` gives a text a vector with the same bits alone, in any batch
            and in any order. The vectors are equal on devices of one kind with the same releases.
            It excludes ``fp8``, ``quantize`` and ``packed=False``. Training does not change.

    Returns:
        A handle; as a context manager, it restores the model on exit.

    Raises:
        TypeError: if ``model`` is no SparseEncoder, MultiVectorEncoder or SentenceTransformer, or
            ``screen``, ``graphs``, ``fp8`` or ``invariant`` is not a bool.
        ValueError: if ``check`` is neither a bool nor ``"always"``; if the model has no LM head
            before a pooling (modules of :mod:`tilefold.modules` may need none); if it computes its
            logits or similarities in another way than the operator; if ``fp8`` is not possible on
            the device or for the model; or if ``invariant`` is True, and a module of the model is
            not known to compute the same bits in every batch. The model is not changed then, or
            is restored if an earlier call has accelerated it.
        RuntimeError: if the check cannot run the model on its device, or ``invariant`` is True with
            ``TILEFOLD_DISABLE=1``.
    """
    check_impl(impl)
    _check_options(check, quantize, screen=screen, graphs=graphs, fp8=fp8, invariant=invariant)
    if invariant:
        _check_invariant_options(quantize=quantize, packed=packed, fp8=fp8)
    # Before anything is restored: the network inside an accelerated model must stay accelerated.
    _check_model(model)
    was_accelerated = is_accelerated(model)
    restore(model)
    if switched_off():
        if invariant:
            raise RuntimeError(
                f"invariant=True needs an accelerated model, got {SWITCH} in the environment; "
                "unset it, or leave out invariant=True.",
            )
        return Acceleration(model, 0, {"all": f"{SWITCH} is set"})
    with _restored_after_error(model, was_accelerated=was_accelerated):
        options: dict[str, object] = {
            "impl": impl,
            "quantize": quantize,
            "packed": packed,
            "screen": screen,
            "invariant": invariant,
        }
        record = CheckRecord.of(model, options) if check else None
        is_repeated = check == "always" or checks_are_repeated()
        has_passed = record is not None and not is_repeated and record.exists()
        runs_checks = bool(check) and not has_passed
        acceleration = _accelerate_unchanged(
            model,
            impl=impl,
            check=runs_checks,
            quantize=quantize,
            packed=packed,
            screen=screen,
        )
        if invariant:
            make_invariant(model, acceleration.padded, runs_checks)
        has_failed_check = any(
            isinstance(reason, FailedCheck) for reason in acceleration.padded.values()
        )
        if runs_checks and record is not None and not has_failed_check:
            record.save()
        if graphs:
            use_column_graphs(model)
        if fp8:  # after the checks, which compare the model with the unchanged one
            use_fp8(model)
    _padded_reasons[model] = acceleration.padded
    return acceleration


def _check_model(model: object) -> None:
    """Raise ``TypeError`` unless an argument is a model that :func:`accelerate` supports."""
    if isinstance(model, SparseEncoder) or is_multi_vector(model) or is_dense(model):
        return
    remedy = "run other models as they are"
    if isinstance(model, str):
        remedy = f"load the model first, such as SparseEncoder({model!r})"
    elif isinstance(model, nn.Module):
        remedy = "pass the whole model, not its network, and run other models as they are"
    raise TypeError(
        "model must be a sentence_transformers.SparseEncoder, MultiVectorEncoder or "
        f"SentenceTransformer, got {type(model).__name__}; {remedy}.",
    )


@contextmanager
def _restored_after_error(model: Model, *, was_accelerated: bool) -> Iterator[None]:
    """Restore a model if the block, which accelerates it, raises a ValueError or RuntimeError.

    Args:
        model: the model.
        was_accelerated: whether an earlier call had accelerated the model. The message of the error
            then says that this is undone.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        restore(model)
        if was_accelerated:
            error.args = (
                f"{error} The acceleration of the model by an earlier call is undone; call "
                "accelerate(model) again with other arguments.",
            )
        raise


def padded_reasons(model: Model) -> dict[str, str]:
    """Return why networks of a model run on padded batches, by the name of the network's class.

    Args:
        model: the model. The result is empty if :func:`accelerate` has not been called.
    """
    return _padded_reasons.get(model, {})


def _check_quantizes_head(model: Model, quantize: str | None) -> None:
    """Raise ``ValueError`` if an LM head is to be quantized that the model does not have.

    Args:
        model: a SparseEncoder, MultiVectorEncoder or SentenceTransformer.
        quantize: ``"fp8"`` if the LM head is to be rounded to fp8, otherwise None.
    """
    if quantize is None:
        return
    if is_dense(model):
        raise ValueError(
            f"quantize must be None for a SentenceTransformer, got {quantize!r}; it has no LM "
            "head to quantize.",
        )
    if is_multi_vector(model):
        raise ValueError(
            f"quantize must be None for a MultiVectorEncoder, got {quantize!r}; "
            "see quantize_tokens.",
        )


def _accelerate_unchanged(
    model: Model,
    *,
    impl: str,
    check: bool,
    quantize: str | None,
    packed: bool,
    screen: bool,
) -> Acceleration:
    """Install the fused forwards and the fast ``encode`` of a model that is not accelerated.

    Args:
        model: a SparseEncoder, MultiVectorEncoder or SentenceTransformer, changed in place.
        impl: the implementation of the operator.
        check: whether results are compared with those of the unchanged model.
        quantize: ``"fp8"`` to round LM heads to fp8 in inference; None for no rounding.
        packed: whether Transformers run on packed tokens, if they can.
        screen: whether a product in int8 first finds the scores that can be positive.
    """
    _check_quantizes_head(model, quantize)
    n_heads = 0
    if is_dense(model):
        model.encode_dense_batch = _encoders.DenseBatchEncoder(model)
    elif is_multi_vector(model):
        _fuse_similarity(model, impl, check)
        model.encode_token_batch = _encoders.TokenBatchEncoder(model)
    else:
        n_heads = _fuse_heads(model, impl, check, quantize, screen)
        _pooling.count_no_padding(model)
        model.encode_sparse_batch = _encoders.SparseBatchEncoder(model)
        _forbid_replicas(model)
    _add_fast_encode(model)
    if not packed:
        return Acceleration(model, n_heads, {"all": "packed=False was chosen"})
    padded = pack_inputs(model, check)
    if _has_packed_inputs(model):
        _forbid_replicas(model)
        if is_dense(model):
            setattr(model, GRAPHS, EncodingGraphs(model))
    return Acceleration(model, n_heads, padded)


def _check_options(check: object, quantize: object, **switches: object) -> None:
    """Raise an error if :func:`accelerate` does not accept one of its arguments.

    Args:
        check: must be a bool or ``"always"``.
        quantize: must be None or ``"fp8"``.
        **switches: arguments that must be bools, by name.
    """
    if not isinstance(check, bool) and check != "always":
        raise ValueError(f"check must be True, False or 'always', got {check!r}.")
    if quantize not in {None, "fp8"}:
        remedy = "For 8 bits on a CPU: tilefold export --to onnx --quantize int8."
        raise ValueError(f"quantize must be 'fp8' or None, got {quantize!r}. {remedy}")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")


def _check_invariant_options(quantize: object, packed: bool, fp8: bool) -> None:
    """Raise ``ValueError`` for an option of :func:`accelerate` that ``invariant=True`` excludes.

    With ``invariant=True``, the vector of a text must have the same bits in every batch.

    Args:
        quantize: ``"fp8"`` if the LM head is to be rounded to fp8, otherwise None.
        packed: whether texts are to run on packed tokens.
        fp8: whether linear layers are to multiply in fp8.
    """
    if quantize is not None:
        raise ValueError(
            f"quantize must be None with invariant=True, got {quantize!r}: products of fp8 are not "
            "known to have the same bits in every batch.",
        )
    if fp8:
        raise ValueError(
            "fp8 must be False with invariant=True, got True: products of fp8 are not known to "
            "have the same bits in every batch.",
        )
    if not packed:
        raise ValueError(
            "packed must be True with invariant=True, got False: the attention of padded texts "
            "depends on their length in the batch.",
        )


def _fuse_heads(
    model: Model,
    impl: str,
    check: bool,
    quantize: str | None,
    screen: bool,
) -> int:
    """Replace the forwards of the LM heads and poolings of a SparseEncoder.

    An LM head then returns its input, and the pooling after it computes the scores from that and
    the head's weight. Everything is checked before the first change.

    Args:
        model: the SparseEncoder.
        impl: the implementation of the operator.
        check: whether the scores of each head are compared with those of the unchanged model.
        quantize: ``"fp8"`` to round heads and hidden states; None for no rounding.
        screen: whether a product in int8 first finds the scores that can be positive.

    Returns:
        The number of fused LM heads.
    """
    # Each pooling with the LM head and the Transformer before it; some poolings need no head.
    fusables = find_fusable_poolings(model)
    with_head = [fusable for fusable in fusables if fusable.head is not None]
    for fusable in with_head:
        check_head(fusable.head)
        pooling = _pooling.fused_pooling(fusable.pooling)
        if quantize is not None and not pooling.quantizable:
            name = getattr(pooling, "pooling", type(pooling).__name__)
            raise ValueError(
                f"quantize must be None for pooling {name!r}, got {quantize!r}; "
                "only max runs in fp8.",
            )
        if quantize is None:
            compile_head_ahead(fusable, impl=impl, screen=screen, check=check)
        if check:
            check_fused_head(fusable, impl)
    for fusable in fusables:
        fusable.pooling.forward = _pooling.FusedForward(
            fusable.pooling,
            fusable.head,
            impl,
            quantize=quantize,
            is_last=fusable.is_last,
            screens_int8=screen,
        )
    for fusable in with_head:
        fusable.head.forward = pass_hidden_states
        # Several routes may share a Transformer, which needs the hook once.
        if _check_head_is_fused not in fusable.transformer._forward_pre_hooks.values():
            fusable.transformer.register_forward_pre_hook(_check_head_is_fused)
    distinct_heads = {id(fusable.head) for fusable in with_head}
    return len(distinct_heads)


def _add_fast_encode(model: Model) -> None:
    """Put CUDA graphs and a faster ``encode`` on the instance of a model.

    Graphs of a SentenceTransformer encode packed tokens only, so it gets them after its Transformer
    was made to accept these. An ``encode`` that the user has set on the instance stays.

    Args:
        model: the model.
    """
    if not is_dense(model):
        setattr(model, GRAPHS, EncodingGraphs(model))
    if "encode" not in vars(model):
        model.encode = _encoders.FusedEncode(model)


def _has_packed_inputs(model: Model) -> bool:
    """Whether a Transformer of a model runs on packed tokens."""
    return any(isinstance(replacement, PackedInputs) for _, _, replacement in replacements(model))


def _forbid_replicas(model: Model) -> None:
    """Let ``torch.nn.DataParallel`` raise an error for a model.

    Its copies would run the replaced methods of the original, i.e. use the original's weights.
    """
    setattr(model, _REPLICATE, NoReplicas(model))


def restore(model: Model) -> None:
    """Undo :func:`accelerate`: remove everything it has added to the modules of a model.

    This covers replaced methods, packed attention, the forwards of LM heads and the hooks that
    check them. A model that is not accelerated does not change.

    Args:
        model: the model, which is changed in place.

    Raises:
        TypeError: if ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a SparseEncoder, MultiVectorEncoder or SentenceTransformer, "
            f"got {type(model).__name__}; pass the model, not its path.",
        )
    _padded_reasons.pop(model, None)
    for module, name, replacement in list(replacements(model)):
        delattr(module, name)  # the method of the class applies again
        if isinstance(replacement, PackedInputs):
            stop_packed(replacement.owner.model)
    stop_fp8(model)
    for module in model.modules():
        if _is_fused_head(module):
            del module.forward
        _remove_head_checks(module)


def _is_fused_head(module: nn.Module) -> bool:
    """Whether :func:`accelerate` has replaced the forward of an LM head on the instance."""
    return vars(module).get("forward") is pass_hidden_states


def _remove_head_checks(module: nn.Module) -> None:
    """Remove the hooks that check whether the LM head of a Transformer is fused."""
    hooks = module._forward_pre_hooks
    keys_of_checks = [key for key, hook in hooks.items() if hook is _check_head_is_fused]
    for key in keys_of_checks:
        del hooks[key]


def is_accelerated(model: Model) -> bool:
    """Whether :func:`accelerate` has replaced methods of a model.

    Args:
        model: the model. Anything that is not a module is not accelerated.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> is_accelerated(SparseEncoder("splade-model", device="cpu"))
        False
    """
    if not isinstance(model, nn.Module):
        return False
    replacement_classes = (
        FusedSimilarity,
        Invariance,
        _encoders.SparseBatchEncoder,
        _encoders.DenseBatchEncoder,
        _pooling.FusedForward,
        _pooling.StaticTokens,
    )
    return any(
        isinstance(replacement, replacement_classes) for _, _, replacement in replacements(model)
    )


def _check_head_is_fused(transformer: Transformer, _: object) -> None:
    """Raise an error if another LM head has replaced the fused one.

    This is a forward pre-hook of the Transformer. A fused head returns hidden states, which the
    fused pooling reads. Adding or merging an adapter replaces the layer of the head. The new layer
    would compute logits, and the pooling would read them as hidden states.

    Args:
        transformer: the module with the LM head.
        _: the inputs of the forward.
    """
    if torch.compiler.is_compiling():  # the check cannot be traced
        return
    head = transformer.model.get_output_embeddings()
    if not _is_fused_head(head):
        raise RuntimeError(
            "the LM head must be the one that accelerate(model) saw, "
            f"got a {type(head).__name__} in its place (an adapter was added, merged or removed, "
            "or the head was replaced); call accelerate(model) again.",
        )


def _fuse_similarity(model: Model, impl: str, check: bool) -> None:
    """Replace ``similarity`` and ``similarity_pairwise`` of a MultiVectorEncoder on the instance.

    Args:
        model: the model.
        impl: the implementation of :func:`tilefold.ops.maxsim`.
        check: whether scores are first compared with the model's.

    Raises:
        ValueError: if the model overrides a similarity method, or scores differ.
    """
    # A subclass of the user may override the methods that are replaced.
    library_class = next(
        base for base in type(model).__mro__ if base.__name__ == "MultiVectorEncoder"
    )
    functions = [FusedSimilarity(model, name, impl) for name in _SIMILARITY_FUNCTIONS]
    for function in functions:
        name = function.name
        is_overridden = getattr(type(model), name) is not getattr(library_class, name)
        if name in vars(model) or is_overridden:
            raise ValueError(
                f"model must score with MultiVectorEncoder.{name}, got a "
                f"{type(model).__name__} that overrides it; call tilefold.ops.maxsim in the "
                "override instead.",
            )
        if check:
            check_fused_similarity(model, name, function)
    for function in functions:
        setattr(model, function.name, function)


def _check_task(model: Model, task: str | None) -> None:
    """Raise ``ValueError`` for a task that is unknown to a model.

    sentence-transformers ignores an unknown task, and encodes without the prompt of queries or
    documents.

    Args:
        model: a SparseEncoder.
        task: ``"query"``, ``"document"``, another route of a Router, or None.
    """
    tasks = ["query", "document"]
    for module in model.modules():
        if isinstance(module, Router):
            tasks.extend(route for route in module.sub_modules if route not in tasks)
    if task is not None and task not in tasks:
        raise ValueError(f"task must be one of {tasks} or None, got {task!r}.")


def encode_sparse(
    model: Model,
    texts: Sequence[str],
    *,
    task: str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> Tensor:
    """Encode texts to a ``torch.sparse_csr`` matrix ``[len(texts), V]`` on the CPU.

    Rows are in the order of ``texts``. They equal the rows of
    ``model.encode(texts, max_active_dims=top_k)``, up to the order in which encoder and head
    evaluate sums. A model that is not accelerated is accelerated for the duration of the call,
    including the self-checks of :func:`accelerate` if it has not passed them before. More than 32
    texts are tokenised ahead, and encoded in batches with about the same number of tokens.

    The matrix has an attribute ``vocabulary_fingerprint``, by which
    :class:`tilefold.retrieval.SparseVectors` detects vectors of another vocabulary.

    Args:
        model: a ``sentence_transformers.SparseEncoder``.
        texts: any number of texts, in a list or any other sequence. The index of a pandas Series
            is ignored.
        task: ``"query"``, ``"document"`` or None: the route of a Router, and the name of the
            default prompt.
        prompt_name: the name of a prompt of the model; by default that of the task, if the model
            has it.
        prompt: text that is put before every text; takes precedence over ``prompt_name``.
        batch_size: the largest number of texts encoded at a time; by default chosen for the device.
        batch_tokens: the largest number of tokens encoded at a time; by default chosen for the
            device.
        top_k: the largest number of entries per row; by default the model's ``max_active_dims``.
        min_weight: only entries strictly greater than this are kept.

    Raises:
        TypeError: if ``texts`` is one string, a mapping or a set, or holds anything but strings, or
            if ``model`` is not a SparseEncoder.
        ValueError: if ``batch_size`` or ``batch_tokens`` is not positive, or the model has no
            prompt of that name, or no Router with a route for the task.

    Examples:
        >>> from sentence_transformers import SparseEncoder
        >>> model = SparseEncoder("splade-model", device="cpu")
        >>> rows = encode_sparse(model, ["a lost card", "a new card"], task="document", top_k=16)
        >>> rows.layout, rows.shape[0]
        (torch.sparse_csr, 2)
        >>> bool(rows.crow_indices()[-1] <= 32)
        True
    """
    check_instance("model", model, SparseEncoder, "a loaded model")
    texts = list_of_texts("texts", texts)
    for name, value in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value}.")
    _check_task(model, task)
    acceleration: AbstractContextManager[object] = nullcontext()
    if graphs_of(model) is None and not is_accelerated(model):
        acceleration = accelerate(model)
    with acceleration:
        options = _encoders.sparse_options(model, top_k, min_weight)
        if prompt is None:
            prompt = prompt_of(model, task, prompt_name)
        if switched_off():
            with in_eval_mode(model):
                return _encode_without_acceleration(
                    model, texts, options, task, prompt, batch_size or FEW
                )
        if len(texts) > FEW or batch_tokens is not None:
            batches = _encode_in_stream(
                model,
                texts,
                options,
                task,
                prompt,
                batch_size,
                batch_tokens,
            )
        else:
            batches = _encode_in_this_thread(
                model,
                texts,
                options,
                task,
                prompt,
                batch_size or FEW,
            )
        if batches:
            rows = as_csr(batches, len(texts))
        else:
            vocab_size = _encoders.fused_vocab_size(model) or int(model.get_embedding_dimension())
            rows = no_rows(vocab_size)
    _store_fingerprint(rows, model)
    return rows


def _encode_in_stream(
    model: Model,
    texts: list[str],
    options: SparseOptions,
    task: str | None,
    prompt: str | None,
    batch_size: int | None,
    batch_tokens: int | None,
) -> list[Batch]:
    """Encode many texts to sparse rows in batches of similar lengths, the longest texts first.

    A :class:`SparseStream` tokenises the next texts in background threads while the model runs.

    Args:
        model: an accelerated SparseEncoder, which runs in eval mode.
        texts: the texts.
        options: which entries of a row are kept.
        task: ``"query"``, ``"document"`` or None.
        prompt: text that is put before every text.
        batch_size: the largest number of texts per batch; None for no limit.
        batch_tokens: the largest number of tokens per batch; None chooses it for the device.

    Returns:
        Batches: sparse rows, each batch with the positions of its texts in ``texts``.
    """
    with in_eval_mode(model):
        stream = SparseStream(
            model,
            options,
            task=task,
            prompt=prompt,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
        )
        return list(_encoders.batches_of(stream, texts, progress=_ignore_progress))


def _ignore_progress(n_texts: int) -> None:
    """Ignore the number of texts of a batch, since there is no progress bar."""


def _encode_in_this_thread(
    model: Model,
    texts: list[str],
    options: SparseOptions,
    task: str | None,
    prompt: str | None,
    batch_size: int,
) -> list[Batch]:
    """Encode a few texts to sparse rows without background threads, the longest first.

    Args:
        model: an accelerated SparseEncoder.
        texts: the texts.
        options: which entries of a row are kept.
        task: ``"query"``, ``"document"`` or None.
        prompt: text that is put before every text.
        batch_size: the number of texts per batch.

    Returns:
        Batches: sparse rows, each batch with the positions of its texts in ``texts``.
    """
    # Texts of similar length share a batch.
    order = sorted(range(len(texts)), key=lambda position: -len(texts[position]))
    batches = []
    for start in range(0, len(order), batch_size):
        positions = order[start : start + batch_size]
        batch_texts = [texts[position] for position in positions]
        rows = encode_sparse_rows(model, batch_texts, task, prompt, options)
        batches.append(Batch(window=0, positions=positions, rows=rows))
    return batches


def _encode_without_acceleration(
    model: Model,
    texts: list[str],
    options: SparseOptions,
    task: str | None,
    prompt: str | None,
    batch_size: int,
) -> Tensor:
    """Encode texts with sentence-transformers' ``encode``; same result as :func:`encode_sparse`.

    Args:
        model: a SparseEncoder in eval mode that is not accelerated.
        texts: the texts.
        options: which entries of a row are kept.
        task: ``"query"``, ``"document"`` or None.
        prompt: text that is put before every text.
        batch_size: the number of texts per batch.

    Returns:
        The rows ``[len(texts), V]`` in CSR on the CPU, with the fingerprint of the vocabulary.
    """
    scores = model.encode(
        texts,
        task=task,
        prompt=prompt,
        batch_size=batch_size,
        max_active_dims=options.top_k,
        show_progress_bar=False,
        convert_to_tensor=True,
        convert_to_sparse_tensor=True,
        save_to_cpu=True,
    ).coalesce()
    is_kept = scores.values() > options.min_weight  # ``encode`` has applied ``top_k`` only
    rows = torch.sparse_coo_tensor(
        scores.indices()[:, is_kept],
        scores.values()[is_kept],
        scores.shape,
        check_invariants=True,
    ).to_sparse_csr()
    _store_fingerprint(rows, model)
    return rows


def _store_fingerprint(rows: Tensor, model: Model) -> None:
    """Store the fingerprint of a model's vocabulary as an attribute of its sparse vectors."""
    fingerprint = vocabulary_fingerprint(model.tokenizer)
    setattr(rows, "vocabulary_fingerprint", fingerprint)  # noqa: B010 - no attribute of the class
