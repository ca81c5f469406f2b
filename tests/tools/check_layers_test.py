"""Breaks each rule of tools/check_layers.py once, in a small tree, and expects to be told where."""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"
LAYERS = ("base:\nplan: base\nkernels: base\nnn: base plan kernels\ncheckpoint: base\nlaunch: base plan\n"
          "controller: base nn launch\ncli: base plan nn launch controller\n")

spec = importlib.util.spec_from_file_location("check_layers", TOOL)
check_layers = importlib.util.module_from_spec(spec)
sys.dont_write_bytecode = True
spec.loader.exec_module(check_layers)


def run_tool(*arguments):
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def plant(folder, files, layers=LAYERS):
    """A tree of {path: text} under trireme/."""
    root = pathlib.Path(folder)
    (root / "tools").mkdir()
    (root / "tools" / "layers.txt").write_text(layers)
    for name, text in files.items():
        path = root / "trireme" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def violations(files):
    with tempfile.TemporaryDirectory() as folder:
        return list(check_layers.violations(plant(folder, files)))


class CheckLayers(unittest.TestCase):
    def refused(self, name, text, line=1, **others):
        output = violations({name: text, **others})
        self.assertEqual(len(output), 1, output)
        self.assertTrue(output[0].startswith(f"trireme/{name}:{line}: "), output)
        return output[0]

    def accepted(self, files):
        self.assertEqual(violations(files), [])

    def test_accepts_downward_includes_and_own_room(self):
        self.accepted({"nn/a.cpp": '#include "trireme/nn/a.h"\n#include "trireme/plan/b.h"\n#include <ATen/ATen.h>\n'})

    def test_refuses_upward_include_at_its_line(self):
        message = self.refused("plan/a.cpp", '#include <vector>\n\n#include "trireme/nn/linear.h"\n', line=3)
        self.assertIn("plan may not include nn", message)

    def test_refuses_unlisted_room(self):
        self.assertIn("'odd' is not listed", self.refused("odd/a.h", "#pragma once\n"))

    def test_refuses_relative_include(self):
        self.refused("nn/a.cpp", '#include "a.h"\n')

    def test_refuses_torch_umbrella_header_everywhere(self):
        self.refused("nn/a.cpp", "#include <torch/torch.h>\n")

    def test_refuses_torch_and_cuda_in_torch_free_rooms(self):
        for room in ("base", "plan", "launch"):
            for header in ("ATen/ATen.h", "torch/nn/module.h", "c10/core/Device.h", "cuda_runtime.h", "nccl.h"):
                self.refused(f"{room}/a.h", f"#include <{header}>\n")

    def test_front_command_is_torch_free_and_worker_is_not(self):
        self.refused("cli/train.cpp", "#include <ATen/ATen.h>\n")
        self.refused("cli/train.cpp", '#include "trireme/nn/linear.h"\n')
        self.refused("cli/train.cpp", '#include "trireme/cli/worker.h"\n')
        self.accepted({"cli/worker_train.cpp": '#include <ATen/ATen.h>\n#include "trireme/nn/linear.h"\n'})

    def test_controller_is_torch_free_but_for_its_workers(self):
        self.refused("controller/wire.cpp", "#include <ATen/ATen.h>\n")
        self.refused("controller/wire.cpp", '#include "trireme/nn/linear.h"\n')
        self.refused("controller/wire.cpp", '#include "trireme/controller/worker_ops.h"\n')
        self.refused("controller/worker_link.cpp", "#include <ATen/ATen.h>\n")
        self.refused("cli/serve.cpp", '#include "trireme/controller/worker_ops.h"\n')
        self.accepted({"cli/serve.cpp": '#include "trireme/controller/wire.h"\n#include "trireme/controller/worker_link.h"\n',
                       "controller/worker_ops.cpp": '#include <ATen/ATen.h>\n#include "trireme/nn/linear.h"\n'})

    def test_face_for_tensors_is_no_part_of_its_torch_free_room(self):
        face = {"checkpoint/safetensors.h": "#include <ATen/core/Tensor.h>\n"}
        self.accepted({**face, "checkpoint/safetensors.cpp": '#include "trireme/checkpoint/safetensors.h"\n'})
        self.refused("checkpoint/index.cpp", "#include <ATen/core/Tensor.h>\n", **face)
        message = self.refused("checkpoint/index.cpp", '#include "trireme/checkpoint/safetensors.h"\n', **face)
        self.assertIn("face for tensors", message)

    def test_cuda_sources_see_no_aten_even_through_a_header(self):
        self.refused("kernels/a.cu", "#include <ATen/ATen.h>\n")
        header = {"kernels/ops.h": "#include <c10/core/Device.h>\n"}
        message = self.refused("kernels/a.cu", '#include "trireme/kernels/ops.h"\n', **header)
        self.assertIn("trireme/kernels/ops.h -> c10/core/Device.h", message)

    def test_environment_is_read_in_one_place(self):
        words = ('std::getenv("X")', 'setenv("A", "B", 1)', "extern char** environ", 'c10::utils::set_env("A", "B")',
                 'c10::utils::get_env("A")')
        for word in words:
            self.refused("launch/a.cpp", f"int x;\nauto y = {word};\n", line=2)
            self.accepted({"base/env.cpp": f"auto y = {word};\n"})

    def test_comments_and_strings_are_no_code(self):
        text = '// getenv\n/* #include <torch/torch.h>\n#ifdef USE_CUDA */\nauto s = "getenv"; auto r = R"(setenv\n")";\n'
        self.accepted({"launch/a.cpp": text})

    def test_no_conditional_compilation_for_cuda(self):
        self.refused("nn/a.cpp", "#ifdef TRIREME_HAS_CUDA\n#endif\n")
        self.refused("nn/a.cpp", "#if defined(USE_C10D_NCCL) && 1\n#endif\n")
        self.accepted({"kernels/no_cuda.cpp": "#ifdef USE_CUDA\n#endif\n"})

    def test_device_macros_are_for_cuda_sources(self):
        self.accepted({"kernels/a.cu": "#if __CUDA_ARCH__ >= 900\n#endif\n"})
        self.refused("kernels/a.cpp", "#if __CUDA_ARCH__ >= 900\n#endif\n")

    def test_refuses_a_cycle_in_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            done = run_tool("--root", plant(folder, {}, layers="base: plan\nplan: base\n"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("'plan', which must stand above it", done.stderr)

    def test_refuses_an_arrow_that_no_include_uses(self):
        files = {"plan/a.h": '#include "trireme/base/b.h"\n', "nn/a.h": '// #include "trireme/plan/a.h"\n'}
        layers = "base:\nplan: base\n# heads, blocks\nnn: base plan\n"
        with tempfile.TemporaryDirectory() as folder:
            found = list(check_layers.unused_arrows(plant(folder, files, layers)))
        self.assertEqual(found, [f"tools/layers.txt:4: nn may include {room}, but no file does; take it out"
                                 for room in ("base", "plan")])

    def test_violations_go_to_stdout_and_exit_with_one(self):
        with tempfile.TemporaryDirectory() as folder:
            files = {"base/a.h": '#include "trireme/nn/b.h"\n'}
            done = run_tool("--root", plant(folder, files, layers="base:\n"))
        self.assertEqual((done.returncode, done.stdout.count("\n")), (1, 1))

    def test_this_repository_keeps_the_rules(self):
        self.assertEqual((run_tool().stdout, run_tool().returncode), ("", 0))


if __name__ == "__main__":
    unittest.main()
