"""The LSR head as ``torch.library`` operators, for full-graph ``torch.compile``; eager calls go past the dispatcher.

There is one operator and one gradient for all poolings. The plans of launches that kernels made for a call are kept by
what makes calls alike: a call with a plan needs no checks and no dispatch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.call_cache import CallCache, Key, call_key, gradient_key, is_aligned
from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.fallback import KernelUnavailableError, triton_or_tiled
from tilefold.ops._shared.impl import chosen_impl, host_may_read, settled
from tilefold.ops._shared.internals import apply_of, is_on_current
from tilefold.ops._shared.library import (
    define_op,
    forbid_double_backward,
    gradient_needs_dispatcher,
    is_plain,
    run,
    runs_at_once,
)
from tilefold.ops._shared.winners import winner_dtype
from tilefold.ops.lsr_head import _quantized, _tiled
from tilefold.ops.lsr_head._problem import (
    POOLINGS,
    BackwardCall,
    BackwardPlan,
    ForwardPlan,
    Gradients,
    HeadOptions,
    Needs,
    Saved,
    Tokens,
    Vocabulary,
    winners_shape,
)

HEAD = (
    "Tensor hidden, Tensor? attention_mask, Tensor? cu_seqlens, Tensor weight, Tensor? weight_scale, Tensor? bias,"
    " str pooling, str activation, float logit_scale, ScalarType out_dtype, ScalarType compute_dtype, bool training,"
    " str impl"
)
HEAD_ARGUMENTS = HEAD.count(",") + 1
FORWARD_PLANS: CallCache[ForwardPlan] = CallCache()
BACKWARD_PLANS: CallCache[BackwardPlan] = CallCache()


def _records(args: tuple[Any, ...]) -> tuple[Tokens, Vocabulary, HeadOptions]:
    return Tokens(*args[:3]), Vocabulary(*args[3:6]), HeadOptions(*args[6:HEAD_ARGUMENTS])


def _settled(tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions) -> tuple[str, str]:
    """The operator as people call it, and the implementation that it runs."""
    if vocabulary.weight_scale is not None:
        chosen = _quantized.chosen_quantized_impl(tokens.hidden, options.impl)
        return _quantized.QUANTIZED_HEAD, settled(options.impl, chosen)
    return "lsr_head", settled(options.impl, chosen_impl("lsr_head", "hidden", tokens.hidden, options.impl))


def _scores(
    hidden: Tensor, tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, key: Key | None
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[B, V]`` and winners; ``hidden`` for :func:`run` to find the device, ``key`` to keep a plan under."""
    operator, impl = _settled(tokens, vocabulary, options)
    if tokens.cu_seqlens is not None and host_may_read(hidden.device, impl):
        check_cu_seqlens("cu_seqlens", tokens.cu_seqlens, hidden.size(0), "hidden")

    def by_kernels() -> tuple[Tensor, Tensor | None]:
        from tilefold.ops.lsr_head import _triton

        found = call_key((*tokens, *vocabulary), options) if key is None else key
        plan = FORWARD_PLANS.find(found)
        if plan is not None:
            try:
                return plan(tokens, vocabulary)
            except KernelUnavailableError:  # for these addresses: another plan may do
                FORWARD_PLANS.forget(found)
        plan, result = _triton.forward(tokens, vocabulary, options, found is not None and is_aligned(found))
        if found is not None:
            FORWARD_PLANS.keep(found, plan)
        return result

    def by_torch() -> tuple[Tensor, Tensor | None]:
        quantized = vocabulary.weight_scale is not None
        return (_quantized.forward if quantized else _tiled.forward)(tokens, vocabulary, options)

    return triton_or_tiled(operator, impl, hidden.device, by_kernels, by_torch)


@define_op("lsr_head", f"({HEAD}) -> (Tensor scores, Tensor winners)")
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    tokens, vocabulary, options = _records(args)
    scores, winners = _scores(tokens.hidden, tokens, vocabulary, options, None)
    if winners is None:
        shape = winners_shape(tokens, vocabulary.weight.size(0), options)
        winners = scores.new_empty(shape, dtype=winner_dtype(tokens.length_bound))
    return scores, winners


@torch.library.register_fake("tilefold::lsr_head")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    tokens, vocabulary, options = _records(args)
    hidden, vocab = tokens.hidden, vocabulary.weight.size(0)
    return (
        hidden.new_empty((tokens.batch, vocab), dtype=options.out_dtype),
        hidden.new_empty(winners_shape(tokens, vocab, options), dtype=winner_dtype(tokens.length_bound)),
    )


