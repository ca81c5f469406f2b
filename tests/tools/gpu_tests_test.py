"""The record of GPU tests: with programs that stand for ctest, nvidia-smi and test programs. What survival.py refuses."""
import collections
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest
from unittest import mock

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "gpu_tests.py"
# A test whose name ends in Skips is skipped, and one that ends in Lost has no result.
PASSES = """
    import sys, os, time, pathlib
    def option(name): return next(word for word in sys.argv if word.startswith(name)).removeprefix(name)
    names = option("--gtest_filter=").split(":")
    log = pathlib.Path(__file__).parent / "log"
    gpus = os.environ["CUDA_VISIBLE_DEVICES"] + ("!" if "Alone" in names[0] else "")
    with log.open("a") as out: out.write(f"begin {gpus} {len(names)}\\n")
    time.sleep(0.3)
    with log.open("a") as out: out.write(f"end {gpus}\\n")
    cases = []
    for suite, _, name in (name.partition(".") for name in names):
        if name.endswith("Lost"): continue
        skipped = '<skipped message="file.cpp:7&#x0A;no GPU" />' if name.endswith("Skips") else ""
        cases.append(f'<testcase name="{name}" status="run" time="0.5" classname="{suite}">{skipped}</testcase>')
    pathlib.Path(option("--gtest_output=xml:")).write_text(
        f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
"""
FAILS = """
    import sys, pathlib
    report = next(word for word in sys.argv if word.startswith("--gtest_output=xml:")).partition(":")[2]
    pathlib.Path(report).write_text('''<testsuites><testsuite>
      <testcase name="C" status="run" time="1" classname="Suite"><failure message="1 is not 2" /></testcase>
    </testsuite></testsuites>''')
    sys.exit(1)
"""
CRASHES = """
    import os
    print("[ RUN      ] Suite.D", flush=True)
    os.abort()
"""


