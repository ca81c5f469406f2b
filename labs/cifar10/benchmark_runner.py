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
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.dont_write_bytecode = True

from training import numbers, parsed, timed, train, write_measured  # noqa: E402

SIDES = ("ddp", "fsdp")


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=numbers, default=[1, 2], help="numbers of ranks, such as 1,2,4")
    options = parsed(parser)
    rows, measured = [], []
    for ranks in options.ranks:
        repeats = []
        for repeat in range(options.repeats):
            order = SIDES if repeat % 2 == 0 else tuple(reversed(SIDES))
            repeats.append({side: train(options.trireme, HERE / f"{side}_resnet_cifar10.yaml", ranks, options.overrides)
                            for side in order})
        rows += [row(side, ranks, repeats) for side in SIDES]
        measured.append({"ranks": ranks, "repeats": repeats})
    print(in_text(rows))
    if options.out:
        write_measured(options.out, "trireme.labs.cifar10/1", rows, measured)


if __name__ == "__main__":
    main()
