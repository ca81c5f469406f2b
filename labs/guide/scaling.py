#!/usr/bin/env python3
"""How a config scales from one rank to more: samples/s, and what share of the ideal that is.

    labs/guide/scaling.py [CONFIG] [--ranks 1,2] [--batch 16] [--steps 50] [--repeats 3] [--out FILE] [-- --key=value ...]

weak: every rank has --batch samples a step, however many ranks there are. strong: all together have what the most
ranks would have, however many there are. The speedup is over the fewest ranks in the same repeat, the efficiency its
share of the ranks that were added: 1 is ideal. Medians and ranges over the repeats; the steps of a run count without the
first tenth. What follows -- goes to 'trireme train'; the policy is ddp unless that names another.

Ranks on a CPU get the same number of threads in every run, the cores divided by the most ranks, unless OMP_NUM_THREADS
says how many: otherwise one rank would have all the cores that two have to share.

Exit code: 0, or that of a run that failed.
"""
import argparse
import os
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.dont_write_bytecode = True

from training import ROOT, numbers, parsed, timed, train, write_measured  # noqa: E402

MODES = ("weak", "strong")


def overrides(mode, options):
    """What all runs of a mode share."""
    batch = ([f"--train.rank_batch={options.batch}"] if mode == "weak"
             else [f"--train.global_batch={options.batch * max(options.ranks)}", "--train.rank_batch=0"])
    return [*batch, "--train.epochs=0", f"--train.steps={options.steps}", "--train.val_batches=0",
            "--train.sample_tokens=0", "--optim.warmup_steps=0", "--parallel.policy=ddp",
            "--quiet", *options.overrides]


def environment(options):
    threads = max(1, (os.cpu_count() or 1) // max(options.ranks))
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def measure(mode, options):
    """Repeats of {ranks: run}, every other one in reverse order."""
    repeats = []
    for repeat in range(options.repeats):
        order = options.ranks if repeat % 2 == 0 else options.ranks[::-1]
        repeats.append({ranks: train(options.trireme, options.config, ranks, overrides(mode, options), environment(options))
                        for ranks in order})
    return repeats


def rate(run):
    return statistics.median(step["tokens_per_s"] for step in timed(run))


def row(mode, ranks, options, repeats):
    base = min(options.ranks)
    speedups = [rate(repeat[ranks]) / rate(repeat[base]) for repeat in repeats]
    batch = options.batch * (ranks if mode == "weak" else max(options.ranks))
    return {
        "mode": mode,
        "ranks": ranks,
        "global_batch": batch,
        "per_s": statistics.median(rate(repeat[ranks]) for repeat in repeats),
        "step_ms": statistics.median(step["step_ms"] for repeat in repeats for step in timed(repeat[ranks])),
        "speedup": statistics.median(speedups),
        "efficiency": {"median": statistics.median(speedups) * base / ranks, "low": min(speedups) * base / ranks,
                       "high": max(speedups) * base / ranks},
    }


def in_text(rows):
    lines = [f"{'':<8}{'ranks':>5}{'batch':>7}{'tokens or images/s':>20}{'step':>13}{'speedup':>9}  efficiency"]
    for one in rows:
        share = one["efficiency"]
        spread = f" ({share['low']:.2f} to {share['high']:.2f})" if share["low"] < share["high"] else ""
        lines.append(f"{one['mode']:<8}{one['ranks']:>5}{one['global_batch']:>7}{one['per_s']:>20,.0f}"
                     f"{one['step_ms']:>10.2f} ms{one['speedup']:>9.2f}  {share['median']:.2f}{spread}")
    return "\n".join(lines)


def command_line():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("config", nargs="?", default=str(ROOT / "configs/quickstart.yaml"), help="config to train")
    parser.add_argument("--ranks", type=numbers, default=[1, 2], help="numbers of ranks, such as 1,2,4")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank and step in weak scaling")
    parser.add_argument("--steps", type=int, default=50, help="steps per run")
    options = parsed(parser)
    for name in ("batch", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; give 1 or more")
    options.ranks = sorted(set(options.ranks))
    return options


def main():
    options = command_line()
    rows, measured = [], []
    for mode in MODES:
        repeats = measure(mode, options)
        rows += [row(mode, ranks, options, repeats) for ranks in options.ranks]
        measured.append({"mode": mode, "repeats": repeats})
    print(in_text(rows))
    if options.out:
        write_measured(options.out, "trireme.labs.scaling/1", rows, measured)


if __name__ == "__main__":
    main()
