#!/usr/bin/env python3
"""Plants single faults in a room's sources and says which of them no test of the room notices.

    tools/mutants.py plan [--count 20] [--seed 1] [--build build/release] [--minutes 60] [--out FILE]

Lines and faults are drawn by the seed: a comparison that is another one, a number that is one more, a term that is
missing, a condition that is turned round, a call that is left out, two statements that change places. A fault that does
not compile is drawn anew. The room's test programs (test_ROOM and test_ROOM_*, without GPUs) are built and run; a test
that fails, crashes or takes five times as long as all did without a fault has noticed it. Sources are put back after each
fault, also on Ctrl-C; a source with changes that git does not know is never touched.

Exit codes: 0 all were noticed, 1 some were not, or none was planted, 2 wrong usage, 3 the room's tests fail without any fault.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))

from machine import describe_commit  # noqa: E402

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
TURNED = {"&&": "||", "||": "&&", "std::min": "std::max", "std::max": "std::min", "true": "false", "false": "true",
          " - ": " + ", " / ": " * "}
# A line of these is no arithmetic: declarations, templates, messages, preprocessor, literals that are text.
SKIPPED = re.compile(r'^\s*(//|///|#|\*|using |namespace |template|static_assert|case |default:|struct |class |enum |[})])|"|throw |<<|operator|->\s*\w+ \{$')
COMPARISON = re.compile(r" (<|<=|>|>=|==|!=) ")
NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.'])")
TERM = re.compile(r" [+] [\w.()\[\]:]+(?=[;,)\s])")
CALL = re.compile(r"^\s+[\w.:>\-\[\]*]+\([^;{}]*\);$")
# An assignment or a call: what is declared cannot change places with what uses it.
STATEMENT = re.compile(r"^(\s+)[\w.>\-\[\]*]+(\(| [+*/-]?= )[^{}]*;$")
NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Fault:
    path: Path
    line: int  # counted from 1
    kind: str
    before: list[str]
    after: list[str]  # the lines in their place

    def text(self) -> str:
        after = " / ".join(line.strip() for line in self.after) or "(nothing)"
        return f"{self.path}:{self.line}: {self.kind}: {' / '.join(line.strip() for line in self.before)} -> {after}"


def replaced(line: str, begin: int, end: int, text: str) -> str:
    return line[:begin] + text + line[end:]


def faults_of_line(line: str) -> Iterator[tuple[str, str]]:
    """(kind, the line with the fault) for each that this line can have."""
    if SKIPPED.search(line):
        return
    for found in COMPARISON.finditer(line):
        yield "comparison", replaced(line, *found.span(1), COMPARISONS[found.group(1)])
    for found in NUMBER.finditer(line):
        yield "off by one", replaced(line, *found.span(1), str(int(found.group(1)) + 1))
    for found in TERM.finditer(line):
        yield "dropped term", replaced(line, *found.span(), "")
    for word, other in TURNED.items():
        pattern = rf"\b{word}\b" if word[0].isalpha() else re.escape(word)
        for found in re.finditer(pattern, line):
            yield "turned round", replaced(line, *found.span(), other)
    if CALL.match(line) and " = " not in line and not line.lstrip().startswith("return"):
        yield "dropped call", ""


def may_change_places(line: str, following: str) -> bool:
    """Two statements of which it may matter which is first: they name a thing in common."""
    first, second = STATEMENT.match(line), STATEMENT.match(following)
    if not first or not second or first.group(1) != second.group(1):
        return False
    if any(SKIPPED.search(one) or one.lstrip().startswith("return") for one in (line, following)):
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
    """All of them in an order of the seed, in which kinds take turns: most lines can only be off by one."""
    by_kind: dict[str, list[Fault]] = {}
    for fault in random.Random(seed).sample(faults, len(faults)):
        by_kind.setdefault(fault.kind, []).append(fault)
    order = []
    while any(by_kind.values()):
        order += [left.pop() for _, left in sorted(by_kind.items()) if left]
    return order


class Room:
    def __init__(self, name: str, build: Path) -> None:
        self.build = build
        targets = subprocess.run(["ninja", "-C", str(build), "-t", "targets", "all"], capture_output=True, text=True,
                                 check=True).stdout
        programs = re.findall(rf"^(test_{name}(?:_\w+)?): phony$", targets, re.MULTILINE)
        self.programs = [one for one in programs if "gpu" not in one and "fuzz" not in one and "long" not in one]

    def builds(self) -> bool:
        command = ["cmake", "--build", str(self.build), "--target", *self.programs]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def passes(self, limit_s: float) -> bool:
        for program in self.programs:
            command = [str((self.build / "bin" / program).resolve()), "--gtest_brief=1"]
            folder = self.build / "tests"
            # A session of its own, so that ranks which a test has started end with it.
            with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  start_new_session=True) as process:
                try:
                    code = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
            if code != 0:
                return False
        return True


def verdict(room: Room, fault: Fault, limit_s: float) -> str | None:
    """"noticed" or "survived"; None: it does not compile."""
    path = ROOT / fault.path
    whole = path.read_text()
    try:
        path.write_text(with_fault(whole, fault))
        if not room.builds():
            return None
        return "survived" if room.passes(limit_s) else "noticed"
    finally:
        path.write_text(whole)


def clean_sources(room: str) -> list[Path]:
    known = subprocess.run(["git", "ls-files", f"trireme/{room}/*.cpp"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split()
    changed = subprocess.run(["git", "diff", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                             check=True).stdout.split()
    return [Path(path) for path in known if path not in changed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault is planted after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # sources are put back
    sources = clean_sources(options.room)
    if not sources:
        parser.error(f"there are no unchanged sources in trireme/{options.room}")
    room = Room(options.room, options.build)
    if not room.programs:
        parser.error(f"{options.build} has no program test_{options.room}; configure it with tests")
    began = time.monotonic()
    if not room.builds() or not room.passes(3600):
        print(f"the tests of {options.room} fail without any fault", file=sys.stderr)
        return 3
    before = time.monotonic()
    room.passes(3600)
    limit_s = 5 * (time.monotonic() - before) + 10
    faults = [fault for path in sources for fault in faults_of(path, (ROOT / path).read_text())]
    results: list[dict] = []
    try:
        for fault in drawn(faults, options.seed):
            if len(results) == options.count or time.monotonic() - began > 60 * options.minutes:
                break
            if (said := verdict(room, fault, limit_s)) is None:
                continue
            results.append({"fault": fault.text(), "result": said})
            print(f"{said:8} {fault.text()}", flush=True)
    finally:
        room.builds()
    survivors = [one["fault"] for one in results if one["result"] == "survived"]
    print(f"{len(results)} faults in {options.room}, of {len(faults)}: {len(survivors)} survived")
    if options.out:
        record = {**describe_commit(None), "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
                  "room": options.room, "seed": options.seed, "possible": len(faults), "faults": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if not results:
        print("no fault was planted; give more --minutes", file=sys.stderr)
    return 1 if survivors or not results else 0


if __name__ == "__main__":
    sys.exit(main())
