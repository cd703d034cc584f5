"""Page images on the command line: from a folder of PDFs and images to ranked pages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("pypdfium2")
pytest.importorskip("sentence_transformers")

import torch

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.recipes.small import small_collection
from tests.stopping import stopping_after_shards
from tests.waiting import wait_until
from tilefold.retrieval import load_queries, open_tokens
from tilefold.testing.page_models import save_page_model
from tilefold.testing.synthetic_pages import random_pages, random_words, save_page_collection

WORDS = random_words(60)
MODEL = ("--model", "model")
PAGES = ("--data", "pages")
LATE = ("index", "--backend", "late", "--storage", "fp16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages and a broken file, a model, token vectors and an index."""
    folder = tmp_path_factory.mktemp("pages")
    save_page_model(folder / "model", "colqwen2", words=WORDS)
    small_pages = random_pages(5, WORDS, words_per_page=6, size=(120, 160))
    wide_pages = random_pages(5, WORDS, words_per_page=6, size=(200, 90), seed=1)
    save_page_collection(folder / "pages", [*small_pages, *wide_pages])
    (folder / "pages" / "broken.pdf").write_bytes(b"%PDF-1.4")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_steps(
            ("encode", *MODEL, *PAGES, "--output", "tokens"),
            (*LATE, "--tokens", "tokens", *PAGES, "--output", "index"),
        )
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def exact_scores(query: str) -> dict[str, float]:
    """Score of each page by MaxSim in fp64 over the stored token vectors, best page first."""
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder("model", device="cpu", local_files_only=True)
    (query_vectors,) = model.encode_query([query])
    store = open_tokens("tokens")
    vectors = store.read(list(store.ids))
    scores: dict[str, float] = {}
    for number, page_id in enumerate(vectors.ids):
        start, end = vectors.offsets[number : number + 2].tolist()
        similarities = query_vectors.double() @ vectors.values[start:end].double().T
        scores[page_id] = float(similarities.amax(dim=1).sum())
    ranking = sorted(scores, key=scores.__getitem__, reverse=True)
    return {page_id: scores[page_id] for page_id in ranking}


def exact_ranking(query: str) -> list[str]:
    """Ids of all pages, best first."""
    return list(exact_scores(query))


def test_encoding_reports_pages_and_files_that_cannot_be_opened(call: Call) -> None:
    again = done(call("encode", *MODEL, *PAGES, "--output", "tokens", "--json"))

    result = json.loads(again.out)
    assert (result["n"], result["failed"]) == (10, {})
    assert list(result["unread_files"]) == ["broken.pdf"]
    assert "--data: 1 file could not be opened, and its pages are left out" in again.err
    assert "not opened: broken.pdf: the PDF is damaged" in again.err


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="defaults"),
        pytest.param(("--dpi", "20", "--pool-factor", "2", "--pages", "1"), id="options of encode"),
    ],
)
def test_vectors_of_pages_are_verified(
    call: Call,
    tmp_path: Path,
    options: tuple[str, ...],
) -> None:
    tokens = tmp_path / "tokens"
    done(call("encode", *MODEL, *PAGES, "--output", tokens, *options))
    pages = options[-2:] if "--pages" in options else ()

    verified = measured(call("verify", tokens, *MODEL, *PAGES, *pages, "--sample", "4", "--json"))

    assert (verified["n_compared"], verified["passed"]) == (4, True)
    assert verified["largest_difference"] < 1e-2  # of another number of tokens, it is infinite


def test_a_search_finds_the_pages_that_exact_scores_rank_first(call: Call) -> None:
    for query in list(load_queries("pages/queries.jsonl").values())[:3]:
        searched = call("search", query, "--index", "index", *MODEL, *PAGES, "--k", "4", "--json")

        hits = measured(searched)["hits"]
        expected = list(exact_scores(query).items())[:4]
        assert [hit["id"] for hit in hits] == [page_id for page_id, _ in expected]
        assert [hit["score"] for hit in hits] == pytest.approx(
            [score for _, score in expected],
            rel=2**-11,  # query vectors are rounded to fp16
        )


