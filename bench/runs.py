"""Runs of two programs that take turns, and what they amount to."""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cases import Case
from efficiency import add_efficiency
from kernel_times import profile
from losses import check_losses, complaint
from programs import (EXIT_FAILED, BenchError, Output, Side, json_objects, last_with,
                      resolved_config, run_program, say, with_options)

MODULES = ("torch", "deepspeed")  # whose versions a peer prints under these keys


@dataclass(frozen=True)
class Run:
    """One process. `value` is the median of `samples`, or their rate; `bound` that of Side.bound."""

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
    bound: float | None = None

    def to_json(self) -> dict:
        result = {"value": self.value, "samples": self.samples}
        for key in ("bound", "startup_s", "peak_bytes", "nvml_peak_bytes", "loss_last"):
            if (value := getattr(self, key)) is not None:
                result[key] = value
        return result | ({"gpus": self.gpus} if self.gpus else {})


class OutOfTime(Exception):
    """There is no time left for another run."""


class Budget:
    """The seconds that all runs may take together; none: as many as they want."""

    FIRST_RUN = 60.0  # what one may take of which nothing is known

    def __init__(self, seconds: float | None) -> None:
        self.end = time.monotonic() + seconds if seconds else float("inf")
        self.longest: dict[str, float] = {}  # by program

    def run(self, side: Side, warmup: int, timeout: float) -> Run:
        """Throws OutOfTime where the program is not expected to end in time, and where it does not."""
        program, began = side.printable(), time.monotonic()
        left = self.end - began
        if left < 1.1 * self.longest.get(program, self.FIRST_RUN):
            raise OutOfTime
        try:
            result = run_side(side, warmup, min(timeout, left))
        except BenchError as error:
            if time.monotonic() >= self.end:
                raise OutOfTime from error
            raise
        self.longest[program] = max(self.longest.get(program, 0.0), time.monotonic() - began)
        return result


# Reading what a program printed


def metric_samples(objects: Sequence[dict], metric: str, warmup: int) -> list[float]:
    steps = [item for item in objects if "step" in item and metric in item]
    if steps:
        kept = [float(item[metric]) for item in steps if item["step"] > warmup]
        if not kept:
            raise BenchError(EXIT_FAILED, f"all {len(steps)} steps belong to the warm-up")
        return kept
    for item in reversed(objects):
        if metric in item:
            samples = item.get("samples")
            kept = samples.get(metric) if isinstance(samples, dict) else samples
            return [float(value) for value in kept or [item[metric]]]
    raise BenchError(EXIT_FAILED, f'no JSON object with "{metric}" on stdout')


def value_of(samples: Sequence[float], side: Side) -> float:
    """Rates of steps of one size amount to their harmonic mean."""
    return statistics.harmonic_mean(samples) if side.rate else statistics.median(samples)


def peak_memory(objects: Sequence[dict]) -> int | None:
    peaks = [int(item["peak_bytes"]) for item in objects if item.get("peak_bytes")]
    gib = last_with(objects, "peak_alloc_gib")
    return max(peaks) if peaks else int(gib * 2**30) if gib else None


