"""Training steps by CUDA graphs have the outputs and gradients of steps without graphs."""

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
from torch import Tensor, nn

from tests.integrations.sentence_transformers.packing.test_packed_inputs import (
    KINDS,
    PAIRS,
    splade_loss,
)
from tests.integrations.splade_models import (
    assert_close,
    build_tiny_splade,
    five_steps,
    fused_copy,
    logged_losses,
    without_dropout,
)
from tests.refusals import refused
from tilefold.integrations.sentence_transformers import accelerate, collate_ahead
from tilefold.integrations.sentence_transformers.graphs.backward import (
    Gradients,
    allocate_buffers,
    backward_parts,
    lower_positions,
    write_gradients,
)
from tilefold.integrations.sentence_transformers.graphs.step_graph import (
    EncoderRun,
    PackSize,
    StaticInputs,
    StepGraph,
    compiled_layers,
    graph_size_for,
)
from tilefold.integrations.sentence_transformers.graphs.training import (
    MAX_GRAPHS,
    ColumnGraphs,
    StepGraphs,
)
from tilefold.integrations.sentence_transformers.packing.forward import original_forward
from tilefold.integrations.sentence_transformers.packing.inputs import packed_features
from tilefold.integrations.transformers.packed import padding_position

# fp32: as in the tests of packed batches, with another number of rows in each product
ROUNDING = 512 * 2**-24
ROUNDING_BF16 = 2**-5  # of the largest number, over two layers
# torch.compile looks at what it is given, leaves or not
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class EagerStepGraph:
    """Stands for a captured graph on machines without a GPU: it runs the encoder at every replay.

    Attributes:
        inputs: the static inputs.
        lower_positions: positions of the parameters whose gradients :meth:`backward_lower` writes.
    """

    def __init__(
        self,
        run_encoder: EncoderRun,
        inputs: StaticInputs,
        parameters: list[Tensor],
        gradients: list[Tensor | None],
        memory: object,
    ) -> None:
        self.inputs = inputs
        self._run_encoder = run_encoder
        self._gradients = gradients
        self._model = run_encoder.__self__.transformer.model  # type: ignore[attr-defined]
        self.forward()
        parts = list(self._backward_parts(torch.ones_like(self._output)))
        allocate_buffers(gradients, parameters, parts[-1])
        self.lower_positions = lower_positions(parts)

    def _backward_parts(self, output_gradient: Tensor) -> Iterator[Gradients]:
        parameters = [tensor for tensor in self._model.parameters() if tensor.requires_grad]
        return backward_parts(self._output, self._cut, parameters, output_gradient)

    def forward(self) -> Tensor:
        with torch.enable_grad():
            self._output, self._cut = self._run_encoder(self.inputs.features())
        return self._output.detach()

    def backward(self, output_gradient: Tensor) -> None:
        padded_gradient = torch.zeros_like(self._output)
        padded_gradient[:, : output_gradient.size(1)] = output_gradient
        self._parts = self._backward_parts(padded_gradient)
        upper = set(range(len(self._gradients))) - self.lower_positions
        write_gradients(self._gradients, next(self._parts), upper)

    def backward_lower(self) -> None:
        write_gradients(self._gradients, next(self._parts), self.lower_positions)


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


def run_without_graphs(transformer: Any, features: dict[str, Any]) -> Tensor:
    outputs = original_forward(transformer, dict(features))
    output: Tensor = outputs[transformer.module_output_name]
    return output


def gradients_of(transformer: Any, output: Tensor) -> dict[str, Tensor]:
    """Return the parameters' gradients of a weighted sum of outputs, by name."""
    transformer.zero_grad(set_to_none=True)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    (output * weights).sum().backward()
    return {
        name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None
    }


