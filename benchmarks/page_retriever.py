r"""Train a small model of page images from scratch, and measure whether it finds unseen pages.

    python -m benchmarks.page_retriever --output FOLDER [--form small] [--stock] [--seeds 0 1 2]

The pages are synthetic: random words of a fixed vocabulary, drawn by Pillow. A query has two words
of a page. The model has the architecture of ColPali with random weights, and is trained by the
recipe `colbert` on pairs of a query and a page. It must then find, by their words, pages that it
has not seen: nDCG@10 on these pages is the result. A page is relevant if it has all words of the
query. Chance is the expected nDCG@10 of these pages in random order.

The form `small` takes minutes on a CPU. The form `full` needs a GPU, and more steps than were
tried: 2,000 steps on 20,000 pages reach .05 on an H200, and easier forms .34 to .46 after 1,500
steps.

With `--stock`, the same run is repeated with the scores of sentence-transformers. The first losses
must be the same. Later losses differ, because training magnifies the rounding of its first steps:
runs of several seeds show whether the results differ more between the scores than between the
seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tilefold import retrieval as r
from tilefold.bench.results import choose_device, collect, results_file, write_csv
from tilefold.recipes import train
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.testing.page_models import PageModelSize, save_page_model
from tilefold.testing.synthetic_pages import SyntheticPage, draw_page, random_words

WORDS_PER_QUERY = 2
# Seeds of test pages begin here, so that no training page is the same.
FIRST_TEST_SEED = 10**9
PAGES_PER_TASK = 64
CUT_OFF = 10
# First logged losses that are compared between fused and stock scores.
N_COMPARED_LOSSES = 5
CSV_KEY = ("form", "steps", "scores", "seed")


@dataclass(frozen=True)
class Form:
    """Sizes of a run.

    Attributes:
        n_words: words of the vocabulary.
        words_per_page: words that are drawn on a page, as far as they fit.
        page_pixels: width and height of a page.
        font_size: height of the font in pixels; the first word has twice as much.
        n_train: training pages, each with one query.
        n_test: pages that are searched.
        patch_size: width and height of a patch in pixels.
        hidden_size: width of the vision and of the language model.
        n_layers: layers of each of them.
        n_heads: attention heads of each of them.
        dimension: entries of a token vector.
        batch_size: pairs of a training step.
        steps: training steps.
        learning_rate: peak of the schedule.
        similarity_scale: factor on the scores before the softmax.
    """

    n_words: int
    words_per_page: int
    page_pixels: int
    font_size: int
    n_train: int
    n_test: int
    patch_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    dimension: int
    batch_size: int
    steps: int
    learning_rate: float
    similarity_scale: float


FORMS = {
    "small": Form(
        n_words=16,
        words_per_page=3,
        page_pixels=48,
        font_size=10,
        n_train=6000,
        n_test=200,
        patch_size=8,
        hidden_size=64,
        n_layers=1,
        n_heads=4,
        dimension=32,
        batch_size=24,
        steps=500,
        learning_rate=1e-3,
        similarity_scale=4.0,
    ),
    "full": Form(
        n_words=200,
        words_per_page=10,
        page_pixels=128,
        font_size=12,
        n_train=60_000,
        n_test=1000,
        patch_size=8,
        hidden_size=192,
        n_layers=2,
        n_heads=6,
        dimension=64,
        batch_size=64,
        steps=4000,
        learning_rate=1e-3,
        similarity_scale=4.0,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Result of a training run.

    Attributes:
        scores: ``"fused"`` or ``"stock"``, the scores of the loss.
        seed: seed of the weights and of the order of pairs.
        ndcg: nDCG@10 on unseen pages.
        ndcg_untrained: the same before training.
        ndcg_chance: expected nDCG@10 of the same pages in random order.
        first_loss: loss of the first logged step.
        last_loss: loss of the last logged step.
        seconds: time of training.
        losses: all logged losses.
    """

    scores: str
    seed: int
    ndcg: float
    ndcg_untrained: float
    ndcg_chance: float
    first_loss: float
    last_loss: float
    seconds: float
    losses: list[float]


