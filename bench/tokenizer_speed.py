#!/usr/bin/env python3
"""How fast texts become tokens: ours beside `tokenizers` and tiktoken, on the same cores, as a JSON file.

    bench/tokenizer_speed.py --text FILE [--vocab 32000] [--threads 1,2] [--rounds 5] --out FILE

Trains a byte-level BPE with the pattern of cl100k on the text, which all sides then read, so that they have the same work:
`tokenizers` by encode_batch_fast, tiktoken by encode_ordinary_batch, ours by encode_batch(). Sides take turns, one call
each a round after one that is not counted. The ids of the two must be the same for a hundred documents, and ours as many;
tests/text compares all ids. Rates are in 10^6 bytes a second.
Needs: pip install tokenizers tiktoken. Exit codes: 0 done, 1 the ids differ, 3 there is no build.
"""
from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from machine import describe_commit, describe_machine
from programs import EXIT_ENVIRONMENT, EXIT_FAILED, ROOT, say

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
DOCUMENT = 10_000  # bytes, about


def documents(text: str) -> list[str]:
    """Parts of the text that end with a line."""
    parts, begin = [], 0
    while begin < len(text):
        end = text.find("\n", min(begin + DOCUMENT, len(text)))
        end = len(text) if end == -1 else end + 1
        parts.append(text[begin:end])
        begin = end
    return parts


def train(texts: list[str], vocab: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ranks_of(tokenizer: tokenizers.Tokenizer) -> dict[bytes, int]:
    """The vocabulary as bytes. GPT-2's alphabet: printable bytes are themselves, the others count up from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {bytes(byte_of[c] for c in token): rank for token, rank in tokenizer.get_vocab().items()}


class Ours:
    def __init__(self, program: Path, tokenizer: Path, texts: Path) -> None:
        self.texts = texts
        self.process = subprocess.Popen([program, tokenizer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, threads: int) -> tuple[float, int]:
        self.process.stdin.write(f"{threads} {self.texts}\n")
        self.process.stdin.flush()
        seconds, tokens, _ = self.process.stdout.readline().split()
        return float(seconds), int(tokens)


class InTheirProcess(Ours):
    """`tokenizers` in a process with so many threads, which answers as our program does."""

    CODE = ("import json, sys, time, tokenizers\n"
            "folder = sys.argv[1]\n"
            "tokenizer = tokenizers.Tokenizer.from_file(folder + '/tokenizer.json')\n"
            "texts = json.load(open(folder + '/texts.json'))\n"
            "for line in sys.stdin:\n"
            "    begin = time.perf_counter()\n"
            "    result = tokenizer.encode_batch_fast(texts, add_special_tokens=False)\n"
            "    seconds = time.perf_counter() - begin\n"
            "    print(seconds, sum(len(one.ids) for one in result), '-', flush=True)\n")

    def __init__(self, folder: Path, threads: int) -> None:
        self.texts = folder / "texts.json"
        self.process = subprocess.Popen([sys.executable, "-P", "-c", self.CODE, folder], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "RAYON_NUM_THREADS": str(threads)})


class InPython:
    """A call of Python; `count` says how many tokens it gave."""

    def __init__(self, call, count) -> None:
        self.call, self.count = call, count

    def run(self, threads: int) -> tuple[float, int]:
        begin = time.perf_counter()
        result = self.call(threads)
        return time.perf_counter() - begin, self.count(result)


def same_ids(ours: Path, tokenizer: tokenizers.Tokenizer, encoding: tiktoken.Encoding, program: Path, texts: list[str],
             folder: Path) -> bool:
    """Whether, for each of a hundred documents, both in Python give the same ids and ours as many."""
    step = max(1, len(texts) // 100)
    for text in texts[::step]:
        (folder / "one.json").write_text(json.dumps([text]))
        side = Ours(program, ours, folder / "one.json")
        tokens = side.run(1)[1]
        side.process.communicate()
        ids = tokenizer.encode(text).ids
        if ids != encoding.encode_ordinary(text) or len(ids) != tokens:
            return False
    return True


def measure(sides: dict, threads: int, rounds: int, size: int) -> dict:
    seconds, tokens = {name: [] for name in sides}, {}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            elapsed, tokens[name] = side.run(threads)
            if turn > 0:
                seconds[name].append(elapsed)
    rates = {name: [size / one / 1e6 for one in values] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ours = medians["trireme"]
    return {"threads": threads, "tokens": tokens, "seconds": seconds, "mb_per_s": medians,
            "spread_mb_per_s": {name: [min(values), max(values)] for name, values in rates.items()},
            "ratio": {name: ours / median for name, median in medians.items() if name != "trireme"}}


def measured(options: argparse.Namespace, folder: Path, program: Path) -> list[dict] | None:
    texts = documents(options.text.read_text(encoding="utf-8"))
    size = sum(len(text.encode()) for text in texts)
    (folder / "texts.json").write_text(json.dumps(texts))
    tokenizer = train(texts, options.vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    encoding = tiktoken.Encoding("bench", pat_str=PATTERN, mergeable_ranks=ranks_of(tokenizer), special_tokens={})
    if not same_ids(folder / "tokenizer.json", tokenizer, encoding, program, texts, folder):
        return None
    results = []
    for threads in options.threads:
        # Its pool of threads is made once in a process, so each number of threads has a process of its own.
        sides = {
            "trireme": Ours(program, folder / "tokenizer.json", folder / "texts.json"),
            "tokenizers": InTheirProcess(folder, threads),
            "tiktoken": InPython(lambda count: encoding.encode_ordinary_batch(texts, num_threads=count),
                                 lambda ids: sum(map(len, ids))),
        }
        results.append(measure(sides, threads, options.rounds, size))
        say(f"{threads} threads: {results[-1]['mb_per_s']}, ratio {results[-1]['ratio']}")
        for name in "trireme", "tokenizers":
            sides[name].process.communicate()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--threads", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    machine = describe_machine(sys.executable)
    if subprocess.run(["cmake", "--build", options.build, "--target", "encode_seconds"], stdout=subprocess.DEVNULL).returncode:
        say(f"there is no build in {options.build}; call ./trireme.sh build")
        return EXIT_ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        results = measured(options, Path(folder), options.build / "bin/encode_seconds")
    if results is None:
        say("the three sides give different ids")
        return EXIT_FAILED
    options.out.write_text(json.dumps({
        "schema": "trireme.bench.tokenizers/1", **describe_commit(None), "command": " ".join(sys.argv), "machine": machine,
        "tokenizers": tokenizers.__version__, "tiktoken": tiktoken.__version__, "text_bytes": options.text.stat().st_size,
        "vocab": options.vocab, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