def assert_graphs_equal_plain_step(
    transformer: Any,
    graphs: StepGraphs,
    features: dict[str, Any],
) -> None:
    expected = run_without_graphs(transformer, features)
    expected_gradients = gradients_of(transformer, expected)
    output = graphs(features)
    assert output is not None
    assert output.shape == expected.shape
    assert_close(output, expected, ROUNDING)
    gradients = gradients_of(transformer, output)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        largest = max(1.0, float(expected_gradients[name].abs().max()))
        error = float((gradient - expected_gradients[name]).abs().max())
        assert error <= ROUNDING * largest, name


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 1000, 1024, 1025, 11_300, 99_999])
@pytest.mark.parametrize("longest", [1, 60, 256])
def test_a_graph_size_fits_a_batch_and_slightly_smaller_or_larger_ones(
    tokens: int,
    longest: int,
) -> None:
    size = graph_size_for(PackSize(tokens, 7, longest))
    assert tokens <= size.tokens <= tokens * 17 / 16 + 64
    assert size.fits(PackSize(tokens, 7, longest))
    assert not size.fits(PackSize(tokens, 8, longest))
    assert not size.fits(PackSize(tokens, 7, size.max_length + 1))
    assert not size.fits(PackSize(size.tokens + 1, 7, longest))
    fewest = next(n for n in range(tokens + 1) if size.fits(PackSize(n, 7, longest)))
    assert fewest <= tokens * 19 // 20
    assert size.tokens - fewest <= max(128, fewest / 5)
    assert size.fillers * size.max_length >= size.tokens - fewest


