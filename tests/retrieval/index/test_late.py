"""The index of token vectors: exact scores of stored vectors, candidates, updates and damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tilefold import retrieval as r
from tilefold._internal import files as _files
from tilefold.ops import maxsim, quantize_tokens
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import late, token_blocks
from tilefold.retrieval.index.opening import open_index
from tilefold.testing import assert_within_budget

DIMENSION = 16
EXIT_CODE_OF_KILLED = 9
LARGEST_STORAGE_ERROR = {"int8": 1 / 127, "fp16": 2**-10, "int4": 1.01 / 15}


def random_token_vectors(
    ids: list[str],
    seed: int = 0,
    dimension: int = DIMENSION,
    max_tokens: int = 11,
    min_tokens: int = 1,
) -> r.TokenVectors:
    """Token vectors of norm 1 around 40 directions; the third text has none."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(40, dimension, generator=torch.Generator().manual_seed(99))
    n_tokens = torch.randint(min_tokens, max_tokens + 1, (len(ids),), generator=generator)
    rows = []
    for count in n_tokens.tolist():
        centres = directions[torch.randint(40, (count,), generator=generator)]
        noise = torch.randn(count, dimension, generator=generator) / 2
        rows.append(normalize(centres + noise))
    if len(rows) > 2:
        rows[2] = rows[2][:0]
    return r.TokenVectors.pack(ids, rows, dimension, "fp32")


def document_ids(*ranges: range) -> list[str]:
    """Ids ``d0``, ``d1``, ... of the numbers in all ranges."""
    return [f"d{number}" for numbers in ranges for number in numbers]


def query_ids(n_queries: int) -> list[str]:
    return [f"q{number}" for number in range(n_queries)]


def number_of(document: str) -> int:
    """The number in an id of :func:`document_ids`."""
    return int(document[1:])


def maxsim_scores(documents: r.TokenVectors, query: torch.Tensor) -> dict[str, float]:
    """MaxSim in float64 of a query ``[Lq, D]`` and every document that has tokens."""
    scores = {}
    for row, name in enumerate(documents.ids):
        tokens = documents.rows(row).double()
        if len(tokens):
            scores[name] = float((query.double() @ tokens.T).amax(1).sum())
    return scores


def stored_vectors(index: r.LateIndex) -> r.TokenVectors:
    """The token vectors of an index, dequantized."""
    rows = []
    for row in range(index.n_documents):
        rows.append(index.files.document_range(row, row + 1).floats())
    return r.TokenVectors.pack(list(index.ids), rows, index.dimension, "fp32")


def quantized_queries(queries: r.TokenVectors, storage: str) -> r.TokenVectors:
    """Queries as they are rounded for documents of ``storage``: fp16 for fp16, int8 otherwise."""
    rows = list(queries.values.split(queries.offsets.diff().tolist()))
    query_storage = "fp16" if storage == "fp16" else "int8"
    return r.TokenVectors.pack(queries.ids, rows, DIMENSION, query_storage)


