#!/usr/bin/env python3
"""Commands in docs/guide/, run as they stand.

    tools/pages.py                      runs those of all pages with build/release/bin/trireme; CI runs this
    tools/pages.py docs/guide/nccl.md   of one page
    tools/pages.py --write              writes what was printed into the pages

In a page each block of commands stands behind a comment, and what it prints may follow behind another:

    <!-- run: exit=2 seconds=60 needs=gpu -->
    ```sh
    trireme config show --train.step=3
    ```
    <!-- output -->
    ```
    error: [plan.config] --train.step: there is no key train.step; ...
    ```

exit    how the block ends; 0 unless it says otherwise
seconds the most that it may take, on a busy machine; 600 unless it says otherwise
needs   gpu, hosts, network, or a program: the block is skipped where that is missing, and listed
once    the block is run, but --write leaves its output alone (a race that ends in one of several ways)

The blocks of a page run in one scratch folder, in their order, by bash; the first command that fails ends a block. The
folder has links to what the project holds, so `configs/quickstart.yaml` is there and `runs/` is its own.

Each line of an output must be in what the block printed (stdout and stderr), in any order, since the two overtake each other; `...` stands for anything.
Numbers, units and names of runs stand for others of their kind, unless the comment is <!-- output: exact -->.

Exit code 8: a block failed, and the page, line, command and output say which; or a link leads nowhere. Exit code 2: a page
makes no sense, such as a ```sh block that nobody runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXIT_USAGE, EXIT_DIFFERS = 2, 8
HIDDEN_FROM_PAGES = {"build", "runs"}
RUN = re.compile(r"<!-- run:?(?P<settings>[^>]*?) -->")
OUTPUT = re.compile(r"<!-- output(?P<exact>: exact)? -->")
RUN_NAME = re.compile(r"\b([a-z][\w.-]*)-\d{8}-\d{6}Z-[a-z0-9]{4}\b")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.,]*(?:e[-+]?\d+)?(?:(?: ?[KMGT]i?B(?:/s)?| ?[num]?s|[kMGT])(?!\w))?")
DIGEST = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{16}\b")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")


class PageError(Exception):
    """A page that makes no sense."""


@dataclass
class Block:
    """Commands of a page and what they print."""

    line: int
    commands: list[str]
    exit: int = 0
    seconds: float = 600.0
    needs: list[str] = field(default_factory=list)
    once: bool = False
    output: list[str] | None = None
    output_at: int = 0  # the line number of the output's first line
    exact: bool = False


def settings_of(text: str, where: str) -> dict:
    found: dict = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if key == "once" and not equals:
            found[key] = True
        elif key == "needs" and value:
            found[key] = value.split(",")
        elif key in ("exit", "seconds") and re.fullmatch(r"\d+", value):
            found[key] = int(value)
        else:
            raise PageError(f"{where}: '{word}' is none of exit=N, seconds=N, needs=NAME, once")
    return found


def fence_after(lines: list[str], at: int, opening: str, where: str) -> tuple[list[str], int]:
    """The lines of the fence that begins at `at`, and where the one behind it is."""
    if at >= len(lines) or lines[at] != opening:
        raise PageError(f"{where}: is not followed by a block that begins with {opening}")
    for end in range(at + 1, len(lines)):
        if lines[end] == "```":
            return lines[at + 1 : end], end + 1
    raise PageError(f"{where}: the block does not end")


def blocks_of(text: str, page: str) -> list[Block]:
    """The blocks of a page in their order."""
    lines, blocks, at = text.splitlines(), [], 0
    while at < len(lines):
        where = f"{page}:{at + 1}"
        if run := RUN.fullmatch(lines[at]):
            settings = settings_of(run["settings"], where)
            commands, end = fence_after(lines, at + 1, "```sh", where)
            blocks.append(Block(line=at + 3, commands=commands, **settings))
            at = end
        elif shown := OUTPUT.fullmatch(lines[at]):
            if not blocks or blocks[-1].output is not None:
                raise PageError(f"{where}: an output without commands before it")
            blocks[-1].output, end = fence_after(lines, at + 1, "```", where)
            blocks[-1].output_at, blocks[-1].exact = at + 3, bool(shown["exact"])
            at = end
        elif re.fullmatch(r"```(sh|bash|console)", lines[at]):
            raise PageError(f"{where}: commands that nobody runs; put <!-- run --> before them")
        elif lines[at].startswith("```"):
            at = fence_after(lines, at, lines[at], where)[1]
        else:
            at += 1
    return blocks


def alike(line: str, exact: bool) -> str:
    """What two lines have in common that say the same."""
    if not exact:
        line = NUMBER.sub("N", DIGEST.sub("N", RUN_NAME.sub(r"\1-RUN", line)))
        line = re.sub(r"[-=#_.]{4,}", "-", line)
    return " ".join(line.split())


def missing_line(wanted: list[str], printed: list[str], exact: bool) -> int | None:
    """The first wanted line that no line of its own says. In any order: stdout and stderr of ranks overtake each other."""
    have = [alike(line, exact) for line in printed]
    for number, line in enumerate(wanted):
        if line.strip() in ("", "..."):
            continue
        pattern = ".*".join(re.escape(alike(part, exact)) for part in line.split("..."))
        here = next((i for i, text in enumerate(have) if re.fullmatch(pattern, text)), None)
        if here is None:
            return number
        del have[here]
    return None


def anchors_of(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for target, anchor in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            other = (page.parent / target) if target else page
            if not other.exists():
                broken.append(f"{page.name}:{number}: there is no {target}")
            elif anchor and other.suffix == ".md" and anchor not in anchors_of(other):
                broken.append(f"{page.name}:{number}: {other.name} has no heading {anchor}")
    return broken


class Scratch:
    """The folder in which a page's commands run, and what they find there."""

    def __init__(self, root: Path, build: Path, folder: Path):
        self.folder = folder
        for entry in root.iterdir():
            if not entry.name.startswith(".") and entry.name not in HIDDEN_FROM_PAGES:
                (folder / entry.name).symlink_to(entry)
        self.environment = {name: value for name, value in os.environ.items()
                            if not re.match(r"(TRIREME|NCCL|TORCH)_|(WORLD_SIZE|RANK|LOCAL_RANK|MASTER_\w+)$", name)}
        self.environment["PATH"] = ":".join([str(build / "bin"), *self.python_of(build), os.environ["PATH"]])
        self.environment.setdefault("OMP_NUM_THREADS", "1")

    @staticmethod
    def python_of(build: Path) -> list[str]:
        """The folder of the Python that has torch, and torchrun with it."""
        settings = build / "trireme-settings"
        found = re.search(r"^python=(.+)$", settings.read_text(), re.MULTILINE) if settings.exists() else None
        return [str(Path(found[1]).parent)] if found else []

    def lacks(self, need: str) -> str | None:
        """Why a block that needs this cannot run here."""
        if need == "gpu":
            gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).stdout if shutil.which(
                "nvidia-smi") else b""
            return None if gpus.strip() else "there is no GPU"
        if need in ("hosts", "network"):
            return {"hosts": "it needs several hosts", "network": "it needs the network"}[need]
        return None if shutil.which(need, path=self.environment["PATH"]) else f"there is no {need}"

    def run(self, block: Block) -> tuple[int | None, str, int]:
        """Exit code (None: too slow), what was printed, and the line of the block that failed last."""
        failed = self.folder / ".failed-line"
        failed.unlink(missing_ok=True)
        script = f"set -eEuo pipefail; trap 'echo $LINENO >{failed}' ERR\n" + "\n".join(block.commands) + "\n"
        path = self.folder / ".commands"
        path.write_text(script)
        # A file takes the output: a process that a block leaves behind would keep a pipe open.
        with tempfile.TemporaryFile() as printed:
            process = subprocess.Popen(["bash", str(path)], cwd=self.folder, env=self.environment, stdout=printed,
                                       stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                code: int | None = process.wait(block.seconds)
            except subprocess.TimeoutExpired:
                code = None
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        number = int(failed.read_text()) - 2 if failed.exists() else len(block.commands) - 1
        return code, text, min(max(number, 0), len(block.commands) - 1)


def trouble_with(block: Block, code: int | None, printed: str) -> str | None:
    if code is None:
        return f"took longer than {block.seconds} s"
    if code != block.exit:
        return f"exit code {code} instead of {block.exit}"
    missing = missing_line(block.output or [], printed.splitlines(), block.exact)
    if missing is not None:
        return f"line {block.output_at + missing} of the page was not printed: {block.output[missing]}"
    return None


def written(text: str, outputs: list[tuple[Block, str]]) -> str:
    """The page with what its blocks printed; an output that leaves something out stays as it is."""
    lines = text.splitlines()
    for block, printed in reversed(outputs):
        if block.output is not None and not any("..." in line for line in block.output) and not block.once:
            begin = block.output_at - 1
            lines[begin : begin + len(block.output)] = [line.rstrip() for line in printed.splitlines()]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def ports_of(text: str):
    """Pages name ports, which one run of a machine can have at a time."""
    if not re.search("MASTER_PORT=|--master_port", text):
        yield
        return
    with open(Path(tempfile.gettempdir()) / f"trireme-pages-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_page(page: Path, options: argparse.Namespace) -> bool:
    """Whether all blocks of the page did what it says."""
    text = page.read_text()
    with ports_of(text):
        return run_blocks(page, text, options)


def run_blocks(page: Path, text: str, options: argparse.Namespace) -> bool:
    blocks = blocks_of(text, page.name)
    broken = broken_links(page)
    for message in broken:
        print(f"FAILED  {message}")
    outputs, fine, skipped = [], not broken, 0
    with tempfile.TemporaryDirectory(prefix="trireme-page-") as folder:
        scratch = Scratch(options.root, options.build, Path(folder))
        for block in blocks:
            if reason := next((why for need in block.needs if (why := scratch.lacks(need))), None):
                print(f"skipped {page.name}:{block.line}: {reason}: {block.commands[0] if block.commands else ''}")
                skipped += 1
                continue
            code, printed, number = scratch.run(block)
            outputs.append((block, printed))
            trouble = trouble_with(block, code, printed) if not options.write else None
            if trouble:
                command = block.commands[number] if block.commands else ""
                print(f"FAILED  {page.name}:{block.line + number}: {trouble}\n  $ {command}\n"
                      + "".join(f"  | {line}\n" for line in printed.splitlines()), end="")
                fine = False
                break  # what follows builds on it
    if options.write:
        page.write_text(written(text, outputs))
    print(f"{'ok     ' if fine else 'FAILED '} {page.name}: {len(outputs)} blocks run, {skipped} skipped", flush=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="default: docs/guide/*.md")
    parser.add_argument("--write", action="store_true", help="write what was printed into the pages")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the project")
    parser.add_argument("--build", type=Path, help="whose bin/trireme runs (default: build/release of the project)")
    options = parser.parse_args()
    options.root = options.root.resolve()
    options.build = (options.build or options.root / "build" / "release").resolve()
    pages = options.pages or sorted((options.root / "docs" / "guide").glob("*.md"))
    try:
        if not (options.build / "bin" / "trireme").exists():
            raise PageError(f"{options.build}/bin/trireme is not there; build it, or give --build")
        fine = [run_page(page, options) for page in pages]
    except (PageError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    return 0 if all(fine) else EXIT_DIFFERS


if __name__ == "__main__":
    sys.exit(main())
