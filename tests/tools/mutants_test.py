"""Which faults a line can have, and that sources are put back whatever happens."""
import dataclasses
import json
import os
import pathlib
import shutil
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

    def test_a_term_is_dropped_with_its_brackets(self):
        self.assertEqual(list(mutants.faults_of_line("  x = a + size(b) + c[d];")),
                         [("dropped term", "  x = a + c[d];"), ("dropped term", "  x = a + size(b);")])
        self.assertEqual(list(mutants.faults_of_line("  x = f(a + b * c);")), [])

    def test_all_and_of_a_line_are_turned_round(self):
        self.assertEqual(list(mutants.faults_of_line("  return a && b && c;")), [("turned round", "  return a || b || c;")])

    def test_comments_have_no_faults(self):
        self.assertEqual(list(mutants.faults_of_line("  x = a && b && c;  // 1 && 2")),
                         [("turned round", "  x = a || b || c;  // 1 && 2")])
        self.assertEqual(list(mutants.faults_of_line("  x = y;  // npos + 1 is 0, and 1 < 2")), [])

    def test_what_needs_no_order_keeps_it(self):
        self.assertFalse(mutants.may_change_places("  a.x = b;", "  a.y = b;"))
        self.assertFalse(mutants.may_change_places("  a += b;", "  a += c;"))
        self.assertFalse(mutants.may_change_places("  a += other.a;", "  more_a += other.more_a;"))
        self.assertFalse(mutants.may_change_places("  a.x.push_back(b);", "  a.y->push_back(b);"))
        self.assertTrue(mutants.may_change_places("  a.push_back(b);", "  a.resize(b);"))
        self.assertTrue(mutants.may_change_places("  a.push_back(b);", "  c.push_back(a.size());"))
        self.assertTrue(mutants.may_change_places("  a.x = b;", "  a.y = a.x;"))
        self.assertTrue(mutants.may_change_places("  a = b;", "  note(a);"))
        self.assertFalse(mutants.may_change_places("  a = b;", "  note(a),  b);"), "the end of a longer statement")

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
        self.assertNotEqual(order, mutants.drawn(all_faults, 4))

    def test_a_change_of_the_sources_leaves_the_order_of_other_faults(self):
        less = mutants.faults_of(pathlib.Path("f.cpp"), "\n" + SOURCE.replace("  note(a);\n", ""))
        order = [fault.key() for fault in mutants.drawn(less, 3) if fault.kind == "off by one"]
        before = mutants.drawn(mutants.faults_of(pathlib.Path("f.cpp"), SOURCE), 3)
        self.assertEqual(order, [fault.key() for fault in before if fault.kind == "off by one"])


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
                return mutants.verdict(room, fault), seen
            finally:
                self.assertEqual(path.read_text(), SOURCE)

    def test_what_tests_say(self):
        result, seen = self.run_with(lambda: True, lambda: False)
        self.assertEqual(result, "noticed")
        self.assertNotEqual(seen, [SOURCE])
        self.assertEqual(self.run_with(lambda: True, lambda: True)[0], "survived")
        self.assertIsNone(self.run_with(lambda: False, lambda: True)[0])

    def test_sources_come_back_after_ctrl_c(self):
        def interrupted():
            raise KeyboardInterrupt
        with self.assertRaises(KeyboardInterrupt):
            self.run_with(interrupted, lambda: True)