@pytest.mark.parametrize("storage", ["int8", "fp16", "int4"])
def test_an_index_of_pages_is_stored_in_fewer_bits(
    call: Call,
    tmp_path: Path,
    storage: str,
) -> None:
    query = next(iter(load_queries("pages/queries.jsonl").values()))
    index = ("--index", tmp_path / "index")
    built = ("index", "--backend", "late", "--tokens", "tokens", "--output", tmp_path / "index")
    done(call(*built, "--storage", storage))

    hits = measured(call("search", query, *index, *MODEL, "--k", "10", "--json"))["hits"]

    assert {hit["id"] for hit in hits} == set(exact_ranking(query))
    scores = exact_scores(query)
    error = {"fp16": 2**-11, "int8": 0.02, "int4": 0.2}[storage]
    assert [hit["score"] for hit in hits] == pytest.approx(
        [scores[hit["id"]] for hit in hits],
        rel=error,
    )


def test_pages_are_filtered_by_file_and_number(call: Call) -> None:
    searched = ("search", WORDS[0], "--index", "index", *MODEL, "--json")

    of_file = measured(call(*searched, "--where", "file=report-0.pdf"))["hits"]
    first_pages = measured(call(*searched, "--where", "page=1", "--where", "file=report-0.pdf"))

    assert {hit["id"] for hit in of_file} == {f"report-0.pdf#p{number}" for number in (1, 2, 3)}
    assert [hit["id"] for hit in first_pages["hits"]] == ["report-0.pdf#p1"]


def test_reranking_from_images_gives_the_scores_of_the_token_vectors(call: Call) -> None:
    reranked = ("search", WORDS[1], "--index", "index", *MODEL, *PAGES, "--json", "--rerank")

    stored = measured(call(*reranked, "tokens"))["hits"]
    from_images = measured(call(*reranked, "model"))["hits"]

    scores = {hit["id"]: hit["score"] for hit in stored}
    assert {hit["id"]: hit["score"] for hit in from_images} == pytest.approx(scores, rel=2**-8)


def test_pages_are_explained_at_the_resolution_of_their_vectors(call: Call, tmp_path: Path) -> None:
    tokens, index = tmp_path / "tokens", tmp_path / "index"
    done(call("encode", *MODEL, *PAGES, "--output", tokens, "--dpi", "20"))
    done(call(*LATE, "--tokens", tokens, *PAGES, "--output", index))
    assert open_tokens(tokens).manifest.n_tokens < open_tokens("tokens").manifest.n_tokens
    searched = ("search", WORDS[0], "--index", index, *MODEL, *PAGES, "--explain", "--json")

    for options in ((), ("--rerank", tokens)):
        hits = measured(call(*searched, *options))["hits"]
        assert len(hits) == 10
        assert all(hit["matches"] for hit in hits)


def test_an_index_of_pages_is_evaluated(call: Call) -> None:
    evaluated = call("evaluate", "--index", "index", *MODEL, *PAGES, "--json")

    measures = measured(evaluated)["measures"]
    rankings = [exact_ranking(query) for query in load_queries("pages/queries.jsonl").values()]
    assert len(rankings) == 10
    assert measures["R@100"] == 1


def test_pages_are_added_and_deleted(call: Call, tmp_path: Path) -> None:
    first_pages = (*PAGES, "--pages", "1")
    index = tmp_path / "index"
    done(call("encode", *MODEL, *first_pages, "--output", tmp_path / "first"))
    done(call(*LATE, "--tokens", tmp_path / "first", *first_pages, "--output", index))
    update = ("index", "--update", "--tokens", "tokens", *PAGES, "--output", index)
    added = measured(call(*update, "--json"))
    assert added["n_documents"] == 10

    (tmp_path / "deleted.txt").write_text("report-0.pdf#p1\n")
    done(call("index", "--delete", tmp_path / "deleted.txt", "--output", index))

    hits = measured(call("search", WORDS[0], "--index", index, *MODEL, "--json"))["hits"]
    expected = [page_id for page_id in exact_ranking(WORDS[0]) if page_id != "report-0.pdf#p1"]
    assert [hit["id"] for hit in hits] == expected


