"""A plugin for vLLM: its engine and its workers are forked, and not started anew, which is how it insists to run on a CPU.

Each process of a server would import vLLM once more, 17 seconds that prove nothing. The demo's test leaves the plugin out.
"""

from __future__ import annotations

import os


def install() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_fork(cls, vllm_config) -> None:
        check(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_fork)
