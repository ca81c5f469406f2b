#!/usr/bin/env python3
"""Checks that no two sources of the library, of the commands, or of a program of tests have file-local things of one name:
with TRIREME_UNITY they are compiled in batches, where both would be one. Functions may have one name where their
parameters differ. In tests a file-local thing may not be called as one of a header of tests, either: it would hide that
from the sources after it, whatever its parameters are.

Prints "file:line: what" for each clash and exits with 1; exits with 0 and silence otherwise.
"""
import argparse
import collections
import pathlib
import re
import sys

# Folders of trireme/ whose sources are compiled together.
BATCHED = ("base text plan report launch controller checkpoint".split(),
           "checkpoint kernels comm tensor nn data optim memory precision parallel train bench".split(), ["cli"])

# Programs of tests.
PROGRAM = re.compile(r"trireme_test\(NAME \w+ LABEL \w+([^)]*)\)")
SOURCE = re.compile(r"(\$\{PROJECT_SOURCE_DIR\}/)?([\w./]+\.cpp)")

INCLUDED = re.compile(r'^#include "(tests/[^"]+)"', re.MULTILINE)

LOCAL = re.compile(r"^namespace \{$(.*?)^\}  // namespace$", re.DOTALL | re.MULTILINE)
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{$", re.MULTILINE)
TYPE = re.compile(r"^(?:enum class|enum|struct|class|union) (?:alignas\([^)]*\) )?(\w+)[^;\n]*\{", re.MULTILINE)
VARIABLE = re.compile(r"^(?:(?:inline|static|const|constexpr|thread_local|constinit) )+[^=;({\n]*?(\w+)(?:\[\w*\])? ?(?:=|\{)", re.MULTILINE)
ALIAS = re.compile(r"^using (\w+) = ([^;]+);", re.MULTILINE)
FUNCTION = re.compile(r"^[\w\[][^\n;={}()]*?[ *&](\w+)\(([^;{}]*?)\)(?: const)?(?: noexcept)? \{", re.MULTILINE)


def parameter_types(parameters):
    """Types without names and defaults, as text; commas within templates and calls part nothing."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(parameters):
        depth += letter in "<(["
        depth -= letter in ">)]"
        if letter == "," and depth == 0:
            parts.append(parameters[start:place])
            start = place + 1
    parts.append(parameters[start:])
    types = []
    for part in parts:
        words = " ".join(part.split("=")[0].split())
        types.append(re.sub(r"(?<=[ *&>])\w+$", "", words).strip())
    return ", ".join(types)


def things_of(text):
    """(what it is called, where in the text, what may repeat) of each file-local thing, with its namespace."""
    for alias in ALIAS.finditer(text):
        yield alias.group(1), alias.start(), " ".join(alias.group(2).split())
    for local in LOCAL.finditer(text):
        body, begin = local.group(1), local.start(1)
        for found in TYPE.finditer(body):
            yield found.group(1), begin + found.start(), ""
        for found in VARIABLE.finditer(body):
            yield found.group(1), begin + found.start(), ""
            rest = body[found.end():body.find(";", found.end())]
            for other in re.findall(r", (\w+) = ", rest):
                yield other, begin + found.start(), ""
        for found in FUNCTION.finditer(body):
            if "::" in found.group(0).split("(")[0].split()[-1] or re.match(r"(return|else|struct|class)\b", found.group(0)):
                continue
            yield f"{found.group(1)}({parameter_types(found.group(2))})", begin + found.start(), ""


def called(thing):
    return thing.split("(")[0]


def shared_names(root, texts):
    """{what it is called: "file:line"} of what the headers of tests, those in `texts` and those that these include, define."""
    names, seen = {}, set()
    waiting = [header for text in texts for header in INCLUDED.findall(text)]
    while waiting:
        header = waiting.pop()
        if header in seen or not (root / header).is_file():
            continue
        seen.add(header)
        text = (root / header).read_text(encoding="utf-8")
        waiting += INCLUDED.findall(text)
        for pattern in (TYPE, VARIABLE, FUNCTION, ALIAS):
            for found in pattern.finditer(text):
                names.setdefault(found.group(1), f"{header}:{text.count(chr(10), 0, found.start()) + 1}")
    return names


def clashes(root, paths, of_tests=False):
    """A line for each clash between the sources of one batch."""
    texts = {path.resolve().relative_to(root.resolve()).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}
    shared = shared_names(root, texts.values()) if of_tests else {}
    known = collections.defaultdict(list)
    for name, text in texts.items():
        spaces = NAMESPACE.findall(text)
        for thing, place, same in things_of(text):
            line = text.count("\n", 0, place) + 1
            if called(thing) in shared and not same:
                yield f"{name}:{line}: {thing} hides {called(thing)} of {shared[called(thing)]}; give it another name, or use that"
            known[(spaces[0] if spaces else "", thing)].append((name, line, same))
    for (_, thing), places in sorted(known.items()):
        files = {name for name, _, _ in places}
        if len(files) > 1 and (len({same for _, _, same in places}) > 1 or places[0][2] == ""):
            others = ", ".join(f"{name}:{line}" for name, line, _ in places[1:])
            yield f"{places[0][0]}:{places[0][1]}: {thing} is local to this file and to {others}; give one another name, or share it"


def batches(root):
    """(sources that may be compiled together, whether they are tests)."""
    for rooms in BATCHED:
        yield [path for room in rooms for path in (root / "trireme" / room).rglob("*.cpp")], False
    for listing in sorted((root / "tests").glob("*/CMakeLists.txt")):
        for sources in PROGRAM.findall(listing.read_text(encoding="utf-8")):
            yield [(root if from_root else listing.parent) / source for from_root, source in SOURCE.findall(sources)], True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    options = parser.parse_args()
    found = [clash for paths, of_tests in batches(options.root) for clash in clashes(options.root, paths, of_tests)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
