"""PyTorch peer of `trireme bench pipeline`: schedules of torch.distributed.pipelining on a stack of Llama blocks in bf16.

Launch: torchrun --standalone --nproc_per_node 2 torch_pipe.py --schedules gpipe,1f1b,i1f1b --compile
Forward and backward passes without an update. Prints a JSON line for each schedule: the median of the timed steps, each
from when all ranks are ready to when all have ended, and the peak of each rank's allocator. A schedule that PyTorch
refuses ends the run with a line that says why, exit code 1: name those with zero bubble without --compile.
--device cpu tries that without a GPU, over Gloo, which zbv and dualpipev do not take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from torch_model import Block, Shape, mean_loss, rope_tables

HEAD_DIM = 128
# Classes of PyTorch, and which stages a rank has: one, every so many, or two that make a V.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "one"),
    "1f1b": ("Schedule1F1B", "one"),
    "i1f1b": ("ScheduleInterleaved1F1B", "loop"),
    "izb": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}


def stages_of(layout: str, rank: int, world: int) -> tuple[list[int], int]:
    """Those of a rank, and how many there are in all."""
    if layout == "one":
        return [rank], world
    return [rank, 2 * world - 1 - rank if layout == "v" else rank + world], 2 * world


class Stage(nn.Module):
    """Blocks, behind the embedding where it is the first, before the norm and the head where it is the last."""

    def __init__(self, shape: Shape, length: int, first: bool, last: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(shape.vocabulary, shape.width) if first else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5) if last else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if last else None
        cos, sin = rope_tables(length, shape.head_dim, 500000.0)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.emb is not None:
            x = self.emb(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


@dataclass(frozen=True)
class Setup:
    options: argparse.Namespace
    rank: int
    world: int
    device: torch.device
    loss: Callable[[Tensor, Tensor], Tensor]

    def meet(self) -> None:
        """Returns when the devices of all ranks have nothing left to do."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def build_stage(setup: Setup, index: int, total: int) -> PipelineStage:
    options = setup.options
    heads = options.dim // HEAD_DIM
    shape = Shape(options.dim, options.layers // total, heads, max(1, heads // 4), options.ffn, options.vocab, False,
                  "llama")
    with torch.device(setup.device):
        stage = Stage(shape, options.seq, index == 0, index == total - 1)
    for module in (stage.emb, stage.blocks, stage.norm, stage.head):
        if module is not None:
            module.to(torch.bfloat16)
    if options.compile:
        for number, block in enumerate(stage.blocks):
            stage.blocks[number] = torch.compile(block)
    return PipelineStage(stage, index, total, setup.device)


def peaks_of(setup: Setup) -> list[float]:
    """GiB that each rank's allocator gave out; none on CPUs."""
    if setup.device.type != "cuda":
        return []
    mine = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device=setup.device)
    all_peaks = [torch.empty_like(mine) for _ in range(setup.world)]
    dist.all_gather(all_peaks, mine)
    return [round(float(peak), 1) for peak in all_peaks]


def measure(setup: Setup, name: str) -> dict:
    options = setup.options
    kind, layout = SCHEDULES[name]
    indices, total = stages_of(layout, setup.rank, setup.world)
    stages = [build_stage(setup, index, total) for index in indices]
    schedule = getattr(schedules, kind)(stages[0] if layout == "one" else stages, options.mb, loss_fn=setup.loss)
    generator = torch.Generator(device=setup.device).manual_seed(7)
    size = (options.mb * options.mbs, options.seq)
    tokens, targets = (torch.randint(0, options.vocab, size, device=setup.device, generator=generator)
                       for _ in range(2))
    inputs = (tokens,) if 0 in indices else ()
    seconds = []
    for step in range(options.warmup + options.steps):
        if step == options.warmup and setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        setup.meet()
        begin = time.perf_counter()
        schedule.step(*inputs, **({"target": targets, "losses": []} if total - 1 in indices else {}))
        setup.meet()
        seconds.append(time.perf_counter() - begin)
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)
    timed = seconds[options.warmup:]
    median = statistics.median(timed)
    return {"step_ms": round(1e3 * median, 1), "samples_ms": [round(1e3 * one, 1) for one in timed],
            "tok_s": round(tokens.numel() / median), "peak_gib": peaks_of(setup)}


def run(setup: Setup) -> None:
    options = setup.options
    for name in options.schedules.split(","):
        row = {"peer": "torch-pipe", "kind": name, "mb": options.mb, "mbs": options.mbs, "seq": options.seq,
               "compile": options.compile, "torch": torch.__version__}
        try:
            row |= measure(setup, name)
        except Exception as error:  # what a schedule refuses is told in many types, and on every rank
            print(json.dumps(row | {"rank": setup.rank, "refused": repr(error)[:300]}), flush=True)
            os._exit(1)  # another rank may wait for this one, and the launcher ends it
        if setup.rank == 0:
            print(json.dumps(row), flush=True)
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=4096, help=f"width, a multiple of the head size {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--mb", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--mbs", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="separated by commas")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block and the loss")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    if unknown := set(options.schedules.split(",")) - set(SCHEDULES):
        parser.error(f"no schedule {min(unknown)}; there are {', '.join(SCHEDULES)}")
    if options.dim % HEAD_DIM:
        parser.error(f"--dim is a multiple of {HEAD_DIM}, not {options.dim}")
    device = torch.device(options.device)
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo",
                            device_id=device if options.device == "cuda" else None)
    torch.manual_seed(0)
    loss = torch.compile(mean_loss, fullgraph=True) if options.compile else mean_loss
    run(Setup(options, dist.get_rank(), dist.get_world_size(), device, loss))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
