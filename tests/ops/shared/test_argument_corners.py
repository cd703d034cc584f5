"""Wrong kinds of arguments to any operator, no elements, torch's own defaults, transforms, and
copies.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_installed
from tests.refusals import refused
from tilefold.ops import (
    QuantizedTokens,
    QuantizedWeight,
    entmax,
    entmax_attention,
    lsr_head,
    lsr_head_sparse,
    maxsim,
    quantize_tokens,
    quantize_weight,
    token_scatter,
    token_scatter_sparse,
)

D = 8


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors that are made without a device lie on the meta device, and without a dtype have fp64."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


PADDED, ENDS = torch.zeros(2, 3, 4), torch.tensor([0, 2, 6], dtype=torch.int32)
HEADED, TOKEN_IDS = torch.zeros(1, 2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
WEIGHTS: dict[str, Tensor] = {"weight": torch.zeros(5, 4), "bias": torch.zeros(5)}
VOCAB: dict[str, Any] = {"vocab_size": 9}
# of each function a padded and a packed call: floating tensors, of which the first decides, and
# other arguments
KINDS: list[tuple[Callable[..., Any], list[tuple[dict[str, Tensor], dict[str, Any]]]]] = [
    *(
        (
            function,
            [
                ({"hidden": PADDED} | WEIGHTS, {"attention_mask": torch.ones(2, 3)}),
                ({"hidden": PADDED.flatten(0, 1)} | WEIGHTS, {"cu_seqlens": ENDS}),
            ],
        )
        for function in (lsr_head, lsr_head_sparse)
    ),
    *(
        (
            function,
            [
                (
                    {"weights": PADDED[..., 0]},
                    VOCAB | {"input_ids": TOKEN_IDS, "attention_mask": torch.ones(2, 3)},
                ),
                (
                    {"weights": torch.zeros(6)},
                    VOCAB | {"input_ids": TOKEN_IDS.flatten(), "cu_seqlens": ENDS},
                ),
            ],
        )
        for function in (token_scatter, token_scatter_sparse)
    ),
    (
        maxsim,
        [
            (
                {"queries": PADDED, "documents": PADDED},
                {"query_mask": torch.ones(2, 3), "document_mask": torch.ones(2, 3)},
            ),
            (
                {"queries": PADDED.flatten(0, 1), "documents": PADDED.flatten(0, 1)},
                {"cu_seqlens_q": ENDS, "cu_seqlens_d": ENDS},
            ),
            (
                {"queries": PADDED, "documents": PADDED},
                {"pairing": torch.zeros(3, 2, dtype=torch.int64)},
            ),
        ],
    ),
    (
        entmax_attention,
        [
            (dict.fromkeys("qkv", HEADED), {"key_padding_mask": torch.ones(1, 3)}),
            (
                dict.fromkeys("qkv", HEADED.flatten(0, 1).view(6, 1, 4)),
                {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS},
            ),
        ],
    ),
]


@pytest.mark.parametrize(
    ("function", "floats", "others"),
    [(function, *call) for function, calls in KINDS for call in calls],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value),
)
def test_other_kinds_of_arguments_are_refused_by_name(
    function: Any,
    floats: dict[str, Tensor],
    others: dict[str, Any],
) -> None:
    given, first = floats | others, next(iter(floats))
    function(**given)
    for name, value in given.items():
        if name == "vocab_size":
            continue
        wrong: list[tuple[Any, type[Exception], str]] = []
        if name != "pairing":
            wrong = [
                ([[1.0]], TypeError, f"{name} must be a torch.Tensor, got list; convert it first."),
            ]
        if name in floats:
            known = "float16, bfloat16, float32, float64"
            wrong += [
                (
                    value.int(),
                    TypeError,
                    f"{name} must have dtype {known}, got int32; cast it with .to(torch.",
                ),
            ]
        if name in floats and name not in (first, "bias") and function is not entmax_attention:
            wrong += [
                (
                    value.half(),
                    TypeError,
                    f"{name} must have the dtype of {first} (float32), got float16; cast one",
                ),
            ]
        if name != first:
            said = f"{name} must be on the device of {first} (cpu), got meta; move it with .to({first}.device)."
            wrong += [(value.to("meta"), ValueError, said)]
        if "mask" in name:
            said = f"{name} must be bool, integer or floating, got torch.complex64."
            wrong += [(value.to(torch.complex64), TypeError, said)]
        elif name not in floats:
            said = f"{name} must have dtype int32, int64, got float32; use {name}.{'int' if 'cu_' in name else 'long'}()."
            wrong += [(value.float(), TypeError, said)]
        if "cu_" in name:
            wrong += [
                (each, ValueError, f"{name} must have shape [") for each in (value[None], value[:0])
            ]
        for other, kind, said in wrong:
            refused(kind, f"^{re.escape(said)}", function, **given | {name: other})


@pytest.mark.parametrize("impl", ["tiled", "reference"])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_attention_over_nothing_has_a_gradient_of_zeros(
    impl: str,
    sizes: tuple[int, int, int],
) -> None:
    batch, nq, nk = sizes
    q, k, v = (torch.randn(batch, 2, n, D, requires_grad=True) for n in (nq, nk, nk))
    out = entmax_attention(q, k, v, impl=impl)
    assert out.shape == q.shape
    assert not out.any()
    out.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (q, k, v))
    assert entmax_attention(*(leaf.to("meta") for leaf in (q, k, v)), impl=impl).shape == q.shape


def test_groups_of_no_query_keep_the_number_of_their_documents() -> None:
    queries, documents = torch.randn(0, 3, D, requires_grad=True), torch.randn(0, 4, 5, D)
    scores = maxsim(queries, documents, pairing="grouped")
    assert scores.shape == (0, 4)
    scores.sum().backward()


PATHS = ("auto", "reference")
IDS_HERE = torch.tensor([[1, 2, 1], [4, 4, 0]])
RESULTS: list[Callable[[Tensor], Any]] = [
    lambda x: lsr_head_sparse(x.expand(2, 3, D), x.new_ones(9, D), top_k=3),
    lambda x: token_scatter_sparse(x[:, :, 0].detach(), IDS_HERE, 9),
    lambda x: token_scatter(x[:, :, 0], IDS_HERE, 9, reduce="sum"),
    *[
        lambda x, impl=impl: entmax_attention(*[x[None].expand(1, 2, 3, D)] * 3, impl=impl)
        for impl in PATHS
    ],
]


@pytest.mark.parametrize("call", RESULTS)
def test_results_lie_where_the_arguments_do_and_have_their_dtype_whatever_torchs_defaults(
    elsewhere: None,
    call: Callable[[Tensor], Any],
) -> None:
    given = torch.rand(2, 3, 1, device="cpu", dtype=torch.float32, requires_grad=True)
    scores = call(given)
    assert scores.device.type == "cpu" and scores.dtype == torch.float32
    if scores.requires_grad:
        scores.sum().backward()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.testing.assert_close(*(each.to_dense() for each in (scores, call(given))))


X = torch.rand(2, 3, D, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[1, 2, 1, 0, 0, 3, 3, 3]] * 3)


OPERATORS: dict[str, Callable[[Tensor, str], Any]] = {
    "lsr_head": lambda x, impl: lsr_head(x, X[0], impl=impl),
    "lsr_head sum": lambda x, impl: lsr_head(x, X[0], pooling="sum", impl=impl),
    "lsr_head cls": lambda x, impl: lsr_head(x, X[0], pooling="cls", impl=impl),
    "maxsim": lambda x, impl: maxsim(x, X.flip(0), impl=impl),
    "token_scatter": lambda x, impl: token_scatter(x[0], IDS, 9, impl=impl),
    "entmax": lambda x, impl: entmax(x, impl=impl),
    "entmax_attention": lambda x, impl: entmax_attention(x[None], X[None], X[None], impl=impl),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_sparse_and_nested_tensors_are_refused_by_name(
    operator: Callable[[Tensor, str], Tensor],
) -> None:
    for other, said in (
        (
            X.to_sparse(),
            r"\w+ must be a dense tensor, got layout torch\.sparse_coo; use \w+\.to_dense\(\)",
        ),
        (
            torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged),
            r"\w+ must be a dense tensor, got a nested one",
        ),
    ):
        refused(TypeError, said, as_it_is, operator, other)


def as_it_is(operator: Callable[[Tensor, str], Any], x: Tensor) -> Any:
    """The operator on ``x`` itself, which may have no slices and no further dimensions."""
    if operator is OPERATORS["token_scatter"]:
        return token_scatter(x, IDS, 9)
    if operator is OPERATORS["entmax_attention"]:
        return entmax_attention(x, x, x)
    return operator(x, "auto")


BF16 = torch.bfloat16
INTERPRETED_BF16: dict[str, Callable[[Tensor], object]] = {
    "lsr_head": lambda x: lsr_head(x.to(BF16), X[0].to(BF16), impl="triton"),
    "lsr_head cls": lambda x: lsr_head(x.to(BF16), X[0].to(BF16), pooling="cls", impl="triton"),
    "scores of lsr_head": lambda x: lsr_head(x, X[0], out_dtype=BF16, impl="triton"),
    "fp8 lsr_head": lambda x: lsr_head(x.to(BF16), quantize_weight(X[0]), impl="triton"),
    "entmax": lambda x: entmax(x.to(BF16), impl="triton"),
    "entmax_attention": lambda x: entmax_attention(*[x[None].to(BF16)] * 3, impl="triton"),
}


@pytest.mark.skipif(not triton_installed(), reason="triton is not installed")
@pytest.mark.parametrize("call", INTERPRETED_BF16.values(), ids=INTERPRETED_BF16)
def test_interpreted_kernels_refuse_bf16_which_the_interpreter_takes_for_integers(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Tensor], object],
) -> None:
    for room in ("entmax", "entmax_attention", "lsr_head", "maxsim", "token_scatter"):
        importlib.import_module(
            f"tilefold.ops.{room}.plans",
        )  # kernels that are first imported below are interpreted
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refused(
        RuntimeError,
        r"dtypes must be float16 or float32 for impl='triton'.*got bfloat16: it mult",
        call,
        X,
    )
    with (
        torch.autocast("cpu", dtype=BF16),
        pytest.raises(RuntimeError, match=r"dtypes must be float16 or float32 for impl='triton'"),
    ):
        lsr_head(X, X[0], impl="triton")


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_function_transforms_and_forward_mode_are_those_of_the_reference_or_an_error_that_says_so(
    operator: Callable[[Tensor, str], Tensor],
) -> None:
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.vjp):

        def run(impl: str, transform: Any = transform) -> object:
            summed = transform is torch.func.grad
            function: Any = lambda x: operator(x, impl).sum() if summed else operator(x, impl)  # noqa: E731
            return transform(function, X) if transform is torch.func.vjp else transform(function)(X)

        run("reference")
        said = r"impl must be 'reference' under torch\.func\.grad, vjp and jacrev, got 'auto'"
        refused(RuntimeError, said, run, "auto")
    direction = torch.arange(X.numel()).view_as(X) / X.numel()
    x = X.clone().requires_grad_()
    weights = operator(X, "reference").detach()
    (gradient,) = torch.autograd.grad((operator(x, "auto") * weights).sum(), x)
    _, tangent = torch.func.jvp(
        lambda t: (operator(t, "reference") * weights).sum(),
        (X,),
        (direction,),
    )
    torch.testing.assert_close(tangent, (gradient * direction).sum(), rtol=1e-4, atol=1e-6)
    with pytest.raises(
        RuntimeError,
        match="impl must be 'reference' in forward-mode differentiation",
    ):
        torch.func.jvp(lambda t: operator(t, "auto"), (X,), (direction,))


ROWS_OF_SIX = torch.ones(6, D)


def attend_to_six(name: str, offsets: Tensor, impl: str) -> Any:
    """Six keys in all; where the offsets of keys are wrong, those of queries are right and as many."""
    if name == "cu_seqlens_q":
        return entmax_attention(
            *[ROWS_OF_SIX[:, None]] * 3,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            impl=impl,
        )
    rows, right = (6 if len(offsets) > 1 else 0), torch.tensor([0] + [6] * (len(offsets) - 1))
    keys = ROWS_OF_SIX[:, None]
    return entmax_attention(
        keys[:rows],
        keys,
        keys,
        cu_seqlens_q=right,
        cu_seqlens_k=offsets,
        impl=impl,
    )


# name of the offsets, unit and tensor that they divide, and a call
DIVIDED: list[tuple[str, str, str, Callable[[Tensor, str], Any]]] = [
    *(
        (
            "cu_seqlens",
            "rows",
            "hidden",
            lambda cu, impl, p=p: lsr_head(ROWS_OF_SIX, X[0], cu_seqlens=cu, pooling=p, impl=impl),
        )
        for p in ("max", "sum", "mean", "cls", "last")
    ),
    (
        "cu_seqlens",
        "tokens",
        "weights",
        lambda cu, impl: token_scatter(
            torch.ones(6),
            IDS.flatten()[:6],
            9,
            cu_seqlens=cu,
            impl=impl,
        ),
    ),
    (
        "cu_seqlens_q",
        "rows",
        "queries",
        lambda cu, impl: maxsim(ROWS_OF_SIX, X, cu_seqlens_q=cu, impl=impl),
    ),
    (
        "cu_seqlens_d",
        "rows",
        "documents",
        lambda cu, impl: maxsim(X, ROWS_OF_SIX, cu_seqlens_d=cu, impl=impl),
    ),
    *(
        (
            f"cu_seqlens_{side}",
            "rows",
            side,
            lambda cu, impl, s=side: attend_to_six(f"cu_seqlens_{s}", cu, impl),
        )
        for side in "qk"
    ),
]
NO_LENGTHS = {
    (1, 2, 6): "[0] = 1", (-1, 2, 6): "[0] = -1", (0, 4, 2, 6): "[2] = 2 after 4", (0, -2, 6): "[1] = -2 after 0",
    (0, 2, 5): "[-1] = 5 with 6 {} in {}", (0, 2, 7): "[-1] = 7 with 6 {} in {}", (0,): "[-1] = 0 with 6 {} in {}",
    (0, 2**31 - 1, -2, 6): "[2] = -2 after 2147483647",  # in 32 bits no difference is negative
}  # fmt: skip


@pytest.mark.parametrize("values", NO_LENGTHS, ids=str)
@pytest.mark.parametrize("impl", ["reference", "tiled"])
@pytest.mark.parametrize(("name", "unit", "tensor", "call"), DIVIDED)
def test_offsets_that_are_no_cumulative_lengths(
    name: str,
    unit: str,
    tensor: str,
    call: Callable[[Tensor, str], Any],
    impl: str,
    values: tuple[int, ...],
) -> None:
    problem = name + NO_LENGTHS[values].format(unit, tensor)
    said = (
        f"{name} must start with 0, never fall and end at the number of {unit} T of {tensor}, got "
        f"{problem}; build it "
        "as the cumulative sum of the sequence lengths with a 0 in front."
    )
    refused(ValueError, f"^{re.escape(said)}$", call, torch.tensor(values, dtype=torch.int32), impl)


UNHASHABLE = {
    "lsr_head": ("pooling", "activation", "out_dtype", "impl", "logit_scale"),
    "maxsim": ("pairing", "reduction", "mask_mode", "impl", "temperature"),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, each) for name, options in UNHASHABLE.items() for each in options],
)
def test_options_of_no_hashable_type_are_refused_by_name(name: str, option: str) -> None:
    function: Any = {"lsr_head": lsr_head, "maxsim": maxsim}[name]
    refused(
        (TypeError, ValueError),
        option,
        function,
        X,
        X[0] if name == "lsr_head" else X,
        **{option: ["max"]},
    )


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def parts(value: QuantizedWeight | QuantizedTokens) -> tuple[Tensor, Tensor]:
    return value.values, value.scale if isinstance(value, QuantizedWeight) else value.scales


@pytest.mark.parametrize("again", [pickled, saved, copy.deepcopy, copy.copy])
@pytest.mark.parametrize(
    "make",
    [
        lambda: quantize_weight(ROWS),
        lambda: quantize_weight(ROWS)[2:5],
        lambda: quantize_tokens(ROWS, "fp8"),
        lambda: quantize_tokens(ROWS.view(2, 3, 4), "int8"),
    ],
    ids=["weight", "rows of a weight", "fp8 tokens", "int8 tokens"],
)
def test_copies_hold_the_same_numbers(
    make: Callable[[], QuantizedWeight | QuantizedTokens],
    again: Callable[[Any], Any],
) -> None:
    original = make()
    other = again(original)
    assert type(other) is type(original)
    for mine, theirs in zip(parts(other), parts(original), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine.data_ptr() == theirs.data_ptr()) == (again is copy.copy)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_pickled_slice_does_not_carry_the_whole_weight() -> None:
    assert len(pickle.dumps(quantize_weight(torch.randn(1000, 64))[:2])) < 2000
