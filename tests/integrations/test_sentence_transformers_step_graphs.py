"""Training steps whose encoder is repeated: the gradients of every batch are those of a step
without graphs.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SparseEncoder, SparseEncoderTrainer
from torch import Tensor

from tests.integrations.splade_models import (
    assert_close,
    build_tiny_splade,
    five_steps,
    fused_copy,
    logged_losses,
    without_dropout,
)
from tests.integrations.test_sentence_transformers_packed import KINDS, PAIRS, splade_loss
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead
from tilefold.integrations.sentence_transformers.graphs.backward import (
    Gradients,
    allocate_gradients,
    backward_parts,
    write_gradients,
)
from tilefold.integrations.sentence_transformers.graphs.step_graph import (
    EncoderRun,
    PackSize,
    StaticInputs,
    compiled_layers,
    graph_size_for,
)
from tilefold.integrations.sentence_transformers.graphs.training import MAX_GRAPHS, StepGraphs
from tilefold.integrations.sentence_transformers.packing.inputs import packed_features
from tilefold.integrations.transformers.packed import padding_position

# fp32: as in the tests of packed batches, with another number of rows in each product
ROUNDING = 512 * 2**-24
ROUNDING_BF16 = 2**-5  # of the largest number, over two layers
# torch.compile looks at what it is given, leaves or not
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Repeated:
    """What a captured graph does, run anew each time: for machines without a GPU."""

    def __init__(
        self,
        run: EncoderRun,
        inputs: StaticInputs,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        *_: Any,
    ) -> None:
        self.run, self.inputs, self.gradients = run, inputs, gradients
        self.model = run.__self__.transformer.model  # type: ignore[attr-defined]
        self.forward()
        self.lower = allocate_gradients(
            gradients, parameters, self._parts(torch.ones_like(self.output))
        )

    def _parts(self, gradient: Tensor) -> Iterator[Gradients]:
        parameters = [tensor for tensor in self.model.parameters() if tensor.requires_grad]
        return backward_parts(self.output, self.noted, parameters, gradient)

    def forward(self) -> Tensor:
        with torch.enable_grad():
            self.output, self.noted = self.run(self.inputs.features())
        return self.output.detach()

    def backward(self, gradient: Tensor) -> None:
        whole = torch.zeros_like(self.output)
        whole[:, : gradient.size(1)] = gradient
        self.parts = self._parts(whole)
        write_gradients(
            self.gradients, next(self.parts), {*range(len(self.gradients))} - self.lower
        )

    def backward_lower(self) -> None:
        write_gradients(self.gradients, next(self.parts), self.lower)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def encoder_of(kind: str, folder: Path, device: str = "cpu") -> Any:
    model = without_dropout(build_tiny_splade(kind, folder)).to(device)
    accelerate(model)
    return model[0].train()


@pytest.fixture
def transformer(tokenizer_folder: Path) -> Any:
    return encoder_of("bert", tokenizer_folder)


def batch(transformer: Any, lengths: list[int], seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    device = next(transformer.parameters()).device
    ids = torch.randint(5, 100, (sum(lengths),), generator=generator).to(device)
    counts = torch.tensor(lengths, device=device)
    return packed_features(
        ids,
        counts,
        padding_position(transformer.model),
        max(lengths, default=0),
    )


def plain(transformer: Any, features: dict[str, Any]) -> Tensor:
    found: Tensor = type(transformer).forward(transformer, dict(features))[
        transformer.module_output_name
    ]
    return found


def gradients(transformer: Any, output: Tensor) -> dict[str, Tensor]:
    transformer.zero_grad(set_to_none=True)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    (output * weights).sum().backward()
    return {
        name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None
    }


def assert_as_without(transformer: Any, graphs: StepGraphs, features: dict[str, Any]) -> None:
    expected = plain(transformer, features)
    right = gradients(transformer, expected)
    got = graphs(features)
    assert got is not None and got.shape == expected.shape
    assert_close(got, expected, ROUNDING)
    found = gradients(transformer, got)
    assert found.keys() == right.keys()
    for name, value in found.items():
        assert (value - right[name]).abs().max() <= ROUNDING * max(
            1.0,
            float(right[name].abs().max()),
        ), name


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 1000, 1024, 1025, 11_300, 99_999])
@pytest.mark.parametrize("longest", [1, 60, 256])
def test_sizes_hold_a_batch_and_those_near_it(tokens: int, longest: int) -> None:
    sizes = graph_size_for(PackSize(tokens, 7, longest))
    assert tokens <= sizes.tokens <= tokens * 17 / 16 + 64
    assert sizes.fits(PackSize(tokens, 7, longest)) and not sizes.fits(PackSize(tokens, 8, longest))
    assert not sizes.fits(PackSize(tokens, 7, sizes.longest + 1)) and not sizes.fits(
        PackSize(sizes.tokens + 1, 7, longest)
    )
    least = next(n for n in range(tokens + 1) if sizes.fits(PackSize(n, 7, longest)))
    assert least <= tokens * 19 // 20 and sizes.tokens - least <= max(128, least / 5)
    assert sizes.extra * sizes.longest >= sizes.tokens - least


def test_batches_of_random_texts_need_few_graphs(transformer: Any) -> None:
    graphs = StepGraphs(transformer, Repeated)
    lengths = torch.randint(5, 60, (20, 8), generator=torch.Generator().manual_seed(0)).tolist()
    ran = [graphs(batch(transformer, counts)) is not None for counts in lengths]
    assert len(graphs.graphs) <= 3 and all(ran[10:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_plain_step(
    kind: str,
    device: str,
    tokenizer_folder: Path,
) -> None:
    encoder = encoder_of(kind, tokenizer_folder, device)
    how = [Repeated] if device == "cpu" else []
    graphs, other = (StepGraphs(encoder, *how, halved=halved) for halved in (True, False))
    assert graphs(batch(encoder, [3, 5, 4])) is None  # met for the first time
    for seed, lengths in enumerate(([3, 5, 4], [1, 30, 2], [20, 0, 20], [1, 1, 1])):
        assert_as_without(encoder, graphs, batch(encoder, list(lengths), seed))
    assert list(graphs.graphs) == [graph_size_for(PackSize(33, 3, 30))]
    features = batch(encoder, [60, 50, 1])
    for one in (graphs, other):  # which share nothing
        one(features)
        assert_as_without(encoder, one, features)
    assert (
        len(graphs.graphs) == 2 and len(other.graphs) == 1 and not graphs.failed and graphs.halved
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_forward_whose_backward_is_to_come_is_not_overwritten(
    dropout: float,
    transformer: Any,
) -> None:
    graphs = StepGraphs(transformer, Repeated)
    features = [batch(transformer, [4, 6], seed) for seed in range(3)]
    graphs(features[0])
    first = graphs(features[0])
    assert first is not None and graphs(features[1]) is None
    kept = first.detach().clone()
    gradients(transformer, first)
    second = graphs(features[1])
    assert second is not None and torch.equal(first, kept)
    del second  # nobody will ask for its gradients
    third = graphs(features[2])
    assert third is not None
    loss = third.sum()
    loss.backward(retain_graph=True)
    refused(RuntimeError, "and once, got it after another batch or again", loss.backward)
    transformer.model.bert.encoder.layer[
        0
    ].output.dropout.p = dropout  # another one: graphs are made anew
    for _ in range(1 if dropout == 0.0 else 2):
        output = graphs(features[1])
    assert output is not None
    refused(RuntimeError, "backward must come before the next batch", loss.backward)


def test_a_backward_pass_that_cannot_be_cut_is_whole(transformer: Any) -> None:
    layers, below = transformer.model.bert.encoder.layer, list[Tensor]()
    forwards = [layer.forward for layer in layers]

    def first(hidden: Tensor, *rest: Any, **options: Any) -> Any:
        below[:] = [hidden.sin()]
        return forwards[0](hidden, *rest, **options)

    layers[0].forward = first
    layers[1].forward = lambda hidden, *rest, **options: forwards[1](
        hidden + below[0],
        *rest,
        **options,
    )
    graphs, features = StepGraphs(transformer, Repeated, halved=True), batch(transformer, [4, 6])
    graphs(features)
    with pytest.warns(UserWarning, match="hands out all gradients at once.*second time"):
        graphs(features)
    assert_as_without(transformer, graphs, features)


def test_a_frame_that_somebody_keeps_stops_no_graph(transformer: Any) -> None:
    kept: list[Any] = []

    def capture(*arguments: Any) -> Repeated:
        kept.append(inspect.stack(0))  # as a traceback does, which torch.compile logs
        return Repeated(*arguments)

    graphs = StepGraphs(transformer, capture)
    features = batch(transformer, [4, 6])
    graphs(features)
    for _ in range(3):
        output = graphs(features)
        assert output is not None
        gradients(transformer, output)


def test_steps_that_cannot_be_repeated_run_as_usual(transformer: Any) -> None:
    graphs = StepGraphs(transformer, Repeated)
    features = batch(transformer, [4, 6])
    for _ in range(2):
        graphs(features)
    assert graphs(features) is not None
    with torch.no_grad():
        assert graphs(features) is None
    assert graphs(features | {"output_attentions": True}) is None
    assert graphs(batch(transformer, [])) is None
    handle = transformer.model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert graphs(features) is None
    handle.remove()
    assert graphs(features) is not None
    transformer.model.gradient_checkpointing_enable()
    assert graphs(features) is None
    transformer.model.gradient_checkpointing_disable()
    on_cpu = StepGraphs(transformer)
    assert on_cpu(features) is None and on_cpu(features) is None and not on_cpu.failed


def test_what_a_graph_cannot_follow_is_noticed(transformer: Any) -> None:
    graphs = StepGraphs(transformer, Repeated)
    features = batch(transformer, [4, 6])
    layer = transformer.model.bert.encoder.layer[0]

    weight = layer.output.dense.weight
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(weight, "data", weight.data * 2),
        lambda: weight.requires_grad_(False),
        lambda: setattr(layer.output.dropout, "p", 0.5),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: torch.use_deterministic_algorithms(True),
        transformer.eval,
        lambda: setattr(transformer, "model", copy.deepcopy(transformer.model)),
    ]
    try:
        for change in changes:
            change()
            assert graphs(features) is None and graphs(features) is not None, change
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.use_deterministic_algorithms(False)
    layer = transformer.train().model.bert.encoder.layer[0]
    layer.output.dropout.p = 0.0
    graphs(features)
    assert_as_without(transformer, graphs, features)
    with torch.no_grad():  # as an optimizer does
        layer.output.dense.bias.add_(1.0)
    assert_as_without(transformer, graphs, features)


def test_graphs_are_bounded_and_copies_begin_anew(transformer: Any) -> None:
    graphs = StepGraphs(transformer, Repeated)
    for count in range(1, MAX_GRAPHS + 3):
        for _ in range(2):
            graphs(batch(transformer, [2] * count))
    assert len(graphs.graphs) == MAX_GRAPHS
    again = pickle.loads(pickle.dumps(graphs))  # noqa: S301 - of our own making
    assert not again.graphs and not copy.deepcopy(graphs).graphs


def trainer_of(model: SparseEncoder, folder: Path, **options: Any) -> SparseEncoderTrainer:
    cpu = model.device.type == "cpu"
    arguments = five_steps(
        folder,
        max_steps=8,
        use_cpu=cpu,
        dataloader_pin_memory=not cpu,
        **options,
    )
    return SparseEncoderTrainer(
        model=model,
        args=arguments,
        train_dataset=PAIRS,
        loss=splade_loss(model),
    )


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {}),
        *(
            pytest.param("cuda", options, marks=pytest.mark.gpu)
            for options in ({}, {"bf16": True}, {"gradient_accumulation_steps": 2})
        ),
    ],
)
def test_trainers_agree_on_losses(
    device: str,
    options: dict[str, Any],
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    stock = without_dropout(build_tiny_splade("bert", tokenizer_folder)).to(device)
    found = []
    for graphs in (True, False):
        model = fused_copy(stock)
        trainer = trainer_of(model, tmp_path, **options)
        collate_ahead(trainer, graphs=graphs)
        if graphs:
            captured = model[0].forward.graphs = StepGraphs(
                model[0],
                *([Repeated] if device == "cpu" else []),
            )
        found.append(logged_losses(trainer))
    assert captured.graphs and not captured.failed
    assert found[0] == pytest.approx(found[1], rel=2e-2 if "bf16" in options else 1e-4)


@compiling
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_compiled_for_a_graph(
    kind: str,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch,
        "compile",
        partial(torch.compile, backend="eager"),
    )  # as on a GPU, without its kernels
    encoder = encoder_of(kind, tokenizer_folder)
    traced = []

    def repeated(run: EncoderRun, *rest: Any) -> Repeated:
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        found = Repeated(run, *rest)
        traced.append(counters["unique_graphs"] - before)
        return found

    graphs = StepGraphs(encoder, repeated, compiled=True, halved=True)
    features = batch(encoder, [3, 5, 4])
    for _ in range(2):
        graphs(features)
    assert graphs.graphs and traced == [0]  # fp32
    with torch.autocast("cpu", torch.bfloat16):
        assert graphs(features) is None
        got = graphs(features)
        assert got is not None
        assert_close(got, plain(encoder, features), ROUNDING_BF16)
    stacks = [
        module for module in encoder.model.modules() if isinstance(module, torch.nn.ModuleList)
    ]
    assert traced[1] > 0 and not any(
        "forward" in vars(layer) for stack in stacks for layer in stack
    )
    assert copy.deepcopy(StepGraphs(encoder, compiled=True)).compiled


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("\nno compiler, or not permitted when stream is capturing\nmore\nmore")


@pytest.mark.parametrize("compiled", [True, False])
def test_layers_that_fail_to_compile_run_plain_and_a_failed_capture_is_told_once(
    compiled: bool,
    transformer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", failing)
    graphs = StepGraphs(
        transformer.to(torch.bfloat16),
        Repeated if compiled else failing,
        compiled=compiled,
    )
    features = batch(transformer, [4, 6])
    assert graphs(features) is None
    told = (
        "as they are, without torch.compile"
        if compiled
        else "trains without CUDA graphs, which could not be captur"
    )
    with pytest.warns(UserWarning, match=rf"{told}.*: RuntimeError: no compiler, or not permitted"):
        assert (graphs(features) is not None) is compiled
    assert graphs.failed is not compiled and (compiled or graphs(features) is None)


def test_a_layer_with_a_forward_of_its_own_keeps_it(transformer: Any) -> None:
    layers = transformer.model.bert.encoder.layer
    given = layers[0].forward
    layers[0].forward = given
    with compiled_layers(transformer.model):
        assert layers[0].forward is given and layers[1].forward is not type(layers[1]).forward
    assert layers[0].forward is given and "forward" not in vars(layers[1])
    layers.append(layers[1])
    with compiled_layers(transformer.model):
        pass
    assert "forward" not in vars(layers[1])


def test_graphs_are_refused_where_nothing_is_joined(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder)
    trainer = trainer_of(model, tmp_path)
    refused(
        ValueError,
        r"graphs must be False.*call accelerate\(model\) first",
        collate_ahead,
        trainer,
        graphs=True,
    )
    accelerate(model)
    refused(ValueError, "leave join=True", collate_ahead, trainer, join=False, graphs=True)
    refused(
        ValueError,
        "compiled must be False without graphs",
        collate_ahead,
        trainer,
        compiled=True,
    )
    collate_ahead(trainer, graphs=True)
    assert model[0].forward.graphs is not None
    collate_ahead(trainer)
    assert model[0].forward.graphs is None


@compiling
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_on_a_gpu_are_as_exact_as_plain_ones(
    kind: str,
    tokenizer_folder: Path,
) -> None:
    encoder = encoder_of(kind, tokenizer_folder, "cuda")
    graphs = StepGraphs(encoder, compiled=True)

    def errors(
        output: Tensor,
        right: Tensor,
        found: dict[str, Tensor],
        exact: dict[str, Tensor],
    ) -> list[float]:
        pairs = [
            (output.detach().float(), right.detach()),
            *((found[name], value) for name, value in exact.items()),
        ]
        norms = torch.stack([truth.norm() for _, truth in pairs])
        scales = norms.clamp(
            min=float(norms.median()) / 10,
        )  # a bias of keys has no gradient but rounding
        return [
            float((got - truth).norm() / scale)
            for (got, truth), scale in zip(pairs, scales, strict=True)
        ]

    checked = 0
    for seed, lengths in enumerate(
        ([3, 5, 4], [1, 30, 2], [20, 0, 20], [60, 50, 1], [60, 50, 1], [1, 1, 1]),
    ):
        features = batch(encoder, list(lengths), seed)
        right = plain(encoder, features)
        exact = gradients(encoder, right)
        with torch.autocast("cuda", torch.bfloat16):
            outputs = plain(encoder, features), graphs(features)
        if outputs[1] is None:
            continue
        kept = outputs[1].detach().clone()
        rounded = errors(outputs[0], right, gradients(encoder, outputs[0]), exact)
        compiled = errors(kept, right, gradients(encoder, outputs[1]), exact)
        assert all(
            mine <= 3 * theirs + 2**-5 for mine, theirs in zip(compiled, rounded, strict=True)
        ), (seed, compiled)
        checked += 1
    assert checked == 4 and graphs.compiled and not graphs.failed


@compiling
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_draws_anew_in_each_repetition(compiled: bool, tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder).to("cuda")
    accelerate(model)
    encoder = model[0].train()
    graphs = StepGraphs(encoder, compiled=compiled)
    features = batch(encoder, [30, 20])
    found = []
    for seed in (0, 0, 1, 2, 1):
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16):
            output = graphs(features)
        if output is not None:
            output.sum().backward()
            found.append(output.detach())
    assert (
        len(found) == 4 and not torch.equal(found[1], found[2]) and torch.equal(found[1], found[3])
    )
    assert graphs.compiled is compiled


@pytest.mark.parametrize("halved", [True, False])
def test_gradients_go_where_ddp_keeps_them_and_add_up(halved: bool, transformer: Any) -> None:
    graphs, features = StepGraphs(transformer, Repeated, halved=halved), batch(transformer, [3, 5])
    assert graphs(features) is None
    right = gradients(transformer, graphs(features))  # type: ignore[arg-type]  # copies
    graphs.bucket_gradients = {
        id(tensor): torch.full_like(tensor, torch.nan) for tensor in transformer.parameters()
    }
    for anew in (False, True):
        if anew:  # written there at once
            graphs.use_bucket_gradients(graphs.bucket_gradients)
            assert graphs(features) is None
        output: Any = graphs(features)
        got = gradients(transformer, output)
        known = [tensor for tensor in transformer.parameters() if tensor.grad is not None]
        there = [graphs.bucket_gradients[id(tensor)].data_ptr() for tensor in known]
        assert [tensor.grad.data_ptr() for tensor in known] == there
        assert ([kept.data_ptr() for kept in graphs.gradients if kept is not None] == there) is anew
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        (graphs(features) * weights).sum().backward()  # type: ignore[operator]
        for name, gradient in got.items():
            assert torch.equal(gradient, right[name])
            assert torch.equal(transformer.get_parameter(name).grad, 2 * gradient)
