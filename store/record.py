"""Sizes of encoded states: of one token's record, as `store.codec` writes it. Needs no torch."""

from __future__ import annotations

SCALE = 4  # bytes


def quantised(codec: str, planes: int) -> int:
    """How many of a token's planes (taps ascending, then the last state) `codec` makes fp8."""
    return {"raw": 0, "fp8": planes - 1, "fp8_all": planes}[codec]


def record_bytes(codec: str, planes: int, width: int, itemsize: int) -> int:
    """Bytes of one token's states [planes, width], of `itemsize` bytes a number, as `codec` writes them."""
    count = quantised(codec, planes)
    return count * (SCALE + width) + (planes - count) * width * itemsize
