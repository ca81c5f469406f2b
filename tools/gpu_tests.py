#!/usr/bin/env python3
"""Runs all tests with a GPU label, several processes at a time on each GPU, and records each result.

    tools/gpu_tests.py [--build build/release] [--out bench/results/gpu_tests.json] [--commit ID] [--places 6]

Tests and their programs are those that ctest lists; the labels gpu1, gpu2 and gpu4 say how many GPUs a program takes.
Its tests are dealt out to processes of about ten seconds each, by the seconds that the last record has for them. The
longest process begins first, and the next one as soon as there is room for it. A GPU has places for six processes
(--places): tests mostly wait, for the host, for ranks to start, for deadlines. A program that asks for more GPUs than
there are runs on all, and its tests say themselves that they are skipped.

Tests of suites whose name ends in "Alone" have their GPUs to themselves, and come first. They measure how busy the
device is, or wait for the other GPU so often that sharing, which lets processes onto a GPU in turns of milliseconds,
would make them take several times as long.

A lock in the temporary folder keeps a second run of this script away until this one is over.

Exit codes: 0 all passed or were skipped, 1 a test failed or a program crashed, 3 there is no GPU, no ctest or no
test program.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import fcntl
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_commit  # noqa: E402

LABEL = re.compile(r"gpu(\d+)")
FILTER = "--gtest_filter="
LAST_RECORD = ROOT / "bench" / "results" / "gpu_tests.json"
EXIT_FAILED, EXIT_ENVIRONMENT = 1, 3
PLACES = 6  # on a GPU; a process takes one on each of its GPUs, or all
# Loading libtorch and CUDA takes a process one to two seconds: few enough of them, and many enough to spread evenly.
SECONDS_OF_PROCESS = 10.0
SECONDS_OF_UNKNOWN = 1.0  # of a test that the last record does not have


@dataclass(frozen=True)
class Program:
    path: str
    label: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def gpus(self) -> int:
        return int(LABEL.fullmatch(self.label)[1])


@dataclass(frozen=True)
class Shard:
    """Tests of a program that one process runs."""
    program: Program
    tests: tuple[str, ...]
    expected_s: float
    alone: bool


class EnvironmentProblem(Exception):
    """Why nothing can be run here."""


def output_of(command: list[str], **options) -> str:
    """Standard output of a command, empty when it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_tests(build: Path) -> dict[Program, list[str]]:
    """Googletest's names of the tests that ctest knows under a GPU label."""
    listing = output_of(["ctest", "--test-dir", str(build), "--show-only=json-v1"])
    if not listing:
        raise EnvironmentProblem(f"ctest lists no tests in {build}; build it first, with CUDA and TRIREME_TESTS=ON")
    found: dict[Program, dict[str, None]] = {}
    for test in json.loads(listing)["tests"]:
        labels = next((item["value"] for item in test.get("properties", []) if item["name"] == "LABELS"), [])
        for label in filter(LABEL.fullmatch, labels):
            if command := test.get("command"):
                # Under sanitizers ctest's tests are whole programs.
                named = [word.removeprefix(FILTER) for word in command if word.startswith(FILTER)] or ["*"]
                found.setdefault(Program(command[0], label), {}).update(dict.fromkeys(named))
    if not found:
        raise EnvironmentProblem(f"no test in {build} has a label gpu1, gpu2 or gpu4; it was built without CUDA")
    return {program: list(tests) for program, tests in found.items()}


def last_seconds(*records: Path) -> dict[tuple[str, str], float]:
    """By program and test, of the first record that exists; of those that passed, since others may end early."""
    for record in records:
        if record.exists():
            tests = json.loads(record.read_text())["tests"]
            return {(test["program"], test["name"]): test["seconds"] for test in tests if test["result"] == "passed"}
    return {}


