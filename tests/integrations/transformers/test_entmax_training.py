"""Tests of entmax models in trainers: annealed and learned alphas, and recorded sparsity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the trainers need accelerate")
pytest.importorskip("datasets", reason="datasets is not installed")

import datasets
from safetensors.torch import load_file
from sentence_transformers import (
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import (
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from tests import programs
from tests.integrations.transformers.entmax_models import (
    NAMES,
    batch,
    output,
    registered,  # noqa: F401
    sentence_model,
    tiny_model,
)
from tests.processes import ROOT
from tilefold.integrations.transformers import (
    AlphaSchedule,
    attention,
    learn_alpha,
    record_sparsity,
    set_alpha,
    use_entmax,
)
from tilefold.ops import entmax, entmax_attention

STEPS = 6


class TrainingRecord(TrainerCallback):
    """Records the alpha of every step and the logged losses of a model."""

    def __init__(self, model: Any) -> None:
        self.alphas: list[float | None] = []
        self.losses: list[float] = []
        self.model = model

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the alpha that the layers read during the step."""
        self.alphas.append(getattr(self.model.config, "entmax_alpha", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the loss."""
        if "loss" in logs:
            self.losses.append(logs["loss"])


def classifier() -> Any:
    """Return a classifier of three labels with softmax attention and without dropout."""
    torch.manual_seed(0)
    config = tiny_model("bert").config
    config.num_labels = 3
    config.attention_probs_dropout_prob = 0.0
    config.hidden_dropout_prob = 0.0
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def training_rows() -> list[dict[str, torch.Tensor]]:
    """Return 24 texts with their labels."""
    tokens, mask = batch()
    rows = []
    for number in range(24):
        text = number % 3
        rows.append(
            {
                "input_ids": tokens[text],
                "attention_mask": mask[text],
                "labels": torch.tensor(text),
            },
        )
    return rows


def train(
    folder: Path,
    schedule: AlphaSchedule | None,
    resume: str | None = None,
    steps: int = STEPS,
) -> TrainingRecord:
    """Train a classifier with checkpoints every two steps.

    Args:
        folder: folder of the checkpoints.
        schedule: schedule of alpha; ``None`` trains with softmax attention.
        resume: checkpoint to continue from.
        steps: number of steps.
    """
    model = classifier()
    record = TrainingRecord(model)
    callbacks: list[TrainerCallback] = [record]
    if schedule is not None:
        use_entmax(model)
        callbacks.append(schedule)
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        seed=0,
        save_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=training_rows(), callbacks=callbacks)
    trainer.train(resume)
    return record


def test_alpha_is_annealed_from_softmax(tmp_path: Path) -> None:
    record = train(tmp_path / "entmax", AlphaSchedule(2.0, until=4))
    assert record.alphas == [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
    softmax = train(tmp_path / "softmax", None, steps=1)
    assert record.losses[0] == pytest.approx(softmax.losses[0], rel=1e-5, abs=0)


def test_annealing_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "full", AlphaSchedule(2.0, until=4))
    checkpoint = tmp_path / "full" / "checkpoint-2"
    assert '"entmax_alpha": 1.5' in (checkpoint / "config.json").read_text()
    record = train(tmp_path / "resumed", AlphaSchedule(2.0, until=4), resume=str(checkpoint))
    assert record.alphas == [1.5, 1.75, 2.0, 2.0]
    weights_file = "checkpoint-6/model.safetensors"
    expected = load_file(tmp_path / "full" / weights_file)
    weights = load_file(tmp_path / "resumed" / weights_file)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_linear_schedule_reaches_alpha_at_a_share_of_the_steps() -> None:
    schedule = AlphaSchedule(1.5, until=0.5)
    alphas = [schedule.alpha_at(step, 100) for step in (0, 25, 50, 100)]
    assert alphas == [1.0, 1.25, 1.5, 1.5]


def test_a_cosine_schedule_starts_slowly() -> None:
    schedule = AlphaSchedule([1.5, 2.0], start=1.2, until=10, shape="cosine")
    assert schedule.alpha_at(0, 20) == [1.2, 1.2]
    assert schedule.alpha_at(5, 20) == pytest.approx([1.35, 1.6])
    assert schedule.alpha_at(10, 20) == [1.5, 2.0]
    early = schedule.alpha_at(1, 20)
    assert isinstance(early, list)
    linear_increase = 0.8 / 10
    assert early[1] - 1.2 < linear_increase / 3


def test_a_schedule_takes_an_integer_as_a_number_of_steps() -> None:
    assert AlphaSchedule(1.5, until=1).alpha_at(1, 100) == 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"alpha": 3.0}, "alpha must", id="alpha above 2"),
        pytest.param({"start": 0.5}, "start must|alpha must lie", id="start below 1"),
        pytest.param({"until": 0.0}, "until must", id="no steps"),
        pytest.param({"until": 1.5}, "until must", id="share above 1"),
        pytest.param({"until": True}, "until must", id="truth value"),
        pytest.param({"shape": "step"}, "shape must", id="unknown shape"),
    ],
)
def test_a_schedule_rejects(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlphaSchedule(**options)


def begin_training(schedule: AlphaSchedule, model: Any) -> None:
    """Call a schedule as a trainer does before the first of ten steps."""
    state = TrainerState(global_step=0, max_steps=10)
    schedule.on_train_begin(None, state, None, model=model)


def test_a_schedule_refuses_a_model_without_entmax_attention() -> None:
    with pytest.raises(ValueError, match="model must run entmax attention, got one that runs none"):
        begin_training(AlphaSchedule(), tiny_model("bert", "sdpa"))


def test_a_schedule_refuses_to_end_after_the_last_step() -> None:
    with pytest.raises(ValueError, match="must not lie after the last step, 10, got 11"):
        begin_training(AlphaSchedule(until=11), tiny_model("bert"))


def test_a_schedule_refuses_a_wrong_number_of_alphas() -> None:
    with pytest.raises(ValueError, match="one for every attention layer"):
        begin_training(AlphaSchedule([1.5, 1.5, 1.5]), tiny_model("bert"))


def test_a_schedule_refuses_learned_alphas() -> None:
    model = tiny_model("bert")
    learn_alpha(model)
    with pytest.raises(ValueError, match="must not have learned alphas"):
        begin_training(AlphaSchedule(), model)


def retrieval_rows() -> datasets.Dataset:
    """Return six queries with a document each."""
    queries = [
        "read files",
        "a list of rows",
        "write json",
        "locks of threads",
        "parse dates",
        "sort keys",
    ]
    documents = [f"how to {query}" for query in queries]
    return datasets.Dataset.from_dict({"query": queries, "document": documents})


def train_learned_alphas(model: Any, folder: Path, resume: str | None) -> torch.Tensor:
    """Train a SentenceTransformer, and return the learned alpha of its first layer."""
    args = SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        use_cpu=True,
        seed=0,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = SentenceTransformerTrainer(
        model,
        args,
        train_dataset=retrieval_rows(),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train(resume)
    return model[0].model.encoder.layer[0].attention.self.entmax_alpha.theta.detach()


def test_learned_alphas_train_in_sentence_transformers_and_resume(
    tmp_path: Path,
    tokenizer_folder: Path,
) -> None:
    def new_model() -> Any:
        # before 6.2 a trainer needs the flag to load its own checkpoint
        model = sentence_model(tokenizer_folder, tmp_path / "start", trust_remote_code=True)
        use_entmax(model, learn=True)
        return model

    theta = train_learned_alphas(new_model(), tmp_path / "full", None)
    assert (theta != 0).all()
    checkpoint = str(tmp_path / "full/checkpoint-2")
    resumed = train_learned_alphas(new_model(), tmp_path / "resumed", checkpoint)
    assert torch.equal(resumed, theta)


class DenseProbabilities:
    """Replaces ``entmax_attention``: also computes each layer's probabilities densely.

    Attributes:
        layers: for each call, which probabilities are positive and which pairs of tokens take
            part, ``[B, H, S, S]`` each.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.is_token = mask != 0
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """Record the probabilities, and return the attention's output."""
        length = q.size(2)
        query_position = torch.arange(length)[:, None]
        key_position = torch.arange(length)
        takes_part = self.is_token[:, None, None, :] & self.is_token[:, None, :, None]
        if options["causal"]:
            takes_part = takes_part & (key_position <= query_position)
        if options["window"] is not None:
            distance = (query_position - key_position).abs()
            takes_part = takes_part & (distance <= options["window"])
        takes_part = takes_part.expand(*q.shape[:3], length)
        scores = q.double() @ k.double().mT * options["scale"]
        scores = scores.masked_fill(~takes_part, float("-inf"))
        probabilities = entmax(scores, options["alpha"], impl="reference")
        assert isinstance(probabilities, torch.Tensor)
        self.layers.append((probabilities > 0, takes_part))
        return entmax_attention(q, k, v, **options)


def model_with_sparse_attention(name: str) -> Any:
    """Return a model with such large scores that some probabilities are 0."""
    model = tiny_model(name, entmax_alpha=[1.5, 2.0])
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_recorded_sparsity_is_that_of_the_probabilities_without_padding(
    name: str,
    monkeypatch: Any,
) -> None:
    model = model_with_sparse_attention(name)
    tokens, mask = batch()
    probabilities = DenseProbabilities(mask)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "entmax_attention", probabilities)
        with record_sparsity(model) as record:
            output(model, tokens, mask)
            output(model, tokens, mask)
    assert len(record.layers) == 2
    first_pass = probabilities.layers[:2]
    for layer, (is_positive, takes_part) in zip(record.layers, first_pass, strict=True):
        n_positive = is_positive.sum(dim=(0, 2, 3))
        n_pairs = takes_part.sum(dim=(0, 2, 3))
        n_queries = takes_part.any(dim=-1).sum(dim=(0, 2))
        assert layer.queries == 2 * int(mask.sum())
        assert layer.nonzero == pytest.approx((n_positive / n_pairs).tolist(), rel=2e-2)
        assert layer.mean_support == pytest.approx((n_positive / n_queries).tolist(), rel=2e-2)
        assert layer.live_blocks == [1.0, 1.0]  # each sequence is shorter than a block
    assert record.layers[1].nonzero != record.layers[0].nonzero
    assert record.total.nonzero[0] < 1


def test_recorded_sparsity_is_printed_as_a_table() -> None:
    model = tiny_model("bert")
    with record_sparsity(model) as record:
        output(model, *batch())
    table = str(record)
    assert record.layers[0].name in table
    assert "all layers" in table
    assert len(table.splitlines()) == 4


def test_recording_counts_the_queries_of_generation_and_ends_with_its_block() -> None:
    model = tiny_model("gpt2")
    tokens, mask = batch()
    with record_sparsity(model, blocks=False) as record:
        model.generate(
            tokens[:2, :6],
            max_new_tokens=3,
            do_sample=False,
            attention_mask=mask[:2, :6],
        )
    n_queries = 2 * (6 + 2)  # the last generated token is no query
    assert record.layers[0].queries == n_queries
    assert record.layers[0].live_blocks is None
    output(model, tokens, mask)
    assert record.layers[0].queries == n_queries


def test_recording_counts_the_queries_of_packed_texts() -> None:
    model = tiny_model("modernbert")
    tokens, _ = batch()
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    with record_sparsity(model) as record:
        packed = model(
            tokens[:1, :12],
            position_ids=torch.cat([torch.arange(5), torch.arange(7)])[None],
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=7,
            max_length_k=7,
        ).last_hidden_state
    assert record.layers[0].queries == 12
    assert record.layers[0].live_blocks == [1.0, 1.0]
    with record_sparsity(model) as record_of_second:
        second = model(tokens[:1, 5:12]).last_hidden_state
    torch.testing.assert_close(packed[:, 5:], second, rtol=1e-4, atol=1e-5)
    n_layers = 2
    n_heads = 2
    assert record_of_second.total.queries == n_layers * n_heads * 7


def test_a_model_cannot_be_recorded_twice_at_a_time() -> None:
    model = tiny_model("gpt2")
    with (
        record_sparsity(model),
        pytest.raises(RuntimeError, match="must not be recorded already"),
        record_sparsity(model),
    ):
        pass


def test_a_record_of_no_attention_has_no_layers() -> None:
    with record_sparsity(tiny_model("gpt2")) as record:
        pass
    with pytest.raises(RuntimeError, match="no attention layer of the model ran entmax attention"):
        record.layers  # noqa: B018


def test_all_probabilities_of_alpha_1_are_positive() -> None:
    model = tiny_model("gpt2")
    set_alpha(model, 1.0)
    with record_sparsity(model) as record:
        output(model, *batch())
    assert record.total.nonzero == [1.0]


def test_a_module_without_attention_cannot_be_recorded() -> None:
    with (
        pytest.raises(ValueError, match="must have attention layers"),
        record_sparsity(torch.nn.Linear(1, 1)),
    ):
        pass


@pytest.mark.slow
def test_the_example_trains_both_tasks_with_every_attention(tmp_path: Path) -> None:
    process = programs.run(
        "-m",
        "examples.entmax_encoder",
        "--quick",
        "--json",
        tmp_path / "rows.json",
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr
    assert "nDCG@10" in process.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    assert len(attentions) == 2
    runs = [(row["task"], row["attention"]) for row in rows]
    assert runs == [(task, name) for task in ("retrieval", "classification") for name in attentions]
    for row in rows:
        assert 0 <= row["value"] <= 1
        assert (row["nonzero"] is None) == (row["attention"] == "softmax")
