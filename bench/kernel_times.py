"""Where the time of our steps goes on the GPU, by groups of kernels."""

from __future__ import annotations

import re
from dataclasses import replace

from programs import EXIT_FAILED, BenchError, Side, run_program, say, with_options

WARMUP = 10  # steps that `trireme train --profile` lets pass, when there are as many
LINE = re.compile(r"profile (?:(?:of CPU operators, )?([\d.]+) ms a step, ([\d.]+) ms idle(.*)"
                  r"|without kernels[^;]*); open ")
GROUP = re.compile(r"; ([^;]+) ([\d.]+) ms \((\d+)\)")


def parse_profile(log: str) -> dict:
    """The line that `trireme train --profile` logs. Times and calls are those of one step of the
    first rank; groups overlap where streams do."""
    line = LINE.search(log)
    if not line:
        raise BenchError(EXIT_FAILED, 'no line "profile ...; open ..." in the log')
    if line[1] is None:
        return {"step_ms": None, "idle_ms": None, "groups": {}}
    groups = {name: {"ms": float(ms), "calls": int(calls)}
              for name, ms, calls in GROUP.findall(line[3])}
    return {"step_ms": float(line[1]), "idle_ms": float(line[2]), "groups": groups}


def profile(ours: Side, steps: int, timeout: float) -> dict:
    """Of a short run of its own, since tracing takes time."""
    options = {"profile": steps, "train.steps": WARMUP + steps}
    side = replace(ours, command=with_options(ours.command, options))
    result = {"steps": steps, "command": side.printable()}
    result |= parse_profile(run_program(side, timeout).log)
    if not result["groups"]:
        say("  profile: no kernels")
        return result
    groups = ", ".join(f"{name} {group['ms']:.2f}" for name, group in result["groups"].items())
    say(f"  profile: {result['step_ms']:.2f} ms a step, {result['idle_ms']:.2f} idle; {groups}")
    return result
