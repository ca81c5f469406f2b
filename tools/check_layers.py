#!/usr/bin/env python3
"""Checks who includes whom under trireme/ against tools/layers.txt, and who may see torch, CUDA and the environment.
An arrow of the table that no include uses is a violation, too.

Prints "file:line: rule" for each violation and exits with 1; exits with 0 and silence otherwise.
"""
import argparse
import pathlib
import re
import sys

SOURCES = {".h", ".cpp", ".cu", ".cuh", ".in"}
TORCH_FREE = {"base", "text", "plan", "report", "launch", "checkpoint", "gt"}
# Rooms that are torch-free but for their files whose names begin with "worker", and files of that name that are so too.
TORCH_FREE_BUT_WORKERS = {"cli", "controller"}
# The entry of programs that train, which is a worker as well.
OTHER_WORKERS = {"trireme/cli/train_main.h", "trireme/cli/train_main.cpp"}
TORCH_FREE_WORKERS = {"trireme/controller/worker_link.h", "trireme/controller/worker_link.cpp"}
# Faces of torch-free rooms for whoever has tensors.
TENSOR_FACES = {"trireme/checkpoint/safetensors.h", "trireme/checkpoint/safetensors.cpp"}
# Files of other rooms that need no torch: the front command has a copy of them.
WITHOUT_TORCH = {f"trireme/data/{name}" for name in
                 ("byte_stream.h", "document_file.h", "document_file.cpp", "documents.h", "documents.cpp", "encode_ahead.h",
                  "encode_ahead.cpp", "conversation.h", "conversation.cpp", "gzip_stream.cpp", "json_lines.h", "json_lines.cpp", "no_gzip_stream.cpp",
                  "no_zstd_stream.cpp", "packed_input.h", "progress.h", "source.h", "source.cpp", "tokenizer.h", "tokenizer.cpp",
                  "zstd_stream.cpp")}
WITHOUT_TORCH |= {f"trireme/bench/{name}" for name in
                  ("pipeline_runs.h", "target.h", "target.cpp", "targets/accumulation.cpp", "targets/checkpoints.cpp", "targets/families.h",
                   "targets/language_model.cpp", "targets/meshes.cpp", "targets/pipelines.cpp", "targets/replicated.cpp",
                   "targets/scaling.cpp", "targets/sharded.cpp",
                   *(f"{part}.{kind}" for part in ("expectations", "profile", "results", "results_page", "results_text", "sample", "verdict", "verify")
                     for kind in ("h", "cpp")))}
