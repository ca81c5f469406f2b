"""What programs of labs/ have in common: runs of 'trireme train' and what they measured."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def train(trireme, config, ranks, overrides, environment=None):
    """The records of one run: steps, and the summary at the end. A run that fails ends the program with its code."""
    with tempfile.TemporaryDirectory(prefix="trireme-lab-") as runs:
        command = [trireme, "train", str(config), "-n", str(ranks), "--json", "--run-dir", runs, *overrides]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode != 0:
        program = pathlib.Path(sys.argv[0]).stem
        print(f"{program}: '{' '.join(command)}' ended with code {done.returncode}; its message is above", file=sys.stderr)
        sys.exit(done.returncode)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"command": ["trireme", *command[1:]], "steps": [record for record in records if "step" in record],
            "summary": records[-1]}


def timed(run):
    """Steps without the first tenth."""
    steps = run["steps"]
    late = steps[max(1, len(steps) // 10):]
    return late or steps


def numbers(text):
    """For argparse: "1,2,4"."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers such as 1,2") from None
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' has a number below 1, or none; give numbers such as 1,2")
    return found


def parsed(parser, repeats=3):
    """The command line, with --repeats, --out and --trireme too, and as `overrides` what stands behind --."""
    parser.add_argument("--repeats", type=int, default=repeats, help="how often all runs are repeated, in turns")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the measurements")
    parser.add_argument("--trireme", default=str(ROOT / "trireme.sh"), help="the trireme command (default: that of this project)")
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- arguments of 'trireme train']"
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.overrides = words[end + 1:]
    if options.repeats < 1:
        parser.error(f"--repeats is {options.repeats}; give 1 or more")
    return options


def commit():
    """That of the project; empty where it is no checkout."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write_measured(path, schema, rows, measured):
    document = {"schema": schema, "commit": commit(), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cores": os.cpu_count(),
                "command": sys.argv[1:], "rows": rows, "measured": measured}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
