"""Contract of ``xtr_scores``."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from tests.ops.contracts.contract import OperatorContract
from tests.ops.contracts.maxsim import layout_sample
from tests.ops.samples import Sample
from tilefold.ops import xtr_scores
from tilefold.ops.maxsim.xtr import XTR
from tilefold.testing.padding import LAYOUTS

MASKED = Sample(
    "xtr_scores",
    xtr_scores,
    ((3, 5, 16), (4, 9, 16)),
    {"top_k": 7, "document_mask": [[1] * 8 + [0]] * 4},
)

CONTRACT = OperatorContract(
    name=XTR.name,
    operator=XTR,
    finite_differences=tuple(
        layout_sample(
            "all",
            layout,
            (3, 3, 2, 4, 3),
            torch.float64,
            xtr_scores,
            top_k=4,
            normalize=normalize,
            impl=impl,
        )
        for layout, normalize, impl in itertools.product(
            LAYOUTS,
            (False, True),
            ("reference", "tiled"),
        )
    ),
    compiled=(MASKED,),
    opchecked=(replace(MASKED, options=MASKED.options | {"impute": True}, inference=True),),
    interpreted_files=("maxsim/test_xtr.py",),
    interpreted_least=18,
)
