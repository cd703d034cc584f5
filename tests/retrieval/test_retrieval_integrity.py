"""Folders that hold something else than was saved: every store names the file, and gives no answer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.manifests import edit
from tilefold._files import sha256_file
from tilefold.retrieval import (
    BM25Index,
    SparseVectors,
    build_index,
    load_index,
    open_tokens,
    read_vectors,
    write_vectors,
)
from tilefold.retrieval._token_vectors import TokenVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.tokens import TokenManifest, TokenVectorWriter

Make = Callable[..., SparseVectors]
DOCUMENTS = {f"d{at}": f"cats and dogs sleep in house number{at} word{at % 7}" for at in range(40)}
MANIFESTS = {
    "vectors": "manifest.json",
    "tokens": "manifest.json",
    "exact": "index.json",
    "seismic": "index.json",
    "bm25": "index.json",
    "qdrant": "index.json",
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind."""
    work = tmp_path_factory.mktemp("stores")
    generator = np.random.default_rng(0)
    rows = {
        name: {int(term): float(generator.random() + 0.1) for term in generator.permutation(300)[:12]}
        for name in DOCUMENTS
    }
    vectors = SparseVectors.from_rows(rows, 300, "f" * 64)
    write_vectors(vectors, work / "vectors", shard_size=20)
    writer = TokenVectorWriter(work / "tokens", TokenManifest(4, "fp16", settings={"texts_sha256": "b" * 64}))
    for number in range(2):
        names = list(DOCUMENTS)[20 * number : 20 * number + 20]
        writer.write_shard(number, TokenVectors.pack(names, [torch.ones(3, 4) for _ in names], 4, "fp16"))
    writer.finish()
    for backend in ("exact", "seismic"):
        build_index(vectors, backend).save(work / backend)
    build_index(vectors, "qdrant", folder=work / "qdrant").close()  # type: ignore[attr-defined]
    BM25Index.build(DOCUMENTS).save(work / "bm25")
    return work


def use(kind: str, folder: Path) -> Any:
    """Read a folder and all that it holds."""
    if kind == "vectors":
        return read_vectors(folder)
    if kind == "tokens":
        return open_tokens(folder).read(DOCUMENTS)
    if kind == "bm25":
        return BM25Index.load(folder).search({"q": " ".join(DOCUMENTS.values())}, 10)
    index = load_index(folder)
    try:
        return index.search(SparseVectors.from_rows({"q": dict.fromkeys(range(300), 1.0)}, 300, "f" * 64), 10)
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
    edit(folder / "index.json", files={f.name: sha256_file(f) for f in folder.iterdir() if f.name != "index.json"})


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_changed_character_of_a_manifest_is_noticed(kind: str, copied: Any) -> None:
    folder = copied(kind)
    file = folder / MANIFESTS[kind]
    text = file.read_text(encoding="utf-8")
    at = re.search(r'"(texts_sha256|fingerprint)": "(.)', text).end(2)  # type: ignore[union-attr]
    file.write_text(text[: at - 1] + ("0" if text[at - 1] != "0" else "1") + text[at:], encoding="utf-8")
    with pytest.raises(DataError, match=rf"{file.name}: damaged, or edited: its checksum is not that of the rest"):
        use(kind, folder)
    file.write_text(text, encoding="utf-8")
    edit(file)  # as an earlier tilefold wrote it, without
    use(kind, folder)


@pytest.mark.parametrize("kind", MANIFESTS)
@pytest.mark.parametrize("text", ['{"a":' * 100_000 + "1" + "}" * 100_000, "[]", '{"a": 1', "\udcff"])
def test_a_manifest_that_is_no_json_object_is_named(kind: str, text: str, copied: Any) -> None:
    folder = copied(kind)
    (folder / MANIFESTS[kind]).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=rf"{MANIFESTS[kind]}: expected a JSON object"):
        use(kind, folder)


@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_a_manifest_that_does_not_agree_with_itself_is_refused(kind: str, copied: Any) -> None:
    folder = copied(kind)
    file = folder / "manifest.json"
    whole = file.read_bytes()
    reader = {"vectors": read_vectors, "tokens": open_tokens}[kind]
    shards = open_tokens(folder).manifest.shards if kind == "tokens" else None
    for changes, message in (
        ({"shards": (shards or [{"file": "part-00000.parquet", "rows": 20, "sha256": ""}])[:1]}, "40 rows, as n_docum"),
        ({"n_documents": 39}, "expected 39 rows, as n_documents says, got shards with 40"),
        ({"n_texts": 41}, "expected 41 texts, as n_texts says, got 40 rows and 0 failed"),
        ({"settings": []}, r"fields of other types \(settings\)"),
        ({"failed": "none", "complete": 1}, r"fields of other types \(failed, complete\)"),
        ({"shards": ["part"]}, r"fields of other types \(shards\)"),
    ):
        file.write_bytes(whole)
        edit(file, **changes)
        with pytest.raises(DataError, match=rf"manifest.json: .*{message}"):
            reader(folder)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, -1.0])