@pytest.fixture
def _centroids_in_every_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small indexes have centroids too, in 8 cells."""
    monkeypatch.setattr(late, "FEWEST_TOKENS", 1)


@pytest.mark.parametrize("storage", token_blocks.STORAGES)
def test_stored_vectors_are_within_the_precision_of_their_storage(
    storage: str,
    tmp_path: Path,
) -> None:
    documents = random_token_vectors(document_ids(range(60)))
    index = r.LateIndex.build(documents, tmp_path / "index", storage=storage)
    error = (stored_vectors(index).values - documents.values).abs().max()
    largest_value = documents.values.abs().max()
    assert float(error) <= LARGEST_STORAGE_ERROR[storage] * float(largest_value)


@pytest.mark.parametrize("storage", token_blocks.STORAGES)
@pytest.mark.parametrize(
    ("devices", "is_restricted"),
    [
        pytest.param("cpu", False, id="one device"),
        pytest.param("cpu", True, id="one device, allowed documents"),
        pytest.param(["cpu"] * 3, False, id="three shares"),
        pytest.param(["cpu"] * 2, True, id="two shares, allowed documents"),
    ],
)
def test_scores_are_maxsim_of_the_stored_vectors(
    storage: str,
    devices: Any,
    is_restricted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Several blocks of documents, and several passes of queries.
    monkeypatch.setattr(late, "_CPU_BLOCK_TOKENS", 50)
    monkeypatch.setattr(late, "_MAX_QUERIES_PER_PASS", 3)
    documents = random_token_vectors(document_ids(range(60)))
    index = r.LateIndex.build(documents, tmp_path / "index", storage=storage)
    stored = stored_vectors(index)
    queries = random_token_vectors(query_ids(7), seed=1)
    rounded_queries = quantized_queries(queries, storage)
    allowed = np.arange(60) % 4 != 0

    rows = index.search(
        queries,
        10,
        device=devices,
        allowed=allowed if is_restricted else None,
    )

    for row, hits in enumerate(rows):
        query = rounded_queries.rows(row)
        scores = maxsim_scores(stored, query) if len(query) else {}
        if is_restricted:
            scores = {name: scores[name] for name in scores if allowed[number_of(name)]}
        best_scores = sorted(scores.values(), reverse=True)[:10]
        assert [hit.score for hit in hits] == pytest.approx(best_scores, rel=1e-5)
        for hit in hits:
            assert hit.score == pytest.approx(scores[hit.id], rel=1e-5)


@pytest.mark.parametrize("storage", token_blocks.STORAGES)
def test_a_large_k_returns_all_documents_with_tokens(storage: str, tmp_path: Path) -> None:
    documents = random_token_vectors(document_ids(range(60)))
    index = r.LateIndex.build(documents, tmp_path / "index", storage=storage)
    (hits,) = index.search(random_token_vectors(query_ids(1), seed=1), 1000)
    assert {hit.id for hit in hits} == set(documents.ids) - {"d2"}
    assert len(hits) == 59


@pytest.mark.usefixtures("_centroids_in_every_index")
def test_equal_scores_are_in_document_order(tmp_path: Path) -> None:
    tokens = random_token_vectors(["a"]).rows(0)
    ids = document_ids(range(300))
    documents = r.TokenVectors.pack(ids, [tokens] * 300, DIMENSION, "fp32")
    index = r.LateIndex.build(documents, tmp_path / "index")
    query = r.TokenVectors.pack(["q"], [tokens], DIMENSION, "fp32")

    (all_scored,) = index.search(query, 5, candidates=0)
    (on_two_devices,) = index.search(query, 5, device=["cpu", "cpu"])
    (of_candidates,) = index.search(query, 5, candidates=20)

    for hits in (all_scored, on_two_devices, of_candidates):
        assert [hit.score for hit in hits] == [hits[0].score] * 5
    assert [hit.id for hit in all_scored] == ids[:5]
    assert [hit.id for hit in on_two_devices] == ids[:5]


@pytest.mark.parametrize("k", [1, 3, 4, 7])
def test_a_device_that_breaks_ties_arbitrarily_returns_the_first_of_tied_documents(
    k: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = list(normalize(torch.randn(5, 5, DIMENSION), dim=-1))
    # Four documents in two blocks have the same tokens, and tie for the best scores.
    rows_of_documents = [rows[0], rows[1], rows[0], rows[2], rows[0], rows[0], rows[3], rows[4]]
    documents = r.TokenVectors.pack(
        document_ids(range(8)),
        rows_of_documents,
        DIMENSION,
        "fp32",
    )
    index = r.LateIndex.build(documents, tmp_path / "index", storage="fp16")
    queries = r.TokenVectors.pack(query_ids(1), [rows[0]], DIMENSION, "fp32")
    expected = index.search(queries, k)
    expected_all = index.search(queries, 8)
    n_scans = 0
    scan = r.LateIndex._scan
    topk = torch.Tensor.topk

    def count_scans(*arguments: Any, **options: Any) -> Any:
        nonlocal n_scans
        n_scans += 1
        return scan(*arguments, **options)

    def topk_of_last_columns(scores: torch.Tensor, n: int, dim: int) -> Any:
        values, columns = topk(scores.flip(dim), n, dim=dim)
        return values, scores.size(dim) - 1 - columns

    monkeypatch.setattr(late, "_runs_ahead", lambda device: True)  # as a GPU
    monkeypatch.setattr(late, "_CPU_BLOCK_TOKENS", 20)
    monkeypatch.setattr(r.LateIndex, "_scan", count_scans)
    monkeypatch.setattr(torch.Tensor, "topk", topk_of_last_columns)

    assert index.search(queries, k) == expected
    assert [[hit.id for hit in hits] for hits in expected] == [
        [hit.id for hit in hits[:k]] for hits in expected_all
    ]
    has_tie_at_last_place = k in (1, 3)
    assert n_scans == (2 if has_tie_at_last_place else 1)


@pytest.mark.usefixtures("_centroids_in_every_index")
def test_candidates_have_exact_scores_and_the_recall_that_the_index_reports(
    tmp_path: Path,
) -> None:
    documents = random_token_vectors(document_ids(range(3000)))
    index = r.LateIndex.build(documents, tmp_path / "index")
    assert index.n_candidates in (250, 500, 1000)
    assert index.recall is not None
    assert index.recall >= 0.985

    queries = random_token_vectors(query_ids(40), seed=1, max_tokens=19, min_tokens=6)
    exact_rows = index.search(queries, 10, candidates=0)
    rows = index.search(queries, 10)

    recalls = []
    for hits, exact_hits in zip(rows, exact_rows, strict=True):
        exact_scores = dict(exact_hits)
        common_hits = [hit for hit in hits if hit.id in exact_scores]
        recalls.append(len(common_hits) / max(1, len(exact_scores)))
        for hit in common_hits:
            assert hit.score == pytest.approx(exact_scores[hit.id], rel=1e-5)
    assert np.mean(recalls) > 0.9


@pytest.mark.usefixtures("_centroids_in_every_index")
def test_candidates_are_taken_from_the_allowed_documents(tmp_path: Path) -> None:
    documents = random_token_vectors(document_ids(range(3000)))
    index = r.LateIndex.build(documents, tmp_path / "index")
    queries = random_token_vectors(query_ids(40), seed=1, max_tokens=19, min_tokens=6)
    is_allowed = np.isin(np.arange(3000) // 100, range(1, 7))

    first_hits = index.search(queries, 30, candidates=60, allowed=is_allowed)[0]
    assert first_hits
    assert all(is_allowed[number_of(hit.id)] for hit in first_hits)

    rows_without_allowed = index.search(queries, 30, allowed=np.zeros(3000, bool))
    assert rows_without_allowed == [[]] * 40


@pytest.mark.usefixtures("_centroids_in_every_index")
def test_recall_is_measured_with_sample_queries(tmp_path: Path) -> None:
    documents = random_token_vectors(document_ids(range(3000)))
    queries = random_token_vectors(query_ids(8), seed=5)
    index = r.LateIndex.build(documents, tmp_path / "index", queries=queries)
    assert index.recall is not None


@pytest.mark.usefixtures("_centroids_in_every_index")
def test_metadata_select_documents_before_and_after_segments_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "index"
    metadata = {f"d{number}": {"even": number % 2 == 0} for number in range(600)}
    r.LateIndex.build(random_token_vectors(document_ids(range(500))), path, metadata=metadata)
    added = random_token_vectors(document_ids(range(500, 600)), seed=2)
    r.update_index(path, added, metadata=metadata)
    query = random_token_vectors(query_ids(1), seed=1)

    with_segments: Any = open_index(path)
    (hits_of_segments,) = with_segments.search(query, 40, where={"even": True})
    assert r.merge_segments(path)
    merged: Any = open_index(path)
    (hits_of_merged,) = merged.search(query, 40, where={"even": True})

    for hits in (hits_of_segments, hits_of_merged):
        assert len(hits) == 40
        assert all(number_of(hit.id) % 2 == 0 for hit in hits)
    with pytest.raises(ValueError, match="where: expected a field of the index"):
        r.LateIndex.load(path).search(query, 3, where={"odd": True})


@pytest.mark.parametrize("default", [True, False])
def test_pooled_documents_do_not_depend_on_the_default_of_sentence_transformers(
    default: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    pooling_type = modules.HierarchicalTokenPooling
    documents = random_token_vectors(document_ids(range(20)))
    pooling = pooling_type(3, num_protected_tokens=1, normalize_embeddings=True)
    pooled = pooling.pool([documents.rows(row) for row in range(20)])
    defaults = {"num_protected_tokens": 1, "normalize_embeddings": default, "tasks": None}
    monkeypatch.setattr(pooling_type.__init__, "__kwdefaults__", defaults)

    index = r.LateIndex.build(documents, tmp_path / "index", storage="fp16", pool_factor=3)

    expected = torch.cat(pooled).half().float()
    assert stored_vectors(index).values.tolist() == expected.tolist()
    assert index.files.n_tokens < 0.6 * documents.values.size(0)
    assert index.options["pooling"] == token_blocks.POOLING


def test_merging_keeps_the_record_of_pooling(tmp_path: Path) -> None:
    path = tmp_path / "index"
    r.LateIndex.build(random_token_vectors(document_ids(range(20))), path, pool_factor=3)
    r.update_index(path, random_token_vectors(document_ids(range(20, 25)), seed=2))
    assert r.merge_segments(path) == 25
    assert r.LateIndex.load(path).options["pooling"] == token_blocks.POOLING


def test_an_index_without_a_record_of_pooling_takes_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "index"
    r.LateIndex.build(random_token_vectors(document_ids(range(25))), path, pool_factor=3)
    manifest = json.loads((path / "index.json").read_text())
    del manifest["options"]["pooling"]
    del manifest["checksum"]
    (path / "index.json").write_text(json.dumps(manifest))
    documents = random_token_vectors(document_ids(range(25, 30)), seed=3)

    with pytest.raises(DataError, match="no record of the pooling"):
        r.update_index(path, documents)
    assert r.update_index(path, delete=["d0", "d1"])["n_documents"] == 23
    assert r.merge_segments(path) == 23
    with pytest.raises(DataError, match="Build the index again"):
        r.update_index(path, documents)


@pytest.mark.usefixtures("_centroids_in_every_index")
@pytest.mark.parametrize("storage", token_blocks.STORAGES)
def test_an_updated_index_answers_as_one_of_all_documents(storage: str, tmp_path: Path) -> None:
    path = tmp_path / "index"
    first = random_token_vectors(document_ids(range(400)), seed=0)
    second = random_token_vectors(document_ids(range(380, 430)), seed=1)
    third = random_token_vectors(document_ids(range(500, 530)), seed=2)
    deleted = document_ids(range(5), range(400, 405))
    r.LateIndex.build(first, path, storage=storage)
    summary = r.update_index(path, second)
    assert summary == {
        "n_documents": 430,
        "written": 50,
        "deleted": 0,
        "unknown_ids": [],
    }
    assert r.update_index(path, delete=[*deleted, "nobody"])["deleted"] == 10
    assert r.update_index(path, third)["n_documents"] == 450

    replaced_or_deleted = {*deleted, *second.ids}
    current_rows = [row for row, name in enumerate(first.ids) if name not in replaced_or_deleted]
    current_of_first = first.take(current_rows)
    current_rows = [row for row, name in enumerate(second.ids) if name not in deleted]
    current_of_second = second.take(current_rows)
    documents = r.TokenVectors.concatenate([current_of_first, current_of_second, third])
    expected_index = r.LateIndex.build(documents, tmp_path / "expected", storage=storage)
    queries = random_token_vectors(query_ids(5), seed=7)
    expected_rows = expected_index.search(queries, 30, candidates=0)

    with_segments: Any = open_index(path)
    rows = with_segments.search(queries, 30, candidates=0)
    assert with_segments.n_documents == 450
    assert sorted(with_segments.ids) == sorted(expected_index.ids)
    for hits, expected_hits in zip(rows, expected_rows, strict=True):
        assert dict(hits) == pytest.approx(dict(expected_hits), rel=1e-6)

    assert r.merge_segments(path) == 450
    assert r.merge_segments(path) == 450, "merging a second time changes nothing"
    merged: Any = open_index(path)
    assert isinstance(merged, r.LateIndex)
    assert merged.search(queries, 30, candidates=0) == rows


def test_a_merged_index_is_saved_to_another_folder(tmp_path: Path) -> None:
    path = tmp_path / "index"
    queries = random_token_vectors(query_ids(5), seed=7)
    r.LateIndex.build(random_token_vectors(document_ids(range(40))), path)
    r.update_index(path, random_token_vectors(document_ids(range(40, 50)), seed=1))
    r.merge_segments(path)
    merged = r.LateIndex.load(path)
    merged.save(tmp_path / "copy")
    assert r.LateIndex.load(tmp_path / "copy").search(queries, 3) == merged.search(queries, 3)


def die_before_rename(n_renames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process die before it renames a file or folder after ``n_renames`` renames."""
    rename = Path.replace
    renames_left = n_renames

    def rename_or_die(self: Path, target: Any) -> Path:
        nonlocal renames_left
        if renames_left == 0:
            os._exit(EXIT_CODE_OF_KILLED)
        renames_left -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", rename_or_die)
    monkeypatch.setattr(_files, "exchange", lambda *_: False)


