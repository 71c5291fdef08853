"""One training step of a draft on a CPU: forward, backward, optimizer, and the memory that they need beyond weights, gradients and
optimizer state. Ours, the same step written the plain way, and the speculators package with its eager losses.

`python tests/bench/train_step.py [--speculators DIR]`, DIR from `pip install --no-deps --target DIR speculators==0.9.0
hs-connectors==0.9.0`, in an environment that has vLLM. Each row is two processes with one thread: one for seconds, which are of CPU, so
that other work on the machine does not count, the better of two steps after one; and one for memory, the kernel's own record of the
most resident bytes, with an allocator that gives back at once what is freed. All orthogonalise in fp32, but for speculators as it comes,
which does it in bf16.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny import python_environment  # noqa: E402

from configs.schema import Loss, Train  # noqa: E402
from train import attention  # noqa: E402
from train import draft as train_draft  # noqa: E402
from train import step as train_step  # noqa: E402
from train.batch import Batch, Document, Sample  # noqa: E402
from train.contract import DraftContract  # noqa: E402
from train.draft import Draft, initialise  # noqa: E402
from train.heads import Heads  # noqa: E402
from train.objective import Slots, SlotTerms, slot_terms  # noqa: E402
from train.optimizer import build_optimizers  # noqa: E402
from train.verifier import FrozenVerifier  # noqa: E402
from train.world import World  # noqa: E402

HIDDEN, LENGTH, BLOCK = 576, 1024, 8
LOSS = Loss(terms={"ce_argmax": 0.1, "tv": 0.9}, chunk_bytes=128_000_000)
CPU = torch.device("cpu")


class Step:
    """Ours; `plain` leaves everything to autograd, over whole tensors, and computes nothing again."""

    def __init__(self, vocabulary: int, anchors: int, plain: bool):
        gqa = {"heads": 9, "kv_heads": 3, "head_dim": 64, "rope_theta": 10000.0}
        shape = {"hidden_size": HIDDEN, "intermediate_size": 1536, "vocab_size": vocabulary, "draft_vocab_size": vocabulary, "gqa": gqa}
        rest = {"mask_token_id": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "markov_rank": 256, "loss_terms": LOSS.terms}
        self.draft = Draft(DraftContract(taps=(1, 2, 3, 4, 5), block_size=BLOCK, layer_types=("full_attention",) * 2, **shape, **rest))
        initialise(self.draft, 0)
        self.frozen = FrozenVerifier(torch.randn(vocabulary, HIDDEN) * 0.04, torch.ones(HIDDEN), 1e-5, Heads(torch.empty(0, HIDDEN)))
        self.frozen.heads = Heads(self.frozen.embedding)
        random = np.random.default_rng(0)
        sample = Sample(0, random.integers(4, vocabulary, LENGTH), np.ones(LENGTH, np.uint8))
        places = torch.from_numpy(np.sort(random.choice(LENGTH - BLOCK - 1, anchors, replace=False)))
        document = Document(sample, 0, LENGTH, places, torch.ones(anchors, BLOCK, dtype=torch.bool))
        self.batch = Batch([document], torch.randn(LENGTH, 6, HIDDEN), last=True)
        self.parameters = list(self.draft.parameters())
        self.optimizers = build_optimizers(self.draft, Train(), World(0, 1, CPU))
        if plain:
            train_step.slot_terms = plain_slot_terms
            attention.SCORE_BYTES = 1 << 40
            attention.checkpoint = train_draft.checkpoint = lambda function, *arguments, **_: function(*arguments)

    def forward(self) -> Tensor:
        return train_step.run(self.draft, self.frozen, self.batch, BLOCK, LOSS, CPU).objective


def plain_slot_terms(slots: Slots, w2: Tensor, heads: Heads, loss: Loss) -> SlotTerms:
    q = (slots.teacher @ heads.verifier.mT).softmax(-1)[slots.teacher_row]
    p = (slots.hidden @ heads.verifier.mT + slots.embedding @ w2.mT).softmax(-1)
    best, tv = q.argmax(-1), 1 - p.minimum(q).sum(-1)
    ce, ce_argmax = (-p.gather(-1, token[:, None]).squeeze(-1).log() for token in (slots.labels, best))
    total = sum(alpha * (slots.weights * {"ce_argmax": ce_argmax, "tv": tv}[name]).sum() for name, alpha in loss.terms.items())
    return SlotTerms(total, ce.detach(), tv.detach(), p.argmax(-1) == best)


class Speculators:
    def __init__(self, vocabulary: int, anchors: int, folder: str, as_it_comes: bool):
        sys.path.insert(0, folder)
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
        from transformers import Qwen3Config

        shape = {"hidden_size": HIDDEN, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": vocabulary, "head_dim": 64}
        layer = Qwen3Config(**shape, num_attention_heads=9, num_key_value_heads=3, attn_implementation="eager")
        config = {"draft_vocab_size": vocabulary, "block_size": BLOCK, "aux_hidden_state_layer_ids": [1, 2, 3, 4, 5], "mask_token_id": 3}
        self.draft = DSparkDraftModel(DSparkSpeculatorConfig(transformer_layer_config=layer, **config))
        with torch.no_grad():
            for parameter in self.draft.parameters():
                if not parameter.requires_grad and parameter.dim() == 2:
                    parameter.normal_(std=0.04)
        keys = {"loss_fn": json.dumps({"ce": 0.1, "tv": 0.9}), "loss_implementation": "eager", "max_anchors": anchors}
        self.arguments = self.draft.get_trainer_kwargs(**keys)[0]
        self.inputs = [torch.randn(1, LENGTH, 5 * HIDDEN), torch.randint(4, vocabulary, (1, LENGTH)), torch.ones(1, LENGTH)]
        self.inputs += [torch.randn(1, LENGTH, HIDDEN), torch.zeros(1, LENGTH, dtype=torch.long)]
        named = [(name, x) for name, x in self.draft.named_parameters() if x.requires_grad]
        matrices = [x for name, x in named if x.dim() == 2 and min(x.shape) > 1 and "markov" not in name]
        others = [x for name, x in named if not any(x is matrix for matrix in matrices)]
        self.parameters = [x for _, x in named]
        self.optimizers = [torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, lr=1e-4)]
        if not as_it_comes:
            torch.Tensor.bfloat16 = lambda tensor: tensor  # of torch.optim.Muon's Newton-Schulz

    def forward(self) -> Tensor:
        return self.draft(*self.inputs, **self.arguments)[1]


class LossAlone:
    """Ours without the layers."""

    def __init__(self, vocabulary: int, anchors: int):
        count = anchors * BLOCK
        self.parameters = [torch.randn(*shape, requires_grad=True) for shape in ((count, HIDDEN), (count, 256), (vocabulary, 256))]
        self.heads, teacher = Heads(torch.randn(vocabulary, HIDDEN) * 0.04), torch.randn(count, HIDDEN)
        labels = torch.randint(vocabulary, (count,))
        self.slots = Slots(*self.parameters[:2], labels, torch.ones(count), teacher, torch.arange(count))
        self.optimizers: list = []

    def forward(self) -> Tensor:
        return slot_terms(self.slots, self.parameters[2], self.heads, LOSS).weighted_sum


def resident(which: str) -> int:
    """Bytes: VmRSS, now, or VmHWM, the most since `clear_refs` was written to."""
    return 1024 * int(re.search(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure(kind: str, vocabulary: int, anchors: int, folder: str) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind.startswith("speculators"):
        step = Speculators(vocabulary, anchors, folder, kind == "speculators bf16")
    else:
        step = LossAlone(vocabulary, anchors) if kind == "loss alone" else Step(vocabulary, anchors, kind == "plain")
    parts = {"forward": [], "backward": [], "optimizer": [], "memory": []}
    for _ in range(3):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, marks = resident("VmRSS"), [time.process_time()]
        loss = step.forward()
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        for optimizer in step.optimizers:
            optimizer.step()
        marks.append(time.process_time())
        peak, gradients = resident("VmHWM") - before, 0
        del loss
        for parameter in step.parameters:
            gradients += parameter.nbytes
            parameter.grad = None
        for part, value in zip(parts, (*np.diff(marks), peak - gradients)):
            parts[part].append(float(value))
    return {part: min(values[1:]) for part, values in parts.items()}


def row(arguments: list[str], **env: str) -> dict:
    """`measure` in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=python_environment() | env)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators", metavar="DIR", default="")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row[0], int(args.row[1]), int(args.row[2]), args.speculators)))
        return
    kinds = ["ours", "plain", *(["speculators"] if args.speculators else [])]
    rows = [("speculators bf16", 49_152, 64)] if args.speculators else []  # what it adds does not depend on the vocabulary
    rows += [(kind, size, 64) for size in (49_152, 163_840) for kind in kinds]
    rows += [("loss alone", *size) for size in ((49_152, 64), (163_840, 64), (49_152, 256))]
    print("| | vocabulary | anchors | forward s | backward s | optimizer s | step s | memory MB |\n|---|---|---|---|---|---|---|---|")
    for kind, vocabulary, anchors in rows:
        arguments = ["--speculators", args.speculators, "--row", kind, str(vocabulary), str(anchors)]
        *seconds, _ = row(arguments).values()
        memory = row(arguments, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")["memory"]
        figures = " | ".join(f"{x:.2f}" for x in (*seconds, sum(seconds)))
        print(f"| {kind} | {vocabulary:,} | {anchors} | {figures} | {memory / 1e6:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
