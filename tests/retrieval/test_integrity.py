"""Folders that hold something else than was saved: every store names the file, and gives no answer."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.inside import DiskFullError
from tests.manifests import edit, sum_files, sum_shards, sum_terms
from tests.refusals import refused
from tests.retrieval.conftest import random_vectors
from tilefold import retrieval as r
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.qdrant import QdrantCollection
from tilefold.retrieval.index.qdrant import collection as qdrant_collection
from tilefold.retrieval.index.qdrant.index import QdrantIndex
from tilefold.retrieval.vectors.tokens import TokenManifest, TokenVectors, TokenVectorWriter

Make = Callable[..., r.SparseVectors]
DOCUMENTS = {f"d{at}": f"cats and dogs sleep in house number{at} word{at % 7}" for at in range(40)}
MANIFESTS = dict.fromkeys(("vectors", "tokens"), "manifest.json")
MANIFESTS |= dict.fromkeys(("exact", "seismic", "bm25", "qdrant"), "index.json")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind."""
    work = tmp_path_factory.mktemp("stores")
    vectors = random_vectors(len(DOCUMENTS), 300, 12)
    r.write_vectors(vectors, work / "vectors", shard_size=20)
    writer = TokenVectorWriter(
        work / "tokens",
        TokenManifest(4, "fp16", settings={"texts_sha256": "b" * 64}),
    )
    for number in range(2):
        names = list(DOCUMENTS)[20 * number : 20 * number + 20]
        writer.write_shard(
            number,
            TokenVectors.pack(names, [torch.ones(3, 4) for _ in names], 4, "fp16"),
        )
    writer.finish()
    for backend in ("exact", "seismic"):
        if backend == "exact" or find_spec("seismic") is not None:
            r.build_index(vectors, backend).save(work / backend)
    r.build_index(vectors, "qdrant", folder=work / "qdrant").close()  # type: ignore[attr-defined]
    r.BM25Index.build(DOCUMENTS).save(work / "bm25")
    return work


def use(kind: str, folder: Path, k: int = 10) -> Any:
    """Read a folder and all that it holds."""
    if kind == "vectors":
        return r.read_vectors(folder)
    if kind == "tokens":
        return r.open_tokens(folder).read(DOCUMENTS)
    if kind == "bm25":
        return r.BM25Index.load(folder).search({"q": " ".join(DOCUMENTS.values())}, 10)
    index = r.load_index(folder)
    try:
        return index.search(
            r.SparseVectors.from_rows({"q": dict.fromkeys(range(300), 1.0)}, 300, "f" * 64),
            k,
        )
    finally:
        if kind == "qdrant":
            index.close()  # type: ignore[attr-defined]


