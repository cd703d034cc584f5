"""Compare softmax with entmax attention in small encoders: quality, sparsity and time.

    python examples/entmax_encoder.py            # some minutes on two cores
    python examples/entmax_encoder.py --quick    # seconds; the numbers mean nothing

There are two tasks on the documentation of the installed Python, without a download:

- retrieval: a single-vector encoder finds the docstring from which a summary line was taken. It is
  trained with the trainer of sentence-transformers, and evaluated by nDCG@10.
- classification: an encoder predicts to which of the twelve largest modules a docstring belongs. It
  is trained with transformers' Trainer, and evaluated by the accuracy on held-out docstrings.

The encoder is a ModernBERT with random weights: four layers of two heads, every second one with a
sliding window. Its word vectors are the first principal components of those of all-MiniLM-L6-v2.
Needs: pip install "tilefold[demo]".
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

N_MODULES = 12
RANKING_SIZE = 10


@dataclass(frozen=True)
class Attention:
    """The attention of a model.

    Attributes:
        name: its name in the table.
        alpha: alpha at the end of the training; 1 is softmax.
        anneal: the share of the steps over which alpha rises from 1.
    """

    name: str
    alpha: float
    anneal: float = 0.0

    @property
    def is_softmax(self) -> bool:
        """Whether the attention of the model is not changed."""
        return self.alpha == 1.0


SOFTMAX = Attention("softmax", 1.0)
ENTMAX = Attention("entmax", 1.5)
ANNEALED = Attention("entmax, annealed", 1.5, anneal=0.5)


@dataclass(frozen=True)
class Setting:
    """Sizes of a run.

    Attributes:
        hidden: the hidden dimension.
        steps: the number of training steps.
        batch_size: the number of texts of a step.
        length: the largest number of tokens of a text.
        documents: the largest number of documents, and of queries.
        held_out: the number of docstrings that evaluate the classifier.
        learning_rate: the largest learning rate.
    """

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
    """The result of one training run.

    Attributes:
        task: ``"retrieval"`` or ``"classification"``.
        attention: the name of the attention.
        alpha: its alpha.
        measure: the name of the measure.
        value: its value.
        nonzero: the share of positive weights; ``None`` for softmax.
        support: the number of positive weights of a query token; ``None`` for softmax.
        seconds_per_step: processor time of a training step, of all cores together.
    """

    task: str
    attention: str
    alpha: float
    measure: str
    value: float
    nonzero: float | None
    support: float | None
    seconds_per_step: float


@dataclass(frozen=True)
class Experiment:
    """What all training runs share.

    Attributes:
        folder: the folder of the untrained model and its tokenizer.
        config: the configuration of the model.
        collection: documents, queries and judgements.
        setting: the sizes.
        seed: the seed of the weights and of the training.
    """

    folder: Path
    config: ModernBertConfig
    collection: Collection
    setting: Setting
    seed: int

    def training_arguments(self) -> dict[str, Any]:
        """Return the training arguments that both trainers share."""
        return {
            "output_dir": str(self.folder / "run"),
            "max_steps": self.setting.steps,
            "per_device_train_batch_size": self.setting.batch_size,
            "learning_rate": self.setting.learning_rate,
            "warmup_steps": self.setting.steps // 10,
            "lr_scheduler_type": "linear",
            "use_cpu": not torch.cuda.is_available(),
            "dataloader_pin_memory": False,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": self.seed,
        }

    def train(self, trainer: Any) -> float:
        """Train a model, and return the processor seconds per step of all cores.

        Processor time does not count other programs on the machine.

        Args:
            trainer: the trainer of the model.
        """
        trainer.remove_callback(PrinterCallback)
        start = time.process_time()
        trainer.train()
        return (time.process_time() - start) / self.setting.steps


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Train every combination, print a table, and return its rows."""
    parser = argparse.ArgumentParser(description="Softmax and entmax attention in small encoders.")
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    setting = QUICK if options.quick else Setting()
    attentions = [SOFTMAX, ANNEALED] if options.quick else [SOFTMAX, ENTMAX, ANNEALED]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tilefold-entmax-") as folder:
        experiment = Experiment(
            folder=Path(folder),
            config=save_untrained_model(Path(folder), setting, options.seed),
            collection=load_collection("pydocs"),
            setting=setting,
            seed=options.seed,
        )
        for run_task in (run_retrieval, run_classification):
            for attention in attentions:
                row = run_task(experiment, attention)
                print(describe(row), flush=True)
                rows.append(row)
    if options.json is not None:
        options.json.write_text(
            json.dumps([asdict(row) for row in rows], indent=2) + "\n",
            encoding="utf-8",
        )
    return rows


