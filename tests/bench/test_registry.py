"""The registry of benchmarks: names that are unique and exist, and answers to those that do not."""

from __future__ import annotations

import pytest

from tilefold.bench.runner import BenchRow
from tilefold.bench.spec import get_spec, operators, parse_dtype


@pytest.mark.parametrize("op", operators())
def test_every_spec_has_unique_names_a_baseline_and_requirements_that_exist(op: str) -> None:
    spec = get_spec(op)
    assert len({case.name for case in spec.cases}) == len(spec.cases)
    assert spec.implementation(spec.baseline)
    assert {case.device for case in spec.cases} == {"cpu", "cuda"}
    for requirement in spec.requirements:
        assert spec.case(requirement.case)
        for impl, attribute in (requirement.left, requirement.right):
            assert spec.implementation(impl)
            assert hasattr(BenchRow("o", "c", "d", "i"), attribute)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="op must be one of lsr_head"):
        get_spec("softmax")
    with pytest.raises(ValueError, match=r"shape must be one of '32x512.*got 'huge'"):
        get_spec("lsr_head").case("huge")
    with pytest.raises(ValueError, match="dtype must be one of bfloat16"):
        parse_dtype("int8")
    assert parse_dtype("bf16") == "bfloat16"
