"""What the PyTorch and the DeepSpeed peer share: options, data, optimizer, timed steps, report.

With --config (what `trireme config show --json` prints), --tokens (our train-*.tokens, in order)
and --init (our weights, safetensors) a peer trains our model from our weights on our windows in our
order, with our optimizer constants, learning rates and clipping, so that its "losses" can be held
against ours. --device cpu tries that without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from same_data import Tokens, learning_rate
from same_weights import load_weights
from torch_model import MODELS, Model, Shape, flops_per_token, shape_of


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-1b", choices=MODELS)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--mbs", type=int, default=4, help="sequences per micro-batch of a rank")
    parser.add_argument("--accum", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--compile-loss", action="store_true", help="also compile the loss, as torchtitan does")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--config", default="", help="our config as JSON: shape, optimizer, seed")
    parser.add_argument("--tokens", nargs="+", default=[], help="shards of the training split")
    parser.add_argument("--init", default="", help="initial weights")


@dataclass(frozen=True)
class Setup:
    options: argparse.Namespace
    shape: Shape
    rank: int
    world: int
    device: torch.device
    same: dict | None  # our config, when our run is repeated

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.options.dtype == "bf16" else torch.float32

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def grad_clip(self) -> float:
        return self.same["train"]["grad_clip"] if self.same else 1.0


def set_up(options: argparse.Namespace) -> Setup:
    """From the options and a launcher's environment variables. Joins no process group."""
    given = [bool(value) for value in (options.config, options.tokens, options.init)]
    if any(given) and not all(given):
        raise SystemExit("--config, --tokens and --init go together")
    same = None
    if options.config:
        with open(options.config) as file:
            same = json.load(file)["config"]
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("high")
    return Setup(options, shape_of(same) if same else MODELS[options.model],
                 int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), device, same)


def build_model(setup: Setup) -> Model:
    """On the device, in fp32."""
    same = setup.same
    with torch.device(setup.device):
        model = Model(setup.shape, setup.options.seq,
                      same["model"]["rope_theta"] if same else 500000.0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    if same:
        load_weights(model, setup.options.init, same["model"]["family"])
    return model


def adamw_arguments(setup: Setup, parameters: Iterable[nn.Parameter]) -> dict:
    """Those of torch.optim.AdamW. A run like ours decays matrices only."""
    arguments = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    if not setup.same:
        return arguments | {"params": list(parameters)}
    optim, parameters = setup.same["optim"], list(parameters)
    groups = [{"params": [p for p in parameters if p.dim() >= 2]},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return arguments | {"params": groups, "lr": optim["lr"], "eps": optim["eps"],
                        "betas": (optim["beta1"], optim["beta2"]),
                        "weight_decay": optim["weight_decay"]}


def batch_source(setup: Setup) -> Callable[[int], Sequence[Tensor]]:
    """This rank's micro-batches of step 0, 1, ...: (micro_batch, T + 1) ids on the device."""
    options, rank, world = setup.options, setup.rank, setup.world
    if setup.same:
        tokens = Tokens(options.tokens, options.seq)
        global_batch = options.mbs * options.accum * world

        def ours(step: int) -> Sequence[Tensor]:
            rows = tokens.rows(setup.same["seed"], step, global_batch, rank, world)
            return torch.tensor(rows, device=setup.device).split(options.mbs)

        return ours
    generator = torch.Generator(device=setup.device).manual_seed(7 + rank)
    size = (options.mbs, options.seq + 1)

    def fresh(_: int) -> Sequence[Tensor]:
        return [torch.randint(0, setup.shape.vocabulary, size, device=setup.device,
                              generator=generator) for _ in range(options.accum)]

    return fresh


def synchronize(setup: Setup) -> None:
    if setup.is_cuda:
        torch.cuda.synchronize()


def meet(setup: Setup) -> None:
    """Returns when the devices of all ranks have nothing left to do."""
    synchronize(setup)
    if dist.is_initialized():
        dist.barrier()
    synchronize(setup)


class Clock:
    """When steps end: on a GPU without a wait in between, so that the host can run ahead."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.marks = setup, []

    def mark(self) -> None:
        if self.setup.is_cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        synchronize(self.setup)
        if self.setup.is_cuda:
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:])]
        return [b - a for a, b in zip(self.marks, self.marks[1:])]


def run_steps(setup: Setup, optimizer_groups: Sequence[dict],
              train_step: Callable[[Sequence[Tensor]], Tensor]) -> tuple[list[float], list[float]]:
    """Seconds of the timed steps and the losses of all, which are means over the ranks.

    `train_step` takes micro-batches to this rank's mean loss. Rank 0 reports the end of the first
    step on stdout, once the device is done with it."""
    options, batches = setup.options, batch_source(setup)
    clock, losses = Clock(setup), []
    for step in range(options.warmup + options.steps):
        parts = batches(step)
        if setup.same:
            rate = learning_rate(setup.same["optim"], step + 1, options.warmup + options.steps)
            for group in optimizer_groups:
                group["lr"] = rate
        if step == options.warmup:
            meet(setup)
            if setup.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            clock.mark()
        losses.append(train_step(parts).detach().double())
        if step >= options.warmup:
            clock.mark()
        if step == 0:
            synchronize(setup)
            if setup.rank == 0:
                print(json.dumps({"step": 1}), flush=True)
    totals = torch.stack(losses)
    if setup.world > 1:
        dist.all_reduce(totals)
    return clock.seconds(), (totals / setup.world).tolist()


def report(setup: Setup, peer: dict, parameters: int, seconds: Sequence[float],
           losses: Sequence[float]) -> None:
    """One JSON line of rank 0. `peer` says what is particular to this one."""
    if setup.rank != 0:
        return
    options, median = setup.options, statistics.median(seconds)
    tokens = options.mbs * options.accum * options.seq
    flops = flops_per_token(setup.shape, options.seq) * tokens / median
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if setup.is_cuda else resident
    result = peer | {
        "model": options.model, "params": parameters, "world": setup.world, "seq": options.seq,
        "mbs": options.mbs, "accum": options.accum, "compile": options.compile,
        "dtype": options.dtype, "torch": torch.__version__,
        "settings": {key: value for key, value in vars(options).items() if value not in ("", [])}
                    | {"allocator": os.environ.get("PYTORCH_ALLOC_CONF", "default")},
        "step_ms": round(median * 1e3, 2), "tok_s_gpu": round(tokens / median),
        "samples": {"tok_s_gpu": [round(tokens / value) for value in seconds]},
        "tflops_gpu": round(flops / 1e12, 4), "mfu989": round(flops / 989.4e12, 4),
        "peak_alloc_gib": round(peak / 2**30, 2),
        "loss0": round(losses[0], 4), "lossN": round(losses[-1], 4),
    }
    if setup.is_cuda:
        result["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    if setup.same:
        result |= {"losses": losses, "seconds": seconds}
    print(json.dumps(result), flush=True)


def leave(setup: Setup) -> None:
    if setup.is_cuda:
        dist.destroy_process_group()
    elif dist.is_initialized():
        dist.barrier()
        os._exit(0)  # Gloo's threads may outlive their group, which would abort the process
