"""Runs of two programs that take turns, and what they amount to."""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cases import Case
from efficiency import add_efficiency
from kernel_times import profile
from losses import check_losses, complaint
from programs import (EXIT_FAILED, BenchError, Output, Side, json_objects, last_with, run_program,
                      say)

MODULES = ("torch", "deepspeed")  # whose versions a peer prints under these keys


@dataclass(frozen=True)
class Run:
    """One process. `value` is the median of `samples`."""

    value: float
    samples: list[float]
    startup_s: float | None
    peak_bytes: int | None
    loss_last: float | None
    versions: dict[str, str]
    settings: dict | None
    attention: str | None
    nvml_peak_bytes: int | None
    gpus: list[dict]

    def to_json(self) -> dict:
        result = {"value": self.value, "samples": self.samples}
        for key in ("startup_s", "peak_bytes", "nvml_peak_bytes", "loss_last"):
            if (value := getattr(self, key)) is not None:
                result[key] = value
        return result | ({"gpus": self.gpus} if self.gpus else {})


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
    versions = {name: last_with(objects, name) for name in MODULES}
    return Run(
        value=statistics.median(samples),
        samples=[float(f"{value:.6g}") for value in samples],
        startup_s=round(output.startup_s, 3) if output.startup_s is not None else None,
        peak_bytes=peak_memory(objects),
        loss_last=float(loss) if loss is not None else None,
        versions={name: version for name, version in versions.items() if version},
        settings=last_with(objects, "settings"),
        attention=attention[1] if attention else None,
        nvml_peak_bytes=output.nvml_peak_bytes,
        gpus=output.gpus,
    )


def run_side(side: Side, warmup: int, timeout: float) -> Run:
    output = run_program(side, timeout)
    try:
        return parse_run(output, side, warmup)
    except BenchError as error:
        raise BenchError(error.code, f"{error}: {side.printable()}") from error


# Summing up


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise_startup(runs: Sequence[Run]) -> dict | None:
    """Of one side in seconds: the first run of the case, and the median of the later ones, which
    find what it has cached."""
    seconds = [run.startup_s for run in runs]
    if not seconds or None in seconds:
        return None
    warm = {"warm": statistics.median(seconds[1:])} if seconds[1:] else {}
    return {"first": seconds[0]} | warm


def summarise(side: Side, runs: Sequence[Run]) -> dict:
    """One side over all alternations: statistics of the runs' medians."""
    summary = spread([run.value for run in runs]) | {"command": side.printable()}
    if startup := summarise_startup(runs):
        summary["startup_s"] = startup
    for key in ("peak_bytes", "nvml_peak_bytes"):
        if peaks := [getattr(run, key) for run in runs if getattr(run, key)]:
            summary[key] = max(peaks)
    for key in ("settings", "attention"):
        if value := getattr(runs[-1], key):
            summary[key] = value
    return summary


def add_ratios(result: dict) -> None:
    """Of what both sides have: ours / peer, below 1 is better for us."""
    ours, peer = result["ours"], result["peer"]
    for key in ("peak_bytes", "nvml_peak_bytes"):
        if ours.get(key) and peer.get(key):
            result[f"{key}_ratio"] = ours[key] / peer[key]
    if ours.get("startup_s") and peer.get("startup_s"):
        result["startup_ratio"] = {key: value / peer["startup_s"][key]
                                   for key, value in ours["startup_s"].items()}
        for key, ratio in result["startup_ratio"].items():
            say(f"  end of the first step, {key} run{'s' if key == 'warm' else ''}: ours "
                f"{ours['startup_s'][key]:.2f} s, peer {peer['startup_s'][key]:.2f} s, ratio "
                f"{ratio:.3f}")


# Measuring


def with_compile_cache(peer: Side, folder: str) -> Side:
    """torch.compile keeps what it has compiled there."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    return replace(peer, environment=peer.environment | caches)


def alternate(ours: Side, peer: Side, arguments: argparse.Namespace
              ) -> tuple[dict[str, list[Run]], list[dict]]:
    """The runs of both sides, and what the file says of each alternation. Every second one starts
    with the peer."""
    sides = {"ours": ours, "peer": peer}
    runs: dict[str, list[Run]] = {"ours": [], "peer": []}
    alternations = []
    for index in range(arguments.alternations):
        order = ("ours", "peer") if index % 2 == 0 else ("peer", "ours")
        for name in order:
            runs[name].append(run_side(sides[name], arguments.warmup, arguments.timeout))
        last = {name: runs[name][-1] for name in sides}
        ratio = last["ours"].value / last["peer"].value
        alternations.append({"order": list(order), "ratio": ratio}
                            | {name: run.to_json() for name, run in last.items()})
        say(f"  {index + 1}/{arguments.alternations}  ours {last['ours'].value:,.0f}  "
            f"peer {last['peer'].value:,.0f}  ratio {ratio:.3f}")
    return runs, alternations


def measure(case: Case, arguments: argparse.Namespace) -> dict:
    """The losses, then all alternations of a case, then what else was asked for."""
    losses = None
    if arguments.losses:
        losses = check_losses(case.ours, case.peer, arguments.losses, arguments.loss_bound,
                              arguments.timeout)
        if problem := complaint(losses):
            say(f"  {problem}")
    with tempfile.TemporaryDirectory(prefix="trireme-compiled-") as folder:
        peer = with_compile_cache(case.peer, folder)
        runs, alternations = alternate(case.ours, peer, arguments)
    ratios = [alternation["ratio"] for alternation in alternations]
    result = case.label | {
        "unit": case.unit,
        "ours": summarise(case.ours, runs["ours"]),
        "peer": summarise(peer, runs["peer"]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        **runs["peer"][-1].versions,
        "alternations": alternations,
    }
    add_ratios(result)
    if case.by_rank:
        python = arguments.python if arguments.gemm else None
        add_efficiency(result, case.ours, python, arguments.timeout)
    if arguments.profile:
        result["profile"] = profile(case.ours, arguments.profile, arguments.timeout)
    if losses:
        result["losses"] = losses
    return result