class Times(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "f.cpp"
        self.path.write_text(SOURCE)
        os.utime(self.path, (1e9, 1e9))
        root = mock.patch.object(mutants, "ROOT", pathlib.Path(folder.name))
        root.start()
        self.addCleanup(root.stop)
        self.sources = mutants.Sources([pathlib.Path("f.cpp")])
        self.room = mock.Mock()
        self.room.builds.return_value = True
        mutants.verdict(self.room, mutants.faults_of(pathlib.Path("f.cpp"), SOURCE)[0])
        self.assertGreater(self.path.stat().st_mtime, 1e9, "no object with a fault is taken for one of the source")

    def test_are_old_again_after_a_build(self):
        times = []
        self.room.builds.side_effect = lambda: times.append(self.path.stat().st_mtime) or True
        self.sources.build_as_before(self.room)
        self.assertGreater(times[0], 1e9)
        self.assertEqual(self.path.stat().st_mtime, 1e9)

    def test_stay_where_the_build_fails(self):
        self.room.builds.return_value = False
        self.sources.build_as_before(self.room)
        self.assertGreater(self.path.stat().st_mtime, 1e9)

    def test_stay_where_somebody_else_changed_the_source(self):
        self.path.write_text(SOURCE + "// more\n")
        self.sources.build_as_before(self.room)
        self.assertGreater(self.path.stat().st_mtime, 1e9)

    @unittest.skipUnless(shutil.which("ninja") and shutil.which("sh"), "there is no ninja")
    def test_ninja_makes_nothing_anew_and_keeps_no_object_with_a_fault(self):
        folder = self.path.parent
        (folder / "build.ninja").write_text("rule copy\n  command = cp $in $out && echo x >>runs\nbuild f.o: copy f.cpp\n")
        self.room.builds.side_effect = lambda: subprocess.run(["ninja", "-C", str(folder)], capture_output=True,
                                                              check=False).returncode == 0
        mutants.verdict(self.room, mutants.faults_of(pathlib.Path("f.cpp"), SOURCE)[0])
        self.assertNotEqual((folder / "f.o").read_text(), SOURCE)
        self.sources.build_as_before(self.room)
        runs = (folder / "runs").read_text()
        self.assertTrue(self.room.builds())
        self.assertEqual((folder / "f.o").read_text(), SOURCE)
        self.assertEqual((folder / "runs").read_text(), runs)


    @unittest.skipUnless(shutil.which("ninja") and shutil.which("g++"), "there is no ninja or no g++")
    def test_a_source_that_the_build_leaves_out_has_no_faults(self):
        folder = self.path.parent
        (folder / "out").mkdir()
        self.path.write_text("int f();\n")
        (folder / "g.cpp").write_text("int g();\n")
        (folder / "out" / "build.ninja").write_text("rule c\n  command = g++ -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n"
                                                    "  deps = gcc\nbuild f.o: c ../f.cpp\n")
        subprocess.run(["ninja", "-C", str(folder / "out")], capture_output=True, check=True)
        room = mutants.Room("x", folder / "out", 1)
        self.assertEqual(room.compiled([pathlib.Path("f.cpp"), pathlib.Path("g.cpp")]), [pathlib.Path("f.cpp")])


# Stands for a program of googletest: FAILS names the test that fails; what ran is written down.
PROGRAM = """#!/bin/sh
echo "$GTEST_FILTER $GTEST_SHARD_INDEX/$GTEST_TOTAL_SHARDS $*" >>ran
for word; do
  case $word in --gtest_output=json:*)
    echo '{"testsuites": [{"name": "A", "testsuite": [
      {"name": "quick", "time": "0.01s", "status": "RUN"}, {"name": "slow", "time": "1.5s", "status": "RUN"},
      {"name": "slower", "time": "3s", "status": "RUN"}, {"name": "off", "time": "0s", "status": "NOTRUN"}]}]}' \
      >"${word#*json:}" ;;
  esac
done
[ "$GTEST_FILTER" != "$(cat fails 2>/dev/null)" ]
"""


class Parts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        build = pathlib.Path(folder.name)
        self.tests = build / "tests"
        for name in ("bin", "tests"):
            (build / name).mkdir()
        (build / "bin" / "test_x").write_text(PROGRAM)
        (build / "bin" / "test_x").chmod(0o755)
        self.room = mutants.Room("x", build, 1)
        self.room.programs = ["test_x"]

    def ran(self):
        lines = (self.tests / "ran").read_text().splitlines()
        (self.tests / "ran").unlink()
        return [line.split()[0] for line in lines]

    def test_quick_tests_run_first_and_slow_ones_share_processes(self):
        self.assertTrue(self.room.learns_times())
        self.assertEqual(self.ran(), ["*"])
        self.assertTrue(self.room.passes())
        self.assertEqual(self.ran(), ["*-A.slow:A.slower", "A.slow:A.slower"])

    def test_the_first_failure_ends_it_and_comes_first_the_next_time(self):
        self.assertTrue(self.room.learns_times())
        (self.tests / "fails").write_text("A.slow:A.slower")
        self.ran()
        for _ in range(9):
            self.assertFalse(self.room.passes())
        self.ran()
        self.assertFalse(self.room.passes())
        self.assertEqual(self.ran(), ["A.slow:A.slower"])

    def test_tests_that_fail_without_a_fault_are_no_measure(self):
        (self.tests / "fails").write_text("*")
        self.assertFalse(self.room.learns_times())

    def test_each_process_has_a_part_of_the_quick_tests(self):
        parts = mutants.in_parts(mutants.Part("p", "*", 0), {"A.a": 0.01, "A.b": 0.02}, 2)
        self.assertEqual([(part.tests, part.share) for part in parts], [("*", (0, 2)), ("*", (1, 2))])

    def test_what_ctest_runs_with_a_variable_is_run_with_it_as_well(self):
        def listed(program, name, *variables):
            return {"command": [f"/bin/{program}", f"--gtest_filter={name}"],
                    "properties": [{"name": "ENVIRONMENT", "value": ["OMP_NUM_THREADS=1", *variables]}]}
        listing = {"tests": [listed("test_x", "A.a"), listed("test_x", "A.a", "FORKS=1"), listed("test_x", "A.b", "FORKS=1"),
                             listed("test_y", "A.c", "FORKS=1"), {"name": "not built"}]}
        wholes = mutants.with_variables(listing, "test_x")
        self.assertEqual([(whole.tests, whole.variables) for whole in wholes], [("A.a:A.b", {"FORKS": "1"})])
        for part in mutants.in_parts(wholes[0], {"A.a": 0.01, "A.b": 0.2}, 1):
            self.assertEqual(part.environment()["FORKS"], "1")
            self.assertIn(part.environment()["GTEST_FILTER"], ("A.a:A.b-A.b", "A.b"))

    def test_what_hangs_is_ended(self):
        (self.room.build / "bin" / "test_x").write_text("#!/bin/sh\nsleep 60\n")
        self.assertFalse(self.room.first_failure([mutants.Part("test_x", "*", -1.9)], [[]]) is None)


    def test_what_takes_memory_without_end_is_ended(self):
        (self.room.build / "bin" / "test_x").write_text("#!/bin/sh\n%s -c 'x = b\"1\" * (1 << 27); import time; time.sleep(60)'\n"
                                                        % sys.executable)
        with mock.patch.object(mutants, "most_memory", lambda: 1 << 26):
            self.assertFalse(self.room.first_failure([mutants.Part("test_x", "*", 100)], [[]]) is None)
        self.assertGreater(mutants.memory_by_session()[os.getsid(0)], 1 << 20)


class Chosen(unittest.TestCase):
    def setUp(self):
        self.faults = mutants.faults_of(pathlib.Path("f.cpp"), SOURCE)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def chosen(self, equivalent, **options):
        (self.folder / "equivalent.json").write_text(json.dumps(equivalent))
        with mock.patch.object(mutants, "EQUIVALENT", self.folder / "equivalent.json"):
            return mutants.chosen(self.faults, mock.Mock(**({"again": None, "seed": 1} | options)))

    def test_what_changes_nothing_is_left_out(self):
        one = self.faults[0]
        self.assertCountEqual(self.chosen({one.key(): "why"}), self.faults[1:])

    def test_what_survived_is_planted_again_wherever_its_line_is_now(self):
        record = self.folder / "record.json"
        moved = dataclasses.replace(self.faults[1], line=99)
        record.write_text(json.dumps({"faults": [{"fault": self.faults[0].text(), "result": "noticed"},
                                                 {"fault": moved.text(), "result": "survived"}]}))
        self.assertEqual(self.chosen({}, again=record), [self.faults[1]])


@unittest.skipUnless((ROOT / ".git").exists(), "the sources came without their repository")
class CommandLine(unittest.TestCase):
    def test_what_changes_nothing_is_a_fault_that_a_line_can_have(self):
        for key, why in json.loads(mutants.EQUIVALENT.read_text()).items():
            path = pathlib.Path(key.split(":")[0])
            same = [fault for fault in mutants.faults_of(path, (ROOT / path).read_text()) if fault.key() == key]
            self.assertEqual(len(same), 1, key)
            self.assertTrue(why)

    def test_an_unknown_room_is_refused(self):
        done = subprocess.run([sys.executable, str(ROOT / "tools" / "mutants.py"), "nowhere"], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no unchanged sources in trireme/nowhere", done.stderr)


if __name__ == "__main__":
    unittest.main()
