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
PASSES = """
    import sys, os, time, pathlib
    report = next(word for word in sys.argv if word.startswith("--gtest_output=xml:")).partition(":")[2]
    log = pathlib.Path(__file__).parent / "log"
    shard = os.environ["GTEST_SHARD_INDEX"]
    with log.open("a") as out: out.write(f"begin {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
    time.sleep(0.3)
    with log.open("a") as out: out.write(f"end {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
    pathlib.Path(report).write_text('''<testsuites><testsuite>
      <testcase name="A%s" status="run" time="0.5" classname="Suite" />
      <testcase name="B" status="run" time="0" classname="Suite"><skipped message="file.cpp:7&#x0A;no GPU" /></testcase>
    </testsuite></testsuites>''' % shard)
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

    def add(self, name, label, body):
        command = [str(self.program(name, body)), "--gtest_filter=Suite.Any"]
        properties = [{"name": "LABELS", "value": [label]}]
        self.tests += 2 * [{"name": name, "command": command, "properties": properties}]

    def run_script(self, gpus=1):
        self.program("nvidia-smi", f"print({gpus} * 'NVIDIA Some, 580.1, 700.00 W\\n', end='')")
        self.program("ctest", f"print({json.dumps({'tests': self.tests})!r})")
        out = self.folder / "record.json"
        environment = os.environ | {"PATH": f"{self.folder}:{os.environ['PATH']}", "TMPDIR": str(self.folder)}
        done = subprocess.run([sys.executable, SCRIPT, "--build", self.folder, "--out", out, "--commit", "abc"],
                              env=environment, capture_output=True, text=True)
        return done, json.loads(out.read_text()) if out.exists() else None

    def test_each_program_runs_once_and_each_test_has_its_result(self):
        self.add("test_one_gpu", "gpu1", PASSES)
        self.add("test_cpu", "cpu", CRASHES)
        done, record = self.run_script()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((record["commit"], record["driver"], record["device"]),
                         ("abc", "580.1", "1 x NVIDIA Some"))
        self.assertEqual([(test["name"], test["result"], test["seconds"]) for test in record["tests"]],
                         [("Suite.A0", "passed", 0.5), ("Suite.B", "skipped", 0.0)])
        self.assertEqual(record["tests"][1]["reason"], "no GPU")
        self.assertEqual((self.folder / "log").read_text().count("begin"), 1)

    def test_failures_and_crashes_are_recorded_and_end_with_1(self):
        self.add("test_fails", "gpu1", FAILS)
        self.add("test_crashes", "gpu2", CRASHES)
        done, record = self.run_script()
        self.assertEqual(done.returncode, 1)
        found = {test["name"]: test for test in record["tests"]}
        self.assertEqual((found["Suite.C"]["result"], found["Suite.C"]["reason"]), ("failed", "1 is not 2"))
        self.assertEqual(found["Suite.D"]["result"], "crashed")
        self.assertEqual(record["counts"], {"failed": 1, "crashed": 1})

    def test_a_program_has_as_many_processes_as_there_are_gpus_for(self):
        self.add("test_one", "gpu1", PASSES)
        self.add("test_two", "gpu2", PASSES)
        self.add("test_four", "gpu4", PASSES)
        done, record = self.run_script(gpus=3)
        self.assertEqual(done.returncode, 0, done.stderr)
        ran = sorted((test["program"], test["name"]) for test in record["tests"] if test["result"] == "passed")
        self.assertEqual(ran, [("test_four", "Suite.A0"), ("test_one", "Suite.A0"), ("test_one", "Suite.A1"),
                               ("test_one", "Suite.A2"), ("test_two", "Suite.A0"), ("test_two", "Suite.A1")])

    def test_only_processes_that_take_several_gpus_share_them_two_at_a_time(self):
        for name in ("test_a", "test_b", "test_c"):
            self.add(name, "gpu1", PASSES)
        self.add("test_d", "gpu2", PASSES)
        self.add("test_e", "gpu2", PASSES)
        done, _ = self.run_script(gpus=2)
        self.assertEqual(done.returncode, 0, done.stderr)
        held = collections.Counter()  # by the GPUs of a process
        together = set()
        for line in (self.folder / "log").read_text().splitlines():
            event, _, gpus = line.partition(" ")
            held[gpus] += 1 if event == "begin" else -1
            together.add(tuple(sorted(held.elements())))
        self.assertLessEqual(together, {(), ("0",), ("1",), ("0", "1"), ("0,1",), ("0,1", "0,1")})

    def test_two_processes_of_two_gpus_share_both(self):
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(SCRIPT.parent))
        import gpu_tests
        pool = gpu_tests.GpuPool(3)
        one, two = gpu_tests.Program("one", "gpu1"), gpu_tests.Program("two", "gpu2")
        with pool.take(two) as first, pool.take(one) as alone, pool.take(two) as second:
            self.assertEqual((first, alone, second), ([0, 1], [2], [0, 1]))
            self.assertEqual(pool._take(one), [])

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
