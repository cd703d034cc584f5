"""Print all claims with their committed rows, as benchmarks/notes/claims.md has them.

python -m benchmarks.claims_table
"""

from __future__ import annotations

from pathlib import Path

from tilefold.bench import claims
from tilefold.bench.claims import CLAIMS, judge, read_rows

RESULTS = Path(__file__).parent / "results"


def table() -> list[str]:
    """Return the lines of a table of the claims that have committed results."""
    rows = {
        claim: read_rows(RESULTS / claim.device / f"{claim.file}.csv")
        for claim in CLAIMS
        if claim.device != "cpu"
    }
    return claims.table(judge(claim, results) for claim, results in rows.items())


if __name__ == "__main__":
    print("\n".join(table()))
