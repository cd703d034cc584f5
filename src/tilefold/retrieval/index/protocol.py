"""The interface of every sparse index, and the folder with a manifest that all of them write."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import UnionType
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from tilefold._files import atomic_directory, sha256_file, write_json
from tilefold._version import __version__
from tilefold.retrieval._checks import check_k
from tilefold.retrieval._files import Json, read_json_object, write_json_object
from tilefold.retrieval._sparse import HasVocabulary, SparseVectors, check_same_vocabulary
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.fusion import Run
from tilefold.retrieval.metadata import FILE, Metadata, Where
from tilefold.retrieval.provenance import Provenance

__all__ = ["Hit", "SparseIndex", "hits_to_run"]

MANIFEST_NAME, IDS_NAME = "index.json", "ids.json"
SEGMENTS = "segments"  # folder of what was added to an index since it was built
SCHEMA_VERSION = 1
_TYPES: dict[str, type | UnionType] = {
    "backend": str,
    **dict.fromkeys(("n_documents", "vocab_size"), int),
    **dict.fromkeys(("options", "files"), dict),
    "versions": dict | None,
    **dict.fromkeys(("fingerprint", "model_fingerprint", "texts_sha256", "passages"), str | None),
}
REMEDY = "Build the index again (tilefold index)."


class Hit(NamedTuple):
    """A document, and the inner product of its vector and the query's (an estimate if the backend is approximate)."""

    id: str
    score: float