def test_weights_that_are_none_are_refused_whatever_the_checksums_say(weight: float, copied: Any) -> None:
    exact, bm25, tokens = copied("exact"), copied("bm25"), copied("tokens")
    weights = np.load(exact / "weights.npy")
    weights[7] = weight
    (exact / "checksums.npy").unlink()
    for name in ("ids.npy", "id_ends.npy"):
        (exact / name).unlink()
    (exact / "ids.json").write_text('{"ids": [' + ", ".join(f'"{name}"' for name in DOCUMENTS) + "]}")
    replace_array(exact, "weights.npy", weights)
    with pytest.raises(DataError, match=rf"damaged; the postings of term .* at least 0, got {weight}"):
        use("exact", exact)
    data = np.load(bm25 / "data.csc.index.npy")
    data[3] = weight
    replace_array(bm25, "data.csc.index.npy", data)
    with pytest.raises(DataError, match=rf"bm25: could not be read \(data: expected finite weights .* got {weight}"):
        BM25Index.load(bm25)
    if weight == -1:  # as good as any other number of a vector
        return
    file = tokens / "part-00001.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["values"][3, 2] = weight
    file.unlink()
    save_file(tensors, file)
    shards = open_tokens(tokens).manifest.shards
    edit(tokens / "manifest.json", shards=[shards[0], shards[1] | {"sha256": sha256_file(file)}])
    with pytest.raises(DataError, match=r"part-00001.safetensors: expected finite token vectors"):
        use("tokens", tokens)


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("indices", 5, -1, r"indices: expected positions in \[0, 40\), got -1"),
        ("indices", 5, 40, r"indices: expected positions in \[0, 40\), got 40"),
        ("indptr", 0, 1, "indptr: expected offsets that rise from 0"),
        ("indptr", 4, 10**6, "indptr: expected offsets that rise from 0"),
        ("indptr", -1, 3, "indptr: expected offsets that rise from 0"),
    ],
)
def test_arrays_of_bm25_out_of_range_are_refused(name: str, at: int, value: int, message: str, copied: Any) -> None:
    folder = copied("bm25")
    values = np.load(folder / f"{name}.csc.index.npy")
    values[at] = value
    replace_array(folder, f"{name}.csc.index.npy", values)
    with pytest.raises(DataError, match=rf"bm25: could not be read \({message}"):
        BM25Index.load(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"a": -1}', "[" * 100_000])
def test_words_of_bm25_that_are_not_its_own_are_refused(content: str, copied: Any) -> None:
    folder = copied("bm25")
    (folder / "vocab.index.json").write_text(content)
    replace_array(folder, "indptr.csc.index.npy", np.load(folder / "indptr.csc.index.npy"))
    with pytest.raises(DataError, match="bm25: could not be read"):
        BM25Index.load(folder)


def test_a_seismic_index_that_fails_while_it_searches_is_named(copied: Any) -> None:
    folder = copied("seismic")
    terms = np.load(folder / "terms.npy")
    for wrong in (terms[::-1], terms[:-1], terms + 300, terms.astype(np.float32)):
        replace_array(folder, "terms.npy", np.ascontiguousarray(wrong))
        with pytest.raises(DataError, match=r"seismic: could not be read \(.*terms"):
            load_index(folder)
    replace_array(folder, "terms.npy", terms)
    index = load_index(folder)

    class PanicException(BaseException):
        pass

    class Broken:
        def search(self, *arguments: Any, **options: Any) -> Any:
            raise PanicException("index out of bounds")

    class Elsewhere:
        def search(self, *arguments: Any, **options: Any) -> Any:
            return [("0", 1.0, 4711)]

    query = SparseVectors.from_rows({"q": {int(terms[0]): 1.0}}, 300, "f" * 64)
    for engine, message in ((Broken(), "Seismic failed: index out"), (Elsewhere(), r"in \[0, 40\), got 4711")):
        index._engine = engine  # type: ignore[attr-defined]
        with pytest.raises(DataError, match=rf"seismic: could not be searched \(.*{message}.*tilefold index"):
            index.search(query, 3)
