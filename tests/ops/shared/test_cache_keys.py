"""Keys of Triton's cache, by which a process finds the kernels of earlier ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

KEYS = """
import random
import sys
import threading
from importlib import import_module

cache_keys = import_module("tilefold.ops._shared._triton.cache_keys")
functions = {}
for module in ("pack", "screen", "screen_hopper", "max_forward", "max_forward_hopper"):
    members = vars(import_module(f"tilefold.ops.lsr_head._triton.{module}"))
    functions.update({name: value for name, value in members.items() if name.endswith("_kernel")})
order = sorted(functions)
random.Random(sys.argv[1]).shuffle(order)
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=cache_keys.compute_cache_key, args=(functions[name],))
           for name in order]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name in sorted(functions):
    print(name, functions[name].cache_key)
"""


@pytest.mark.slow
def test_kernels_have_the_same_keys_in_whatever_order_threads_compute_them() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    results = [
        subprocess.run(
            [sys.executable, "-c", KEYS, seed],
            check=True,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        for seed in ("first", "second")
    ]
    assert "max_forward_hopper_kernel" in results[0]
    assert results[0] == results[1]
