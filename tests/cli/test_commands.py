"""Every verb once on a collection and a model made by the program; with ``minilm``; ``tilefold
info``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.inside import fallback, releases
from tests.kernels import triton_installed
from tests.recipes.small import small_collection
from tilefold import __version__, cli, ops
from tilefold.cli import COMMAND_GROUPS
from tilefold.cli.info import OPTIONAL_PACKAGES, collect
from tilefold.ops.implementations import kernel_of
from tilefold.ops.lsr_head import configs
from tilefold.recipes import minilm_splade
from tilefold.retrieval import open_tokens, read_trec_run, read_vectors, write_vectors

VERBS = (
    "demo",
    "train",
    "encode",
    "index",
    "search",
    "evaluate",
    "fuse",
    "bench",
    "warmup",
    "info",
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_the_program_a_version(verb: str, call: Call) -> None:
    assert f"tilefold {verb}" in done(call(verb, "--help")).out
    version = call("--version")
    assert (version.code, version.out) == (0, f"tilefold {__version__}\n")


@pytest.mark.parametrize("arguments", [pytest.param((), id="none"), pytest.param(("--debug",))])
def test_the_program_without_a_command_shows_its_commands(
    call: Call,
    arguments: tuple[str, ...],
) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.err) == (2, "")
    assert all(verb in outcome.out for verb in VERBS)


def test_the_help_of_the_program_groups_its_commands_and_shows_a_first_search(call: Call) -> None:
    help_text = done(call("--help")).out
    titles = [help_text.index(f" {title} ") for title in COMMAND_GROUPS]
    assert titles == sorted(titles)
    assert "tilefold index --backend bm25 --data FILE --output INDEX" in help_text


@pytest.mark.skipif(torch.cuda.is_available(), reason="what machines without a GPU say")
def test_warmup_says_that_nothing_is_built_without_a_gpu(call: Call, tmp_path: Path) -> None:
    fails(call("warmup", "--model", tmp_path), 1, "torch sees none here; on a CPU nothing is built")


def test_the_steps_write_json_alone_to_stdout_and_no_progress_to_a_pipe(work: Path) -> None:
    verbs = ("train", "encode", "index")
    trained, encoded, indexed = (json.loads((work / f"{verb}.json").read_text()) for verb in verbs)
    assert (trained["steps"], trained["fused"]) == (2, True)
    assert (encoded["n"], encoded["kind"], encoded["failed"]) == (16, "document", {})
    assert 0 < encoded["mean_active_terms"] <= 64
    assert (indexed["backend"], indexed["n_documents"]) == ("exact", 16)
    if not torch.cuda.is_available():
        line = "model computes in fp32 on cpu (the default on CPUs)\n"
        assert (work / "encode.err").read_text() == line
    assert (work / "index.err").read_text() == ""
    lines = (work / "train.err").read_text().splitlines()
    few_steps, *dense = [line for line in lines if "GPUs are visible" not in line]
    assert few_steps.startswith("warning: the training had 2 steps, which hardly change a model")
    # so few steps leave vectors as full as they were
    assert [line.split(" vectors have ")[0] for line in dense] == [
        "warning: query",
        "warning: document",
    ]
    assert all("too many for an index" in line for line in dense)


def test_search_explains_a_score_by_the_terms_that_matched(call: Call, work: Path) -> None:
    folder_options = ("--model", work / "model", "--index", work / "index")
    explained = ("--data", work / "data", "--vectors", work / "vectors")
    hits = measured(
        call(
            "search",
            "how do I work with csv files",
            *folder_options,
            *explained,
            "--k",
            "3",
            "--json",
        ),
    )["hits"]
    assert [hit["rank"] for hit in hits] == [1, 2, 3]
    for hit in hits:
        shares = [term["contribution"] for term in hit["terms"]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(hit["score"], rel=1e-5)  # fp32 sums of at most 64 terms
        assert all(
            term["share"] == pytest.approx(term["contribution"] / hit["score"])
            for term in hit["terms"]
        )
        assert not {"[CLS]", "[SEP]"} & {term["term"] for term in hit["terms"]}
        assert hit["title"].startswith("module")
    table = done(call("search", "how do I work with csv files", *folder_options, *explained))
    first = hits[0]["terms"][0]
    assert hits[0]["title"] in table.out and f"{first['term']} {first['share']:.0%}" in table.out
    assert (
        hits[0]["id"] in table.out
        and hits[0]["id"] in call("search", "csv files", *folder_options).out
    )


def test_search_agrees_with_evaluate(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    folder_options = ("--model", work / "model", "--index", work / "index")
    run, query = tmp_path / "run.trec", small_collection().queries["q13"]
    alone = small_collection()  # a query in a larger batch may round otherwise
    alone.qrels = {"test": {"q13": {"d13": 1}}}
    alone.save_beir(tmp_path / "data")
    scores: dict[str, dict[str, float]] = {}
    for dtype in ("fp32", "bf16"):
        assert (
            call(
                "evaluate",
                "--data",
                tmp_path / "data",
                *folder_options,
                "--k",
                "3",
                "--overwrite",
                "--save-run",
                run,
                "--dtype",
                dtype,
            ).code
            == 0
        )
        search = ("search", query, *folder_options, "--k", "3", "--dtype", dtype, "--json")
        hits = measured(call(*search))["hits"]
        scores[dtype] = {hit["id"]: hit["score"] for hit in hits}
        assert scores[dtype] == read_trec_run(run)["q13"]
    assert scores["bf16"] != scores["fp32"]


def test_search_reads_the_vectors_of_its_hits_only(call: Call, work: Path, tmp_path: Path) -> None:
    stored = read_vectors(work / "vectors")
    write_vectors(stored, tmp_path / "vectors", shard_size=4)
    folder_options = (
        "--model",
        work / "model",
        "--index",
        work / "index",
        "--vectors",
        tmp_path / "vectors",
    )
    search = ("search", "how do I work with csv files", *folder_options, "--k", "2", "--json")
    full = measured(call(*search))["hits"]
    others = [
        at
        for at in range(4)
        if not {hit["id"] for hit in full} & set(stored.ids[4 * at : 4 * at + 4])
    ]
    for at in others:
        shard = tmp_path / "vectors" / f"part-{at:05d}.parquet"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1  # among the weights
        shard.write_bytes(content)
    assert others and measured(call(*search))["hits"] == full


def test_search_reads_the_documents_of_its_hits_only(
    call: Call,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilefold.cli import _scores
    from tilefold.retrieval.data import collection
    from tilefold.retrieval.data import lazy_documents as stored

    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(work / "cache"))
    monkeypatch.setattr(_scores, "STREAMED_FILE_BYTES", 0)
    monkeypatch.setattr(stored, "SETTLED_SECONDS", 0.0)
    assert (
        call("index", "--backend", "bm25", "--data", work / "data", "--output", work / "words").code
        == 0
    )
    search = ("search", "csv files", "--index", work / "words", "--data", work / "data", "--json")
    first = done(call(*search))
    for module in (collection, stored):
        monkeypatch.setattr(
            module,
            "load_documents",
            lambda file: pytest.fail("the whole file was read"),
        )
    again = call(*search)
    assert (again.code, again.out) == (0, first.out)


def test_queries_of_one_split_are_encoded_and_cannot_be_indexed(
    call: Call,
    work: Path,
    tmp_path: Path,
) -> None:
    vectors = tmp_path / "queries"
    arguments = ("--queries", "--split", "test", "--jsonl", tmp_path / "q.jsonl", "--json")
    outcome = call(
        "encode",
        "--model",
        work / "model",
        "--data",
        work / "data",
        "--output",
        vectors,
        *arguments,
    )
    assert json.loads(outcome.out)["n"] == 4
    lines = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["q12", "q13", "q14", "q15"]
    assert lines[0]["contents"] == small_collection().queries["q12"]


def test_training_again_returns_the_finished_model(
    call: Call,
    work: Path,
    masked_lm: str,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(work)
    same = ("--data", "data", "--model", masked_lm, "--output", "model", "--batch-size", "4")
    again = call("train", *same, "--steps", "2")
    assert (again.code, "already trained" in again.out) == (0, True)
    fails(call("train", *same, "--steps", "3"), 1, "differs in max_steps")


def test_damaged_weights_and_packages_are_said(
    call: Call,
    work: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    shutil.copytree(work / "model", broken := tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    encode = ("encode", "--data", work / "data", "--output", tmp_path / "v", "--model")
    fails(call(*encode, broken), 1, f"the weights in {broken} are damaged")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    fails(call(*encode, work / "model"), 1, 'pip install "tilefold[sentence-transformers]"')
    assert not (tmp_path / "v").exists()


def test_a_missing_demo_and_a_damaged_record_say_to_run_it(
    call: Call,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="run tilefold demo first"):
        cli.main(["search", "x", "--debug"])
    (tmp_path / "demo.json").write_text("{")
    fails(call("search", "x", "--demo", tmp_path), 1, "is damaged: run tilefold demo again")


QUERY = "how do I packaged with csv files"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection encoded and indexed with minilm, and with the models that no step of training
    leaves.
    """
    folder = tmp_path_factory.mktemp("packaged")
    small_collection().save_beir(folder / "data")
    data = ("--data", folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEFOLD_CACHE_DIR", str(folder / "cache"))
        run_steps(
            (
                "train",
                *data,
                "--recipe",
                "colbert",
                "--steps",
                "0",
                "--dimension",
                "0",
                "--output",
                folder / "colbert",
            ),
            ("encode", *data, "--model", "minilm", "--output", folder / "vectors"),
            (
                "encode",
                *data,
                "--model",
                "minilm",
                "--kind",
                "tokens",
                "--output",
                folder / "tokens",
            ),
            (
                "encode",
                *data,
                "--model",
                folder / "colbert",
                "--kind",
                "tokens",
                "--output",
                folder / "trained-tokens",
            ),
            ("index", "--vectors", folder / "vectors", "--output", folder / "index"),
        )
    return folder


@pytest.fixture
def packaged(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(made / "cache"))
    return made


@pytest.mark.slow
def test_minilm_encodes_queries_and_tokens_as_the_model_of_the_documents(
    call: Any,
    packaged: Path,
    tmp_path: Path,
) -> None:
    one, other = open_tokens(packaged / "tokens"), open_tokens(packaged / "trained-tokens")
    assert one.manifest.model_fingerprint == other.manifest.model_fingerprint
    assert one.manifest.model_source == "minilm"
    done(
        call(
            "encode",
            "--data",
            packaged / "data",
            "--model",
            "minilm",
            "--queries",
            "--output",
            tmp_path / "q",
        ),
    )
    made_by = {
        read_vectors(folder).provenance.model_fingerprint
        for folder in (packaged / "vectors", tmp_path / "q")
    }
    assert len(made_by) == 1, "queries are encoded by the model of the documents"


@pytest.mark.slow  # six searches; the walk of three kinds of search takes minilm too
def test_minilm_searches_and_reranks_as_the_saved_models(call: Any, packaged: Path) -> None:
    search = ("search", QUERY, "--index", packaged / "index", "--json")
    hits = {}
    for name, options in {
        "packaged": ("--model", "minilm"),
        "late": ("--model", "minilm", "--data", packaged / "data", "--rerank", "minilm"),
        "saved late": (
            "--model",
            "minilm",
            "--data",
            packaged / "data",
            "--rerank",
            packaged / "colbert",
        ),
        "stored late": ("--model", "minilm", "--rerank", packaged / "tokens"),
        "stored, named": (
            "--model",
            "minilm",
            "--rerank",
            packaged / "trained-tokens",
            "--rerank-model",
            "minilm",
        ),
    }.items():
        hits[name] = [
            (hit["id"], hit["score"]) for hit in measured(call(*search, *options))["hits"]
        ]
    assert hits["packaged"] and hits["late"] == hits["saved late"]
    assert hits["stored late"] == hits["stored, named"]
    assert {name for name, _ in hits["stored late"]} == {name for name, _ in hits["late"]}
    scores = dict(hits["late"])
    stored = dict(hits["stored late"])
    assert np.allclose([scores[name] for name in stored], list(stored.values()), atol=0.05)


@pytest.mark.slow
def test_minilm_is_evaluated_as_a_dense_model_and_with_an_index(call: Any, packaged: Path) -> None:
    evaluate = ("evaluate", "--data", packaged / "data", "--model", "minilm", "--json")
    for options in (
        (),
        ("--index", packaged / "index"),
        ("--index", packaged / "index", "--rerank", "minilm"),
    ):
        assert measured(call(*evaluate, *options))["measures"]["nDCG@10"] > 0.5


def test_an_index_of_minilm_grows_by_documents_that_minilm_encodes_later(
    call: Any,
    packaged: Path,
    tmp_path: Path,
) -> None:
    index = tmp_path / "index"
    shutil.copytree(packaged / "index", index)
    new_documents = tmp_path / "new.jsonl"
    new_documents.write_text('{"_id": "harbour", "text": "Ships wait in the harbour."}\n')
    vectors = tmp_path / "vectors"
    done(call("encode", "--data", new_documents, "--model", "minilm", "--output", vectors))
    done(call("index", "--update", "--vectors", vectors, "--output", index))
    search = ("search", "a ship in a port", "--index", index, "--model", "minilm", "--json")
    assert measured(call(*search))["hits"][0]["id"] == "harbour"


def test_a_saved_model_makes_its_own_kind_only(call: Any, packaged: Path, tmp_path: Path) -> None:
    output = ("--data", packaged / "data", "--output", tmp_path / "v")
    minilm_splade().save_pretrained(str(tmp_path / "splade"))
    for model, kind, message in (
        (tmp_path / "splade", "tokens", "is a SparseEncoder; expected a multi-vector model"),
        (packaged / "colbert", "sparse", "is a multi-vector model; expected a SparseEncoder"),
    ):
        fails(call("encode", "--model", model, "--kind", kind, *output), 2, message)


def test_json_and_text_say_what_auto_runs_on_every_device_and_what_is_installed(call: Call) -> None:
    facts = measured(call("info", "--json"))
    assert facts["tilefold"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["operators"]["lsr_head"]["cpu"]["auto"] == "tiled"
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert set(facts["packages"]) == set(OPTIONAL_PACKAGES)
    others = {
        "QuantizedTokens",
        "QuantizedWeight",
        "quantize_tokens",
        "quantize_weight",
        "token_scatter_sparse",
    }
    assert set(facts["operators"]) == set(ops.__all__) - others, "only what takes impl"
    printed = call("info").out
    for name in (f"tilefold {__version__}", "lsr_head_sparse", "sentence-transformers"):
        assert name in printed


def test_info_says_which_kernels_run_on_each_architecture(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "release", lambda: (3, 5))
    kernels = measured(call("info", "--json"))["triton"]["kernels_by_compute_capability"]
    assert kernels["9.0"]["lsr_head"][0] == "portable kernel with TMA"
    assert "Triton 3.5 cannot give warps roles" in kernels["9.0"]["lsr_head"][1]
    assert kernels["12.0"]["lsr_head"][0] == "portable kernel"
    assert "Triton 3.5" in call("info").out and "roles" in call("info").out
    monkeypatch.setattr(releases, "release", lambda: (3, 9))
    kernels = measured(call("info", "--json"))["triton"]["kernels_by_compute_capability"]
    assert kernels["9.0"]["lsr_head"] == ["kernel whose warps load or compute", None]
    monkeypatch.setattr(releases, "release", lambda: (4, 0))
    assert "not tested with" in call("info").out.replace("\n", " ")


def test_asking_warns_of_nothing_and_gives_nothing_up(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hopper = SimpleNamespace(
        name="a Hopper GPU",
        major=9,
        minor=0,
        total_memory=2**36,
        multi_processor_count=132,
    )
    monkeypatch.setattr(releases, "release", lambda: (3, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a Hopper GPU")
    failures = dict(fallback.FAILURES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fallback.FallbackWarning)
        facts = collect()
        done(call("info"))
    assert failures == fallback.FAILURES
    if triton_installed():
        assert "cannot give warps roles" in facts["operators"]["lsr_head"]["cuda"]["why_not_faster"]


def test_a_failed_kernel_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(releases, "release", lambda: (3, 9))
    monkeypatch.setitem(fallback.FAILURES, (configs.BY_ROLES, device), "no such instruction")
    assert kernel_of("lsr_head", (9, 0), device) == (
        "portable kernel with TMA",
        "no such instruction",
    )


def test_a_plan_says_what_fits_and_what_encoding_takes(call: Call, tmp_path: Path) -> None:
    transformers.BertConfig(vocab_size=250002).save_pretrained(str(tmp_path))
    arguments = ("info", "plan", "--model", str(tmp_path), "--length", "256", "--gpu-memory", "40")
    measures = measured(call(*arguments, "--json"))
    assert measures["training"]["largest_batch"] == pytest.approx(306, rel=0.05), (
        "as measured with XLM-R-base"
    )
    assert (
        measures["training_checkpointed"]["largest_batch"]
        > 4 * measures["training"]["largest_batch"]
    )
    for step in (
        "training",
        "training_checkpointed",
    ):  # the loss of all rows is the limit: 37 rows of V in fp32
        assert measures[step]["largest_in_mini_batches"] == pytest.approx(
            36.6 * 2**30 / 37 / 250002,
            rel=0.1,
        )
    printed = call(*arguments, "--documents", "1000000000").out
    assert (
        "at most 3" in printed
        and "encoding 1,000,000,000 documents" in printed
        and "not measured" in printed
    )


def test_distilbert_has_a_plan(call: Call, tmp_path: Path) -> None:
    transformers.DistilBertConfig().save_pretrained(str(tmp_path))
    plan = measured(call("info", "plan", "--model", str(tmp_path), "--json"))
    assert plan["shape"] == {"hidden": 768, "layers": 6, "intermediate": 3072, "vocab": 30522}


END_OF_A_COMMAND = """
import atexit, gc, sys
from tilefold import cli

{before}
atexit.register(lambda: print("frozen" if gc.get_freeze_count() else "not frozen"))
sys.argv = ["tilefold", "--version"]
cli.main()
"""
NANOBIND_METACLASS = 'metaclass = type("nb_type_0", (type,), {"__module__": "nanobind"})'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "state"),
    [
        pytest.param("", "frozen", id="without nanobind, for a quick end"),
        pytest.param(NANOBIND_METACLASS, "not frozen", id="with nanobind, which reports leaks"),
    ],
)
def test_garbage_is_collected_at_the_end_where_nanobind_looks_for_leaks(
    before: str,
    state: str,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", END_OF_A_COMMAND.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == state