@pytest.fixture
def copied(stores: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a store, read once."""

    def copy(kind: str) -> Path:
        shutil.copytree(stores / kind, tmp_path / kind)
        use(kind, tmp_path / kind)
        return tmp_path / kind

    return copy


def replace_array(folder: Path, name: str, values: Any) -> None:
    """Put an array in the place of another, with the right checksums."""
    (folder / name).unlink()  # it may be mapped
    np.save(folder / name, values)
    sum_files(folder)


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_is_changed_by_a_character_or_no_json_object_is_named(
    kind: str,
    copied: Any,
) -> None:
    folder = copied(kind)
    file = folder / MANIFESTS[kind]
    text = file.read_text(encoding="utf-8")
    at = re.search(r'"(texts_sha256|fingerprint)": "(.)', text).end(2)  # type: ignore[union-attr]
    file.write_text(
        text[: at - 1] + ("0" if text[at - 1] != "0" else "1") + text[at:],
        encoding="utf-8",
    )
    refused(
        DataError,
        rf"{file.name}: the checksum does not match: the file is damaged or was edited",
        use,
        kind,
        folder,
    )
    for content in ('{"a":' * 100_000 + "1" + "}" * 100_000, "[]", '{"a": 1', "\udcff"):
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
        refused(DataError, rf"{file.name}: expected a JSON object", use, kind, folder)
    file.write_text(text, encoding="utf-8")
    edit(file)  # as after an edit by hand, without
    use(kind, folder)


@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_a_manifest_that_does_not_agree_with_itself_is_refused(kind: str, copied: Any) -> None:
    folder = copied(kind)
    file = folder / "manifest.json"
    full = file.read_bytes()
    reader = {"vectors": r.read_vectors, "tokens": r.open_tokens}[kind]
    shards = r.open_tokens(folder).manifest.shards if kind == "tokens" else None
    for changes, message in (
        (
            {"shards": (shards or [{"file": "part-00000.parquet", "rows": 20, "sha256": ""}])[:1]},
            "40 rows, as n_docum",
        ),
        ({"n_documents": 39}, "expected 39 rows, as n_documents says, got shards with 40"),
        ({"n_texts": 41}, "expected 41 texts, as n_texts says, got 40 rows and 0 failed"),
        ({"settings": []}, r"fields of other types \(settings\)"),
        ({"failed": "none", "complete": 1}, r"fields of other types \(failed, complete\)"),
        ({"shards": ["part"]}, r"fields of other types \(shards\)"),
    ):
        file.write_bytes(full)
        edit(file, **changes)
        refused(DataError, rf"manifest.json: .*{message}", reader, folder)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, -1.0])
def test_weights_that_are_none_are_refused_whatever_the_checksums_say(
    weight: float,
    copied: Any,
) -> None:
    exact, bm25, tokens = copied("exact"), copied("bm25"), copied("tokens")
    weights = np.load(exact / "weights.npy")
    weights[7] = weight
    np.save(exact / "weights.npy", weights)
    sum_terms(exact)
    replace_array(exact, "weights.npy", weights)
    refused(
        DataError,
        rf"damaged; the postings of term .* at least 0, got {weight}",
        use,
        "exact",
        exact,
    )
    data = np.load(bm25 / "data.csc.index.npy")
    data[3] = weight
    replace_array(bm25, "data.csc.index.npy", data)
    refused(
        DataError,
        rf"bm25: could not be read \(data: .* finite weights .* got {weight}",
        r.BM25Index.load,
        bm25,
    )
    if weight == -1:  # as good as any other number of a vector
        return
    file = tokens / "part-00001.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["values"][3, 2] = weight
    file.unlink()
    save_file(tensors, file)
    sum_shards(tokens)
    refused(
        DataError,
        rf"part-00001.safetensors: .* finite token vectors, got {weight} for '",
        use,
        "tokens",
        tokens,
    )


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("indices", 5, -1, r"indices: expected positions in \[0, 40\), got -1"),
        ("indices", 5, 40, r"indices: expected positions in \[0, 40\), got 40"),
        ("indptr", 0, 1, "indptr: expected offsets that rise from 0"),
        ("indptr", 4, 10**6, "indptr: expected offsets that rise from 0"),
        ("indptr", -1, 3, "indptr: expected offsets that rise from 0"),
        *(("vocab", 0, content, "") for content in ("[]", "{}", '{"a": -1}', "[" * 100_000)),
    ],
)
def test_arrays_and_words_of_bm25_must_be_its_own(
    name: str,
    at: int,
    value: Any,
    message: str,
    copied: Any,
) -> None:
    folder = copied("bm25")
    file = "indptr.csc.index.npy" if name == "vocab" else f"{name}.csc.index.npy"
    values = np.load(folder / file)
    if name == "vocab":
        (folder / "vocab.index.json").write_text(value)
    else:
        values[at] = value
    replace_array(folder, file, values)
    refused(DataError, rf"bm25: could not be read \({message}", r.BM25Index.load, folder)


def test_a_seismic_index_that_fails_while_it_searches_is_named(copied: Any) -> None:
    folder = copied("seismic")
    terms = np.load(folder / "terms.npy")
    for wrong in (terms[::-1], terms[:-1], terms + 300, terms.astype(np.float32)):
        replace_array(folder, "terms.npy", np.ascontiguousarray(wrong))
        refused(DataError, r"seismic: could not be read \(.*terms", r.load_index, folder)
    replace_array(folder, "terms.npy", terms)
    index = r.load_index(folder)

    class PanicException(BaseException):
        pass

    class Broken:
        def search(self, *arguments: Any, **options: Any) -> Any:
            raise PanicException("index out of bounds")

        batch_search = search

    class Elsewhere:
        def search(self, *arguments: Any, **options: Any) -> Any:
            return [("0", 1.0, 4711)]

    query = r.SparseVectors.from_rows({"q": {int(terms[0]): 1.0}}, 300, "f" * 64)
    for engine, message in (
        (Broken(), "Seismic failed: index out"),
        (Elsewhere(), r"in \[0, 40\), got 4711"),
    ):
        index._engine = engine  # type: ignore[attr-defined]
        refused(
            DataError,
            rf"seismic: could not be searched \(.*{message}.*tilefold index",
            index.search,
            query,
            3,
        )
    built = r.build_index(query, "seismic")
    built._engine = Broken()  # type: ignore[attr-defined]
    for queries in (
        query,
        r.SparseVectors.from_rows({"a": {int(terms[0]): 1.0}, "b": {int(terms[0]): 1.0}}, 300),
    ):
        refused(RuntimeError, r"^Seismic failed: index out", built.search, queries, 3)


def shard_files(folder: Path) -> list[Path]:
    """Those of the engine that hold something, the fullest last."""
    files = [
        file for file in (folder / "shard").rglob("*") if file.is_file() and any(file.read_bytes())
    ]
    return sorted(files, key=lambda file: file.stat().st_blocks)


def test_every_changed_byte_and_cut_file_of_an_embedded_collection_is_noticed(
    copied: Any,
    tmp_path: Path,
) -> None:
    folder, moments = copied("qdrant"), random.Random(7)  # noqa: S311

    def damaged(name: str) -> None:
        refused(
            DataError,
            rf"{name}: damaged; .* in checksums.json \(1 of \d+ files\)",
            r.load_index,
            folder,
        )

    files = shard_files(folder)
    assert len(files) >= 12
    for file in files:
        content = np.memmap(file, np.uint8, "r+")
        at = int(moments.choice(np.flatnonzero(content).tolist()))
        former = int(content[at])
        content[at] = former ^ moments.choice([1, 16, 255])
        damaged(file.name)
        content[at] = former
        del content
    for file in (files[0], files[-1]):
        shutil.move(file, tmp_path / "aside")
        damaged(file.name)
        full = (tmp_path / "aside").read_bytes()
        file.write_bytes(full[: moments.randrange(len(full))])
        damaged(file.name)
        shutil.move(tmp_path / "aside", file)
    use("qdrant", folder)  # as it was
    file = folder / "checksums.json"
    file.write_text(
        file.read_text(encoding="utf-8").replace('"bytes": 16', '"bytes": 17'),
        encoding="utf-8",
    )
    refused(DataError, r"checksums.json: the checksum does not match", r.load_index, folder)


def test_an_embedded_collection_without_checksums_is_read_with_a_warning_and_gets_them(
    copied: Any,
) -> None:
    folder = copied("qdrant")
    expected = use("qdrant", folder)
    (folder / "checksums.json").unlink()
    with pytest.warns(
        RuntimeWarning,
        match="has no checksums, so damage cannot be detected",
    ):
        assert use("qdrant", folder) == expected
    assert use("qdrant", folder) == expected
    (folder / "checksums.json").unlink()
    QdrantCollection.embedded(folder, verify=False).close()
    assert (folder / "checksums.json").is_file()


LEFT = {
    "forgotten": "if os.fork() == 0:\n    raise SystemExit  # is not the one that opened it\nos.wait()\ndel index",
    "open at the end": "",
    "killed": "os._exit(9)",
}


@pytest.mark.parametrize(
    ("end", "changed"),
    [
        pytest.param("killed", True, id="killed after a change"),
        pytest.param("open at the end", True, id="open at the end after a change"),
        pytest.param("forgotten", True, id="forgotten after a change", marks=pytest.mark.slow),
        pytest.param("killed", False, id="killed", marks=pytest.mark.slow),
        pytest.param("open at the end", False, id="open at the end", marks=pytest.mark.slow),
        pytest.param("forgotten", False, id="forgotten", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_closes_nothing_leaves_right_checksums_or_none(
    end: str,
    changed: bool,
    copied: Any,
) -> None:
    folder = copied("qdrant")
    code = f"""
import os
from tilefold.retrieval import load_index
index = load_index({str(folder)!r})
len(index.collection)
if {changed}:
    index.collection.delete(["d3"])
    assert index.n_documents == 39 and not os.path.exists({str(folder / "checksums.json")!r})
{LEFT[end]}
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (9 if end == "killed" else 0, "")
    unknown = changed and end == "killed"
    assert (folder / "checksums.json").exists() is not unknown
    message = (
        pytest.warns(RuntimeWarning, match="the collection was not closed properly")
        if unknown
        else nullcontext()
    )
    with message:
        assert ("d3" in {hit.id for hit in use("qdrant", folder, 40)[0]}) is not changed
    page = shard_files(folder)[-1]
    with page.open("r+b") as stream:
        stream.seek(int(np.flatnonzero(np.frombuffer(page.read_bytes(), np.uint8))[5]))
        stream.write(b"\xaa")
    refused(DataError, rf"{page.name}: damaged", r.load_index, folder)


def test_a_closed_collection_ends_in_silence_as_python_does(
    copied: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", message.append)
    collection = QdrantCollection.embedded(copied("qdrant"))
    collection.close()
    monkeypatch.setattr(qdrant_collection, "suppress", None)
    del collection
    assert message == []


def test_a_collection_that_changes_and_a_copy_of_it_have_their_own_checksums(
    copied: Any,
    tmp_path: Path,
) -> None:
    folder = copied("qdrant")
    index = r.load_index(folder)
    assert isinstance(index, QdrantIndex)
    index.collection.delete(["d1"])
    assert not (folder / "checksums.json").exists()
    index.save(tmp_path / "copy")
    index.collection.delete(["d2"])
    index.close()
    for place, count in ((folder, 38), (tmp_path / "copy", 39)):
        for _ in range(2):
            with QdrantCollection.embedded(place) as collection:
                assert len(collection) == count
        with shard_files(place)[-1].open("r+b") as stream:
            stream.truncate(4096)
        refused(
            DataError,
            r"damaged; its size or checksum is not that in checksums.json",
            r.load_index,
            place,
        )


@pytest.mark.parametrize(
    "free",
    [[0], [100, 100, 63], [1000, 1000, 1000, 64]],
    ids=["create", "batch", "optimize"],
)
def test_a_full_disk_is_said_first(
    free: list[int],
    tmp_path: Path,
    make_vectors: Make,
    monkeypatch: Any,
) -> None:
    vectors, queries, reported = make_vectors(4000), make_vectors(3, seed=1, prefix="q"), [0]
    usage = namedtuple("usage", "free")

    def disk_usage(place: Path) -> Any:
        assert tmp_path in Path(place).parents, (
            "the space that counts is that of the disk of the index"
        )
        return usage((free.pop(0) if len(free) > 1 else free[0]) << 20)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.raises(
        DiskFullError,
        match=r"index.building: could not be written .* needs up to \d+ MB, but only \d+ MB are free",
    ):
        r.build_index(
            vectors,
            "qdrant",
            folder=tmp_path / "index",
            progress=lambda done, _: reported.append(done),
        )
    assert [entry.name for entry in tmp_path.iterdir()] == (
        [".index.building"] if reported[-1] else []
    )
    free[:] = [1000]
    index = r.build_index(vectors, "qdrant", folder=tmp_path / "index")
    actual = [[hit.id for hit in row] for row in index.search(queries, 10)]
    assert actual == [[hit.id for hit in row] for row in r.build_index(vectors).search(queries, 10)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_a_copy_asks_for_space_where_it_goes(
    copied: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, usage = copied("qdrant"), namedtuple("usage", "free")
    index = r.load_index(folder)
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda place: usage(1 << 30 if Path(place) == folder else 0),
    )
    message = rf"{tmp_path / 'copy'}: could not be written .* 0 MB are free"
    refused(DiskFullError, message, index.save, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda place: usage(0 if Path(place) == folder else 1 << 30),
    )
    index.save(tmp_path / "copy")
    index.close()  # type: ignore[attr-defined]
    assert use("qdrant", tmp_path / "copy") == use("qdrant", folder)


def test_checksums_are_durable_and_gone_before_a_change(
    copied: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, synced = copied("qdrant"), list[tuple[str, bool]]()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((file.name, (folder / "checksums.json").exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with QdrantCollection.embedded(folder) as collection:
        collection.delete(["d1"])
        assert synced == [(folder.name, False)]
    assert synced[1:] == [("checksums.json", False), (folder.name, True)]
