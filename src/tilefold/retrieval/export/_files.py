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
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.provenance import Provenance
from tilefold.retrieval.vectors import iter_shards, read_manifest

RECORD = "export.json"
SCHEMA_VERSION = 1
_SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Exported:
    """Result of an export.

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

    def fields(
        self, names: Sequence[str], texts: Mapping[str, str] | None
    ) -> Iterator[tuple[str, dict[str, str], dict[str, float]]]:
        """Id, fields of texts, and positive weights by name of each document.

        Weights are the shortest decimals that are these float32 again.
        """
        for part in self.parts():
            for row, name in enumerate(part.ids):
                terms, weights = part.row(row)
                keep = weights > 0
                decimals = map(float, weights[keep].astype(str).tolist())
                own = {} if texts is None else {"text": _text_of(texts, name)}
                yield (
                    name,
                    {"id": name} | own,
                    dict(zip((names[at] for at in terms[keep].tolist()), decimals, strict=True)),
                )


def survey(vectors: SparseVectors | str | Path, complaint: Callable[[str], str | None], engine: str) -> Documents:
    """Read `vectors` once, and refuse ids that the engine does not take."""
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
        where = source if isinstance(source, Path) else "vectors"
        raise DataError(f"{where}: expected at least one document, got 0 rows. Encode a collection (tilefold encode).")
    lightest = low if weights else 0.0
    return Documents(source, made_of[1], made_of[2], used, lightest, high, documents, weights)


def _parts(source: SparseVectors | Path) -> Iterator[SparseVectors]:
    if isinstance(source, SparseVectors):
        yield source
    else:
        yield from iter_shards(source)


def origin(documents: Documents, tokens: Sequence[str] | None) -> dict[str, Any]:
    """Facts of the vectors that the engine keeps with them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tilefold": __version__,
        "n_documents": documents.n_documents,
        "vocab_size": int(documents.used.size),
        "fingerprint": documents.fingerprint,
        **documents.provenance.to_dict(),
        "names": "numbers" if tokens is None else "tokens",
    }


@contextmanager
def export_folder(output: Path) -> Iterator[Path]:
    """An empty folder that replaces `output`, which may be new, empty or an earlier export."""
    earlier = read_json(output / RECORD) or {}
    files = earlier.get("files")
    own = list(files) if isinstance(files, dict) else []
    with atomic_directory(output, own_names=[RECORD, *own]) as folder:
        yield folder


def write_record(
    folder: Path, engine: str, documents: Documents, names: list[str], made_of: Mapping[str, Any], **settings: str
) -> Exported:
    """Write ``export.json``: the origin of the files, which have these `names`, and their checksums."""
    exported = Exported(engine, documents.n_documents, documents.n_weights, names)
    files = {name: sha256_file(folder / name) for name in names}
    write_json(folder / RECORD, {**asdict(exported), **made_of, "settings": settings, "files": files})
    return exported


def _text_of(texts: Mapping[str, str], name: str) -> str:
    """The text of a document; ``DataError`` where there is none, or one that UTF-8 cannot write."""
    text = texts.get(name)
    if text is None:
        raise DataError(f"texts: expected one per document, got no text for {name!r}. Give the collection encoded.")
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


def name_terms(
    used: npt.NDArray[np.bool_],
    tokens: Sequence[str] | None,
    complaint: Callable[[str], str | None],
    engine: str,
    remedy: str,
    more: str = "",
) -> list[str]:
    """Name of each term of the vocabulary: its token, or its number without tokens.

    Names of terms that are `used` are refused where `complaint` says why, or where another term has the same name.
    """
    if tokens is None:
        return [str(term) for term in range(used.size)]
    if len(tokens) != used.size:
        raise VocabularyMismatchError(
            f"tokens: expected one for each of the {used.size} terms of the vectors, got {len(tokens)}. "
            "Pass the vocabulary of the model that made the vectors."
        )
    names = [str(token) for token in tokens]
    bad: dict[str, list[str]] = {}
    for term in np.flatnonzero(used).tolist():
        name = names[term]
        why = "is empty" if not name else "holds half a surrogate pair" if not is_unicode(name) else complaint(name)
        if why is not None:
            bad.setdefault(why, []).append(f"{name!r} (term {term})")
    if bad:
        why, owners = next(iter(bad.items()))
        raise DataError(
            f"tokens: {engine} takes no term whose name {why}, got {_some(owners)}"
            f"{f', and {len(bad) - 1} other kinds of such names' if len(bad) > 1 else ''}. {remedy}{more}."
        )
    first: dict[str, int] = {}
    same: list[str] = []
    for term, name in enumerate(names):
        earlier = first.setdefault(name, term)
        if earlier != term and (used[term] or used[earlier]):
            same.append(f"{name!r} (terms {earlier} and {term})")
    if same:
        raise DataError(f"tokens: expected a name of its own for every term, got {_some(same)} twice. {remedy}.")
    return names


def control_character(text: str) -> str | None:
    """The first character of `text` that JSON carries but text fields of engines refuse, or None."""
    for character in text:
        code = ord(character)
        if (code < 0x20 and character not in "\t\n\r") or code == 0x7F or 0xFDD0 <= code <= 0xFDEF:
            return character
        if code & 0xFFFE == 0xFFFE:
            return character
    return None


def _some(items: list[str]) -> str:
    left = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {left} more" if left > 0 else "")
