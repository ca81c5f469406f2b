"""The PyTorch peer on CPUs: trains gpt-tiny or llama-tiny in fp32, or by autocast in bf16, and prints a line of JSON.

    torch_cpu_train.py --model gpt-tiny --threads 2
    python -m torch.distributed.run --standalone --nproc-per-node 2 torch_cpu_train.py --threads 1

Same shapes as trireme's presets of the same names, and the settings a PyTorch user who wants
speed would choose, none slower than the alternatives measured: packed projections, fused
attention, fused AdamW, gradients as views of DDP's buckets, batches gathered before the clock
starts. Ranks come from torchrun's environment variables; more than one rank trains with DDP over
Gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

TEXT_SUFFIXES = (".h", ".hpp", ".cuh", ".txt", ".md")


@dataclass(frozen=True)
class Shape:
    family: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int = 256
    seq_len: int = 128
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


MODELS = {
    "gpt-tiny": Shape("gpt2", n_layers=4, d_model=128, n_heads=4, n_kv_heads=4, d_ff=512),
    "llama-tiny": Shape("llama", n_layers=4, d_model=128, n_heads=4, n_kv_heads=2, d_ff=352),
}


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, 1, head_dim / 2), to broadcast over heads."""
    exponents = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
    angles = torch.outer(torch.arange(shape.seq_len).double(), shape.rope_theta**-exponents)
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, heads, head_dim); dimension i turns with i + head_dim / 2."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.n_heads + 2 * shape.n_kv_heads
        self.qkv = nn.Linear(shape.d_model, heads * shape.head_dim, bias=bias)
        self.out = nn.Linear(shape.d_model, shape.d_model, bias=bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        shape = self.shape
        heads, kv_heads = shape.n_heads, shape.n_kv_heads
        qkv = self.qkv(x).unflatten(-1, (heads + 2 * kv_heads, shape.head_dim))
        qk, v = qkv.split([heads + kv_heads, kv_heads], 2)
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk.split([heads, kv_heads], 2)
        if kv_heads != heads:  # the CPU's flash kernel wants as many k and v heads as q heads
            k, v = (part.repeat_interleave(heads // kv_heads, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GptBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.d_model, shape.norm_eps)
        self.attention = Attention(shape, bias=True)
        self.norm_2 = nn.LayerNorm(shape.d_model, shape.norm_eps)
        self.up = nn.Linear(shape.d_model, shape.d_ff)
        self.down = nn.Linear(shape.d_ff, shape.d_model)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), rope)
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.attention = Attention(shape, bias=False)
        self.norm_2 = nn.RMSNorm(shape.d_model, shape.norm_eps)
        self.gate_up = nn.Linear(shape.d_model, 2 * shape.d_ff, bias=False)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), rope)
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """(B, T) ids and targets to the mean loss; the head is tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        is_gpt = shape.family == "gpt2"
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.positions = nn.Embedding(shape.seq_len, shape.d_model) if is_gpt else None
        block = GptBlock if is_gpt else LlamaBlock
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.n_layers))
        norm = nn.LayerNorm if is_gpt else nn.RMSNorm
        self.norm = norm(shape.d_model, shape.norm_eps)
        self.rope = None if is_gpt else rope_table(shape)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, self.rope)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(path: Path, limit: int) -> Tensor:
    """Up to `limit` bytes of a file, or of a folder's text files in sorted order, as uint8."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    buffer = bytearray()
    for file in files:
        if file == path or (file.suffix in TEXT_SUFFIXES and file.is_file()):
            buffer += file.read_bytes()
        if len(buffer) >= limit:
            break
    if not buffer:
        raise SystemExit(f"no text in {path}; expected files ending in {', '.join(TEXT_SUFFIXES)}")
    return torch.from_numpy(numpy.frombuffer(buffer, dtype=numpy.uint8)[:limit].copy())


def sample_batches(text: Tensor, shape: Shape, rows: int, count: int, seed: int) -> Tensor:
    """(count, rows, T + 1) int64: random windows of the text."""
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, shape.seq_len + 1, shape.seq_len)
    chosen = torch.randint(len(windows), (count * rows,), generator=generator)
    return windows[chosen].long().unflatten(0, (count, rows))


