"""Paths on the command line, for the scripts that print or draw results."""

from __future__ import annotations

import argparse


def given_paths(doc: str | None, *names: str, optional: str | None = None) -> list[str]:
    """The paths that ``sys.argv`` has for ``names``, and for ``optional`` if it is there; ``doc``
    is the script's.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name in names:
        parser.add_argument(name)
    if optional is not None:
        parser.add_argument(optional, nargs="?")
    return [path for path in vars(parser.parse_args()).values() if path is not None]
