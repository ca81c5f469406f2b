#!/usr/bin/env python3
"""Compares the speed of trireme with PyTorch's or DeepSpeed's on this machine.

Both programs run in turns (A B, B A, A B, ...), each run in a fresh process. A run's value is the median of its
steps after the warm-up. The result is the median of the ratios ours / peer of all alternations, so a machine that
becomes slower between two alternations does not change it. A ratio above 1 means that ours is faster.

    bench/compare.py cpu [--peer eager] [--out FILE]
    bench/compare.py gpu --cases "llama-1b:fsdp:1,2,4;gpt2-124m:fsdp:1:seq=1024,micro_batch=64"
                         [--peer best] [--beside] [--budget-seconds N] [--losses N] [--gemm] [--profile N]
    bench/compare.py cpu-smoke --losses 20     the comparison of GPUs with tiny models in fp32 on CPUs
    bench/compare.py vision [--cases "resnet50:1:augment=1;resnet18-cifar:1,2"] [--peer best/amp-compile/bf16-autotune]
                         [--budget-seconds N] [--trial-seconds N] [--profile N]
    bench/compare.py vision-cpu                small_resnet in fp32 on CPUs
    bench/compare.py --ours CMD --peer CMD --out FILE [--metric tokens_per_s] [--label NAME]

Programs of your own (--ours, --peer) print JSON lines on stdout. A line with "step" is a step. If no line has one, the
last line that has the metric gives the value, and its "samples" the samples.

Peers of text models:
    torch         compiles blocks and loss
    torch-amp     the same without a wrapper, on one GPU
    torch-whole   compiles the whole model with its loss, on one GPU or under ddp
    eager, compile   on CPUs; "compile" compiles the whole model
    deepspeed     the default for zero1, zero2 and zero3 where --python can import it
    best          tries the ones that a case allows for a few steps, and measures the fastest; the default otherwise
    replicas      our own program on every GPU alone, all at once: what there would be if communication cost nothing
                  (--ours-args count here too)
    bf16          our own program without --fp8
    NAME-fp8      with --fp8: that peer, converted by torchao; "best" tries these as well
--peer may name several, each of which becomes a case. All peers on GPUs use fused AdamW, expandable segments, new
random tokens in each step, and an FSDP2 root that is not resharded.

Peers of image models are PRECISION-MODE. PRECISION is amp (autocast), bf16 (weights as well, with fp32 masters) or
fp32. MODE is eager, compile, graphs (reduce-overhead), autotune (max-autotune) or autotune_nographs; "-inner" behind it
compiles inside of DDP, and "-contiguous" puts channels first. "best" tries the usual ones, best/NAME/NAME the ones
named. Both sides read the same files, which are made once in --data-dir, each through its own input pipeline. A run's
value is the rate of all its steps together, so that waiting for data counts. A case keeps a second ratio: to the same
peer process on batches that are on the device already. Options of a case are batch, steps, images, augment, peer ("+"
between several), policy, threads, norm, depth, width, and others that vision.py lists.

--beside          runs cases that do not need all GPUs at the same time, each on GPUs of its own
--budget-seconds  starts nothing that would not end in time; FILE is written after each alternation and holds what was
                  finished
--losses N        first trains both sides for N steps on the same tokens from the same weights, and the peer once more
                  from the weights of another seed; the case keeps all losses. Speed is then measured with data of each
                  side's own: text for ours, random tokens for the peer. Image models train on as many images as a step
                  takes, unchanged, so that their order does not matter; CIFAR's files alone can do that

The start-up of a run is the time from starting the program, launcher included, to its first line with "step". The
peer's compile cache is empty in the first run of a case ("first") and filled in later ones, whose median is "warm".

TFLOP/s count 6 x (matmul weights of blocks and head) + 6 x T x heads x head_dim x layers for a token, of our model for
both sides. MFU is relative to 989.4 TFLOP/s, an H100's or H200's.

FILE holds commit, machine, settings, commands, environment and every sample.
Exit codes: 0 measured, 1 a command failed, 2 wrong usage, 3 a program is missing, 8 a ratio is below --require or
losses do not agree.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import vision
from cases import (CPU_PEERS, GPU, OWN_PEERS, SMOKE, TORCHAO, Case, cpu_cases, import_error, pair_case,
                   training_cases)
from losses import complaint
from machine import describe_commit, describe_machine, environment, load_warning, visible_gpus
from programs import EXIT_BELOW, EXIT_ENVIRONMENT, ROOT, BenchError, say
from runs import Budget, measure

MODES = {"cpu": cpu_cases, "gpu": training_cases, "cpu-smoke": training_cases, "vision": vision.vision_cases,
         "vision-cpu": vision.vision_cases, "pair": pair_case}
DEFAULTS = {"gpu": GPU, "vision": vision.GPU, "vision-cpu": vision.CPU}  # of options; else SMOKE


def check_programs(cases: Sequence[Case]) -> None:
    """Before anything is measured, rather than an hour into the matrix."""
    for program in sorted({side.command[0] for case in cases for side in (case.ours, case.peer)}):
        if not (shutil.which(program) or shutil.which(str(ROOT / program))):
            raise BenchError(EXIT_ENVIRONMENT, f"there is no program {program}; build it, or choose "
                                               "another with --bin or --python")


def check_torch(arguments: argparse.Namespace) -> None:
    """Every case would end with a traceback of its peer."""
    own = set((arguments.peer or "none").split(",")) <= set(OWN_PEERS)
    if arguments.mode == "pair" or own:
        return
    if problem := import_error(arguments.python, "torch"):
        raise BenchError(EXIT_ENVIRONMENT, f"{arguments.python} cannot import torch for the peers: {problem}; choose a "
                                           "Python that can with --python")


def table(results: Sequence[dict]) -> str:
    lines = ["| case | ours | peer | ratio | min - max | start-up, s |",
             "|---|---:|---:|---:|---:|---:|"]
    for result in filter(lambda one: one["alternations"], results):
        keys = ("model", "policy", "ranks", "threads", "seq_len", "batch", "against")
        name = " ".join(f"{key} {result[key]}" if key != "model" else str(result[key])
                        for key in keys if key in result)
        ours, peer = (f"{result[side]['median']:,.0f}" for side in ("ours", "peer"))
        ratio, low, high = (f"{result[key]:.3f}" for key in ("ratio", "ratio_min", "ratio_max"))
        startup = "-"
        if "startup_ratio" in result:
            key = "warm" if "warm" in result["startup_ratio"] else "first"
            startup = " / ".join(f"{result[side]['startup_s'][key]:.1f}"
                                 for side in ("ours", "peer"))
        lines.append(f"| {name} | {ours} | {peer} | {ratio} | {low} - {high} | {startup} |")
        if bound := result.get("bound"):
            ratio, low, high = (f"{bound[key]:.3f}" for key in ("ratio", "ratio_min", "ratio_max"))
            lines.append(f"| beside a peer that reads nothing | {ours} | {bound['peer']['median']:,.0f} | {ratio} | "
                         f"{low} - {high} | - |")
    return "\n".join(lines)


def write_results(path: Path, mode: str, machine: dict, results: list[dict],
                  arguments: argparse.Namespace) -> None:
    """Through a temporary file: a matrix that is stopped leaves the cases it has finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "mode": mode,
        **describe_commit(arguments.commit),
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "alternations": arguments.alternations,
        "warmup_steps": arguments.warmup,
        "command": shlex.join(sys.argv).replace(str(Path.home()), "~"),
        "environment": environment(),
        "cases": results,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