def page_of_seed(form: Form, vocabulary: Sequence[str], seed: int) -> SyntheticPage:
    """Draw the page of a seed, which has at least as many words as a query.

    Args:
        form: sizes of the page.
        vocabulary: the words.
        seed: seed of the words, their colours and indents.
    """
    generator = random.Random(seed)  # noqa: S311
    while True:
        page = draw_page(
            generator.sample(list(vocabulary), form.words_per_page),
            size=(form.page_pixels, form.page_pixels),
            font_size=form.font_size,
            seed=seed,
        )
        if len(page.words) >= WORDS_PER_QUERY:
            return page


def query_of_page(page_words: Sequence[str], seed: int) -> list[str]:
    """Return the words of the query of a page.

    Args:
        page_words: words of the page.
        seed: seed of the page.
    """
    generator = random.Random(seed)  # noqa: S311
    return generator.sample(page_words, WORDS_PER_QUERY)


def _save_pages(
    form: Form,
    vocabulary: Sequence[str],
    folder: Path,
    seeds: Sequence[int],
) -> list[tuple[str, ...]]:
    """Draw the pages of some seeds into a folder, and return their words.

    Args:
        form: sizes of the pages.
        vocabulary: the words.
        folder: the folder.
        seeds: a seed for each page.
    """
    words = []
    for seed in seeds:
        page = page_of_seed(form, vocabulary, seed)
        page.image.save(folder / f"{seed}.png")
        words.append(page.words)
    return words


def save_collection(
    form: Form,
    vocabulary: Sequence[str],
    folder: Path,
    seeds: Sequence[int],
    split: str,
) -> None:
    """Save pages as PNG files, with a query for each and judgements.

    Pages are drawn by several processes. A folder that is complete is kept.

    Args:
        form: sizes of the pages.
        vocabulary: the words.
        folder: the folder.
        seeds: a seed for each page.
        split: name of the judgements: ``"train"`` judges the page of a query only, and ``"test"``
            all pages that have its words.
    """
    judgements = folder / "qrels" / f"{split}.tsv"
    if judgements.is_file():
        return
    judgements.parent.mkdir(parents=True, exist_ok=True)
    tasks = [
        seeds[start : start + PAGES_PER_TASK] for start in range(0, len(seeds), PAGES_PER_TASK)
    ]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1)) as executor:
        words_of_tasks = executor.map(partial(_save_pages, form, vocabulary, folder), tasks)
        words = [page_words for task_words in words_of_tasks for page_words in task_words]
    query_lines = []
    judgement_lines = ["query-id\tcorpus-id\tscore\n"]
    for position, seed in enumerate(seeds):
        query = query_of_page(words[position], seed)
        query_lines.append(json.dumps({"_id": f"q{seed}", "text": " ".join(query)}) + "\n")
        relevant = [position]
        if split == "test":
            relevant = [other for other in range(len(seeds)) if set(words[other]) >= set(query)]
        judgement_lines += [f"q{seed}\t{seeds[other]}.png\t1\n" for other in relevant]
    (folder / "queries.jsonl").write_text("".join(query_lines), encoding="utf-8")
    judgements.write_text("".join(judgement_lines), encoding="utf-8")


