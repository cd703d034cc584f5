"""An index of token vectors: exact scores of what is stored, candidates, growth, damage, and
vectors made elsewhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.refusals import refused
from tilefold import retrieval as r
from tilefold._internal import files as _files
from tilefold.ops import maxsim
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import centroids, late, token_blocks
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.vectors.token_files import read_token_file
from tilefold.testing import assert_within_budget

D = 16


def made(
    ids: list[str],
    seed: int = 0,
    dimension: int = D,
    longest: int = 12,
    shortest: int = 1,
) -> r.TokenVectors:
    """Token vectors of norm 1 around 40 directions; the third text has none."""
    generator = torch.Generator().manual_seed(seed)
    themes = torch.randn(40, dimension, generator=torch.Generator().manual_seed(99))
    lengths = torch.randint(shortest, longest, (len(ids),), generator=generator).tolist()
    rows = [
        normalize(
            themes[torch.randint(40, (n,), generator=generator)]
            + torch.randn(n, dimension, generator=generator) / 2,
        )
        for n in lengths
    ]
    if len(rows) > 2:
        rows[2] = rows[2][:0]
    return r.TokenVectors.pack(ids, rows, dimension, "fp32")


def names(*spans: range) -> list[str]:
    return [f"d{at}" for span in spans for at in span]


def wanted(documents: r.TokenVectors, query: torch.Tensor) -> dict[str, float]:
    """MaxSim in float64 of the documents that have tokens."""
    rows = {name: documents.rows(at).double() for at, name in enumerate(documents.ids)}
    return {name: float((query.double() @ d.T).amax(1).sum()) for name, d in rows.items() if len(d)}


def rounded(storage: str) -> str:
    """Storage to which maxsim rounds queries beside documents of one."""
    return "fp16" if storage == "fp16" else "int8"


def stored(index: r.LateIndex) -> r.TokenVectors:
    """What an index holds, dequantized."""
    rows = [index.files.document_range(at, at + 1).floats() for at in range(index.n_documents)]
    return r.TokenVectors.pack(list(index.ids), rows, index.dimension, "fp32")


@pytest.fixture
def centred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every index has centroids, in 8 cells."""
    monkeypatch.setattr(centroids, "FEWEST_TOKENS", 1)


