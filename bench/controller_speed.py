#!/usr/bin/env python3
"""What driving workers from one program costs: instructions, fetches, bulk values, an idle session, and products beside
ranks that make the same program for themselves (SPMD), as a JSON file.

    bench/controller_speed.py [--workers 2,8] [--build build/release] --out FILE

Captured steps stand beside those whose instructions are sent one by one. All of it runs on CPUs of this machine, workers
being processes of one thread; --workers demo takes the demo's model on one worker, on a GPU where there is one. Exit codes: 0 done, 1 the program failed,
3 it could not be built.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from machine import describe_commit, describe_machine, load_warning
from programs import EXIT_ENVIRONMENT, EXIT_FAILED, ROOT, say


def fields(pid: str) -> list[str]:
    """Those of /proc/PID/stat behind the name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def processor_seconds(root: int) -> float:
    """What a process and all below it have used."""
    all_fields = {int(pid): fields(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    members, grew = {root}, True
    while grew:
        more = {pid for pid, one in all_fields.items() if one and int(one[1]) in members} - members
        members |= more
        grew = bool(more)
    ticks = sum(int(all_fields[pid][11]) + int(all_fields[pid][12]) for pid in members if all_fields.get(pid))
    return ticks / os.sysconf("SC_CLK_TCK")


def measured(program: Path, workers: str) -> list[dict]:
    results, idle = [], {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRIREME_COMMAND": str(program.parent / "trireme")}
    with subprocess.Popen([program, *workers.split(",")], stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            found = json.loads(line)
            if found["what"] == "idle":
                idle = {**found, "before": processor_seconds(process.pid)}
            elif found["what"] == "idle over":
                used = processor_seconds(process.pid) - idle.pop("before")
                results.append({**idle, "share_of_a_core": used / idle["seconds"]})
            else:
                results.append(found)
    if process.returncode != 0:
        raise ChildProcessError(f"{program} ended with {process.returncode}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,8")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    command = ["cmake", "--build", str(options.build), "--target", "controller_speed"]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        return EXIT_ENVIRONMENT
    machine = describe_machine(sys.executable)
    if warning := load_warning(machine):
        say(f"warning: {warning}")
    try:
        results = measured((options.build / "bin" / "controller_speed").resolve(), options.workers)
    except ChildProcessError as error:
        say(str(error))
        return EXIT_FAILED
    for result in results:
        say(json.dumps(result))
    record = {"mode": "controller", **describe_commit(options.commit), "machine": machine, "results": results}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
