"""How states become bytes. `raw`: the engine's own. `fp8`: e4m3 with one fp32 scale for each token and tap, the last state raw;
`fp8_all`: the last state too.

An encoded slice is one record for each token: scales, fp8 planes, raw planes. A record is shorter than the token's row, so a
reader lands the slice at the end of its own rows and expands it in place from the first token on: no second buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from store.record import SCALE, quantised, record_bytes

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
CHUNK = 64  # tokens converted at once: what lies between stays in the processor's cache


def encode(codec: str, states: Tensor) -> Tensor:
    """States [t, m+1, H], contiguous on the CPU, as uint8 [t, record]; `raw` is a view of them. What is not finite stays so."""
    tokens, planes, width = states.shape
    count = quantised(codec, planes)
    if not count:
        return states.view(tokens, -1).view(torch.uint8)
    out = torch.empty((tokens, record_bytes(codec, planes, width, states.itemsize)), dtype=torch.uint8)
    body = count * SCALE
    for start in range(0, tokens, CHUNK):
        part, record = states[start : start + CHUNK], out[start : start + CHUNK]
        values = part[:, :count].float()
        largest = values.abs().amax(-1)
        scales = torch.where(largest == 0, 1.0, largest / LARGEST)
        record[:, :body] = scales.view(torch.uint8)
        record[:, body : body + count * width] = (values / scales.unsqueeze(-1)).to(FP8).view(torch.uint8).flatten(1)
        record[:, body + count * width :] = part[:, count:].flatten(1).contiguous().view(torch.uint8)
    return out


def decode_(codec: str, states: Tensor) -> None:
    """Expand records that lie at the very end of `states` [t, m+1, H] (contiguous, on the CPU) in place."""
    tokens, planes, width = states.shape
    count = quantised(codec, planes)
    if not count:
        return
    records = landing(codec, states).view(tokens, -1)
    sizes = [count * SCALE, count * width, (planes - count) * width * states.itemsize]
    for start in range(0, tokens, CHUNK):
        part = states[start : start + CHUNK]
        # Copies: the rows that are written now may reach into these records (not further), and records need not be aligned.
        scales, values, last = (piece.flatten().clone() for piece in records[start : start + CHUNK].split(sizes, dim=1))
        values = values.view(FP8).view(len(part), count, width).float()
        part[:, :count] = values.mul_(scales.view(torch.float32).view(len(part), count, 1))
        part[:, count:] = last.view(states.dtype).view(len(part), planes - count, width)


def landing(codec: str, states: Tensor) -> Tensor:
    """The last bytes of `states` [t, m+1, H], as many as `codec` makes of them, as flat uint8: where an encoded slice is read to."""
    tokens, planes, width = states.shape
    flat = states.view(-1).view(torch.uint8)
    return flat[flat.numel() - tokens * record_bytes(codec, planes, width, states.itemsize) :]
