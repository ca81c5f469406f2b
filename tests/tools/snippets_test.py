"""tools/snippets.py: pages show what their sources hold, and nothing else."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "snippets.py"
SOURCE = """\
void first() {
  // snippet: one
  train(net);
  step();
  // end of snippet
}
void second() {
  // snippet: two
  train(engine);
  step();
  // end of snippet
}
"""
PAGE = """\
# Page
<!-- snippet: steps.cpp one -->
<!-- end of snippet -->
between
<!-- snippet: steps.cpp one..two -->
<!-- end of snippet -->
"""


class Snippets(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        (self.root / "docs").mkdir()
        self.source, self.page = self.root / "steps.cpp", self.root / "docs" / "page.md"
        self.source.write_text(SOURCE)
        self.page.write_text(PAGE)

    def run_tool(self, *arguments):
        return subprocess.run([sys.executable, str(TOOL), "--root", str(self.root), *arguments],
                              capture_output=True, text=True, check=False)

    def test_writes_snippets_and_differences(self):
        self.assertEqual(self.run_tool("--check").returncode, 8)
        self.assertEqual(self.run_tool().returncode, 0)
        text = self.page.read_text()
        self.assertIn("```cpp\ntrain(net);\nstep();\n```\n", text)
        self.assertIn("```diff\n-train(net);\n+train(engine);\n step();\n```\n", text)
        self.assertEqual(self.run_tool("--check").returncode, 0)

    def test_notices_a_change_on_either_side(self):
        self.run_tool()
        written = self.page.read_text()
        self.source.write_text(SOURCE.replace("step()", "leap()"))
        self.assertEqual(self.run_tool("--check").returncode, 8)
        self.source.write_text(SOURCE)
        self.page.write_text(written.replace("step()", "leap()"))
        self.assertEqual(self.run_tool("--check").returncode, 8)
        self.assertEqual(self.page.read_text(), written.replace("step()", "leap()"), "--check writes nothing")

    def refused(self, words):
        result = self.run_tool()
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn(words, result.stderr)

    def test_refuses_what_no_test_runs(self):
        self.page.write_text(PAGE + "```cpp\nby_hand();\n```\n")
        self.refused("C++ that is no snippet")

    def test_names_what_is_missing_and_what_nobody_shows(self):
        self.page.write_text(PAGE.replace("one..two", "one..three"))
        self.refused("has no snippet three; it has one, two")
        self.page.write_text(PAGE.replace("one..two", "one"))
        self.refused("no page shows snippet two")
        self.page.write_text(PAGE.replace("steps.cpp", "gone.cpp"))
        self.refused("gone.cpp: No such file")

    def test_refuses_markers_that_do_not_pair(self):
        self.source.write_text(SOURCE.replace("  // end of snippet\n}\nvoid", "}\nvoid"))
        self.refused("steps.cpp:7: a snippet begins within another")
        self.source.write_text(SOURCE + "// snippet: three\n")
        self.refused("snippet three does not end")


if __name__ == "__main__":
    unittest.main()
