#!/usr/bin/env python3
"""How long it takes many ranks on one machine to start, as a JSON file.

    bench/starts.py [--ranks 2,8,64] [--rounds 5] [--bin TRIREME] [--other TRIREME --other-commit HASH] --out FILE

Starts `gpt-tiny` on CPUs, one sequence a rank, for two steps. `first_step_s` is the time from starting the command
to the line that reports its first step, `whole_s` until it has ended. With --other, another build takes turns.
Exit codes: 0 done, 1 a run failed, 3 there is no build.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_commit, describe_machine
from programs import EXIT_ENVIRONMENT, EXIT_FAILED, ROOT, BenchError, Side, run_program, say


def start_once(binary: str, ranks: int, timeout: float) -> dict:
    with tempfile.TemporaryDirectory() as runs:
        command = [binary, "train", "--model.preset=gpt-tiny", "-n", str(ranks), "--device=cpu", "--json",
                   "--train.steps=2", f"--train.global_batch={ranks}", "--train.micro_batch=1", "--train.val_batches=0",
                   "--train.sample_tokens=0", "--checkpoint.final_weights=false", "--run-dir", f"{runs}/run"]
        began = time.monotonic()
        output = run_program(Side(command, "tokens_per_s"), timeout)
        return {"first_step_s": output.startup_s, "whole_s": time.monotonic() - began}


def medians(starts: list[dict]) -> dict:
    return {key: statistics.median(start[key] for start in starts) for key in ("first_step_s", "whole_s")}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,8,64", help="one number or several, each of which is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin/trireme"))
    parser.add_argument("--other", help="another build's trireme")
    parser.add_argument("--other-commit", help="commit to record of it")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one run may take")
    parser.add_argument("--commit", help="commit to record, if the sources are not in a repository")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.other and not options.other_commit:
        parser.error("--other wants --other-commit: a number without its commit says nothing")
    return options


def main() -> int:
    options = parse_arguments()
    builds = {"ours": options.bin, **({"other": options.other} if options.other else {})}
    for binary in builds.values():
        if not Path(binary).exists():
            say(f"{binary} does not exist; build it, or set --bin")
            return EXIT_ENVIRONMENT
    result = {"benchmark": "starts", "command": "bench/starts.py " + " ".join(sys.argv[1:]),
              **describe_commit(options.commit), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "machine": describe_machine(sys.executable), "other_commit": options.other_commit, "cases": []}
    code = 0
    for ranks in map(int, options.ranks.split(",")):
        starts: dict[str, list[dict]] = {name: [] for name in builds}
        failed = dict.fromkeys(builds, 0)
        for turn in range(options.rounds):
            for name in builds if turn % 2 == 0 else reversed(builds):
                try:
                    starts[name].append(start_once(builds[name], ranks, options.timeout))
                except BenchError as error:
                    say(f"{name}, {ranks} ranks: {error}")
                    failed[name] += 1
                    code = EXIT_FAILED
        result["cases"].append({"ranks": ranks, "starts": starts, "failed": failed,
                                "median": {name: medians(found) for name, found in starts.items() if found}})
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        say(f"{ranks} ranks: {json.dumps(result['cases'][-1]['median'])}")
    return code


if __name__ == "__main__":
    sys.exit(main())
