"""Private parts of the operators that tests import from here."""

# ruff: noqa: F401

from __future__ import annotations

from tilefold.bench.timing import _reset_resident_peak
from tilefold.ops._shared import background, calls, fallback, impl, internals, onednn, operator
from tilefold.ops._shared._triton import releases
from tilefold.ops._shared._triton.releases import BUILD_OPTIONS, why_no_warp_roles
from tilefold.ops._shared.activation import (
    ACTIVATIONS,
    activate,
    differentiable_activate,
    gradient_from_logit,
    gradient_from_score,
)
from tilefold.ops._shared.calls import call_key
from tilefold.ops._shared.checks import check_shape
from tilefold.ops._shared.entmax_root import alpha_formula, solve
from tilefold.ops._shared.fallback import FallbackWarning, KernelFallback, KernelUnavailableError
from tilefold.ops._shared.impl import chosen_impl
from tilefold.ops._shared.internals import (
    has_int8_products,
    has_onednn_linear,
    int8_products,
    onednn_linear,
    onednn_packed,
    scaled_fp8_products,
    tf32_allowed,
)
from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops._shared.philox import philox_word
from tilefold.ops._shared.plan import (
    Buffer,
    Launch,
    Plan,
    Setting,
    TorchStep,
    contiguous_steps,
)
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.entmax_attention._problem import (
    AttentionOptions,
    AttentionSaved,
    AttentionTensors,
)
from tilefold.ops.lsr_head import _problem as head_problem
from tilefold.ops.lsr_head import _quantized as head_quantized
from tilefold.ops.lsr_head import _tiled as head_tiled
from tilefold.ops.lsr_head import _tiles as head_tiles
from tilefold.ops.lsr_head._problem import HeadOptions, HeadTensors
from tilefold.ops.maxsim import _ring as maxsim_ring
from tilefold.ops.maxsim import _tiled as maxsim_tiled
from tilefold.ops.maxsim._problem import MaxSimOptions, MaxSimSaved, MaxSimTensors
from tilefold.ops.maxsim._problem import outputs as maxsim_outputs
from tilefold.ops.token_scatter._problem import ScatterOptions, ScatterSaved, ScatterTensors
