"""sentence-transformers behind the same FastAPI route, the baseline of `serve_load`.

    python -m benchmarks.serve_peer --model FOLDER [--device cuda] [--one-thread]

The route is a plain function, as one would write it, which FastAPI runs in a pool of threads: each
request is a call of the model. With --one-thread the calls take turns.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any


def main(argv: Sequence[str]) -> int:
    """Serve until a signal.

    The server prints its address when it is ready.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one-thread", action="store_true")
    options = parser.parse_args(argv)
    import uvicorn
    from fastapi import Body, FastAPI
    from sentence_transformers import SparseEncoder

    from tilefold.serve.server import bind

    model = SparseEncoder(options.model, device=options.device, local_files_only=True)
    model_lock: Any = threading.Lock() if options.one_thread else nullcontext()
    app = FastAPI()

    @app.post("/embed_sparse")
    def embed_sparse(body: dict[str, Any] = Body()) -> list[list[dict[str, Any]]]:  # noqa: B008
        inputs = [body["inputs"]] if isinstance(body["inputs"], str) else body["inputs"]
        with model_lock:
            rows = model.encode_document(
                inputs,
                convert_to_tensor=True,
                convert_to_sparse_tensor=False,
            )
        answer = []
        for row in rows:
            (indices,) = row.nonzero(as_tuple=True)
            pairs = zip(indices.tolist(), row[indices].tolist(), strict=True)
            answer.append([{"index": index, "value": value} for index, value in pairs])
        return answer

    listening_socket = bind("127.0.0.1", 0)
    _, port = listening_socket.getsockname()
    print(f"http://127.0.0.1:{port}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", backlog=512)).run([listening_socket])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
