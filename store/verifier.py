"""The files of a verifier, a Hugging Face folder or a hub id. Nothing here builds the model or needs torch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from configs.command import PlainError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
UNRELATED = ("_name_or_path", "transformers_version")  # keys of config.json that say where a copy came from
SAMPLE_BYTES = 4096  # read from the middle of a tensor
SAMPLE_EXPERTS = 64  # tensors of a file that has thousands


class VerifierError(PlainError, ValueError):
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
    file = _need(path, "config.json")
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise VerifierError(f"{file}: not JSON ({error})") from None
    return config.get("text_config", config)


def tensor_index(path: str | Path) -> dict[str, Path]:
    """Tensor name to safetensors file.

    A hub id's shards are not fetched for this: get the one you want by `find_file(path, file.name)`.
    """
    if index := find_file(path, INDEX):
        return {name: index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = _need(path, SINGLE)
    return dict.fromkeys(_header(single)[1], single)


def fingerprint(path: str | Path) -> str:
    """32 hex digits of what the verifier computes: its config, its tensors, and a sample of the tensors' content.

    Equal for a copy under another name; different for a fine-tune of the same shapes. All weight files are needed (a hub id's
    are fetched). Every tensor is sampled, but of a file's experts only some, so that 1.5 TB take seconds.
    """
    digest = hashlib.sha256()
    config = json.loads(
        _need(path, "config.json").read_text(),
        object_pairs_hook=lambda pairs: {key: value for key, value in pairs if key not in UNRELATED},
    )
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name in sorted({file.name for file in tensor_index(path).values()}):
        file = _need(path, name)
        data_start, tensors = _header(file)
        digest.update(json.dumps(tensors, sort_keys=True).encode())
        experts = sorted(tensor for tensor in tensors if ".experts." in tensor)
        sample = sorted(tensors.keys() - set(experts)) + experts[:: max(1, len(experts) // SAMPLE_EXPERTS)]
        with file.open("rb") as data:
            for tensor in sample:
                begin, end = tensors[tensor]["data_offsets"]
                take = min(SAMPLE_BYTES, end - begin)
                data.seek(data_start + begin + (end - begin - take) // 2)
                digest.update(data.read(take))
    return digest.hexdigest()[:32]


def _need(path: str | Path, name: str) -> Path:
    if file := find_file(path, name):
        return file
    raise VerifierError(f"{path}: has no {name}")


def _header(file: Path) -> tuple[int, dict[str, dict]]:
    """Of a safetensors file: where the data starts, and {tensor: {dtype, shape, data_offsets}} (offsets within the data)."""
    with file.open("rb") as data:
        size = int.from_bytes(data.read(8), "little")
        try:
            tensors = json.loads(data.read(size))
        except (ValueError, MemoryError, OverflowError):
            raise VerifierError(f"{file}: not a safetensors file") from None
    tensors.pop("__metadata__", None)
    return 8 + size, tensors
