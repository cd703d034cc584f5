"""Hook of the build that adds the addresses of the project to the metadata of a release.

The addresses are those of the repository that builds the release, which GitHub's workflows have in
their environment. A build elsewhere has none of them, so that a fork never links to somebody
else's repository.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Metadata hook for the dynamic field ``urls`` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the addresses of the project."""
        metadata["urls"] = project_urls(os.environ)


def project_urls(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses of the project by their labels.

    Args:
        environment: environment variables. ``GITHUB_SERVER_URL`` and ``GITHUB_REPOSITORY`` name the
            repository, and ``SITE_URL`` is the address of the documentation.
    """
    urls: dict[str, str] = {}
    site = environment.get("SITE_URL")
    if site:
        urls["Documentation"] = site
    server = environment.get("GITHUB_SERVER_URL")
    repository = environment.get("GITHUB_REPOSITORY")
    if server and repository:
        address = f"{server}/{repository}"
        urls["Source"] = address
        urls["Issues"] = f"{address}/issues"
        urls["Changelog"] = f"{address}/blob/main/CHANGELOG.md"
    return urls
