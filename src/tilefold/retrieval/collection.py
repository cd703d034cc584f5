"""Collections in the BEIR layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as one string: what every encoder and BM25 reads."""
        return f"{self.title}\n{self.text}" if self.title and self.text else self.title or self.text


@dataclass
class Collection:
    name: str
    documents: dict[str, Document]
    queries: dict[str, str]
    qrels: dict[str, dict[str, dict[str, int]]]

    def split_queries(self, split: str) -> dict[str, str]:
        raise NotImplementedError

    def pairs(self, split: str) -> list[tuple[str, str]]:
        raise NotImplementedError

    def save_beir(self, path: str | Path) -> None:
        raise NotImplementedError


def load_beir(path: str | Path) -> Collection:
    raise NotImplementedError


def load_collection(name_or_path: str | Path, cache_dir: str | Path | None = None) -> Collection:
    raise NotImplementedError
