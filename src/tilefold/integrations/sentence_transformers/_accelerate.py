"""Fuses the head of a SparseEncoder, or the scores of a MultiVectorEncoder, in place; encodes texts
to sparse rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SparseEncoder
from torch import Tensor, nn

from tilefold._internal.arguments import check_instance, list_of_texts
from tilefold._internal.typing import Model, Transformer
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.integrations._patches import Replacement, replacements
from tilefold.integrations.sentence_transformers import _pooling
from tilefold.integrations.sentence_transformers._heads import (
    check_head,
    find_pairs,
    is_multi_vector,
)
from tilefold.integrations.sentence_transformers.graphs.encoding import (
    GRAPHS,
    EncodingGraphs,
    graphs_of,
)
from tilefold.integrations.sentence_transformers.multi_vector import maxsim, maxsim_pairwise
from tilefold.integrations.sentence_transformers.packing.accelerate import pack_inputs
from tilefold.integrations.sentence_transformers.packing.inputs import PackedInputs
from tilefold.integrations.sentence_transformers.streaming import encoders as _encoders
from tilefold.integrations.sentence_transformers.streaming.stream import (
    SparseStream,
    as_csr,
    encode_batch,
    prompt_of,
)
from tilefold.integrations.transformers import stop_packed
from tilefold.integrations.transformers.packed import apart, in_eval_mode
from tilefold.modules.fused_pooling import SparseOptions, pass_hidden_states
from tilefold.ops.implementations import SWITCH, check_impl, switched_off

SIMILARITY_TOLERANCE = (
    2**-6
)  # of the largest score: error of the stock function from rounding similarities to bf16
_METHODS = ("similarity", "similarity_pairwise")
FEW = 32  # texts that are encoded in one batch, without threads
ASKED = "_replicate_for_data_parallel"  # which torch.nn.parallel.replicate calls on every module that it copies


class FusedSimilarity(Replacement):
    """Replaces ``similarity`` or ``similarity_pairwise`` of one model, and reads its
    ``similarity_fn_name``.
    """

    def __init__(self, model: Model, name: str, impl: str) -> None:
        super().__init__(model)
        self.name, self.impl = name, impl

    def __call__(self, embeddings1: object, embeddings2: object, **options: Any) -> Tensor:
        """Scores, with the keywords of the stock function."""
        mean = self.owner.similarity_fn_name == "meanmaxsim"
        function = maxsim if self.name == "similarity" else maxsim_pairwise
        return function(
            embeddings1,
            embeddings2,
            **{"length_normalize": mean, "impl": self.impl, **options},
        )


class NoReplicas(Replacement):
    """Replaces the method by which ``torch.nn.DataParallel`` copies a module: those read the
    original's weights.
    """

    def __call__(self) -> nn.Module:
        gpus = max(2, torch.cuda.device_count())
        raise RuntimeError(
            f"an accelerated {type(self.owner).__name__} must run in one process for each GPU, got "
            "torch.nn.DataParallel, which copies it within one (transformers' Trainer does this where several GPUs are "
            f"visible). For all GPUs, start the training with `torchrun --nproc-per-node {gpus} SCRIPT` (or "
            "`accelerate launch`); for one, set CUDA_VISIBLE_DEVICES=0, or make the trainer's arguments with "
            "tilefold.integrations.transformers.one_gpu.",
        )


@dataclass(repr=False)
class Acceleration:
    """Handle of an accelerated model; as a context, it gives the model and restores it at its end.

    Attributes:
        model: the SparseEncoder or MultiVectorEncoder, accelerated in place.
        heads: how many LM heads were fused; a Router may have one per route; token weights and a
            MultiVectorEncoder have none.
        padded: why a network still runs on padded batches, by the name of its class; empty if all
            run packed.
    """

    model: Model
    heads: int
    padded: dict[str, str]

    def __enter__(self) -> Model:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Make the model stock again."""
        restore(self.model)

    def __repr__(self) -> str:
        what = f"heads={self.heads}" if self.heads else "similarity"
        return f"Acceleration({type(self.model).__name__}, {what})"


