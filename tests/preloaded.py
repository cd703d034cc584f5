"""What the process has imported from which :mod:`tests.programs` forks: the slow libraries, and
nothing of ours.
"""

from __future__ import annotations

import contextlib
import gc

gc.disable()  # modules leave no garbage worth a second
with contextlib.suppress(ImportError):
    import datasets  # noqa: F401
    import sentence_transformers
    import sentence_transformers.sparse_encoder.trainer  # noqa: F401
    import transformers.models.bert.modeling_bert  # noqa: F401
gc.freeze()
gc.enable()
