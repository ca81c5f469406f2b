#!/usr/bin/env python3
"""Breaks training runs at random moments and checks that each ends as the one that nothing happened to.

    tools/survival.py [--build build/release] [--runs 200] [--seed 1] [--kinds kill,freeze,disk]
                      [--jobs N] [--out bench/results/survival.json] [--keep FOLDER] [--long]

Every run is `trireme train -n 2 --max-restarts 3` of a tiny model, 60 steps, a checkpoint every 5. While it trains
    kill    a random rank gets SIGKILL,
    freeze  a random rank gets SIGSTOP, and stays so past the deadline of its peers,
    disk    the disk of the run directory is full for a while (takes root: a small tmpfs is mounted).
The moment is random too: from the start of the command to its last step. Afterwards must hold: exit code 0, the
digest and the losses of the unfailed run, a manifest that says what happened, and nothing left behind: no process, no
temporary file, no checkpoint that is not whole or too many, no lock, no shared memory.

Exit codes: 0 all of it held, 1 not, 3 there is no build, 77 --long without TRIREME_LONG_TESTS: left out.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_commit, first_line  # noqa: E402

KINDS = ("kill", "freeze", "disk")
EXIT_FAILED, EXIT_ENVIRONMENT, EXIT_SKIPPED = 1, 3, 77
RANKS, STEPS, EVERY, KEEP, MAX_RESTARTS = 2, 60, 5, 2, 3
MARK = "TRIREME_SURVIVAL"  # in the environment of everything that a run starts
LONGEST_RUN_S = 600.0
DISK = "8m"


def settings(timeout_s: float) -> list[str]:
    return ["--device=cpu", "--data.path=text.txt", "--model.n_layers=2", "--model.d_model=64", "--data.seq_len=64",
            "--train.global_batch=8", "--train.val_batches=1", "--train.sample_tokens=0", "--train.deterministic=true",
            f"--train.steps={STEPS}", f"--checkpoint.every={EVERY}", f"--checkpoint.keep={KEEP}",
            f"--comm.timeout_s={timeout_s:g}", "--quiet", "-n", str(RANKS), "--name=survival"]


class Broken(Exception):
    """What did not hold."""


@dataclass
class Fault:
    kind: str
    rank: int
    step: int  # after which it comes; 0: while the ranks start
    wait_s: float  # and so much later
    struck: bool = False
    shared: set[str] = field(default_factory=set)  # files of /dev/shm that ranks had


@dataclass
class Outcome:
    """Of one run."""

    fault: Fault
    seconds: float = 0.0
    attempts: list[dict] = field(default_factory=list)
    broken: dict | None = None  # what did not hold


@dataclass
class Findings:
    kinds: dict[str, collections.Counter]
    expected: dict = field(default_factory=dict)  # of the unfailed run
    broken: list[dict] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def total(self, what: str) -> int:
        return sum(count[what] for count in self.kinds.values())

    def add(self, outcome: Outcome) -> None:
        count = self.kinds[outcome.fault.kind]
        count["runs"] += 1
        count["struck"] += outcome.fault.struck
        self.seconds.append(outcome.seconds)
        if outcome.broken:
            self.broken.append(outcome.broken)
            return
        count["held"] += 1
        count["started_again"] += len(outcome.attempts) - 1
        count["steps_made_again"] += sum(attempt["steps_lost"] or 0 for attempt in outcome.attempts)


class Run:
    """A command that trains, in a folder of its own."""

    def __init__(self, trireme: Path, folder: Path, words: list[str]):
        self.folder, self.mark = folder, f"{os.getpid()}-{folder.name}"
        self.errors = open(folder / "stderr", "wb")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRIREME")}
        environment |= {MARK: self.mark, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
        self.process = subprocess.Popen([str(trireme), "train", *words], cwd=folder, env=environment,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.errors)

    def directory(self) -> Path:
        return (self.folder / "runs" / "latest").resolve()

    def last_step(self) -> int:
        try:
            lines = (self.directory() / "metrics.jsonl").read_text().splitlines()
            return json.loads(lines[-1])["step"] if lines else 0
        except (OSError, ValueError):
            return 0

    def processes(self) -> dict[int, dict[str, str]]:
        """Environments of what belongs to this run, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                text = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            variables = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
            if variables.get(MARK) == self.mark:
                found[int(entry.name)] = variables
        return found

    def pid_of(self, rank: int) -> int | None:
        for pid, variables in self.processes().items():
            if variables.get("RANK") == str(rank):
                return pid
        return None

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> int:
        try:
            return self.process.wait(LONGEST_RUN_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"still runs after {LONGEST_RUN_S:g} s") from None
        finally:
            self.errors.close()

    def end(self) -> None:
        """Whatever has happened: nothing of it goes on."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def shared_files(pid: int) -> set[str]:
    """Files under /dev/shm that a process maps or has open."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            found.update(name for name in path if name.startswith("/dev/shm/"))
        for link in Path(f"/proc/{pid}/fd").iterdir():
            name = os.readlink(link)
            if name.startswith("/dev/shm/"):
                found.add(name)
    except OSError:
        pass
    return {name.removesuffix(" (deleted)") for name in found}


