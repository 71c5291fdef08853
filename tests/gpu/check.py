"""The checks of `check.sh`, one table. `--cpu` runs them small on a CPU, to test the checks themselves: its figures mean nothing."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

CPU = "--cpu" in sys.argv[1:]
DEVICE = torch.device("cpu" if CPU else "cuda")
Row = tuple[str, str, bool]  # what, its figures, whether it is as it should be


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def flex_attention() -> Iterator[Row]:
    """FlexAttention in bf16 beside the two-part form in fp32, with gradients, for the heads of both K3 drafts."""
    from train.attention import Packing, by_document, flex

    length, count, slots = (48, 6, 4) if CPU else (6000, 320, 8)
    packing = Packing([slice(0, length // 2), slice(length // 2, length - 4)], [slice(0, count // 2), slice(count // 2, count)])
    anchors = torch.randint(length // 2 - 4, (1, count), device=DEVICE)
    shapes = {"GQA": (8, 2, 64, 64), "MLA": (8, 8, 192, 128)}
    for (name, (heads, groups, d, v)), (causal, window) in itertools.product(shapes.items(), ((False, None), (True, 100))):
        sizes = [(heads, d), (groups, d), (groups, v), (groups, d), (groups, v)]
        places = [(1, count, slots), (1, length), (1, length), (1, count, slots), (1, count, slots)]
        inputs = [torch.randn(*place, *size, device=DEVICE) for place, size in zip(places, sizes)]
        inputs[0] *= d**-0.5
        results = []
        for form, dtype in ((flex, torch.float32 if CPU else torch.bfloat16), (by_document, torch.float32)):
            query, *kv = (x.to(dtype).requires_grad_(not CPU) for x in inputs)
            mixed = form(query, kv[:2], kv[2:], anchors, causal, window, packing)
            grads = [] if CPU else torch.autograd.grad(mixed.float().square().sum(), [query, *kv])
            results.append([mixed.detach(), *grads])
        worst = max(distance(*pair) for pair in zip(*results))
        kind = f"{name}, {'causal' if causal else 'both ways'}, window {window}"
        yield f"FlexAttention, {kind}", f"{worst:.1e} from two-part, gradients too", worst < 2e-2


def objective() -> Iterator[Row]:
    """The chunked pass in bf16 beside its definition in fp64."""
    from plain import plain_terms

    from train.heads import Heads
    from train.objective import Slots, slot_terms

    count, vocabulary, width, rank = (32, 200, 16, 4) if CPU else (1024, 50_000, 1024, 64)
    shapes = ((count, width), (vocabulary, rank), (vocabulary, rank))
    parameters = [torch.randn(*shape, device=DEVICE) for shape in shapes]
    head, teacher = torch.randn(vocabulary, width, device=DEVICE) * width**-0.5, torch.randn(count // 4, width, device=DEVICE) * 2
    rows, weights = torch.randint(count // 4, (count,), device=DEVICE), torch.rand(count, device=DEVICE)
    previous, labels = torch.randint(vocabulary, (2, count), device=DEVICE)
    terms = {"ce": 0.1, "l1": 0.9}
    ours, exact = ([x.to(dtype, copy=True).requires_grad_() for x in parameters] for dtype in (torch.float32, torch.float64))
    loss = SimpleNamespace(terms=terms, chunk_bytes=64 << 20)
    slots = Slots(ours[0], ours[1][previous], labels, weights, teacher, rows)
    total = slot_terms(slots, ours[2], Heads(head.bfloat16()), loss).weighted_sum
    values = plain_terms(*exact, head.bfloat16().double(), teacher.bfloat16().double(), rows, previous, labels)
    expected = sum(alpha * (weights * values[name]).sum() for name, alpha in terms.items())
    total.backward()
    expected.backward()
    worst = max(distance(mine.grad, reference.grad) for mine, reference in zip(ours, exact))
    value = abs(float(total) / float(expected) - 1)
    yield "objective in bf16", f"value {value:.1e}, gradients {worst:.1e} from fp64", value < 5e-3 and worst < 5e-2


def muon() -> Iterator[Row]:
    """Newton-Schulz as a GPU runs it beside the same iteration in fp64."""
    from train.optimizer import orthogonalise

    rows, cols = (40, 24) if CPU else (7168, 2048)
    matrix = torch.randn(rows, cols, device=DEVICE)
    seconds, update = timed(lambda: orthogonalise(matrix))
    apart = distance(update, orthogonalise(matrix.cpu().double()).to(DEVICE)) if CPU else distance(update, _fp32(matrix))
    yield "Muon in bf16", f"{apart:.1e} from fp32, {seconds * 1e3:.0f} ms for {rows} x {cols}", apart < 5e-2


def _fp32(matrix: Tensor) -> Tensor:
    x = matrix.mT / matrix.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT


def codec() -> Iterator[Row]:
    """States out of pinned memory through the fp8 codec."""
    from store.codec import decode_, encode, landing

    tokens, planes, width = (8, 3, 32) if CPU else (2048, 6, 7168)
    states = torch.randn(tokens, planes, width, dtype=torch.bfloat16, pin_memory=not CPU)
    back = torch.empty_like(states, pin_memory=not CPU)
    seconds, record = timed(lambda: encode("fp8", states))
    landing("fp8", back).copy_(record.view(-1))
    decode_("fp8", back)
    apart = distance(back.to(DEVICE)[:, :-1], states.to(DEVICE)[:, :-1])
    fine = apart < 4e-2 and torch.equal(back[:, -1], states[:, -1])
    yield "fp8 codec", f"{apart:.1e} from raw, {states.nbytes / seconds / 1e9:.1f} GB/s in", fine


def step() -> Iterator[Row]:
    """One layer of the K3 draft, forward, backward and optimizer."""
    import numpy as np

    from configs.schema import Loss, Train
    from train.batch import Batch, Document, Sample
    from train.contract import DraftContract
    from train.draft import Draft, initialise
    from train.heads import Heads
    from train.optimizer import build_optimizers
    from train.step import run
    from train.verifier import FrozenVerifier
    from train.world import World

    width, vocabulary, length, anchors = (64, 500, 40, 8) if CPU else (7168, 163_840, 8192, 1024)
    gqa = {"heads": 4, "kv_heads": 2, "head_dim": 16} if CPU else {"heads": 96, "kv_heads": 16, "head_dim": 64}
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "vocab_size": vocabulary, "draft_vocab_size": vocabulary}
    rest = {"mask_token_id": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 20, "markov_rank": 256, "loss_terms": {}}
    attention = {"layer_types": ("sliding_attention",), "window": 2048, "gqa": gqa | {"rope_theta": 10000.0}}
    spec = DraftContract(taps=(1, 2, 3, 4, 5), block_size=8, **shape, **rest, **attention)
    draft = Draft(spec)
    initialise(draft, 0)
    draft.to(DEVICE)
    embedding, head = (torch.randn(vocabulary, width, dtype=torch.bfloat16, device=DEVICE) * 0.02 for _ in range(2))
    frozen = FrozenVerifier(embedding, torch.ones(width, device=DEVICE), 1e-5, Heads(head))
    sample = Sample(0, np.random.default_rng(0).integers(4, vocabulary, length), np.ones(length, np.uint8))
    places = torch.randperm(length - 9)[:anchors].sort().values
    document = Document(sample, 0, length, places, torch.ones(anchors, 8, dtype=torch.bool))
    batch = Batch([document], torch.randn(length, 6, width, dtype=torch.bfloat16), last=True)
    optimizers = build_optimizers(draft, Train(), World(0, 1, DEVICE))

    def one() -> float:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not CPU):
            sums = run(draft, frozen, batch, 8, Loss(terms={"ce_argmax": 0.1, "tv": 0.9}), DEVICE)
        sums.objective.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return float(sums.objective.detach())

    first = one()
    held = 0 if CPU else torch.cuda.memory_allocated()
    if not CPU:
        torch.cuda.reset_peak_memory_stats()
    seconds, second = timed(one)
    peak = 0 if CPU else torch.cuda.max_memory_allocated()
    figures = (
        f"{seconds:.2f} s, {held / 1e9:.1f} GB held and {(peak - held) / 1e9:.1f} GB more at its peak, loss {first:.1f} then {second:.1f}"
    )
    yield f"a step of one K3 layer, {anchors} anchors", figures, second < first


def timed(work) -> tuple[float, object]:
    work()
    wait = (lambda: None) if CPU else torch.cuda.synchronize
    wait()
    began = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - began, result


def main() -> int:
    if not (CPU or torch.cuda.is_available()):
        print("tests/gpu/check.py: no CUDA device here")
        return 2
    torch.manual_seed(0)
    print(f"torch {torch.__version__} on {'a CPU' if CPU else torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for check in (flex_attention, objective, muon, codec, step):
        try:
            for what, figures, fine in check():
                failed += not fine
                print(f"| {'ok' if fine else 'WRONG':<5} | {what:<44} | {figures}", flush=True)
        except ModuleNotFoundError as error:
            print(f"| not   | {check.__name__:<44} | {error}", flush=True)
        except Exception as error:  # the table goes on: what is wrong with one says little about the next
            failed += 1
            print(f"| WRONG | {check.__name__:<44} | {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
