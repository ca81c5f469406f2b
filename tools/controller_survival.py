#!/usr/bin/env python3
"""Breaks a controller's program at random moments and checks that it ends as the one that nothing happened to.

    tools/controller_survival.py [--build build/release] [--runs 200] [--seed 1] [--kinds kill,stop]
                                 [--jobs 1] [--out bench/results/controller_survival.json]

Every run is examples/controller_mini_gpt on four workers, two stages of two, 40 steps under 1F1B, saved every 5, with
--max-restarts 3 and --timeout 15, as the build of its package has made it. While it trains, a random process of it
    kill  gets SIGKILL,
    stop  gets SIGSTOP, and stays so.
The process is a worker, the server that orders them, or the client; a client that was killed or stopped is ended and
started again with the same command. Afterwards must hold: exit code 0, the losses and gradient norms of the unfailed
run in every step, an error that names who was lost, and nothing left behind: no process, no socket, no unfinished file.

Exit codes: 0 all of it held, 1 not, 3 there is no build.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_commit, describe_machine  # noqa: E402

EXIT_FAILED, EXIT_ENVIRONMENT = 1, 3
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PLACES = ("worker", "server", "client")
MARK = "TRIREME_CONTROLLER_SURVIVAL"  # in the environment of everything that a run starts
STEPS = 40
LONGEST_RUN_S = 120.0
STEP = re.compile(r"^step (\d+)  loss (\S+)  gradient norm (\S+) ", re.MULTILINE)
SIGNALS_FILE = """pp_stage0:
  shard: {axis: 0, workers: [0, 1]}
pp_stage1:
  shard: {axis: 0, workers: [2, 3]}
