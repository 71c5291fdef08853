"""The states of one sample on their way: slices first, then the manifest that makes them a sample.

States are one contiguous CPU tensor [T, m+1, H] in the engine's dtype: m taps in ascending order, then the last state. In the
store a slice of them has the bytes that the contract's codec makes of it.
A sample is named "run/rank/sequence/attempt" by whoever asks for it; its objects are "<name>/manifest" and "<name>/<part>".
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ValidationError
from torch import Tensor

from store import codec
from store.contract import StateContract, require_same
from store.objects import Gone, ObjectStore, Torn

PIECE = 64 << 20  # bytes
ALONE = 4 << 20  # bytes up to which another thread would cost more than it hides
INFINITY = {  # its bits, and the integers to read them as
    torch.float32: (0x7F800000, np.int32, np.uint32),
    torch.bfloat16: (0x7F80, np.int16, np.uint16),
    torch.float16: (0x7C00, np.int16, np.uint16),
}
EXAMINED = 256 << 10  # bytes at once: the second look at them finds them in the cache
MAX_PARTS = 64  # of one sample: `discard` needs no manifest to find them all


class Slice(BaseModel):
    """Tokens start..stop of a sample: one object, put by one rank of the engine."""

    object: str
    start: int
    stop: int
    codec: str
    bytes: int
    checksum: int  # of these bytes
    finite: bool = False  # whoever put bytes of this checksum has seen that they are, so that nobody needs to look again


class Manifest(BaseModel):
    """Published last: what was put, by which contract, of which tokens."""

    name: str
    contract: StateContract
    token_ids: list[int]
    slices: list[Slice]


def put_slice(store: ObjectStore, name: str, part: int, states: Tensor, start: int, encoding: str = "raw") -> Slice:
    """Put `states` [t, m+1, H], those of tokens start..start+t, as one object of the sample `name`.

    `encoding`: the codec of the contract that the sample will be published by. Its bytes are examined while the store takes them.
    Raises Full, Gone; Torn (`non_finite`). Nothing stays where it fails.
    """
    if not 0 <= part < MAX_PARTS:
        raise ValueError(f"{name}: part {part} is outside 0..{MAX_PARTS - 1}")
    data = bytes_of(states if encoding == "raw" else codec.encode(encoding, states))
    look = partial(examine, states) if encoding == "raw" else lambda: (checksum(data), all_finite(states))
    piece = f"{name}/{part}"
    with ThreadPoolExecutor(1, "examine") as examiner:
        examined = examiner.submit(look) if data.nbytes > ALONE else None
        store.put(piece, data)
        try:
            check, finite = examined.result() if examined else look()
            if not finite:
                raise Torn(f"{piece}: states are not finite", cause="non_finite")
        except Exception:
            with suppress(Gone):
                store.remove([piece])
            raise
    stop, seen = start + len(states), encoding == "raw"
    return Slice(object=piece, start=start, stop=stop, codec=encoding, bytes=data.nbytes, checksum=check, finite=seen)


def publish(store: ObjectStore, name: str, contract: StateContract, token_ids: list[int], slices: list[Slice]) -> None:
    """Make a sample readable. The slices must cover the tokens exactly, encoded by the contract (ValueError). Raises Full, Gone."""
    slices = sorted(slices, key=lambda piece: piece.start)
    if problem := _gap(slices, len(token_ids)):
        raise ValueError(f"{name}: {problem}")
    if other := {piece.codec for piece in slices} - {contract.codec}:
        raise ValueError(f"{name}: slices by codec {other.pop()}, the contract says {contract.codec}")
    text = Manifest(name=name, contract=contract, token_ids=token_ids, slices=slices).model_dump_json().encode()
    store.replace(f"{name}/manifest", b"%016x\n%s" % (checksum(text), text))


def put_sample(store: ObjectStore, name: str, contract: StateContract, token_ids: list[int], states: Tensor) -> None:
    """Put a whole sample [T, m+1, H] from one process and publish it; leaves nothing where it fails. Raises as those two do.

    In pieces, so that one is proven while another is read where it is fetched.
    """
    tokens = max(1, PIECE * len(states) // max(1, states.nbytes), -(-len(states) // MAX_PARTS))
    slices: list[Slice] = []
    try:
        for part, rows in enumerate(states.split(tokens)):
            slices.append(put_slice(store, name, part, rows, part * tokens, contract.codec))
        publish(store, name, contract, token_ids, slices)
    except Exception:
        if slices:  # else the name may be taken, and whoever has it keeps its manifest
            with suppress(Gone):  # what stays then has no consumer, and the store sweeps such
                store.remove([f"{name}/manifest", *(piece.object for piece in slices)])
        raise


def fetch(store: ObjectStore, name: str, contract: StateContract, token_ids: list[int], out: Tensor) -> Manifest:
    """Read a sample into `out` [T, m+1, H], which may be a view of a packed batch, and prove that it is what was asked for.

    Raises Lost, Gone; ContractMismatch with the fields that differ; Torn with cause `torn` (manifest), `tokens`, `size`,
    `checksum` or `non_finite`. After any of them `out` holds rubbish. ValueError: `out` itself is unfit.
    """
    states_view(contract, token_ids, out)  # refuses what is unfit
    manifest = _read_manifest(store, name)
    require_same(contract, manifest.contract, f"states of {name}")
    if manifest.name != name or manifest.token_ids != list(token_ids):
        raise Torn(f"{name}: states of other tokens", cause="tokens")
    if problem := _gap(manifest.slices, len(token_ids)):
        raise Torn(f"{name}: {problem}")
    proofs = []
    with ThreadPoolExecutor(1, "prove") as prover:
        for piece in manifest.slices:
            rows = out[piece.start : piece.stop]
            data = bytes_of(codec.landing(contract.codec, rows))
            if piece.bytes != data.nbytes:
                raise Torn(f"{piece.object}: {piece.bytes} bytes, tokens {piece.start}..{piece.stop} take {data.nbytes}", cause="size")
            store.read_into(piece.object, data)
            if piece.stop < len(token_ids):
                proofs.append(prover.submit(_prove, piece, data, rows))  # while the next one is read
        _prove(piece, data, rows)
    for proof in proofs:
        proof.result()
    return manifest


def _prove(piece: Slice, data: memoryview, rows: Tensor) -> None:
    """Decode what was read; Torn if it is not what was put, or not finite."""
    if checksum(data) != piece.checksum:
        raise Torn(f"{piece.object}: checksum differs", cause="checksum")
    codec.decode_(piece.codec, rows)
    if not piece.finite and not all_finite(rows):
        raise Torn(f"{piece.object}: states are not finite", cause="non_finite")


def _read_manifest(store: ObjectStore, name: str) -> Manifest:
    """Raises Lost, Gone, Torn."""
    line, _, text = store.read(f"{name}/manifest").partition(b"\n")
    try:
        if int(line, 16) == checksum(text):
            return Manifest.model_validate_json(text)
    except (ValueError, ValidationError):
        pass
    raise Torn(f"{name}: the manifest cannot be read")


def discard(store: ObjectStore, name: str, manifest: Manifest | None = None) -> None:
    """Remove a sample, finished or not: the manifest first, so that nobody finds half of it. Who has its manifest knows what else
    there is. Raises Gone."""
    parts = [piece.object for piece in manifest.slices] if manifest else [f"{name}/{part}" for part in range(MAX_PARTS)]
    store.remove([f"{name}/manifest", *parts])


def bytes_of(tensor: Tensor) -> memoryview:
    """The flat bytes of a CPU tensor of any dtype, not a copy. ValueError: not contiguous, empty, or on another device."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise ValueError(f"states must be a contiguous, non-empty CPU tensor, got {list(tensor.shape)} on {tensor.device}, {layout}")
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def states_view(contract: StateContract, token_ids: list[int], states: Tensor) -> memoryview:
    """`bytes_of` a tensor that must hold these tokens' states by this contract; ValueError where it cannot."""
    wanted, dtype = [len(token_ids), len(contract.taps) + 1], str(states.dtype).removeprefix("torch.")
    if states.dim() != 3 or list(states.shape[:2]) != wanted or dtype != contract.dtype:
        raise ValueError(f"states are [{wanted[0]}, {wanted[1]}, H] {contract.dtype} by contract, got {list(states.shape)} {dtype}")
    return bytes_of(states)