class Book:
    """The results of all cases so far, and the file that holds them."""

    def __init__(self, out: Path, machine: dict, arguments: argparse.Namespace) -> None:
        self.out, self.machine, self.arguments = out, machine, arguments
        self.by_case: dict[int, dict] = {}
        self.failures: list[BenchError] = []
        self.lock = threading.Lock()

    def results(self) -> list[dict]:
        return [self.by_case[index] for index in sorted(self.by_case)]

    def note(self, index: int, result: dict) -> None:
        with self.lock:
            self.by_case[index] = result
            write_results(self.out, self.arguments.mode, self.machine, self.results(), self.arguments)

    def measure(self, index: int, case: Case, budget: Budget) -> None:
        """A case that fails keeps what it had, and does not end the others."""
        say(case.title())
        try:
            self.note(index, measure(case, self.arguments, budget,
                                     lambda result: self.note(index, result | {"unfinished": True})))
        except BenchError as error:
            say(f"[bench.compare] {case.title()}: {error}")
            self.failures.append(error)
            so_far = self.by_case.get(index, case.label | {"alternations": []})
            self.note(index, so_far | {"failed": str(error)})


def measure_in_turn(cases: Sequence[Case], book: Book, budget: Budget) -> None:
    for index, case in enumerate(cases):
        book.measure(index, case, budget)