class Record(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.tests = []

    def program(self, name, body):
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
        path.chmod(0o755)
        return path

    def add(self, name, label, body, tests=("Suite.Any",)):
        path = str(self.program(name, body))
        properties = [{"name": "LABELS", "value": [label]}]
        for test in tests:
            command = [path, f"--gtest_filter={test}", "--gtest_also_run_disabled_tests"]
            self.tests.append({"name": f"{name}.{test}", "command": command, "properties": properties})

    def write_record(self, program, seconds, skipped=()):
        tests = [{"program": program, "name": name, "seconds": took,
                  "result": "skipped" if name in skipped else "passed"} for name, took in seconds.items()]
        (self.folder / "record.json").write_text(json.dumps({"tests": tests}))

    def together(self):
        """What processes held at the same time, by the GPUs of each; ! for those that are alone."""
        held, together = collections.Counter(), []
        for line in (self.folder / "log").read_text().splitlines():
            event, gpus = line.split()[:2]
            held[gpus] += 1 if event == "begin" else -1
            together.append(sorted(held.elements()))
        return together

    def run_script(self, gpus=1, options=()):
        self.program("nvidia-smi", f"print({gpus} * 'NVIDIA Some, 580.1, 700.00 W\\n', end='')")
        self.program("ctest", f"print({json.dumps({'tests': self.tests})!r})")
        out = self.folder / "record.json"
        environment = os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}", "TMPDIR": str(self.folder)}
        done = subprocess.run([sys.executable, SCRIPT, "--build", self.folder, "--out", out, "--commit", "abc",
                               *options],
                              env=environment, capture_output=True, text=True)
        return done, json.loads(out.read_text()) if out.exists() else None

    def test_each_program_runs_once_and_each_test_has_its_result(self):
        self.add("test_one_gpu", "gpu1", PASSES, ("Suite.A", "Suite.Skips"))
        self.add("test_cpu", "cpu", CRASHES)
        done, record = self.run_script()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((record["commit"], record["driver"], record["device"]),
                         ("abc", "580.1", "1 x NVIDIA Some"))
        self.assertEqual([(test["name"], test["result"], test["seconds"]) for test in record["tests"]],
                         [("Suite.A", "passed", 0.5), ("Suite.Skips", "skipped", 0.5)])
        self.assertEqual(record["tests"][1]["reason"], "no GPU")
        self.assertEqual((self.folder / "log").read_text().count("begin"), 1)

    def test_a_test_without_a_result_has_failed(self):
        self.add("test_one_gpu", "gpu1", PASSES, ("Suite.A", "Suite.Lost"))
        done, record = self.run_script()
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual({test["name"]: test["result"] for test in record["tests"]},
                         {"Suite.A": "passed", "Suite.Lost": "failed"})

    def test_failures_and_crashes_are_recorded_and_end_with_1(self):
        self.add("test_fails", "gpu1", FAILS)
        self.add("test_crashes", "gpu2", CRASHES)
        done, record = self.run_script()
        self.assertEqual(done.returncode, 1)
        found = {test["name"]: test for test in record["tests"]}
        self.assertEqual((found["Suite.C"]["result"], found["Suite.C"]["reason"]), ("failed", "1 is not 2"))
        self.assertEqual(found["Suite.D"]["result"], "crashed")
        self.assertEqual(record["counts"], {"failed": 1, "crashed": 1})

    def test_processes_have_ten_seconds_of_the_last_record_each_and_the_longest_comes_first(self):
        self.add("test_short", "gpu1", PASSES, ("Suite.A",))
        self.add("test_long", "gpu2", PASSES, [f"Suite.T{index}" for index in range(12)])
        self.write_record("test_long", {"Suite.T0": 9.5} | {f"Suite.T{index}": 1.5 for index in range(1, 12)})
        done, record = self.run_script(gpus=2, options=["--places=1"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(record["counts"], {"passed": 13})
        begun = [line for line in (self.folder / "log").read_text().splitlines() if line.startswith("begin")]
        self.assertEqual([line.split()[1] for line in begun], ["0,1", "0,1", "0,1", "0"])
        self.assertEqual(sorted(int(line.split()[2]) for line in begun[:3]), [1, 5, 6])

    def test_the_seconds_of_a_test_that_was_skipped_are_not_known(self):
        names = [f"Suite.T{index}" for index in range(25)]
        self.add("test_two", "gpu2", PASSES, names)
        self.write_record("test_two", dict.fromkeys(names, 0.0), skipped=names)
        done, _ = self.run_script(gpus=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        begun = [line for line in (self.folder / "log").read_text().splitlines() if line.startswith("begin")]
        self.assertEqual(len(begun), 3, "processes of ten tests that may take a second each")

    def test_one_record_of_all_programs_names_each_test_once(self):
        for name, label in (("test_one", "gpu1"), ("test_two", "gpu2"), ("test_four", "gpu4")):
            self.add(name, label, PASSES, ("Suite.A", "Suite.A", "Suite.B"))
        done, record = self.run_script(gpus=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([(test["program"], test["label"], test["name"]) for test in record["tests"]],
                         [("test_four", "gpu4", "Suite.A"), ("test_four", "gpu4", "Suite.B"),
                          ("test_one", "gpu1", "Suite.A"), ("test_one", "gpu1", "Suite.B"),
                          ("test_two", "gpu2", "Suite.A"), ("test_two", "gpu2", "Suite.B")])

    def test_processes_share_gpus_up_to_their_places(self):
        for index in range(6):
            self.add(f"test_one{index}", "gpu1", PASSES)
            self.add(f"test_two{index}", "gpu2", PASSES)
        done, _ = self.run_script(gpus=2, options=["--places=4"])
        self.assertEqual(done.returncode, 0, done.stderr)
        together = self.together()
        for gpu in "01":
            taken = [sum(gpu in held for held in at_once) for at_once in together]
            self.assertLessEqual(max(taken), 4)

    def test_places_are_those_with_most_room(self):
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(SCRIPT.parent))
        import gpu_tests
        one, two, alone = (gpu_tests.Shard(gpu_tests.Program("some", label), ("Suite.A",), 1.0, alone)
                           for label, alone in (("gpu1", False), ("gpu2", False), ("gpu1", True)))
        pool = gpu_tests.GpuPool(3, places=3)
        self.assertEqual([pool.take(shard) for shard in (two, one, two, two, one, alone)],
                         [[0, 1], [2], [0, 1], [0, 2], [1], []])
        pool.give_back(one, [2])
        pool.give_back(two, [0, 2])
        self.assertEqual([pool.take(shard) for shard in (alone, two, one, one)], [[2], [], [0], []])
        pool.give_back(alone, [2])
        self.assertEqual([pool.take(shard) for shard in (one, alone)], [[2], []])

    def test_suites_whose_name_ends_in_alone_come_first_and_share_nothing(self):
        tests = ("Suite.A", "SuiteAlone.B", "Any/SuiteAlone.C/0", "Suite.DAlone", "TypedAlone/1.E")
        self.add("test_one", "gpu1", PASSES, tests)
        self.add("test_two", "gpu2", PASSES, tests)
        done, record = self.run_script(gpus=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(record["counts"], {"passed": 10})
        lines = (self.folder / "log").read_text().splitlines()
        self.assertEqual(lines[0], "begin 0,1! 3")
        self.assertIn("begin 0! 3", lines)
        for at_once in self.together():
            if "0,1!" in at_once:
                self.assertEqual(at_once, ["0,1!"])
            if "0!" in at_once:
                self.assertLessEqual(set(at_once), {"0!", "1"})

    def test_a_program_without_a_list_of_tests_runs_whole(self):
        self.add("test_whole", "gpu1", FAILS)
        self.tests[0]["command"] = self.tests[0]["command"][:1]
        done, record = self.run_script()
        self.assertEqual([test["name"] for test in record["tests"]], ["Suite.C"], done.stderr)
        self.assertIn("alone", done.stderr, "it may hold any suite")

    def test_says_what_is_missing(self):
        done, record = self.run_script(gpus=0)
        self.assertEqual((done.returncode, record), (3, None))
        self.assertIn("nvidia-smi lists no GPU", done.stderr)
        self.add("test_cpu", "cpu", PASSES)
        done, _ = self.run_script()
        self.assertEqual(done.returncode, 3)
        self.assertIn("built without CUDA", done.stderr)


class Survival(unittest.TestCase):
    def test_without_a_kind_of_fault_nothing_begins(self):
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(SCRIPT.parent))
        import survival
        with tempfile.TemporaryDirectory() as build, contextlib.redirect_stderr(io.StringIO()) as said, \
                mock.patch.object(survival, "can_mount", lambda: False), \
                mock.patch.object(sys, "argv", ["survival.py", "--kinds=disk", "--runs=1", f"--build={build}"]):
            (pathlib.Path(build) / "bin").mkdir()
            for name in ("trireme", "trireme-worker"):
                (pathlib.Path(build) / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
            self.assertEqual(survival.main(), survival.EXIT_ENVIRONMENT)
        self.assertIn("no kind of fault is left", said.getvalue())


if __name__ == "__main__":
    unittest.main()
