"""An accelerated model stays a stock one: saved, copied, pickled, restored, accelerated again,
checked, replicated.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder import SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn
from torch.nn.parallel import replicate
from transformers import TrainingArguments

from tests import programs
from tests.integrations.multi_vector_models import build_colbert
from tests.integrations.sentence_transformers.packing.test_packed_inputs import PAIRS, splade_loss
from tests.integrations.splade_models import (
    FP32_BUDGET,
    TEXTS,
    assert_close,
    build_tiny_splade,
    five_steps,
)
from tests.kernels import triton_interpreted
from tests.recipes.small import VOCABULARY
from tests.refusals import refused
from tilefold.integrations._patches import Acceleration
from tilefold.integrations.sentence_transformers import (
    accelerate,
    encode_sparse,
    is_accelerated,
    restore,
    warm_up,
)
from tilefold.integrations.sentence_transformers._warm_up import warm_up_calls
from tilefold.integrations.sentence_transformers.packing import accelerate as _packing
from tilefold.integrations.sentence_transformers.packing.inputs import on_device, padded_inputs
from tilefold.integrations.transformers import one_gpu, use_packed
from tilefold.modules import StaticQuery
from tilefold.ops._shared import impl


@pytest.fixture(params=["sparse", "late"])
def either(request: pytest.FixtureRequest) -> Any:
    """A model of each kind."""
    return copy.deepcopy(
        request.getfixturevalue({"sparse": "model", "late": "colbert"}[request.param]),
    )


def encode(model: Any) -> torch.Tensor:
    """Scores of texts: a SparseEncoder's rows, the similarities of a MultiVectorEncoder's vectors."""
    if isinstance(model, SparseEncoder):
        return model.encode(TEXTS).to_dense()
    return model.similarity(model.encode_query(TEXTS), model.encode_document(TEXTS))


def test_the_first_python_of_the_readme_trains_an_accelerated_model(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = Path(__file__).resolve().parents[3] / "README.md"
    example = re.findall(
        r"^```python\n(.*?)^```",
        readme.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )[0]
    stock = SparseEncoder
    monkeypatch.setattr(
        sentence_transformers,
        "SparseEncoder",
        lambda name: stock(str(tiny_folder), device="cpu"),
    )
    namespace: dict[str, Any] = {
        "args": five_steps(tmp_path),
        "dataset": PAIRS,
        "loss": splade_loss,
    }
    exec(compile(example, "README.md", "exec"), namespace)  # noqa: S102
    assert is_accelerated(namespace["model"])
    assert namespace["trainer"].state.global_step == 5
    assert capsys.readouterr().out.startswith("tilefold: fused scores, packed tokens")


def test_the_switch_of_the_environment_leaves_models_libraries_and_operators_to_plain_torch(
    either: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, sparse = encode(either), isinstance(either, SparseEncoder)
    rows = encode_sparse(either, TEXTS, top_k=8, min_weight=0.01) if sparse else None
    library = Acceleration("json", "json", {"loads": ["json"]}).apply({"loads": print})
    accelerate(either)
    monkeypatch.setenv("TILEFOLD_DISABLE", "1")
    impl._warn_switched_off.cache_clear()
    with pytest.warns(UserWarning, match="TILEFOLD_DISABLE is set: accelerate") as warned:
        with accelerate(either) as same:
            assert (
                same is either and not is_accelerated(either) and torch.equal(encode(either), stock)
            )
        assert not library.apply({"loads": print}).is_accelerated() and json.loads("1") == 1
        assert use_packed(either[0].model) == "TILEFOLD_DISABLE is set"
        assert warm_up(either).count == 0 and not impl.takes_kernels(torch.device("cuda"))
    assert len(warned) == 1
    if rows is not None:
        actual = encode_sparse(either, TEXTS, top_k=8, min_weight=0.01)
        assert torch.equal(actual.col_indices(), rows.col_indices())
        assert_close(actual.to_dense(), rows.to_dense(), FP32_BUDGET)
    monkeypatch.setenv("TILEFOLD_DISABLE", "0")
    assert accelerate(either) and is_accelerated(either)


def test_the_files_of_a_checkpoint_are_those_of_the_stock_model(
    either: Any,
    tmp_path: Path,
) -> None:
    encode(either)
    either.save_pretrained(str(tmp_path / "stock"), create_model_card=False)
    with accelerate(either):
        either.save_pretrained(str(tmp_path / "fused"), create_model_card=False)
    names = sorted(
        str(p.relative_to(tmp_path / "stock"))
        for p in (tmp_path / "stock").rglob("*")
        if p.is_file()
    )
    assert "model.safetensors" in names and len(names) > 5
    for name in names:
        assert (tmp_path / "fused" / name).read_bytes() == (
            tmp_path / "stock" / name
        ).read_bytes(), name
    types = [
        module["type"] for module in json.loads((tmp_path / "fused" / "modules.json").read_text())
    ]
    assert all(kind.startswith("sentence_transformers.") for kind in types)


def test_copies_and_pickles_stay_accelerated_with_weights_and_options_of_their_own(
    either: Any,
) -> None:
    accelerate(either, impl="tiled")
    expected = encode(either)
    for twin in (copy.deepcopy(either), pickle.loads(pickle.dumps(either))):  # noqa: S301
        assert is_accelerated(twin)
        assert torch.equal(encode(twin), expected)
        if isinstance(twin, SparseEncoder):
            assert twin[0].preprocess.owner is twin[0] and "cu_seq_lens_q" in twin(
                twin.preprocess(TEXTS),
            )
            with torch.no_grad():
                twin.transformers_model.get_output_embeddings().bias.add_(1.0)
        else:
            assert twin.similarity.owner is twin and twin.similarity.impl == "tiled"
            twin.similarity_fn_name = "meanmaxsim"
        assert not torch.equal(encode(twin), expected)
        assert torch.equal(encode(either), expected)
        restore(twin)
        assert is_accelerated(either) and not is_accelerated(twin)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks",
)  # torch, on unpickling a sparse tensor
def test_a_pool_of_processes_encodes_accelerated(
    model: SparseEncoder,
    monkeypatch: pytest.MonkeyPatch,
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
    with pytest.raises(KeyError), accelerate(either) as inside:
        assert inside is either and is_accelerated(either)
        raise KeyError
    assert not is_accelerated(either)
    assert torch.equal(encode(either), expected)
    assert [vars(module).keys() for module in either.modules()] == [
        state.keys() for state in before
    ]
    assert all(not module._forward_pre_hooks for module in either.modules())


def test_accelerating_twice_is_accelerating_once_and_takes_the_last_options(either: Any) -> None:
    expected = encode(either)
    accelerate(either, impl="tiled")
    handle = accelerate(either, impl="reference")
    assert encode(either).sub(expected).abs().max() <= 1e-5 * expected.abs().max()
    if isinstance(either, SparseEncoder):
        assert (
            repr(handle) == "Acceleration(SparseEncoder, heads=1)"
            and either[1].forward.impl == "reference"
        )
        assert len(either[0]._forward_pre_hooks) == 1
        accelerate(either, packed=False)
        assert "attention_mask" in either(either.preprocess(TEXTS))
        handle = accelerate(either)
    else:
        assert repr(handle) == "Acceleration(MultiVectorEncoder, similarity)" and handle.heads == 0
        assert either.similarity.impl == either.similarity_pairwise.impl == "reference"
    handle.restore()
    assert (
        torch.equal(encode(either), expected)
        and either[0].model.config._attn_implementation == "sdpa"
    )


def test_accelerating_and_encoding_leave_modes_and_random_numbers_alone(
    model: SparseEncoder,
) -> None:
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


def test_the_embedding_dimension_is_known_after_the_first_batch(model: SparseEncoder) -> None:
    model[1].embedding_dimension = None
    accelerate(model)
    assert model[1].embedding_dimension is None
    encode(model)
    assert model.get_embedding_dimension() == VOCABULARY


def test_a_second_call_that_fails_says_that_the_model_is_restored(model: SparseEncoder) -> None:
    undone = "The acceleration of the model by an earlier call is undone"
    model[1].pooling_strategy = "sum"
    accelerate(model)
    with pytest.raises(ValueError, match=f"only max runs in fp8. {undone}"):
        accelerate(model, quantize="fp8")
    assert not is_accelerated(model)
    with pytest.raises(ValueError, match=r"only max runs in fp8\.$"):
        accelerate(model, quantize="fp8")


def test_a_second_call_with_a_wrong_argument_leaves_the_model_accelerated(
    model: SparseEncoder,
) -> None:
    accelerate(model)
    with pytest.raises(ValueError, match="quantize must be 'fp8' or None"):
        accelerate(model, quantize="int8")
    assert is_accelerated(model)


def test_the_handle_of_a_model_prints_its_active_parts(model: SparseEncoder) -> None:
    handle = accelerate(model)
    assert str(handle) == "tilefold: fused scores, packed tokens active"
    padded = accelerate(model, packed=False)
    line = "tilefold: fused scores active; not active: packed tokens (packed=False was chosen)"
    assert str(padded) == line
    restore(model)
    assert str(padded) == "tilefold: nothing active, because the model was restored"


def test_a_task_without_a_route_is_refused(model: SparseEncoder) -> None:
    message = r"task must be one of \['query', 'document'\] or None, got 'documents'"
    refused(ValueError, message, encode_sparse, model, TEXTS, task="documents")


def test_a_call_for_the_network_inside_an_accelerated_model_leaves_the_model_accelerated(
    model: SparseEncoder,
) -> None:
    accelerate(model)
    network = model[0].model
    message = "got BertForMaskedLM; pass the whole model, not its network"
    refused(TypeError, message, accelerate, network)
    assert model.encode(["a text"]).shape[0] == 1


def test_the_name_of_a_model_is_refused_with_the_call_that_loads_it() -> None:
    message = r"got str; load the model first, such as SparseEncoder\('splade'\)"
    refused(TypeError, message, accelerate, "splade")


def test_a_wrong_call_is_refused_in_the_words_of_the_stock_model(model: SparseEncoder) -> None:
    def refusals() -> list[str]:
        texts = []
        for arguments, named in (({},), {"unknown": 1}), (({}, 1), {}), ((), {}):
            with pytest.raises(TypeError) as caught:
                model[1](*arguments, **named)
            texts.append(str(caught.value))
        for wrong in ({"unknown": 1}, {"batch_size": 0}, {"prompt_name": "missing"}):
            with pytest.raises((TypeError, ValueError)) as refused:
                model.encode(TEXTS * 12, **wrong)
            texts.append(str(refused.value))
        return texts

    stock = refusals()
    accelerate(model)
    assert refusals() == stock


ASKED = "_replicate_for_data_parallel"  # which torch.nn.parallel.replicate calls on every module that it copies
REFUSED = r"must run in one process for each GPU, got torch.nn.DataParallel.*torchrun --nproc-per-node \d+ SCRIPT"


def copied(network: nn.Module) -> list[nn.Module]:
    """What ``torch.nn.parallel.replicate`` asks every module for; the rest of it needs GPUs."""
    return [getattr(module, ASKED)() for module in network.modules()]


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - made here


def built(kind: str, folder: Path) -> Any:
    document = SparseEncoder(str(folder), device="cpu")
    if kind == "splade":
        return document
    queries = (
        [document[0], SpladePooling()] if kind == "router" else [StaticQuery(document.tokenizer)]
    )
    return SparseEncoder(modules=[Router.for_query_document(queries, list(document))], device="cpu")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["splade", "router", "static queries"])
def test_an_accelerated_sparse_encoder_refuses_to_be_copied(
    kind: str,
    packed: bool,
    tiny_folder: Path,
) -> None:
    model = built(kind, tiny_folder)
    accelerate(model, packed=packed)
    for actual in (model, nn.Sequential(model), copy.deepcopy(model), through_pickle(model)):
        refused(RuntimeError, REFUSED, copied, actual)
    restore(model)
    assert ASKED not in vars(model) and len(copied(model)) == len(list(model.modules()))


def test_a_multi_vector_encoder_refuses_where_it_is_packed_and_its_similarity_alone_forbids_nothing() -> (
    None
):
    model = build_colbert()
    assert accelerate(model).padded == {}
    refused(RuntimeError, f"an accelerated MultiVectorEncoder {REFUSED}", copied, model)
    accelerate(model, packed=False)
    assert len(copied(model)) == len(list(model.modules()))


def test_torch_still_asks_every_module() -> None:
    assert f".{ASKED}()" in inspect.getsource(inspect.getmodule(replicate))  # type: ignore[arg-type]
    assert getattr(nn.Linear(1, 1), ASKED)()._is_replica


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_parallel_on_two_gpus_raises_before_it_scatters_numbers(tiny_folder: Path) -> None:
    model = SparseEncoder(str(tiny_folder), device="cuda:0")
    accelerate(model)
    refused(
        RuntimeError,
        REFUSED,
        nn.DataParallel(model),
        on_device(model.preprocess(TEXTS), "cuda"),
    )


@pytest.mark.parametrize("kind", [TrainingArguments, SparseEncoderTrainingArguments])
def test_arguments_for_one_gpu(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 3,
        "dataloader_pin_memory": False,
    }
    both, one = kind(**options), one_gpu(kind)(**options)
    assert (both.n_gpu, both.train_batch_size) == (2, 6)
    assert (one.n_gpu, one.train_batch_size) == (1, 3)
    assert one_gpu(kind)(**options, use_cpu=True).n_gpu == 0
    assert one_gpu(kind) is one_gpu(kind) and isinstance(one, kind)
    assert type(through_pickle(one)) is kind
    assert one.to_dict().keys() == both.to_dict().keys()
    refused(TypeError, "arguments_class must be transformers", one_gpu, dict)


@pytest.mark.skipif(
    not triton_interpreted(),
    reason="lists a model on the CPU, where kernels would run",
)
def test_the_steps_of_a_model_list_its_head(tokenizer_folder: Path) -> None:
    from tilefold.ops._shared._triton.launch import recorded_builds

    model = build_tiny_splade("bert", tokenizer_folder)
    accelerate(model, impl="triton", check=False)
    results = []
    for training in (False, True):
        with recorded_builds() as launches:
            for call in warm_up_calls(
                model,
                (8,),
                4,
                inference=not training,
                training=training,
                dtype=None,
            ):
                call()
        results.append({each.kernel.__name__ for each in launches.values()})
    assert results[0] == {"copy_packed_kernel", "max_forward_kernel"}
    assert results[1] > results[0] and "dhidden_kernel" in results[1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="what machines without a GPU say")
def test_what_cannot_be_warmed_up_is_told() -> None:
    model = torch.nn.Linear(2, 2)
    refused(RuntimeError, "torch sees none here", warm_up, model)
    refused(
        ValueError,
        r"lengths and batch_size must be at least 1, got lengths=\[\], batch_size=32",
        warm_up,
        model,
        [],
    )
    refused(
        ValueError,
        "must be true, got neither",
        warm_up,
        model,
        inference=False,
        training=False,
    )


@pytest.mark.parametrize(
    ("dtype", "fault", "packed"),
    [("bfloat16", 0.3, True), ("bfloat16", 2.0, False), ("float32", 0.3, False)],
)
def test_rounding_in_16_bits_is_told_from_a_fault(
    dtype: str,
    fault: float,
    packed: bool,
    tiny: SparseEncoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = _packing._run_route

    def run_with_other_kernels(route: list[Any]) -> torch.Tensor:
        """Packed numbers that are rounded in another way: on a CPU both ways take the same kernels."""
        scores = run(route)
        faulty = str(scores.dtype) == f"torch.{dtype}" and not scope
        return (
            scores * (1 + fault * torch.linspace(-1, 1, scores.numel()).view_as(scores))
            if faulty
            else scores
        )

    scope: list[str] = []

    @contextlib.contextmanager
    def padded_scope() -> Iterator[None]:
        scope.append("padded")
        with padded_inputs():
            yield
        scope.clear()

    monkeypatch.setattr(_packing, "_run_route", run_with_other_kernels)
    monkeypatch.setattr(_packing, "padded_inputs", padded_scope)
    tiny.to(getattr(torch, dtype))
    with contextlib.nullcontext() if packed else pytest.warns(UserWarning, match="disagree by"):
        handle = accelerate(tiny)
    assert (not handle.padded) is packed
    assert next(tiny.parameters()).dtype == getattr(torch, dtype)
