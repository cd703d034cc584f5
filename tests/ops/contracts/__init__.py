"""The contracts of all operators, and the operators whose remembered calls tests clear.

Each module of this folder that defines ``CONTRACT`` is the contract of one operator.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from tests.ops.contracts.contract import OperatorContract
from tilefold.ops._shared.operator import Operator


def _contracts() -> Iterator[OperatorContract]:
    """Yield the contracts of this folder, in the order of their modules' names."""
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        contract = getattr(module, "CONTRACT", None)
        if contract is not None:
            yield contract


CONTRACTS = tuple(_contracts())

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
