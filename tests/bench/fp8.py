"""What the codecs do to states: `python tests/bench/fp8.py CONFIG [--samples N]`, on samples of the recipe's data set.

Bytes of a token, error of the taps (L2 of the difference over L2), and of the teacher that the trainer sees: KL(raw || codec) of its
next-token distribution at supervised positions, and how often its most probable token is the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402
from datasets import load_from_disk  # noqa: E402

from configs.load import parse  # noqa: E402
from extract.hf import HFVerifier  # noqa: E402
from store.codec import decode_, encode, landing  # noqa: E402
from store.record import record_bytes  # noqa: E402
from train.verifier import FrozenVerifier  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32)
    args, config = parse(parser)
    verifier = HFVerifier(config.verifier.path, config.verifier.dtype, config.draft.taps)
    frozen = FrozenVerifier.load(config.verifier.path, torch.float32, torch.device("cpu"))
    rows = load_from_disk(str(config.data.path)).with_format("torch")
    found: dict[str, list] = {codec: [] for codec in ("raw", "fp8", "fp8_all")}
    for row in rows.select(range(min(args.samples, len(rows)))):
        states = verifier.prefill([row["input_ids"].tolist()])[0].contiguous()
        supervised = row["loss_mask"][1:].bool()  # the position before predicts
        raw = frozen.logits(states[:-1, -1][supervised]).log_softmax(-1)
        for codec, results in found.items():
            out = torch.empty_like(states)
            landing(codec, out)[:] = encode(codec, states).flatten()
            decode_(codec, out)
            other = frozen.logits(out[:-1, -1][supervised]).log_softmax(-1)
            error = (out - states)[:, :-1].norm(dim=-1) / states[:, :-1].norm(dim=-1)
            kl = (raw.exp() * (raw - other)).sum(-1)
            results.append((error.flatten(), kl, (raw.argmax(-1) == other.argmax(-1)).float()))
    planes, width = states.shape[1:]
    print("| codec | bytes a token | error of taps | KL of the teacher: mean | 99 % | same top token |\n|---|---|---|---|---|---|")
    for codec, results in found.items():
        error, kl, same = (torch.cat(parts) for parts in zip(*results, strict=True))
        size = record_bytes(codec, planes, width, states.itemsize)
        print(f"| {codec} | {size} | {error.mean():.4f} | {kl.mean():.2e} | {kl.quantile(0.99):.2e} | {same.mean():.4f} |")


if __name__ == "__main__":
    main()