def save_untrained_model(
    form: Form,
    vocabulary: Sequence[str],
    folder: Path,
    seed: int = 0,
) -> Path:
    """Save a small ColPali with random weights that can be trained from scratch.

    transformers draws the weights of linear layers from a normal distribution of deviation .02,
    which is made for wide pretrained models: signals vanish in a narrow network, and training does
    not begin. Glorot's initialization keeps their size.

    Args:
        form: sizes of the model.
        vocabulary: words that are one token of the tokenizer.
        folder: the folder.
        seed: seed of the weights.
    """
    from sentence_transformers import MultiVectorEncoder

    size = PageModelSize(
        hidden_size=form.hidden_size,
        n_layers=form.n_layers,
        n_heads=form.n_heads,
        patch_size=form.patch_size,
        image_size=form.page_pixels,
        embedding_dim=form.dimension,
    )
    save_page_model(folder, "colpali", size=size, words=vocabulary)
    model = MultiVectorEncoder(str(folder), device="cpu")
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
    model.save_pretrained(str(folder))
    return folder


def measure(form: Form, model_folder: Path, collection: r.Collection, folder: Path) -> float:
    """Encode, index and search the test pages, and return nDCG@10.

    Args:
        form: sizes of the run.
        model_folder: the model.
        collection: the test pages.
        folder: a new folder for vectors and index.
    """
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(model_folder), local_files_only=True)
    r.encode_tokens(model, collection.content(), folder / "tokens", batch_size=form.batch_size)
    index = r.LateIndex.build(r.open_tokens(folder / "tokens"), folder / "index", storage="fp16")
    searcher = r.Searcher(index, model, documents=collection.documents)
    ranking = searcher.rank(collection.queries, r.SearchRequest(k=CUT_OFF))
    measures = r.evaluate(ranking.run, collection.qrels["test"], [f"nDCG@{CUT_OFF}"])
    return float(measures[f"nDCG@{CUT_OFF}"])


def chance_ndcg(qrels: Mapping[str, Mapping[str, int]], n_documents: int) -> float:
    """Return the expected nDCG@10 of documents in random order, the mean over queries.

    At each rank of a random order, the document is relevant with the same probability: the share of
    relevant documents.

    Args:
        qrels: query id -> document id -> grade. All grades are 1.
        n_documents: number of documents.
    """
    last_rank = min(CUT_OFF, n_documents)
    discounts = [1 / math.log2(rank + 1) for rank in range(1, last_rank + 1)]
    per_query = []
    for grades in qrels.values():
        expected_dcg = len(grades) / n_documents * sum(discounts)
        ideal_dcg = sum(discounts[: len(grades)])
        per_query.append(expected_dcg / ideal_dcg)
    return statistics.fmean(per_query)


def run_once(form: Form, folder: Path, *, fused: bool, seed: int = 0) -> Outcome:
    """Train a model, and measure it on unseen pages.

    Args:
        form: sizes of the run.
        folder: folder with the collections.
        fused: whether the loss uses fused scores, or those of sentence-transformers.
        seed: seed of the weights and of the order of pairs.
    """
    scores = "fused" if fused else "stock"
    run_folder = folder / f"{scores}-{seed}"
    vocabulary = random_words(form.n_words)
    untrained = save_untrained_model(form, vocabulary, run_folder / "untrained", seed)
    test_pages = r.load_collection(folder / "test")
    recipe = ColbertRecipe(
        base_model=str(untrained),
        max_steps=form.steps,
        batch_size=form.batch_size,
        learning_rate=form.learning_rate,
        similarity_scale=form.similarity_scale,
        bf16=False,
        fused=fused,
        seed=seed,
    )
    trained = run_folder / "trained"
    started = time.monotonic()
    train(recipe, r.load_collection(folder / "train"), trained)
    seconds = time.monotonic() - started
    ndcg_untrained = measure(form, untrained, test_pages, run_folder / "before")
    ndcg = measure(form, trained, test_pages, run_folder / "after")
    losses = read_losses(trained)
    return Outcome(
        scores=scores,
        seed=seed,
        ndcg=ndcg,
        ndcg_untrained=ndcg_untrained,
        ndcg_chance=chance_ndcg(test_pages.qrels["test"], n_documents=form.n_test),
        first_loss=losses[0],
        last_loss=losses[-1],
        seconds=seconds,
        losses=losses,
    )


