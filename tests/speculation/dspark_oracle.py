"""DSpark in float64 from its formulas (specification, section 9.1): loops, no operator of dsv4.

Weights come from ``state_dict`` alone. One sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dsv4.config import ModelConfig

State = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, position: int, width: int, sign: float = 1.0) -> torch.Tensor:
    """Turn pairs of the last ``width`` dims, base 10000, no YaRN."""
    out = x.clone()
    first = x.shape[-1] - width
    for i in range(width // 2):
        # The table is float32, as in every model.
        frequency = 1.0 / (torch.tensor(10000.0) ** torch.tensor(2 * i / width)).item()
        angle = torch.tensor(float(position)) * torch.tensor(frequency)
        cos, sin = torch.cos(angle).item(), sign * torch.sin(angle).item()
        a, b = x[..., first + 2 * i], x[..., first + 2 * i + 1]
        out[..., first + 2 * i] = a * cos - b * sin
        out[..., first + 2 * i + 1] = a * sin + b * cos
    return out


@dataclass
class Oracle:
    """The draft of one model.

    Attributes:
        config: The model's.
        state: The model's ``state_dict`` in float64.
        stored: What reading an entry ``[.., head_dim]`` back from the cache gives; None: itself.
        context: For each stage the entries of positions, by position.
    """

    config: ModelConfig
    state: State
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None
    context: list[dict[int, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dspark = self.config.dspark
        self.context = [{} for _ in range(self.dspark.stages)]

    def weight(self, name: str) -> torch.Tensor:
        return self.state[f"mtp.{name}"]

    def commit(self, taps: torch.Tensor, first: int) -> None:
        """Store the context of ``taps [S, stages * H]`` at positions from ``first`` on."""
        eps = self.config.rms_norm_eps
        for offset, row in enumerate(taps):
            g = rms(self.weight("0.main_proj.weight") @ row, self.weight("0.main_norm.weight"), eps)
            for stage, entries in enumerate(self.context):
                block, position = f"{stage}.layer.self_attn.", first + offset
                entries[position] = self._entry(block, g, position)

    def _entry(self, block: str, x: torch.Tensor, position: int) -> torch.Tensor:
        kv = self.weight(f"{block}kv_proj.weight") @ x
        kv = rms(kv, self.weight(f"{block}kv_norm.weight"), self.config.rms_norm_eps)
        kv = rotate(kv, position, self.config.qk_rope_head_dim)
        return kv if self.stored is None else self.stored(kv)

    def hidden(self, anchor: int, position: int) -> torch.Tensor:
        """The collapsed streams of all rows before the norm, ``[rows, H]``."""
        rows, noise = self.dspark.block_size, self.dspark.noise_token_id
        embedding = self.state["model.embed_tokens.weight"]
        ids = [anchor] + [noise] * (rows - 1)
        streams = torch.stack([embedding[i] for i in ids])[:, None]
        streams = streams.repeat(1, self.config.hc_mult, 1)
        for stage in range(self.dspark.stages):
            streams = self._stage(stage, streams, position)
        last = f"{self.dspark.stages - 1}"
        name = f"{last}.hc_head.hc_"
        mixes = self._mixes(streams, self.weight(f"{name}fn"))
        mixes = mixes * self.weight(f"{name}scale") + self.weight(f"{name}base")
        pre = torch.sigmoid(mixes) + self.config.hc_eps
        return (pre[..., None] * streams).sum(1)

    def _mixes(self, streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        return rms(streams.flatten(1), 1.0, self.config.rms_norm_eps) @ fn.T

    def _stage(self, stage: int, streams: torch.Tensor, position: int) -> torch.Tensor:
        eps, prefix = self.config.rms_norm_eps, f"{stage}.layer."
        for hc, norm, part in (
            ("attn_hc", "input_layernorm", self._attend),
            ("ffn_hc", "post_attention_layernorm", self._experts),
        ):
            pre, post, comb = self._coefficients(f"{prefix}{hc}", streams)
            x = rms((pre[..., None] * streams).sum(1), self.weight(f"{prefix}{norm}.weight"), eps)
            out = part(stage, x, position)
            mixed = torch.einsum("tjk,tjh->tkh", comb, streams)
            streams = post[..., None] * out[:, None] + mixed
        return streams

    def _coefficients(self, name: str, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, config = self.config.hc_mult, self.config
        mixes = self._mixes(streams, self.weight(f"{name}.fn"))
        scale, base = self.weight(f"{name}.scale"), self.weight(f"{name}.base")
        pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + config.hc_eps
        post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
        comb = comb.softmax(-1) + config.hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + config.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        return pre, post, comb

    def _attend(self, stage: int, x: torch.Tensor, position: int) -> torch.Tensor:
        config, block = self.config, f"{stage}.layer.self_attn."
        eps, width = config.rms_norm_eps, config.qk_rope_head_dim
        heads, dim = config.num_attention_heads, config.head_dim
        own = [self._entry(block, row, position + j) for j, row in enumerate(x)]
        low = max(0, position - config.sliding_window)
        seen = torch.stack([self.context[stage][p] for p in range(low, position)] + own)
        sinks, outs = self.weight(f"{block}sinks"), []
        for j, row in enumerate(x):
            a = rms(
                self.weight(f"{block}q_a_proj.weight") @ row,
                self.weight(f"{block}q_a_norm.weight"),
                eps,
            )
            q = (self.weight(f"{block}q_b_proj.weight") @ a).view(heads, dim)
            q = rotate(rms(q, 1.0, eps), position + j, width)
            exps = torch.exp(q @ seen.T * dim**-0.5)
            total = exps.sum(1) + torch.exp(sinks)
            outs.append(rotate(exps @ seen / total[:, None], position + j, width, -1.0))
        grouped = torch.stack(outs).reshape(len(outs), config.o_groups, -1)
        o_a = self.weight(f"{block}o_a_proj.weight").view(config.o_groups, config.o_lora_rank, -1)
        low_rank = torch.einsum("tgi,gri->tgr", grouped, o_a).flatten(1)
        return low_rank @ self.weight(f"{block}o_b_proj.weight").T

    def _experts(self, stage: int, x: torch.Tensor, position: int) -> torch.Tensor:
        config, block = self.config.stage, f"{stage}.layer.mlp."
        scores = x @ self.weight(f"{block}gate.weight").T
        scores = torch.sqrt(torch.log1p(torch.exp(scores)))
        biased = scores + self.weight(f"{block}gate.e_score_correction_bias")
        out = torch.zeros_like(x)
        for t, row in enumerate(x):
            chosen = biased[t].topk(config.num_experts_per_tok).indices
            total = scores[t, chosen].sum() + 1e-20
            for e in chosen:
                gate_up = self.weight(f"{block}experts.gate_up_proj")[e]
                gate, up = gate_up.chunk(2)
                down = self.weight(f"{block}experts.down_proj")[e]
                factor = scores[t, e] / total * config.routed_scaling_factor
                out[t] += factor * (down @ self._swiglu(gate @ row, up @ row))
            shared = [self.weight(f"{block}shared_experts.{p}_proj.weight") for p in ("gate", "up")]
            inner = self._swiglu(shared[0] @ row, shared[1] @ row)
            out[t] += self.weight(f"{block}shared_experts.down_proj.weight") @ inner
        return out

    def _swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(gate) * up

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, vocab]`` without the Markov head."""
        norm = self.weight(f"{self.dspark.stages - 1}.norm.weight")
        return rms(hidden, norm, self.config.rms_norm_eps) @ self.state["lm_head.weight"].T

    def draft(self, anchor: int, position: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Greedy tokens, their logits ``[rows, vocab]`` and their confidences ``[rows]``."""
        last = self.dspark.stages - 1
        hidden = self.hidden(anchor, position)
        base, before = self.base_logits(hidden), anchor
        tokens, logits, confidences = [], [], []
        w1 = self.weight(f"{last}.markov_head.markov_w1.weight")
        w2 = self.weight(f"{last}.markov_head.markov_w2.weight")
        for row in range(self.dspark.block_size):
            vector = w1[before]
            confidence = self.weight(f"{last}.confidence_head.proj.weight")[0] @ torch.cat(
                (hidden[row], vector)
            )
            logits.append(base[row] + w2 @ vector)
            confidences.append(torch.sigmoid(confidence))
            before = int(logits[-1].argmax())
            tokens.append(before)
        return tokens, torch.stack(logits), torch.stack(confidences)