def parse_run(output: Output, side: Side, warmup: int) -> Run:
    objects = json_objects(output.text)
    attention = re.search(r"kernels +(attention by [^,\n]+)", output.log)
    samples = [value * side.scale for value in metric_samples(objects, side.metric, warmup)]
    bounds = [value * side.scale for value in metric_samples(objects, side.bound, warmup)] if side.bound else []
    loss = last_with(objects, "final_loss", "loss_last", "lossN", "loss")
    versions = {name: last_with(objects, name) for name in MODULES}
    return Run(
        value=value_of(samples, side),
        samples=[float(f"{value:.6g}") for value in samples],
        startup_s=round(output.startup_s, 3) if output.startup_s is not None else None,
        peak_bytes=peak_memory(objects),
        loss_last=float(loss) if loss is not None else None,
        versions={name: version for name, version in versions.items() if version},
        settings=last_with(objects, "settings"),
        attention=attention[1] if attention else None,
        nvml_peak_bytes=output.nvml_peak_bytes,
        gpus=output.gpus,
        bound=value_of(bounds, side) if bounds else None,
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


def summarise_bound(alternations: Sequence[dict]) -> dict:
    """Ours, which reads its data, beside a peer whose data are there already."""
    bounds = [one["peer"]["bound"] for one in alternations]
    ratios = [one["ours"]["value"] / bound for one, bound in zip(alternations, bounds)]
    return {"peer": spread(bounds), "ratio": statistics.median(ratios), "ratio_min": min(ratios),
            "ratio_max": max(ratios)}


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


def timed_seconds(label: dict, runs: Sequence[Run]) -> dict:
    """Of one side, in all its runs together, where samples are tokens/s of one rank."""
    if "micro_batch" not in label or "seq_len" not in label:
        return {}
    tokens = label["micro_batch"] * label["seq_len"]
    return {"timed_s": round(sum(tokens / sample for run in runs for sample in run.samples), 1)}


class Measurement:
    """A case under way. Every second alternation starts with the peer."""

    def __init__(self, case: Case, arguments: argparse.Namespace, budget: Budget,
                 progress: Callable[[dict], None], cache: str) -> None:
        self.case, self.arguments, self.budget, self.progress = case, arguments, budget, progress
        self.cache = cache
        self.extra: dict = {}  # beside the alternations
        self.runs: dict[str, list[Run]] = {"ours": [], "peer": []}
        self.alternations: list[dict] = []
        self.peer = with_compile_cache(case.peer, cache)

    def run(self, side: Side, timeout: float | None = None) -> Run:
        return self.budget.run(side, self.arguments.warmup, timeout or self.arguments.timeout)

    def choose_peer(self) -> None:
        """By one short run of each candidate, which also fills what it caches."""
        trials = {}
        for name, side in self.case.candidates.items():
            short = replace(side, command=with_options(side.command, {"steps": self.case.trial_steps}))
            try:
                run = self.run(with_compile_cache(short, self.cache), self.arguments.trial_seconds)
                trials[name] = run.bound or run.value
            except BenchError as error:
                trials[name] = 0.0
                say(f"  {name} fails: {error}")
            say(f"  trial of {name}: {trials[name]:,.0f}")
        chosen = max(trials, key=trials.__getitem__)
        if not trials[chosen]:
            raise BenchError(EXIT_FAILED, "no peer could be run")
        self.peer = with_compile_cache(self.case.candidates[chosen], self.cache)
        self.extra |= {"against": chosen, "trials": trials}

    def alternate(self) -> None:
        sides = {"ours": self.case.ours, "peer": self.peer}
        for index in range(self.arguments.alternations):
            order = ("ours", "peer") if index % 2 == 0 else ("peer", "ours")
            last = {name: self.run(sides[name]) for name in order}
            for name, run in last.items():
                self.runs[name].append(run)
            ratio = last["ours"].value / last["peer"].value
            self.alternations.append({"order": list(order), "ratio": ratio}
                                     | {name: last[name].to_json() for name in sides})
            bound = f"  its bound {last['peer'].bound:,.0f}" if last["peer"].bound else ""
            say(f"  {self.case.title()}: {index + 1}/{self.arguments.alternations}  ours "
                f"{last['ours'].value:,.0f}  peer {last['peer'].value:,.0f}{bound}  ratio {ratio:.3f}")
            self.progress(self.result())

    def result(self) -> dict:
        """Of the alternations so far, of which there must be one."""
        ratios = [alternation["ratio"] for alternation in self.alternations]
        sides = {"ours": self.case.ours, "peer": self.peer}
        result = self.case.label | {"unit": self.case.unit}
        for name, side in sides.items():
            result[name] = summarise(side, self.runs[name]) | timed_seconds(self.case.label, self.runs[name])
        result |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
                   **self.runs["peer"][-1].versions, "alternations": list(self.alternations)}
        if self.peer.bound:
            result["bound"] = summarise_bound(self.alternations)
        return result | self.extra

    def measure(self) -> dict:
        """Losses, alternations, and what else was asked for, as far as the time goes."""
        arguments, case = self.arguments, self.case
        try:
            if case.candidates:
                self.choose_peer()
            if arguments.losses:
                losses = check_losses(case.ours, self.peer, arguments.losses, arguments.loss_bound,
                                      arguments.timeout, case.same)
                self.extra["losses"] = losses
                if problem := complaint(losses):
                    say(f"  {problem}")
            self.alternate()
        except OutOfTime:
            self.extra["stopped"] = "the time was over"
            say(f"  {case.title()}: time ran out after {len(self.alternations)} alternations")
        if not self.alternations:
            return case.label | self.extra | {"alternations": []}
        result = self.result()
        add_ratios(result)
        if case.by_rank:
            result["ours"]["settings"] = resolved_config(case.ours.command)["config"]
            python = arguments.python if arguments.gemm else None
            add_efficiency(result, case.ours, python, arguments.timeout)
        if arguments.profile and "stopped" not in result:
            result["profile"] = profile(case.ours, arguments.profile, arguments.timeout)
        return result


def measure(case: Case, arguments: argparse.Namespace, budget: Budget | None = None,
            progress: Callable[[dict], None] = lambda result: None) -> dict:
    """The result of a case. `progress` gets what there is after each alternation."""
    with tempfile.TemporaryDirectory(prefix="trireme-compiled-") as folder:
        return Measurement(case, case.settings or arguments, budget or Budget(None), progress,
                           folder).measure()
