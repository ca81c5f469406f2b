#!/usr/bin/env python3
"""DP x TP x PP: one model and one batch on several meshes of as many ranks, with what each sends and waits for.

    labs/guide/hybrid_parallelism.py [CONFIG] [--ranks 8] [--meshes 2x4,4x2,1x8,2x2] [--device cpu|cuda] [--steps 6]
                                     [--repeats 1] [--out FILE] [-- --key=value ...]

A mesh is TPxPP: layers cut over TP ranks, blocks in PP stages; what is left of the ranks are replicas, each with its share
of the batch. 1x8 with 8 ranks runs stages alone, 1x1 data parallelism alone. For each mesh: who is where ('trireme plan mesh'),
bytes a step by the axis along which they travel, the share of a step in which ranks idle, simulated with the measured
costs of passes and measured, by cause, and tokens/s. All meshes train the same: the losses of all steps agree within 1e-5,
or this ends with code 8. What follows -- goes to 'trireme train' of every mesh.

Exit code: 0; 8 where losses differ; that of a run that failed.
"""
import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.dont_write_bytecode = True

from training import ROOT, parsed, timed, write_measured  # noqa: E402

TOLERANCE = 1e-5
IDLE = re.compile(r"one step: [\d.]+ ms, simulated.*; ([\d.]+)% idle, simulated ([\d.]+)%")
CAUSES = ("schedule", "imbalance", "communication", "host")


def meshes(text):
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", word)
        if not match or "0" in match.groups():
            raise argparse.ArgumentTypeError(f"'{word}' is not TPxPP, such as 2x4")
        found.append((int(match[1]), int(match[2])))
    return found


def overrides(mesh, options):
    tp, pp = mesh
    keys = [f"--parallel.tp={tp}", f"--parallel.pp={pp}", f"--train.steps={options.steps}", "--train.val_batches=0",
            "--train.sample_tokens=0", "--checkpoint.final_weights=false", f"--device={options.device}"]
    if pp > 1:
        keys.append("--train.profile_steps=1")
    return [*keys, *options.overrides]


def call(command, **arguments):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **arguments)
    if done.returncode != 0:
        if done.stderr:
            print(done.stderr[-2000:], file=sys.stderr)
        print(f"hybrid_parallelism: '{' '.join(command)}' ended with code {done.returncode}", file=sys.stderr)
        sys.exit(done.returncode)
    return done


def planned(mesh, options):
    """Who is where, as a table, and the row of this mesh in the comparison of all."""
    tp, pp = mesh
    keys = [f"--parallel.tp={tp}", f"--parallel.pp={pp}", f"--device={options.device}", *options.overrides]
    command = [options.trireme, "plan", "mesh", str(options.config), "-n", str(options.ranks)]
    table = call([*command, *keys]).stdout
    rows = json.loads(call([*command, *keys, "--all", "--json"]).stdout)["meshes"]
    dp = options.ranks // (tp * pp)
    return table, next(row for row in rows if (row["pp"], row["dp"], row["cp"], row["tp"]) == (pp, dp, 1, tp))


def idle_of(text):
    """Shares of the step that ranks idle, measured and simulated, and the means over ranks by cause; none without stages."""
    found = IDLE.search(text)
    if not found:
        return None
    lines = text[found.end():].splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("rank "))
    columns = lines[head].replace("in flight", "in_flight").split()
    ranks = [line for line in lines[head + 1:] if re.match(r" *\d+ ", line)]
    ranks = ranks[:next((n for n, line in enumerate(lines[head + 1:]) if line.startswith("stage")), len(ranks))]
    shares = {cause: [] for cause in CAUSES}
    for line in ranks:
        percent = re.findall(r"([\d.]+)%", line)
        names = [name for name in columns if name in ("busy", "simulated", "idle", *CAUSES)][:len(percent)]
        for name, value in zip(names, percent):
            if name in shares:
                shares[name].append(float(value))
    return {"measured": float(found[1]), "simulated": float(found[2]),
            "by_cause": {cause: statistics.mean(values) for cause, values in shares.items() if values}}


