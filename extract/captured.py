"""The record beside a data set whose states lie in a durable cache."""

from __future__ import annotations

from pydantic import BaseModel

from store.contract import StateContract

RECORD = "captured.json"


class Captured(BaseModel):
    """What the states are, and greedy answers of the engine that made them: (prompt, response) as token ids, whose states (of
    both together) are in the cache too."""

    contract: StateContract
    examples: list[tuple[list[int], list[int]]]
