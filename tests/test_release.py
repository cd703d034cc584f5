"""What a release is made by: version, tag and notes agree; workflows and the site name what exists."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tilefold
from scripts import export_kernels, release
from scripts.install_matrix import SMOKE
from tests.refusals import refused
from tests.scripts import load_script
from tilefold.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHANGELOG = "## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n\n- `a`.\n\n## [1.1.0] - 2025-12-01\n\nold\n"


def test_a_tag_is_that_of_the_version_and_has_notes() -> None:
    release.check("v1.2.0", "1.2.0", CHANGELOG)
    assert release.notes(CHANGELOG, "1.2.0") == "### Added\n\n- `a`.\n"
    refused(SystemExit, "the tag must be 'v1.2.0'", release.check, "1.2.0", "1.2.0", CHANGELOG)
    refused(SystemExit, "got no such section", release.notes, CHANGELOG, "1.3.0")
    undated = CHANGELOG.replace(" - 2026-01-31", "")
    refused(
        SystemExit,
        "must have a section '## .1.2.0. - YYYY-MM-DD'",
        release.notes,
        undated,
        "1.2.0",
    )


def test_the_version_stands_in_one_place_and_its_citation_agrees() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (
        release.version() == tilefold.__version__ == cited["version"]
        and cited["cff-version"] == "1.2.0"
    )


def test_every_extra_that_users_install_has_a_smoke_test() -> None:
    (extras,) = re.findall(
        r"optional-dependencies\]\n(.*?)\n\[",
        (ROOT / "pyproject.toml").read_text(),
        re.DOTALL,
    )
    names = set(re.findall(r"^([a-z-]+) = \[", extras, re.MULTILINE))
    names -= {"dev", "lint", "test"}
    assert names == {name for extra in SMOKE for name in extra.split(",") if name}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_limits_and_run_what_exists(path: Path) -> None:
    actual: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (
        actual["permissions"] == {"contents": "read"} and True in actual
    )  # "on" is a truth value in YAML 1.1
    for name, job in actual["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 180, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step) and "secrets." not in str(step)
            words = re.sub(r"\S*=\S*", "", step.get("run", "")).split()
            for before, word in itertools.pairwise(words):
                assert before != "make" or word in targets, (
                    f"{path.name}: make {word} does not exist"
                )
                assert not word.endswith(".py") or (ROOT / word).exists(), (
                    f"{path.name}: {word} does not exist"
                )


def test_a_release_links_to_the_repository_that_builds_it() -> None:
    hook = load_script(ROOT / "hatch_build.py")
    on_github = {
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "owner/name",
        "SITE_URL": "https://owner.github.io/name/",
    }
    assert hook.project_urls(on_github) == {
        "Documentation": "https://owner.github.io/name/",
        "Source": "https://github.com/owner/name",
        "Issues": "https://github.com/owner/name/issues",
        "Changelog": "https://github.com/owner/name/blob/main/CHANGELOG.md",
    }


def test_a_build_outside_of_github_has_no_links() -> None:
    assert load_script(ROOT / "hatch_build.py").project_urls({"SITE_URL": ""}) == {}


@pytest.mark.parametrize(
    ("site_url", "address"),
    [
        pytest.param("", "docs/serve/", id="relative"),
        pytest.param(
            "https://example.org/",
            "https://example.org/docs/serve/",
            id="absolute with the address of the site",
        ),
    ],
)
def test_the_list_of_pages_for_language_models_has_titles_addresses_and_first_sentences(
    site_url: str,
    address: str,
) -> None:
    pages = {
        "CONTRIBUTING.md": "# Contributing\n\n```sh\nmake setup\n```\n\nSingle tests run with pytest.\n",
        "reference/python/losses.md": "# Losses\n\nRegularizers.\n",
        "reference/commands/tilefold-info.md": "# tilefold info\n\nShow versions.\n",
        "docs/serve.md": "# Serving\n\nA [server](x.md) of models.\nIt speaks HTTP.\n",
        "src/tilefold/ops/README.md": "# Operators\n\nOne package for each\noperator. More.\n",
    }
    text = load_script(ROOT / "docs" / "site" / "stage.py").llms_text(pages, site_url)
    documentation, commands, python, packages, optional = text.split("\n## ")[1:]
    assert documentation == f"Documentation\n\n- [Serving]({address}): A server of models.\n"
    assert commands.startswith("Commands\n\n- [tilefold info](")
    assert python.startswith("Python\n\n- [Losses](")
    assert packages.endswith("src/tilefold/ops/): One package for each operator.\n")
    assert optional.startswith("Optional\n\n- [Contributing](")
    assert optional.endswith("CONTRIBUTING/): Single tests run with pytest.\n")


def test_the_site_shows_pages_that_exist() -> None:
    shown = re.findall(
        r": (\S+\.md)$",
        (ROOT / "docs" / "site" / "mkdocs.yml").read_text(),
        re.MULTILINE,
    )
    commands = {f"reference/commands/tilefold-{command}.md" for command in COMMANDS}
    generated = commands | {"reference/commands/index.md"}
    api_reference = load_script(ROOT / "docs" / "site" / "api_reference.py")
    generated |= set(api_reference.api_pages())
    assert generated <= set(shown)
    assert all((ROOT / page).exists() for page in set(shown) - generated)
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= {
        Path(page).name for page in shown
    }


def test_words_that_become_links_to_generated_pages_are_in_their_pages() -> None:
    stage = load_script(ROOT / "docs" / "site" / "stage.py")
    for page, (words, address) in stage.GENERATED_LINKS.items():
        assert words in (ROOT / page).read_text(encoding="utf-8")
        assert address.startswith("../reference/")


ALONE = """
import sys
sys.modules.update(dict.fromkeys(("tilefold", "sentence_transformers", "transformers", "scipy")))
import torch
import tilefold_kernels as kernels

