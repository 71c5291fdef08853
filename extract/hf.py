"""The verifier as a Hugging Face model: hidden states of its taps, and decoding in slots whose rows have their own lengths.

Any decoder that transformers builds from one list of layers and a final norm will do (Llama, Qwen, Mistral, ...). States are
taken by forward pre-hooks, so tap `a` is the residual stream that enters layer `a` (the aux id of the draft), and the last
state is what enters the final norm.
"""

from __future__ import annotations

import inspect
from functools import cached_property

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Cache
from transformers.masking_utils import sdpa_mask
from transformers.utils.logging import disable_progress_bar

from store.contract import StateContract
from store.verifier import fingerprint


class HFVerifier:
    """A frozen verifier.

    path: Hugging Face folder or hub id; dtype: "float32", "float64" or "bfloat16"; taps: ascending aux ids in 0..num_layers-1.
    States have shape [..., m+1, H] in `dtype`: the m taps, then the last state before the final norm.
    Raises ValueError: a tap that the verifier does not have, or an architecture without one list of layers and a final norm.
    """

    def __init__(self, path: str, dtype: str, taps: tuple[int, ...], trust_remote_code: bool = False, device: str = "cpu"):
        self.path, self.dtype, self.taps, self.device = path, dtype, tuple(taps), torch.device(device)
        disable_progress_bar()  # of loading shards: noise in a log
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code, attn_implementation=GROUPED
        )
        self.model.to(self.device).eval().requires_grad_(False)
        self.decoder = self.model.get_decoder()
        layers, norm = _layers_and_norm(self.decoder)
        self.config = self.decoder.config
        self.hidden_size, self.vocab_size, self.num_layers = self.config.hidden_size, self.config.vocab_size, len(layers)
        if wrong := [tap for tap in self.taps if not 0 <= tap < self.num_layers]:
            raise ValueError(f"taps {wrong}: {path} has {self.num_layers} layers, so a tap is one of 0..{self.num_layers - 1}")
        ends = self.model.generation_config.eos_token_id
        self.stop_ids = frozenset([ends] if isinstance(ends, int) else ends or [])
        self._cache_argument = "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        self._states: Tensor | None = None  # where the running forward's states go
        for index, module in enumerate([*(layers[tap] for tap in self.taps), norm]):
            module.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    @cached_property
    def contract(self) -> StateContract:
        """What the states of this verifier are, for whoever stores or trains on them."""
        engine = {"name": "transformers", "version": transformers.__version__}
        return StateContract(verifier=fingerprint(self.path), taps=self.taps, last="pre_norm", dtype=self.dtype, engine=engine)

    @torch.no_grad()
    def prefill(self, rows: list[list[int]]) -> list[Tensor]:
        """States of whole token sequences, one batch: a list of [T_i, m+1, H], each contiguous. The head does not run."""
        length = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=self.device)
        states = self._begin(tokens)
        self._forward(self.decoder, tokens)  # padding comes after the tokens, where causal attention does not look
        return [states[index, : len(row)] for index, row in enumerate(rows)]

    def slots(self, rows: int, max_len: int) -> Slots:
        """An empty KV cache for `rows` sequences of up to `max_len` tokens each."""
        return Slots(self.config, rows, max_len, self.device)

    def token_bytes(self) -> int:
        """What one token takes in `slots`, seen by a try: architectures differ."""
        slots = self.slots(1, 1)
        self.step(torch.zeros(1, 1, dtype=torch.int64), slots, torch.tensor([0]), logits=False)
        return sum(tensor.nbytes for tensor in slots._tensors())

    @torch.no_grad()
    def step(
        self, tokens: Tensor, slots: Slots, rows: Tensor, keep_states: bool = False, logits: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Append tokens [R, Q] to the sequences in slots `rows` [R]; returns logits [R, Q, V] and states [R, Q, m+1, H].

        Row r's tokens stand at positions lengths[r].. and see only what is before them, so a row with fewer new tokens is
        padded on the right with any token and its length set back afterwards (`slots.lengths[row] = n`), which is also how a
        rejected block is rolled back. Raises ValueError when a row would outgrow its slot.
        """
        tokens = tokens.to(self.device)
        positions, masks = slots.select(rows, tokens.shape[1])
        states = self._begin(tokens) if keep_states else None
        cache = {self._cache_argument: slots, "use_cache": True}
        output = self._forward(self.model if logits else self.decoder, tokens, attention_mask=masks, position_ids=positions, **cache)
        slots.lengths[rows] += tokens.shape[1]
        return output.logits if logits else None, states

    def _begin(self, tokens: Tensor) -> Tensor:
        self._states = torch.empty(*tokens.shape, len(self.taps) + 1, self.hidden_size, dtype=self.model.dtype, device=self.device)
        return self._states

    def _forward(self, module: nn.Module, tokens: Tensor, use_cache: bool = False, **kwargs):
        try:
            return module(input_ids=tokens, use_cache=use_cache, **kwargs)
        finally:
            self._states = None

    def _hook(self, index: int):
        def take(_module, args, kwargs):
            if self._states is not None:
                self._states[:, :, index] = args[0] if args else kwargs["hidden_states"]

        return take


class Slots(Cache):
    """KV cache with one length per row: [rows, kv_heads, max_len, head_dim] per layer, allocated at the layer's first token.

    `lengths` [rows] (int64, CPU) may be set by the caller: what lies beyond a row's length is not seen and gets overwritten.
    """

    def __init__(self, config, rows: int, max_len: int, device: torch.device):
        super().__init__(layers=[])
        self.max_len, self.device = max_len, device
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self._windows = _windows(config)
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}
        self._written = 0  # no row has been written at or after this position

    def select(self, rows: Tensor, new: int) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Make the next `update`s write `new` tokens to `rows`; returns positions [R, Q] and masks [R, 1, Q, K] (by layer type)."""
        positions = self.lengths[rows, None] + torch.arange(new)
        self._stop = int(positions.max()) + 1
        if self._stop > self.max_len:
            raise ValueError(f"{new} new tokens make a row of {self._stop}; a slot holds {self.max_len}")
        self._written = max(self._written, self._stop)
        first = int(rows[0])
        together = torch.equal(rows, torch.arange(first, first + len(rows)))
        self._rows = slice(first, first + len(rows)) if together else rows.to(self.device)  # a slice is read without a copy
        self._row_of, self._positions = rows[:, None].to(self.device), positions.to(self.device)
        distance = self._positions[:, None, :, None] - torch.arange(self._stop, device=self.device)
        masks = {kind: (distance >= 0) & (distance < (window or self.max_len)) for kind, window in self._windows.items()}
        return self._positions, masks if len(masks) > 1 else next(iter(masks.values()))

    def update(self, key: Tensor, value: Tensor, layer: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Write key and value [R, kv_heads, Q, D]; returns all of these rows' [R, kv_heads, K, D], views where rows are neighbours."""
        if layer not in self._cached:
            # Zeros: places that are not seen must be finite, and cost no memory until they are written.
            shapes = [(len(self.lengths), new.shape[1], self.max_len, new.shape[3]) for new in (key, value)]
            self._cached[layer] = tuple(key.new_zeros(shape) for shape in shapes)
        for cached, new in zip(self._cached[layer], (key, value)):
            cached[self._row_of, :, self._positions] = new.transpose(1, 2)
        return tuple(cached[self._rows, :, : self._stop] for cached in self._cached[layer])

    def copy_row(self, source: int, target: int) -> None:
        """Make `target` the same sequence as `source`; moving the last row into a hole keeps rows neighbours."""
        length = int(self.lengths[source])
        for cached in self._tensors():
            cached[target, :, :length] = cached[source, :, :length]
        self.lengths[target] = length

    def clear_row(self, row: int) -> None:
        """Forget a row's values, needed only where they were not finite (hidden places still take part in sums, with weight 0)."""
        for cached in self._tensors():
            cached[row, :, : self._written] = 0
        self.lengths[row] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._stop

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self._cached.values() for tensor in pair]


def _layers_and_norm(decoder: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """The decoder's list of layers and its final norm: the last norm beside the list."""
    depth = decoder.config.num_hidden_layers
    layers = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == depth]
    norms = [child for child in decoder.children() if "norm" in type(child).__name__.lower()]
    if len(layers) != 1 or not norms:
        raise ValueError(f"{type(decoder).__name__}: expected one list of {depth} layers and a final norm among its modules")
    return layers[0], norms[-1]


def _windows(config) -> dict[str, int | None]:
    """Attention window of each kind of layer, None for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layers of type {', '.join(sorted(unknown))} cannot be rolled back: decoding in slots needs attention layers")
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _grouped_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling=None, **kwargs):
    """Scaled dot-product attention that never repeats keys and values: query heads of one KV head become rows of one query.

    query [B, heads, Q, D], key and value [B, kv_heads, K, D], mask [B, 1, Q, K] or None (causal, Q = K); returns [B, Q, heads, D].
    """
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} uses {', '.join(unknown)} in its attention, which is not supported")
    if attention_mask is None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    batch, heads, new, size = query.shape
    group = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], group * new, size)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask.repeat(1, 1, group, 1), scale=scaling)
    return output.reshape(batch, heads, new, -1).transpose(1, 2), None


GROUPED = "grouped_sdpa"
AttentionInterface.register(GROUPED, _grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
