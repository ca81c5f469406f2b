"""Cases of models of images: what both sides train, the files that they read, and the PyTorch peers."""

from __future__ import annotations

import argparse
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from cases import ALLOCATOR, ALONE, Case, torchrun
from programs import EXIT_USAGE, PEERS, BenchError, Side, run_program, say

# What a device computes in, and the peers of which "best" tries each: PRECISION-MODE[-inner][-contiguous].
PRECISIONS = {"cuda": ("amp", "bf16", "fp32"), "cpu": ("fp32", "amp", "bf16")}
MODES = ("eager", "compile", "graphs", "autotune", "autotune_nographs")
SUFFIXES = {"inner": "--inner", "contiguous": "--contiguous"}
TRIED = {"cuda": ("amp-compile", "amp-graphs", "bf16-compile", "bf16-graphs"),
         "cpu": ("fp32-eager", "fp32-eager-contiguous", "fp32-compile", "fp32-compile-contiguous")}
GPU = {"cases": "resnet50:1:augment=1;resnet18-cifar:1,2", "peer": "best", "warmup": 20}
CPU = {"cases": "small-resnet20:1;small-resnet20:1:threads=2;small-resnet20:2", "warmup": 10,
       "peer": "best/fp32-eager/fp32-eager-contiguous,best/fp32-compile/fp32-compile-contiguous"}


@dataclass(frozen=True)
class Work:
    """What both sides do. Images are as many as whole steps take, so that no step of an epoch is shorter."""

    model: str  # a preset of ours
    files: str  # "jpeg" by class, or "cifar": CIFAR-10's binary files
    batch: int  # images of a rank
    steps: int
    image_size: int
    classes: int
    images: int
    norm: str = "batch"
    label_smoothing: float = 0.0
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    augment: int = 0  # 1: jpeg random resized crop and flip, cifar pad by 4, crop and flip
    policy: str = "ddp"  # ours; the peer is DDP
    threads: int = 1  # of a rank, on CPUs
    depth: int = 0  # 0: the preset's
    width: int = 0
    peer: str = ""  # in place of --peer; with "+" between several


WORKS = {work.model: work for work in (
    Work("resnet50", "jpeg", batch=256, steps=60, image_size=224, classes=1000, images=5120, label_smoothing=0.1),
    Work("resnet18", "jpeg", batch=256, steps=60, image_size=224, classes=1000, images=5120, label_smoothing=0.1),
    Work("resnet18-cifar", "cifar", batch=512, steps=200, image_size=32, classes=10, images=51200),
    Work("small-resnet20", "cifar", batch=64, steps=40, image_size=32, classes=10, images=6400, norm="group"),
)}
OPTIONS = ("batch", "steps", "images", "classes", "image_size", "norm", "label_smoothing", "augment", "policy",
           "threads", "depth", "width", "peer")


def read_case(text: str) -> tuple[Work, list[int]]:
    """MODEL:RANKS[,RANKS][:KEY=VALUE,...]"""
    model, _, rest = text.strip().partition(":")
    worlds, _, options = rest.partition(":")
    if model not in WORKS:
        raise BenchError(EXIT_USAGE, f'there is no model "{model}"; choose from {", ".join(WORKS)}')
    values = vars(WORKS[model]).copy()
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in OPTIONS:
            raise BenchError(EXIT_USAGE, f'"{option}" is not an option of a case; choose from {", ".join(OPTIONS)}')
        try:
            values[key] = type(values[key])(value)
        except ValueError:
            raise BenchError(EXIT_USAGE, f'"{option}": {key} must be of type {type(values[key]).__name__}') from None
    try:
        ranks = [int(world) for world in worlds.split(",")]
    except ValueError:
        raise BenchError(EXIT_USAGE, f'"{text}" is not MODEL:RANKS[,RANKS][:KEY=VALUE,...]') from None
    return Work(**values), ranks


# Files


def data_commands(work: Work, folder: Path, arguments: argparse.Namespace) -> list[list[str]]:
    """Of which the first that works is enough: digits need fonts and a build with FreeType."""
    pictures = [arguments.python, f"{PEERS}/make_pictures.py", str(folder), f"--images={work.images}",
                f"--classes={work.classes}"]
    if work.files == "jpeg":
        return [[*pictures, f"--side={picture_side(work)}"]]
    digits = [arguments.bin, "data", "make", "digits", "--format=cifar10", f"--out={folder}",
              f"--train={work.images}", "--test=64"]
    return [digits, [*pictures, "--cifar"]]


def picture_side(work: Work) -> int:
    """256 for models of 224."""
    return work.image_size * 8 // 7


def data_folder(work: Work, arguments: argparse.Namespace) -> Path:
    name = f"cifar-{work.images}"
    if work.files == "jpeg":
        name = f"jpeg-{work.images}-{work.classes}-{picture_side(work)}"
    return Path(arguments.data_dir) / name


def with_one_step(work: Work, ranks: int) -> Work:
    """On images that are all in each step, so that it does not matter which comes first."""
    return replace(work, images=work.batch * ranks)


def same_images(work: Work, ranks: int, arguments: argparse.Namespace) -> tuple[dict, dict]:
    """Options with which both sides train on the same, in the same way."""
    if work.files != "cifar":
        raise BenchError(EXIT_USAGE, f"--losses is for files of CIFAR, not for {work.model}, whose pictures both sides "
                                     "decode and resize in their own ways")
    folder = data_folder(with_one_step(work, ranks), arguments)
    return ({"data.path": folder, "data.pad": 0, "data.flip": "false", "optim.weight_decay": 0},
            {"data": folder, "weight-decay": 0})