def save_untrained_model(folder: Path, setting: Setting, seed: int) -> ModernBertConfig:
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
        num_labels=N_MODULES,
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
    """Return the first principal components of MiniLM's word vectors, with unit variance.

    Args:
        dimension: the number of components.
    """
    weights = load_file(minilm_path() / "model.safetensors")
    vectors = next(
        weight for name, weight in weights.items() if name.endswith("word_embeddings.weight")
    ).float()
    vectors = vectors - vectors.mean(dim=0)
    _, axes = torch.linalg.eigh(vectors.T @ vectors)  # by ascending variance
    components = vectors @ axes[:, -dimension:]
    return components / components.std()


def set_attention(model: Any, attention: Attention) -> list[Any]:
    """Set the attention of a model, and return the callbacks that its trainer needs.

    Args:
        model: the model.
        attention: its attention.
    """
    if attention.is_softmax:
        return []
    if attention.anneal:
        use_entmax(model, 1.0)
        return [AlphaSchedule(attention.alpha, until=attention.anneal)]
    use_entmax(model, attention.alpha)
    return []


def run_retrieval(experiment: Experiment, attention: Attention) -> Row:
    """Train and evaluate a single-vector retriever.

    The vector of a text is the mean of its last states, and scores are cosines. Negatives are the
    other documents of the batch.

    Args:
        experiment: the untrained model, the data and the sizes.
        attention: the attention of the model.
    """
    torch.manual_seed(experiment.seed)
    model = SentenceTransformer(
        modules=[
            Transformer(str(experiment.folder), max_seq_length=experiment.setting.length),
            Pooling(experiment.config.hidden_size, "mean"),
        ],
    )
    # Without an example text, the model card would encode texts with a progress bar.
    model.model_card_data.widget = [{"text": "open a file"}]
    collection = experiment.collection
    pairs = collection.pairs("train")
    train_dataset = Dataset.from_dict(
        {
            "query": [collection.queries[query] for query, _ in pairs],
            "document": [collection.documents[document].text for _, document in pairs],
        },
    )
    loss = MultipleNegativesRankingLoss(model)
    training_arguments = one_gpu(SentenceTransformerTrainingArguments)(
        **experiment.training_arguments(),
    )
    trainer = SentenceTransformerTrainer(
        model,
        training_arguments,
        train_dataset=train_dataset,
        loss=loss,
        callbacks=set_attention(model, attention),
    )
    seconds = experiment.train(trainer)
    model.eval()
    ndcg, sparsity = evaluate_retriever(model, experiment, attention)
    return make_row("retrieval", attention, "nDCG@10", ndcg, sparsity, seconds)


def evaluate_retriever(
    model: SentenceTransformer,
    experiment: Experiment,
    attention: Attention,
) -> tuple[float, SparsityRecord | None]:
    """Return the nDCG@10 of a retriever on the test queries, and the sparsity of its attention.

    The documents are those of the test queries and of the training pairs.

    Args:
        model: the retriever.
        experiment: the data and the sizes.
        attention: the attention of the model.
    """
    collection = experiment.collection
    n_documents = experiment.setting.documents
    qrels = dict(list(collection.qrels["test"].items())[:n_documents])
    document_ids = {document for grades in qrels.values() for document in grades}
    document_ids |= {document for _, document in collection.pairs("train")[:n_documents]}
    searched_ids = [document for document in collection.documents if document in document_ids]
    with count_sparsity(model, attention) as sparsity:
        document_vectors = model.encode(
            [collection.documents[document].text for document in searched_ids],
            convert_to_tensor=True,
            show_progress_bar=False,
        )
    query_vectors = model.encode(
        [collection.queries[query] for query in qrels],
        convert_to_tensor=True,
        show_progress_bar=False,
    )
    scores = model.similarity(query_vectors, document_vectors)
    best = scores.topk(min(RANKING_SIZE, len(searched_ids)))
    run: dict[str, dict[str, float]] = {}
    for query, best_scores, positions in zip(
        qrels,
        best.values.tolist(),
        best.indices.tolist(),
        strict=True,
    ):
        best_ids = [searched_ids[position] for position in positions]
        run[query] = dict(zip(best_ids, best_scores, strict=True))
    return evaluate(run, qrels, ["nDCG@10"])["nDCG@10"], sparsity