@pytest.mark.parametrize("storage", token_blocks.STORAGES)
def test_scores_are_maxsim_of_what_is_stored(
    storage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 50 tokens, passes of 3 queries, one device and three shares; some documents left
    out, ties in order.
    """
    monkeypatch.setattr(late, "_CPU_BLOCK_TOKENS", 50)
    monkeypatch.setattr(late, "_PASS_QUERIES", 3)
    documents = made(names(range(60)))
    index = r.LateIndex.build(documents, tmp_path / "index", storage=storage)
    held = stored(index)
    step = {"int8": 1 / 127, "fp16": 2**-10, "int4": 1.01 / 15}[storage]
    assert float((held.values - documents.values).abs().max()) <= step * float(
        documents.values.abs().max(),
    )
    queries = made([f"q{at}" for at in range(7)], 1)
    asked = r.TokenVectors.pack(
        queries.ids,
        list(queries.values.split(queries.offsets.diff().tolist())),
        D,
        rounded(storage),
    )
    allowed = np.arange(60) % 4 != 0
    for mask, devices in (
        (None, "cpu"),
        (allowed, "cpu"),
        (None, ["cpu"] * 3),
        (allowed, ["cpu", "cpu"]),
    ):
        for at, hits in enumerate(index.search(queries, 10, device=devices, allowed=mask)):
            scores = wanted(held, asked.rows(at)) if len(asked.rows(at)) else {}
            scores = {
                name: score for name, score in scores.items() if mask is None or mask[int(name[1:])]
            }
            assert [hit.score for hit in hits] == pytest.approx(
                sorted(scores.values())[::-1][:10],
                rel=1e-5,
            )
            assert all(hit.score == pytest.approx(scores[hit.id], rel=1e-5) for hit in hits)
    assert len(index.search(queries.take([0]), 1000)[0]) == 59, "all that have tokens"
    assert "d2" not in {hit.id for hit in index.search(queries.take([0]), 1000)[0]}


def test_equal_scores_are_in_document_order(tmp_path: Path, centred: None) -> None:
    same = made(["a"]).rows(0)
    index = r.LateIndex.build(
        r.TokenVectors.pack(names(range(300)), [same] * 300, D, "fp32"),
        tmp_path / "index",
    )
    query = r.TokenVectors.pack(["q"], [same], D, "fp32")
    for options in ({"candidates": 0}, {"candidates": 20}, {"device": ["cpu", "cpu"]}):
        hits = index.search(query, 5, **options)[0]
        assert [hit.score for hit in hits] == [hits[0].score] * 5
        assert options.get("candidates") == 20 or [hit.id for hit in hits] == names(range(5))


def test_candidates_have_exact_scores_and_the_recall_that_is_told(
    tmp_path: Path,
    centred: None,
) -> None:
    documents = made(names(range(3000)))
    index = r.LateIndex.build(documents, tmp_path / "index")
    assert (
        index.n_candidates in (250, 500, 1000)
        and index.recall is not None
        and index.recall >= 0.985
    )
    queries = made([f"q{at}" for at in range(40)], 1, longest=20, shortest=6)
    exact, near = (index.search(queries, 10, candidates=count) for count in (0, None))
    shares = []
    for hits, best in zip(near, exact, strict=True):
        scores = dict(best)
        shares.append(len(scores.keys() & dict(hits).keys()) / max(1, len(scores)))
        assert all(
            hit.score == pytest.approx(scores[hit.id], rel=1e-5) for hit in hits if hit.id in scores
        )
    assert np.mean(shares) > 0.9
    allowed = np.isin(np.arange(3000) // 100, range(1, 7))
    found = index.search(queries, 30, candidates=60, allowed=allowed)[0]
    assert {int(hit.id[1:]) // 100 for hit in found} <= set(range(1, 7))
    assert index.search(queries, 30, allowed=np.zeros(3000, bool)) == [[]] * 40
    asked = made([f"q{at}" for at in range(8)], 5)
    assert r.LateIndex.build(documents, tmp_path / "other", queries=asked).recall is not None


def test_metadata_choose_documents_also_of_an_index_that_grew(
    tmp_path: Path,
    centred: None,
) -> None:
    place, queries = tmp_path / "index", made(["q"], 1)
    fields = {f"d{at}": {"even": at % 2 == 0} for at in range(600)}
    r.LateIndex.build(made(names(range(500))), place, metadata=fields)
    r.update_index(place, made(names(range(500, 600)), 2), metadata=fields)
    for index in (open_index(place), r.merge_segments(place) and open_index(place)):
        hits: Any = index.search(queries, 40, where={"even": True})  # type: ignore[arg-type, call-arg]
        assert len(hits[0]) == 40 and all(int(hit.id[1:]) % 2 == 0 for hit in hits[0])
    with pytest.raises(ValueError, match="where: expected a field of the index"):
        r.LateIndex.load(place).search(queries, 3, where={"odd": True})


@pytest.mark.parametrize("default", [True, False])
def test_pooled_documents_do_not_depend_on_the_default_of_sentence_transformers(
    default: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pooling = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    stock = pooling.HierarchicalTokenPooling
    documents = made(names(range(20)))
    expected = stock(3, num_protected_tokens=1, normalize_embeddings=True).pool(
        [documents.rows(row) for row in range(20)],
    )
    defaults = {"num_protected_tokens": 1, "normalize_embeddings": default, "tasks": None}
    monkeypatch.setattr(stock.__init__, "__kwdefaults__", defaults)
    index = r.LateIndex.build(documents, tmp_path / "index", storage="fp16", pool_factor=3)
    assert stored(index).values.tolist() == torch.cat(expected).half().float().tolist()
    assert index.files.n_tokens < 0.6 * documents.values.size(0)
    assert index.options["pooling"] == token_blocks.POOLING


def test_an_index_that_does_not_tell_how_it_was_pooled_is_not_updated(tmp_path: Path) -> None:
    place, documents = tmp_path / "index", made(names(range(20)))
    r.LateIndex.build(documents, place, pool_factor=3)
    r.update_index(place, made(names(range(20, 25)), 2))
    assert r.merge_segments(place) == 25
    assert r.LateIndex.load(place).options["pooling"] == token_blocks.POOLING

    written = json.loads((place / "index.json").read_text())
    del written["options"]["pooling"], written["checksum"]
    (place / "index.json").write_text(json.dumps(written))
    more = made(names(range(25, 30)), 3)
    with pytest.raises(DataError, match="one that does not tell how"):
        r.update_index(place, more)
    assert r.update_index(place, delete=names(range(2)))["n_documents"] == 23
    assert r.merge_segments(place) == 23
    with pytest.raises(DataError, match="Build the index again"):
        r.update_index(place, more)


@pytest.mark.parametrize("storage", token_blocks.STORAGES)
def test_an_index_that_grew_answers_as_one_of_all_documents(
    storage: str,
    tmp_path: Path,
    centred: None,
) -> None:
    parts = [
        made(names(span), seed)
        for seed, span in enumerate((range(400), range(380, 430), range(500, 530)))
    ]
    place = tmp_path / "index"
    r.LateIndex.build(parts[0], place, storage=storage)
    assert r.update_index(place, parts[1]) == {"n_documents": 430, "written": 50, "deleted": 0}
    assert (
        r.update_index(place, delete=[*names(range(5), range(400, 405)), "nobody"])["deleted"] == 10
    )
    assert r.update_index(place, parts[2])["n_documents"] == 450
    kept = [
        part.take([row for row, name in enumerate(part.ids) if keep(name)])
        for part, keep in zip(
            parts,
            (
                lambda n: 5 <= int(n[1:]) < 380,
                lambda n: not 400 <= int(n[1:]) < 405,
                lambda n: True,
            ),
            strict=True,
        )
    ]
    whole = r.LateIndex.build(r.TokenVectors.concatenate(kept), tmp_path / "whole", storage=storage)
    queries = made([f"q{at}" for at in range(5)], 7)
    expected = whole.search(queries, 30, candidates=0)
    grown: Any = open_index(place)
    assert grown.n_documents == 450 and sorted(grown.ids) == sorted(whole.ids)
    assert [dict(row) for row in grown.search(queries, 30, candidates=0)] == [
        pytest.approx(dict(row), rel=1e-6) for row in expected
    ]
    assert r.merge_segments(place) == r.merge_segments(place) == 450
    merged: Any = open_index(place)
    assert isinstance(merged, r.LateIndex)
    assert merged.search(queries, 30, candidates=0) == grown.search(queries, 30, candidates=0)
    merged.save(tmp_path / "copy")
    assert r.LateIndex.load(tmp_path / "copy").search(queries, 3) == merged.search(queries, 3)


def test_a_killed_update_leaves_the_index_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed at every rename of an update and of a merge, in a process of its own."""
    place = tmp_path / "index"
    r.LateIndex.build(made(names(range(30))), place)
    r.update_index(place, made(names(range(25, 40)), 1))
    queries = made(["q"], 7)
    index: Any = open_index(place)
    before, codes = index.search(queries, 60), []
    for moves in range(20):
        child = os.fork()
        if not child:
            die_at(moves, monkeypatch)
            r.update_index(place, made(names(range(100, 110)), 2))
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        index = open_index(place)
        if codes[-1] == 0:
            break
        assert index.search(queries, 60) == before, moves
    assert codes == [9] * (len(codes) - 1) + [0] and len(codes) > 2
    assert len(index.search(queries, 60)[0]) == len(before[0]) + 9
    assert len([each for each in (place / "segments").iterdir() if each.is_dir()]) == 2, (
        "what was half there is gone"
    )


def die_at(moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process die before it puts another file or folder in its place."""
    honest = Path.replace

    def replace(self: Path, target: Any) -> Path:
        nonlocal moves
        if not moves:
            os._exit(9)
        moves -= 1
        return honest(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(_files, "exchange", lambda *_: False)


def test_damage_is_refused_when_it_is_read(tmp_path: Path) -> None:
    place = tmp_path / "index"
    r.LateIndex.build(made(names(range(30))), place)
    queries = made(["q"], 7)

    def broken(name: str, change: Any, said: str) -> None:
        file = place / name
        whole = file.read_bytes()
        file.write_bytes(change(bytearray(whole)))
        with pytest.raises(DataError, match=said):
            r.LateIndex.load(place).search(queries, 3)
        file.write_bytes(whole)

    def flipped(data: bytearray) -> bytearray:
        data[len(data) // 2] ^= 16
        return data

    broken("values.bin", flipped, "damaged; the token vectors of document")
    broken("scales.bin", flipped, "damaged; the token vectors of document")
    broken("values.bin", lambda data: data[:-5], "expected .* bytes, got")
    broken("offsets.npy", flipped, "damaged; its checksum")
    assert r.LateIndex.load(place).search(queries, 3)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    documents, place = made(names(range(30))), tmp_path / "index"
    index = r.LateIndex.build(documents, place)
    with pytest.raises(ValueError, match="storage: expected one of int8, fp16, int4"):
        r.LateIndex.build(documents, tmp_path / "other", storage="int2")
    with pytest.raises(ValueError, match="pool_factor: expected an integer"):
        r.LateIndex.build(documents, tmp_path / "other", pool_factor=0)
    with pytest.raises(ValueError, match="expected at least one, got none of 1 texts"):
        r.LateIndex.build(
            r.TokenVectors.pack(["a"], [torch.zeros(0, D)], D, "fp16"),
            tmp_path / "other",
        )
    with pytest.raises(
        ValueError,
        match=f"finite fp16 or fp32 of dimension {D}, got .* of dimension 8",
    ):
        index.search(made(["q"], dimension=8), 3)
    wrong = made(["q"])
    wrong.values[0, 0] = torch.nan
    refused(ValueError, "with NaN or infinity", index.search, wrong, 3)
    refused(ValueError, "k: expected", index.search, made(["q"]), 0)
    refused(
        DataError,
        r"expected \(dimension, similarity\)",
        r.update_index,
        place,
        made(["x"], dimension=8),
    )
    refused(DataError, r"LateIndex\.load", r.load_index, place)
    assert not (tmp_path / "other").exists()


def test_vectors_made_elsewhere(tmp_path: Path) -> None:
    documents = made(["a", "b", "c", "d"])
    rows = {name: documents.rows(at) for at, name in enumerate(documents.ids)}
    padded = torch.nn.utils.rnn.pad_sequence(list(rows.values()), batch_first=True)
    mask = torch.arange(padded.size(1)) < documents.offsets.diff()[:, None]
    np.savez(tmp_path / "each.npz", **{name: each.numpy() for name, each in rows.items()})
    ids = np.array(documents.ids)
    np.savez(tmp_path / "pages.npz", embeddings=padded.numpy(), ids=ids)
    np.savez(tmp_path / "masked.npz", embeddings=padded.numpy(), mask=mask.numpy(), ids=ids)
    save_file = pytest.importorskip("safetensors.torch").save_file
    packed = {"values": documents.values, "offsets": documents.offsets}
    packed["ids"] = torch.from_numpy(
        np.frombuffer(json.dumps(documents.ids).encode(), np.uint8).copy(),
    )
    save_file(packed, str(tmp_path / "packed.safetensors"))
    for name in ("each.npz", "pages.npz", "masked.npz", "packed.safetensors"):
        found = read_token_file(tmp_path / name)
        assert (found.ids, found.offsets.tolist()) == (documents.ids, documents.offsets.tolist()), (
            name
        )
        assert torch.equal(found.values, documents.values)
    padded[1, 0, 0] = torch.nan
    np.savez(tmp_path / "nan.npz", embeddings=padded.numpy(), ids=ids)
    refused(DataError, "nan for 'b'", read_token_file, tmp_path / "nan.npz")
    np.savez(tmp_path / "flat.npz", a=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name, said in (("flat.npz", "Expected one array"), ("text.npz", "safetensors or npz")):
        refused(DataError, said, read_token_file, tmp_path / name)


def test_integers_on_a_cpu_give_the_scores_of_the_specification() -> None:
    from tilefold.ops import quantize_tokens

    documents, queries = made(names(range(50))), made(["q", "r", "s", "t"], 3)
    asked = queries.values, quantize_tokens(documents.values)
    lengths = {"cu_seqlens_q": queries.offsets.int(), "cu_seqlens_d": documents.offsets.int()}
    assert_within_budget(
        maxsim(*asked, **lengths),
        maxsim(*asked, **lengths, impl="reference"),
        dtype=torch.float32,
    )


def test_too_little_memory_to_lock_an_index_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_blocks, "memory_left", lambda: 10)
    with pytest.warns(
        UserWarning,
        match=r"not locked in memory \(10 bytes are left, \d+ are wanted\)",
    ):
        r.LateIndex.build(made(names(range(3))), tmp_path / "index").files.lock()


def test_integer_token_vectors_of_a_file_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    values = np.array([[64, -127], [127, 0]], np.int8)
    scales = np.array([0.5, 0.25], np.float32)
    offsets = np.array([0, 1, 2])
    np.savez(tmp_path / "int8.npz", values=values, scales=scales, offsets=offsets)
    vectors = read_token_file(tmp_path / "int8.npz")
    assert vectors.values.tolist() == [[32.0, -63.5], [31.75, 0.0]]
    np.savez(tmp_path / "bare.npz", values=values, offsets=offsets)
    refused(DataError, "integer values need scales", read_token_file, tmp_path / "bare.npz")
    np.savez(tmp_path / "short.npz", values=values, scales=scales[:1], offsets=offsets)
    refused(DataError, r"expected scales \[2\], got \[1\]", read_token_file, tmp_path / "short.npz")


def test_entries_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    vectors = r.TokenVectors.pack(
        ["a", "b"],
        [torch.full((1, 8), 1e5), torch.full((1, 8), -1e5)],
        8,
        "fp32",
    )
    with pytest.raises(DataError, match="within 65504 for fp16, got 1e\\+05"):
        r.LateIndex.build(vectors, tmp_path / "index", storage="fp16")
