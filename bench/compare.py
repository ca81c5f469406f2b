#!/usr/bin/env python3
"""Ours against PyTorch, alternating: A B, B A, A B, ... on one machine, each run a fresh process.

    bench/compare.py cpu [--out FILE]
    bench/compare.py gpu --cases "llama-1b:fsdp:1,2,4;llama-1b:ddp:1,2,4" [--losses N] [--gemm]
    bench/compare.py cpu-smoke --losses 20     the same with tiny models in fp32 on CPUs
    bench/compare.py --ours CMD --peer CMD --out FILE [--metric tokens_per_s] [--label NAME]

Either command prints JSON lines on stdout. Objects with "step" are steps: those after the warm-up
are the run's samples, and the run's value is their median. Without steps, the last object that
has the metric gives the value, and its "samples" the samples. The ratio is ours / peer, higher is
better for us; the result is the median of the ratios of the alternations, so that a machine that
slows down between alternations does not decide.

With --losses N both sides first train N steps on the same tokens from the same weights, and the
peer once more from the weights of another seed; the case keeps all losses. For speed each side then
reads its own data: ours text, the peer random tokens.

TFLOP/s are 6 x (matmul weights of blocks and head) + 6 x T x heads x head_dim x layers per token,
counted on our model for both sides; MFU is their part of 989.4 TFLOP/s, an H100's or H200's.

The file holds machine, settings, commands, environment and every sample. Exit codes: 0 measured,
1 a command failed, 2 usage, 3 a program is missing, 8 a ratio is below --require or losses do not
agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from efficiency import add_efficiency
from losses import check_losses, complaint
from programs import (EXIT_BELOW, EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_USAGE, PEERS, ROOT,
                      BenchError, Output, Side, json_objects, last_with, output_of, run_program,
                      say)


# What is measured


@dataclass(frozen=True)
class Case:
    label: dict[str, object]  # model, ranks, ...: goes into the file as it is
    unit: str
    ours: Side
    peer: Side
    same_start: bool = False  # the peer can take our tokens and weights

    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.label.items())


@dataclass(frozen=True)
class Run:
    """One process. `value` is the median of `samples`."""

    value: float
    samples: list[float]
    peak_bytes: int | None
    loss_last: float | None
    torch: str | None
    settings: dict | None
    attention: str | None
    nvml_peak_bytes: int | None

    def to_json(self) -> dict:
        result = {"value": self.value, "samples": self.samples}
        if self.peak_bytes:
            result["peak_bytes"] = self.peak_bytes
        if self.nvml_peak_bytes:
            result["nvml_peak_bytes"] = self.nvml_peak_bytes
        if self.loss_last is not None:
            result["loss_last"] = self.loss_last
        return result


# Reading what a program printed


def metric_samples(objects: Sequence[dict], metric: str, warmup: int) -> list[float]:
    steps = [item for item in objects if "step" in item and metric in item]
    if steps:
        kept = [float(item[metric]) for item in steps if item["step"] > warmup]
        if not kept:
            raise BenchError(EXIT_FAILED, f"none of {len(steps)} steps is after the warm-up")
        return kept
    for item in reversed(objects):
        if metric in item:
            samples = item.get("samples")
            kept = samples.get(metric) if isinstance(samples, dict) else samples
            return [float(value) for value in kept or [item[metric]]]
    raise BenchError(EXIT_FAILED, f'no JSON object with "{metric}" on stdout')


def peak_memory(objects: Sequence[dict]) -> int | None:
    peaks = [int(item["peak_bytes"]) for item in objects if item.get("peak_bytes")]
    gib = last_with(objects, "peak_alloc_gib")
    return max(peaks) if peaks else int(gib * 2**30) if gib else None


def parse_run(output: Output, side: Side, warmup: int) -> Run:
    objects = json_objects(output.text)
    attention = re.search(r"kernels +(attention by [^,\n]+)", output.log)
    samples = [value * side.scale for value in metric_samples(objects, side.metric, warmup)]
    loss = last_with(objects, "final_loss", "loss_last", "lossN", "loss")
    return Run(
        value=statistics.median(samples),
        samples=[float(f"{value:.6g}") for value in samples],
        peak_bytes=peak_memory(objects),
        loss_last=float(loss) if loss is not None else None,
        torch=last_with(objects, "torch"),
        settings=last_with(objects, "settings"),
        attention=attention[1] if attention else None,
        nvml_peak_bytes=output.nvml_peak_bytes,
    )


# Running


def run_side(side: Side, warmup: int, timeout: float) -> Run:
    output = run_program(side, timeout)
    try:
        return parse_run(output, side, warmup)
    except BenchError as error:
        raise BenchError(error.code, f"{error}: {side.printable()}") from error


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(side: Side, runs: Sequence[Run]) -> dict:
    """One side over all alternations: statistics of the runs' medians."""
    summary = spread([run.value for run in runs]) | {"command": side.printable()}
    for key in ("peak_bytes", "nvml_peak_bytes"):
        if peaks := [getattr(run, key) for run in runs if getattr(run, key)]:
            summary[key] = max(peaks)
    for key in ("settings", "attention"):
        if value := getattr(runs[-1], key):
            summary[key] = value
    return summary


