"""The bound of the tiled path's memory that the room's README states, and parts of long sequences put together.

The peaks are those of a process that does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from tilefold.bench.timing import _reset_high_water
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.plan import Buffer, Setting
from tilefold.ops.lsr_head import _tiles
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved
from tilefold.testing.lsr_head import LSRHeadInputs, assert_lsr_head_matches, lsr_head_inputs, lsr_head_results

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="the kernels have no such tiles")
MIB = 2**20

VOCAB, DIM = 4096, 4
# pooling, with gradients, lengths
CASES = {
    "one long": ("max", False, [20_000]),
    "one long among short": ("max", False, [1] * 300 + [20_000]),
    "winners": ("max", True, [45_000, 3]),
    "winners of odd lengths": ("max", True, [17] * 60),  # copied before the winner is looked for
    "sum": ("sum", True, [10_000]),
    "mean of ragged": ("mean", False, [*range(40), 20_000]),
}
CHILD = """
    import json, sys
    import torch
    from tilefold.bench.timing import resident_peak_mib
    from tilefold.ops import lsr_head

    def call(pooling, training, lengths, vocab, dim):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        hidden = torch.randn(int(offsets[-1]), dim, requires_grad=training)
        weight = torch.randn(vocab, dim, requires_grad=training)
        def run():
            scores = lsr_head(hidden, weight, cu_seqlens=offsets, pooling=pooling)
            if training:
                scores.backward(torch.ones_like(scores))
        return run

    torch.set_num_threads(1)
    cases, vocab, dim = json.loads(sys.argv[1])
    for pooling, training, _ in cases.values():
        call(pooling, training, [3, 40], 8, dim)()  # what is loaded and started once
    print(json.dumps({name: resident_peak_mib(call(*case, vocab, dim)) for name, case in cases.items()}))
"""


def stated_bound(lengths: list[int], lists: bool) -> float:
    """MiB that the README of the room states, in fp32, with the scores and gradients that are handed out."""
    tokens, batch = sum(lengths), len(lengths)
    held = 4 * (3 * tokens * DIM + 32_768 * DIM + 12 * batch * VOCAB)
    results = 4 * (tokens * DIM + VOCAB * DIM + batch * VOCAB)
    return (held + results) / MIB + (320 if lists else 96)


@pytest.mark.skipif(not _reset_high_water(), reason="the peak of a process cannot be reset here")
def test_memory_stays_below_the_stated_bound_in_every_layout() -> None:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), json.dumps([CASES, VOCAB, DIM])]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    peaks = json.loads(child.stdout)
    for name, (pooling, training, lengths) in CASES.items():
        bound = stated_bound(lengths, lists=training and pooling == "max")
        assert peaks[name] <= bound, name
        # else the case would pass with all logits in memory
        assert bound < sum(lengths) * VOCAB * 4 / MIB or max(lengths) < 10_000, name


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tiles, "BLOCK_V", 16)
    monkeypatch.setattr(_tiles, "TILE_ELEMENTS", 16 * 20)  # 20 tokens a tile


@pytest.mark.parametrize("layout", ["full", "right", "holes", "packed"])
@pytest.mark.parametrize("length", [20, 21, 40, 75])
@pytest.mark.parametrize("pooling", ["max", "sum", "mean"])
def test_sequences_longer_than_a_tile_are_put_together(
    monkeypatch: pytest.MonkeyPatch, pooling: str, length: int, layout: str
) -> None:
    cut_small(monkeypatch)
    inputs = lsr_head_inputs(5, length, 8, 40, layout=layout)
    assert_lsr_head_matches(inputs, pooling=pooling, impl="tiled")
    scores_alone = lsr_head_results(inputs, pooling=pooling, impl="tiled", needs=())["scores"]
    assert torch.equal(scores_alone, lsr_head_results(inputs, pooling=pooling, impl="tiled")["scores"])


def test_ties_and_nan_across_the_parts_of_a_sequence_are_settled_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small(monkeypatch)
    hidden = torch.randint(-2, 3, (3, 90, 3), generator=torch.Generator().manual_seed(0)).float()
    hidden[1, 50] = hidden[1, 70] = torch.nan
    hidden[2] = 1.0  # every token ties
    dscores = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    weight = torch.randint(-2, 3, (30, 3), generator=torch.Generator().manual_seed(2)).float()
    inputs = LSRHeadInputs(hidden, weight, None, None, None, dscores)
    found = lsr_head_results(inputs, impl="tiled", needs=("hidden",), activation="none")
    truth = lsr_head_results(inputs, impl="reference", needs=("hidden",), activation="none")
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, equal_nan=True)


@pytest.mark.parametrize(("batch", "blocks"), [(64, 2), (1, 1)])
def test_lists_of_the_hidden_gradient_are_gone_before_that_of_the_weight_is_allocated(batch: int, blocks: int) -> None:
    pytest.importorskip("triton", reason="plans name kernels")
    from tilefold.ops._shared._triton.program import Program
    from tilefold.ops.lsr_head import plans

    hidden, weight, scores = (torch.empty(shape, device="meta") for shape in ((batch, 16, 8), (9000, 8), (batch, 9000)))
    saved = HeadSaved(hidden, None, None, weight, None, scores, scores.to(torch.uint16))
    options = HeadOptions("max", "relu", 1.0, torch.float32, torch.float32, torch.float32)
    setting = Setting((9, 0), 4, tf32=False, aligned=True, given_up=frozenset())
    plan = plans.backward(scores, saved, options, (True, True, False), setting)
    results = {"dhidden": Buffer((batch, 16, 8), torch.float32), "dweight": Buffer((9000, 8), torch.float32)}
    program = Program(plan, ("dscores", *saved._fields), results | {"dbias": None}, torch.device("cpu"), setting)
    allocated = [[tuple(like.shape) for like in each.results] for each in program._stretches]
    assert allocated == ([[(64, 16, 8)], [(9000, 8)]] if blocks == 2 else [[(1, 16, 8), (9000, 8)]])