queries, documents = torch.randn(2, 3, 16, requires_grad=True), torch.randn(4, 5, 16)
expected = torch.einsum("qld,ktd->qklt", queries, documents).amax(-1).sum(-1)
(gradient,) = torch.autograd.grad(expected.sum(), queries)
for impl in ("tiled", "triton"):
    scores = kernels.maxsim(queries, documents, impl=impl)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(torch.autograd.grad(scores.sum(), queries)[0], gradient)
hidden, weight = torch.randn(2, 4, 16), torch.randn(11, 16)
head = torch.compile(kernels.lsr_head, backend="eager")(hidden, weight)
torch.testing.assert_close(head, (hidden @ weight.T).relu().log1p().amax(1))
torch.testing.assert_close(kernels.sparsemax(torch.tensor([[3.0, 0.0]]), impl="triton"), torch.tensor([[1.0, 0.0]]))
attention = kernels.entmax_attention(*torch.randn(3, 1, 2, 4, 16), impl="triton")
print([name for name in dir(torch.ops) if "tilefold" in name], set(kernels.__all__) <= vars(kernels).keys())
"""


@pytest.mark.slow
def test_the_operators_of_the_hub_s_package_run_without_tilefold_in_a_namespace_of_their_own(
    tmp_path: Path,
) -> None:
    namespace = export_kernels.main(tmp_path / "hub")
    assert re.fullmatch("tilefold_kernels_[0-9a-f]{8}", namespace)
    sources = [path.read_text() for path in (tmp_path / "hub" / "torch-ext").rglob("*.py")]
    assert not [
        line
        for text in sources
        for line in text.splitlines()
        if re.match(r"\s*(from|import) tilefold\b", line)
    ]
    variables = {"PYTHONPATH": str(tmp_path / "hub" / "torch-ext"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", ALONE]
    ran = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [f"['{namespace}']", "True"]