TORCH = re.compile(r"(ATen|torch|c10|caffe2)/")
CUDA = re.compile(r"(cuda|cublas|cudnn|nccl|nvtx|cooperative_groups|cub/|thrust/)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
CONDITIONAL = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*(?:CUDA|NCCL).*)")
DEVICE_MACROS = re.compile(r"__CUDA_ARCH\w*|__CUDACC\w*")
ENVIRONMENT = re.compile(
    r"\b(?:(?:secure_)?(?:getenv|setenv|putenv|unsetenv|clearenv|environ)|(?:set|get|has|check)_env)\b"
)
TOKENS = re.compile(
    r'R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)"'  # raw string
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\[^\n]{1,3}|[^'\\\n])'"
    r"|//[^\n]*|/\*.*?\*/",
    re.DOTALL,
)


def is_worker(name):
    """Whether `name`, of a file, is of a worker's part of a room that is torch-free otherwise."""
    parts = name.split("/")
    if name in OTHER_WORKERS:
        return True
    return parts[1] in TORCH_FREE_BUT_WORKERS and parts[-1].startswith("worker") and name not in TORCH_FREE_WORKERS


def blank(match, keep_strings):
    text = match.group(0)
    if keep_strings and not text.startswith("/"):
        return text
    return "\n" * text.count("\n") or " "


class Source:
    """One file: its room, its includes as (line, name, quoted), and its lines of code without comments."""

    def __init__(self, root, path):
        self.path = path
        self.name = path.relative_to(root).as_posix()
        parts = self.name.split("/")
        self.room = parts[1] if len(parts) > 2 else ""
        text = path.read_text(encoding="utf-8", errors="replace")
        with_strings = TOKENS.sub(lambda match: blank(match, True), text)
        self.code = TOKENS.sub(lambda match: blank(match, False), with_strings).split("\n")
        self.includes = []
        for number, line in enumerate(with_strings.split("\n"), 1):
            found = INCLUDE.match(line)
            if found:
                self.includes.append((number, found.group(2), found.group(1) == '"'))

    @property
    def is_kernel(self):
        return self.path.suffix in {".cu", ".cuh"}

    @property
    def is_torch_free(self):
        if self.name in TENSOR_FACES:
            return False
        if self.name in WITHOUT_TORCH:
            return True
        return self.room in TORCH_FREE or (self.room in TORCH_FREE_BUT_WORKERS and not is_worker(self.name))


def read_layers(path, places=None):
    """{room: rooms it may include}. A room may only name rooms above it in the file, so there are no cycles.

    Notes the line of each room in places.
    """
    layers = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        room, _, allowed = line.partition(":")
        for name in allowed.split():
            if name not in layers:
                sys.exit(f"{path}:{number}: '{room}' names '{name}', which must stand above it")
        layers[room.strip()] = set(allowed.split())
        if places is not None:
            places[room.strip()] = number
    return layers


def check_rooms(source, layers):
    if source.room not in layers:
        yield 1, f"room '{source.room}' is not listed in tools/layers.txt"
        return
    for line, name, quoted in source.includes:
        if not name.startswith("trireme/"):
            if quoted:
                yield line, f'"{name}": own headers are included as "trireme/room/file.h"'
            continue
        room = name.split("/")[1]
        if room != source.room and room not in layers[source.room]:
            yield line, f"{source.room} may not include {room} ({name})"
        elif source.is_torch_free and room not in TORCH_FREE | TORCH_FREE_BUT_WORKERS and name not in WITHOUT_TORCH:
            yield line, f"the front command links no torch and may not include {room} ({name})"
        elif source.is_torch_free and name in TENSOR_FACES:
            yield line, f"{source.room} is torch-free here and may not include the face for tensors ({name})"
        elif source.is_torch_free and is_worker(name):
            yield line, f"the front command may not include the worker ({name})"


def check_torch(source):
    for line, name, _ in source.includes:
        if name == "torch/torch.h":
            yield line, "<torch/torch.h> costs seconds per file; include what is used"
        elif source.is_torch_free and (TORCH.match(name) or CUDA.match(name)):
            yield line, f"{source.room} is torch-free and may not include <{name}>"


def check_kernel(source, sources):
    """A .cu file sees raw pointers only, also through the headers that it includes."""
    pending = [(line, name, name) for line, name, _ in source.includes]
    seen = set()
    while pending:
        line, name, chain = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if TORCH.match(name):
            yield line, f"CUDA sources may not include ATen, torch or c10 ({chain})"
        elif name in sources:
            pending += [(line, inner, f"{chain} -> {inner}") for _, inner, _ in sources[name].includes]


def check_words(source):
    for number, line in enumerate(source.code, 1):
        if source.name != "trireme/base/env.cpp" and ENVIRONMENT.search(line):
            yield number, "only trireme/base/env.cpp reads the environment; take an Environment as a parameter"
        conditional = CONDITIONAL.match(line)
        if not conditional or source.path.name.startswith("no_"):
            continue
        condition = DEVICE_MACROS.sub("", conditional.group(1)) if source.is_kernel else conditional.group(1)
        if re.search("CUDA|NCCL", condition):
            yield number, "no conditional compilation for CUDA; CMake picks no_*.cpp instead"


def read_sources(root):
    paths = [path for path in sorted((root / "trireme").rglob("*")) if path.suffix in SOURCES]
    return {source.name: source for source in (Source(root, path) for path in paths)}


def unused_arrows(root):
    """Arrows of the table that no include uses: they would let one in unseen."""
    places = {}
    layers = read_layers(root / "tools" / "layers.txt", places)
    used = {(source.room, name.split("/")[1])
            for source in read_sources(root).values()
            for _, name, _ in source.includes if name.startswith("trireme/")}
    for room, allowed in layers.items():
        for other in sorted(allowed):
            if (room, other) not in used:
                yield f"tools/layers.txt:{places[room]}: {room} may include {other}, but no file does; take it out"


def violations(root):
    layers = read_layers(root / "tools" / "layers.txt")
    sources = read_sources(root)
    for source in sources.values():
        found = [*check_rooms(source, layers), *check_torch(source), *check_words(source)]
        if source.is_kernel:
            found += check_kernel(source, sources)
        for line, rule in sorted(found):
            yield f"{source.name}:{line}: {rule}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root.resolve()
    found = [*violations(root), *unused_arrows(root)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
