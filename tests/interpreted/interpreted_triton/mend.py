"""A plugin for vLLM: two faults of Triton's interpreter that kernels of sampling come upon.

Masks that are no booleans are taken for bytes, and `log1p`, which a backend's library would have, is an empty stub.
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

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def flags(mask):
        return TensorHandle(mask.data.astype(bool), tl.int1)

    InterpreterBuilder.create_masked_load = lambda self, pointers, mask, *rest, **keys: load(self, pointers, flags(mask), *rest, **keys)
    InterpreterBuilder.create_masked_store = lambda self, pointers, value, mask, *rest: store(self, pointers, value, flags(mask), *rest)
    libdevice.log1p = lambda x: tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)