def checksum(data: memoryview | bytes) -> int:
    """64 bits of XXH3: five times as fast as zlib's CRC-32, which would take a third of the time of a read."""
    return xxhash.xxh3_64_intdigest(data)


def examine(states: Tensor) -> tuple[int, bool]:
    """The checksum of a contiguous CPU tensor's bytes, and whether all its values are finite: in one pass through memory.

    As integers, infinity and NaN are the largest numbers of each sign: twice as fast as the extremes of the values themselves.
    """
    infinity, signed, unsigned = INFINITY[states.dtype]
    data, hasher, finite = bytes_of(states), xxhash.xxh3_64(), True
    for start in range(0, data.nbytes, EXAMINED):
        piece = data[start : start + EXAMINED]
        hasher.update(piece)
        finite &= np.frombuffer(piece, signed).max() < infinity
        finite &= np.frombuffer(piece, unsigned).max() < infinity + (1 << (8 * states.itemsize - 1))
    return hasher.intdigest(), bool(finite)


def all_finite(states: Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass, no temporary (both extremes of a tensor with a NaN are NaN)."""
    return bool(torch.stack(states.aminmax()).isfinite().all())


def _gap(slices: list[Slice], tokens: int) -> str | None:
    """What is wrong with ascending slices that should cover 0..tokens without a gap."""
    ends = [0, *(piece.stop for piece in slices)]
    starts = [*(piece.start for piece in slices), tokens]
    if not slices or ends != starts or any(piece.stop <= piece.start for piece in slices):
        return f"slices {[(piece.start, piece.stop) for piece in slices]} do not cover {tokens} tokens"
    return None