def measure(case: Case, arguments: argparse.Namespace) -> dict:
    """The losses, then all alternations of a case. Every second one starts with the peer."""
    losses = None
    if arguments.losses:
        losses = check_losses(case.ours, case.peer, arguments.losses, arguments.loss_bound,
                              arguments.timeout)
        if problem := complaint(losses):
            say(f"  {problem}")
    runs: dict[str, list[Run]] = {"ours": [], "peer": []}
    alternations = []
    for index in range(arguments.alternations):
        order = ("ours", "peer") if index % 2 == 0 else ("peer", "ours")
        for name in order:
            side = getattr(case, name)
            runs[name].append(run_side(side, arguments.warmup, arguments.timeout))
        ours, peer = runs["ours"][-1], runs["peer"][-1]
        ratio = ours.value / peer.value
        alternations.append(
            {"order": list(order), "ratio": ratio, "ours": ours.to_json(), "peer": peer.to_json()}
        )
        say(f"  {index + 1}/{arguments.alternations}  ours {ours.value:,.0f}  "
            f"peer {peer.value:,.0f}  ratio {ratio:.3f}")
    ratios = [alternation["ratio"] for alternation in alternations]
    result = case.label | {
        "unit": case.unit,
        "ours": summarise(case.ours, runs["ours"]),
        "peer": summarise(case.peer, runs["peer"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "torch": next((run.torch for run in runs["peer"] if run.torch), None),
        "alternations": alternations,
    }
    for key in ("peak_bytes", "nvml_peak_bytes"):
        if all(result[name].get(key) for name in ("ours", "peer")):
            result[f"{key}_ratio"] = result["ours"][key] / result["peer"][key]
    if case.same_start:
        python = arguments.python if arguments.gemm else None
        add_efficiency(result, case.ours, python, arguments.timeout)
    if losses:
        result["losses"] = losses
    return result


# The machine


def first_line(path: str, key: str) -> str | None:
    """The value of the first "key : value" line of a file under /proc."""
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return None


def describe_machine(python: str) -> dict:
    memory_kib = (first_line("/proc/meminfo", "MemTotal") or "0").split()[0]
    gpus = output_of(["nvidia-smi", "--query-gpu=name,memory.total,driver_version",
                      "--format=csv,noheader"])
    return {
        "cpu": first_line("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kib) / 2**20, 1),
        "kernel": platform.release(),
        "python": output_of([python, "--version"]),
        "torch": output_of([python, "-c", "import torch; print(torch.__version__)"]),
        "gpus": gpus.splitlines() if gpus else [],
        "load_average": os.getloadavg(),
    }


# The matrices


def require_file(path: str, fix: str) -> str:
    found = shutil.which(path, path=os.environ.get("PATH")) or shutil.which(str(ROOT / path))
    if not found:
        raise BenchError(EXIT_ENVIRONMENT, f"there is no program {path}; {fix}")
    return found


def torchrun(python: str, ranks: int) -> list[str]:
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    return launcher + ["--nproc-per-node", str(ranks)]


def cpu_case(model: str, ranks: int, threads: int, arguments: argparse.Namespace) -> Case:
    steps, warmup, batch = arguments.steps, arguments.warmup, arguments.global_batch
    environment = {"OMP_NUM_THREADS": str(threads)}
    ours = [
        arguments.bin, "train", f"--model.preset={model}", "-n", str(ranks), "--json",
        f"--train.steps={warmup + steps}", f"--train.global_batch={batch}", "--device=cpu",
        "--data.seq_len=128", "--train.val_batches=0", "--optim.lr=3e-3",
        "--optim.schedule=cosine", f"--parallel.policy={arguments.policy}",
        *shlex.split(arguments.ours_args),
    ]
    peer = torchrun(arguments.python, ranks) if ranks > 1 else [arguments.python]
    peer += [
        f"{PEERS}/torch_cpu_train.py", f"--model={model}", f"--threads={threads}", "--json",
        f"--steps={steps}", f"--warmup={warmup}", f"--global-batch={batch}", "--lr=3e-3",
        *shlex.split(arguments.peer_args),
    ]
    return Case(
        label={"model": model, "device": "cpu", "ranks": ranks, "threads": threads},
        unit="tokens/s of all ranks",
        ours=Side(ours, "tokens_per_s", environment=environment),
        peer=Side(peer, "tokens_per_s", environment=environment),
    )


def cpu_cases(arguments: argparse.Namespace) -> list[Case]:
    worlds = [(1, 1), (1, 2), (2, 1)]
    return [
        cpu_case(model, ranks, threads, arguments)
        for model in arguments.models.split(",")
        for ranks, threads in worlds
    ]


def training_case(model: str, policy: str, ranks: int, arguments: argparse.Namespace) -> Case:
    steps, warmup, micro_batch = arguments.steps, arguments.warmup, arguments.micro_batch
    device, dtype = ("cuda", "bf16") if arguments.mode == "gpu" else ("cpu", "fp32")
    ours = [
        arguments.bin, "train", f"--model.preset={model}", "-n", str(ranks), "--json",
        f"--train.steps={warmup + steps}", f"--train.global_batch={micro_batch * ranks}",
        f"--train.micro_batch={micro_batch}", f"--data.seq_len={arguments.seq}",
        f"--device={device}", "--train.val_batches=0", f"--precision.compute={dtype}",
        f"--parallel.policy={policy}", *shlex.split(arguments.ours_args),
    ]
    strategy = {"fsdp": "fsdp2", "zero3": "fsdp2", "zero2": "fsdp2-nores"}.get(policy, policy)
    # The peer reads torchrun's variables even when it is alone.
    peer = torchrun(arguments.python, ranks) + [
        f"{PEERS}/torch_train.py", f"--model={model}", f"--strategy={strategy}",
        f"--seq={arguments.seq}", f"--mbs={micro_batch}", f"--steps={steps}",
        f"--warmup={warmup}", f"--device={device}", f"--dtype={dtype}",
        *shlex.split(arguments.peer_args),
    ]
    environment = {} if device == "cuda" else {"OMP_NUM_THREADS": "1"}
    return Case(
        label={"model": model, "device": device, "policy": policy, "ranks": ranks,
               "seq_len": arguments.seq, "micro_batch": micro_batch},
        unit="tokens/s a GPU" if device == "cuda" else "tokens/s a rank",
        ours=Side(ours, "tokens_per_s", scale=1.0 / ranks, environment=environment),
        peer=Side(peer, "tok_s_gpu", environment=environment),
        same_start=True,
    )


def training_cases(arguments: argparse.Namespace) -> list[Case]:
    cases = []
    for text in filter(None, arguments.cases.split(";")):
        try:
            model, policy, worlds = text.strip().split(":")
            ranks = [int(world) for world in worlds.split(",")]
        except ValueError:
            raise BenchError(EXIT_USAGE, f'"{text}" is not MODEL:POLICY:RANKS[,RANKS]') from None
        cases += [training_case(model, policy, world, arguments) for world in ranks]
    return cases


def pair_case(arguments: argparse.Namespace) -> list[Case]:
    if not (arguments.ours and arguments.peer):
        raise BenchError(EXIT_USAGE, "give cpu, gpu, cpu-smoke, or both --ours and --peer")
    ours, peer = (Side(shlex.split(text), arguments.metric)
                  for text in (arguments.ours, arguments.peer))
    return [Case({"model": arguments.label or "pair"}, arguments.metric, ours, peer)]


MATRICES = {"cpu": cpu_cases, "gpu": training_cases, "cpu-smoke": training_cases, "pair": pair_case}
SMOKE = {"cases": "gpt-tiny:ddp:1;llama-tiny:ddp:1", "seq": 128}
GPU = {"cases": "llama-1b:fsdp:1,2,4;llama-1b:ddp:1,2,4", "seq": 2048}


# Results


def check_programs(cases: Sequence[Case]) -> None:
    """Before anything is measured, rather than an hour into the matrix."""
    for program in sorted({side.command[0] for case in cases for side in (case.ours, case.peer)}):
        require_file(program, "build it, or name another with --bin or --python")


def table(results: Sequence[dict]) -> str:
    lines = ["| case | ours | peer | ratio | min - max |", "|---|---:|---:|---:|---:|"]
    for result in results:
        keys = ("model", "policy", "ranks", "threads")
        name = " ".join(f"{key} {result[key]}" if key != "model" else str(result[key])
                        for key in keys if key in result)
        ours, peer = (f"{result[side]['median']:,.0f}" for side in ("ours", "peer"))
        ratio, low, high = (f"{result[key]:.3f}" for key in ("ratio", "ratio_min", "ratio_max"))
        lines.append(f"| {name} | {ours} | {peer} | {ratio} | {low} - {high} |")
    return "\n".join(lines)


def write_results(path: Path, mode: str, machine: dict, results: list[dict],
                  arguments: argparse.Namespace) -> None:
    """Through a temporary file: a matrix that is stopped leaves the cases it has finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "mode": mode,
        "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "alternations": arguments.alternations,
        "warmup_steps": arguments.warmup,
        "command": shlex.join(sys.argv).replace(str(Path.home()), "~"),
        "environment": {key: value for key, value in sorted(os.environ.items())
                        if key.startswith(("OMP_", "MKL_", "KMP_", "MALLOC_", "NCCL_", "CUDA_"))},
        "cases": results,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=MATRICES, default="pair")
    parser.add_argument("--out", type=Path, help="default: bench/results/MODE.json")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10, help="steps dropped, at least 10")
    parser.add_argument("--steps", type=int, default=50, help="steps kept (not for two commands)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument("--require", type=float, default=0.0, help="exit 8 if a ratio is below")
    pair = parser.add_argument_group("two commands")
    pair.add_argument("--ours", help="command line")
    pair.add_argument("--peer", help="command line")
    pair.add_argument("--metric", default="tokens_per_s", help="JSON key; higher is better")
    pair.add_argument("--label", default="")
    matrix = parser.add_argument_group("cpu, gpu and cpu-smoke")
    matrix.add_argument("--bin", default="./build/release/bin/trireme")
    matrix.add_argument("--python", default=sys.executable, help="one that has torch")
    matrix.add_argument("--ours-args", default="", help='more arguments: --ours-args="--seed=1"')
    matrix.add_argument("--peer-args", default="", help='more arguments: --peer-args="--compile"')
    cpu = parser.add_argument_group("cpu")
    cpu.add_argument("--models", default="gpt-tiny,llama-tiny")
    cpu.add_argument("--global-batch", type=int, default=16)
    cpu.add_argument("--policy", default="ddp", help="ours; the peer is DDP")
    gpu = parser.add_argument_group("gpu and cpu-smoke")
    gpu.add_argument("--cases", help=f'gpu: "{GPU["cases"]}", cpu-smoke: "{SMOKE["cases"]}"')
    gpu.add_argument("--seq", type=int, help=f"gpu: {GPU['seq']}, cpu-smoke: {SMOKE['seq']}")
    gpu.add_argument("--micro-batch", type=int, default=4)
    gpu.add_argument("--losses", type=int, default=0, metavar="N",
                     help="first compare the losses of N steps from the same start, 10 or more; "
                          "five more runs a case, weights in $TMPDIR")
    gpu.add_argument("--loss-bound", type=float, default=0.02, metavar="NATS",
                     help="exit 8 if the first losses differ by more, or the means of the last 10 "
                          "by more than this and than the peer's from two seeds")
    gpu.add_argument("--gemm", action="store_true",
                     help="also measure a matrix product of 8192^3 in bf16 (cpu-smoke: 1024^3)")
    arguments = parser.parse_args()
    if arguments.warmup < 10 or arguments.alternations < 1 or arguments.steps < 1:
        parser.error("--warmup is at least 10, --alternations and --steps at least 1")
    trains = arguments.mode in ("gpu", "cpu-smoke")
    if (arguments.losses or arguments.gemm) and not trains:
        parser.error("--losses and --gemm are for gpu and cpu-smoke")
    if arguments.losses and arguments.losses < 10:
        parser.error("--losses is at least 10")
    for key, value in (GPU if arguments.mode == "gpu" else SMOKE).items():
        if getattr(arguments, key) is None:
            setattr(arguments, key, value)
    return arguments


def compare(arguments: argparse.Namespace) -> int:
    cases = MATRICES[arguments.mode](arguments)
    check_programs(cases)
    out = arguments.out or ROOT / "bench" / "results" / f"{arguments.mode}.json"
    machine = describe_machine(arguments.python)
    if machine["load_average"][0] > 0.5 * machine["cores"]:
        say(f"the load average is {machine['load_average'][0]:.1f} on {machine['cores']} cores: "
            "other programs are running, the numbers will not be worth much")
    results: list[dict] = []
    for case in cases:
        say(case.title())
        results.append(measure(case, arguments))
        write_results(out, arguments.mode, machine, results, arguments)
    print(table(results))
    say(f"written to {out}")
    slow = any(result["ratio"] < arguments.require for result in results)
    problems = [(result, complaint(result["losses"])) for result in results if "losses" in result]
    for result, problem in problems:
        if problem:
            say(f"{result['model']} {result['policy']} on {result['ranks']}: {problem}")
    return EXIT_BELOW if slow or any(problem for _, problem in problems) else 0


def main() -> int:
    try:
        return compare(parse_arguments())
    except BenchError as error:
        say(f"[bench.compare] {error}")
        return error.code


if __name__ == "__main__":
    sys.exit(main())
