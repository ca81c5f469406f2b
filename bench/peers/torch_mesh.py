#!/usr/bin/env python3
"""PyTorch's tensor, sequence and context parallelism for a Llama, as its users write it.

    torchrun --standalone --nproc_per_node 4 bench/peers/torch_mesh.py --model llama-8b --tp 4 --seq 8192 --autocast

Prints a JSON line a step: step, loss, tokens_per_s of all ranks, step_ms, peak_bytes. Tensor parallelism is
parallelize_module with norms on split tokens (SequenceParallel) and loss_parallel; along dp (and cp) FSDP2 shards;
context parallelism is the ring attention of torch.distributed.tensor.experimental. Blocks and loss are compiled. Compute
is bf16, by FSDP2's policy or, without ranks along dp and cp, by autocast (--autocast), which is faster there. Masters are
fp32, the optimizer is fused AdamW, and each step has new random tokens.
"""

import argparse
import contextlib
import json
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

# width, layers, heads, key and value heads, features of the feed-forward part, vocabulary
MODELS = {
    "llama-1b": (2048, 16, 32, 8, 8192, 128256),
    "llama-8b": (4096, 32, 32, 8, 14336, 128256),
}


def rope_table(length: int, head_dim: int, base: float = 500000.0) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.cos(angles), torch.sin(angles)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    c, s = cosine[None, None], sine[None, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, grouped: bool):
        super().__init__()
        self.head_dim, self.repeats, self.grouped = width // heads, heads // kv_heads, grouped
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x, cosine, sine):
        rows, length, _ = x.shape
        q, k, v = (w(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        if not self.grouped:  # ring attention has no grouped heads
            k, v = (z.repeat_interleave(self.repeats, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, features: int):
        super().__init__()
        self.w1 = nn.Linear(width, features, bias=False)
        self.w3 = nn.Linear(width, features, bias=False)
        self.w2 = nn.Linear(features, width, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, features: int, grouped: bool):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attn, self.ff = Attention(width, heads, kv_heads, grouped), FeedForward(width, features)

    def forward(self, x, cosine, sine):
        x = x + self.attn(self.n1(x), cosine, sine)
        return x + self.ff(self.n2(x))


class Llama(nn.Module):
    def __init__(self, name: str, grouped: bool):
        super().__init__()
        width, layers, heads, kv_heads, features, vocabulary = MODELS[name]
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, features, grouped) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, cosine, sine):
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))


def cut(model: Llama, mesh) -> None:
    parallelize_module(model, mesh, {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "n1": SequenceParallel(),
            "n2": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=(Shard(1), None, None),
                                       desired_input_layouts=(Replicate(), None, None)),
            "attn.wq": ColwiseParallel(),
            "attn.wk": ColwiseParallel(),
            "attn.wv": ColwiseParallel(),
            "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ff": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ff.w1": ColwiseParallel(),
            "ff.w3": ColwiseParallel(),
            "ff.w2": RowwiseParallel(output_layouts=Shard(1)),
        })


def shard(model: Llama, mesh, contexts: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks = mesh["dp", "cp"]._flatten("dpcp") if contexts > 1 else mesh["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=ranks, mp_policy=policy)
    fully_shard(model, mesh=ranks, mp_policy=policy, reshard_after_forward=False)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a rank along dp")
    for axis in ("tp", "cp", "dp"):
        parser.add_argument("--" + axis, type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--async-tp", action="store_true", help="chunks of products beside their exchanges")
    parser.add_argument("--rotate", default="allgather", choices=["allgather", "alltoall"])
    return parser.parse_args()


def main() -> None:
    asked = options()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("high")
    mesh = init_device_mesh("cuda", (asked.dp, asked.cp, asked.tp), mesh_dim_names=("dp", "cp", "tp"))
    with device:
        model = Llama(asked.model, grouped=asked.cp == 1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    width, _, heads, _, _, vocabulary = MODELS[asked.model]
    cosine, sine = (table.to(device) for table in rope_table(asked.seq, width // heads))
    if asked.tp > 1:
        cut(model, mesh["tp"])
    if asked.async_tp:
        import torch._inductor.config as inductor
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group
        inductor._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, fullgraph=asked.cp == 1)
    loss_of = torch.compile(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))
    compute = torch.autocast("cuda", torch.bfloat16) if asked.autocast else contextlib.nullcontext()
    if not asked.autocast:
        shard(model, mesh, asked.cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator(device=device).manual_seed(7 + rank // (asked.tp * asked.cp))
    if asked.cp > 1:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.nn.attention import SDPBackend, sdpa_kernel
        set_rotate_method(asked.rotate)
    for step in range(1, asked.steps + 1):
        tokens = torch.randint(0, vocabulary, (asked.micro_batch, asked.seq + 1), device=device, generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        c, s = cosine.clone(), sine.clone()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with contextlib.ExitStack() as around:
            if asked.cp > 1:
                around.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]))
                around.enter_context(context_parallel(mesh["cp"], buffers=(inputs, targets, c, s),
                                                      buffer_seq_dims=(1, 1, 0, 0),
                                                      no_restore_buffers={inputs, targets}))
            if asked.tp > 1:
                around.enter_context(loss_parallel())
            with compute:
                loss = loss_of(model(inputs, c, s), targets)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        value = loss.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if rank == 0:
            print(json.dumps({
                "step": step,
                "loss": float(value),
                "tokens_per_s": asked.dp * asked.micro_batch * asked.seq / seconds,
                "step_ms": 1e3 * seconds,
                "peak_bytes": torch.cuda.max_memory_allocated(),
            }), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