def run(mesh, options):
    with tempfile.TemporaryDirectory(prefix="trireme-lab-") as runs:
        command = [options.trireme, "train", str(options.config), "-n", str(options.ranks), "--json", "--run-dir", runs,
                   *overrides(mesh, options)]
        done = call(command, stderr=subprocess.PIPE)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    named = [word.removeprefix(f"{ROOT}/") for word in command[1:]]
    return {"command": ["trireme", *named], "steps": [record for record in records if "step" in record],
            "summary": records[-1], "idle": idle_of(done.stderr)}


def differing(runs):
    """The first step in which two meshes have losses too far apart; none: there is none."""
    first = runs[0]["steps"]
    for other in runs[1:]:
        for mine, theirs in zip(first, other["steps"], strict=True):
            if abs(mine["loss"] - theirs["loss"]) > TOLERANCE * abs(mine["loss"]):
                return f"step {mine['step']}: {mine['loss']} and {theirs['loss']}"
    return None


def row(mesh, options, plan, runs):
    tp, pp = mesh
    rates = [statistics.median(step["tokens_per_s"] for step in timed(one)) for one in runs]
    return {"tp": tp, "pp": pp, "dp": options.ranks // (tp * pp), "tokens_per_s": statistics.median(rates),
            "final_loss": runs[-1]["steps"][-1]["loss"], "planned": plan, "idle": runs[-1]["idle"],
            "sent_bytes": runs[-1]["summary"]["wire_bytes_per_step"]["measured"],
            "peak_bytes": runs[-1]["summary"]["peak_bytes"]}


def in_text(rows):
    lines = [f"{'':>11}{'':>10}{'':>10}{'':>5}MiB sent a step along",
             f"{'tp':>3}{'pp':>4}{'dp':>4}{'tokens/s':>10}{'peak MiB':>10}{'data':>8}{'tp':>8}{'stages':>8}{'all':>8}{'idle':>8}"
             f"{'simulated':>11}  of it"]
    for one in rows:
        idle, sent = one["idle"], one["planned"]["sent_bytes"]
        along = "".join(f"{sent[axis] / 2**20:>8.1f}" for axis in ("data", "tp", "stages"))
        shares = (f"{idle['measured']:>7.1f}%{idle['simulated']:>10.1f}%  "
                  + ", ".join(f"{cause} {share:.1f}%" for cause, share in idle["by_cause"].items())) if idle else (
                      f"{'-':>8}{'-':>11}  no stages")
        lines.append(f"{one['tp']:>3}{one['pp']:>4}{one['dp']:>4}{one['tokens_per_s']:>10,.0f}"
                     f"{one['peak_bytes'] / 2**20:>10.0f}{along}{one['sent_bytes'] / 2**20:>8.1f}{shares}")
    return "\n".join(lines)


def command_line():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=pathlib.Path, default=ROOT / "configs" / "mini-gpt-tp2-pp4.yaml")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--meshes", type=meshes, default=meshes("2x4,4x2,1x8,2x2"), help="TPxPP, separated by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=6)
    options = parsed(parser, repeats=1)
    for tp, pp in options.meshes:
        if options.ranks % (tp * pp):
            parser.error(f"--ranks {options.ranks} is no multiple of {tp} x {pp}; name meshes that divide it")
    return options


def main():
    options = command_line()
    plans = []
    for mesh in options.meshes:
        table, plan = planned(mesh, options)
        plans.append(plan)
        print(table)
    measured = [[] for _ in options.meshes]
    for _ in range(options.repeats):
        for place, mesh in enumerate(options.meshes):
            measured[place].append(run(mesh, options))
    rows = [row(mesh, options, plan, runs) for mesh, plan, runs in zip(options.meshes, plans, measured)]
    print(in_text(rows))
    if options.out:
        write_measured(options.out, "trireme.labs.hybrid_parallelism/1", rows, measured)
    if where := differing([runs[0] for runs in measured]):
        print(f"hybrid_parallelism: meshes train differently: {where}", file=sys.stderr)
        return 8
    print("all meshes train the same: losses agree within 1e-5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