def runs_alone(test: str) -> bool:
    """Parameters may stand before the name of the suite, and types behind it. A whole program may hold any suite."""
    return test == "*" or any(part.endswith("Alone") for part in test.partition(".")[0].split("/"))


def deal_out(tests_of: dict[Program, list[str]], seconds: dict[tuple[str, str], float]) -> list[Shard]:
    """In the order in which they should begin."""
    shards = []
    for program, names in tests_of.items():
        expected = {name: seconds.get((program.name, name), SECONDS_OF_UNKNOWN) for name in names}
        for alone in (True, False):
            mine = sorted((name for name in names if runs_alone(name) == alone), key=lambda name: -expected[name])
            total = sum(expected[name] for name in mine)
            hands: list[list[str]] = [[] for _ in range(math.ceil(max(total, 1.0) / SECONDS_OF_PROCESS))]
            loads = [0.0] * len(hands)
            for name in mine:
                least = loads.index(min(loads))
                hands[least].append(name)
                loads[least] += expected[name]
            shards += [Shard(program, tuple(hand), load, alone) for hand, load in zip(hands, loads) if hand]
    return sorted(shards, key=lambda shard: (not shard.alone, -shard.program.gpus if shard.alone else 0,
                                             -shard.expected_s, shard.program.path))


def find_gpus() -> list[dict[str, str]]:
    query = ["name", "driver_version", "power.limit"]
    lines = output_of(["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]).splitlines()
    return [dict(zip(query, (value.strip() for value in line.split(",")))) for line in lines]


class GpuPool:
    """Places on GPUs, which are known by their number."""

    def __init__(self, count: int, places: int = PLACES) -> None:
        self._places = places
        self._free = [places] * count

    def _needed(self, shard: Shard) -> int:
        return self._places if shard.alone else 1

    def take(self, shard: Shard) -> list[int]:
        """GPUs with most free places; empty while there are too few."""
        fitting = [gpu for gpu, free in enumerate(self._free) if free >= self._needed(shard)]
        wanted = min(shard.program.gpus, len(self._free))
        if len(fitting) < wanted:
            return []
        taken = sorted(sorted(fitting, key=lambda gpu: -self._free[gpu])[:wanted])
        for gpu in taken:
            self._free[gpu] -= self._needed(shard)
        return taken

    def give_back(self, shard: Shard, gpus: list[int]) -> None:
        for gpu in gpus:
            self._free[gpu] += self._needed(shard)


def run_shards(shards: list[Shard], pool: GpuPool, run: Callable[[Shard, list[int]], list[dict]]) -> list[dict]:
    """Each begins when the pool has room for it; of several the first."""
    waiting, running, results = list(shards), {}, []
    with concurrent.futures.ThreadPoolExecutor(len(shards)) as workers:
        while waiting or running:
            for shard in list(waiting):
                if gpus := pool.take(shard):
                    waiting.remove(shard)
                    running[workers.submit(run, shard, gpus)] = shard, gpus
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                pool.give_back(*running.pop(future))
                results += future.result()
    return results


def parse_report(report: Path, program: Program) -> list[dict]:
    """Results of a program's tests out of googletest's XML."""
    results = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failures, skipped = case.findall("failure"), case.find("skipped")
        ran = case.get("status") == "run"
        result = "failed" if failures else "passed" if ran and skipped is None else "skipped"
        entry = {"name": f"{case.get('classname')}.{case.get('name')}", "program": program.name,
                 "label": program.label, "result": result, "seconds": float(case.get("time", 0))}
        if failures:
            entry["reason"] = "\n".join(failure.get("message", "") for failure in failures)[:2000]
        elif result == "skipped":
            # The first line is file and number.
            said = skipped.get("message", "") if skipped is not None else "disabled"
            entry["reason"] = said.partition("\n")[2].strip() or said
        results.append(entry)
    return results


def run_shard(shard: Shard, gpus: list[int], threads: int, timeout: float) -> list[dict]:
    """`threads`: that each of its processes computes with on the CPU."""
    program = shard.program
    visible = ",".join(map(str, gpus))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        began = time.monotonic()
        try:
            done = subprocess.run([program.path, f"{FILTER}{':'.join(shard.tests)}", f"--gtest_output=xml:{report}"],
                                  env=os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": str(threads)},
                                  cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  errors="replace", timeout=timeout)
            code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, text = None, (error.stdout or b"").decode(errors="replace")
        seconds = time.monotonic() - began
        print(f"{program.name:20} {len(shard.tests):3} tests{', alone' if shard.alone else '':7}  GPU {visible:7} "
              f"{seconds:6.1f} s, expected {shard.expected_s:5.1f} s  exit {code}", file=sys.stderr)
        results = parse_report(report, program) if report.exists() else []
        if code == 0:  # a filter that fits no test is no error for googletest
            for name in set(shard.tests) - {"*"} - {entry["name"] for entry in results}:
                results.append({"name": name, "program": program.name, "label": program.label, "result": "failed",
                                "seconds": 0.0, "reason": "ctest lists it, but the program has no result for it"})
        if any(entry["result"] == "failed" for entry in results):
            print(text[-6000:], file=sys.stderr)
        elif code != 0:
            how = f"ran for more than {timeout:g} s" if code is None else f"ended with {code}"
            under_way = re.findall(r"\[ RUN +\] (\S+)", text)
            results.append({"name": under_way[-1] if under_way else program.name, "program": program.name,
                            "label": program.label, "result": "crashed", "seconds": seconds,
                            "reason": f"{how}: {text[-2000:]}"})
            print(text[-6000:], file=sys.stderr)
        return results


@contextmanager
def only_run() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / "trireme-gpu-tests.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another run of GPU tests is under way on this machine; waiting for its end", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_all(arguments: argparse.Namespace) -> int:
    gpus = find_gpus()
    if not gpus:
        raise EnvironmentProblem("nvidia-smi lists no GPU")
    shards = deal_out(find_tests(arguments.build.resolve()), last_seconds(arguments.out, LAST_RECORD))
    pool = GpuPool(len(gpus), arguments.places)
    # Twice as many threads as cores: ranks, which are about half of the processes, never compute with more than one.
    threads = max(1, 2 * len(os.sched_getaffinity(0)) // (len(gpus) * arguments.places))
    with only_run():
        began = time.monotonic()
        tests = run_shards(shards, pool, lambda shard, taken: run_shard(shard, taken, threads, arguments.timeout))
        seconds = time.monotonic() - began
    tests.sort(key=lambda test: (test["program"], test["name"]))
    counts = collections.Counter(test["result"] for test in tests)
    record = describe_commit(arguments.commit) | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": f"{len(gpus)} x {gpus[0]['name']}",
        "driver": gpus[0]["driver_version"],
        "build": arguments.build.name,
        "seconds": round(seconds, 1),
        "counts": dict(counts),
        "tests": tests,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = arguments.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(arguments.out)
    for test in tests:
        if test["result"] in ("failed", "crashed"):
            print(f"{test['result']}: {test['program']} {test['name']}")
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())),
          f"in {record['seconds']} s; written to {arguments.out}")
    return EXIT_FAILED if counts["failed"] or counts["crashed"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--out", type=Path, default=LAST_RECORD)
    parser.add_argument("--commit", help="recorded where the sources came without their repository")
    parser.add_argument("--places", type=int, default=PLACES, help="on a GPU, for processes that share it")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one process")
    arguments = parser.parse_args()
    if arguments.places < 1:
        parser.error(f"--places is {arguments.places}; a GPU has at least one")
    try:
        return run_all(arguments)
    except EnvironmentProblem as problem:
        print(f"[tools.gpu_tests] {problem}", file=sys.stderr)
        return EXIT_ENVIRONMENT


if __name__ == "__main__":
    sys.exit(main())