def fill_disk(run: Run, seconds: float) -> None:
    """Nothing can be written to the runs for a while."""
    filler = run.folder / "runs" / "filler"
    try:
        with open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass
    time.sleep(seconds)
    filler.unlink()


def strike(run: Run, fault: Fault, chance: random.Random) -> None:
    while not run.is_over() and run.last_step() < fault.step:
        time.sleep(0.001)
    time.sleep(fault.wait_s)
    if run.is_over():
        return
    for pid, variables in run.processes().items():
        if "RANK" in variables:
            fault.shared |= shared_files(pid)
    if fault.kind == "disk":
        fault.struck = True
        fill_disk(run, chance.uniform(0.1, 1.0))
        return
    pid = run.pid_of(fault.rank)
    if pid is None:
        return
    try:
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        fault.struck = True
    except ProcessLookupError:
        pass


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def metrics(directory: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    require(steps == sorted(set(steps)), f"steps of metrics.jsonl are not in order: {steps}")
    return {line["step"]: line["loss"] for line in lines}


def check_end(directory: Path, expected: dict | None, fault: Fault | None) -> dict:
    summary = json.loads((directory / "summary.json").read_text())
    losses = metrics(directory)
    records_may_miss = fault is not None and fault.kind == "disk"
    require(records_may_miss or list(losses) == list(range(1, STEPS + 1)),
            f"metrics.jsonl has {len(losses)} of {STEPS} steps")
    if expected:
        require(summary["weights_digest"] == expected["digest"],
                f"digest {summary['weights_digest']} is not {expected['digest']}")
        differing = [step for step, loss in losses.items() if loss != expected["losses"][step]]
        require(not differing, f"losses of steps {differing} differ")
    return {"digest": summary["weights_digest"], "losses": losses}


def check_reports(directory: Path, attempts: list[dict], fault: Fault, errors: str) -> None:
    """Each attempt that failed has a report that speaks of all ranks, and the first blames the one that was hit."""
    for number, attempt in enumerate(attempts[:-1], 1):
        path = directory / f"crash-{number}.txt"
        if fault.kind == "disk" and not path.exists() and "the crash report could not be written" in errors:
            continue
        report = path.read_text()
        silent = [rank for rank in range(RANKS) if f"\n  rank {rank} (pid " not in report]
        require(not silent, f"crash-{number}.txt says nothing of ranks {silent}: {report}")
        require(attempt["cause"] in report, f"crash-{number}.txt has another cause than the manifest: {report}")
    met = fault.step > 0  # before that nobody knows for whom it waits
    if fault.struck and fault.kind != "disk" and met and len(attempts) > 1:
        require(attempts[0]["rank"] == fault.rank, f"rank {fault.rank} was hit, but the manifest says: {attempts[0]}")


def check_manifest(directory: Path, fault: Fault, errors: str) -> list[dict]:
    """A disk that is full when a run ends takes no word of that, and the run says so."""
    manifest = json.loads((directory / "manifest.json").read_text())
    attempts = manifest["attempts"]
    warned = fault.kind == "disk" and "the manifest could not record how the run ended" in errors
    require(manifest["exit_code"] == 0 or warned, f"the manifest says exit code {manifest['exit_code']}")
    for before, after in zip(attempts, attempts[1:]):
        require(bool(before["cause"]) and before["exit_code"] not in (None, 0), f"an attempt has no cause: {before}")
        require(after["resumed_from"] is None or after["resumed_from"] % EVERY == 0, f"resumed elsewhere: {after}")
    return attempts


def check_nothing_is_left(run: Run, fault: Fault) -> None:
    require(not run.processes(), f"processes are left: {run.processes().keys()}")
    directory = run.directory()
    left = [str(path.relative_to(directory)) for path in directory.rglob("*")
            if path.name.endswith(".tmp") or path.name.startswith((".", "tmp-"))]
    require(not left, f"files are left: {left}")
    saved = [path for path in (directory / "checkpoints").iterdir() if path.name.startswith("step-")]
    unfinished = [path.name for path in saved if not (path / "COMMIT.json").exists()]
    require(not unfinished, f"unfinished checkpoints are left: {unfinished}")
    require(len(saved) <= KEEP + (fault.kind == "disk"), f"{len(saved)} checkpoints are left")
    with open(directory / "checkpoints" / "LOCK") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Broken("the lock is held") from None
    shared = [name for name in fault.shared if os.path.exists(name)]
    require(not shared, f"shared memory is left: {shared}")


class Disk:
    """The runs folder on a small disk of its own, where this process may mount one."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)],
                              capture_output=True, text=True)
        self.mounted = done.returncode == 0

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder, Disk(Path(folder) / "disk") as disk:
        return disk.mounted


def make_text(folder: Path) -> None:
    folder.mkdir(parents=True)
    lines = [f"the rowers pull {line * 7 % 10} strokes in time\n" for line in range(400)]
    (folder / "text.txt").write_text("".join(lines))


def reference(trireme: Path, folder: Path, words: list[str]) -> dict:
    make_text(folder)
    run = Run(trireme, folder, words)
    try:
        code = run.wait()
        require(code == 0, f"the unfailed run ended with code {code}: {(folder / 'stderr').read_text()[-2000:]}")
        return check_end(run.directory(), None, None)
    finally:
        run.end()


def survive(trireme: Path, folder: Path, words: list[str], fault: Fault, expected: dict,
            chance: random.Random) -> list[dict]:
    """The attempts that it took. Raises Broken."""
    make_text(folder)
    with Disk(folder / "runs") if fault.kind == "disk" else tempfile.TemporaryDirectory():
        run = Run(trireme, folder, [*words, f"--max-restarts={MAX_RESTARTS}", "--restart-delay=0.1"])
        try:
            strike(run, fault, chance)
            code = run.wait()
            require(code == 0, f"exit code {code}: {(folder / 'stderr').read_text()[-3000:]}")
            check_end(run.directory(), expected, fault)
            errors = (folder / "stderr").read_text()
            attempts = check_manifest(run.directory(), fault, errors)
            check_reports(run.directory(), attempts, fault, errors)
            check_nothing_is_left(run, fault)
            return attempts
        finally:
            run.end()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--timeout", type=float, default=10.0, help="deadline of a collective, in seconds")
    parser.add_argument("--jobs", type=int, default=1, help="runs beside each other; each keeps two cores busy")
    parser.add_argument("--seconds", type=float, help="begin no further run after so long")
    parser.add_argument("--long", action="store_true", help="only where TRIREME_LONG_TESTS is set")
    parser.add_argument("--out", type=Path, help="JSON file for what was found")
    parser.add_argument("--commit", help="of the sources, where there is no repository")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs that did not hold")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"unknown kinds {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return arguments


def draw(kinds: list[str], number: int, chance: random.Random) -> Fault:
    step = chance.randrange(STEPS)
    return Fault(kind=kinds[number % len(kinds)], rank=chance.randrange(RANKS), step=step,
                 wait_s=chance.uniform(0.0, 3.0 if step == 0 else 0.03))


def try_one(trireme: Path, folder: Path, words: list[str], number: int, arguments: argparse.Namespace,
            findings: Findings) -> Outcome:
    chance = random.Random(arguments.seed * 1_000_003 + number)
    fault, began = draw(list(findings.kinds), number, chance), time.monotonic()
    outcome = Outcome(fault)
    try:
        outcome.attempts = survive(trireme, folder, words, fault, findings.expected, chance)
    except (Broken, OSError, ValueError) as problem:  # or a record is missing or torn
        outcome.broken = {"run": number, "kind": fault.kind, "rank": fault.rank, "step": fault.step,
                          "problem": str(problem)}
        print(f"run {number}, {fault.kind} of rank {fault.rank} after step {fault.step}: {problem}", file=sys.stderr)
        if arguments.keep:
            shutil.copytree(folder, arguments.keep / folder.name, symlinks=True, dirs_exist_ok=True)
    outcome.seconds = time.monotonic() - began
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def as_record(findings: Findings, words: list[str], arguments: argparse.Namespace) -> dict:
    seconds = sorted(findings.seconds)
    return {"schema": "trireme.survival/1", **describe_commit(arguments.commit),
            "command": " ".join(["tools/survival.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": {"cpu": first_line("/proc/cpuinfo", "model name"), "cores": len(os.sched_getaffinity(0)),
                        "kernel": os.uname().release, "load_average": os.getloadavg()},
            "settings": words, "jobs": arguments.jobs, "asked_for": arguments.runs, "runs": findings.total("runs"),
            "held": findings.total("held"), "broken": findings.broken, "kinds": findings.kinds,
            "digest": findings.expected["digest"],
            "seconds_per_run": {"median": seconds[len(seconds) // 2], "longest": seconds[-1]}}


def main() -> int:
    arguments = parse_arguments()
    if arguments.long and not os.environ.get("TRIREME_LONG_TESTS"):
        print("this takes many minutes; set TRIREME_LONG_TESTS=1 to run it")
        return EXIT_SKIPPED
    trireme = (arguments.build / "bin" / "trireme").resolve()
    if not (trireme.parent / "trireme-worker").exists():
        print(f"error: there is no trireme with its worker in {trireme.parent}; build it first", file=sys.stderr)
        return EXIT_ENVIRONMENT
    kinds = [kind for kind in arguments.kinds if kind != "disk" or can_mount()]
    if kinds != arguments.kinds:
        print("left out: disk, since this process may not mount a tmpfs", file=sys.stderr)
    if not kinds:
        print("error: no kind of fault is left; run it where a tmpfs may be mounted, or name other --kinds",
              file=sys.stderr)
        return EXIT_ENVIRONMENT
    findings = Findings({kind: collections.Counter() for kind in kinds})
    words = settings(arguments.timeout)
    with tempfile.TemporaryDirectory(prefix="trireme-survival-") as base:
        findings.expected = reference(trireme, Path(base) / "reference", words)
        end = time.monotonic() + (arguments.seconds or float("inf"))

        def try_in_time(number: int) -> Outcome | None:
            if time.monotonic() > end:
                return None
            return try_one(trireme, Path(base) / f"run-{number}", words, number, arguments, findings)

        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for outcome in filter(None, pool.map(try_in_time, range(arguments.runs))):
                findings.add(outcome)
    if arguments.out:
        arguments.out.write_text(json.dumps(as_record(findings, words, arguments), indent=1) + "\n")
    runs, struck = findings.total("runs"), findings.total("struck")
    print(f"{findings.total('held')} of {runs} runs ended as the unfailed one; {struck} were struck in time")
    return EXIT_FAILED if findings.broken or not struck else 0


if __name__ == "__main__":
    sys.exit(main())
