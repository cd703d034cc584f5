"""Documents on their way to another engine: read in parts, surveyed before the first line is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._files import atomic_directory, read_json, sha256_file, write_json
from tilefold._version import __version__
from tilefold.retrieval._files import is_unicode
from tilefold.retrieval._shards import check_whole
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import Provenance
from tilefold.retrieval.vectors import iter_shards, read_manifest

RECORD = "export.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        engine: ``"opensearch"`` or ``"vespa"``.
        n_documents, n_weights: written documents, and the weights of all of them.
        files: names in the folder, in the order in which the engine wants them.
    """

    engine: str
    n_documents: int
    n_weights: int
    files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Documents:
    """Vectors in memory, or the shards of a folder.

    Attributes:
        used: ``[V]``, whether a document has a positive weight for the term.
        lightest, heaviest: of the positive weights; 0 without any.
        n_weights: positive weights; those of 0, which no score can feel, are left out of every file.
    """

    source: SparseVectors | Path
    fingerprint: str | None
    provenance: Provenance
    used: npt.NDArray[np.bool_]
    lightest: float
    heaviest: float
    n_documents: int
    n_weights: int

    def parts(self) -> Iterator[SparseVectors]:
        """The documents, in order."""
        return _parts(self.source)

    def rows(self) -> Iterator[tuple[str, list[int], list[float]]]:
        """Id, terms and positive weights of each document; the shortest decimals that are these float32 again."""
        for part in self.parts():
            for row, name in enumerate(part.ids):
                terms, weights = part.row(row)
                keep = weights > 0
                yield name, terms[keep].tolist(), [float(text) for text in weights[keep].astype(str).tolist()]


def survey(vectors: SparseVectors | str | Path, complaint: Callable[[str], str | None], engine: str) -> Documents:
    """Read `vectors` once, and refuse ids that the engine does not take.

    Raises:
        FileNotFoundError, DataError: no such folder, an incomplete or damaged one, or one of queries; no document;
            an id of which `complaint` says something.
    """
    source = vectors if isinstance(vectors, SparseVectors) else Path(vectors)
    if isinstance(source, Path):
        manifest = read_manifest(source)
        check_whole(source, manifest)
        if manifest.kind != "document":
            raise DataError(f"{source}: expected vectors of documents, got vectors of kind {manifest.kind!r}.")
        made_of = manifest.vocab_size, manifest.fingerprint, manifest.provenance
    else:
        made_of = source.vocab_size, source.fingerprint, source.provenance
    used = np.zeros(made_of[0], dtype=np.bool_)
    low, high, documents, weights = float("inf"), 0.0, 0, 0
    for part in _parts(source):
        for name in part.ids:
            if (why := "half a surrogate pair" if not is_unicode(name) else complaint(name)) is not None:
                raise DataError(f"ids: {engine} takes no id with {why}, got {name!r}. Rename that document.")
        positive = part.data > 0
        used[part.indices[positive]] = True
        if positive.any():
            low, high = min(low, float(part.data[positive].min())), max(high, float(part.data.max()))
        documents, weights = documents + len(part), weights + int(positive.sum())
    if not documents:
        raise DataError("vectors: expected at least one document, got none. Encode a collection (tilefold encode).")
    lightest = low if weights else 0.0
    return Documents(source, made_of[1], made_of[2], used, lightest, high, documents, weights)


def _parts(source: SparseVectors | Path) -> Iterator[SparseVectors]:
    if isinstance(source, SparseVectors):
        yield source
    else:
        yield from iter_shards(source)


def origin(documents: Documents, names: str) -> dict[str, Any]:
    """What made the vectors, for the engine to keep."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tilefold": __version__,
        "n_documents": documents.n_documents,
        "vocab_size": int(documents.used.size),
        "fingerprint": documents.fingerprint,
        **documents.provenance.to_dict(),
        "names": names,
    }


@contextmanager
def export_folder(output: Path) -> Iterator[Path]:
    """An empty folder that replaces `output`, which may be new, empty or an earlier export."""
    earlier = read_json(output / RECORD) or {}
    files = earlier.get("files")
    own = list(files) if isinstance(files, dict) else []
    with atomic_directory(output, own_names=[RECORD, *own]) as folder:
        yield folder


def write_record(folder: Path, exported: Exported, made_of: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write ``export.json``: what the files were made from, and their checksums."""
    files = {name: sha256_file(folder / name) for name in exported.files}
    write_json(folder / RECORD, {**asdict(exported), **made_of, "settings": dict(settings), "files": files})


def text_of(texts: Mapping[str, str], name: str) -> str:
    """The text of a document; ``DataError`` where there is none, or one that UTF-8 cannot write."""
    text = texts.get(name)
    if text is None:
        raise DataError(f"texts: expected one for every document, got none for {name!r}. Give the collection encoded.")
    if not is_unicode(text):
        raise DataError(f"texts: expected Unicode, got half a surrogate pair in that of {name!r}. Mend the text.")
    return text


def line(value: Any) -> bytes:
    """`value` as a line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ``ValueError`` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}.")