def prepare(work: Work, arguments: argparse.Namespace) -> None:
    """Makes the files, unless they are there from another time."""
    folder = data_folder(work, arguments)
    if folder.exists():
        return
    say(f"writing {work.images} images to {folder}")
    unfinished = folder.with_name(f"{folder.name}-unfinished")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    *others, last = data_commands(work, unfinished, arguments)
    for command in (*others, last):
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            run_program(Side(command, ""), arguments.timeout)
            break
        except BenchError as error:
            if command is last:
                raise
            say(f"  {error}; using what {PEERS}/make_pictures.py draws")
    unfinished.rename(folder)


# Command lines


def ours_command(work: Work, ranks: int, device: str, arguments: argparse.Namespace) -> list[str]:
    shape = [f"--model.{key}={value}" for key, value in (("depth", work.depth), ("width", work.width)) if value]
    varied = {"jpeg": ["--data.resized_crop=true", "--data.flip=true"], "cifar": ["--data.pad=4", "--data.flip=true"]}
    return [
        arguments.bin, "train", f"--model.preset={work.model}", *shape, f"--model.norm={work.norm}",
        f"--model.classes={work.classes}", f"--model.image_size={work.image_size}",
        f"--model.label_smoothing={work.label_smoothing}", "-n", str(ranks), "--json", f"--device={device}",
        f"--precision.compute={'bf16' if device == 'cuda' else 'fp32'}", f"--parallel.policy={work.policy}",
        f"--data.path={data_folder(work, arguments)}", "--data.val_fraction=0",
        *(varied[work.files] if work.augment else []),
        f"--train.rank_batch={work.batch}", f"--train.steps={arguments.warmup + work.steps}", "--train.grad_clip=0",
        "--train.val_batches=0", "--checkpoint.final_weights=false", "--optim.name=sgd", f"--optim.lr={work.lr}",
        f"--optim.momentum={work.momentum}", f"--optim.weight_decay={work.weight_decay}", "--optim.schedule=constant",
        *shlex.split(arguments.ours_args),
    ]


def peer_options(name: str, device: str) -> list[str]:
    """What the peer program is told for "bf16-autotune-inner" and its like."""
    precision, mode, *suffixes = name.split("-") if "-" in name else (name, "")
    if precision not in PRECISIONS[device] or mode not in MODES or not set(suffixes) <= set(SUFFIXES):
        raise BenchError(EXIT_USAGE, f"there is no peer {name}; use PRECISION-MODE[-inner][-contiguous] of "
                                     f"{', '.join(PRECISIONS[device])} and {', '.join(MODES)}, or best[/NAME...]")
    return [f"--precision={precision}", f"--mode={mode.replace('_', '-')}", *(SUFFIXES[word] for word in suffixes)]


def peer_command(name: str, work: Work, ranks: int, device: str, arguments: argparse.Namespace) -> list[str]:
    return torchrun(arguments.python, ranks) + [
        f"{PEERS}/torch_vision.py", f"--model={work.model}", f"--depth={work.depth}", f"--width={work.width}",
        f"--norm={work.norm}", f"--classes={work.classes}", f"--image-size={work.image_size}",
        f"--label-smoothing={work.label_smoothing}", f"--batch={work.batch}", f"--steps={work.steps}",
        f"--warmup={arguments.warmup}", f"--lr={work.lr}", f"--momentum={work.momentum}",
        f"--weight-decay={work.weight_decay}", f"--device={device}",
        f"--threads={work.threads if device == 'cpu' else 0}", f"--data={data_folder(work, arguments)}",
        f"--kind={work.files}", *(["--augment"] if work.augment else []), *peer_options(name, device),
        *shlex.split(arguments.peer_args),
    ]


def vision_case(work: Work, ranks: int, against: str, device: str, arguments: argparse.Namespace) -> Case:
    environment = {} if device == "cuda" else {"OMP_NUM_THREADS": str(work.threads)}
    beside = (ALONE if ranks == 1 else {}) | (ALLOCATOR if device == "cuda" else {})

    def peer(name: str) -> Side:
        return Side(peer_command(name, work, ranks, device, arguments), "images_per_s", rate=True,
                    bound="synthetic_images_per_s", environment=environment | beside)

    candidates = {}
    if against.partition("/")[0] == "best":
        candidates = {name: peer(name) for name in against.split("/")[1:] or TRIED[device]}
    return Case(
        label={"model": work.model, "device": device, "policy": work.policy, "ranks": ranks, "batch": work.batch,
               "image_size": work.image_size, "files": work.files, "augment": bool(work.augment), "norm": work.norm,
               "against": against}
              | ({"gpus": ranks} if device == "cuda" else {"threads": work.threads})
              | {key: getattr(work, key) for key in ("depth", "width") if getattr(work, key)},
        unit=f"images/s a {'GPU' if device == 'cuda' else 'rank'}",
        ours=Side(ours_command(work, ranks, device, arguments), "tokens_per_s", scale=1.0 / ranks, rate=True,
                  environment=environment),
        peer=next(iter(candidates.values())) if candidates else peer(against),
        candidates=candidates,
        trial_steps=max(8, work.steps // 3),
        same=same_images(work, ranks, arguments) if arguments.losses else None,
    )


def vision_cases(arguments: argparse.Namespace) -> list[Case]:
    device = "cuda" if arguments.mode == "vision" else "cpu"
    cases, works = [], []
    for text in filter(None, arguments.cases.split(";")):
        work, worlds = read_case(text)
        works += [work] + [with_one_step(work, ranks) for ranks in worlds if arguments.losses]
        names = (work.peer or arguments.peer).replace("+", ",").split(",")
        cases += [vision_case(work, ranks, against, device, arguments) for ranks in worlds for against in names]
    for work in works:
        prepare(work, arguments)
    return cases