def _gradients(
    dscores: Tensor,
    saved: Saved,
    tokens: Tokens,
    vocabulary: Vocabulary,
    options: HeadOptions,
    needs: Needs,
    main_grad: Tensor | None,
    key: Key | None,
) -> Gradients:
    """Gradients where they are needed; that of the weight is added to ``main_grad``, if given, and not returned.

    ``key`` is that of their plan, which is worked out anew without one.
    """
    plan = BACKWARD_PLANS.find(key)
    if plan is not None:
        try:
            return plan(dscores, saved, tokens, vocabulary, main_grad)
        except KernelUnavailableError:
            BACKWARD_PLANS.forget(key)

    call = BackwardCall(dscores, saved, tokens, vocabulary, options, needs)

    def by_kernels() -> Gradients:
        from tilefold.ops.lsr_head import _triton

        plan = _triton.plan_backward(call, key is not None and is_aligned(key), main_grad is not None)
        gradients = plan(dscores, saved, tokens, vocabulary, main_grad)
        if key is not None:
            BACKWARD_PLANS.keep(key, plan)
        return gradients

    def by_torch() -> Gradients:
        return _tiled.backward(call, main_grad)

    operator, impl = _settled(tokens, vocabulary, options)
    return triton_or_tiled(operator, impl, tokens.hidden.device, by_kernels, by_torch)