def run_classification(experiment: Experiment, attention: Attention) -> Row:
    """Train and evaluate a classifier that predicts the module of a docstring.

    Args:
        experiment: the untrained model, the data and the sizes.
        attention: the attention of the model.
    """
    torch.manual_seed(experiment.seed)
    model = ModernBertForSequenceClassification.from_pretrained(
        str(experiment.folder),
        config=experiment.config,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(experiment.folder))
    labelled_texts = tokenize_labelled_texts(experiment, tokenizer)
    n_test = experiment.setting.held_out
    test_texts = labelled_texts[:n_test]
    trainer = Trainer(
        model,
        one_gpu(TrainingArguments)(**experiment.training_arguments()),
        train_dataset=labelled_texts[n_test:],
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=set_attention(model, attention),
    )
    seconds = experiment.train(trainer)
    model.eval()
    with count_sparsity(model, attention) as sparsity:
        logits = torch.as_tensor(trainer.predict(test_texts).predictions)
    labels = torch.tensor([text["labels"] for text in test_texts])
    accuracy = float((logits.argmax(dim=-1) == labels).float().mean())
    return make_row("classification", attention, "accuracy", accuracy, sparsity, seconds)


def tokenize_labelled_texts(experiment: Experiment, tokenizer: Any) -> list[Any]:
    """Return the features of docstrings of the largest modules with their labels, in random order.

    Args:
        experiment: the collection and the sizes.
        tokenizer: the tokenizer of the model.
    """
    collection = experiment.collection
    setting = experiment.setting
    module_of_document = {document: document.partition(".")[0] for document in collection.documents}
    largest_modules = Counter(module_of_document.values()).most_common(N_MODULES)
    label_of_module = {module: label for label, (module, _) in enumerate(largest_modules)}
    documents = [
        document
        for document in collection.documents
        if module_of_document[document] in label_of_module
    ]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    labelled_texts = []
    for position in order[: setting.held_out + setting.documents]:
        document = documents[position]
        features = tokenizer(collection.documents[document].text, truncation=True)
        label = label_of_module[module_of_document[document]]
        labelled_texts.append(features | {"labels": label})
    return labelled_texts


def count_sparsity(model: Any, attention: Attention) -> Any:
    """Return a context that counts positive weights; for softmax, one that yields ``None``.

    Args:
        model: the model.
        attention: its attention.
    """
    return nullcontext() if attention.is_softmax else record_sparsity(model, blocks=False)


def make_row(
    task: str,
    attention: Attention,
    measure: str,
    value: float,
    sparsity: SparsityRecord | None,
    seconds_per_step: float,
) -> Row:
    """Return one row of the table.

    Args:
        task: the name of the task.
        attention: the attention of the model.
        measure: the name of the measure.
        value: its value.
        sparsity: counts of weights, or ``None`` for softmax.
        seconds_per_step: processor time of a training step.
    """
    nonzero = None
    support = None
    if sparsity is not None:
        total = sparsity.total
        nonzero = total.nonzero[0]
        support = total.mean_support[0]
    return Row(
        task,
        attention.name,
        attention.alpha,
        measure,
        value,
        nonzero,
        support,
        seconds_per_step,
    )


def describe(row: Row) -> str:
    """Return a row as a line of text."""
    sparsity = "all weights positive"
    if row.nonzero is not None:
        sparsity = f"{row.nonzero:.1%} of weights, {row.support:.1f} per query"
    return (
        f"{row.task:<15}{row.attention:<17} alpha {row.alpha:<4} {row.measure} {row.value:.3f}   "
        f"{sparsity:<34} {1000 * row.seconds_per_step:.0f} ms per step"
    )


if __name__ == "__main__":
    main()
