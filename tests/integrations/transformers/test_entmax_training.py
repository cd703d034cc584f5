"""Entmax models under real trainers: alpha that is annealed, alpha that is learned, sparsity that
is counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="the trainers need accelerate")
pytest.importorskip("datasets", reason="datasets is not installed")

from safetensors.torch import load_file
from transformers import BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from tests import programs
from tests.integrations.transformers.test_entmax import (  # noqa: F401
    NAMES,
    batch,
    model,
    output,
    registered,
    sentence_model,
)
from tests.processes import ROOT
from tests.refusals import refused
from tilefold.integrations.transformers import (
    AlphaSchedule,
    learn_alpha,
    record_sparsity,
    set_alpha,
    use_entmax,
)
from tilefold.ops import entmax, entmax_attention

STEPS = 6


class Watch(TrainerCallback):
    """The alpha of every step, as the layers see it while it runs, and the loss."""

    def __init__(self, model: Any) -> None:
        self.alphas: list[float | None] = []
        self.losses: list[float] = []
        self.model = model

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.alphas.append(getattr(self.model.config, "entmax_alpha", None))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train(
    folder: Path,
    schedule: AlphaSchedule | None,
    resume: str | None = None,
    steps: int = STEPS,
) -> Watch:
    torch.manual_seed(0)
    config = model("bert").config
    config.num_labels = 3
    config.attention_probs_dropout_prob = config.hidden_dropout_prob = 0.0
    made = BertForSequenceClassification._from_config(config, attn_implementation="eager")
    if schedule is not None:
        use_entmax(made)
    watch = Watch(made)
    tokens, mask = batch()
    rows = [
        {"input_ids": tokens[i % 3], "attention_mask": mask[i % 3], "labels": torch.tensor(i % 3)}
        for i in range(24)
    ]
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
    Trainer(
        made,
        args,
        train_dataset=rows,
        callbacks=[watch, *([schedule] if schedule else [])],
    ).train(resume)
    return watch


def test_alpha_is_annealed_from_softmax_over_a_run_and_from_a_checkpoint(
    tmp_path: Path,
    capsys: Any,
) -> None:
    whole = train(tmp_path / "whole", AlphaSchedule(2.0, until=4))
    assert whole.alphas == [1.0, 1.25, 1.5, 1.75, 2.0, 2.0]
    softmax = train(tmp_path / "softmax", None, steps=1)
    assert abs(whole.losses[0] - softmax.losses[0]) <= 1e-5 * abs(softmax.losses[0])
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert '"entmax_alpha": 1.5' in (checkpoint / "config.json").read_text()
    resumed = train(tmp_path / "resumed", AlphaSchedule(2.0, until=4), resume=str(checkpoint))
    assert resumed.alphas == [1.5, 1.75, 2.0, 2.0]
    ends = [
        load_file(tmp_path / name / "checkpoint-6/model.safetensors")
        for name in ("whole", "resumed")
    ]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_course_of_a_schedule() -> None:
    assert [AlphaSchedule(1.5, until=0.5).alpha_at(step, 100) for step in (0, 25, 50, 100)] == [
        1.0,
        1.25,
        1.5,
        1.5,
    ]
    cosine = AlphaSchedule([1.5, 2.0], start=1.2, until=10, shape="cosine")
    assert cosine.alpha_at(0, 20) == [1.2, 1.2] and cosine.alpha_at(10, 20) == [1.5, 2.0]
    middle = cosine.alpha_at(5, 20)
    assert isinstance(middle, list) and middle == pytest.approx([1.35, 1.6])
    early = cosine.alpha_at(1, 20)
    assert isinstance(early, list) and early[1] - 1.2 < 0.8 / 10 / 3  # slow at first
    assert (
        AlphaSchedule(1.5, until=1).alpha_at(1, 100) == 1.5
    )  # a whole number is a number of steps
    for wrong in (
        {"alpha": 3.0},
        {"start": 0.5},
        {"until": 0.0},
        {"until": 1.5},
        {"until": True},
        {"shape": "step"},
    ):
        refused(ValueError, f"{next(iter(wrong))} must|alpha must lie", AlphaSchedule, **wrong)


def test_a_schedule_refuses_models_that_it_would_not_change(tmp_path: Path) -> None:
    class State:
        global_step, max_steps = 0, 10

    def begin(schedule: AlphaSchedule, made: Any) -> None:
        schedule.on_train_begin(None, State(), None, model=made)

    with pytest.raises(ValueError, match="model must run entmax attention, got one that runs none"):
        begin(AlphaSchedule(), model("bert", "sdpa"))
    refused(
        ValueError,
        "must not lie after the last step, 10, got 11",
        begin,
        AlphaSchedule(until=11),
        model("bert"),
    )
    refused(
        ValueError,
        "one for every attention layer",
        begin,
        AlphaSchedule([1.5, 1.5, 1.5]),
        model("bert"),
    )
    learned = model("bert")
    learn_alpha(learned)
    refused(ValueError, "must not have learned alphas", begin, AlphaSchedule(), learned)


def test_learned_alphas_train_in_sentence_transformers_and_go_on(
    tmp_path: Path,
    tokenizer_folder: Path,
) -> None:
    import datasets
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    texts = [
        "read files",
        "a list of rows",
        "write json",
        "locks of threads",
        "parse dates",
        "sort keys",
    ]
    data = datasets.Dataset.from_dict(
        {"query": texts, "document": [f"how to {text}" for text in texts]},
    )

    def run(folder: Path, resume: str | None) -> torch.Tensor:
        # before 6.2 a trainer needs the flag to load its own checkpoint
        made = sentence_model(tokenizer_folder, tmp_path / "start", trust_remote_code=True)
        use_entmax(made, learn=True)
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
        loss = MultipleNegativesRankingLoss(made)
        SentenceTransformerTrainer(made, args, train_dataset=data, loss=loss).train(resume)
        return made[0].model.encoder.layer[0].attention.self.entmax_alpha.theta.detach()

    whole = run(tmp_path / "whole", None)
    assert (whole != 0).all()
    assert torch.equal(run(tmp_path / "resumed", str(tmp_path / "whole/checkpoint-2")), whole)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_sparsity_is_that_of_the_weights_without_padding(
    name: str,
    monkeypatch: Any,
) -> None:
    made = model(name, entmax_alpha=[1.5, 2.0])
    tokens, mask = batch()
    for parameter in made.parameters():
        parameter.data.mul_(4)  # scores that leave some weights at zero
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    from tilefold.integrations.transformers import attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        # the same question, answered by dense probabilities
        i, j = torch.arange(20)[:, None], torch.arange(20)
        pairs = (mask[:, None, None, :] != 0) & (mask[:, None, :, None] != 0)
        if options["causal"]:
            pairs = pairs & (j <= i)
        if options["window"] is not None:
            pairs = pairs & ((i - j).abs() <= options["window"])
        pairs = pairs.expand(3, 2, 20, 20)
        scores = (q.double() @ k.double().mT * options["scale"]).masked_fill(~pairs, float("-inf"))
        p = entmax(scores, options["alpha"], impl="reference")
        assert isinstance(p, torch.Tensor)
        seen.append((p > 0, pairs))
        return entmax_attention(q, k, v, **options)

    monkeypatch.setattr(attention, "entmax_attention", watched)
    with record_sparsity(made) as record:
        output(made, tokens, mask)
        output(made, tokens, mask)
    monkeypatch.undo()
    layers = record.layers
    assert len(layers) == 2 and all(layer.queries == 2 * int(mask.sum()) for layer in layers)
    for layer, (positive, pairs) in zip(layers, seen[:2], strict=True):
        share = positive.sum(dim=(0, 2, 3)) / pairs.sum(dim=(0, 2, 3))
        assert layer.nonzero == pytest.approx(share.tolist(), rel=2e-2)
        rows = pairs.any(dim=-1).sum(dim=(0, 2))
        assert layer.mean_support == pytest.approx(
            (positive.sum(dim=(0, 2, 3)) / rows).tolist(),
            rel=2e-2,
        )
        assert layer.live_blocks == [1.0, 1.0]  # three sequences shorter than a block
    assert layers[1].nonzero != layers[0].nonzero and record.total.nonzero[0] < 1
    table = str(record)
    assert layers[0].name in table and "all layers" in table and len(table.splitlines()) == 4


def test_recording_counts_packed_batches_generation_and_nothing_else(monkeypatch: Any) -> None:
    made = model("gpt2")
    tokens, mask = batch()
    with record_sparsity(made, blocks=False) as record:
        made.generate(
            tokens[:2, :6],
            max_new_tokens=3,
            do_sample=False,
            attention_mask=mask[:2, :6],
        )
    assert record.layers[0].queries == 2 * (6 + 2) and record.layers[0].live_blocks is None
    output(made, tokens, mask)
    assert record.layers[0].queries == 16  # the block is over
    encoder = model("modernbert")
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    position = torch.cat([torch.arange(5), torch.arange(7)])[None]
    given = {
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": 7,
        "max_length_k": 7,
    }
    with record_sparsity(encoder) as packed:
        together = encoder(tokens[:1, :12], position_ids=position, **given).last_hidden_state
    assert packed.layers[0].queries == 12 and packed.layers[0].live_blocks == [1.0, 1.0]
    with record_sparsity(encoder) as apart:
        second = encoder(tokens[:1, 5:12]).last_hidden_state
    torch.testing.assert_close(together[:, 5:], second, rtol=1e-4, atol=1e-5)
    assert apart.total.queries == 2 * 2 * 7  # layers, heads
    nested = pytest.raises(RuntimeError, match="must not be recorded already")
    with record_sparsity(made) as nothing, nested, record_sparsity(made):
        pass
    with pytest.raises(RuntimeError, match="no attention layer of the model ran entmax attention"):
        nothing.layers  # noqa: B018
    set_alpha(made, 1.0)
    with record_sparsity(made) as softmax:
        output(made, tokens, mask)
    assert softmax.total.nonzero == [1.0]
    with (
        pytest.raises(ValueError, match="must have attention layers"),
        record_sparsity(torch.nn.Linear(1, 1)),
    ):
        pass


def test_the_example_trains_both_tasks_with_every_attention(tmp_path: Path) -> None:
    done = programs.run(
        "-m",
        "examples.entmax_encoder",
        "--quick",
        "--json",
        tmp_path / "rows.json",
        cwd=ROOT,
    )
    assert done.returncode == 0 and "nDCG@10" in done.stdout, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    names = list(dict.fromkeys(row["attention"] for row in rows))
    every = [(task, name) for task in ("retrieval", "classification") for name in names]
    assert [(row["task"], row["attention"]) for row in rows] == every and len(names) == 2
    assert all(
        0 <= row["value"] <= 1 and (row["nonzero"] is None) == (row["attention"] == "softmax")
        for row in rows
    )
