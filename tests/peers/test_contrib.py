"""The patches of ``contrib/`` apply to the packages that are installed, and compute there what
these compute.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.processes import ROOT, environment

PATCHES = {"pylate": "1.6", "sentence-transformers": "6.2"}


@pytest.mark.slow  # copies and imports the other package
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies_and_changes_no_result(name: str, tmp_path: Path) -> None:
    package = importlib.util.find_spec(name.replace("-", "_"))
    if package is None or not importlib.metadata.version(name).startswith(f"{PATCHES[name]}."):
        pytest.skip(f"{name} {PATCHES[name]} is not installed")
    source = Path(str(package.origin)).parent
    shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    patch = (ROOT / "contrib" / f"{name}-{PATCHES[name]}.patch").read_bytes()
    for line in patch.splitlines():  # wheels may have other ends of lines than repositories
        if (
            line.startswith((b"--- a/", b"+++ b/"))
            and (path := tmp_path / line[6:].decode()).exists()
        ):
            path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))
    applied = subprocess.run(
        ["git", "apply", "-"],
        cwd=tmp_path,
        input=patch,
        capture_output=True,
        check=False,
    )
    assert applied.returncode == 0, applied.stderr
    call = [sys.executable, "-m", "tests.peers.test_contrib", name, str(tmp_path)]
    run = subprocess.run(
        call,
        env=environment(tmp_path, ROOT),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0 and run.stdout.endswith("same\n"), run.stdout + run.stderr


def close(found: list[Tensor], expected: list[Tensor], of: str) -> None:
    """Within rounding of fp32, of the largest value."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, of
        torch.testing.assert_close(
            a,
            b,
            rtol=0,
            atol=1e-5 * float(b.abs().max().clamp(min=1e-6)),
            msg=of,
        )


def pylate() -> None:
    """Every function with each backend, on masks with holes and without masks, in fp32."""
    from pylate import scores

    for name, documents, masked in (
        ("colbert_scores", (4, 9, 16), True),
        ("colbert_scores", (4, 9, 16), False),
        ("colbert_scores_pairwise", (3, 9, 16), False),
        ("colbert_kd_scores", (3, 2, 9, 16), True),
    ):
        sides = [torch.randn(shape).requires_grad_() for shape in ((3, 5, 16), documents)]
        masks = [torch.rand(side.shape[:-1]) > 0.3 for side in sides] if masked else []
        results = []
        for backend in ("torch", "tilefold", "auto"):
            out = getattr(scores, name)(*sides, *masks, backend=backend)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), sides)])
        close(results[1], results[0], name)
        assert all(map(torch.equal, results[2], results[0])), "auto stays PyLate's own on a CPU"
    with pytest.raises(ValueError, match="'tilefold'"):
        scores.colbert_scores(*sides, backend="fused")


def sentence_transformers() -> None:
    """Scores and all gradients of tiny models without their logits, padded and flattened."""
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    from tests.integrations.splade_models import build_tiny_splade, without_dropout
    from tests.recipes.small import TEXTS, VOCABULARY, make_tokenizer_folder

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer")
        tokenizer.mkdir()
        make_tokenizer_folder(tokenizer, VOCABULARY)
        for kind, pooling, activation in (
            ("bert", "max", "relu"),
            ("distilbert", "sum", "log1p_relu"),
        ):
            made = SpladePooling(pooling_strategy=pooling, activation_function=activation)
            model = without_dropout(build_tiny_splade(kind, tokenizer, made))
            results = []
            for model[0].skip_decoder in (False, True):
                model.zero_grad()
                features = model(model.preprocess(TEXTS))
                features["sentence_embedding"].square().sum().backward()
                gradients = torch.cat(
                    [x.grad.flatten() for x in model.parameters() if x.grad is not None],
                )
                results.append([features["sentence_embedding"].detach(), gradients])
            assert features["token_embeddings"].size(-1) == 32, "those are logits"
            close(results[1], results[0], kind)
            decoder = model[0].model.get_output_embeddings()
            hidden, offsets = torch.randn(1, 11, 32), torch.tensor([0, 4, 11], dtype=torch.int32)
            flat = {"cu_seq_lens_q": offsets, "token_embeddings": decoder(hidden).detach()}
            fused = {"cu_seq_lens_q": offsets, "token_embeddings": hidden, "decoder": decoder}
            close(
                *([made(given)["sentence_embedding"].detach()] for given in (fused, flat)),
                of=f"{kind}, flattened",
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    asked = sys.argv[1].replace("-", "_")
    assert str(importlib.util.find_spec(asked).origin).startswith(sys.argv[2]), (
        "the package is not the patched copy"
    )
    globals()[asked]()
    sys.stdout.write("same\n")