def update_in_a_killed_process(
    path: Path,
    documents: r.TokenVectors,
    n_renames: int,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Update an index in a child that dies after ``n_renames`` renames; returns its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_before_rename(n_renames, monkeypatch)
            r.update_index(path, documents)
            code = 0
        finally:  # the child must not go on with the tests
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_an_update_killed_at_any_rename_leaves_the_index_unchanged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "index"
    r.LateIndex.build(random_token_vectors(document_ids(range(30))), path)
    r.update_index(path, random_token_vectors(document_ids(range(25, 40)), seed=1))
    added = random_token_vectors(document_ids(range(100, 110)), seed=2)
    query = random_token_vectors(query_ids(1), seed=7)
    index: Any = open_index(path)
    (hits_before,) = index.search(query, 60)

    for n_renames in range(20):
        exit_code = update_in_a_killed_process(path, added, n_renames, monkeypatch)
        if exit_code == 0:
            break
        assert exit_code == EXIT_CODE_OF_KILLED
        index = open_index(path)
        assert index.search(query, 60) == [hits_before], n_renames

    assert exit_code == 0
    assert n_renames > 1
    index = open_index(path)
    (hits_after,) = index.search(query, 60)
    assert len(hits_after) == len(hits_before) + 9, "one of ten documents has no tokens"
    segments = [path for path in (path / "segments").iterdir() if path.is_dir()]
    assert len(segments) == 2, "incomplete segments of killed updates are removed"


def flip_a_bit(content: bytes) -> bytes:
    """``content`` with another bit in its middle."""
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 16
    return bytes(changed)


def drop_last_bytes(content: bytes) -> bytes:
    return content[:-5]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        pytest.param(
            "values.bin",
            flip_a_bit,
            "damaged; the token vectors of the document",
            id="changed values",
        ),
        pytest.param(
            "scales.bin",
            flip_a_bit,
            "damaged; the token vectors of the document",
            id="changed scales",
        ),
        pytest.param(
            "values.bin",
            drop_last_bytes,
            "expected .* bytes, got",
            id="shortened values",
        ),
        pytest.param("offsets.npy", flip_a_bit, "damaged; its checksum", id="changed offsets"),
    ],
)
def test_damage_is_refused_when_it_is_read(
    name: str,
    damage: Callable[[bytes], bytes],
    message: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "index"
    r.LateIndex.build(random_token_vectors(document_ids(range(30))), path)
    query = random_token_vectors(query_ids(1), seed=7)
    content = (path / name).read_bytes()

    (path / name).write_bytes(damage(content))
    with pytest.raises(DataError, match=message):
        r.LateIndex.load(path).search(query, 3)

    (path / name).write_bytes(content)
    assert r.LateIndex.load(path).search(query, 3)


def test_wrong_options_of_building_are_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "index"
    documents = random_token_vectors(document_ids(range(30)))
    without_tokens = r.TokenVectors.pack(["a"], [torch.zeros(0, DIMENSION)], DIMENSION, "fp16")
    with pytest.raises(ValueError, match="storage: expected one of int8, fp16, int4"):
        r.LateIndex.build(documents, path, storage="int2")
    with pytest.raises(ValueError, match="pool_factor: expected an integer"):
        r.LateIndex.build(documents, path, pool_factor=0)
    with pytest.raises(
        ValueError, match="expected at least one token vector, but none of the 1 texts"
    ):
        r.LateIndex.build(without_tokens, path)
    assert not path.exists()


def test_queries_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    index = r.LateIndex.build(random_token_vectors(document_ids(range(30))), tmp_path / "index")
    of_another_dimension = random_token_vectors(["q"], dimension=8)
    with_nan = random_token_vectors(["q"])
    with_nan.values[0, 0] = torch.nan
    message = f"finite fp16 or fp32 of dimension {DIMENSION}, got dimension 8"
    with pytest.raises(ValueError, match=message):
        index.search(of_another_dimension, 3)
    with pytest.raises(ValueError, match="got NaN or infinity"):
        index.search(with_nan, 3)
    with pytest.raises(ValueError, match="k: expected"):
        index.search(random_token_vectors(["q"]), 0)


def test_an_update_with_vectors_of_another_dimension_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    r.LateIndex.build(random_token_vectors(document_ids(range(30))), path)
    with pytest.raises(DataError, match=r"expected \(dimension, similarity\)"):
        r.update_index(path, random_token_vectors(["x"], dimension=8))


def test_load_index_names_the_function_that_loads_a_late_index(tmp_path: Path) -> None:
    path = tmp_path / "index"
    r.LateIndex.build(random_token_vectors(document_ids(range(30))), path)
    with pytest.raises(DataError, match=r"LateIndex\.load"):
        r.load_index(path)


def test_entries_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    vectors = r.TokenVectors.pack(
        ["a", "b"],
        [torch.full((1, 8), 1e5), torch.full((1, 8), -1e5)],
        8,
        "fp32",
    )
    with pytest.raises(DataError, match="within 65504 for fp16, got 1e\\+05"):
        r.LateIndex.build(vectors, tmp_path / "index", storage="fp16")


def test_integer_maxsim_on_a_cpu_equals_the_reference() -> None:
    documents = random_token_vectors(document_ids(range(50)))
    queries = random_token_vectors(["q", "r", "s", "t"], seed=3)
    quantized = quantize_tokens(documents.values)
    offsets_of_queries = queries.offsets.int()
    offsets_of_documents = documents.offsets.int()
    scores = maxsim(
        queries.values,
        quantized,
        cu_seqlens_q=offsets_of_queries,
        cu_seqlens_d=offsets_of_documents,
    )
    expected = maxsim(
        queries.values,
        quantized,
        cu_seqlens_q=offsets_of_queries,
        cu_seqlens_d=offsets_of_documents,
        impl="reference",
    )
    assert_within_budget(scores, expected, dtype=torch.float32)


def test_an_index_that_cannot_be_locked_in_memory_warns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = r.LateIndex.build(random_token_vectors(document_ids(range(3))), tmp_path / "index")
    monkeypatch.setattr(token_blocks, "memory_left", lambda: 10)
    message = r"not locked in memory \(10 bytes free, \d+ needed\)"
    with pytest.warns(UserWarning, match=message):
        index.files.lock()
