"""What `trireme eval` prints equals what plain PyTorch finds in fp64 with the same weights, token by token.

    eval_check.py --trireme PROGRAM --work FOLDER

Trains a few steps of each family on the CPU, then evaluates texts and questions on one rank and on three. Everything is
computed here a second time: documents and windows from the text, tokens from its bytes, and each token's probability from
its own prefix, so that no padding and no batch has a part in it.
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "reference"))
import models  # noqa: E402
import safetensors_io  # noqa: E402

WINDOW, SEPARATOR, BOUND = 24, 0, 1e-5
SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "vocab_size": 256, "norm_eps": 1e-5}
STEPS = 12

DOCUMENTS = {
    "a.txt": ["the rowers pull 7 strokes in time\n" * 5],
    "b.txt": ["x", "zwölf Ruderer – 十二人\nin time\n", "the rowers pull 3 strokes\n"],
    "c/d.jsonl": ["a line of its own", "strokes in time, " * 9],
}
QUESTIONS = [
    {"prompt": "the rowers pull 7", "choices": [" strokes in time", " zzzz", " strokes"], "answer": 0},
    {"prompt": "", "choices": ["the", "qqqqqqqq"], "answer": 1, "source": "another field"},
    {"prompt": "the rowers pull 4 strokes in time, and ", "choices": ["the rowers", "é", "pull"], "answer": 2},
]


def write_texts(folder):
    for name, documents in DOCUMENTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        else:
            path.write_text("<|endoftext|>\n".join(text if text.endswith("\n") or text == documents[-1] else text + "\n"
                                                   for text in documents))


def documents_of(folder):
    """(name, bytes) as they stand in the files."""
    found = []
    for name in sorted(DOCUMENTS):
        if name.endswith(".jsonl"):
            parts = [json.loads(line)["text"].encode() for line in (folder / name).read_text().splitlines()]
        else:
            parts = (folder / name).read_bytes().split(b"<|endoftext|>\n")
        for place, part in enumerate(parts):
            found.append((name if place == 0 else f"{name} #{place + 1}", part))
    return found


class Reference:
    """A trained model in PyTorch, in fp64."""

    def __init__(self, family, kv_heads, weights):
        config = models.ModelConfig(family=family, n_kv_heads=kv_heads, max_seq_len=WINDOW, rope_theta=10000.0,
                                    tie_embeddings=family != "llama", **SHAPE)
        self.model = models.build(config)
        self.model.load_state_dict(safetensors_io.load(weights))
        self.model.double().eval()

    def nats(self, tokens, start):
        """Minus the log-likelihood of tokens[start:], each from all of `tokens` before it."""
        total = 0.0
        with torch.no_grad():
            for place in range(start, len(tokens)):
                logits = self.model(torch.tensor([tokens[:place]]))[0, -1]
                total -= torch.log_softmax(logits, -1)[tokens[place]].item()
        return total

    def of_document(self, text):
        tokens = [SEPARATOR, *text]
        return sum(self.nats(tokens[begin:begin + WINDOW + 1], 1) for begin in range(0, len(tokens) - 1, WINDOW))

    def of_ending(self, prompt, ending):
        prompt, ending = prompt.encode(), ending.encode()
        tokens = [SEPARATOR, *prompt, *ending][-(WINDOW + 1):]
        return -self.nats(tokens, len(tokens) - len(ending))


class Check:
    def __init__(self, program, work):
        self.program, self.work = program, work

    def run(self, *words):
        done = subprocess.run([self.program, *words], cwd=self.work, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    def evaluate(self, *words):
        return json.loads(self.run("eval", "latest", "--json", "--per-document", *words))


def near(what, found, wanted):
    if not math.isclose(found, wanted, rel_tol=BOUND):
        raise SystemExit(f"{what}: {found}, but PyTorch finds {wanted}")


def check_figures(what, found, nats, tokens, size):
    near(f"{what}, loss", found["loss"], nats / tokens)
    near(f"{what}, perplexity", found["perplexity"], math.exp(nats / tokens))
    near(f"{what}, bits a byte", found["bits_per_byte"], nats / math.log(2.0) / size)
    if (found["tokens"], found["bytes"]) != (tokens, size):
        raise SystemExit(f"{what}: {found['tokens']} tokens of {found['bytes']} bytes, not {tokens} of {size}")


def check_text(check, reference, ranks):
    folder = check.work / "texts"
    found = check.evaluate("--data=texts", "-n", ranks)
    documents = documents_of(folder)
    if found["documents"] != len(documents) or len(found["per_document"]) != len(documents):
        raise SystemExit(f"{found['documents']} documents, not {len(documents)}")
    total = 0.0
    for (name, text), row in zip(documents, found["per_document"]):
        nats = reference.of_document(text)
        total += nats
        if not row["document"].endswith(name):
            raise SystemExit(f"{row['document']} is not {name}")
        check_figures(name, row, nats, len(text), len(text))
    size = sum(len(text) for _, text in documents)
    check_figures("all", found, total, size, size)


def best(values):
    return max(range(len(values)), key=lambda i: values[i])


def check_questions(check, reference, ranks):
    found = check.evaluate("--choices=questions.jsonl", "-n", ranks)
    right = right_by_bytes = 0
    for question, row in zip(QUESTIONS, found["per_document"], strict=True):
        choices = question["choices"]
        likely = [reference.of_ending(question["prompt"], choice) for choice in choices]
        for choice, mine, theirs in zip(choices, likely, row["log_likelihoods"], strict=True):
            near(f"'{choice}'", theirs, mine)
        right += best(likely) == question["answer"]
        right_by_bytes += best([one / len(choice.encode()) for one, choice in zip(likely, choices)]) == question["answer"]
    near("accuracy", found["accuracy"], right / len(QUESTIONS))
    near("accuracy by bytes", found["accuracy_by_bytes"], right_by_bytes / len(QUESTIONS))
    if (found["questions"], found["truncated"]) != (len(QUESTIONS), 2):
        raise SystemExit(f"{found['truncated']} of {found['questions']} were cut, not 2")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trireme", required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    options = parser.parse_args()
    write_texts(options.work / "texts")
    (options.work / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (options.work / "train.txt").write_text(DOCUMENTS["a.txt"][0] * 20)
    check = Check(pathlib.Path(options.trireme).absolute(), options.work)
    for family, kv_heads in (("llama", 2), ("gpt2", 4), ("mlp", 4)):
        keys = [f"--model.{key}={value}" for key, value in SHAPE.items() if family != "mlp" or key != "n_heads"]
        if family == "llama":
            keys += [f"--model.n_kv_heads={kv_heads}", "--model.rope_theta=10000", "--model.tie_embeddings=false"]
        check.run("train", "-n", "2", "--device=cpu", "--quiet", f"--model.family={family}", "--data.path=train.txt",
                  f"--data.seq_len={WINDOW}", "--train.global_batch=4", f"--train.steps={STEPS}", "--optim.lr=0.01",
                  "--optim.warmup_steps=2", *keys)
        run = json.loads(check.run("eval", "latest", "--json", "--choices=questions.jsonl", "-n", "1"))["run"]
        reference = Reference(family, kv_heads, pathlib.Path(run) / "checkpoints" / "final" / "model.safetensors")
        for ranks in ("1", "3"):
            check_text(check, reference, ranks)
            check_questions(check, reference, ranks)
        print(f"{family}: as PyTorch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
