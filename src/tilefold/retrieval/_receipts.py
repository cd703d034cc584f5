"""Receipts of shards that were written by processes that do not hold the folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilefold._files import read_json, write_json
from tilefold.retrieval.errors import DataError

RECEIPTS = "part-*.receipt.json"
TOO_MANY = 16  # when every text of a shard of at least this size fails, the model is at fault, not the texts


@dataclass(frozen=True)
class Receipt:
    """A shard that the manifest does not list yet.

    Attributes:
        key: of the folder that it was written for, :attr:`ShardWriter.key`.
        size: bytes of the file.
        shard: what the manifest is to say of it.
        failed: id -> reason.
    """

    key: str
    size: int
    shard: dict[str, Any]
    failed: dict[str, str]

    @property
    def is_hopeless(self) -> bool:
        """Whether :func:`check_some` would refuse it wherever the shard is."""
        return not self.shard["rows"] and len(self.failed) >= TOO_MANY

    @staticmethod
    def file_of(folder: Path, number: int) -> Path:
        """Path of the receipt of shard `number`."""
        return folder / RECEIPTS.replace("*", f"{number:05d}")

    @staticmethod
    def number_of(file: Path) -> int:
        """The shard of a receipt."""
        return int(file.name.split("-")[1].split(".")[0])

    @classmethod
    def read(cls, folder: Path, number: int, key: str) -> Receipt | None:
        """The receipt of shard `number`, None without one of this key whose file is there in its full size."""
        found = read_json(cls.file_of(folder, number))
        if found is None or found.get("key") != key or set(found) != {item.name for item in fields(cls)}:
            return None
        receipt = cls(**found)
        file = folder / str(receipt.shard["file"])
        return receipt if file.is_file() and file.stat().st_size == receipt.size else None

    def write(self, folder: Path, number: int) -> None:
        """Put it beside the shard."""
        write_json(self.file_of(folder, number), asdict(self))


def check_some(number: int, rows: int, failed: Mapping[str, str], *, nothing_yet: bool) -> None:
    """Raise an error where all texts of a shard failed, and so the model, or all texts.

    Args:
        number: of the shard.
        rows: of its texts that did not fail.
        failed: the others and why.
        nothing_yet: whether it is the last shard and no shard before it has a row.
    """
    if failed and not rows and (len(failed) >= TOO_MANY or nothing_yet):
        name, why = next(iter(failed.items()))
        raise DataError(
            f"texts: all {len(failed)} of shard {number} failed, {name!r} first ({why}). "
            "Check the model; earlier shards are kept."
        )
