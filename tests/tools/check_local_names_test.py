"""Plants file-local things of one name in a small library, and expects tools/check_local_names.py to tell which clash."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_local_names.py"


def source(body, after=""):
    return f"namespace trireme::nn {{\nnamespace {{\n\n{body}\n\n}}  // namespace\n{after}\n}}  // namespace trireme::nn\n"


def run(one, other):
    with tempfile.TemporaryDirectory() as folder:
        room = pathlib.Path(folder) / "trireme" / "nn"
        room.mkdir(parents=True)
        (room / "one.cpp").write_text(one)
        (room / "other.cpp").write_text(other)
        return subprocess.run([sys.executable, TOOL, folder], capture_output=True, text=True, check=False)


class CheckLocalNames(unittest.TestCase):
    def refused(self, body, other=None):
        result = run(source(body), source(other or body))
        self.assertEqual(result.returncode, 1, result)
        self.assertRegex(result.stdout, r"^trireme/nn/one.cpp:\d+: .* trireme/nn/other.cpp:\d+;")

    def accepted(self, one, other):
        result = run(one, other)
        self.assertEqual((result.returncode, result.stdout), (0, ""), result)

    def test_refuses_equal_types_constants_and_functions(self):
        self.refused("struct Reader {\n  int x;\n};")
        self.refused("enum class Kind { kOne };", "struct Kind {};")
        self.refused("constexpr int64_t kRows = 8;", "const char* const kRows[] = {};")
        self.refused("constexpr int kRows = 8, kColumns = 2 * kRows;", "constexpr int kColumns = 3;")
        self.refused("double half(double x) {\n  return x / 2;\n}", "double half(double value) {\n  return 0.5 * value;\n}")
        self.refused("void put(const std::map<int, int>& a,\n         int b = 3) {\n}", "void put(const std::map<int, int>& x, int y) {\n}")

    def test_refuses_an_alias_that_means_something_else(self):
        one, other = "using Kind = plan::A;\n" + source("int f() {\n}"), "using Kind = plan::B;\n" + source("int g() {\n}")
        self.assertEqual(run(one, other).returncode, 1)
        self.accepted(one, one.replace("f()", "h()"))

    def test_accepts_overloads_members_and_what_is_not_local(self):
        self.accepted(source("int f(int x) {\n}"), source("int f(double x) {\n}"))
        self.accepted(source("int A::f() {\n}"), source("int A::f() {\n}"))
        self.accepted(source("int f();", "int g() {\n}"), source("int h() {\n}", "int g() {\n}"))
        self.accepted(source("int f() {\n}"), source("int f() {\n}").replace("trireme::nn", "trireme::data"))

    def test_refuses_what_hides_a_name_of_a_header_of_tests(self):
        def run_program(label, local):
            with tempfile.TemporaryDirectory() as folder:
                room = pathlib.Path(folder) / "tests" / "nn"
                room.mkdir(parents=True)
                (room / "CMakeLists.txt").write_text(f"trireme_test(NAME nn LABEL {label} SOURCES one.cpp other.cpp)\n")
                (room / "net.h").write_text("inline int rows(int step) {\n  return step;\n}\n")
                (room / "one.cpp").write_text('#include "tests/nn/net.h"\n' + source("int f() {\n}"))
                (room / "other.cpp").write_text(source(local))
                return subprocess.run([sys.executable, TOOL, folder], capture_output=True, text=True, check=False)

        result = run_program("cpu", "int rows(double x) {\n}")
        self.assertEqual(result.returncode, 1, result)
        self.assertRegex(result.stdout, r"^tests/nn/other.cpp:\d+: rows\(double\) hides rows of tests/nn/net.h:1;")
        self.assertEqual(run_program("cpu", "int f() {\n}").returncode, 1)
        self.assertEqual(run_program("cpu", "int columns() {\n}").returncode, 0)
        self.assertEqual(run_program("unit", "int rows(double x) {\n}").returncode, 1)


if __name__ == "__main__":
    unittest.main()
