#!/usr/bin/env python3
"""Checks that no two sources of the library, or of the commands, have file-local things of one name: with TRIREME_UNITY
they are compiled in batches, where both would be one. Functions may have one name where their parameters differ.

Prints "file:line: what" for each clash and exits with 1; exits with 0 and silence otherwise.
"""
import argparse
import collections
import pathlib
import re
import sys

# Folders of trireme/ whose sources are compiled together.
BATCHED = ("kernels comm nn data optim memory precision parallel train bench".split(), ["cli"])

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


def clashes(root, rooms):
    known = collections.defaultdict(list)
    for path in sorted(file for room in rooms for file in (root / "trireme" / room).rglob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        spaces = NAMESPACE.findall(text)
        for thing, place, same in things_of(text):
            line = text.count("\n", 0, place) + 1
            known[(spaces[0] if spaces else "", thing)].append((name, line, same))
    for (_, thing), places in sorted(known.items()):
        files = {name for name, _, _ in places}
        if len(files) > 1 and (len({same for _, _, same in places}) > 1 or places[0][2] == ""):
            others = ", ".join(f"{name}:{line}" for name, line, _ in places[1:])
            yield f"{places[0][0]}:{places[0][1]}: {thing} is local to this file and to {others}; give one another name, or share it"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    options = parser.parse_args()
    found = [clash for rooms in BATCHED for clash in clashes(options.root, rooms)]
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
