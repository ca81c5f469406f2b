#!/usr/bin/env python3
"""Plants single faults in a room's sources and says which of them no test of the room notices.

    tools/mutants.py plan [--count 20] [--seed 1] [--at-least 0.75] [--build build/release] [--minutes 60] [--out FILE]
    tools/mutants.py plan --again FILE

Lines and faults are drawn by the seed: a comparison that is another one, a number that is one more, a term that is
missing, a condition that is turned round, a call that is left out, two statements that change places. A fault that does
not compile is drawn anew. The room's test programs (test_ROOM and test_ROOM_*, without GPUs) are built and run in parts,
those first that noticed most, and once more with the variables of the environment with which ctest does so. A part that
fails, crashes, takes five times as long as without a fault, or half of the machine's memory, has noticed it.
Sources are put back after each fault, also on Ctrl-C; a source with changes that git does not know is never touched.
Faults in tools/mutants_equivalent.json, which says why they change nothing that can be seen, are not planted.

Exit codes: 0 as many were noticed as must be, 1 fewer were, or none was planted, 2 wrong usage, 3 the room's tests fail
without any fault.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_commit, describe_machine  # noqa: E402

EQUIVALENT = ROOT / "tools" / "mutants_equivalent.json"
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
TURNED = {"&&": "||", "||": "&&", "std::min": "std::max", "std::max": "std::min", "true": "false", "false": "true",
          " - ": " + ", " / ": " * "}
# A line of these is no arithmetic: declarations, templates, messages, preprocessor, literals that are text.
SKIPPED = re.compile(r'^\s*(//|///|#|\*|using |namespace |template|static_assert|case |default:|struct |class |enum |[})])|"|throw |<<|operator|->\s*\w+ \{$')
COMPARISON = re.compile(r" (<|<=|>|>=|==|!=) ")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.'])")
TERM = re.compile(r" [+] [\w.:]+(?:\([\w.,: ]*\)|\[[\w.: ]*\])*(?=[;,)\]]| [-+<>=!&|])")
CALL = re.compile(r"^\s+[\w.:>\-\[\]*]+\([^;{}]*\);$")
# An assignment or a call: what is declared cannot change places with what uses it.
STATEMENT = re.compile(r"^(\s+)([\w.>\-\[\]*]+)(\(| [+*/-]?= )([^{}]*;)$")
LINE = re.compile(r":\d+: ")
NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Fault:
    path: Path
    line: int  # counted from 1
    kind: str
    before: list[str]
    after: list[str]  # the lines in their place

    def change(self) -> str:
        before, after = (" / ".join(line.strip() for line in lines) for lines in (self.before, self.after))
        return f"{self.kind}: {before} -> {after or '(nothing)'}"

    def text(self) -> str:
        return f"{self.path}:{self.line}: {self.change()}"

    def key(self) -> str:
        """Says the same after lines were inserted above it."""
        return f"{self.path}: {self.change()}"


def replaced(line: str, begin: int, end: int, text: str) -> str:
    return line[:begin] + text + line[end:]


def faults_of_line(line: str) -> Iterator[tuple[str, str]]:
    """(kind, the line with the fault) for each that this line can have."""
    if SKIPPED.search(line):
        return
    code = line.partition(" //")[0]
    for found in COMPARISON.finditer(code):
        yield "comparison", replaced(line, *found.span(1), COMPARISONS[found.group(1)])
    for found in NUMBER.finditer(code):
        yield "off by one", replaced(line, *found.span(1), str(int(found.group(1)) + 1))
    for found in TERM.finditer(code):
        yield "dropped term", replaced(line, *found.span(), "")
    for word, other in TURNED.items():
        pattern = rf"\b{word}\b" if word[0].isalpha() else re.escape(word)
        found = list(re.finditer(pattern, code))
        if word in ("&&", "||") and len(found) > 1:  # && beside || is a warning
            yield "turned round", re.sub(pattern, other, code) + line[len(code):]
            continue
        for one in found:
            yield "turned round", replaced(line, *one.span(), other)
    if CALL.match(line) and " = " not in line and not line.lstrip().startswith("return") and line.count("(") == line.count(")"):
        yield "dropped call", ""


def changes(statement: re.Match[str]) -> str:
    """What it assigns to, or the object whose member it calls; empty for another call, which may change anything."""
    name = statement.group(2)
    return re.sub(r"^\w+$|(\.|->)\w+$", "", name) if statement.group(3) == "(" else name


def independent(first: re.Match[str], second: re.Match[str]) -> bool:
    """Two statements of which neither names what the other changes, or which add to one thing."""
    one, other = changes(first), changes(second)
    if not one or not other:
        return False
    if one == other:
        return first.group(3) == second.group(3) == " += "
    return not any(re.search(rf"(?<![\w.>]){re.escape(name)}\b", line.group())
                   for name, line in ((one, second), (other, first)))


def may_change_places(line: str, following: str) -> bool:
    """Two statements of which it may matter which is first: they name a thing in common."""
    first, second = STATEMENT.match(line), STATEMENT.match(following)
    if not first or not second or first.group(1) != second.group(1) or independent(first, second):
        return False
    if any(SKIPPED.search(one) or one.lstrip().startswith("return") or one.count("(") != one.count(")")
           for one in (line, following)):
        return False
    return bool(set(NAME.findall(line)) & set(NAME.findall(following)))


def faults_of(path: Path, text: str) -> list[Fault]:
    lines = text.split("\n")
    faults = []
    for number, line in enumerate(lines, 1):
        for kind, after in faults_of_line(line):
            faults.append(Fault(path, number, kind, [line], [after] if after else []))
        following = lines[number] if number < len(lines) else ""
        if may_change_places(line, following):
            faults.append(Fault(path, number, "swapped order", [line, following], [following, line]))
    return faults


def with_fault(text: str, fault: Fault) -> str:
    lines = text.split("\n")
    begin = fault.line - 1
    assert lines[begin:begin + len(fault.before)] == fault.before
    return "\n".join(lines[:begin] + fault.after + lines[begin + len(fault.before):])


def drawn(faults: list[Fault], seed: int) -> list[Fault]:
    """All of them in an order of the seed, in which kinds take turns: most lines can only be off by one. A change of the
    sources adds and removes faults, and leaves the order of the others."""
    by_kind: dict[str, list[Fault]] = {}
    for fault in sorted(faults, key=lambda fault: hashlib.sha256(f"{seed} {fault.key()}".encode()).digest(), reverse=True):
        by_kind.setdefault(fault.kind, []).append(fault)
    order = []
    while any(by_kind.values()):
        order += [left.pop() for _, left in sorted(by_kind.items()) if left]
    return order


@dataclass(eq=False)
class Part:
    """Tests of a program that one process runs."""

    program: str
    tests: str  # as GTEST_FILTER has them
    seconds: float
    share: tuple[int, int] = (0, 1)  # which one of how many
    variables: dict[str, str] = field(default_factory=dict)  # that ctest sets for these tests alone
    noticed: int = 0

    def environment(self) -> dict[str, str]:
        return os.environ | self.variables | {"OMP_NUM_THREADS": "1", "GTEST_FILTER": self.tests,
                                              "GTEST_SHARD_INDEX": str(self.share[0]),
                                              "GTEST_TOTAL_SHARDS": str(self.share[1])}

    def rank(self) -> float:
        """How often it may be expected to notice a fault in a second."""
        return (self.noticed + 0.5) / (self.seconds + 0.5)


def in_parts(whole: Part, times: dict[str, float], jobs: int) -> list[Part]:
    """Tests of less than a tenth of a second in as many parts as run at a time, others in parts of about two seconds."""
    slow = sorted((seconds, name) for name, seconds in times.items() if seconds >= 0.1)
    quick_s = sum(times.values()) - sum(seconds for seconds, _ in slow)
    others = ":".join(name for _, name in slow)
    quick = f"{whole.tests}-{others}" if slow else whole.tests
    parts = [replace(whole, tests=quick, seconds=quick_s / jobs, share=(share, jobs)) for share in range(jobs)]
    pack: list[tuple[float, str]] = []
    for number, one in enumerate(slow, 1):
        pack.append(one)
        if (seconds := sum(taken for taken, _ in pack)) >= 2 or number == len(slow):
            parts.append(replace(whole, tests=":".join(name for _, name in pack), seconds=seconds, share=(0, 1)))
            pack = []
    return parts


def with_variables(listing: dict, program: str) -> list[Part]:
    """Tests that ctest runs once more with variables of the environment, of its list in JSON: ranks that are forks."""
    tests: dict[tuple[str, ...], list[str]] = {}
    for test in listing["tests"]:
        command = test.get("command", [""])
        names = [word.removeprefix("--gtest_filter=") for word in command if word.startswith("--gtest_filter=")]
        variables = [one for entry in test.get("properties", []) if entry["name"] == "ENVIRONMENT" for one in entry["value"]
                     if not one.startswith(("OMP_NUM_THREADS=", "GTEST_"))]
        if Path(command[0]).name == program and names and variables:
            tests.setdefault(tuple(variables), []).extend(names)
    return [Part(program, ":".join(names), 3600, variables=dict(one.split("=", 1) for one in variables))
            for variables, names in tests.items()]


def most_memory() -> int:
    """Bytes for a program and what it starts: a fault may ask for memory without end, and the machine has other things to
    do. Addresses are not limited: those of the stacks of two thousand threads are 16 GiB that nobody touches."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def memory_by_session() -> dict[int, int]:
    """Resident bytes of all processes of a session."""
    sizes: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            words = stat.read_text().rpartition(")")[2].split()
            sizes[int(words[3])] = sizes.get(int(words[3]), 0) + int(words[21]) * os.sysconf("SC_PAGE_SIZE")
    return sizes


