"""Writing systems without spaces between words."""

from __future__ import annotations

__all__ = ["UNSPACED"]

# Ranges of a regular expression's character class: Thai, Lao, Khmer, kana and CJK ideographs.
UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
