"""Programs that are compared: their command lines, how they are run, what they print."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
PEERS = "bench/peers"  # programs are started in ROOT
EXIT_FAILED, EXIT_USAGE, EXIT_ENVIRONMENT, EXIT_BELOW = 1, 2, 3, 8


class BenchError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Command lines


@dataclass(frozen=True)
class Side:
    """One program. `scale` turns its metric into the unit of the case."""

    command: list[str]
    metric: str
    scale: float = 1.0
    rate: bool = False  # its value is that of all steps together, waits included, not the median step's
    bound: str = ""  # a metric of the same program that bounds its speed: where all data are there already
    environment: dict[str, str] = field(default_factory=dict)

    def printable(self) -> str:
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join(variables + [shlex.join(self.command)]).replace(str(Path.home()), "~")


def with_options(command: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """The command with --key=value for each option, in place of what it said of those keys."""
    kept, skip = [], False
    for index, word in enumerate(command):
        key, has_value, _ = word.removeprefix("--").partition("=")
        if skip:
            skip = False
        elif word.startswith("--") and key in options:
            following = command[index + 1 : index + 2]
            skip = not has_value and bool(following) and not following[0].startswith("-")
        else:
            kept.append(word)
    return kept + [f"--{key}={value}" for key, value in options.items()]


def resolved_config(ours: Sequence[str]) -> dict:
    """What `trireme config show --json` says to the keys of a `trireme train` command."""
    keys = re.compile(r"--(name|seed|device|\w+\.\w+)=.*|.*\.ya?ml")
    command = [ours[0], "config", "show", "--json", *filter(keys.fullmatch, ours[2:])]
    text = output_of(command)
    if not text:
        raise BenchError(EXIT_FAILED, f"no config from {shlex.join(command)}")
    return json.loads(text)


# Running


def as_number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:  # "[N/A]", where a GPU does not tell
        return None


class GpuWatch:
    """What nvidia-smi says of the GPUs while the block runs, twice a second."""

    FIELDS = ("memory.used", "utilization.gpu", "clocks.sm", "power.draw")
    BUSY_PERCENT = 90.0

    def __init__(self, visible: str | None) -> None:
        self.peak_bytes: int | None = None  # the most memory in use on any of them
        self.command = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}",
                        "--format=csv,noheader,nounits"] + ([f"--id={visible}"] if visible else [])
        self.busy: dict[int, list[tuple[float, float]]] = {}  # MHz and watts by GPU
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.poll, daemon=True)

    def poll(self) -> None:
        while (text := output_of(self.command)) is not None:  # None: no GPU here
            self.read(text)
            if self.done.wait(0.5):
                return

    def read(self, text: str) -> None:
        for gpu, line in enumerate(text.splitlines()):
            memory, *load = (as_number(field) for field in line.split(","))
            if memory is not None:
                self.peak_bytes = max(self.peak_bytes or 0, int(memory) << 20)
            if len(load) == 3 and None not in load and load[0] >= self.BUSY_PERCENT:
                self.busy.setdefault(gpu, []).append((load[1], load[2]))

    def at_work(self) -> list[dict]:
        """Medians of the samples in which a GPU was busy, of each GPU that ever was."""
        return [{"gpu": gpu, "sm_mhz": statistics.median(clock for clock, _ in samples),
                 "watts": statistics.median(power for _, power in samples)}
                for gpu, samples in sorted(self.busy.items())]

    def __enter__(self) -> GpuWatch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


class StepWatch:
    """Reads a program's stdout and notes when the line of its first step came."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lines: list[str] = []
        self.first_step: float | None = None
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        with self.stream:
            for line in self.stream:
                if self.first_step is None and any("step" in item for item in json_objects(line)):
                    self.first_step = time.monotonic()
                self.lines.append(line)

    def text(self) -> str:
        self.thread.join()
        return "".join(self.lines)


@dataclass(frozen=True)
class Output:
    text: str  # stdout
    log: str  # stderr
    nvml_peak_bytes: int | None
    startup_s: float | None  # from starting the program to its first line of JSON with "step"
    gpus: list[dict]  # those that worked, as GpuWatch.at_work() says


def wait_or_kill(process: subprocess.Popen, timeout: float) -> int:
    """Its exit code. When the wait ends otherwise, everything that the program has started ends."""
    try:
        return process.wait(timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def run_program(side: Side, timeout: float) -> Output:
    environment = {**os.environ, **side.environment}
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with GpuWatch(environment.get("CUDA_VISIBLE_DEVICES")) as gpus:
                begin = time.monotonic()
                process = subprocess.Popen(side.command, env=environment, cwd=ROOT, text=True,
                                           stdout=subprocess.PIPE, stderr=errors,
                                           start_new_session=True)
                watch = StepWatch(process.stdout)
                code = wait_or_kill(process, timeout)
        except OSError as error:
            message = f"cannot start {side.command[0]}: {error}"
            raise BenchError(EXIT_ENVIRONMENT, message) from error
        except subprocess.TimeoutExpired as error:
            message = f"no end after {timeout:.0f} s: {side.printable()}"
            raise BenchError(EXIT_FAILED, message) from error
        text = watch.text()
        errors.seek(0)
        log = errors.read()
    if code != 0:
        # torchrun's own account of the failure follows what the rank said.
        said = re.split(r"^E\d{4} .*torch/distributed/elastic", log, flags=re.MULTILINE)[0]
        tail = "\n".join((said or text).splitlines()[-25:])
        raise BenchError(EXIT_FAILED, f"exit {code}: {side.printable()}\n{tail}")
    startup = watch.first_step - begin if watch.first_step is not None else None
    return Output(text, log, gpus.peak_bytes, startup, gpus.at_work())


def output_of(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# What they print


def json_objects(text: str) -> list[dict]:
    """The lines that are JSON objects; logs between them do not matter."""
    objects = []
    for line in text.splitlines():
        if line.lstrip().startswith("{"):
            try:
                objects.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return objects


def last_with(objects: Sequence[dict], *keys: str) -> object | None:
    """The value of the first of `keys` that some object has, from the last such object."""
    for key in keys:
        for item in reversed(objects):
            if item.get(key) is not None:
                return item[key]
    return None