def test_batches_of_random_texts_need_few_graphs(transformer: Any) -> None:
    graphs = StepGraphs(transformer, EagerStepGraph)
    lengths = torch.randint(5, 60, (20, 8), generator=torch.Generator().manual_seed(0)).tolist()
    used_graph = [graphs(batch(transformer, counts)) is not None for counts in lengths]
    assert len(graphs.graphs) <= 3
    assert all(used_graph[10:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_outputs_and_gradients_equal_those_of_a_plain_step(
    kind: str,
    device: str,
    tokenizer_folder: Path,
) -> None:
    encoder = encoder_of(kind, tokenizer_folder, device)
    capture = EagerStepGraph if device == "cpu" else StepGraph
    divided = StepGraphs(encoder, capture, divides_backward=True)
    undivided = StepGraphs(encoder, capture)
    assert divided(batch(encoder, [3, 5, 4])) is None  # the size is new
    for seed, lengths in enumerate(([3, 5, 4], [1, 30, 2], [20, 0, 20], [1, 1, 1])):
        assert_graphs_equal_plain_step(encoder, divided, batch(encoder, list(lengths), seed))
    assert list(divided.graphs) == [graph_size_for(PackSize(33, 3, 30))]
    features = batch(encoder, [60, 50, 1])
    for graphs in (divided, undivided):  # they share nothing
        graphs(features)
        assert_graphs_equal_plain_step(encoder, graphs, features)
    assert len(divided.graphs) == 2
    assert len(undivided.graphs) == 1
    assert not divided.failed
    assert divided.divides_backward


def graphs_with_one_size(transformer: Any, features: dict[str, Any]) -> StepGraphs:
    """Return graphs that have met the size of a batch, so that its next step uses a graph."""
    graphs = StepGraphs(transformer, EagerStepGraph)
    assert graphs(features) is None
    return graphs


def test_an_output_is_not_overwritten_before_its_backward_pass(transformer: Any) -> None:
    features = batch(transformer, [4, 6], seed=0)
    other_features = batch(transformer, [4, 6], seed=1)
    graphs = graphs_with_one_size(transformer, features)
    output = graphs(features)
    assert output is not None
    before = output.detach().clone()
    assert graphs(other_features) is None
    gradients_of(transformer, output)
    assert graphs(other_features) is not None
    assert torch.equal(output, before)


def test_an_output_that_is_deleted_needs_no_backward_pass(transformer: Any) -> None:
    features = batch(transformer, [4, 6])
    graphs = graphs_with_one_size(transformer, features)
    output = graphs(features)
    assert output is not None
    del output
    assert graphs(features) is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_other_batch", [False, True])
def test_a_second_backward_pass_repeats_the_forward_pass(
    has_other_batch: bool,
    device: str,
    tokenizer_folder: Path,
) -> None:
    transformer = encoder_of("bert", tokenizer_folder, device)
    for module in transformer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    capture = EagerStepGraph if device == "cpu" else StepGraph
    graphs = StepGraphs(transformer, capture)
    features = batch(transformer, [4, 6])
    assert graphs(features) is None
    output = graphs(features)
    assert output is not None
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    loss = (output * weights).sum()
    loss.backward(retain_graph=True)
    once = {
        name: parameter.grad.clone()
        for name, parameter in transformer.named_parameters()
        if parameter.grad is not None
    }
    if has_other_batch:
        assert graphs(batch(transformer, [6, 4], seed=1)) is not None
    random_state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    loss.backward()
    state_after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert torch.equal(random_state, state_after)
    for name, gradient in once.items():
        assert_close(transformer.get_parameter(name).grad, 2 * gradient, ROUNDING)


def change_weight(transformer: Any) -> None:
    with torch.no_grad():
        transformer.model.bert.encoder.layer[0].output.dense.weight.add_(1.0)


def change_dropout(transformer: Any) -> None:
    transformer.model.bert.encoder.layer[0].output.dropout.p = 0.5


@pytest.mark.parametrize("change", [change_weight, change_dropout])
def test_a_second_backward_pass_of_a_changed_encoder_raises(
    change: Callable[[Any], None],
    transformer: Any,
) -> None:
    features = batch(transformer, [4, 6])
    graphs = graphs_with_one_size(transformer, features)
    output = graphs(features)
    assert output is not None
    loss = output.sum()
    loss.backward(retain_graph=True)
    change(transformer)
    for _ in range(2):
        graphs(features)
    refused(
        RuntimeError,
        "backward must run before the weights, the model or torch's settings change",
        loss.backward,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_columns_that_wait_for_their_backward_passes_have_separate_graphs(
    device: str,
    tokenizer_folder: Path,
) -> None:
    transformer = encoder_of("bert", tokenizer_folder, device)
    columns = ColumnGraphs(transformer, EagerStepGraph if device == "cpu" else StepGraph)
    texts = [batch(transformer, lengths, seed) for seed, lengths in enumerate(COLUMN_LENGTHS)]
    name = transformer.module_output_name

    def gradients_of_all(run: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Tensor]:
        outputs = [run(dict(features))[name] for features in texts]
        return gradients_of(transformer, torch.cat([output[0] for output in outputs]))

    expected = gradients_of_all(partial(type(transformer).forward, transformer))
    for _ in range(3):
        gradients = gradients_of_all(columns)
        assert gradients.keys() == expected.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for parameter, gradient in gradients.items():
            error = float((gradient - expected[parameter]).abs().max())
            assert error <= ROUNDING * max(1.0, largest), parameter
    # The third column runs without a graph.
    assert [len(graphs.graphs) for graphs in columns.graphs] == [1, 1]


# the tokens of each text of three columns
COLUMN_LENGTHS = ([3, 4], [10, 20, 5], [7])


def test_columns_whose_dropout_is_repeated_run_without_graphs(transformer: Any) -> None:
    columns = ColumnGraphs(transformer, EagerStepGraph)
    features = batch(transformer, [4, 6])
    with torch.no_grad():
        columns(dict(features))
    for _ in range(3):
        columns(dict(features))
    assert columns.graphs == []


def test_a_graph_is_not_captured_while_too_little_memory_is_free(
    transformer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = StepGraphs(transformer)
    size = graph_size_for(PackSize(tokens=1_000, sequences=4, longest=300))
    gradient_bytes = sum(parameter.nbytes for parameter in graphs.parameters)
    free_bytes = [gradient_bytes - 1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes[0], 10**12))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = torch.device("cuda")
    with pytest.warns(UserWarning, match="without CUDA graphs, which need .* GiB of free memory"):
        assert not graphs._has_memory_for(size, device)
    assert not graphs._has_memory_for(size, device)  # without another warning
    assert graphs.lacks_memory
    free_bytes[0] = gradient_bytes
    assert graphs._has_memory_for(size, device)
    assert not graphs.lacks_memory


def test_constants_of_a_column_run_with_graphs_and_other_tensors_without(transformer: Any) -> None:
    columns = ColumnGraphs(transformer, EagerStepGraph)
    features = {**batch(transformer, [4, 6]), "modality": "text", "prompt_length": 2}
    for _ in range(2):
        columns(dict(features))
    assert len(columns.graphs[0].graphs) == 1
    mask = torch.ones(1, 10)
    for _ in range(3):
        columns({**batch(transformer, [60, 50]), "attention_mask": mask, "modality": "text"})
    assert len(columns.graphs[0].graphs) == 1


def test_an_encoder_that_cannot_be_cut_has_an_undivided_backward_pass(transformer: Any) -> None:
    layers = transformer.model.bert.encoder.layer
    lower_forward = layers[0].forward
    upper_forward = layers[1].forward
    lower_results: list[Tensor] = []

    def save_result(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        lower_results[:] = [hidden.sin()]
        return lower_forward(hidden, *args, **kwargs)

    def add_saved_result(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return upper_forward(hidden + lower_results[0], *args, **kwargs)

    layers[0].forward = save_result
    layers[1].forward = add_saved_result
    graphs = StepGraphs(transformer, EagerStepGraph, divides_backward=True)
    features = batch(transformer, [4, 6])
    graphs(features)
    with pytest.warns(UserWarning, match="hands out all gradients at once.*second time"):
        graphs(features)
    assert_graphs_equal_plain_step(transformer, graphs, features)


def test_a_stored_frame_of_the_capture_stops_no_graph(transformer: Any) -> None:
    frames: list[Any] = []

    def capture(**arguments: Any) -> EagerStepGraph:
        frames.append(inspect.stack(0))  # as a traceback does, which torch.compile logs
        return EagerStepGraph(**arguments)

    graphs = StepGraphs(transformer, capture)
    features = batch(transformer, [4, 6])
    graphs(features)
    for _ in range(3):
        output = graphs(features)
        assert output is not None
        gradients_of(transformer, output)


def test_steps_without_gradients_or_with_other_features_run_without_graphs(
    transformer: Any,
) -> None:
    features = batch(transformer, [4, 6])
    graphs = graphs_with_one_size(transformer, features)
    assert graphs(features) is not None
    with torch.no_grad():
        assert graphs(features) is None
    assert graphs({**features, "output_attentions": True}) is None
    assert graphs(batch(transformer, [])) is None
    assert graphs(features) is not None


def test_hooks_and_gradient_checkpointing_run_without_graphs(transformer: Any) -> None:
    features = batch(transformer, [4, 6])
    graphs = graphs_with_one_size(transformer, features)
    handle = transformer.model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert graphs(features) is None
    handle.remove()
    assert graphs(features) is not None
    transformer.model.gradient_checkpointing_enable()
    assert graphs(features) is None
    transformer.model.gradient_checkpointing_disable()


def test_cuda_graphs_are_not_captured_on_a_cpu(transformer: Any) -> None:
    graphs = StepGraphs(transformer)
    features = batch(transformer, [4, 6])
    for _ in range(3):
        assert graphs(features) is None
    assert not graphs.failed


def replace_weight(transformer: Any) -> None:
    weight = transformer.model.bert.encoder.layer[0].output.dense.weight
    weight.data = weight.data * 2


def freeze_weight(transformer: Any) -> None:
    transformer.model.bert.encoder.layer[0].output.dense.weight.requires_grad_(False)


def change_dropout_rate(transformer: Any) -> None:
    transformer.model.bert.encoder.layer[0].output.dropout.p = 0.5


def allow_tf32(transformer: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def use_deterministic_algorithms(transformer: Any) -> None:
    torch.use_deterministic_algorithms(True)


def set_eval_mode(transformer: Any) -> None:
    transformer.eval()


def replace_model(transformer: Any) -> None:
    transformer.model = copy.deepcopy(transformer.model)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Restore settings of torch after the test."""
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(
    "change",
    [
        replace_weight,
        freeze_weight,
        change_dropout_rate,
        allow_tf32,
        use_deterministic_algorithms,
        set_eval_mode,
        replace_model,
    ],
)
def test_a_change_that_graphs_cannot_follow_leads_to_new_ones(
    change: Callable[[Any], None],
    transformer: Any,
) -> None:
    features = batch(transformer, [4, 6])
    graphs = graphs_with_one_size(transformer, features)
    assert graphs(features) is not None
    change(transformer)
    assert graphs(features) is None
    assert graphs(features) is not None


def test_steps_follow_weights_that_an_optimizer_changes_in_place(transformer: Any) -> None:
    features = batch(transformer, [4, 6])
    graphs = graphs_with_one_size(transformer, features)
    assert_graphs_equal_plain_step(transformer, graphs, features)
    with torch.no_grad():
        transformer.model.bert.encoder.layer[0].output.dense.bias.add_(1.0)
    assert_graphs_equal_plain_step(transformer, graphs, features)


def test_the_number_of_graphs_is_limited_and_copies_begin_without_graphs(
    transformer: Any,
) -> None:
    graphs = StepGraphs(transformer, EagerStepGraph)
    for count in range(1, MAX_GRAPHS + 3):
        for _ in range(2):
            graphs(batch(transformer, [2] * count))
    assert len(graphs.graphs) == MAX_GRAPHS
    assert not pickle.loads(pickle.dumps(graphs)).graphs  # noqa: S301 - our own bytes
    assert not copy.deepcopy(graphs).graphs


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
def test_a_trainer_with_graphs_has_the_losses_of_one_without(
    device: str,
    options: dict[str, Any],
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    stock = without_dropout(build_tiny_splade("bert", tokenizer_folder)).to(device)
    graphed_model = fused_copy(stock)
    graphed_trainer = trainer_of(graphed_model, tmp_path, **options)
    collate_ahead(graphed_trainer, graphs=True)
    graphs = StepGraphs(graphed_model[0], EagerStepGraph if device == "cpu" else StepGraph)
    graphed_model[0].forward.graphs = graphs
    losses = logged_losses(graphed_trainer)
    plain_trainer = trainer_of(fused_copy(stock), tmp_path, **options)
    collate_ahead(plain_trainer)
    expected_losses = logged_losses(plain_trainer)
    assert graphs.graphs
    assert not graphs.failed
    tolerance = 2e-2 if "bf16" in options else 1e-4
    assert losses == pytest.approx(expected_losses, rel=tolerance)


@compiling
@pytest.mark.parametrize(
    "kind",
    [
        KINDS[0],
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", *KINDS[1:])),
    ],
)
def test_layers_are_compiled_for_a_capture_in_half_precision(
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
    compiled_counts = []  # parts that torch.compile compiled, for each captured graph

    def capture(**arguments: Any) -> EagerStepGraph:
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        graph = EagerStepGraph(**arguments)
        compiled_counts.append(counters["unique_graphs"] - before)
        return graph

    graphs = StepGraphs(encoder, capture, compiled=True, divides_backward=True)
    features = batch(encoder, [3, 5, 4])
    for _ in range(2):
        graphs(features)
    assert graphs.graphs
    assert compiled_counts == [0]  # fp32
    with torch.autocast("cpu", torch.bfloat16):
        assert graphs(features) is None
        output = graphs(features)
        assert output is not None
        assert_close(output, run_without_graphs(encoder, features), ROUNDING_BF16)
    assert compiled_counts[1] > 0
    stacks = [module for module in encoder.model.modules() if isinstance(module, nn.ModuleList)]
    for stack in stacks:
        assert not any("forward" in vars(layer) for layer in stack)
    assert copy.deepcopy(StepGraphs(encoder, compiled=True)).compiled


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("\nno compiler, or not permitted when stream is capturing\nmore\nmore")


@pytest.mark.parametrize(
    ("compiled", "capture", "limitation"),
    [
        pytest.param(
            True,
            EagerStepGraph,
            "captures its layers as they are, without torch.compile",
            id="layers that fail to compile are captured as they are",
        ),
        pytest.param(
            False,
            failing,
            "trains without CUDA graphs, which could not be captured",
            id="a failed capture turns graphs off",
        ),
    ],
)
def test_a_failed_capture_warns_once_and_falls_back(
    compiled: bool,
    capture: Callable[..., Any],
    limitation: str,
    transformer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", failing)
    graphs = StepGraphs(transformer.to(torch.bfloat16), capture, compiled=compiled)
    features = batch(transformer, [4, 6])
    assert graphs(features) is None
    reason = "RuntimeError: no compiler, or not permitted"
    with pytest.warns(UserWarning, match=rf"{limitation}: {reason}"):
        output = graphs(features)
    assert (output is not None) is compiled
    assert graphs.failed is not compiled
    if graphs.failed:
        assert graphs(features) is None


def test_a_layer_with_a_forward_on_the_instance_is_not_compiled(transformer: Any) -> None:
    layers = transformer.model.bert.encoder.layer
    forward = layers[0].forward
    layers[0].forward = forward
    with compiled_layers(transformer.model):
        assert layers[0].forward is forward
        assert layers[1].forward is not type(layers[1]).forward
    assert layers[0].forward is forward
    assert "forward" not in vars(layers[1])


def test_a_layer_that_occurs_twice_is_compiled_and_restored_once(transformer: Any) -> None:
    layers = transformer.model.bert.encoder.layer
    layers.append(layers[1])
    with compiled_layers(transformer.model):
        pass
    assert "forward" not in vars(layers[1])


def test_graphs_without_a_joined_packed_encoder_are_refused(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
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
@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_compiled_layers_on_a_gpu_are_as_exact_as_plain_ones(
    kind: str,
    tokenizer_folder: Path,
) -> None:
    encoder = encoder_of(kind, tokenizer_folder, "cuda")
    graphs = StepGraphs(encoder, compiled=True)
    n_checked = 0
    for seed, lengths in enumerate(
        ([3, 5, 4], [1, 30, 2], [20, 0, 20], [60, 50, 1], [60, 50, 1], [1, 1, 1]),
    ):
        features = batch(encoder, list(lengths), seed)
        exact = run_without_graphs(encoder, features)
        exact_gradients = gradients_of(encoder, exact)
        with torch.autocast("cuda", torch.bfloat16):
            plain = run_without_graphs(encoder, features)
            compiled = graphs(features)
        if compiled is None:
            continue
        plain_gradients = gradients_of(encoder, plain)
        compiled_gradients = gradients_of(encoder, compiled)
        plain_errors = relative_errors(plain, plain_gradients, exact, exact_gradients)
        compiled_errors = relative_errors(compiled, compiled_gradients, exact, exact_gradients)
        for compiled_error, plain_error in zip(compiled_errors, plain_errors, strict=True):
            assert compiled_error <= 3 * plain_error + 2**-5, (seed, compiled_errors)
        n_checked += 1
    assert n_checked == 4
    assert graphs.compiled
    assert not graphs.failed


def relative_errors(
    output: Tensor,
    gradients: dict[str, Tensor],
    exact_output: Tensor,
    exact_gradients: dict[str, Tensor],
) -> list[float]:
    """Return errors of an output and of gradients, relative to the norms of the exact ones.

    A norm counts as at least a tenth of the median: a bias of keys has no gradient but rounding.
    """
    pairs = [(output.detach().float(), exact_output.detach())]
    pairs += [(gradients[name], exact) for name, exact in exact_gradients.items()]
    norms = torch.stack([exact.norm() for _, exact in pairs])
    scales = norms.clamp(min=float(norms.median()) / 10)
    return [
        float((value - exact).norm() / scale)
        for (value, exact), scale in zip(pairs, scales, strict=True)
    ]


@compiling
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_draws_new_numbers_in_each_replay(compiled: bool, tokenizer_folder: Path) -> None:
    model = build_tiny_splade("bert", tokenizer_folder).to("cuda")
    accelerate(model)
    encoder = model[0].train()
    graphs = StepGraphs(encoder, compiled=compiled)
    features = batch(encoder, [30, 20])
    outputs = []
    for seed in (0, 0, 1, 2, 1):
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16):
            output = graphs(features)
        if output is not None:
            output.sum().backward()
            outputs.append(output.detach())
    assert len(outputs) == 4
    assert not torch.equal(outputs[1], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert graphs.compiled is compiled


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(
    "captured_first",
    [
        pytest.param(True, id="copied by graphs that were captured before"),
        pytest.param(False, id="written by new graphs"),
    ],
)
def test_gradients_are_in_the_buckets_of_ddp_and_accumulate(
    captured_first: bool,
    divided: bool,
    transformer: Any,
) -> None:
    features = batch(transformer, [3, 5])
    graphs = StepGraphs(transformer, EagerStepGraph, divides_backward=divided)
    assert graphs(features) is None
    expected = gradients_of(transformer, output_of(graphs, features))
    buckets = {
        id(parameter): torch.full_like(parameter, torch.nan)
        for parameter in transformer.parameters()
    }
    if captured_first:
        graphs.bucket_gradients = buckets
    else:
        graphs.use_bucket_gradients(buckets)
        assert graphs(features) is None
    gradients = gradients_of(transformer, output_of(graphs, features))
    used = [parameter for parameter in transformer.parameters() if parameter.grad is not None]
    bucket_addresses = [buckets[id(parameter)].data_ptr() for parameter in used]
    assert [parameter.grad.data_ptr() for parameter in used] == bucket_addresses
    buffers = [buffer.data_ptr() for buffer in graphs.gradients if buffer is not None]
    assert (buffers == bucket_addresses) is not captured_first
    output = output_of(graphs, features)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    (output * weights).sum().backward()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name])
        assert torch.equal(transformer.get_parameter(name).grad, 2 * gradient)


def output_of(graphs: StepGraphs, features: dict[str, Any]) -> Tensor:
    """Return the output of a step, which must run by a graph."""
    output = graphs(features)
    assert output is not None
    return output