def end_session(process: subprocess.Popen) -> None:
    """Ends it and the ranks that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Room:
    def __init__(self, name: str, build: Path, jobs: int) -> None:
        self.build = build
        self.jobs = jobs
        targets = subprocess.run(["ninja", "-C", str(build), "-t", "targets", "all"], capture_output=True, text=True,
                                 check=False).stdout
        programs = re.findall(rf"^(test_{name}(?:_\w+)?): phony$", targets, re.MULTILINE)
        self.programs = [one for one in programs if "gpu" not in one and "fuzz" not in one and "long" not in one]
        self.parts: list[Part] = []

    def builds(self) -> bool:
        command = ["cmake", "--build", str(self.build), "--target", *self.programs]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def compiled(self, sources: list[Path]) -> list[Path]:
        """Those that the build has compiled: one without CUDA has no use for sources that only run on GPUs."""
        listing = subprocess.run(["ninja", "-C", str(self.build), "-t", "deps"], capture_output=True, text=True,
                                 check=False).stdout
        known = {os.path.normpath(self.build.resolve() / line.strip()) for line in listing.splitlines() if line.endswith(".cpp")}
        return [path for path in sources if str(ROOT / path) in known]

    def start(self, part: Part, arguments: list[str]) -> subprocess.Popen:
        program = str((self.build / "bin" / part.program).resolve())
        return subprocess.Popen([program, "--gtest_brief=1", *arguments], cwd=self.build / "tests", env=part.environment(),
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def first_failure(self, parts: list[Part], arguments: list[list[str]]) -> Part | None:
        """Runs them in this order, some at a time, until one of them fails, takes five times as long as before
        or too much memory."""
        waiting = list(zip(parts, arguments))
        running: dict[Part, tuple[subprocess.Popen, float]] = {}
        look_s, next_look = 0.25, 0.0
        memory: dict[int, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    part, words = waiting.pop(0)
                    running[part] = (self.start(part, words), time.monotonic() + 5 * part.seconds + 10)
                time.sleep(0.01)
                if time.monotonic() >= next_look:
                    memory, next_look = memory_by_session(), time.monotonic() + look_s
                for part, (process, until) in list(running.items()):
                    code = process.poll()
                    if code is None and time.monotonic() < until and memory.get(process.pid, 0) <= most_memory():
                        continue
                    if code != 0:
                        return part
                    end_session(running.pop(part)[0])
            return None
        finally:
            for process, _ in running.values():
                end_session(process)

    def learns_times(self) -> bool:
        """Runs all tests once and divides them into parts by how long they took; no if one fails."""
        listing = subprocess.run(["ctest", "--show-only=json-v1"], cwd=self.build, capture_output=True, text=True, check=False)
        known = json.loads(listing.stdout) if listing.returncode == 0 else {"tests": []}
        wholes = [whole for program in self.programs for whole in [Part(program, "*", 3600), *with_variables(known, program)]]
        shares = [(whole, share) for whole in wholes for share in range(self.jobs)]
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{number}" for number in range(len(shares))]
            if self.first_failure([replace(whole, share=(share, self.jobs)) for whole, share in shares],
                                  [[f"--gtest_output=json:{file}"] for file in files]):
                return False
            for whole in wholes:
                times: dict[str, float] = {}
                for file in (file for (one, _), file in zip(shares, files) if one is whole):
                    times |= times_of(json.loads(file.read_text()))
                self.parts += in_parts(whole, times, self.jobs)
        return True

    def passes(self) -> bool:
        """Whether all tests do. Those that notice most in a second come first."""
        order = sorted(self.parts, key=Part.rank, reverse=True)
        failed = self.first_failure(order, [["--gtest_fail_fast"]] * len(order))
        if failed:
            failed.noticed += 1
        return failed is None


def times_of(output: dict) -> dict[str, float]:
    """Seconds that each test took, of a JSON file of googletest."""
    return {f"{suite['name']}.{test['name']}": float(test["time"].removesuffix("s"))
            for suite in output["testsuites"] for test in suite["testsuite"] if test["status"] == "RUN"}


def verdict(room: Room, fault: Fault) -> str | None:
    """"noticed" or "survived"; None: it does not compile."""
    path = ROOT / fault.path
    whole = path.read_text()
    try:
        path.write_text(with_fault(whole, fault))
        if not room.builds():
            return None
        return "survived" if room.passes() else "noticed"
    finally:
        path.write_text(whole)


class Sources:
    """What they hold and when they were written, before a fault is planted."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = {ROOT / path: ((ROOT / path).read_bytes(), (ROOT / path).stat()) for path in paths}

    def build_as_before(self, room: Room) -> None:
        """Builds without a fault, and then gives sources their old times: all objects are newer, and no other build makes them
        anew. Where this build fails the new times stay, so that no object that has a fault is taken for one of the source; they
        stay as well where somebody else has changed a source."""
        if not room.builds():
            return
        for path, (content, stat) in self.paths.items():
            if path.read_bytes() == content:
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def clean_sources(room: str) -> list[Path]:
    known = subprocess.run(["git", "ls-files", f"trireme/{room}/*.cpp"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split()
    changed = subprocess.run(["git", "diff", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                             check=True).stdout.split()
    return [Path(path) for path in known if path not in changed]


def chosen(faults: list[Fault], options: argparse.Namespace) -> list[Fault]:
    """Those to plant, in order: a draw, or what survived before. What changes nothing is left out."""
    equivalent = json.loads(EQUIVALENT.read_text())
    faults = [fault for fault in faults if fault.key() not in equivalent]
    if not options.again:
        return drawn(faults, options.seed)
    survived = {LINE.sub(": ", one["fault"], count=1) for one in json.loads(options.again.read_text())["faults"]
                if one["result"] == "survived"}
    return [fault for fault in faults if fault.key() in survived]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, metavar="FILE", help="plants what survived in this record of --out")
    parser.add_argument("--at-least", type=float, default=1.0, metavar="SHARE", help="of faults that must be noticed: 0.75")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes of tests at a time")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault is planted after so long")
    parser.add_argument("--out", type=Path)
    return parser


def write_record(options: argparse.Namespace, possible: int, results: list[dict]) -> None:
    record = {"command": shlex.join(["tools/mutants.py", *sys.argv[1:]]), **describe_commit(None),
              "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "machine": describe_machine(sys.executable), "room": options.room, "seed": options.seed,
              "possible": possible, "faults": results}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # sources are put back
        signal.signal(number, signal.default_int_handler)
    sources = clean_sources(options.room)
    if not sources:
        parser.error(f"there are no unchanged sources in trireme/{options.room}")
    room = Room(options.room, options.build, options.jobs)
    if not room.programs:
        parser.error(f"{options.build} has no program test_{options.room}; configure it with tests")
    began = time.monotonic()
    if not (built := room.builds()) or not room.learns_times():
        what = "fail" if built else "do not build"
        print(f"the tests of {options.room} {what} without any fault", file=sys.stderr)
        return 3
    sources = room.compiled(sources)
    faults = [fault for path in sources for fault in faults_of(path, (ROOT / path).read_text())]
    results: list[dict] = []
    before = Sources(sources)
    try:
        for fault in chosen(faults, options):
            if len(results) == options.count or time.monotonic() - began > 60 * options.minutes:
                break
            planted = time.monotonic()
            if (said := verdict(room, fault)) is None:
                continue
            results.append({"fault": fault.text(), "result": said, "seconds": round(time.monotonic() - planted, 1)})
            print(f"{said:8} {fault.text()}", flush=True)
    finally:
        before.build_as_before(room)
    survived = sum(one["result"] == "survived" for one in results)
    print(f"{len(results)} faults in {options.room}, of {len(faults)}: {survived} survived")
    if options.out:
        write_record(options, len(faults), results)
    if not results:
        print("no fault was planted; give more --minutes", file=sys.stderr)
    return 0 if results and len(results) - survived >= options.at_least * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
