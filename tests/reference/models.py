"""Plain PyTorch models that trireme's own are checked against.

They are written from the papers and from the layout of Hugging Face checkpoints, with nothing
shared with the C++ code: no packed projections, no fused attention, no in-place operations.
`state_dict()` has the names and shapes of Hugging Face checkpoints; a tied head has no entry of
its own.

In bf16, norms, rotary embedding and attention compute in fp32 from bf16 inputs and round once at
their output; matrix products and residual sums are bf16. `forward` returns logits in the dtype of
the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The keys of trireme's `model` section."""

    family: str  # gpt2, llama or mlp
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    max_seq_len: int
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    head_dim: int = 0  # 0: d_model / n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads


def at_least_fp32(x: Tensor) -> Tensor:
    """fp32 for narrower types; fp64 stays, so that the same code gives a precise reference."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v over positions up to its own. All (B, heads, T, dim)."""
    length = q.shape[-2]
    scores = at_least_fp32(q) @ at_least_fp32(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
    return (weights @ at_least_fp32(v)).to(q.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads * head_dim) -> (B, heads, T, head_dim)"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, T, head_dim) -> (B, T, heads * head_dim)"""
    return x.transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * at_least_fp32(self.weight)).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        centred = wide - wide.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        return (normed * at_least_fp32(self.weight) + at_least_fp32(self.bias)).to(x.dtype)


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is stored (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def linear(inputs: int, outputs: int) -> nn.Linear:
    """No bias; the weight is stored (out, in)."""
    return nn.Linear(inputs, outputs, bias=False)


def gelu_tanh(x: Tensor) -> Tensor:
    """GPT-2's "gelu_new": 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks 2016)."""
    wide = at_least_fp32(x)
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


class LanguageModel(nn.Module):
    """Ids to logits. A family says where its embedding is; an untied head is `lm_head`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        if not config.tie_embeddings:
            self.lm_head = linear(config.d_model, config.vocab_size)

    def embedding(self) -> nn.Embedding:
        raise NotImplementedError

    def hidden(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, d_model), after the final norm."""
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, vocab_size)"""
        tied = self.config.tie_embeddings
        weight = self.embedding().weight if tied else self.lm_head.weight
        return self.hidden(ids) @ weight.T


# GPT-2 (Radford et al. 2019)


class Gpt2Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.n_heads
        self.c_attn = Conv1D(config.d_model, 3 * config.d_model)
        self.c_proj = Conv1D(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(merge_heads(causal_attention(q, k, v)))


class Gpt2Mlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.d_model, config.d_ff)
        self.c_proj = Conv1D(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(gelu_tanh(self.c_fc(x)))


class Gpt2Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.d_model, config.norm_eps)
        self.attn = Gpt2Attention(config)
        self.ln_2 = LayerNorm(config.d_model, config.norm_eps)
        self.mlp = Gpt2Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.transformer.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        self.transformer.h = nn.ModuleList(Gpt2Block(config) for _ in range(config.n_layers))
        self.transformer.ln_f = LayerNorm(config.d_model, config.norm_eps)

    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def hidden(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        x = self.transformer.wte(ids) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        return self.transformer.ln_f(x)


# Llama (Touvron et al. 2023)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding (Su et al. 2021): dimension i turns together with i + head_dim / 2, as in
    Hugging Face's checkpoints. x: (B, heads, T, head_dim)."""
    length, dim = x.shape[-2:]
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    wide = at_least_fp32(x)
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    return (wide * cos + rotate_half(wide) * sin).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.theta = config.n_heads, config.n_kv_heads, config.rope_theta
        width = config.head_width
        self.q_proj = linear(config.d_model, self.heads * width)
        self.k_proj = linear(config.d_model, self.kv_heads * width)
        self.v_proj = linear(config.d_model, self.kv_heads * width)
        self.o_proj = linear(self.heads * width, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q = rotary(split_heads(self.q_proj(x), self.heads), self.theta)
        k = rotary(split_heads(self.k_proj(x), self.kv_heads), self.theta)
        v = split_heads(self.v_proj(x), self.kv_heads)
        queries_per_kv = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(queries_per_kv, dim=1) for part in (k, v))
        return self.o_proj(merge_heads(causal_attention(q, k, v)))


class LlamaMlp(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.d_model, config.d_ff)
        self.up_proj = linear(config.d_model, config.d_ff)
        self.down_proj = linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = LlamaMlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.model.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.n_layers))
        self.model.norm = RMSNorm(config.d_model, config.norm_eps)

    def embedding(self) -> nn.Embedding:
        return self.model.embed_tokens

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x)


# A residual MLP over single tokens: the smallest model with blocks.


class MlpBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.up = linear(config.d_model, config.d_ff)
        self.down = linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Mlp(LanguageModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(MlpBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    def embedding(self) -> nn.Embedding:
        return self.embed

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build(config: ModelConfig) -> LanguageModel:
    """The model of `config.family`, weights not yet initialised for use."""
    return {"gpt2": Gpt2, "llama": Llama, "mlp": Mlp}[config.family](config)
