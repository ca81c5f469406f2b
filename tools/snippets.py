#!/usr/bin/env python3
"""Code in docs/, taken from programs that tests build and run.

    tools/snippets.py            writes it into the pages
    tools/snippets.py --check    exits 8 when a page and its sources differ; CI runs this

In a source a snippet stands between two comments ("#" in Python):

    // snippet: ddp
    ...
    // end of snippet

and in a page between two others, whole, or as the difference between two snippets:

    <!-- snippet: examples/your_module/steps.cpp ddp -->
    <!-- snippet: examples/your_module/steps.cpp single..ddp -->
    ...
    <!-- end of snippet -->

A page with snippets has no C++ of its own, and every snippet of a source stands on a page.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXIT_USAGE, EXIT_DIFFERS = 2, 8
REGION = re.compile(
    r"(?P<head><!-- snippet: (?P<file>\S+) (?P<names>\S+) -->\n)(?P<body>.*?)(?P<tail><!-- end of snippet -->)",
    re.DOTALL,
)
FENCE = re.compile(r"^```(cpp|c\+\+|diff)$", re.MULTILINE)
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".py": "python", ".txt": "cmake"}


class SnippetError(Exception):
    """A page or a source that makes no sense."""


def snippets_of(text: str, file: str) -> dict[str, str]:
    """The snippets of a source by name, without common indentation."""
    found: dict[str, str] = {}
    name, lines = None, []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        begin = re.match(r"\s*(?://|#) snippet: (\S+)$", line.rstrip())
        end = re.match(r"\s*(?://|#) end of snippet$", line.rstrip())
        if (begin and name) or (end and not name):
            raise SnippetError(f"{file}:{number}: a snippet begins within another, or ends without having begun")
        if begin:
            name, lines = begin[1], []
            if name in found:
                raise SnippetError(f"{file}:{number}: there are two snippets {name}")
        elif end:
            found[name], name = textwrap.dedent("".join(lines)), None
        elif name:
            lines.append(line)
    if name:
        raise SnippetError(f"{file}: snippet {name} does not end")
    return found


def difference(before: str, after: str) -> str:
    """Both texts as one: what stays, what goes and what comes."""
    lines = difflib.ndiff(before.splitlines(keepends=True), after.splitlines(keepends=True))
    return "".join(f"{line[0]}{line[2:]}" for line in lines if not line.startswith("?"))


class Sources:
    """Snippets of files, and which of them were asked for."""

    def __init__(self, root: Path):
        self.root = root
        self.files: dict[str, dict[str, str]] = {}
        self.used: set[tuple[str, str]] = set()

    def get(self, file: str, name: str) -> str:
        if file not in self.files:
            try:
                self.files[file] = snippets_of((self.root / file).read_text(), file)
            except OSError as error:
                raise SnippetError(f"{file}: {error.strerror}") from error
        if name not in self.files[file]:
            raise SnippetError(f"{file} has no snippet {name}; it has {', '.join(self.files[file]) or 'none'}")
        self.used.add((file, name))
        return self.files[file][name]

    def unused(self) -> list[str]:
        return [f"{file}: no page shows snippet {name}"
                for file, snippets in self.files.items() for name in snippets if (file, name) not in self.used]


def block(region: re.Match, sources: Sources) -> str:
    file, names = region["file"], region["names"]
    if ".." in names:
        language, text = "diff", difference(*(sources.get(file, name) for name in names.split("..", 1)))
    else:
        language, text = LANGUAGES.get(Path(file).suffix, ""), sources.get(file, names)
    return f"{region['head']}```{language}\n{text}```\n{region['tail']}"


def rewritten(text: str, page: str, sources: Sources) -> str:
    """The page as its sources want it; a page without snippets as it is."""
    if not REGION.search(text):
        return text
    if FENCE.search(REGION.sub("", text)):
        raise SnippetError(f"{page}: C++ that is no snippet; take it from a program that a test builds and runs")
    return REGION.sub(lambda region: block(region, sources), text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 8 when a page differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the project")
    options = parser.parse_args()
    sources, differing = Sources(options.root), []
    try:
        for page in sorted((options.root / "docs").rglob("*.md")):
            text = page.read_text()
            wanted = rewritten(text, page.name, sources)
            if wanted != text:
                differing.append(page)
                if not options.check:
                    page.write_text(wanted)
        if unused := sources.unused():
            raise SnippetError("\n".join(unused))
    except SnippetError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    for page in differing:
        print(f"{page.relative_to(options.root)}: {'differs from its sources; run tools/snippets.py' if options.check else 'written'}")
    return EXIT_DIFFERS if differing and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
