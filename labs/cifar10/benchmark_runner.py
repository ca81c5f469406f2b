#!/usr/bin/env python3
"""DDP beside FSDP on the same images: runs both in turns and prints a table.

    labs/cifar10/benchmark_runner.py [--ranks 1,2] [--repeats 3] [--out FILE] [-- --train.epochs=2 ...]

Exit code: 0, or that of a run that failed.

Samples/s and step time are medians over the steps of all repeats without the first tenth of each, peak memory is the
largest rank's, accuracy the share of held-out images whose class was right. The ratio is FSDP's samples/s over DDP's
in the same repeat: its median and its range. What follows -- goes to 'trireme train' on both sides. --out takes what
was measured, step by step, as JSON.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIDES = ("ddp", "fsdp")


def train(trireme, side, ranks, overrides):
    """The records of one run: steps, and the summary at the end."""
    with tempfile.TemporaryDirectory(prefix="trireme-cifar10-") as runs:
        command = [trireme, "train", str(HERE / f"{side}_resnet_cifar10.yaml"), "-n", str(ranks),
                   "--json", "--run-dir", runs, *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(f"benchmark_runner: '{' '.join(command)}' ended with code {done.returncode}; its message is above",
              file=sys.stderr)
        sys.exit(done.returncode)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"command": ["trireme", *command[1:]], "steps": [record for record in records if "step" in record], "summary": records[-1]}


def timed(run):
    """Steps without the first tenth."""
    steps = run["steps"]
    late = steps[max(1, len(steps) // 10):]
    return late or steps


def row(side, ranks, repeats):
    of_side = [repeat[side] for repeat in repeats]
    steps = [step for run in of_side for step in timed(run)]
    ratios = [statistics.median(step["tokens_per_s"] for step in timed(repeat[side])) /
              statistics.median(step["tokens_per_s"] for step in timed(repeat["ddp"])) for repeat in repeats]
    summary = of_side[-1]["summary"]
    return {
        "policy": side,
        "ranks": ranks,
        "samples_per_s": statistics.median(step["tokens_per_s"] for step in steps),
        "step_ms": statistics.median(step["step_ms"] for step in steps),
        "peak_bytes": max(run["summary"]["peak_bytes"] for run in of_side),
        "top1": summary.get("final_val_top1"),
        "ratio_to_ddp": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
    }


def in_text(rows):
    lines = [f"{'policy':<8}{'ranks':>6}{'samples/s':>12}{'step':>12}{'peak memory':>14}{'accuracy':>10}  to ddp"]
    for one in rows:
        ratio = one["ratio_to_ddp"]
        versus = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if one["policy"] != "ddp" else "1"
        accuracy = "-" if one["top1"] is None else f"{100 * one['top1']:.2f}%"
        lines.append(f"{one['policy']:<8}{one['ranks']:>6}{one['samples_per_s']:>12,.0f}{one['step_ms']:>9.2f} ms"
                     f"{one['peak_bytes'] / 2**20:>10.0f} MiB{accuracy:>10}  {versus}")
    return "\n".join(lines)


def numbers(text):
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of numbers such as 1,2") from None
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' has no rank or less than one; give numbers such as 1,2")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=numbers, default=[1, 2], help="numbers of ranks, such as 1,2,4")
    parser.add_argument("--repeats", type=int, default=3, help="times that both sides run, in turns")
    parser.add_argument("--out", type=pathlib.Path, help="file for what was measured, as JSON")
    parser.add_argument("--trireme", default=str(ROOT / "trireme.sh"), help="the command, if not this project's")
    parser.add_argument("overrides", nargs="*", help="for 'trireme train', behind --")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; give 1 or more")
    rows, measured = [], []
    for ranks in options.ranks:
        repeats = []
        for repeat in range(options.repeats):
            order = SIDES if repeat % 2 == 0 else tuple(reversed(SIDES))
            repeats.append({side: train(options.trireme, side, ranks, options.overrides) for side in order})
        rows += [row(side, ranks, repeats) for side in SIDES]
        measured.append({"ranks": ranks, "repeats": repeats})
    print(in_text(rows))
    if options.out:
        document = {"schema": "trireme.labs.cifar10/1", "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "cores": os.cpu_count(), "command": sys.argv[1:], "rows": rows, "measured": measured}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
