#!/usr/bin/env python3
"""How close predictions come: `trireme plan time` and the predicted peak beside a run of each case, as a JSON file.

    bench/predictions.py --cases "llama-1b:1;llama-1b:2:parallel.policy=ddp" --probe RATES.json --out FILE
                         [--steps 20] [--commit ID] [--bin build/release/bin/trireme]

A case is MODEL:RANKS or MODEL:RANKS:KEY=VALUE,KEY=VALUE. MODEL is a config (configs/NAME.yaml) or a preset. RATES.json is
what `trireme doctor --probe` measured on this machine. A run's time is the median of its steps behind the first ten,
its peak that of the rank that has most. Exit codes: 0 done, 1 a program failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import describe_commit, describe_machine
from programs import EXIT_FAILED, EXIT_USAGE, ROOT, BenchError, json_objects, say

WARM_UP = 10
SECONDS = 300  # for one program


def parse_case(text: str) -> dict:
    model, _, rest = text.partition(":")
    ranks, _, keys = rest.partition(":")
    if not model or not ranks.isdigit():
        raise BenchError(EXIT_USAGE, f"--cases: '{text}' is not MODEL:RANKS or MODEL:RANKS:KEY=VALUE,...")
    return {"case": text, "model": model, "ranks": int(ranks), "keys": [key for key in keys.split(",") if key]}


def words_of(case: dict, steps: int) -> list[str]:
    config = ROOT / "configs" / f"{case['model']}.yaml"
    model = [str(config.relative_to(ROOT))] if config.exists() else [f"--model.preset={case['model']}"]
    keys = [f"train.steps={steps}", "train.val_batches=0", "train.val_every=0", "train.log_every=1",
            "train.sample_tokens=0", "checkpoint.final_weights=false", *case["keys"]]
    return [*model, "-n", str(case["ranks"]), *(f"--{key}" for key in keys)]


def output_of(command: list[str]) -> list[dict]:
    """The JSON objects that it prints."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise BenchError(EXIT_FAILED, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    whole = done.stdout.strip()
    return [json.loads(whole)] if whole.startswith("{\n") else json_objects(done.stdout)


def measure(case: dict, options: argparse.Namespace, folder: str) -> dict:
    words = words_of(case, options.steps)
    [plan] = output_of([options.bin, "plan", "time", *words, "--probe", options.probe, "--json"])
    printed = output_of([options.bin, "train", *words, "--json", f"--run-dir={folder}"])
    steps, summary = [one["step_ms"] for one in printed if "step_ms" in one], printed[-1]
    if len(steps) <= WARM_UP:
        raise BenchError(EXIT_FAILED, f"{case['case']}: only {len(steps)} steps; raise --steps above {WARM_UP}")
    measured_ms, predicted_ms = statistics.median(steps[WARM_UP:]), 1e3 * plan["seconds"]
    peak, predicted_peak = summary["peak_bytes"], summary["predicted_peak_bytes"]
    say(f"{case['case']:60} time {predicted_ms:9.2f} / {measured_ms:9.2f} ms = {predicted_ms / measured_ms:.3f}   "
        f"peak {predicted_peak / 2**30:7.3f} / {peak / 2**30:7.3f} GiB = {predicted_peak / peak:.3f}")
    return case | {"command": " ".join(["trireme", "train", *words]), "predicted_ms": predicted_ms,
                   "measured_ms": measured_ms, "time_ratio": predicted_ms / measured_ms, "step_ms": steps,
                   "predicted_peak_bytes": predicted_peak, "peak_bytes": peak,
                   "peak_ratio": predicted_peak / peak, "causes": plan["by_pp_rank"][0]["causes_s"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--probe", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--commit")
    parser.add_argument("--bin", default="build/release/bin/trireme")
    options = parser.parse_args()
    options.probe = str(Path(options.probe).resolve())
    result = {"mode": "predictions", **describe_commit(options.commit), "machine": describe_machine(sys.executable),
              "rates": json.loads(Path(options.probe).read_text()), "cases": []}
    failed = 0
    try:
        cases = [parse_case(text) for text in options.cases.split(";") if text]
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    result["cases"].append(measure(case, options, folder))
                except (BenchError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
                    say(f"{case['case']}: {error}")
                    failed += 1
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    except BenchError as error:
        say(f"predictions: {error}")
        return error.code
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
