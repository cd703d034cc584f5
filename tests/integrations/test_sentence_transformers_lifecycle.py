"""An accelerated model stays a stock one: saved, copied, pickled, restored, accelerated again."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from sentence_transformers import SparseEncoder

from tests import programs
from tests.integrations.multi_vector_models import build_colbert, needs_stock
from tests.integrations.splade_models import TEXTS, VOCABULARY, assert_close
from tilefold.integrations.sentence_transformers import accelerate, encode_sparse, is_accelerated, restore


@pytest.fixture
def model(tiny_folder: Path) -> SparseEncoder:
    return SparseEncoder(str(tiny_folder), device="cpu")


@pytest.fixture(scope="module")
def late_model() -> Any:
    return build_colbert()


@pytest.fixture(params=["sparse", pytest.param("late", marks=needs_stock)])
def either(request: pytest.FixtureRequest) -> Any:
    """A model of each kind."""
    return (
        request.getfixturevalue("model")
        if request.param == "sparse"
        else copy.deepcopy(request.getfixturevalue("late_model"))
    )


def encode(model: Any) -> torch.Tensor:
    """Scores of texts: a SparseEncoder's rows, the similarities of a MultiVectorEncoder's vectors."""
    if isinstance(model, SparseEncoder):
        return model.encode(TEXTS).to_dense()
    return model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))


def test_the_first_lines_of_python_in_the_readme_accelerate_a_model(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = Path(__file__).resolve().parents[2] / "README.md"
    example = re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    stock = SparseEncoder
    monkeypatch.setattr(sentence_transformers, "SparseEncoder", lambda name: stock(str(tiny_folder), device="cpu"))
    namespace: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), namespace)  # noqa: S102
    assert is_accelerated(namespace["model"])


RELOAD_WITHOUT_TILEFOLD = """
import sys, torch
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tilefold":
            raise ImportError("tilefold must not be imported")
sys.meta_path.insert(0, Refuse())
from sentence_transformers import SparseEncoder
model = SparseEncoder(sys.argv[1], device="cpu")
torch.save(model.encode(sys.argv[3:]).to_dense(), sys.argv[2])
assert "tilefold" not in sys.modules
"""


def test_a_checkpoint_saved_while_accelerated_loads_in_plain_sentence_transformers(
    model: SparseEncoder, tmp_path: Path
) -> None:
    keys = list(model.state_dict())
    expected = encode(model)
    accelerate(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(str(tmp_path / "saved"))
    scores = tmp_path / "scores.pt"
    done = programs.run("-c", RELOAD_WITHOUT_TILEFOLD, tmp_path / "saved", scores, *TEXTS)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(scores, weights_only=True), expected)


def test_the_files_of_a_checkpoint_are_those_of_the_stock_model(either: Any, tmp_path: Path) -> None:
    encode(either)
    either.save_pretrained(str(tmp_path / "stock"), create_model_card=False)
    with accelerate(either):
        either.save_pretrained(str(tmp_path / "fused"), create_model_card=False)
    names = sorted(str(p.relative_to(tmp_path / "stock")) for p in (tmp_path / "stock").rglob("*") if p.is_file())
    assert "model.safetensors" in names and len(names) > 5
    for name in names:
        assert (tmp_path / "fused" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    types = [module["type"] for module in json.loads((tmp_path / "fused" / "modules.json").read_text())]
    assert all(kind.startswith("sentence_transformers.") for kind in types)


def test_copies_and_pickles_stay_accelerated_with_weights_and_options_of_their_own(either: Any) -> None:
    accelerate(either, impl="tiled")
    expected = encode(either)
    for twin in (copy.deepcopy(either), pickle.loads(pickle.dumps(either))):  # noqa: S301
        assert is_accelerated(twin)
        assert torch.equal(encode(twin), expected)
        if isinstance(twin, SparseEncoder):
            with torch.no_grad():
                twin.transformers_model.get_output_embeddings().bias.add_(1.0)
        else:
            assert twin.similarity.model is twin and twin.similarity.impl == "tiled"
            twin.similarity_fn_name = "meanmaxsim"
        assert not torch.equal(encode(twin), expected)
        assert torch.equal(encode(either), expected)
        restore(twin)
        assert is_accelerated(either) and not is_accelerated(twin)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch, on unpickling a sparse tensor
def test_a_pool_of_processes_encodes_with_the_accelerated_model(
    model: SparseEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: programs.context())
    expected = encode(model)
    accelerate(model)
    pool = model.start_multi_process_pool(["cpu"])
    try:
        got = model.encode(TEXTS, pool=pool, chunk_size=2).to_dense()
    finally:
        model.stop_multi_process_pool(pool)
    assert_close(got, expected, 1e-5)


def test_restore_gives_back_the_stock_model_bit_for_bit(either: Any) -> None:
    expected = encode(either)
    before = [dict(vars(module)) for module in either.modules()]
    restore(either)  # which is stock yet
    accelerate(either)
    restore(either)
    assert not is_accelerated(either)
    assert torch.equal(encode(either), expected)
    assert [vars(module).keys() for module in either.modules()] == [state.keys() for state in before]
    assert all(not module._forward_pre_hooks for module in either.modules())


def test_a_context_restores_the_model_even_after_an_error(either: Any) -> None:
    with accelerate(either) as inside:
        assert inside is either and is_accelerated(either)
    assert not is_accelerated(either)
    with pytest.raises(KeyError), accelerate(either):
        raise KeyError
    assert not is_accelerated(either)


def test_accelerating_twice_is_accelerating_once_and_takes_the_last_options(either: Any) -> None:
    expected = encode(either)
    accelerate(either, impl="tiled")
    handle = accelerate(either, impl="reference")
    assert encode(either).sub(expected).abs().max() <= 1e-5 * expected.abs().max()
    if isinstance(either, SparseEncoder):
        assert repr(handle) == "Acceleration(SparseEncoder, heads=1)" and either[1].forward.impl == "reference"
        assert len(either[0]._forward_pre_hooks) == 1
    else:
        assert repr(handle) == "Acceleration(MultiVectorEncoder, similarity)" and handle.heads == 0
        assert either.similarity.impl == either.similarity_pairwise.impl == "reference"
    handle.restore()
    assert torch.equal(encode(either), expected)


def test_accelerating_and_encoding_leave_modes_and_random_numbers_alone(model: SparseEncoder) -> None:
    model.train()
    model[0].model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    numbers = []
    for fused in (False, True):
        torch.manual_seed(11)
        random.seed(11)
        if fused:
            accelerate(model)
            encode_sparse(model, TEXTS)
        numbers.append((torch.rand(1).item(), random.random()))  # noqa: S311
    assert numbers[0] == numbers[1]
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_embedding_dimension_is_known_after_the_first_batch(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cpu")
    model[1].embedding_dimension = None
    accelerate(model)
    assert model[1].embedding_dimension is None
    encode(model)
    assert model.get_embedding_dimension() == VOCABULARY


def test_a_wrong_call_is_refused_in_the_words_of_the_stock_model(model: SparseEncoder) -> None:
    def refusals() -> list[str]:
        texts = []
        for arguments, named in (({},), {"unknown": 1}), (({}, 1), {}), ((), {}):
            with pytest.raises(TypeError) as caught:
                model[1](*arguments, **named)
            texts.append(str(caught.value))
        with pytest.raises((TypeError, ValueError)) as refused:
            model.encode(TEXTS, unknown=1)
        return [*texts, str(refused.value)]

    stock = refusals()
    accelerate(model)
    assert refusals() == stock
