#!/usr/bin/env python3
"""What saving costs on this machine's CPUs, as a JSON file:

write     bytes/s of checkpoints written at once (checkpoint.async=false) beside dd with fsync to the same disk
overhead  what saving every 100 steps adds to the quickstart's time. Two runs differ by more than that on a machine
          that others use, so each save of a run that saves every 10 steps is compared with its neighbours: the
          call and the four steps behind it, less four times the median of the fifth to the ninth. A save that is
          still written then slows those, too, and looks cheaper than it is: no run records when a write ends

Exit codes: 0 done, 1 a program failed, 8 a figure is worse than was asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe_commit, describe_machine
from programs import EXIT_BELOW, EXIT_FAILED, ROOT, BenchError, say

WRITE_AT_LEAST, OVERHEAD_AT_MOST = 0.8, 1.02
ASKED_EVERY = 100
MEASURED_EVERY, STEPS_BESIDE = 10, 4


def trireme(arguments: list[str], run_dir: Path) -> Path:
    """Runs it, and returns the run's folder."""
    command = [str(ROOT / "trireme.sh"), *arguments, f"--run-dir={run_dir}", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(EXIT_FAILED, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return (run_dir / "latest").resolve()


def bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_once(folder: Path, model: str) -> tuple[float, int]:
    """Bytes/s of the saves of a run, and bytes of one."""
    arguments = ["train", "-n", "2", f"--model.preset={model}", "--data.seq_len=8", "--device=cpu", "--train.steps=3",
                 "--train.global_batch=2", "--train.val_batches=0", "--train.sample_tokens=0", "--parallel.policy=fsdp",
                 "--checkpoint.every=1", "--checkpoint.keep=1", "--checkpoint.async=false", "--checkpoint.final_weights=false"]
    run = trireme(arguments, folder)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [step["checkpoint_ms"] / 1e3 for step in steps if "checkpoint_ms" in step]
    size = bytes_under(max((run / "checkpoints").glob("step-*")))
    subprocess.run(["rm", "-rf", str(run)], check=True)
    return size / statistics.median(seconds), size


def dd_once(folder: Path, size: int) -> float:
    target = folder / "dd.bin"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={size >> 20}", "conv=fsync", "status=none"]
    begin = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - begin
    target.unlink()
    return (size >> 20 << 20) / seconds


def measure_write(folder: Path, rounds: int, model: str) -> dict:
    ours, dd, size = [], [], 0
    for _ in range(rounds):
        value, size = write_once(folder, model)
        ours.append(value)
        dd.append(dd_once(folder, size))
        say(f"write: {ours[-1] / 1e6:.0f} MB/s, dd {dd[-1] / 1e6:.0f} MB/s")
    return {"model": model, "ranks": 2, "checkpoint_bytes": size, "bytes_per_s": ours, "dd_bytes_per_s": dd,
            "ratio": statistics.median(ours) / statistics.median(dd), "asked": WRITE_AT_LEAST}


def costs_of_saves(steps: list[dict]) -> list[float]:
    """Seconds that each save added, where steps follow until the next."""
    costs = []
    for index, step in enumerate(steps):
        until_next = steps[index + 1:index + MEASURED_EVERY]
        if "checkpoint_ms" not in step or len(until_next) < MEASURED_EVERY - 1:
            continue
        beside, plain = until_next[:STEPS_BESIDE], until_next[STEPS_BESIDE:]
        usual = statistics.median(one["step_ms"] for one in plain)
        costs.append((step["checkpoint_ms"] + sum(one["step_ms"] - usual for one in beside)) / 1e3)
    return costs


def measure_overhead(folder: Path, rounds: int) -> dict:
    costs, seconds, calls = [], [], []
    for _ in range(rounds):
        run = trireme(["train", "configs/quickstart.yaml", f"--checkpoint.every={MEASURED_EVERY}", "--train.val_every=0",
                       "--train.log_every=1"], folder)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [step for step in steps if "step_ms" in step]
        costs += costs_of_saves(steps)
        calls += [step["checkpoint_ms"] / 1e3 for step in steps if "checkpoint_ms" in step]
        seconds.append(sum(step["step_ms"] for step in steps) / 1e3)
        say(f"quickstart: {seconds[-1]:.1f} s, {len(costs)} saves so far, {statistics.mean(costs) * 1e3:.1f} ms each")
    saves = len(steps) // ASKED_EVERY
    error = statistics.stdev(costs) / len(costs) ** 0.5
    share = saves * statistics.mean(costs) / statistics.median(seconds)
    return {"config": "configs/quickstart.yaml", "measured_every": MEASURED_EVERY, "costs_s": costs, "calls_s": calls,
            "mean_s": statistics.mean(costs), "standard_error_s": error, "run_s": seconds,
            "every": ASKED_EVERY, "ratio": 1 + share, "asked": OVERHEAD_AT_MOST}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/checkpoint_2cores.json")
    parser.add_argument("--disk", type=Path, help="folder on the disk to write to (default: that of temporary files)")
    parser.add_argument("--model", default="gpt2-124m", help="preset to save (default: gpt2-124m)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["write", "overhead"], help="measure only this")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(dir=options.disk) as scratch:
            folder = Path(scratch)
            result = {"benchmark": "checkpoint", "command": "bench/checkpoint.py " + " ".join(sys.argv[1:]),
                      **describe_commit(None), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                      "machine": describe_machine(sys.executable)}
            if options.only != "overhead":
                result["write"] = measure_write(folder, options.rounds, options.model)
            if options.only != "write":
                result["overhead"] = measure_overhead(folder, options.rounds)
    except BenchError as error:
        say(str(error))
        return error.code
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    say(f"written to {options.out}")
    below = "write" in result and result["write"]["ratio"] < WRITE_AT_LEAST
    above = "overhead" in result and result["overhead"]["ratio"] > OVERHEAD_AT_MOST
    return EXIT_BELOW if below or above else 0


if __name__ == "__main__":
    sys.exit(main())