def read_losses(model_folder: Path) -> list[float]:
    """Return the logged losses of a finished training."""
    rows = (model_folder / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, rows) if "loss" in row]


def _test_seeds(form: Form) -> list[int]:
    return list(range(FIRST_TEST_SEED, FIRST_TEST_SEED + form.n_test))


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a line for each run, and means with standard errors if there are several seeds."""
    print("scores  seed  nDCG@10  untrained  chance  first loss  last loss  seconds")
    for outcome in outcomes:
        print(
            f"{outcome.scores:6}  {outcome.seed:4}  {outcome.ndcg:7.3f}  "
            f"{outcome.ndcg_untrained:9.3f}  {outcome.ndcg_chance:6.3f}  "
            f"{outcome.first_loss:10.4f}  "
            f"{outcome.last_loss:9.4f}  {outcome.seconds:7.0f}",
        )
    for scores in dict.fromkeys(outcome.scores for outcome in outcomes):
        values = [outcome.ndcg for outcome in outcomes if outcome.scores == scores]
        if len(values) > 1:
            error = statistics.stdev(values) / len(values) ** 0.5
            print(f"{scores}: nDCG@10 {statistics.fmean(values):.3f}, standard error {error:.3f}")


def result_row(form_name: str, form: Form, outcome: Outcome) -> dict[str, object]:
    """Return the row of a run for the file of results.

    Args:
        form_name: name of the form.
        form: sizes of the run.
        outcome: result of the run.
    """
    return {
        "form": form_name,
        "steps": form.steps,
        "batch_size": form.batch_size,
        "train_pages": form.n_train,
        "test_pages": form.n_test,
        "scores": outcome.scores,
        "seed": outcome.seed,
        "chance_nDCG@10": round(outcome.ndcg_chance, 4),
        "start_nDCG@10": round(outcome.ndcg_untrained, 4),
        "nDCG@10": round(outcome.ndcg, 4),
        "losses": " ".join(f"{loss:.6g}" for loss in outcome.losses[:N_COMPARED_LOSSES]),
        "last_loss": round(outcome.last_loss, 4),
        "train_seconds": round(outcome.seconds),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of pages and models")
    parser.add_argument("--form", choices=FORMS, default="full")
    parser.add_argument("--steps", type=int, help="training steps, instead of those of the form")
    parser.add_argument("--stock", action="store_true", help="repeat each run with stock scores")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run for each seed")
    parser.add_argument("--results", type=Path, help="folder for <device>/page_retriever.csv")
    arguments = parser.parse_args()
    form = FORMS[arguments.form]
    if arguments.steps is not None:
        form = replace(form, steps=arguments.steps)
    vocabulary = random_words(form.n_words)
    folder = arguments.output
    train_seeds = list(range(form.n_train))
    save_collection(form, vocabulary, folder / "train", train_seeds, "train")
    save_collection(form, vocabulary, folder / "test", _test_seeds(form), "test")
    outcomes: list[Outcome] = []
    for seed in arguments.seeds:
        outcomes.append(run_once(form, folder, fused=True, seed=seed))
        if arguments.stock:
            outcomes.append(run_once(form, folder, fused=False, seed=seed))
            fused, stock = outcomes[-2:]
            differences = [abs(a - b) for a, b in zip(fused.losses, stock.losses, strict=True)]
            print(
                f"seed {seed}: largest difference of the first {N_COMPARED_LOSSES} logged losses "
                f"{max(differences[:N_COMPARED_LOSSES]):.6f}, of all {max(differences):.4f}",
                flush=True,
            )
    print_outcomes(outcomes)
    record = {"form": asdict(form), "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / "page_retriever.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    if arguments.results is not None:
        provenance = collect(choose_device(None))
        path = results_file(arguments.results, "page_retriever", provenance)
        rows = [result_row(arguments.form, form, outcome) for outcome in outcomes]
        write_csv(path, rows, provenance, CSV_KEY)


if __name__ == "__main__":
    main()