"""
FLAGS = ["--width", "64", "--hidden", "128", "--heads", "4", "--vocabulary", "97", "--seq-len", "16", "--num-layers", "4",
         "--stages", "2", "--workers", "4", "--batch-size", "8", "--micro-batches", "4", "--steps", str(STEPS),
         "--save-every", "5", "--max-restarts", "3", "--timeout", "15"]


class Broken(Exception):
    """What did not hold."""


@dataclass(frozen=True)
class Fault:
    kind: str
    place: str
    after_s: float
    worker: int

    def text(self) -> str:
        return f"{self.kind} {self.place} after {self.after_s:.2f} s"


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


class Run:
    """The program in a folder of its own, with a mark by which its processes are found."""

    def __init__(self, build: Path, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{os.getpid()}-{folder.name}"
        (folder / "signals.yaml").write_text(SIGNALS_FILE)
        demo = build / "tests" / "package" / "controller_mini_gpt" / "controller_mini_gpt"
        self.command = [str(demo), *FLAGS, "--config", "signals.yaml", "--checkpoint", "run.safetensors"]
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), MARK: self.mark,
                            "TRIREME_COMMAND": str(build / "bin" / "trireme"), "OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment, stdout=out, stderr=err,
                                            stdin=subprocess.DEVNULL, start_new_session=True)

    def processes(self) -> dict[str, list[int]]:
        """Those that are there, by what they are, in the order of their numbers."""
        found: dict[str, list[int]] = {place: [] for place in PLACES}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            name = Path(os.fsdecode(words[0])).name
            place = {"trireme-worker": "worker", "trireme": "server", "controller_mini_gpt": "client"}.get(name)
            if place:
                found[place].append(int(entry.name))
        return {place: sorted(pids) for place, pids in found.items()}

    def output(self) -> dict[int, tuple[str, str]]:
        """Loss and norm of each step, of the last time that it was made."""
        text = (self.folder / "out").read_text()
        return {int(step): (loss, norm) for step, loss, norm in STEP.findall(text)}

    def wait(self, until: float) -> int:
        assert self.process
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Broken(f"it hangs; the end of what it said: {(self.folder / 'err').read_text()[-400:]}") from None

    def end(self) -> None:
        for pids in self.processes().values():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        if self.process:
            self.process.wait()


def strike(run: Run, fault: Fault) -> bool:
    """Whether there was a process to strike. A client is started again: its workers wait for nobody else."""
    assert run.process
    time.sleep(fault.after_s)
    pids = run.processes()[fault.place]
    if run.process.poll() is not None or not pids:
        return False
    pid = pids[fault.worker % len(pids)]
    try:
        os.kill(pid, SIGNALS[fault.kind])
    except ProcessLookupError:
        return False
    if fault.place == "client":
        if fault.kind == "stop":
            time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)
        run.process.wait()
        run.start()
    return True


def names_the_lost(errors: str, fault: Fault) -> bool:
    if fault.place != "client" and "restarts left" not in errors:
        return True  # nobody was lost: it was a process from which workers begin, or one behind the last step
    if fault.place == "worker":
        return re.search(r"workers? \d+.*(is lost|closed|does not answer|did not answer|did not come|stopped|killed|ended)", errors) is not None
    return fault.place == "client" or "server" in errors or "dispatcher" in errors


def check_nothing_is_left(run: Run) -> None:
    until = time.monotonic() + 15.0  # a stopped worker has some seconds to be ended
    while time.monotonic() < until and any(run.processes().values()):
        time.sleep(0.1)
    left = {place: pids for place, pids in run.processes().items() if pids}
    require(not left, f"processes are left: {left}")
    files = [path.name for path in run.folder.rglob("*") if path.name.endswith(("~", ".tmp")) or ".unfinished" in path.name]
    require(not files, f"files are left: {files}")


@dataclass
class Outcome:
    struck: bool
    named: bool
    seconds: float


def survive(build: Path, folder: Path, fault: Fault | None, expected: dict | None) -> tuple[Outcome, dict]:
    run = Run(build, folder)
    began = time.monotonic()
    try:
        run.start()
        struck = fault is not None and strike(run, fault)
        code = run.wait(began + LONGEST_RUN_S)
        errors = (folder / "err").read_text()
        require(code == 0, f"exit code {code}: {errors[-600:]}")
        steps = run.output()
        require(sorted(steps) == list(range(1, STEPS + 1)), f"it made the steps {sorted(steps)}")
        if expected is not None:
            other = [step for step, values in steps.items() if values != expected[step]]
            require(not other, f"losses or norms of steps {other} are others")
        check_nothing_is_left(run)
        named = fault is None or not struck or names_the_lost(errors, fault)
        return Outcome(struck, named, time.monotonic() - began), steps
    finally:
        run.end()


def draw(number: int, kinds: list[str], chance: random.Random, longest_s: float) -> Fault:
    place = chance.choices(PLACES, weights=(6, 2, 2))[0]
    return Fault(kinds[number % len(kinds)], place, chance.uniform(0.0, longest_s), chance.randrange(4))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="kill,stop")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    unknown = [kind for kind in arguments.kinds.split(",") if kind not in SIGNALS]
    if unknown:
        parser.error(f"there is no kind {unknown[0]}; kinds are {', '.join(SIGNALS)}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    build = arguments.build.resolve()
    if not (build / "tests" / "package" / "controller_mini_gpt" / "controller_mini_gpt").exists():
        print(f"there is no demo in {build}; run the test package.ControllerMiniGpt of it first", file=sys.stderr)
        return EXIT_ENVIRONMENT
    kinds, chance = arguments.kinds.split(","), random.Random(arguments.seed)
    work = Path(tempfile.mkdtemp(prefix="trireme-cs-", dir="/tmp"))
    broken: list[dict] = []
    counts: collections.Counter = collections.Counter()
    seconds: list[float] = []
    try:
        (work / "whole").mkdir()
        whole, expected = survive(build, work / "whole", None, None)
        faults = [draw(number, kinds, chance, whole.seconds) for number in range(arguments.runs)]

        def one(number: int) -> None:
            folder, fault, what = work / str(number), faults[number], "held"
            folder.mkdir()
            try:
                outcome, _ = survive(build, folder, fault, expected)
                counts["held"] += 1
                counts["struck"] += outcome.struck
                counts["named"] += outcome.struck and outcome.named
                counts[f"{fault.kind} {fault.place}"] += outcome.struck
                if outcome.struck:
                    seconds.append(outcome.seconds)
                if not outcome.named:
                    what = "nobody was named: " + (folder / "err").read_text()[-900:]
            except Broken as error:
                what = str(error)
            if what != "held":
                broken.append({"fault": fault.text(), "what": what})
            shutil.rmtree(folder, ignore_errors=True)
            print(f"{number + 1}/{arguments.runs} {fault.text()}: {what}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for done in [pool.submit(one, number) for number in range(arguments.runs)]:
                done.result()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{counts['held']} of {arguments.runs} ended as the unfailed run; {counts['struck']} were struck, "
          f"of which {counts['named']} named who was lost")
    if arguments.out:
        record = {"command": " ".join(sys.argv), **describe_commit(None), "machine": describe_machine(sys.executable),
                  "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                  "flags": FLAGS, "runs": arguments.runs, "seed": arguments.seed, "unfailed_s": whole.seconds,
                  "counts": dict(sorted(counts.items())), "seconds": sorted(seconds), "broken": broken}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return EXIT_FAILED if broken else 0


if __name__ == "__main__":
    sys.exit(main())
