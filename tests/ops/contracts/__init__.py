"""The contracts of all operators, and the operators whose remembered calls tests clear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.ops.contracts.contract import OperatorContract
from tests.ops.contracts.entmax import ENTMAX_CONTRACT
from tests.ops.contracts.entmax_attention import ATTENTION_CONTRACT
from tests.ops.contracts.lsr_head import HEAD_CONTRACT
from tests.ops.contracts.maxsim import MAXSIM_CONTRACT
from tests.ops.contracts.sparse_search import SEARCH_CONTRACT
from tests.ops.contracts.token_scatter import SCATTER_CONTRACT
from tests.ops.contracts.xtr import XTR_CONTRACT
from tilefold.ops._shared.operator import Operator

CONTRACTS: tuple[OperatorContract, ...] = (
    ENTMAX_CONTRACT,
    ATTENTION_CONTRACT,
    HEAD_CONTRACT,
    MAXSIM_CONTRACT,
    XTR_CONTRACT,
    SEARCH_CONTRACT,
    SCATTER_CONTRACT,
)

# Operators of tests add themselves.
OPERATORS: dict[str, Operator[Any, Any]] = {
    contract.name: contract.operator for contract in CONTRACTS
}


def forget_calls() -> None:
    """Clear the calls, and the gradients of calls, that operators remember."""
    for operator in OPERATORS.values():
        operator.calls.clear()


def cases(field: str) -> dict[Any, Any]:
    """Return the cases of all contracts in one field that maps names to cases."""
    merged: dict[Any, Any] = {}
    for contract in CONTRACTS:
        contract_cases: Mapping[Any, Any] = getattr(contract, field)
        for name, case in contract_cases.items():
            assert name not in merged, f"{field} has two cases with the name {name!r}"
            merged[name] = case
    return merged


def listed(field: str) -> Iterator[Any]:
    """Yield the cases of all contracts in one field that is a tuple."""
    for contract in CONTRACTS:
        yield from getattr(contract, field)
