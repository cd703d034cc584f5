"""Seconds of the first call of ``entmax_attention`` at lengths that were never seen: what compiling
and tuning cost.

    python -m benchmarks.entmax_first_call --peer adasplash-v2

Prints one line per length, in a fresh process with an empty kernel cache: the first length pays for
compiling, later ones for whatever depends on the length.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence

LENGTHS = (1024, 1500, 2048, 4096)


def main(argv: Sequence[str]) -> int:
    """Entry of the measuring process."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--peer",
        default="tilefold",
        help="an implementation of `tilefold bench entmax_attention`",
    )
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--cache", action="store_true", help="keep the user's kernel cache")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if not options.cache:
            os.environ["TRITON_CACHE_DIR"] = folder
        _measure(options.peer, options.causal, options.lengths)
    return 0


def _measure(peer: str, causal: bool, lengths: Sequence[int]) -> None:
    import torch

    from tilefold.bench.spec import BenchCase, get_spec

    spec = get_spec("entmax_attention")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    for n in lengths:
        dims = {"B": 1, "H": 12, "N": n, "D": 64}
        variant = "iid-causal" if causal else "iid"
        inputs = spec.make_inputs(
            BenchCase("first", device.type, "bfloat16", dims, variant),
            device,
            0,
        )
        runnable = spec.implementation(peer).build(inputs)
        if runnable.forward_backward is None:
            raise ValueError(f"peer must have a backward, got {peer!r}.")
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        runnable.forward_backward()
        if on_gpu:
            torch.cuda.synchronize()
        print(
            f"{peer} N={n}: {time.perf_counter() - started:.3f} s forward and backward",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