class Gpus:
    """Lends GPUs by their names. Those who want most come first, so that nobody waits for ever."""

    def __init__(self, names: Sequence[str]) -> None:
        self.free = list(names)
        self.changed = threading.Condition()

    @contextmanager
    def lend(self, count: int) -> Iterator[list[str]]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            lent, self.free = self.free[:count], self.free[count:]
        try:
            yield lent
        finally:
            with self.changed:
                self.free = sorted(self.free + lent)
                self.changed.notify_all()


def measure_beside(cases: Sequence[Case], book: Book, budget: Budget) -> None:
    """Those that take all GPUs first, in turn, then the others beside each other."""
    names = visible_gpus()
    most = max(case.ranks for case in cases)
    if most > len(names):
        raise BenchError(EXIT_ENVIRONMENT, f"a case needs {most} GPUs, but there are {len(names)}")
    indexed = sorted(enumerate(cases), key=lambda item: -item[1].ranks)
    for index, case in indexed:
        if case.ranks == len(names):
            book.measure(index, case, budget)
    gpus = Gpus(names)

    def measure_one(item: tuple[int, Case]) -> None:
        index, case = item
        with gpus.lend(case.ranks) as lent:
            book.measure(index, case.on_gpus(lent), budget)

    rest = [item for item in indexed if item[1].ranks < len(names)]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(rest))) as threads:
        running = [threads.submit(measure_one, item) for item in rest]
    for one in running:
        one.result()


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=MODES, default="pair")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/MODE.json)")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--warmup", type=int, help="warm-up steps to drop, at least 10 (default: 10; vision: 20)")
    parser.add_argument("--steps", type=int, default=50, help="steps to measure (not for two commands, nor for vision)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="time limit of a run in seconds")
    parser.add_argument("--trial-seconds", type=float, help="time limit of a candidate of --peer best (default: --timeout)")
    parser.add_argument("--commit", help="commit to record, if the sources are not in a repository")
    parser.add_argument("--require", type=float, default=0.0, help="exit with code 8 if a ratio is below this")
    parser.add_argument("--peer", help="two commands: the second command line; cpu: eager, compile, best; gpu and "
                                       "cpu-smoke: torch, torch-amp, torch-whole, torch-eager, "
                                       "deepspeed, replicas, bf16, best, or several separated by commas (default of gpu: "
                                       "deepspeed for ZeRO where it is installed, else best); vision and "
                                       "vision-cpu: see above")
    pair = parser.add_argument_group("two commands")
    pair.add_argument("--ours", help="the first command line")
    pair.add_argument("--metric", default="tokens_per_s", help="JSON key; higher is better")
    pair.add_argument("--label", default="")
    matrix = parser.add_argument_group("all modes except two commands")
    matrix.add_argument("--bin", default="./build/release/bin/trireme")
    matrix.add_argument("--python", default=sys.executable, help="a Python that has torch")
    matrix.add_argument("--ours-args", default="", help='more arguments: --ours-args="--seed=1"')
    matrix.add_argument("--peer-args", default="", help='more arguments: --peer-args="--compile"')
    cpu = parser.add_argument_group("cpu")
    cpu.add_argument("--models", default="gpt-tiny,llama-tiny")
    cpu.add_argument("--dtypes", default="fp32", help="fp32, bf16 or both; PyTorch's bf16 is autocast")
    cpu.add_argument("--global-batch", type=int, default=16)
    cpu.add_argument("--policy", default="ddp", help="policy of our side; the peer uses DDP")
    images = parser.add_argument_group("vision and vision-cpu")
    images.add_argument("--data-dir", default=str(ROOT / "build" / "bench-data"), help="folder in which images are made and kept")
    gpu = parser.add_argument_group("gpu, cpu-smoke and vision")
    gpu.add_argument("--beside", action="store_true",
                     help="run cases at the same time on different GPUs")
    gpu.add_argument("--budget-seconds", type=float, help="start nothing that would end after so many seconds")
    gpu.add_argument("--cases", help=", ".join(f'{mode}: "{options["cases"]}"' for mode, options in
                                               (DEFAULTS | {"cpu-smoke": SMOKE}).items()))
    gpu.add_argument("--seq", type=int, help=f"gpu: {GPU['seq']}, cpu-smoke: {SMOKE['seq']}")
    gpu.add_argument("--micro-batch", type=int, default=4)
    gpu.add_argument("--fp8", default="", metavar="RECIPE",
                     help="gpu: precision.fp8 of our side; best then also tries torchao's FP8")
    gpu.add_argument("--losses", type=int, default=0, metavar="N",
                     help="first compare the losses of N steps from the same start, 10 or more; "
                          "takes five more runs per case, with weights in $TMPDIR")
    gpu.add_argument("--loss-bound", type=float, default=0.02, metavar="NATS",
                     help="exit with code 8 if the first losses differ by more than this, or the means of the last 10 "
                          "by more than this and more than the peer's from two seeds")
    gpu.add_argument("--gemm", action="store_true",
                     help="also measure a matrix product of 8192^3 in bf16 (cpu-smoke: 1024^3)")
    gpu.add_argument("--profile", type=int, default=0, metavar="N",
                     help="then profile N steps of our side in a separate run: GPU time per step by "
                          "groups of kernels")
    arguments = parser.parse_args(words)
    for key, value in ({"warmup": 10} | DEFAULTS.get(arguments.mode, SMOKE)).items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    if arguments.warmup < 10 or arguments.alternations < 1 or arguments.steps < 1:
        parser.error("--warmup is at least 10, --alternations and --steps at least 1")
    if arguments.losses and arguments.losses < 10:
        parser.error("--losses is at least 10")
    trains = arguments.mode in ("gpu", "cpu-smoke")
    if (arguments.losses or arguments.profile) and not (trains or arguments.mode.startswith("vision")):
        parser.error("--losses and --profile are not for cpu and two commands")
    if arguments.gemm and not trains:
        parser.error("--gemm is for gpu and cpu-smoke")
    if arguments.losses and set(OWN_PEERS) & set((arguments.peer or "").split(",")):
        parser.error(f"--losses is for peers that are other programs; {' and '.join(OWN_PEERS)} are our own")
    if arguments.fp8 not in ("", *TORCHAO):
        parser.error(f"--fp8 is one of {', '.join(TORCHAO)}")
    if arguments.beside and arguments.mode not in ("gpu", "vision"):
        parser.error("--beside is for gpu and vision")
    if arguments.budget_seconds and arguments.mode not in ("gpu", "vision", "vision-cpu"):
        parser.error("--budget-seconds is for gpu, vision and vision-cpu")
    if set(arguments.dtypes.split(",")) - {"fp32", "bf16"}:
        parser.error(f"--dtypes is fp32, bf16 or fp32,bf16, not {arguments.dtypes}")
    if arguments.mode == "cpu" and arguments.peer not in (None, "best", *CPU_PEERS):
        parser.error(f"--peer of cpu is one of best, {', '.join(CPU_PEERS)}")
    return arguments


def compare(arguments: argparse.Namespace) -> int:
    budget = Budget(arguments.budget_seconds)
    check_torch(arguments)
    cases = MODES[arguments.mode](arguments)
    check_programs(cases)
    out = arguments.out or ROOT / "bench" / "results" / f"{arguments.mode}.json"
    machine = describe_machine(arguments.python)
    if warning := load_warning(machine):
        machine["warning"] = f"{warning}: other programs were running, the numbers are not worth much"
        say(machine["warning"])
    book = Book(out, machine, arguments)
    measure_beside(cases, book, budget) if arguments.beside else measure_in_turn(cases, book, budget)
    results = book.results()
    print(table(results))
    say(f"written to {out}")
    slow = any(result.get("ratio", arguments.require) < arguments.require for result in results)
    problems = [(result, complaint(result["losses"])) for result in results if "losses" in result]
    for result, problem in problems:
        if problem:
            say(f"{result['model']} {result['policy']} on {result['ranks']}: {problem}")
    if book.failures:
        return book.failures[0].code
    return EXIT_BELOW if slow or any(problem for _, problem in problems) else 0


def main() -> int:
    try:
        return compare(parse_arguments())
    except BenchError as error:
        say(f"[bench.compare] {error}")
        return error.code


if __name__ == "__main__":
    sys.exit(main())
