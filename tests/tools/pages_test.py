"""tools/pages.py: commands of pages run as they stand, and a page that says otherwise is named."""

import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "pages.py"
COMMAND = '#!/bin/sh\necho "trireme $*"\n[ "$1" != fail ] || exit "$2"\n'


def page(*blocks):
    return "# Page\n\n" + "\n\n".join(blocks) + "\n"


def block(commands, settings="", output=None, exact=""):
    text = f"<!-- run:{settings} -->\n```sh\n{commands}\n```"
    return text if output is None else f"{text}\n<!-- output{exact} -->\n```\n{output}\n```"


class Pages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.page = self.root / "docs" / "guide" / "page.md"
        self.page.parent.mkdir(parents=True)
        (self.root / "configs").mkdir()
        (self.root / "configs" / "a.yaml").write_text("name: a\n")
        command = self.root / "build" / "release" / "bin" / "trireme"
        command.parent.mkdir(parents=True)
        command.write_text(COMMAND)
        command.chmod(0o755)

    def run_tool(self, text, *arguments):
        self.page.write_text(text)
        return subprocess.run([sys.executable, str(TOOL), "--root", str(self.root), *arguments],
                              capture_output=True, text=True, check=False)

    def passes(self, text):
        result = self.run_tool(text)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def fails(self, text, *words):
        result = self.run_tool(text)
        self.assertEqual(result.returncode, 8, result.stdout + result.stderr)
        for word in words:
            self.assertIn(word, result.stdout)

    def refused(self, text, words):
        result = self.run_tool(text)
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn(words, result.stderr)

    def test_runs_the_builds_command_beside_what_the_project_holds(self):
        self.passes(page(block("trireme plan configs/a.yaml && cat configs/a.yaml", output="trireme plan configs/a.yaml\nname: a")))

    def test_blocks_share_a_folder_that_is_not_the_projects(self):
        self.passes(page(block("mkdir runs; echo 1 > runs/x"), block("cat runs/x", output="1")))
        self.assertFalse((self.root / "runs").exists())

    def test_names_page_line_command_and_output_of_what_failed(self):
        self.fails(page(block("trireme one\ntrireme fail 3\ntrireme two")), "page.md:6: exit code 3 instead of 0",
                   "$ trireme fail 3", "| trireme one", "| trireme fail 3")
        result = self.run_tool(page(block("trireme fail 3\ntrireme two")))
        self.assertNotIn("| trireme two", result.stdout, "the first failure ends a block")

    def test_a_failure_that_is_announced_is_right_and_another_is_not(self):
        self.passes(page(block("trireme fail 5", " exit=5")))
        self.fails(page(block("trireme fail 4", " exit=5")), "exit code 4 instead of 5")
        self.fails(page(block("trireme works", " exit=5")), "exit code 0 instead of 5")

    def test_an_output_is_compared_but_for_its_numbers(self):
        command = "echo 'loss 1.25 at run-20261123-002103Z-zkhf, 4.00 MiB'; echo end"
        self.passes(page(block(command, output="loss 0.5 at run-20250101-000000Z-aaaa, 17 KiB")))
        self.fails(page(block(command, output="gain 1.25 at ...")), "line 9 of the page was not printed: gain 1.25")
        self.fails(page(block(command, output="end\nend")), "line 10 of the page")
        self.fails(page(block(command, output="loss 1.3 at ...", exact=": exact")), "was not printed: loss 1.3")
        self.passes(page(block(command, output="loss 1.25 at ...", exact=": exact")))

    def test_words_with_digits_are_no_numbers(self):
        self.fails(page(block("echo zero3", output="zero2")), "was not printed: zero2")

    def test_ends_what_takes_too_long_with_all_that_it_started(self):
        began = time.monotonic()
        self.fails(page(block("sleep 1000 &\nwait", " seconds=1")), "took longer than 1 s")
        self.passes(page(block("sleep 1000 &\necho left")))
        self.assertLess(time.monotonic() - began, 600)

    def test_pages_that_name_ports_take_turns(self):
        text = page(block("test ! -e {0}/taken\ntouch {0}/taken\nsleep 0.3; MASTER_PORT=1 true\nrm {0}/taken".format(self.root)))
        self.page.write_text(text)
        command = [sys.executable, str(TOOL), "--root", str(self.root)]
        together = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(3)]
        self.assertEqual([process.wait() for process in together], [0, 0, 0])

    def test_lists_what_it_skips_with_the_reason(self):
        listed = self.passes(page(block("false", " needs=hosts"), block("false", " needs=no-such-program"),
                                  block("true", " needs=bash")))
        self.assertIn("skipped page.md:5: it needs several hosts: false", listed)
        self.assertIn("there is no no-such-program", listed)
        self.assertIn("1 blocks run, 2 skipped", listed)

    def test_refuses_commands_that_nobody_runs_and_settings_that_nobody_knows(self):
        self.refused(page("```sh\ntrireme x\n```"), "page.md:3: commands that nobody runs")
        self.refused(page(block("true", " exits=2")), "'exits=2' is none of")
        self.refused(page("<!-- run -->\ntext"), "is not followed by a block")
        self.refused(page("<!-- output -->\n```\nx\n```"), "an output without commands")

    def test_follows_links(self):
        (self.page.parent / "other.md").write_text("# Other page\n\n## A part, here\n")
        self.passes(page("[a](other.md#a-part-here) [b](other.md) [c](#page) [d](https://e.org/f)"))
        self.fails(page("[a](other.md#gone)"), "page.md:3: other.md has no heading gone")
        self.fails(page("[a](gone.md)"), "there is no gone.md")

    def test_writes_what_was_printed_but_where_something_is_left_out(self):
        text = page(block("echo 1; echo 2", output="old"), block("echo 3; echo 4", output="3\n..."))
        self.assertEqual(self.run_tool(text, "--write").returncode, 0)
        self.assertEqual(self.page.read_text(), text.replace("old", "1\n2"))


if __name__ == "__main__":
    unittest.main()
