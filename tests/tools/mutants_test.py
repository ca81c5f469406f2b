"""Which faults a line can have, and that sources are put back whatever happens."""
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "bench")]

import mutants  # noqa: E402

SOURCE = """int f(int a, int b) {
  // a comment with a < b
  if (a < b && b == 2) return a + b;
  total = total + a;
  total = total * 2;
  log_info("a < {}", b);
  note(a);
  return std::min(a, b - 1);
}
"""


def faults(kind):
    return {tuple(fault.after) for fault in mutants.faults_of(pathlib.Path("f.cpp"), SOURCE) if fault.kind == kind}


class Faults(unittest.TestCase):
    def test_comparisons(self):
        self.assertEqual(faults("comparison"), {("  if (a <= b && b == 2) return a + b;",),
                                                ("  if (a < b && b != 2) return a + b;",)})

    def test_numbers_and_terms(self):
        self.assertIn(("  if (a < b && b == 3) return a + b;",), faults("off by one"))
        self.assertIn(("  return std::min(a, b - 2);",), faults("off by one"))
        self.assertEqual(faults("dropped term"), {("  if (a < b && b == 2) return a;",), ("  total = total;",)})

    def test_what_is_turned_round(self):
        self.assertEqual(faults("turned round"), {("  if (a < b || b == 2) return a + b;",),
                                                  ("  return std::max(a, b - 1);",),
                                                  ("  return std::min(a, b + 1);",)})

    def test_calls_and_order(self):
        self.assertEqual(faults("dropped call"), {()})
        self.assertEqual(faults("swapped order"), {("  total = total * 2;", "  total = total + a;")})

    def test_messages_and_comments_stay(self):
        self.assertFalse([fault for fault in mutants.faults_of(pathlib.Path("f.cpp"), SOURCE) if fault.line in (2, 6)])

    def test_a_fault_is_one_place(self):
        for fault in mutants.faults_of(pathlib.Path("f.cpp"), SOURCE):
            differ = sum(a != b for a, b in zip(SOURCE.split("\n"), mutants.with_fault(SOURCE, fault).split("\n")))
            self.assertTrue(fault.kind == "dropped call" or differ <= 2, fault.text())

    def test_kinds_take_turns_and_a_seed_repeats_its_draw(self):
        all_faults = mutants.faults_of(pathlib.Path("f.cpp"), SOURCE)
        order = mutants.drawn(all_faults, 3)
        self.assertEqual(order, mutants.drawn(all_faults, 3))
        self.assertEqual(sorted(map(mutants.Fault.text, order)), sorted(map(mutants.Fault.text, all_faults)))
        self.assertEqual(len({fault.kind for fault in order[:6]}), 6)


class Verdict(unittest.TestCase):
    def run_with(self, builds, passes):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(mutants, "ROOT", pathlib.Path(folder)):
            path = pathlib.Path(folder) / "f.cpp"
            path.write_text(SOURCE)
            fault = mutants.faults_of(pathlib.Path("f.cpp"), SOURCE)[0]
            seen = []
            room = mock.Mock()
            room.builds.side_effect = lambda: seen.append(path.read_text()) or builds()
            room.passes.side_effect = passes
            try:
                return mutants.verdict(room, fault, 1.0), seen
            finally:
                self.assertEqual(path.read_text(), SOURCE)

    def test_what_tests_say(self):
        result, seen = self.run_with(lambda: True, lambda limit: False)
        self.assertEqual(result, "noticed")
        self.assertNotEqual(seen, [SOURCE])
        self.assertEqual(self.run_with(lambda: True, lambda limit: True)[0], "survived")
        self.assertIsNone(self.run_with(lambda: False, lambda limit: True)[0])

    def test_sources_come_back_after_ctrl_c(self):
        def interrupted():
            raise KeyboardInterrupt
        with self.assertRaises(KeyboardInterrupt):
            self.run_with(interrupted, lambda limit: True)


@unittest.skipUnless((ROOT / ".git").exists(), "the sources came without their repository")
class CommandLine(unittest.TestCase):
    def test_an_unknown_room_is_refused(self):
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "mutants.py"), "nowhere"], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no unchanged sources in trireme/nowhere", done.stderr)


if __name__ == "__main__":
    unittest.main()