@define_op(
    "lsr_head_backward",
    f"(Tensor dscores, Tensor? scores, Tensor? winners, {HEAD}, bool need_hidden, bool need_weight,"
    " ScalarType? bias_dtype) -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
)
def _backward(dscores: Tensor, scores: Tensor | None, winners: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    needs = Needs(*args[HEAD_ARGUMENTS:])
    saved, (tokens, vocabulary, options) = Saved(scores, winners), _records(args)
    key = call_key((dscores, *saved, *tokens, *vocabulary), (options, needs))
    gradients = _gradients(dscores, saved, tokens, vocabulary, options, needs, None, key)
    return tuple(none_to_empty(gradient, dscores) for gradient in gradients)


@torch.library.register_fake("tilefold::lsr_head_backward")
def _(dscores: Tensor, scores: Tensor | None, winners: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    (tokens, vocabulary, _), needs = _records(args), Needs(*args[HEAD_ARGUMENTS:])
    hidden, weight = tokens.hidden, vocabulary.weight
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs.hidden else dscores.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if needs.weight else dscores.new_empty(0),
        dscores.new_empty(0) if needs.bias is None else weight.new_empty(weight.size(0), dtype=needs.bias),
    )


def none_to_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors only: an empty one stands for a gradient that nobody asked for."""
    return like.new_empty(0) if gradient is None else gradient


forbid_double_backward("lsr_head_backward", "lsr_head")


def _save(
    ctx: Any, tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, output: tuple[Tensor, Tensor | None]
) -> None:
    reads = POOLINGS[options.pooling].reads
    scores, winners = output if "scores" in reads else (None, None)
    mask = tokens.attention_mask if "attention_mask" in reads else None
    bias = vocabulary.bias if "bias" in reads else None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores, winners, tokens.hidden, mask, tokens.cu_seqlens, vocabulary.weight, None, bias)
    ctx.options = options
    ctx.bias_dtype = None if vocabulary.bias is None else vocabulary.bias.dtype


def _by_operator(ctx: Any, dscores: Tensor, needs: Needs) -> Gradients:
    """Gradients of a call whose context was filled by :func:`_save`, by the registered operator."""
    gradients = torch.ops.tilefold.lsr_head_backward(dscores, *ctx.saved_tensors, *ctx.options, *needs)
    asked = (needs.hidden, needs.weight, needs.bias is not None)
    dhidden, dweight, dbias = (value if given else None for value, given in zip(gradients, asked, strict=True))
    return dhidden, dweight, dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    _save(ctx, *_records(inputs), output)


def _registered_gradients(ctx: Any, dscores: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden = dweight = dbias = None
    if dscores is not None:
        if not ctx.options.training:
            raise RuntimeError("tilefold::lsr_head needs training=True where a gradient is asked for; call lsr_head.")
        wanted = ctx.needs_input_grad
        needs = Needs(wanted[0], wanted[3], ctx.bias_dtype if wanted[5] else None)
        dhidden, dweight, dbias = _by_operator(ctx, dscores, needs)
    return dhidden, None, None, dweight, None, dbias, *(None,) * len(HeadOptions._fields)


torch.library.register_autograd("tilefold::lsr_head", _registered_gradients, setup_context=_setup_context)


class Call(NamedTuple):
    """What a head is called with, besides what has gradients.

    Attributes:
        plan: of an earlier call with the same ``key``, if there was one.
        key: of the call, ``None`` where it cannot be kept.
    """

    plan: ForwardPlan | None
    key: Key | None
    tokens: Tokens
    vocabulary: Vocabulary
    options: HeadOptions
    main_grad: Tensor | None

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """Scores and winners, by the plan if there is one."""
        if self.plan is not None:
            try:
                return self.plan(self.tokens, self.vocabulary)
            except KernelUnavailableError:
                FORWARD_PLANS.forget(self.key)
        hidden = self.tokens.hidden
        return run(_scores, hidden, self.tokens, self.vocabulary, self.options, self.key)  # type: ignore[no-any-return]


def _needs(ctx: Any) -> Needs:
    need_hidden, need_weight, need_bias, _ = ctx.needs_input_grad
    return Needs(need_hidden, need_weight, ctx.bias_dtype if need_bias else None)


class _Head(torch.autograd.Function):
    """The registered operator and its gradient without the dispatcher, for plain tensors; see ``is_plain``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        output = call.scores()
        _save(ctx, call.tokens, call.vocabulary, call.options, output)
        ctx.main_grad = call.main_grad
        ctx.plan = FORWARD_PLANS.find(call.key) if call.plan is None else call.plan
        return output[0]

    @staticmethod
    def backward(ctx: Any, dscores: Tensor | None) -> tuple[Tensor | None, ...]:
        if dscores is None:
            return None, None, None, None
        wanted, main_grad = ctx.needs_input_grad, ctx.main_grad
        if gradient_needs_dispatcher(dscores):
            if main_grad is not None:
                raise RuntimeError(
                    "weight_main_grad cannot be used with create_graph=True or is_grads_batched=True; leave one of "
                    "them out."
                )
            return *_by_operator(ctx, dscores, _needs(ctx)), None
        saved, plan = ctx.saved_tensors, ctx.plan
        key = None if plan is None else gradient_key(plan, wanted, dscores, (*saved, main_grad))
        scores, winners, hidden, mask, cu_seqlens, weight, weight_scale, bias = saved
        records = Saved(scores, winners), Tokens(hidden, mask, cu_seqlens), Vocabulary(weight, weight_scale, bias)
        found = BACKWARD_PLANS.find(key)
        if found is not None and runs_at_once(dscores):
            try:
                return *found(dscores, *records, main_grad), None
            except KernelUnavailableError:  # for these addresses: another plan may do
                BACKWARD_PLANS.forget(key)
        return *run(_gradients, dscores, *records, ctx.options, _needs(ctx), main_grad, key), None


_APPLY = apply_of(_Head)  # there is no key under transforms


def again(key: Key | None, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None) -> Tensor | None:
    """Scores of a call like an earlier one, or ``None`` if there was none: then it has to be checked."""
    plan = FORWARD_PLANS.find(key)
    if plan is None:
        return None
    if not is_on_current(tokens.hidden):
        with torch.cuda.device(tokens.hidden.device):
            return again(key, tokens, vocabulary, main_grad)
    if plan.options.training:
        call = Call(plan, key, tokens, vocabulary, plan.options, main_grad)
        return _APPLY(tokens.hidden, vocabulary.weight, vocabulary.bias, call)  # type: ignore[no-any-return]
    try:
        return plan(tokens, vocabulary)[0]
    except KernelUnavailableError:  # for these addresses: a full call finds what can run
        FORWARD_PLANS.forget(key)
        return None


def head(
    key: Key | None, tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, main_grad: Tensor | None
) -> Tensor:
    """Scores ``[B, V]`` of a call that passed the checks; its plan is kept for calls of the same ``key``."""
    if is_plain(*tokens, *vocabulary):
        return _called(Call(None, key, tokens, vocabulary, options, main_grad))
    if main_grad is not None:
        raise RuntimeError(
            "weight_main_grad cannot be used under torch.compile or with tensor subclasses; leave it out there, "
            "and add weight.grad to it after backward."
        )
    return torch.ops.tilefold.lsr_head(*tokens, *vocabulary, *options)[0]  # type: ignore[no-any-return]


def _called(call: Call) -> Tensor:
    if call.options.training:
        vocabulary = call.vocabulary
        given = (call.tokens.hidden, vocabulary.weight, vocabulary.bias)
        return _Head.apply(*given, call)  # type: ignore[no-any-return, no-untyped-call]
    return call.scores()[0]
