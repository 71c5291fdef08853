"""vLLM plugin: of Kimi-K3, taps as prefix sums and the last state as the stream, in one pass.

K3's layers hand on a prefix sum that restarts every `attn_res_block_size` layers. What a layer really reads, and what the final
norm reads, is a softmax mixture of the bank of finished blocks and that prefix (AttnRes). vLLM captures either prefix sums or
mixtures for all ids alike. Public drafts are trained and served on prefix sums; teacher logits need the mixture. But the
mixture after the last layer is what the model itself returns, before the final norm. So vLLM's default capture (prefix sums)
stays as it is, and the last layer's entry is replaced by the model's own output: nothing is computed twice.

Not run on K3 itself: the handshake at the start of a training run proves or refuses it there.
"""

from __future__ import annotations

import functools
import os
import sys

PLUGIN = "k3_capture"  # in vLLM's entry point group `vllm.general_plugins`, loaded by every process of an engine
SWITCH = "EXTRACT_K3_CAPTURE"  # environments may serve other models with the same packages


def register() -> None:
    """The entry point. Does nothing unless `extract.serve` found that its verifier is built this way."""
    if os.environ.get(SWITCH) != "1":
        return
    from vllm import envs
    from vllm.models.kimi_k3 import KimiLinearForCausalLM

    if envs.VLLM_KIMI_K3_AUX_ATTN_RES_STREAM:
        raise RuntimeError("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 captures mixtures for the taps too: unset it")
    last_from_output(sys.modules[KimiLinearForCausalLM.__module__].KimiLinearModel)


def last_from_output(model: type) -> None:
    """Make `model.forward`, which returns (output, captures), return its output as the capture of the last layer.

    output and captures are [tokens, H]; captures are in ascending order of `aux_hidden_state_layers`. Where the last layer is
    not asked for, or nothing is, forward stays what it was. Plugins may be loaded twice: the second time changes nothing.
    """
    forward = model.forward
    if hasattr(forward, "captures_output"):
        return

    @functools.wraps(forward)
    def with_output(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        if not isinstance(result, tuple) or self.config.num_hidden_layers not in self.aux_hidden_state_layers:
            return result
        output, captures = result
        return output, [*captures[:-1], output]

    with_output.captures_output = True
    model.forward = with_output