def accelerate(
    model: Model,
    *,
    impl: str = "auto",
    check: bool = True,
    quantize: str | None = None,
    packed: bool = True,
    screen: bool = True,
) -> Acceleration:
    """Make a SparseEncoder score without the ``[B, S, V]`` logits, or a MultiVectorEncoder without
    token similarities.

    The model is changed in place and stays a stock one: same classes, same state dict, same
    checkpoint, so that sentence-transformers alone loads what it saves. Its ``encode`` tokenises
    more than one batch of texts ahead, encodes them without padding and returns what the stock one
    returns.

    For a MultiVectorEncoder, ``similarity`` and ``similarity_pairwise`` are replaced on the
    instance by those of :mod:`tilefold.integrations.sentence_transformers.multi_vector`, for which
    reranking and distillation evaluators ask; pass that module's functions to losses and other
    evaluators (``similarity_fct=``, ``score_functions=``).

    For a SparseEncoder, two forwards are replaced, on the instances: the LM head returns its input,
    and the SpladePooling after it, or a pooling of :mod:`tilefold.modules`, applies
    :func:`tilefold.ops.lsr_head`. A ``SparseStaticEmbedding`` of a Router counts no padding token
    that was written in a text. Routers, tied weights, LoRA on the LM head, flattened inputs,
    autocast, pickle and deepcopy keep working. ``token_embeddings`` is no longer among the features
    that the model returns. A second call starts over, with its own ``impl``; call again after an
    adapter was added to the LM head, or merged into it. With ``TILEFOLD_DISABLE=1`` in the
    environment the model stays stock, or becomes it again.

    Args:
        model: a ``sentence_transformers.SparseEncoder`` with a SpladePooling or a module of
            :mod:`tilefold.modules`, or a ``MultiVectorEncoder``.
        impl: implementation of the operator, see :func:`tilefold.ops.lsr_head`.
        check: run two short texts (for a MultiVectorEncoder: four short sequences of vectors)
            through the stock and the fused model, in eval mode, and raise an error if they
            disagree.
        quantize: ``"fp8"`` rounds LM head and token states to fp8 wherever no gradient is needed,
            as in ``encode``:
            1.6 times the speed of the bf16 head on an H200, scores about 1% off (see
            :func:`tilefold.ops.quantize_weight`). Training and checkpoints do not change. Only for the max pooling of
            a SparseEncoder.
        packed: run the encoder on packed tokens where it and all modules after it take them.
            ``preprocess`` stays as it is: padding is taken out where the encoder begins, for which
            a forward in training waits for the GPU once, unless :func:`collate_ahead` packs the
            batches. A warning, and ``padded`` of the handle, say why a network stays padded.
            Dropout then draws other numbers than in the padded model.
        screen: whether a product in 8 bits first finds the scores of a stock SpladePooling that can
            be positive, on an H100 or H200 in 16 bits (see :func:`tilefold.ops.lsr_head`): the same
            rows and gradients, 1.25 times the documents a second with V = 250,002. A sample leaves
            out what would not gain, a fresh model's scores, say.

    Returns:
        A handle; as a context manager, it restores the model at its end.

    Raises:
        TypeError: if ``model`` is neither a SparseEncoder nor a MultiVectorEncoder, or ``screen``
            is no bool.
        ValueError: if the model has no LM head before a pooling (and no module of
            :mod:`tilefold.modules` that needs none), or changes its logits or similarities in
            another way than the operator; nothing is changed then.
        RuntimeError: if the check cannot run the model on its device.
    """
    check_impl(impl)
    _check_bits(quantize, screen)
    if isinstance(model, nn.Module):
        restore(model)
        if switched_off():
            return Acceleration(model, 0, {"all": f"{SWITCH} is set"})
    if is_multi_vector(model):
        if quantize is not None:
            raise ValueError(
                f"quantize must be None for a MultiVectorEncoder, got {quantize!r}; see quantize_tokens.",
            )
        _fuse_similarity(model, impl, check)
        _carry(model, _encoders.TokenBatchEncoder(model), "encode_token_batch")
        return Acceleration(model, 0, _packed(model, check, packed))
    if not isinstance(model, SparseEncoder):
        expected = "a sentence_transformers.SparseEncoder or MultiVectorEncoder"
        raise TypeError(
            f"model must be {expected}, got {type(model).__name__}; others write no big score matrix.",
        )
    pairs = find_pairs(model)
    with_head = [pair for pair in pairs if pair.head is not None]
    for pair in with_head:
        check_head(pair.head)
        if (
            quantize is not None
            and not (pooling := _pooling.fused_pooling(pair.pooling)).quantizable
        ):
            name = getattr(pooling, "pooling", type(pooling).__name__)
            raise ValueError(
                f"quantize must be None for pooling {name!r}, got {quantize!r}; only max runs in fp8.",
            )
        if check:
            _pooling.check_pair(pair, impl)
    for pair in pairs:
        pair.pooling.forward = _pooling.FusedForward(
            pair.pooling,
            pair.head,
            impl,
            quantize,
            pair.last,
            screen,
        )
    for pair in with_head:
        pair.head.forward = pass_hidden_states
        if _check_head_is_fused not in pair.transformer._forward_pre_hooks.values():
            pair.transformer.register_forward_pre_hook(_check_head_is_fused)
    _pooling.count_no_padding(model)
    _carry(model, _encoders.SparseBatchEncoder(model), "encode_sparse_batch")
    setattr(model, ASKED, NoReplicas(model))
    return Acceleration(
        model,
        len({id(pair.head) for pair in with_head}),
        _packed(model, check, packed),
    )


