"""Paths on the command line, for the scripts that print or draw results."""

from __future__ import annotations

import argparse


def given_paths(doc: str | None, *names: str, optional: str | None = None) -> list[str]:
    """Return the paths on the command line.

    Args:
        doc: docstring of the script, for `--help`.
        names: the names of the required arguments.
        optional: the name of an argument that may be missing.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name in names:
        parser.add_argument(name)
    if optional is not None:
        parser.add_argument(optional, nargs="?")
    arguments = vars(parser.parse_args())
    return [path for path in arguments.values() if path is not None]
