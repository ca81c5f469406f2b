#!/usr/bin/env python3
"""Runs all tests with a GPU label, a few processes for each test program, and records each result.

    tools/gpu_tests.py [--build build/release] [--out bench/results/gpu_tests.json] [--commit ID]

Programs are found through ctest's labels: gpu1, gpu2 and gpu4 say how many GPUs one takes. A program's tests are dealt
out to as many processes as have GPUs at the same time (googletest's shards; CUDA_VISIBLE_DEVICES). A process that takes
one GPU has it alone. Two processes that take several share theirs: their tests mostly wait, for ranks to start and for
deadlines. A program that asks for more GPUs than there are runs on all, and its tests say themselves that they are
skipped. A lock in the temporary folder keeps a second run of this script away until this one is over.

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
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_commit  # noqa: E402

LABEL = re.compile(r"gpu(\d+)")
EXIT_FAILED, EXIT_ENVIRONMENT = 1, 3
PLACES = 2  # on a GPU, for processes that take several GPUs


@dataclass(frozen=True)
class Program:
    path: str
    label: str

    @property
    def gpus(self) -> int:
        return int(LABEL.fullmatch(self.label)[1])

    @property
    def places(self) -> int:
        """Taken on each of its GPUs."""
        return PLACES if self.gpus == 1 else 1


@dataclass(frozen=True)
class Shard:
    """The tests of a program whose number, modulo `of`, is `index`."""
    program: Program
    index: int
    of: int

    def environment(self, gpus: list[int], threads: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_NUM_THREADS": str(threads),
                "GTEST_TOTAL_SHARDS": str(self.of), "GTEST_SHARD_INDEX": str(self.index)}


class EnvironmentProblem(Exception):
    """Why nothing can be run here."""


def output_of(command: list[str], **options) -> str:
    """Standard output of a command, empty when it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_programs(build: Path) -> list[Program]:
    """Test programs that ctest knows under a GPU label, those that take most GPUs first."""
    listing = output_of(["ctest", "--test-dir", str(build), "--show-only=json-v1"])
    if not listing:
        raise EnvironmentProblem(f"ctest lists no tests in {build}; build it first, with CUDA and TRIREME_TESTS=ON")
    found = set()
    for test in json.loads(listing)["tests"]:
        labels = next((item["value"] for item in test.get("properties", []) if item["name"] == "LABELS"), [])
        for label in filter(LABEL.fullmatch, labels):
            if test.get("command"):
                found.add(Program(test["command"][0], label))
    if not found:
        raise EnvironmentProblem(f"no test in {build} has a label gpu1, gpu2 or gpu4; it was built without CUDA")
    return sorted(found, key=lambda program: (-program.gpus, program.path))


def deal_out(programs: list[Program], gpus: int) -> list[Shard]:
    """Those that take most GPUs first."""
    shards = []
    for program in programs:
        count = max(1, gpus // program.gpus * PLACES // program.places)
        shards += [Shard(program, index, count) for index in range(count)]
    return shards


def find_gpus() -> list[dict[str, str]]:
    query = ["name", "driver_version", "power.limit"]
    lines = output_of(["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader"]).splitlines()
    return [dict(zip(query, (value.strip() for value in line.split(",")))) for line in lines]


class GpuPool:
    """Hands out GPUs by their number."""

    def __init__(self, count: int) -> None:
        self._free = [PLACES] * count
        self._changed = threading.Condition()

    def _take(self, program: Program) -> list[int]:
        """Those with most free places; empty while there are too few."""
        fitting = [gpu for gpu, free in enumerate(self._free) if free >= program.places]
        wanted = min(program.gpus, len(self._free))
        if len(fitting) < wanted:
            return []
        taken = sorted(sorted(fitting, key=lambda gpu: -self._free[gpu])[:wanted])
        for gpu in taken:
            self._free[gpu] -= program.places
        return taken

    @contextmanager
    def take(self, program: Program) -> Iterator[list[int]]:
        with self._changed:
            while not (taken := self._take(program)):
                self._changed.wait()
        try:
            yield taken
        finally:
            with self._changed:
                for gpu in taken:
                    self._free[gpu] += program.places
                self._changed.notify_all()


def parse_report(report: Path, program: Program) -> list[dict]:
    """Results of a program's tests out of googletest's XML."""
    results = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failures, skipped = case.findall("failure"), case.find("skipped")
        ran = case.get("status") == "run"
        result = "failed" if failures else "passed" if ran and skipped is None else "skipped"
        entry = {"name": f"{case.get('classname')}.{case.get('name')}", "program": Path(program.path).name,
                 "label": program.label, "result": result, "seconds": float(case.get("time", 0))}
        if failures:
            entry["reason"] = "\n".join(failure.get("message", "") for failure in failures)[:2000]
        elif result == "skipped":
            # The first line is file and number.
            said = skipped.get("message", "") if skipped is not None else "disabled"
            entry["reason"] = said.partition("\n")[2].strip() or said
        results.append(entry)
    return results


def run_shard(shard: Shard, pool: GpuPool, threads: int, timeout: float) -> list[dict]:
    """`threads`: that each of its processes computes with on the CPU."""
    program = shard.program
    with pool.take(program) as gpus, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        began = time.monotonic()
        try:
            done = subprocess.run([program.path, f"--gtest_output=xml:{report}"],
                                  env=os.environ | shard.environment(gpus, threads), cwd=folder, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout)
            code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, text = None, (error.stdout or b"").decode(errors="replace")
        seconds = time.monotonic() - began
        name = Path(program.path).name
        print(f"{name:24} {shard.index + 1} of {shard.of}  GPU {','.join(map(str, gpus)):9} {seconds:6.1f} s  exit {code}",
              file=sys.stderr)
        results = parse_report(report, program) if report.exists() else []
        if any(entry["result"] == "failed" for entry in results):
            print(text[-6000:], file=sys.stderr)
        elif code != 0:
            how = f"ran for more than {timeout:g} s" if code is None else f"ended with {code}"
            under_way = re.findall(r"\[ RUN +\] (\S+)", text)
            results.append({"name": under_way[-1] if under_way else name, "program": name, "label": program.label,
                            "result": "crashed", "seconds": seconds, "reason": f"{how}: {text[-2000:]}"})
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
    shards = deal_out(find_programs(arguments.build.resolve()), len(gpus))
    pool = GpuPool(len(gpus))
    threads = max(1, len(os.sched_getaffinity(0)) // (len(gpus) * PLACES))
    began = time.monotonic()
    with only_run(), concurrent.futures.ThreadPoolExecutor(len(shards)) as workers:
        parts = list(workers.map(lambda shard: run_shard(shard, pool, threads, arguments.timeout), shards))
    tests = sorted((test for part in parts for test in part), key=lambda test: (test["program"], test["name"]))
    counts = collections.Counter(test["result"] for test in tests)
    record = describe_commit(arguments.commit) | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": f"{len(gpus)} x {gpus[0]['name']}",
        "driver": gpus[0]["driver_version"],
        "build": arguments.build.name,
        "seconds": round(time.monotonic() - began, 1),
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
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_tests.json")
    parser.add_argument("--commit", help="recorded where the sources came without their repository")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one process")
    try:
        return run_all(parser.parse_args())
    except EnvironmentProblem as problem:
        print(f"[tools.gpu_tests] {problem}", file=sys.stderr)
        return EXIT_ENVIRONMENT


if __name__ == "__main__":
    sys.exit(main())
