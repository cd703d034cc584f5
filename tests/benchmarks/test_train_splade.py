"""The training benchmark: the search for the largest batch, the step, the check, the command."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.train_data import load_tokenizer
from benchmarks.train_splade import step as training
from benchmarks.train_splade.__main__ import main
from benchmarks.train_splade.measure import run
from benchmarks.train_splade.memory import RESOLUTION, Meter, fits, is_out_of_memory, largest_batch
from benchmarks.train_splade.options import TrainOptions, TrainRow
from benchmarks.train_splade.report import PAPER, markdown_table, plot_results
from benchmarks.train_splade.setting import (
    MODEL_SIZES,
    Batches,
    ModelSize,
    build_encoder,
    text_pairs,
)
from tests.recipes.small import small_collection
from tests.refusals import refused
from tilefold.bench.results import read_csv
from tilefold.ops import lsr_head
from tilefold.recipes.loading import quiet_libraries

CPU = torch.device("cpu")
LIMIT = 10**9
MICRO = ModelSize("micro", "bert", 30522, 16, 2, 2, 24)


@pytest.fixture
def quiet() -> Iterator[None]:
    with quiet_libraries():
        yield


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> ModelSize:
    monkeypatch.setitem(MODEL_SIZES, MICRO.name, MICRO)
    return MICRO


def encoder_and_batches(size: ModelSize = MICRO, length: int = 24) -> tuple[Any, Batches]:
    encoder = build_encoder(size, load_tokenizer(None), CPU, length)
    return encoder, Batches(encoder, text_pairs(small_collection(), length)[:6], length, CPU)


def linear_memory(fixed: int, a_pair: int, floor: int = 0) -> Callable[[int], int | None]:
    """Bytes of a batch, or None over the limit; below ``floor`` something else than the batch
    decides.
    """

    def peak(batch: int) -> int | None:
        bytes_ = max(floor, fixed + a_pair * batch)
        return bytes_ if bytes_ <= LIMIT else None

    return peak


@given(
    fixed=st.integers(0, LIMIT),
    a_pair=st.integers(10**4, 6 * 10**8),
    floor=st.integers(0, LIMIT // 2),
    cap=st.sampled_from([8, 500, 8192]),
)
@settings(deadline=None, max_examples=300)
def test_the_largest_batch_fits_and_one_a_little_larger_does_not(
    fixed: int,
    a_pair: int,
    floor: int,
    cap: int,
) -> None:
    peak = linear_memory(fixed, a_pair, floor)
    actual = largest_batch(peak, LIMIT, max_batch=cap)
    assert all(batch <= cap for batch, _ in actual.probes)
    if actual.batch == 0:
        assert peak(1) is None
        return
    assert actual.peak_bytes == peak(actual.batch)
    if actual.capped:
        assert actual.batch == cap
    else:
        assert peak(max(actual.batch + 1, int(RESOLUTION * actual.batch))) is None


@pytest.mark.parametrize(("a_pair", "most"), [(10**6, 6), (2 * 10**8, 4), (3 * 10**5, 7)])
def test_memory_that_grows_linearly_takes_few_steps_to_search(a_pair: int, most: int) -> None:
    actual = largest_batch(linear_memory(10**8, a_pair), LIMIT)
    assert len(actual.probes) <= most
    assert actual.bytes_per_pair == pytest.approx(a_pair)
    assert actual.batch >= 0.95 * (9 * 10**8 // a_pair)


def test_only_errors_about_memory_count_as_not_fitting() -> None:
    run = Mock()
    for text in (
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
    ):
        run.side_effect = RuntimeError(text)
        assert not fits(run)
    run.side_effect = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert not fits(run) and not is_out_of_memory(ValueError("out of range"))
    run.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    refused(RuntimeError, "illegal memory access", fits, run)
    assert fits(lambda: None)


def test_a_limit_that_the_device_does_not_have_is_refused() -> None:
    for limit in (0.0, -1.0, 1e6):
        refused(ValueError, "memory-gib must be greater than 0 and at most", Meter, CPU, limit)


@pytest.mark.usefixtures("quiet")
def test_documents_are_filled_up_to_the_length_or_left_as_they_are() -> None:
    encoder, full = encoder_and_batches(length=48)
    assert (full.shape[1], full.valid) == (48, 1.0)
    natural = Batches(encoder, text_pairs(small_collection(), 48, natural=True), 48, CPU)
    assert natural.shape[1] < 48
    assert natural.valid < 1.0
    again = full.inputs(8)
    assert torch.equal(again["query_input_ids"][6:], again["query_input_ids"][:2])
    assert encoder.max_seq_length == 48


@pytest.mark.usefixtures("quiet")
def test_an_xlmr_of_the_papers_vocabulary_reads_texts_of_512_tokens() -> None:
    size = ModelSize("micro-xlmr", "xlm-roberta", 40000, 16, 1, 2, 24)
    tokenizer = load_tokenizer(None)
    encoder = build_encoder(size, tokenizer, CPU, 512)
    features = encoder.preprocess([text for _, text in text_pairs(small_collection(), 512)][:1])
    assert features["input_ids"].shape == (1, 512)
    assert torch.isfinite(encoder(features)["sentence_embedding"]).all()
    network = encoder[0].model
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    with pytest.raises(ValueError, match="tokenizer must have at most 100 entries"):
        build_encoder(ModelSize("x", "bert", 100, 16, 1, 2, 24), tokenizer, CPU, 512)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("side", training.SIDES)
def test_a_step_leaves_the_trainers_own_weights(
    side: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from datasets import Dataset
    from sentence_transformers.sparse_encoder import (
        SparseEncoderTrainer,
        SparseEncoderTrainingArguments,
    )

    monkeypatch.setattr(training, "REGULARIZER", 0.0)  # the trainer's schedule starts at 0
    pairs = text_pairs(small_collection(), 24)[:4]
    states = []
    for use_trainer in (True, False):
        encoder, _ = encoder_and_batches()
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        before = encoder.state_dict()["0.model.cls.predictions.transform.dense.weight"].clone()
        with training.head_of(encoder, side):
            if use_trainer:
                columns = dict(
                    zip(("query", "document"), map(list, zip(*pairs, strict=True)), strict=True),
                )
                options: dict[str, Any] = {
                    "max_steps": 1,
                    "per_device_train_batch_size": 4,
                    "learning_rate": 1e-3,
                }
                options |= {"use_cpu": True, "lr_scheduler_type": "constant", "report_to": "none"}
                options["save_strategy"] = "no"
                arguments = SparseEncoderTrainingArguments(
                    str(tmp_path / side),
                    disable_tqdm=True,
                    **options,
                )
                encoder.model_card_data.widget = [{"text": "a"}]
                data, loss = Dataset.from_dict(columns), training.splade_loss(encoder)
                SparseEncoderTrainer(
                    model=encoder,
                    args=arguments,
                    train_dataset=data,
                    loss=loss,
                ).train()
            else:
                step = training.TrainingStep(encoder, bf16=False, learning_rate=1e-3)
                step(Batches(encoder, pairs, 24, CPU).inputs(4))
                step.close()
        states.append({name: value.clone() for name, value in encoder.state_dict().items()})
        assert not torch.equal(before, states[-1]["0.model.cls.predictions.transform.dense.weight"])
    stock_result, ours = states
    for name, value in stock_result.items():
        # the first step of Adam moves every weight by about the learning rate, whatever the
        # gradient's size: rounding of a gradient near zero decides its sign, so all but a few
        # entries have to agree
        same = torch.isclose(ours[name].float(), value.float(), rtol=1e-4, atol=1e-5).float().mean()
        assert same > 0.995, f"{name}: only {same:.4f} of the entries agree"


@pytest.mark.usefixtures("quiet")
def test_steps_leave_weights_and_inputs_alone_and_drop_their_gradients() -> None:
    encoder, batches = encoder_and_batches()
    step = training.TrainingStep(encoder, bf16=False)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    inputs = batches.inputs(4)
    losses = []
    for side in training.SIDES:
        for checkpointing in (False, True):
            training.set_checkpointing(encoder, checkpointing)
            assert encoder[0].model.is_gradient_checkpointing is checkpointing
            with training.head_of(encoder, side):
                torch.manual_seed(3)
                losses.append(float(step(inputs)))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5), "same dropout, same loss"
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())
    assert set(inputs) == set(batches.inputs(1))
    assert len(training.time_steps(lambda: step(inputs), CPU, 2)) == 2
    step.close()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("bf16", [False, True])
def test_the_check_passes_for_the_fused_head(bf16: bool) -> None:
    encoder, batches = encoder_and_batches()
    steps: list[training.TrainingStep] = []

    def make_step() -> training.TrainingStep:
        steps.append(training.TrainingStep(encoder, bf16=bf16))
        return steps[0]

    mode = encoder.training
    outcome = training.check_sides(encoder, batches.inputs(3), make_step)
    steps[0].close()
    assert outcome.failures == ()
    assert outcome.gradient["tilefold fp32"] < 1e-4
    assert (outcome.gradient["stock step"] > 1e-3) is bf16
    assert encoder.training is mode
    assert "forward" not in vars(encoder[1])


@pytest.mark.usefixtures("quiet")
def test_a_wrong_head_fails_the_check_and_gets_no_numbers(
    micro: ModelSize,
    beir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fused = "tilefold.integrations.sentence_transformers._pooling.lsr_head"
    monkeypatch.setattr(fused, lambda *args, **kwargs: 1.01 * lsr_head(*args, **kwargs))
    arguments = ["--model", micro.name, "--length", "16", "--checkpointing", "off"]
    arguments += ["--data", str(beir), "--device", "cpu", "--output", str(tmp_path)]
    assert main(arguments) == 1
    assert "FAILED: loss in fp32: error" in capsys.readouterr().out
    (path,) = tmp_path.glob("cpu-*/train_splade.csv")
    for row in read_csv(path):
        assert (row["status"], row["step_p50_ms"], row["largest_batch"]) == ("FAILED", "", "")
    refused(ValueError, "must hold measured rows", plot_results, path, tmp_path / "picture.png")


@pytest.mark.slow
def test_the_command_measures_both_sides_and_writes_table_csv_and_picture(
    micro: ModelSize,
    beir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PAPER, micro.name, (1.33, 1.14))
    arguments = ["--model", micro.name, "--length", "16,24", "--max-batch", "4", "--seconds", "0"]
    arguments += [
        "--data",
        str(beir),
        "--device",
        "cpu",
        "--memory-gib",
        "1",
        "--output",
        str(tmp_path),
        "--quick",
    ]
    code, message = main(arguments), capsys.readouterr().out
    assert code == 0, message
    assert message.count("the paper has") == 2 * 3, "batch, step and throughput of two cells"
    (path,) = tmp_path.glob("cpu-*/train_splade.csv")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(path)
    assert [(row["checkpointing"], row["side"]) for row in rows] == [
        (checkpointing, side) for checkpointing in ("no", "yes") for side in training.SIDES
    ]
    for stock, fused in zip(rows[::2], rows[1::2], strict=True):
        assert stock["status"] == fused["status"] == "ok"
        assert stock["length"] == "16"
        assert int(stock["batch"]) == int(fused["batch"]) <= int(stock["largest_batch"])
        assert int(stock["largest_batch"]) <= int(fused["largest_batch"])
        assert float(fused["loss"]) == pytest.approx(float(stock["loss"]), rel=1e-4)
        for row in (stock, fused):
            assert (
                float(row["step_p20_ms"]) <= float(row["step_p50_ms"]) <= float(row["step_p80_ms"])
            )
            assert float(row["pairs_per_second"]) > 0
            assert row["commit"] and row["torch"] == torch.__version__
    table = markdown_table(path)
    assert table.count("tilefold") == 2 and "micro, S=16, no checkpointing" in table


@pytest.mark.slow  # measures two models
def test_nothing_of_a_model_is_left_to_the_next(
    micro: ModelSize,
    beir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[weakref.ref[Any]] = []
    build = build_encoder

    def spied(*args: Any) -> Any:
        gc.collect()
        assert all(reference() is None for reference in alive), "the last model is still there"
        encoder = build(*args)
        alive.append(weakref.ref(encoder))
        return encoder

    monkeypatch.setattr("benchmarks.train_splade.measure.build_encoder", spied)
    options = TrainOptions(
        CPU,
        [micro.name] * 2,
        [16],
        [False],
        max_batch=2,
        seconds=0,
        data=str(beir),
        memory_gib=1.0,
    )
    recorded: list[list[TrainRow]] = []
    rows = run(options, on_rows=recorded.append)
    assert len(rows) == 4 and len(recorded) == 2 and len(alive) == 2
    assert {row.status for row in rows} == {"ok"}
    assert {row.largest_capped for row in rows} == {"yes"}


def test_wrong_arguments_get_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ("--model bert-huge", "model must be one of bert-base, xlmr-base, tiny"),
        ("--length long", "length must be whole numbers with commas"),
        ("--length 1024", "length must be from 3 to 512 tokens, got 1024"),
        ("--checkpointing maybe", "checkpointing must be one of off, on, both"),
        ("--dtype fp16", "dtype must be bf16 or fp32, got 'fp16'"),
        ("--batch 0", "batch must be at least 1, got 0"),
        ("--device tpu", "device must be cpu or cuda, got 'tpu'"),
        ("--data no-such-folder", "no such file or folder, expected 'pydocs', or the path"),
    ):
        assert main(["--device", "cpu", *arguments.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_gpu_limit_is_kept_and_lifted_again(beir: Path) -> None:
    device = torch.device("cuda")
    rows = run(
        TrainOptions(
            device,
            ["tiny"],
            [64],
            [False, True],
            memory_gib=3.0,
            seconds=0.1,
            data=str(beir),
        ),
    )
    assert {row.status for row in rows} == {"ok"}
    for stock, fused in zip(rows[::2], rows[1::2], strict=True):
        assert fused.largest_batch > stock.largest_batch
        assert stock.largest_peak_gib and fused.largest_peak_gib
        assert max(stock.largest_peak_gib, fused.largest_peak_gib) <= 3.0
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.empty(4 * 2**30, dtype=torch.uint8, device=device).numel() == 4 * 2**30
