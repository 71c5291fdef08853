"""A plugin for vLLM: each block that a DSpark draft proposes, with its hidden states, becomes a line of the file $RECORD_DRAFTS."""

from __future__ import annotations

import json
import os


def install() -> None:
    if not (path := os.environ.get("RECORD_DRAFTS")):
        return
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    sample = DSparkSpeculator._sample_sequential

    def recorded(self, num_reqs, head_hidden):
        sample(self, num_reqs, head_hidden)
        slots = self.num_speculative_steps
        hidden = head_hidden[self.sample_indices[: num_reqs * slots]].view(num_reqs, slots, -1)
        with open(path, "a") as file:
            for request in range(num_reqs):
                anchor = int(self.sample_pos[request * slots]) - 1
                drafts = self.draft_tokens[request, :slots]
                line = {"anchor": anchor, "drafts": drafts.tolist(), "hidden": hidden[request].tolist()}
                file.write(json.dumps(line) + "\n")

    DSparkSpeculator._sample_sequential = recorded