def _check_bits(quantize: object, screen: object) -> None:
    if quantize not in {None, "fp8"}:
        remedy = "For 8 bits on a CPU: tilefold export --to onnx --quantize int8."
        raise ValueError(f"quantize must be 'fp8' or None, got {quantize!r}. {remedy}")
    if not isinstance(screen, bool):
        raise TypeError(f"screen must be True or False, got {screen!r}.")


def _carry(model: Model, encoder: object, name: str) -> None:
    """Put methods on the instance; an ``encode`` of somebody else stays."""
    setattr(model, name, encoder)
    setattr(model, GRAPHS, EncodingGraphs(model))
    if "encode" not in vars(model):
        model.encode = _encoders.FusedEncode(model)


def _packed(model: Model, check: bool, packed: bool) -> dict[str, str]:
    """Why networks stay padded; the others get packed batches."""
    if not packed:
        return {"all": "packed=False was chosen"}
    padded = pack_inputs(model, check)
    if any(isinstance(found, PackedInputs) for _, _, found in replacements(model)):
        setattr(model, ASKED, NoReplicas(model))
    return padded


def restore(model: Model) -> None:
    """Undo :func:`accelerate`; does nothing to a model that is not accelerated.

    Raises:
        TypeError: if ``model`` is not a ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        got = f"{type(model).__name__}; pass the model, not its path."
        raise TypeError(f"model must be a SparseEncoder or MultiVectorEncoder, got {got}")
    for module, name, found in list(replacements(model)):
        delattr(module, name)
        if isinstance(found, PackedInputs):
            stop_packed(found.owner.model)
    for module in model.modules():
        if vars(module).get("forward") is pass_hidden_states:
            del module.forward
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _check_head_is_fused]:
            del hooks[key]


def is_accelerated(model: Model) -> bool:
    """Whether ``model`` has a fused head or fused similarities."""
    return isinstance(model, nn.Module) and any(
        isinstance(
            found,
            (
                FusedSimilarity,
                _encoders.SparseBatchEncoder,
                _pooling.FusedForward,
                _pooling.StaticTokens,
            ),
        )
        for _, _, found in replacements(model)
    )


def _check_head_is_fused(transformer: Transformer, _: object) -> None:
    """Before each forward: raise if adding or merging an adapter has replaced the head's layer."""
    if torch.compiler.is_compiling():
        return
    head = transformer.model.get_output_embeddings()
    if vars(head).get("forward") is not pass_hidden_states:
        why = "an adapter was added, merged or removed, or the head was replaced"
        got = f"a {type(head).__name__} in its place ({why}); call accelerate(model) again."
        raise RuntimeError(f"the LM head must be the one that accelerate(model) saw, got {got}")


def _fuse_similarity(model: Model, impl: str, check: bool) -> None:
    """Put :class:`FusedSimilarity` on the instance, after a ``check`` against the model's own
    scores if asked for.
    """
    stock = next(kind for kind in type(model).__mro__ if kind.__name__ == "MultiVectorEncoder")
    for name in _METHODS:
        if name in vars(model) or getattr(type(model), name) is not getattr(stock, name):
            got = f"a {type(model).__name__}; use maxsim in it."
            raise ValueError(f"model must score with MultiVectorEncoder.{name}, got {got}")
    fused = [FusedSimilarity(model, name, impl) for name in _METHODS]
    for function in fused if check else []:
        _check_similarity(model, function)
    vars(model).update({function.name: function for function in fused})


