"""The files of a verifier, a Hugging Face folder or a hub id. Nothing here builds the model or needs torch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNRELATED = ("_name_or_path", "transformers_version")  # keys of config.json that say where a copy came from
SAMPLE_BYTES = 4096  # read from the middle of a tensor
SAMPLE_EXPERTS = 16  # tensors of one kind and layer: thousands of experts need not all be read


class VerifierError(ValueError):
    """A verifier that cannot be found or read; the message is one line."""


def find_file(path: str | Path, name: str) -> Path | None:
    """Where the file `name` of the verifier is on this machine, fetched from the hub where `path` is a hub id; None: it has none.

    Raises VerifierError: no such folder, no such repository, hub not reachable.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(path)):
        raise VerifierError(f"{path}: no such folder (a verifier is a Hugging Face folder, or a hub id such as Qwen/Qwen3-8B)")
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(str(path), name))
    except LocalEntryNotFoundError:  # also an EntryNotFoundError, but it means that nobody could be asked
        if constants.HF_HUB_OFFLINE and name != "config.json":
            return None
        raise VerifierError(f"{path}: no such folder, and the hub cannot be reached for {name}") from None
    except EntryNotFoundError:
        return None
    except HfHubHTTPError as error:
        raise VerifierError(f"{path}: no such folder, and the hub refuses {name} ({type(error).__name__})") from None


def text_config(path: str | Path) -> dict:
    """config.json, or the language model's part of it (`text_config`) where there are several."""
    config = json.loads(_need(path, "config.json").read_text())
    return config.get("text_config", config)


def tensor_index(path: str | Path) -> dict[str, Path]:
    """Tensor name to safetensors file.

    A hub id's shards are not fetched for this: get the one you want by `find_file(path, file.name)`.
    """
    if index := find_file(path, INDEX):
        return {name: index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = _need(path, SINGLE)
    return dict.fromkeys(_tensors(single), single)


def fingerprint(path: str | Path) -> str:
    """32 hex digits of what the verifier computes: its config, its tensors, and a sample of every tensor's content.

    Equal for a copy under another name; different for a fine-tune of the same shapes. All weight files are needed (a hub id's
    are fetched). Of a mixture of experts a spread of each layer's experts is read, so that 1.5 TB take seconds.
    """
    digest = hashlib.sha256()
    config = json.loads(
        _need(path, "config.json").read_text(),
        object_pairs_hook=lambda pairs: {key: value for key, value in pairs if key not in UNRELATED},
    )
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name in sorted({file.name for file in tensor_index(path).values()}):
        file = _need(path, name)
        tensors = _tensors(file)
        digest.update(json.dumps(tensors, sort_keys=True).encode())
        with file.open("rb") as data:
            for tensor in _spread(sorted(tensors)):
                begin, end = tensors[tensor]["data_offsets"]
                take = min(SAMPLE_BYTES, end - begin)
                data.seek(_data_start(file) + begin + (end - begin - take) // 2)
                digest.update(data.read(take))
    return digest.hexdigest()[:32]


def _need(path: str | Path, name: str) -> Path:
    if file := find_file(path, name):
        return file
    raise VerifierError(f"{path}: has no {name}")


def _data_start(file: Path) -> int:
    """A safetensors file is the header's length (8 bytes, little-endian), the header (JSON), the data."""
    with file.open("rb") as data:
        return 8 + int.from_bytes(data.read(8), "little")


def _tensors(file: Path) -> dict[str, dict]:
    """Header of a safetensors file: {tensor: {dtype, shape, data_offsets}}."""
    start = _data_start(file)
    with file.open("rb") as data:
        data.seek(8)
        try:
            header = json.loads(data.read(start - 8))
        except (ValueError, MemoryError, OverflowError):
            raise VerifierError(f"{file}: not a safetensors file") from None
    header.pop("__metadata__", None)
    return header


def _spread(names: list[str]) -> list[str]:
    """All names, but of those that differ in their second number only (experts of one layer) a few, first and last among them."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        first, *rest = re.split(r"(?<=\d)(?=\D)", name, maxsplit=1)
        kinds.setdefault(first + re.sub(r"\d+", "#", "".join(rest)), []).append(name)
    few = SAMPLE_EXPERTS
    return [
        name
        for kind in kinds.values()
        for name in (kind if len(kind) <= few else [kind[i * (len(kind) - 1) // (few - 1)] for i in range(few)])
    ]