class Described(Protocol):
    """Properties of every index that ``index.json`` holds, of sparse vectors or not."""

    backend: ClassVar[str]

    @property
    def metadata(self) -> Metadata | None: ...
    @property
    def n_documents(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def provenance(self) -> Provenance: ...


@runtime_checkable
class SparseIndex(Described, Protocol):
    """A searchable set of sparse vectors.

    ``search`` returns for each query at most `k` documents by inner product, best first; documents that share no term
    with the query are not returned, and an empty query finds nothing; with `where` (:class:`Filter`), the best of those
    whose metadata match. It raises ``ValueError`` for ``k < 1``, and
    ``VocabularyMismatchError`` for queries over another vocabulary. ``save`` writes a directory atomically, and
    replaces only an earlier index of the backend; ``load`` (or :func:`tilefold.retrieval.load_index`) reads it.
    """

    @classmethod
    def build(cls, vectors: SparseVectors, **options: object) -> SparseIndex: ...
    def search(self, queries: SparseVectors, k: int, *, where: Where = None) -> list[list[Hit]]: ...
    def save(self, path: str | Path) -> None: ...
    @classmethod
    def load(cls, path: str | Path) -> SparseIndex: ...


def hits_to_run(queries: SparseVectors, hits: Sequence[Sequence[Hit]]) -> Run:
    """``{query id: {document id: score}}`` of the result of ``index.search(queries, k)``."""
    return {qid: {hit.id: hit.score for hit in row} for qid, row in zip(queries.ids, hits, strict=True)}


def check_buildable(vectors: SparseVectors) -> None:
    """Raise ``ValueError`` unless some vector holds a positive weight."""
    if not len(vectors) or not bool((vectors.data > 0).any()):
        got = f"{len(vectors)} vector(s) without"
        raise ValueError(f"vectors: expected at least one vector with a positive weight, got {got}. Check the model.")


def check_search(index: HasVocabulary, queries: SparseVectors, k: int) -> None:
    """Raise ``ValueError`` or ``VocabularyMismatchError`` unless ``queries`` and ``k`` suit the index."""
    check_k(k)
    check_same_vocabulary(index, queries, "the index", "queries")


def version_of(package: str) -> str:
    """Version of an installed package, ``"unknown"`` without its metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def write_manifest(
    folder: Path, index: Described, package: str, options: Mapping[str, object], *, changing: Collection[str] = ()
) -> None:
    """Write ``index.json``, with a checksum of every other file in `folder` that is not `changing`. Call it last."""
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "backend": index.backend,
        "n_documents": index.n_documents,
        "vocab_size": index.vocab_size,
        "fingerprint": index.fingerprint,
        **index.provenance.to_dict(),
        "versions": {"tilefold": __version__, package: version_of(package)},
        "options": options,
        "files": {
            file.name: sha256_file(file)
            for file in sorted(folder.iterdir())
            if file.is_file() and file.name not in changing
        },
    }
    write_json_object(folder / MANIFEST_NAME, manifest)


@contextmanager
def saved_index(
    path: str | Path,
    index: Described,
    own_names: Collection[str],
    package: str,
    options: Mapping[str, object],
    ids: list[str] | None = None,
) -> Iterator[Path]:
    """A folder for an index, its `own_names` and what `package` writes, which then replaces the one at `path`."""
    own_names = [MANIFEST_NAME, SEGMENTS, FILE, *own_names, *([] if ids is None else [IDS_NAME])]
    with atomic_directory(Path(path), own_names=own_names) as folder:
        yield folder
        if ids is not None:
            write_json(folder / IDS_NAME, {"ids": ids})
        if index.metadata is not None:
            index.metadata.save(folder)
        write_manifest(folder, index, package, options)


def read_description(path: str | Path) -> Json:
    """The ``index.json`` of the index at `path`, without a look at its other files."""
    file = Path(path) / MANIFEST_NAME
    manifest = read_json_object(file, REMEDY)
    wrong = [
        f"wrong {key}: expected {getattr(kind, '__name__', kind)}, got {manifest.get(key)!r:.80}"
        for key, kind in _TYPES.items()
        if not isinstance(manifest.get(key), kind) or isinstance(manifest.get(key), bool)
    ]
    if wrong or (schema := manifest.get("schema_version")) != SCHEMA_VERSION:
        got = wrong[0] if wrong else f"schema {schema!r}"
        raise DataError(f"{file}: expected an index of schema {SCHEMA_VERSION}, got {got}. {REMEDY}")
    return manifest


def read_manifest(path: str | Path, backend: str, *, unread: Collection[str] = ()) -> Json:
    """The ``index.json`` at `path`, after its files but those `unread` were compared with their checksums."""
    manifest = read_description(path)
    if manifest["backend"] != backend:
        got = f"{manifest['backend']!r}. Load it as such"
        raise DataError(f"{path}: expected an index of backend {backend!r}, got {got}.")
    for name, digest in manifest["files"].items():
        part = Path(path) / name
        if Path(name).name != name or not part.is_file():
            raise FileNotFoundError(f"{part}: listed in {MANIFEST_NAME}, but there is no such file. {REMEDY}")
        if name not in unread and sha256_file(part) != digest:
            raise DataError(f"{part}: damaged; its checksum is not the one in {MANIFEST_NAME}. {REMEDY}")
    return manifest


def read_ids(folder: Path, n_documents: int) -> list[str]:
    """The ids that :func:`saved_index` wrote; ``DataError`` unless they are `n_documents`."""
    path = folder / IDS_NAME
    ids = read_json_object(path, REMEDY).get("ids")
    if not isinstance(ids, list) or len(ids) != n_documents:
        got = len(ids) if isinstance(ids, list) else repr(ids)[:80]
        raise DataError(f"{path}: expected the ids of {n_documents} documents, got {got}. {REMEDY}")
    return [str(value) for value in ids]


@contextmanager
def naming_versions(folder: Path, manifest: Json, package: str) -> Iterator[None]:
    """Say of what goes wrong with files of `package` which of its versions wrote them, and which reads them."""
    try:
        yield
    except Exception as error:  # whatever the package raises of files that are not as it expects them
        written = f"written by {package} {(manifest.get('versions') or {}).get(package, 'unknown')}"
        read = f"read by {version_of(package)}"
        raise DataError(f"{folder}: could not be read ({error}); {written}, {read}. {REMEDY}") from error
