"""How processes have ended."""

from __future__ import annotations

import signal

__all__ = ["describe_exit"]


def describe_exit(exit_code: int) -> str:
    """Describe how a process has ended, such as ``"SIGKILL"`` or ``"exit code 1"``.

    Args:
        exit_code: the exit code; ``-N`` if signal ``N`` has ended the process.
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a signal without a name
        return f"signal {-exit_code}"