def test_the_next_command_repeats_the_range_of_pages(call: Call, tmp_path: Path) -> None:
    pages = (*PAGES, "--pages", "1,3-")

    encoded = done(call("encode", *MODEL, *pages, "--output", tmp_path / "tokens"))

    assert "--data pages --pages 1,3- --output INDEX" in encoded.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(("--pages", "0"), "--pages: expected pages from 1", id="malformed range"),
        pytest.param(("--dry-run",), "--dry-run estimates texts", id="dry run"),
        pytest.param(("--engine", "ray"), "--engine ray reads texts", id="Ray"),
        pytest.param(("--pool-factor", "0.5"), "--pool-factor: expected at least 1", id="pooling"),
        pytest.param(
            ("--passages", "100"),
            "expected texts, got the page image 'report-0.pdf#p1'",
            id="passages",
        ),
    ],
)
def test_encoding_pages_refuses(
    call: Call,
    tmp_path: Path,
    options: tuple[str, ...],
    message: str,
) -> None:
    outcome = call("encode", *MODEL, *PAGES, "--output", tmp_path / "tokens", *options)

    assert outcome.code != 0
    assert message in outcome.err


def test_a_model_of_texts_refuses_pages(call: Call, masked_lm: str, tmp_path: Path) -> None:
    outcome = call("encode", "--model", masked_lm, *PAGES, "--output", tmp_path / "vectors")

    fails(outcome, 2, "--data: expected texts for a SparseEncoder, got page images")


def test_options_of_pages_are_refused_for_texts(call: Call, tmp_path: Path) -> None:
    small_collection().save_beir(tmp_path / "data")
    texts = (*MODEL, "--data", tmp_path / "data", "--output", tmp_path / "tokens")

    fails(call("encode", *texts, "--dpi", "72"), 2, "--dpi requires pages")
    fails(call("encode", *texts, "--pages", "1"), 2, "--pages: expected a folder of PDFs")


def test_texts_are_refused_where_pages_have_none(call: Call, tmp_path: Path) -> None:
    outcome = call("index", "--backend", "bm25", *PAGES, "--output", tmp_path / "bm25")

    fails(outcome, 1, "expected texts, got the page image 'report-0.pdf#p1'")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="lists processes in /proc")
def test_a_killed_run_with_workers_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    pages = random_pages(80, WORDS, words_per_page=6, size=(120, 160))
    save_page_collection(tmp_path / "pages", pages, pages_per_pdf=8)
    encode = ["encode", *MODEL, "--data", str(tmp_path / "pages")]
    encode += ["--shard-size", "8", "--page-workers", "2", "--output"]
    command = [sys.executable, "-m", "tilefold.cli", *encode]
    stopping_command = [sys.executable, "-c", stopping_after_shards(3), *encode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    killed = subprocess.Popen([*stopping_command, str(tmp_path / "resumed")], env=environment)
    _wait_for_shards(killed, tmp_path / "resumed", n_shards=3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    _wait_for_end_of_workers(str(tmp_path / "resumed"))
    n_saved = len(list((tmp_path / "resumed").glob("part-*.safetensors")))
    for name in ("resumed", "whole"):
        subprocess.run([*command, str(tmp_path / name)], env=environment, check=True)

    assert n_saved == 3
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").glob("part-*")}
    resumed = {file.name: file.read_bytes() for file in (tmp_path / "resumed").glob("part-*")}
    assert len(whole) >= 10
    assert resumed == whole
    assert len(open_tokens(tmp_path / "resumed").ids) == 80


def _wait_for_end_of_workers(argument: str) -> None:
    """Wait until no process has this argument: workers notice that their parent was killed."""
    wait_until(lambda: not any(argument in command for command in _commands()))


def _commands() -> list[str]:
    """Return the command line of each process of this machine."""
    commands: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has just ended
            commands.append(file.read_text())
    return commands


def _wait_for_shards(run: subprocess.Popen[bytes], folder: Path, n_shards: int) -> None:
    """Wait until a running command has written some shards."""
    while len(list(folder.glob("part-*.safetensors"))) < n_shards:
        assert run.poll() is None, "the command has ended"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Compute with one thread, as the machine runs other tests at the same time."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
