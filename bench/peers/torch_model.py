"""The GPT-2 and Llama shaped models that the PyTorch and DeepSpeed peers train."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shape(NamedTuple):
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool
    kind: str  # gpt or llama

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


MODELS = {
    "nano": Shape(128, 4, 4, 4, 512, 256, True, "llama"),
    "gpt-tiny": Shape(128, 4, 4, 4, 512, 256, True, "gpt"),
    "llama-tiny": Shape(128, 4, 4, 2, 352, 256, True, "llama"),
    "gpt2-124m": Shape(768, 12, 12, 12, 3072, 50304, True, "gpt"),
    "mini-gpt-153m": Shape(1024, 8, 16, 16, 4096, 50304, True, "gpt"),
    "llama-1b": Shape(2048, 16, 32, 8, 8192, 128256, True, "llama"),
    "llama-3b": Shape(3072, 28, 24, 8, 8192, 128256, True, "llama"),
    "llama-6b": Shape(4096, 24, 32, 8, 14336, 128256, False, "llama"),  # llama-8b with 24 layers
    "llama-8b": Shape(4096, 32, 32, 8, 14336, 128256, False, "llama"),
}


def shape_of(config: dict) -> Shape:
    """That of our resolved config."""
    model = config["model"]
    if (model["family"] not in ("gpt2", "llama") or model["dropout"] or model["norm_eps"] != 1e-5
            or config["optim"]["name"] != "adamw"):
        raise SystemExit("the peers have gpt2 and llama with eps 1e-5, no dropout, and AdamW; "
                         "the config asks for something else")
    return Shape(model["d_model"], model["n_layers"], model["n_heads"], model["n_kv_heads"],
                 model["d_ff"], model["vocab_size"], model["tie_embeddings"],
                 {"gpt2": "gpt", "llama": "llama"}[model["family"]])


def flops_per_token(shape: Shape, length: int) -> int:
    """Forward and backward: 6 a matmul weight, and causal attention as half of the full square."""
    matrices = 2 if shape.kind == "gpt" else 3
    block = (shape.width * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
             + shape.width * shape.width + matrices * shape.width * shape.feed_forward)
    weights = shape.layers * block + shape.width * shape.vocabulary
    return 6 * weights + 6 * shape.layers * length * shape.width


def rope_tables(length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, head_dim / 2)."""
    inverse = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, heads, T, head_dim) in fp32."""
    first, second = x.float().chunk(2, -1)
    c, s = cos[None, None], sin[None, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        gpt, width = shape.kind == "gpt", shape.width
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.is_gpt = gpt
        self.n1 = nn.LayerNorm(width) if gpt else nn.RMSNorm(width, eps=1e-5)
        self.n2 = nn.LayerNorm(width) if gpt else nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=gpt)
        self.o = nn.Linear(width, width, bias=gpt)
        if gpt:
            self.up = nn.Linear(width, shape.feed_forward)
        else:
            self.gate_up = nn.Linear(width, 2 * shape.feed_forward, bias=False)
        self.down = nn.Linear(shape.feed_forward, width, bias=gpt)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        widths = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for part in self.qkv(self.n1(x)).split(widths, -1)]
        if not self.is_gpt:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                           enable_gqa=self.kv_heads != self.heads)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        z = self.n2(x)
        if self.is_gpt:
            return x + self.down(F.gelu(self.up(z), approximate="tanh"))
        gate, up = self.gate_up(z).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    """(B, T) ids and targets to the mean loss. same_weights.py knows the parameters' names."""

    def __init__(self, shape: Shape, length: int, rope_theta: float) -> None:
        super().__init__()
        gpt = shape.kind == "gpt"
        self.emb = nn.Embedding(shape.vocabulary, shape.width)
        self.pos = nn.Embedding(length, shape.width) if gpt else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width) if gpt else nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.emb.weight
        cos, sin = rope_tables(length, shape.head_dim, rope_theta)
        self.loss_of = mean_loss  # a compiled one may take its place
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(ids)
        if self.pos is not None:
            x = x + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss_of(self.head(self.norm(x)), targets)
