"""PyTorch peer on images: trains a residual network and prints a JSON line.

    python torch_vision.py --model resnet50 --batch 256 --data FOLDER --mode autotune
    python -m torch.distributed.run --standalone --nproc-per-node 2 torch_vision.py --device cpu --dtype fp32 ...

After a first step both ways of feeding it are timed, each after a warm-up: batches that are on the device already
("synthetic_images_per_s"), then, with --data, those that its own input pipeline reads from files
("images_per_s"): workers decode into bytes, a stream of its own copies them, the device scales them. Rates are of
one rank. Fused SGD, channels-last, the whole model with its loss compiled and cudnn.benchmark are the defaults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from image_files import DECODERS, CifarImages, JpegImages, Parts, channels_last, choose_decoder, make_loader
from same_weights import Weights
from torch_vision_model import MODELS, ResNet, Trained
from training import Clock, leave, meet, synchronize

COMPILERS = {"eager": None, "compile": "default", "graphs": "reduce-overhead", "autotune": "max-autotune",
             "autotune-nographs": "max-autotune-no-cudagraphs"}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setup:
    """What training.Clock and its like read, too."""

    options: argparse.Namespace
    rank: int
    world: int
    device: torch.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def set_up(options: argparse.Namespace) -> Setup:
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    elif options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(1234)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo",
                                device_id=device if options.device == "cuda" else None)
    return Setup(options, int(os.environ.get("RANK", 0)), world, device)


# Model and optimizer


class MasterSGD:
    """SGD on fp32 copies of what is trained in less."""

    def __init__(self, parameters: list[nn.Parameter], make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self.low = [p for p in parameters if p.dtype != torch.float32]
        self.masters = [p.detach().float().clone(memory_format=torch.preserve_format) for p in self.low]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.high = [p for p in parameters if p.dtype == torch.float32]
        self.inner = make(self.masters + self.high)

    def step(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], [p.grad for p in self.low])
        self.inner.step()
        with torch.no_grad():
            torch._foreach_copy_(self.low, self.masters)

    def zero_grad(self) -> None:
        for parameter in self.low + self.high:
            parameter.grad = None


def make_optimizer(parameters: list[nn.Parameter], options: argparse.Namespace) -> torch.optim.Optimizer | MasterSGD:
    def sgd(some: list[Tensor]) -> torch.optim.SGD:
        kind = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[options.optimizer]
        decayed = [{"params": [p for p in some if p.dim() > 1], "weight_decay": options.weight_decay},
                   {"params": [p for p in some if p.dim() <= 1], "weight_decay": 0.0}]
        return torch.optim.SGD(decayed, lr=options.lr, momentum=options.momentum, **kind)

    return MasterSGD(parameters, sgd) if options.precision == "bf16" else sgd(parameters)


def to_bf16(network: nn.Module) -> None:
    """Parameters but those of norms, whose statistics are fp32 on our side, too."""
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.to(torch.bfloat16)


@torch.no_grad()
def load_weights(network: nn.Module, path: str) -> None:
    """Names are the same on both sides."""
    weights = Weights(path)
    for name, parameter in network.named_parameters():
        parameter.copy_(weights[name])


def build(setup: Setup, mean: list[float], deviation: list[float]) -> tuple[nn.Module, nn.Module]:
    """The model with its loss, and the same as it is called: compiled, replicated."""
    options = setup.options
    network = MODELS[options.model]
    network = replace(network, depth=options.depth or network.depth, width=options.width or network.width,
                      norm=options.norm or network.norm)
    model = Trained(ResNet(network, options.classes), mean, deviation, options.label_smoothing)
    if options.init:
        load_weights(model.network, options.init)
    model.to(setup.device)
    if options.precision == "bf16":
        to_bf16(model.network)
    if options.channels_last:
        model.network.to(memory_format=torch.channels_last)
    compiler = COMPILERS[options.mode]

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, mode=compiler) if compiler else module

    if setup.world == 1:
        return model, compiled(model)
    # Compiled inside, backward is one piece, and gradients travel behind it; outside it is cut by buckets.
    inner = compiled(model) if options.inner else model
    replicas = DistributedDataParallel(
        inner, device_ids=[setup.device.index] if setup.is_cuda else None, gradient_as_bucket_view=True,
        broadcast_buffers=False, static_graph=options.inner or not compiler, bucket_cap_mb=options.bucket_mb)
    if options.precision == "amp":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        replicas.register_comm_hook(None, bf16_compress_hook)
    return model, replicas if options.inner else compiled(replicas)


# Batches


def synthetic(setup: Setup) -> Iterator[Batch]:
    """A few batches by turns, on the device from the start."""
    options = setup.options
    generator = torch.Generator(device=setup.device).manual_seed(7 + setup.rank)
    shape = (options.batch, 3, options.image_size, options.image_size)
    batches = []
    for _ in range(2):
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=setup.device, generator=generator)
        labels = torch.randint(0, options.classes, (options.batch,), device=setup.device, generator=generator)
        batches.append((channels_last(pixels) if options.channels_last else pixels, labels))
    while True:
        yield from batches


class DeviceBatches:
    """Whole batches on the device, of parts that a loader gives. On a GPU the next batch is copied beside the step
    that computes on this one."""

    SLOTS = 2

    def __init__(self, setup: Setup, parts: Iterator[Batch]) -> None:
        options = setup.options
        self.setup, self.parts, self.batch = setup, parts, options.batch
        shape = (options.batch, 3, options.image_size, options.image_size)
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.slots = [(torch.empty(shape, dtype=torch.uint8, device=setup.device, memory_format=layout),
                       torch.empty(options.batch, dtype=torch.long, device=setup.device)) for _ in range(self.SLOTS)]
        if setup.is_cuda:
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            self.used = [torch.cuda.Event() for _ in self.slots]  # when the step that read a slot was done
        self.turn = 0
        self.filled = self.fill()

    def fill(self) -> tuple[int, torch.cuda.Event | None]:
        """Begins to copy a batch into the next slot."""
        slot, self.turn = self.turn, (self.turn + 1) % self.SLOTS
        pixels, labels = self.slots[slot]
        ready = None
        with contextlib.ExitStack() as stack:
            if self.setup.is_cuda:
                stack.enter_context(torch.cuda.stream(self.stream))
                self.stream.wait_event(self.used[slot])
            at = 0
            while at < self.batch:
                some, some_labels = next(self.parts)
                pixels[at : at + len(some)].copy_(some, non_blocking=True)
                labels[at : at + len(some)].copy_(some_labels, non_blocking=True)
                at += len(some)
            if self.setup.is_cuda:
                ready = torch.cuda.Event()
                ready.record(self.stream)
        return slot, ready

    def __iter__(self) -> Iterator[Batch]:
        while True:
            slot, ready = self.filled
            if ready:
                torch.cuda.current_stream().wait_event(ready)
            yield self.slots[slot]  # the caller queues its step before it asks for the next
            if ready:
                self.used[slot].record()
            self.filled = self.fill()


def open_images(options: argparse.Namespace) -> CifarImages | JpegImages:
    if options.kind == "cifar":
        return CifarImages(options.data, options.augment)
    return JpegImages(options.data, options.image_size, options.augment, choose_decoder(options.decoder))


def from_files(setup: Setup, images: CifarImages | JpegImages) -> Iterator[Batch]:
    options = setup.options
    part = options.part if options.kind == "jpeg" else options.batch
    sampler = Parts(len(images), options.batch, part, setup.rank, setup.world, seed=11)
    loader = make_loader(images, sampler, workers_of(setup), part * 3 * options.image_size**2, setup.is_cuda)
    return iter(DeviceBatches(setup, iter(loader)))


def workers_of(setup: Setup) -> int:
    """Of one rank: nearly all its cores where pictures are decoded, a few where batches are only gathered."""
    options = setup.options
    if options.workers is not None:
        return options.workers
    if not setup.is_cuda:
        return 0
    cores = len(os.sched_getaffinity(0)) // setup.world
    return max(1, cores - 2 if options.kind == "jpeg" else min(4, cores // 2))


# Training


class Training:
    def __init__(self, setup: Setup, mean: list[float], deviation: list[float]) -> None:
        self.setup, self.losses, self.peak_bytes = setup, [], 0
        self.model, self.net = build(setup, mean, deviation)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_optimizer(self.parameters, setup.options)

    def step(self, batch: Batch) -> None:
        options = self.setup.options
        if COMPILERS[options.mode]:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.setup.device.type, torch.bfloat16, enabled=options.precision == "amp"):
            loss = self.net(*batch)
        loss.backward()
        self.losses.append(loss.detach().clone())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, batches: Iterator[Batch]) -> list[float]:
        """Seconds of the steps behind the warm-up."""
        setup, options = self.setup, self.setup.options
        clock = Clock(setup)
        for step in range(options.warmup + options.steps):
            if step == options.warmup:
                meet(setup)
                if setup.is_cuda:
                    torch.cuda.reset_peak_memory_stats()
                clock.mark()
            self.step(next(batches))
            if step >= options.warmup:
                clock.mark()
        seconds = clock.seconds()
        self.peak_bytes = max(self.peak_bytes, peak_bytes(setup))
        return seconds


def rates(seconds: list[float], batch: int) -> tuple[float, list[float]]:
    """Over all steps, so that a wait for data counts, and of each."""
    return batch * len(seconds) / sum(seconds), [round(batch / value, 2) for value in seconds]


def peak_bytes(setup: Setup) -> int:
    if setup.is_cuda:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(setup: Setup) -> dict:
    options = setup.options
    images = open_images(options) if options.data else None
    if options.init:
        return {"losses": same_losses(setup, images)}
    mean, deviation = images.mean_and_deviation() if images else ([0.5] * 3, [0.25] * 3)
    training = Training(setup, mean, deviation)
    batches = synthetic(setup)
    training.step(next(batches))
    synchronize(setup)
    if setup.rank == 0:
        print(json.dumps({"step": 1}), flush=True)
    found, samples = {}, {}

    def note(name: str, source: Iterator[Batch]) -> None:
        found[name], samples[name] = rates(training.timed(source), options.batch)

    note("synthetic_images_per_s", batches)
    if images:
        note("images_per_s", from_files(setup, images))
    losses = torch.stack(training.losses).tolist()
    return {"peer": "torch-vision", "model": options.model, "params": sum(p.numel() for p in training.parameters),
            "world": setup.world, "torch": torch.__version__, **found, "samples": samples,
            "loss0": losses[0], "lossN": losses[-1], "peak_bytes": training.peak_bytes,
            **({"peak_reserved_bytes": torch.cuda.max_memory_reserved()} if setup.is_cuda else {}),
            "settings": settings_of(setup)}


def same_losses(setup: Setup, images: CifarImages | JpegImages) -> list[float]:
    """Of --steps steps from --init, means over the ranks."""
    training = Training(setup, *images.mean_and_deviation())
    batches = from_files(setup, images)
    for _ in range(setup.options.steps):
        training.step(next(batches))
    losses = torch.stack(training.losses).double()
    if setup.world > 1:
        dist.all_reduce(losses)
    return (losses / setup.world).tolist()


def settings_of(setup: Setup) -> dict:
    options = setup.options
    said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()
            if value not in ("", None)}
    own = {"workers": workers_of(setup), "threads": torch.get_num_threads(),
           "allocator": os.environ.get("PYTORCH_ALLOC_CONF", "default")}
    if options.kind == "jpeg":
        own["decoder"] = choose_decoder(options.decoder)
    return said | own


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--depth", type=int, default=0, help="layers; 0: those of the model")
    parser.add_argument("--width", type=int, default=0, help="channels of the first stage; 0: those of the model")
    parser.add_argument("--norm", choices=["batch", "group"], help="default: that of the model")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256, help="images per rank")
    parser.add_argument("--steps", type=int, default=50, help="timed steps for each source of batches")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--mode", choices=COMPILERS, default="compile", help="how the model is compiled, if at all")
    parser.add_argument("--precision", choices=["amp", "bf16", "fp32"], default="amp",
                        help="amp: autocast to bf16; bf16: weights too, with fp32 masters")
    parser.add_argument("--inner", action="store_true", help="compile inside DDP rather than around it")
    parser.add_argument("--contiguous", dest="channels_last", action="store_false", help="channels first")
    parser.add_argument("--optimizer", choices=["fused", "foreach", "loop"], default="fused")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--threads", type=int, default=0, help="on CPUs: threads per rank; 0: torch's choice")
    parser.add_argument("--data", type=Path, help="folder of images; without it, synthetic batches only")
    parser.add_argument("--kind", choices=["cifar", "jpeg"], default="jpeg", help="kind of the files in --data")
    parser.add_argument("--augment", action="store_true",
                        help="jpeg: random resized crop and flip, cifar: pad, crop and flip")
    parser.add_argument("--decoder", choices=["auto", *DECODERS], default="auto")
    parser.add_argument("--init", help="our weights, safetensors: train --steps steps from them on images as they are, "
                                       "and print the losses")
    parser.add_argument("--workers", type=int, help="loader processes per rank; default: from its cores")
    parser.add_argument("--part", type=int, default=16, help="pictures that a worker decodes at a time")
    options = parser.parse_args()
    if options.init and not options.data:
        parser.error("--init goes with --data")
    options.augment = options.augment and not options.init
    return options


def main() -> None:
    setup = set_up(parse_arguments())
    result = train(setup)
    if setup.rank == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        leave(setup)


if __name__ == "__main__":
    main()
