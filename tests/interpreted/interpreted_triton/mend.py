"""A plugin for vLLM: two faults of Triton's interpreter that kernels of sampling come upon, and one of vLLM's kernels for CPUs.

Masks that are no booleans are taken for bytes, and `log1p`, which a backend's library would have, is an empty stub. vLLM norms the
context's keys of all draft layers at once, by a row of weights for each: its kernel for CPUs takes the first row for all of them.
"""

from __future__ import annotations

import os


def install() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def flags(mask):
        return TensorHandle(mask.data.astype(bool), tl.int1)

    InterpreterBuilder.create_masked_load = lambda self, pointers, mask, *rest, **keys: load(self, pointers, flags(mask), *rest, **keys)
    InterpreterBuilder.create_masked_store = lambda self, pointers, value, mask, *rest: store(self, pointers, value, flags(mask), *rest)
    DFlashQwen3Model._normalize_context_k = _normalize_context_k
    libdevice.log1p = lambda x: tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


def _normalize_context_k(self, all_k):
    """Keys [layers, tokens, heads, d], each layer's by its own weights."""
    import torch

    norm = torch.nn.functional.rms_norm
    return torch.stack([norm(k, k.shape[-1:], weight, self._rms_norm_eps) for k, weight in zip(all_k, self._k_norm_weights)])
