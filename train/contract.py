"""The draft contract: what a draft is, with every dimension resolved. It travels in checkpoints and exports."""

from __future__ import annotations

from typing import Literal

from configs.schema import Config, Gqa, Mla
from store.contract import Contract
from store.verifier import text_config


class DraftContract(Contract):
    """One of `gqa` (all of its values given) and `mla` is there."""

    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    sample_from_anchor: Literal[True] = True  # slot k predicts the token at anchor + k + 1
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...]
    window: int | None = None
    causal: bool | None = None
    gqa: Gqa | None = None
    mla: Mla | None = None
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int  # of what it can say; what it reads is the verifier's vocabulary
    rms_norm_eps: float
    max_position_embeddings: int
    markov_rank: int
    loss_terms: dict[str, float]

    @classmethod
    def resolve(cls, config: Config) -> DraftContract:
        """Fill `null` dimensions from the verifier's own config; a recipe that gives all of them needs no verifier."""
        draft = config.draft
        own = {"hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings"}
        given = draft.model_dump(include=own)
        attention = draft.gqa.model_dump() if draft.decoder == "gqa" else {}
        if None in (given | attention).values():
            verifier = text_config(config.verifier.path)
            given = _filled(given, verifier)
            attention = attention and _filled(attention, _attention(attention, verifier))
        return cls(
            **draft.model_dump(include={"taps", "block_size", "mask_token_id", "window", "causal", "markov_rank", "mla"}),
            **given,
            draft_vocab_size=draft.draft_vocab_size or given["vocab_size"],
            layer_types=draft.types_of_layers(),
            gqa=attention or None,
            loss_terms=config.loss.terms,
        )

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def reach(self, layer: int) -> tuple[bool, int | None]:
        """(causal, window) of a layer's attention. What `causal` leaves open is decided as engines do: by the layer's type."""
        sliding = self.layer_types[layer] == "sliding_attention"
        return sliding if self.causal is None else self.causal, self.window if sliding else None


def shapes(spec: DraftContract) -> dict[str, tuple[int, ...]]:
    """Of every parameter that is trained, by its name in `train.draft`, which is not built (nor torch imported) for this."""
    hidden, inner, layer = spec.hidden_size, spec.intermediate_size, {}
    if mla := spec.mla:
        head, value = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.heads * mla.v_head_dim
        layer |= {"q_a_proj": (mla.q_lora_rank, hidden), "q_a_layernorm": (mla.q_lora_rank,)}
        layer |= {"q_b_proj": (mla.heads * head, mla.q_lora_rank), "kv_a_layernorm": (mla.kv_lora_rank,)}
        layer |= {"kv_a_proj_with_mqa": (mla.kv_lora_rank + mla.qk_rope_head_dim, hidden)}
        layer |= {"kv_b_proj": (mla.heads * mla.qk_nope_head_dim + value, mla.kv_lora_rank), "o_proj": (hidden, value)}
    else:
        gqa, (queries, keys) = spec.gqa, (heads * spec.gqa.head_dim for heads in (spec.gqa.heads, spec.gqa.kv_heads))
        layer |= {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden), "o_proj": (hidden, queries)}
        layer |= {"q_norm": (gqa.head_dim,), "k_norm": (gqa.head_dim,)}
    layer = {f"self_attn.{name}": shape for name, shape in layer.items()}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    found = {f"layers.{number}.{name}": shape for number in range(spec.layers) for name, shape in layer.items()}
    found |= {"fc": (hidden, len(spec.taps) * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    found |= {"markov_head.markov_w1": (spec.vocab_size, spec.markov_rank)}
    found |= {"markov_head.markov_w2": (spec.draft_vocab_size, spec.markov_rank)}
    found |= {"confidence_head.proj": (1, hidden + spec.markov_rank)}
    return {f"{name}.weight": shape for name, shape in found.items()} | {"confidence_head.proj.bias": (1,)}


def _filled(given: dict, default: dict) -> dict:
    return {key: default.get(key) if value is None else value for key, value in given.items()}


def _attention(given: dict, verifier: dict) -> dict:
    """The verifier's own attention, in our words; sizes that `given` leaves open follow those that it has."""
    heads = given["heads"] or verifier["num_attention_heads"]
    rope = verifier.get("rope_parameters") or {}
    return {
        "heads": heads,
        "kv_heads": verifier.get("num_key_value_heads") or heads,
        "head_dim": verifier.get("head_dim") or verifier["hidden_size"] // heads,
        "rope_theta": rope.get("rope_theta") or verifier.get("rope_theta") or 10000.0,
    }
