"""The head over a sharded vocabulary equals the head on one device, in real process groups.

Functions that take a :class:`Rank` run in every process of a group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import vocabulary_parallel
from tests.distributed.ranks import Rank, Ranks
from tilefold.nn import LSRHead
from tilefold.nn.parallel import VocabularyParallel
from tilefold.ops import lsr_head, lsr_head_sparse
from tilefold.testing import assert_within_budget, relative_error
from tilefold.testing.lsr_head import (
    LSRHeadInputs,
    lsr_head_inputs,
    lsr_head_results,
    lsr_head_truth,
    with_one_answer,
)


@dataclass(frozen=True)
class HeadCase:
    """Inputs and options of a head.

    Attributes:
        size: Numbers of sequences, tokens, hidden dimensions and vocabulary entries.
        layout: Layout of the tokens.
        dtype: Data type of the operands.
        bias: Whether the head has a bias.
        options: Keyword arguments of :func:`lsr_head`.
    """

    size: tuple[int, int, int, int] = (5, 9, 16, 53)
    layout: str = "holes"
    dtype: torch.dtype = torch.float32
    bias: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    HeadCase(),
    HeadCase(size=(3, 7, 16, 24), layout="packed"),
    HeadCase(layout="full", bias=False),
    HeadCase(dtype=torch.bfloat16, options={"activation": "softplus", "logit_scale": 0.5}),
    HeadCase(dtype=torch.float64, options={"activation": "none"}),
    HeadCase(options={"pooling": "sum"}),
    HeadCase(layout="packed", dtype=torch.bfloat16, options={"pooling": "mean"}),
    HeadCase(options={"pooling": "cls", "activation": "log1p_log1p_relu"}),
    HeadCase(layout="packed", options={"pooling": "last"}),
    HeadCase(dtype=torch.bfloat16, options={"out_dtype": torch.float32}),
    HeadCase(options={"impl": "reference"}),
]
TINY_VOCABULARIES = [
    HeadCase(size=(4, 6, 16, vocab_size), dtype=torch.float64) for vocab_size in (29, 4, 2, 1)
]
RANKS_WITHOUT_COLUMNS = [
    HeadCase(size=(4, 6, 16, 4), layout="packed"),
    HeadCase(size=(4, 6, 16, 2)),
]
BERT_VOCABULARY = [HeadCase(size=(2, 5, 16, 30522), layout="right")]


def mesh_of(rank: Rank) -> DeviceMesh:
    return init_device_mesh(rank.device.type, (rank.size,))


def sharded_leaves(
    inputs: LSRHeadInputs,
    mesh: DeviceMesh,
    placements: list[Any] | None = None,
) -> tuple[Any, Any, Any]:
    """DTensors that need a gradient: hidden states, weight and bias.

    Args:
        inputs: The problem.
        mesh: Mesh of the DTensors.
        placements: Placements of weight and bias, by default sharded over the vocabulary. Hidden
            states are replicated.
    """
    if placements is None:
        placements = [Shard(0)]
    hidden = DTensor.from_local(inputs.hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)
    weight = distribute_tensor(inputs.weight, mesh, placements).requires_grad_()
    bias = None
    if inputs.bias is not None:
        bias = distribute_tensor(inputs.bias, mesh, placements).requires_grad_()
    return hidden.requires_grad_(), weight, bias


def sharded_results(
    inputs: LSRHeadInputs,
    mesh: DeviceMesh,
    head: Callable[..., Any] = lsr_head,
    placements: list[Any] | None = None,
    **options: Any,
) -> dict[str, DTensor]:
    """Scores and gradients of a vocabulary-parallel head, as DTensors."""
    hidden, weight, bias = sharded_leaves(inputs, mesh, placements)
    scores = head(hidden, weight, bias, **inputs.layout, **options)
    scores.full_tensor().backward(inputs.dscores.to(scores.dtype))
    results = {"scores": scores.detach(), "dhidden": hidden.grad, "dweight": weight.grad}
    if bias is not None:
        results["dbias"] = bias.grad
    return results


def full(tensor: Any) -> Tensor:
    """The whole tensor of a DTensor, or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_within_gradient_bounds(
    results: Mapping[str, Any],
    truth: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> None:
    """Check that every result is within the error bound of a gradient."""
    for name, result in results.items():
        assert_within_budget(full(result), truth[name], dtype, "gradient_bound", name=name)


def equals_the_truth(rank: Rank, cases: list[HeadCase]) -> None:
    """Scores and gradients of all cases are within budget, and sharded over the vocabulary."""
    mesh = mesh_of(rank)
    for case in cases:
        inputs = lsr_head_inputs(
            *case.size,
            layout=case.layout,
            dtype=case.dtype,
            bias=case.bias,
            device=rank.device,
        )
        choices: dict[str, Any] = {}
        for name in ("pooling", "activation", "logit_scale"):
            if name in case.options:
                choices[name] = case.options[name]
        inputs = with_one_answer(inputs, **choices)
        results = sharded_results(inputs, mesh, **case.options)
        truth = lsr_head_truth(inputs, **case.options)
        assert results.keys() == truth.keys()
        assert results["scores"].placements == (Shard(1),)
        assert results["dhidden"].placements == (Replicate(),)
        assert results["dweight"].placements == (Shard(0),)
        assert results["dweight"].dtype == results["dhidden"].dtype == case.dtype
        for name, result in results.items():
            kind = "forward" if name == "scores" else "gradient_bound"
            assert_within_budget(
                full(result),
                truth[name],
                kind=kind,
                name=f"{name} of {case}",
            )


def errors_of_sharded_and_unsharded_heads(
    rank: Rank,
    size: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> dict[str, tuple[float, float]]:
    """Relative errors of the sharded head and of that of one device, by result."""
    inputs = lsr_head_inputs(*size, layout="right", dtype=dtype, device=rank.device)
    inputs = with_one_answer(inputs)
    truth = lsr_head_truth(inputs)
    sharded = sharded_results(inputs, mesh_of(rank))
    unsharded = lsr_head_results(inputs)
    errors: dict[str, tuple[float, float]] = {}
    for name, exact in truth.items():
        errors[name] = (
            relative_error(full(sharded[name]), exact),
            relative_error(unsharded[name], exact),
        )
    return errors


def repeats_in_every_bit(rank: Rank) -> None:
    inputs = lsr_head_inputs(
        6,
        20,
        32,
        601,
        layout="right",
        dtype=torch.bfloat16,
        device=rank.device,
    )
    mesh = mesh_of(rank)
    first = sharded_results(inputs, mesh)
    second = sharded_results(inputs, mesh)
    for name, result in first.items():
        assert torch.equal(result.to_local(), second[name].to_local()), name


def benchmark_rows(rank: Rank) -> list[str]:
    """The rows that benchmarks.vocabulary_parallel measures, on a small problem."""
    inputs = lsr_head_inputs(2, 6, 16, 101, device=rank.device, density="sparse")
    rows = vocabulary_parallel.measure(inputs, mesh_of(rank), 2)
    assert all(len(row.times_ms) == 2 and min(row.times_ms) > 0 for row in rows)
    return [row.name for row in rows]


def works_on_a_mesh_of_two_dimensions(rank: Rank) -> None:
    mesh = init_device_mesh(rank.device.type, (1, rank.size), mesh_dim_names=("dp", "tp"))
    inputs = with_one_answer(lsr_head_inputs(3, 6, 16, 21, layout="right", device=rank.device))
    truth = lsr_head_truth(inputs)
    results = sharded_results(inputs, mesh, placements=[Replicate(), Shard(0)])
    assert results["scores"].placements == (Replicate(), Shard(1))
    assert_within_gradient_bounds(results, truth)
    results = sharded_results(inputs, mesh, placements=[Replicate(), Replicate()])
    for result in results.values():
        assert all(isinstance(placement, Replicate) for placement in result.placements)
    assert_within_gradient_bounds(results, truth)


def small_inputs(rank: Rank, dtype: torch.dtype) -> LSRHeadInputs:
    """A problem of three sequences and 21 vocabulary entries."""
    inputs = lsr_head_inputs(3, 6, 16, 21, layout="right", dtype=dtype, device=rank.device)
    return with_one_answer(inputs)


def gives_only_the_gradients_that_are_needed(rank: Rank) -> None:
    mesh = mesh_of(rank)
    inputs = small_inputs(rank, torch.bfloat16)
    truth = lsr_head_truth(inputs)
    names = ("hidden", "weight", "bias")
    for needed in names:
        leaves = dict(zip(names, sharded_leaves(inputs, mesh), strict=True))
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == needed)
        scores = cast(DTensor, lsr_head(*leaves.values(), **inputs.layout))
        scores.full_tensor().backward(inputs.dscores)
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [needed]
        assert_within_budget(
            full(leaves[needed].grad),
            truth[f"d{needed}"],
            kind="gradient_bound",
            name=needed,
        )


def scores_without_gradients(rank: Rank) -> None:
    inputs = small_inputs(rank, torch.bfloat16)
    truth = lsr_head_truth(inputs)
    leaves = sharded_leaves(inputs, mesh_of(rank))
    for no_gradients in (torch.no_grad(), torch.inference_mode()):
        with no_gradients:
            scores = cast(DTensor, lsr_head(*leaves, **inputs.layout))
            assert not scores.requires_grad
            assert_within_budget(scores.full_tensor(), truth["scores"])


def works_under_autocast(rank: Rank) -> None:
    # The fp32 operands hold numbers of bf16, so that autocast rounds nothing.
    inputs = lsr_head_inputs(3, 6, 16, 21, layout="right", device=rank.device)
    inputs = with_one_answer(inputs.cast(torch.bfloat16)).cast(torch.float32)
    with torch.autocast(rank.device.type, dtype=torch.bfloat16):
        results = sharded_results(inputs, mesh_of(rank))
    for name, result in results.items():
        assert result.dtype == (torch.bfloat16 if name == "scores" else torch.float32)
    assert_within_gradient_bounds(results, lsr_head_truth(inputs), torch.bfloat16)


def a_main_grad_shard_takes_the_weight_gradient(rank: Rank) -> None:
    mesh = mesh_of(rank)
    inputs = lsr_head_inputs(3, 6, 16, 21, dtype=torch.bfloat16, device=rank.device)
    inputs = with_one_answer(inputs)
    hidden, weight, bias = sharded_leaves(inputs, mesh)
    main_grad = distribute_tensor(torch.ones(21, 16, device=rank.device), mesh, [Shard(0)])
    scores = cast(DTensor, lsr_head(hidden, weight, bias, weight_main_grad=main_grad))
    scores.full_tensor().backward(inputs.dscores)
    # torch 2.11 and older give zeros to a shard that has no gradient.
    assert weight.grad is None or not weight.grad.full_tensor().any()
    assert_within_budget(
        main_grad.full_tensor() - 1,
        lsr_head_truth(inputs)["dweight"],
        torch.bfloat16,
        "gradient_bound",
    )


def compiles_in_one_graph(rank: Rank, backend: str) -> None:
    head = torch.compile(lsr_head, backend=backend, fullgraph=True)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = small_inputs(rank, dtype)
        results = sharded_results(inputs, mesh_of(rank), head)
        assert_within_gradient_bounds(results, lsr_head_truth(inputs))


def a_parallelized_module_compiles(rank: Rank, backend: str) -> None:
    inputs = torch.randn(4, 7, 12, device=rank.device)
    mask = torch.ones(4, 7, device=rank.device)
    unsharded = Scorer().to(rank.device)
    sharded = copy.deepcopy(unsharded)
    parallelize_module(sharded, mesh_of(rank), {"head": VocabularyParallel()})
    compiled = torch.compile(sharded, backend=backend, fullgraph=True)
    unsharded(inputs, mask).square().sum().backward()
    compiled(inputs, mask).square().sum().backward()
    assert_within_gradient_bounds(parameter_gradients(sharded), exact_gradients(unsharded))


def sparse_rows_equal_one_device(
    rank: Rank,
    vocab_size: int,
    top_k: int | None,
    min_weight: float,
) -> None:
    """Sparse rows have the same entries as those of one device, also on ranks without columns."""
    inputs = lsr_head_inputs(5, 9, 16, vocab_size, layout="holes", device=rank.device)
    options: dict[str, Any] = {"min_weight": min_weight}
    if top_k is not None:
        options["top_k"] = top_k
    hidden, weight, bias = sharded_leaves(inputs, mesh_of(rank))
    rows = lsr_head_sparse(hidden, weight, bias, **inputs.layout, **options)
    expected = lsr_head_sparse(
        inputs.hidden,
        inputs.weight,
        inputs.bias,
        **inputs.layout,
        **options,
    )
    assert rows.layout == torch.sparse_csr
    assert rows.shape == expected.shape
    assert rows.dtype == expected.dtype
    assert torch.equal(rows.crow_indices(), expected.crow_indices())
    assert torch.equal(rows.col_indices(), expected.col_indices())
    assert_within_budget(rows.values(), expected.values())


class Scorer(nn.Module):
    """A linear layer in front of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 16)
        self.head = LSRHead(16, 29)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.head(self.trunk(inputs), mask)
        return scores


def parameter_gradients(model: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def exact_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: gradient.double() for name, gradient in parameter_gradients(model).items()}


def a_parallelized_module_trains_like_an_unsharded_one(rank: Rank, output: str) -> None:
    """Three steps of AdamW change the parameters of both modules alike.

    Args:
        rank: This process.
        output: Whether the scores are ``"sharded"`` or ``"gathered"``.
    """
    inputs = torch.randn(4, 7, 12, generator=torch.Generator().manual_seed(5)).to(rank.device)
    mask = torch.ones(4, 7, device=rank.device)
    mask[1, 4:] = 0
    unsharded = Scorer().to(rank.device)
    sharded: Any = copy.deepcopy(unsharded)
    style = VocabularyParallel()
    if output == "gathered":
        style = VocabularyParallel(output_layouts=Replicate(), use_local_output=True)
    parallelize_module(sharded, mesh_of(rank), {"head": style})
    assert sharded.head.weight.to_local().size(0) < 29
    assert sharded.head.vocab_size == 29
    for model in (unsharded, sharded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            scores = model(inputs, mask)
            assert isinstance(scores, DTensor) == (model is sharded and output == "sharded")
            (scores.square().sum() / 4).backward()
            optimizer.step()
    expected = dict(unsharded.named_parameters())
    for name, parameter in sharded.named_parameters():
        # Adam divides by the size of the gradient, so that entries whose gradient is nothing but
        # rounding would differ by a step.
        assert relative_error(full(parameter), expected[name].double()) < 1e-4, name


def operands_of_other_layouts_are_refused(rank: Rank) -> None:
    """Errors name the operand that does not fit, and the remedy."""
    mesh = mesh_of(rank)
    other_mesh = init_device_mesh(rank.device.type, (1, rank.size))
    inputs = lsr_head_inputs(2, 3, 8, 6, device=rank.device)
    hidden, weight, bias = sharded_leaves(inputs, mesh)
    assert bias is not None
    sharded_hidden = distribute_tensor(inputs.hidden, mesh, [Shard(0)])
    replicated_bias = distribute_tensor(inputs.bias, mesh, [Replicate()])
    column_weight = distribute_tensor(inputs.weight, mesh, [Shard(1)])
    hidden_of_other_mesh = DTensor.from_local(
        inputs.hidden,
        other_mesh,
        [Replicate(), Replicate()],
        run_check=False,
    )
    local_hidden, local_weight, local_bias = inputs.hidden, inputs.weight, inputs.bias

    def assert_refused(hidden: Any, weight: Any, bias: Any, problem: str, remedy: str) -> None:
        with pytest.raises((ValueError, TypeError)) as caught:
            lsr_head(hidden, weight, bias)
        assert problem in str(caught.value)
        assert remedy in str(caught.value)

    message = "hidden must be a DTensor if weight is one"
    assert_refused(local_hidden, weight, bias, message, "FSDP")
    message = "weight must be a DTensor if hidden"
    assert_refused(hidden, local_weight, None, message, "distribute_tensor")
    message = "weight must be Shard(0)"
    assert_refused(hidden, column_weight, None, message, "redistribute")
    message = "bias must be a DTensor if weight is one"
    assert_refused(hidden, weight, local_bias, message, "distribute_tensor")
    message = "bias must have the mesh and the placements of weight"
    assert_refused(hidden, weight, replicated_bias, message, "redistribute")
    message = "hidden must be Replicate()"
    assert_refused(sharded_hidden, weight, bias, message, "redistribute")
    message = "hidden must be on the same mesh as weight"
    assert_refused(hidden_of_other_mesh, weight, bias, message, "redistribute")
    message = "weight must have the dtype of hidden (bfloat16)"
    assert_refused(hidden.detach().bfloat16(), weight, bias, message, "autocast")


def the_style_is_for_heads_only(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"must be applied to a tilefold\.nn\.LSRHead"):
        parallelize_module(nn.Linear(4, 4), mesh_of(rank), {"": VocabularyParallel()})


def fsdp_around_a_head(
    rank: Rank,
    dp: int,
    style: VocabularyParallel | None,
    wrap_head: bool = False,
) -> None:
    """A step of FSDP2 over rows equals one of a single process with all rows.

    Args:
        rank: This process.
        dp: Number of ranks that share the rows. The others share the vocabulary.
        style: How the vocabulary is sharded; ``None`` if it is not.
        wrap_head: Whether the head is a module of FSDP of its own.
    """
    mesh = init_device_mesh(rank.device.type, (dp, rank.size // dp), mesh_dim_names=("dp", "tp"))
    inputs = torch.randn(6, 7, 12, generator=torch.Generator().manual_seed(5)).to(rank.device)
    mask = torch.ones(6, 7, device=rank.device)
    single = Scorer().to(rank.device)
    model = copy.deepcopy(single)
    if style is not None:
        parallelize_module(model, mesh["tp"], {"head": style})
    if wrap_head:
        fully_shard(model.head, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    single(inputs, mask).square().sum(dim=1).mean().backward()
    n_rows = len(inputs) // dp
    first_row = n_rows * mesh["dp"].get_local_rank()
    rows = slice(first_row, first_row + n_rows)
    scores = model(inputs[rows], mask[rows])
    assert isinstance(scores, DTensor) == (style is not None)
    full(scores).square().sum(dim=1).mean().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    assert_within_gradient_bounds(parameter_gradients(model), exact_gradients(single))


JOBS = [
    pytest.param(equals_the_truth, [CASES], id="all options"),
    pytest.param(equals_the_truth, [TINY_VOCABULARIES], id="tiny vocabularies"),
    pytest.param(equals_the_truth, [RANKS_WITHOUT_COLUMNS], id="ranks without columns"),
    pytest.param(equals_the_truth, [BERT_VOCABULARY], id="vocabulary of BERT"),
    pytest.param(repeats_in_every_bit, [], id="repeats"),
    pytest.param(works_on_a_mesh_of_two_dimensions, [], id="mesh of two dimensions"),
    pytest.param(works_under_autocast, [], id="autocast"),
    pytest.param(gives_only_the_gradients_that_are_needed, [], id="needed gradients"),
    pytest.param(scores_without_gradients, [], id="no gradients"),
    pytest.param(a_main_grad_shard_takes_the_weight_gradient, [], id="main gradient"),
    pytest.param(
        compiles_in_one_graph,
        ["aot_eager"],
        id="compiled head",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        a_parallelized_module_compiles,
        ["aot_eager"],
        id="compiled module",
        marks=pytest.mark.slow,
    ),
    pytest.param(sparse_rows_equal_one_device, [53, None, 0.0], id="sparse rows"),
    pytest.param(sparse_rows_equal_one_device, [53, 3, 0.0], id="sparse rows of 3 terms"),
    pytest.param(sparse_rows_equal_one_device, [53, 100, 0.3], id="sparse rows over 0.3"),
    pytest.param(sparse_rows_equal_one_device, [4, 2, 0.0], id="2 terms, few columns"),
    pytest.param(sparse_rows_equal_one_device, [4, None, 0.0], id="sparse rows, few columns"),
    pytest.param(sparse_rows_equal_one_device, [29, None, 0.0], id="sparse rows, odd shards"),
    pytest.param(
        a_parallelized_module_trains_like_an_unsharded_one,
        ["sharded"],
        id="training with sharded scores",
    ),
    pytest.param(
        a_parallelized_module_trains_like_an_unsharded_one,
        ["gathered"],
        id="training with gathered scores",
    ),
    pytest.param(operands_of_other_layouts_are_refused, [], id="errors"),
    pytest.param(the_style_is_for_heads_only, [], id="not a head"),
    pytest.param(fsdp_around_a_head, [1, VocabularyParallel()], id="FSDP"),
]


@pytest.mark.parametrize(("job", "arguments"), JOBS)
def test_every_rank_passes(ranks: Ranks, job: Callable[..., None], arguments: list[Any]) -> None:
    ranks.run(job, *arguments)


def test_two_ranks_of_the_cpu_share_a_vocabulary_too(two_ranks: Ranks) -> None:
    two_ranks.run(equals_the_truth, CASES[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_hidden_are_rounded_once_as_on_one_device(
    ranks: Ranks,
    dtype: torch.dtype,
) -> None:
    # Partial sums are added in fp32: rounding once more would add 40% in bf16.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-5
    size = (6, 20, 32, 600)
    for errors in ranks.run(errors_of_sharded_and_unsharded_heads, size, dtype):
        for name, (sharded, unsharded) in errors.items():
            assert sharded <= 1.05 * unsharded + tolerance, (name, sharded, unsharded)


@pytest.mark.gpu
def test_kernels_on_two_gpus_are_as_exact_as_on_one_at_a_real_size(two_gpus: Ranks) -> None:
    size = (8, 128, 768, 30522)
    for errors in two_gpus.run(errors_of_sharded_and_unsharded_heads, size, torch.bfloat16):
        for name, (sharded, unsharded) in errors.items():
            assert sharded <= 1.05 * unsharded + 1e-5, (name, sharded, unsharded)


@pytest.mark.gpu
def test_the_default_compiler_takes_the_sharded_head(two_gpus: Ranks) -> None:
    two_gpus.run(compiles_in_one_graph, "inductor")


def test_the_benchmark_measures_whole_and_shared_heads(ranks: Ranks) -> None:
    for names in ranks.run(benchmark_rows):
        assert "whole, forward + backward" in names
        assert "shared, forward + backward" in names


@pytest.mark.parametrize(
    ("style", "wrap_head"),
    [
        pytest.param(VocabularyParallel(), False, id="vocabulary parallel"),
        pytest.param(None, False, id="no vocabulary parallelism"),
        pytest.param(None, True, id="head wrapped"),
    ],
)
def test_fsdp_over_rows(ranks: Ranks, style: VocabularyParallel | None, wrap_head: bool) -> None:
    ranks.run(fsdp_around_a_head, ranks.size, style, wrap_head)