def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    kind = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
    return torch.optim.AdamW(
        groups, lr=arguments.lr, betas=(0.9, 0.95), eps=1e-8, **kind[arguments.adamw]
    )


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    if arguments.schedule == "constant":
        return arguments.lr
    progress = step / (arguments.warmup + arguments.steps)
    return arguments.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def wrap(
    model: nn.Module, world: int, accumulation: int, arguments: argparse.Namespace
) -> nn.Module:
    net = torch.compile(model) if arguments.compile else model
    if world == 1:
        return net
    return nn.parallel.DistributedDataParallel(
        net,
        gradient_as_bucket_view=True,
        static_graph=accumulation == 1,  # DDP's first backward of a static graph must synchronise
        bucket_cap_mb=arguments.bucket_mb,
    )


def train_step(net: nn.Module, optimizer: torch.optim.AdamW, parts: Tensor, clip: bool, casts: bool) -> Tensor:
    """One optimizer step over (accumulation, micro_batch, T + 1) ids; returns this rank's loss."""
    total = torch.zeros(())
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        waits = hasattr(net, "no_sync") and not last
        with net.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = net(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
        total += loss.detach()
    if clip:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def train(arguments: argparse.Namespace, rank: int, world: int) -> dict:
    shape = MODELS[arguments.model]
    micro_batch = arguments.micro_batch or arguments.global_batch // world
    accumulation, rest = divmod(arguments.global_batch, micro_batch * world)
    if accumulation == 0 or rest:
        raise SystemExit(f"global batch {arguments.global_batch} is not a multiple of "
                         f"micro batch {micro_batch} x {world} ranks")
    torch.manual_seed(arguments.seed)
    model = Model(shape)
    net = wrap(model, world, accumulation, arguments)
    optimizer = make_optimizer(model, arguments)
    total_steps = arguments.warmup + arguments.steps
    text = read_text(arguments.text, arguments.max_bytes)
    rows = accumulation * micro_batch
    batches = sample_batches(text, shape, rows, total_steps, arguments.seed + 1 + rank)
    step_ms, losses = [], []
    for step in range(total_steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments)
        parts = batches[step].unflatten(0, (accumulation, micro_batch))
        loss = train_step(net, optimizer, parts, arguments.clip, arguments.dtype == "bf16")
        step_ms.append((time.perf_counter() - begin) * 1e3)
        losses.append(loss.item())
        if step == 0 and rank == 0 and arguments.json:
            print(json.dumps({"step": 1}), flush=True)
    tokens = arguments.global_batch * shape.seq_len
    samples = [tokens / ms * 1e3 for ms in step_ms[arguments.warmup :]]
    return {
        "peer": "torch-cpu",
        "model": arguments.model,
        "params": sum(p.numel() for p in model.parameters()),
        "step_ms": statistics.median(step_ms[arguments.warmup :]),
        "tokens_per_s": statistics.median(samples),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "samples": {"tokens_per_s": samples, "step_ms": step_ms[arguments.warmup :]},
        "settings": {
            "ranks": world,
            "threads": torch.get_num_threads(),
            "micro_batch": micro_batch,
            "accumulation": accumulation,
            "shape": asdict(shape),
            **{key: value for key, value in vars(arguments).items()
               if key not in ("model", "micro_batch", "threads", "text", "json")},
            "text": arguments.text.name,
        },
        "torch": torch.__version__,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    headers = Path(torch.__file__).parent / "include"
    parser.add_argument("--model", choices=MODELS, default="gpt-tiny")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of each rank")
    parser.add_argument("--micro-batch", type=int, default=0,
                        help="sequences per forward pass of a rank; 0: global batch / ranks")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50, help="timed steps")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--schedule", choices=("cosine", "constant"), default="cosine")
    parser.add_argument("--adamw", choices=("fused", "foreach", "loop"), default="fused")
    parser.add_argument("--no-clip", dest="clip", action="store_false")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast, with fp32 weights")
    parser.add_argument("--text", type=Path, default=headers, help="file or folder of text, read as bytes")
    parser.add_argument("--max-bytes", type=int, default=8 << 20)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(arguments.threads)
    if world > 1:
        dist.init_process_group("gloo")
    result = train(arguments, rank, world)
    if rank == 0 and arguments.json:
        print(json.dumps(result), flush=True)
    elif rank == 0:
        print(f"{result['model']}: {result['tokens_per_s']:,.0f} tokens/s, "
              f"{result['step_ms']:.2f} ms a step, loss {result['loss_first']:.3f} -> "
              f"{result['loss_last']:.3f}", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