def _check_similarity(model: Model, function: FusedSimilarity) -> None:
    """Compare both on a few vectors, on the model's device and in its dtype."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(1))
    wave = (
        torch.arange(10 * 16, dtype=torch.float32)
        .sin()
        .view(10, 16)
        .to(parameter.device, parameter.dtype)
    )
    queries, documents = [wave[:3], wave[3:4]], [wave[4:8], wave[8:]]
    try:
        with torch.no_grad():
            expected, got = (
                getattr(model, function.name)(queries, documents),
                function(queries, documents),
            )
        difference, allowed = (
            apart(got, expected),
            SIMILARITY_TOLERANCE * expected.abs().max().item(),
        )
    except Exception as error:
        why = f"it raised {type(error).__name__}: {error}; move it to its device first, or pass check=False."
        check = f"score four short sequences on {parameter.device} for the check of accelerate()"
        raise RuntimeError(f"model must be able to {check}, but {why}") from error
    if not difference <= allowed:
        found = f"{difference:.3g} (shapes {list(got.shape)} and {list(expected.shape)}); leave such a model stock."
        stock = f"model.{function.name} within {allowed:.3g} on four short sequences"
        raise ValueError(f"fused scores must equal those of {stock}, got {found}")


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
    """Encode ``texts`` to a ``torch.sparse_csr`` matrix ``[len(texts), V]`` on the CPU, in the
    order of ``texts``.

    Rows equal those of ``model.encode(texts, max_active_dims=top_k)``, up to the order in which
    encoder and head evaluate sums. A model that is not accelerated is accelerated for the duration
    of the call. By the matrix's attribute ``vocabulary_fingerprint``,
    :class:`tilefold.retrieval.SparseVectors` refuses vectors of another vocabulary. More than 32
    texts are tokenised ahead, and encoded in batches of equal numbers of tokens.

    Args:
        model: a ``sentence_transformers.SparseEncoder``.
        texts: any number of texts, in a list or any other sequence: rows follow positions, also
            those of a pandas Series, whatever its index.
        task: ``"query"``, ``"document"`` or ``None``: the route of a Router, and the name of the
            default prompt.
        prompt_name: name of a prompt of the model; by default that of the task, if the model has
            one.
        prompt: a prompt to put before every text; takes precedence over ``prompt_name``.
        batch_size, batch_tokens: texts, at most, and tokens encoded at a time; by default what
            suits the device.
        top_k: keep at most this many entries per row; by default the model's ``max_active_dims``.
        min_weight: keep entries strictly greater than this.

    Raises:
        TypeError: if ``texts`` is one string, a mapping or a set, or holds what is no string, or
            ``model`` is not a SparseEncoder.
        ValueError: if ``batch_size`` or ``batch_tokens`` is not positive, or the model has no
            prompt of that name.
    """
    check_instance("model", model, SparseEncoder, "a loaded model")
    texts = list_of_texts("texts", texts)
    for name, value in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value}.")
    with nullcontext() if graphs_of(model) or is_accelerated(model) else accelerate(model):
        options = _encoders.sparse_options(model, top_k, min_weight)
        prompt = prompt_of(model, task, prompt_name) if prompt is None else prompt
        if switched_off():
            with in_eval_mode(model):
                return _stock_rows(
                    model,
                    texts,
                    options,
                    task=task,
                    prompt=prompt,
                    batch_size=batch_size or FEW,
                )
        if len(texts) > FEW or batch_tokens is not None:
            with in_eval_mode(model):
                stream = SparseStream(
                    model,
                    options,
                    task=task,
                    prompt=prompt,
                    batch_size=batch_size,
                    batch_tokens=batch_tokens,
                )
                batches = list(_encoders.batches_of(stream, texts, lambda done: None))
        else:
            order, size = sorted(range(len(texts)), key=lambda i: -len(texts[i])), batch_size or FEW
            cuts = [order[start : start + size] for start in range(0, len(order), size)]
            encoded = (
                encode_batch(model, [texts[i] for i in cut], task, prompt, options) for cut in cuts
            )
            batches = [
                batch._replace(positions=cut) for batch, cut in zip(encoded, cuts, strict=True)
            ]
        vocab_size = (
            0
            if batches
            else _encoders.fused_vocab_size(model) or int(model.get_embedding_dimension())
        )
        rows = as_csr(batches, len(texts), vocab_size)
    rows.vocabulary_fingerprint = vocabulary_fingerprint(model.tokenizer)  # type: ignore[attr-defined]
    return rows


def _stock_rows(
    model: Model,
    texts: list[str],
    options: SparseOptions,
    **how: object,
) -> Tensor:
    """Rows of the model's own ``encode``, as :func:`encode_sparse` returns them."""
    made = {"convert_to_tensor": True, "convert_to_sparse_tensor": True, "save_to_cpu": True}
    found = model.encode(
        texts,
        max_active_dims=options.top_k,
        show_progress_bar=False,
        **made,
        **how,
    ).coalesce()
    kept = found.values() > options.min_weight
    entries = found.indices()[:, kept], found.values()[kept]
    rows = torch.sparse_coo_tensor(*entries, found.shape, check_invariants=True).to_sparse_csr()
    rows.vocabulary_fingerprint = vocabulary_fingerprint(model.tokenizer)  # type: ignore[attr-defined]
    return rows
