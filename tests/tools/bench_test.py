"""The benchmark's arithmetic: which tokens the peer reads, when losses agree, what is counted, when
a first step ends, and which peer a policy has."""
import contextlib
import io
import json
import pathlib
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.dont_write_bytecode = True
sys.path[:0] = [str(BENCH), str(BENCH / "peers")]

import cases  # noqa: E402
import compare  # noqa: E402
import curves  # noqa: E402
import efficiency  # noqa: E402
import kernel_times  # noqa: E402
import losses  # noqa: E402
import machine  # noqa: E402
import programs  # noqa: E402
import runs  # noqa: E402
import same_data  # noqa: E402
import tables  # noqa: E402
import vision  # noqa: E402


def write_shard(path, tokens, width):
    header = struct.pack("<8sIIQ40x", b"TRITOKEN", 1, width, len(tokens))
    body = struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens)
    path.write_bytes(header + body + bytes(16))  # padding and checksums follow the tokens


class Samples(unittest.TestCase):
    def test_are_those_of_the_sampler(self):
        """The right sides were printed by sample_indices() of trireme/data/sampler.cpp."""
        for samples, seed, begin, expected in (
            (10, 42, 0, [5, 2, 4, 6, 8, 9, 1, 7, 0, 3, 9, 6, 8, 1, 7, 3, 5, 0, 4, 2, 2, 9]),
            (299090, 42, 0, [157704, 145162, 52674, 172314, 10453, 94260, 170731, 73255]),
            (299090, 43, 299086, [145988, 114586, 185493, 196514, 127414, 227549, 243344, 40513]),
            (1, 7, 0, [0, 0, 0]),
            (2**40, 1, 5, [349890202395, 965780361292, 192282082388]),
            (3, 2**64 - 1, 0, [2, 0, 1, 2, 1, 0, 0]),
        ):
            found = same_data.sample_indices(samples, seed, begin, len(expected))
            self.assertEqual(found, expected, (samples, seed))

    def test_windows_cross_shards(self):
        with tempfile.TemporaryDirectory() as folder:
            for width in (2, 4):
                parts = [range(0, 7), range(7, 9), range(9, 21)]
                paths = [pathlib.Path(folder) / f"{width}-{i}" for i in range(3)]
                for path, part in zip(paths, parts):
                    write_shard(path, part, width)
                tokens = same_data.Tokens(paths, seq_len=4)
                self.assertEqual(tokens.samples, 5)
                for i in range(5):
                    self.assertEqual(tokens.window(i), list(range(4 * i, 4 * i + 5)))

    def test_ranks_share_a_batch_in_order(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "tokens"
            write_shard(path, range(1000), 2)
            tokens = same_data.Tokens([path], seq_len=4)
            whole = tokens.rows(42, 3, 8, 0, 1)
            parts = [row for rank in range(4) for row in tokens.rows(42, 3, 8, rank, 4)]
            self.assertEqual(parts, whole)


class LearningRate(unittest.TestCase):
    def test_follows_the_schedule(self):
        optim = {"lr": 1.0, "min_lr": 0.2, "warmup_steps": 2, "schedule": "linear"}
        rates = [same_data.learning_rate(optim, step, 6) for step in range(1, 7)]
        for found, expected in zip(rates, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]):
            self.assertAlmostEqual(found, expected)
        optim["schedule"] = "cosine"
        self.assertAlmostEqual(same_data.learning_rate(optim, 4, 6), 0.6)
        self.assertAlmostEqual(same_data.learning_rate(optim, 6, 6), 0.2)
        optim["schedule"] = "constant"
        self.assertEqual(same_data.learning_rate(optim, 6, 6), 1.0)


class Losses(unittest.TestCase):
    def agreement(self, ours, other=2.0, bound=0.02):
        return losses.compare_losses([3.0] * 5 + [ours] * 10, [3.0] * 5 + [2.0] * 10,
                                     [3.0] * 5 + [other] * 10, bound)

    def test_agree_within_the_bound_or_the_noise(self):
        self.assertIsNone(losses.complaint(self.agreement(2.01)))
        self.assertIn("do not agree", losses.complaint(self.agreement(2.05)))
        self.assertIsNone(losses.complaint(self.agreement(2.05, other=1.9)))
        self.assertAlmostEqual(self.agreement(2.05, other=1.9)["noise"], 0.1)
        self.assertAlmostEqual(self.agreement(2.03)["mean_difference"], 0.02)

    def test_the_first_loss_has_no_noise(self):
        result = losses.compare_losses([3.05] + [2.0] * 14, [3.0] + [2.0] * 14, [9.0] * 15, 0.02)
        self.assertIn("first ones are 0.05", losses.complaint(result))

    def test_no_number_agrees_with_nothing(self):
        self.assertIn("do not agree", losses.complaint(self.agreement(float("nan"))))
        self.assertIn("do not agree", losses.complaint(self.agreement(2.0, other=float("nan"))))

    def test_refuse_other_lengths(self):
        with self.assertRaises(programs.BenchError):
            losses.compare_losses([1.0], [1.0, 1.0], [1.0, 1.0], 0.02)


def python(code):
    return programs.Side([sys.executable, "-S", "-c", code], "speed")


class Programs(unittest.TestCase):
    def test_startup_ends_with_the_line_of_the_first_step(self):
        output = programs.run_program(python(
            "import sys, time; print('{\"run\": 1}', flush=True); time.sleep(0.3); "
            "print('{\"step\": 1}', flush=True); print('said', file=sys.stderr); time.sleep(0.6); "
            "print('{\"step\": 2}')"), 60)
        self.assertGreaterEqual(output.startup_s, 0.3)
        self.assertLess(output.startup_s, 0.9)
        self.assertEqual(len(programs.json_objects(output.text)), 3)
        self.assertEqual(output.log, "said\n")

    def test_without_steps_there_is_no_startup(self):
        output = programs.run_program(python("print('{\"speed\": 1, \"steps\": 2}')"), 60)
        self.assertIsNone(output.startup_s)

    def test_failures_say_why(self):
        with self.assertRaisesRegex(programs.BenchError, "exit 3: (.|\n)*the reason") as failed:
            programs.run_program(python("import sys; print('the reason', file=sys.stderr); "
                                        "sys.exit(3)"), 60)
        self.assertEqual(failed.exception.code, programs.EXIT_FAILED)
        begin = time.monotonic()
        with self.assertRaisesRegex(programs.BenchError, "no end after 0 s"):
            programs.run_program(python("import time; time.sleep(30)"), 0.2)
        self.assertLess(time.monotonic() - begin, 20)
        with self.assertRaises(programs.BenchError) as missing:
            programs.run_program(programs.Side(["/no/such/program"], "speed"), 60)
        self.assertEqual(missing.exception.code, programs.EXIT_ENVIRONMENT)


class Gpus(unittest.TestCase):
    def test_clock_and_power_are_those_of_busy_gpus(self):
        watch = programs.GpuWatch(None)
        for clock in (1500, 1700, 1600):
            watch.read(f"1000, 100, {clock}, 680.5\n2000, 3, 345, 90.1\n[N/A], 100, [N/A], 1\n"
                       "3000, 100, [N/A], 1\n")
        self.assertEqual(watch.peak_bytes, 3000 << 20)
        self.assertEqual(watch.at_work(), [{"gpu": 0, "sm_mhz": 1600.0, "watts": 680.5}])


class Replicas(unittest.TestCase):
    RUN = ("import json, os; gpu = int(os.environ['CUDA_VISIBLE_DEVICES']); print('log'); "
           "[print(json.dumps({'step': step, 'tokens_per_s': 100.0 * (gpu + step), "
           "'peak_bytes': gpu})) for step in (1, 2)]; print(json.dumps({'steps': 2}))")

    def run_replicas(self, code, environment=None):
        command = [sys.executable, "bench/peers/replicas.py", "2", "--", sys.executable, "-c", code]
        return programs.run_program(programs.Side(command, "", environment=environment or {}), 60)

    def test_a_step_has_the_mean_of_all(self):
        for visible, speeds in (("0,1", [150.0, 250.0]), ("3,5", [500.0, 600.0])):
            found = programs.json_objects(
                self.run_replicas(self.RUN, {"CUDA_VISIBLE_DEVICES": visible}).text)
            self.assertEqual([record["tokens_per_s"] for record in found], speeds)
            self.assertEqual(found[0]["peak_bytes"], int(visible[-1]))

    def test_when_one_fails_the_others_end(self):
        begin = time.monotonic()
        with self.assertRaisesRegex(programs.BenchError, "exit 7: "):
            self.run_replicas("import os, sys, time; "
                              "time.sleep(30) if os.environ['CUDA_VISIBLE_DEVICES'] == '0' "
                              "else sys.exit(7)", {"CUDA_VISIBLE_DEVICES": "0,1"})
        self.assertLess(time.monotonic() - begin, 20)


class Measuring(unittest.TestCase):
    # Compiles in its first run: says so by a speed of 1, and leaves what it compiled.
    PEER = ("import json, os, pathlib; "
            "kept = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR']) / 'kept'; "
            "assert os.environ['TRITON_CACHE_DIR'].startswith(str(kept.parent)); "
            "warm = kept.exists(); kept.touch(); print(json.dumps({'step': 1})); "
            "print(json.dumps({'speed': 4 if warm else 1, 'deepspeed': '9.8'}))")
    OURS = "print('{\"step\": 11, \"speed\": 8}')"

    def test_a_case_begins_with_an_empty_compile_cache(self):
        ours, peer = (shlex.join(python(code).command) for code in (self.OURS, self.PEER))
        arguments = compare.parse_arguments(["--ours", ours, "--peer", peer, "--metric", "speed",
                                             "--alternations", "3"])
        (case,) = cases.pair_case(arguments)
        with contextlib.redirect_stderr(io.StringIO()):
            first, second = (runs.measure(case, arguments) for _ in range(2))
        for result in (first, second):
            found = [alternation["peer"]["value"] for alternation in result["alternations"]]
            self.assertEqual(found, [1, 4, 4])
        folder = next(word for word in shlex.split(first["peer"]["command"])
                      if word.startswith("TORCHINDUCTOR_CACHE_DIR=")).partition("=")[2]
        self.assertFalse(pathlib.Path(folder).exists())
        self.assertEqual(first["ratio"], 2)
        self.assertEqual(first["deepspeed"], "9.8")
        self.assertNotIn("torch", first)
        json.dumps(first)
        for side in ("ours", "peer"):
            self.assertEqual(first[side]["startup_s"]["first"],
                             first["alternations"][0][side]["startup_s"])
        self.assertIn("start-up", compare.table([first]))

    def run_of(self, startup):
        return runs.Run(1.0, [1.0], startup, None, None, {}, None, None, None, [])

    def test_warm_is_the_median_after_the_first(self):
        found = runs.summarise_startup([self.run_of(value) for value in (9.0, 2.0, 5.0, 3.0)])
        self.assertEqual(found, {"first": 9.0, "warm": 3.0})
        self.assertEqual(runs.summarise_startup([self.run_of(9.0)]), {"first": 9.0})
        self.assertIsNone(runs.summarise_startup([self.run_of(9.0), self.run_of(None)]))

    def test_ratios_of_startup_are_ours_over_the_peers(self):
        result = {"ours": {"startup_s": {"first": 4.0, "warm": 3.0}, "peak_bytes": 1},
                  "peer": {"startup_s": {"first": 16.0, "warm": 12.0}, "peak_bytes": 2}}
        with contextlib.redirect_stderr(io.StringIO()):
            runs.add_ratios(result)
        self.assertEqual(result["startup_ratio"], {"first": 0.25, "warm": 0.25})
        self.assertEqual(result["peak_bytes_ratio"], 0.5)


class Profile(unittest.TestCase):
    def test_reads_the_line_of_train(self):
        log = ("12:00:01 step 10\n12:00:02 profile 247.35 ms a step, 1.46 ms idle; GEMM 168.32 ms "
               "(204); some thing 2.06 ms (36); open runs/x/trace.json in chrome://tracing or Perfetto\n12:00:03 done\n")
        self.assertEqual(kernel_times.parse_profile(log), {
            "step_ms": 247.35, "idle_ms": 1.46,
            "groups": {"GEMM": {"ms": 168.32, "calls": 204},
                       "some thing": {"ms": 2.06, "calls": 36}}})

    def test_reads_operators_where_there_is_no_gpu(self):
        found = kernel_times.parse_profile("profile of CPU operators, 70.10 ms a step, 3.00 ms idle; GEMM 40.00 ms (35); open a b/trace.json in chrome://tracing or Perfetto\n")
        self.assertEqual(found, {"step_ms": 70.1, "idle_ms": 3.0, "groups": {"GEMM": {"ms": 40.0, "calls": 35}}})

    def test_without_kernels_there_are_no_groups(self):
        found = kernel_times.parse_profile("profile without kernels: CUPTI has recorded none; open a b/trace.json in chrome://tracing or Perfetto\n")
        self.assertEqual(found, {"step_ms": None, "idle_ms": None, "groups": {}})

    def test_no_line_is_an_error(self):
        with self.assertRaises(programs.BenchError):
            kernel_times.parse_profile("profile of something else\n")

    def test_is_a_short_run_of_ours(self):
        line = "profile 2.00 ms a step, 0.50 ms idle; GEMM 1.50 ms (7); open x in Perfetto"
        side = python(f"import sys; print(sys.argv[1:], {line!r}, file=sys.stderr)")
        side.command.append("--train.steps=500")
        with contextlib.redirect_stderr(io.StringIO()):
            found = kernel_times.profile(side, 4, 60)
        self.assertEqual(found["groups"], {"GEMM": {"ms": 1.5, "calls": 7}})
        self.assertTrue(found["command"].endswith("--profile=4 --train.steps=14"), found["command"])
        self.assertNotIn("500", found["command"])


class Peers(unittest.TestCase):
    def peers_of(self, policy, wanted, problem=None):
        with mock.patch.object(cases, "import_error", lambda *_: problem), \
                contextlib.redirect_stderr(io.StringIO()) as log:
            found = cases.peers_of(policy, wanted, "python3")
        return found, log.getvalue()

    def test_deepspeed_is_the_peer_of_zero_where_it_is_installed(self):
        for policy in ("zero1", "zero2", "zero3"):
            self.assertEqual(self.peers_of(policy, None), (["deepspeed"], ""))
            found, log = self.peers_of(policy, None, "No module named deepspeed")
            self.assertEqual(found, ["best"])
            self.assertIn("No module named deepspeed", log)
        for policy in ("ddp", "fsdp"):
            self.assertEqual(self.peers_of(policy, None, "nothing there"), (["best"], ""))
            self.assertEqual(cases.peers_of(policy, None, "python3", "cpu"), ["torch"], "nothing is compiled there")

    def test_on_cpus_both_sides_compute_in_the_dtypes_asked_for(self):
        arguments = compare.parse_arguments(["cpu", "--models", "gpt-tiny", "--dtypes", "fp32,bf16", "--peer", "eager"])
        dtypes = []
        for case in cases.cpu_cases(arguments):
            dtype = case.label["dtype"]
            dtypes.append(dtype)
            self.assertIn(f"--precision.compute={dtype}", case.ours.command)
            self.assertIn(f"--dtype={dtype}", case.peer.command)
        self.assertEqual(sorted(set(dtypes)), ["bf16", "fp32"])

    def test_on_cpus_it_is_the_faster_of_eager_and_compiled(self):
        def case_of(*words):
            return cases.cpu_cases(compare.parse_arguments(["cpu", "--bin", "x", "--python", "p", *words]))[0]

        self.assertEqual(list(case_of().candidates), ["eager", "compile"])
        self.assertIn("--compile", case_of().candidates["compile"].command)
        self.assertNotIn("--compile", case_of().candidates["eager"].command)
        asked = case_of("--peer", "compile")
        self.assertEqual((asked.candidates, asked.label["against"]), ({}, "compile"))
        self.assertIn("--compile", asked.peer.command)

    def test_both_can_be_asked_for(self):
        self.assertEqual(self.peers_of("zero2", "torch,deepspeed")[0], ["torch", "deepspeed"])
        self.assertEqual(self.peers_of("ddp", "torch,deepspeed")[0], ["torch"])
        self.assertEqual(self.peers_of("zero2", "torch", "nothing there")[0], ["torch"])

    def test_what_is_not_there_is_refused(self):
        for policy, wanted, problem, code in (
            ("ddp", "deepspeed", None, programs.EXIT_USAGE),
            ("zero1", "horovod", None, programs.EXIT_USAGE),
            ("zero1", "deepspeed", "nothing there", programs.EXIT_ENVIRONMENT),
        ):
            with self.assertRaises(programs.BenchError) as refused:
                self.peers_of(policy, wanted, problem)
            self.assertEqual(refused.exception.code, code)

    def test_modules_are_looked_for_in_the_python_that_runs_the_peer(self):
        self.assertIsNone(cases.import_error(sys.executable, "json"))
        self.assertIn("no_such_module", cases.import_error(sys.executable, "no_such_module"))
        self.assertTrue(cases.import_error("/no/such/python", "json"))

    def test_one_rank_needs_no_launcher(self):
        arguments = compare.parse_arguments(["gpu", "--python", "py", "--peer", "torch,deepspeed",
                                             "--cases", "llama-1b:zero2:1,2", "--peer-args=--x"])
        with mock.patch.object(cases, "import_error", lambda *_: None):
            torch_1, deepspeed_1, torch_2, deepspeed_2 = cases.training_cases(arguments)
        self.assertEqual(torch_1.peer.command[:5],
                         ["py", "bench/peers/torch_train.py", "--strategy=fsdp2-nores", "--compile",
                          "--compile-loss"])
        self.assertEqual(deepspeed_1.peer.command[:5],
                         ["py", "bench/peers/deepspeed_train.py", "--stage=2", "--compile", "--compile-loss"])
        self.assertEqual(torch_1.peer.environment["WORLD_SIZE"], "1")
        for case in (torch_2, deepspeed_2):
            self.assertIn("torch.distributed.run", case.peer.command)
            self.assertNotIn("WORLD_SIZE", case.peer.environment)
        self.assertEqual(deepspeed_2.peer.command[-1], "--x")
        self.assertEqual([case.label["against"] for case in (torch_2, deepspeed_2)],
                         ["torch", "deepspeed"])
        self.assertEqual(torch_2.ours, deepspeed_2.ours)

    def test_replicas_are_our_own_program_on_one_rank(self):
        arguments = compare.parse_arguments(["gpu", "--python", "py", "--peer", "replicas",
                                             "--cases", "llama-1b:zero2:4", "--ours-args=--x"])
        (case,) = cases.training_cases(arguments)
        self.assertEqual(case.peer.command[:4], ["py", "bench/peers/replicas.py", "4", "--"])
        replica = case.peer.command[4:]
        for words, ranks, batch, policy in ((case.ours.command, "4", 16, "zero2"),
                                            (replica, "1", 4, "ddp")):
            self.assertEqual(words[words.index("-n") + 1], ranks)
            self.assertIn(f"--train.global_batch={batch}", words)
            self.assertIn(f"--parallel.policy={policy}", words)
            self.assertEqual(words[-1], "--x")
        self.assertEqual((case.ours.scale, case.peer.scale), (0.25, 1.0))


    def test_a_case_may_have_settings_of_its_own(self):
        arguments = compare.parse_arguments(["gpu", "--python", "py", "--seq", "2048", "--cases",
                                             "llama-1b:fsdp:1;gpt2-124m:ddp:1,2:seq=1024,micro_batch=64,peer=torch"])
        first, second, third = cases.training_cases(arguments)
        self.assertIn("--data.seq_len=2048", first.ours.command)
        for case, batch in ((second, 64), (third, 128)):
            for word in ("--data.seq_len=1024", "--train.micro_batch=64", f"--train.global_batch={batch}"):
                self.assertIn(word, case.ours.command)
            self.assertIn("--mbs=64", case.peer.command)
        for wrong in ("a:fsdp:1:colour=red", "a:fsdp:1:seq=long"):
            with self.assertRaises(programs.BenchError):
                cases.training_cases(compare.parse_arguments(["gpu", "--peer", "torch", "--cases", wrong]))

    def test_the_strongest_peer_is_one_of_those_that_the_case_allows(self):
        arguments = compare.parse_arguments(["gpu", "--python", "py", "--peer", "best", "--cases",
                                             "llama-1b:fsdp:1,4;llama-1b:ddp:4"])
        alone, sharded, replicated = cases.training_cases(arguments)
        self.assertEqual(list(alone.candidates), ["torch", "torch-amp", "torch-whole"])
        self.assertEqual((dict(sharded.candidates), sharded.label["against"]), ({}, "torch"), "no choice, no trial")
        self.assertEqual(list(replicated.candidates), ["torch", "torch-whole"])
        self.assertIn("--strategy=amp", alone.candidates["torch-whole"].command)
        self.assertIn("--whole", alone.candidates["torch-whole"].command)
        for side in (*alone.candidates.values(), *replicated.candidates.values()):
            self.assertEqual(side.environment["PYTORCH_ALLOC_CONF"], "expandable_segments:True")


def speed_side(speed, seconds=0.0, log=None):
    """A program of three steps at `speed`; it writes its GPUs and when it began and ended into `log`."""
    code = ("import json, os, pathlib, time; "
            f"log = {str(log)!r}; gpus = os.environ.get('CUDA_VISIBLE_DEVICES'); "
            "note = lambda what: log != 'None' and open(log, 'a').write(f'{what} {gpus}\\n'); "
            f"note('begin'); time.sleep({seconds}); note('end'); "
            "print(json.dumps({'step': 1})); "
            f"print(json.dumps({{'speed': {speed}, 'samples': {{'speed': [{speed}] * 3}}}}))")
    code = code.replace("print(json.dumps({'step': 1})); ", "")
    return programs.Side([sys.executable, "-c", code], "speed")


class Choosing(unittest.TestCase):
    def arguments(self, *words):
        return compare.parse_arguments(["gpu", "--alternations", "3", "--cases", "x", *words])

    def measure(self, case, budget=None):
        seen = []
        with contextlib.redirect_stderr(io.StringIO()):
            result = runs.measure(case, self.arguments(), budget, seen.append)
        return result, seen

    def test_best_is_measured_against_the_fastest_candidate(self):
        broken = programs.Side([sys.executable, "-c", "raise SystemExit(1)"], "speed")
        candidates = {"slow": speed_side(2), "fast": speed_side(4), "broken": broken}
        case = cases.Case({"model": "m", "micro_batch": 2, "seq_len": 10}, "tokens/s", speed_side(8),
                          candidates["slow"], candidates=candidates)
        result, seen = self.measure(case)
        self.assertEqual((result["against"], result["ratio"]), ("fast", 2))
        self.assertEqual(result["trials"], {"slow": 2, "fast": 4, "broken": 0})
        self.assertEqual(result["peer"]["timed_s"], 45.0, "9 samples of 20 tokens at 4 a second")
        self.assertEqual([len(one["alternations"]) for one in seen], [1, 2, 3])

    def test_nothing_begins_that_would_end_after_the_budget(self):
        case = cases.Case({"model": "m"}, "tokens/s", speed_side(8, 0.4), speed_side(4, 0.4))
        with mock.patch.object(runs.Budget, "FIRST_RUN", 0.1):
            began = time.monotonic()
            result, seen = self.measure(case, runs.Budget(2.2))
        self.assertLess(time.monotonic() - began, 2.5)
        self.assertEqual(result["stopped"], "the time was over")
        self.assertEqual((len(result["alternations"]), result["ratio"]), (len(seen), 2))
        self.assertIn(len(seen), (1, 2))
        result, _ = self.measure(case, runs.Budget(1.0))
        self.assertEqual(result["alternations"], [])

    def test_a_case_that_fails_ends_no_other(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "out.json"
            broken = programs.Side([sys.executable, "-c", "raise SystemExit('no memory')"], "speed")
            made = [cases.Case({"model": "a"}, "tokens/s", broken, speed_side(4)),
                    cases.Case({"model": "b"}, "tokens/s", speed_side(8), speed_side(4))]
            book = compare.Book(out, {}, self.arguments())
            with contextlib.redirect_stderr(io.StringIO()):
                compare.measure_in_turn(made, book, runs.Budget(None))
            first, second = json.loads(out.read_text())["cases"]
        self.assertIn("no memory", first["failed"])
        self.assertEqual((first["alternations"], second["ratio"]), ([], 2))
        self.assertEqual([error.code for error in book.failures], [programs.EXIT_FAILED])

    def test_cases_beside_each_other_share_no_gpu(self):
        with tempfile.TemporaryDirectory() as folder:
            log, out = pathlib.Path(folder) / "log", pathlib.Path(folder) / "out.json"
            made = [cases.Case({"model": f"m{ranks}", "ranks": ranks}, "tokens/s", speed_side(8, 0.2, log),
                               speed_side(4, 0.2, log)) for ranks in (1, 1, 2, 4)]
            book = compare.Book(out, {}, self.arguments("--commit", "abc"))
            with mock.patch.object(compare, "visible_gpus", lambda: list("0123")), \
                    contextlib.redirect_stderr(io.StringIO()):
                compare.measure_beside(made, book, runs.Budget(None))
                with self.assertRaises(programs.BenchError):
                    compare.measure_beside([cases.Case({"ranks": 5}, "", made[0].ours, made[0].peer)], book,
                                           runs.Budget(None))
            file = json.loads(out.read_text())
            held, most = [], 0
            for line in log.read_text().splitlines():
                event, _, gpus = line.partition(" ")
                names = [] if gpus == "None" else gpus.split(",")
                if event == "begin":
                    self.assertFalse(set(held) & set(names))
                    held += names
                    most = max(most, len(held))
                else:
                    held = [name for name in held if name not in names]
        self.assertEqual([(case["model"], case["ratio"]) for case in file["cases"]],
                         [("m1", 2), ("m1", 2), ("m2", 2), ("m4", 2)])
        self.assertGreaterEqual(most, 2)
        self.assertEqual(file["commit"], "abc")


class Curves(unittest.TestCase):
    """Of a program that prints losses by its seed and its options, and fails where it is told to."""
    PROGRAM = """#!{python}
import json, sys
options = dict(word[2:].split("=", 1) for word in sys.argv if "=" in word)
if "fails" in options:
    sys.exit("it failed")
loss = 1.0 + 0.01 * int(options["seed"]) + float(options.get("worse", 0))
for step in range(1, 5):
    print(json.dumps({{"step": step, "loss": loss / step}} | ({{"val_loss": loss}} if step == 4 else {{}})))
print(json.dumps({{"final_val_loss": loss}}))
"""

    def run_with(self, ways):
        with tempfile.TemporaryDirectory() as folder:
            program, out = pathlib.Path(folder) / "trireme", pathlib.Path(folder) / "out.json"
            program.write_text(self.PROGRAM.format(python=sys.executable))
            program.chmod(0o755)
            words = ["curves.py", "--ways", ways, "--text", folder, "--bin", str(program), "--out", str(out), "--last", "2"]
            with mock.patch.object(sys, "argv", words), mock.patch.object(curves, "visible_gpus", lambda: []), \
                    contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
                code = curves.main()
            return code, said.getvalue(), json.loads(out.read_text()) if out.exists() else None

    def test_a_way_agrees_within_the_spread_of_seeds(self):
        code, said, result = self.run_with("plain; near: --worse=0.015; far: --worse=0.03")
        self.assertEqual(code, programs.EXIT_BELOW)
        self.assertIn("do not agree", said)
        self.assertEqual([(run["way"], run["seed"]) for run in result["runs"]],
                         [("plain", 42), ("plain", 43), ("plain", 44), ("near", 42), ("far", 42)])
        verdict = result["verdict"]["val_loss"]
        self.assertAlmostEqual(verdict["bound"], 1.44)
        self.assertAlmostEqual(verdict["spread"], 0.02)
        self.assertEqual(len(result["runs"][0]["losses"]), 4)
        code, _, result = self.run_with("plain; near: --worse=0.015")
        self.assertEqual((code, result["verdict"]["val_loss"]["agree"]), (0, True))
        table = curves_table(result)
        self.assertIn("| near | 42 | 1.4350 |", table)

    def test_what_cannot_be_compared_is_refused(self):
        self.assertEqual(self.run_with("plain")[0], programs.EXIT_USAGE)
        self.assertEqual(self.run_with("plain; other: --fails=1")[0], programs.EXIT_FAILED)


def curves_table(result):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tables, "RESULTS", pathlib.Path(folder)):
        (pathlib.Path(folder) / "curves.json").write_text(json.dumps(result))
        return tables.make("curves curves.json")


class Commands(unittest.TestCase):
    def test_options_are_refused_where_they_mean_nothing(self):
        for words in (["--ours", "a", "--peer", "b", "--profile", "4"], ["cpu", "--peer", "torch"],
                      ["cpu", "--dtypes", "fp16"],
                      ["cpu", "--gemm"], ["gpu", "--losses", "5"], ["gpu", "--warmup", "9"],
                      ["gpu", "--losses", "10", "--peer", "torch,replicas"]):
            with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit) as left:
                compare.parse_arguments(words)
            self.assertEqual(left.exception.code, programs.EXIT_USAGE, words)

    def test_options_replace_those_of_the_same_key(self):
        command = ["x", "--a.b=1", "--run-dir", "r", "--json", "--flag", "-n", "1", "--a.b=2"]
        found = programs.with_options(command, {"a.b": 3, "run-dir": "s", "flag": "yes"})
        self.assertEqual(found, ["x", "--json", "-n", "1", "--a.b=3", "--run-dir=s", "--flag=yes"])

    def test_flops_are_those_that_train_announces(self):
        model = {"family": "llama", "d_model": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2,
                 "d_ff": 352, "vocab_size": 256}
        flops = efficiency.flops_per_token({"model": model, "data": {"seq_len": 128}})
        self.assertEqual(flops, 5013504)


class Vision(unittest.TestCase):
    # Stands for both programs: makes files, or prints steps of ours or what the peer prints at its end.
    PROGRAM = """#!{python} -S
import json, pathlib, sys
words = sys.argv[1:]
option = lambda key: next((word.partition("=")[2] for word in words if word.startswith(f"--{{key}}=")), None)
if "make" in words:
    pathlib.Path(option("out")).mkdir()
    pathlib.Path(option("out"), option("train")).touch()
elif words[0] == "train":
    assert pathlib.Path(option("data.path"), "64").exists()
    for step in range(1, int(option("train.steps")) + 1):
        print(json.dumps({{"step": step, "tokens_per_s": 50 if step % 2 else 200}}))
elif words[0].endswith("torch_vision.py"):
    speed = {{"eager": 20, "compile": 40}}[option("mode")]
    print(json.dumps({{"step": 1}}))
    print(json.dumps({{"images_per_s": speed, "synthetic_images_per_s": 2 * speed, "torch": "9",
                      "samples": {{"images_per_s": [speed], "synthetic_images_per_s": [2 * speed]}}}}))
"""

    def arguments(self, *words, mode="vision-cpu"):
        return compare.parse_arguments([mode, "--python", "py", "--bin", "trireme", *words])

    def cases_of(self, *words, mode="vision-cpu"):
        with mock.patch.object(vision, "prepare"):
            return vision.vision_cases(self.arguments(*words, mode=mode))

    def test_both_sides_are_measured_on_the_same_files(self):
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()), \
                contextlib.redirect_stdout(io.StringIO()) as printed:
            program, out = pathlib.Path(name) / "program", pathlib.Path(name) / "out.json"
            program.write_text(self.PROGRAM.format(python=sys.executable))
            program.chmod(0o755)
            code = compare.compare(compare.parse_arguments([
                "vision-cpu", "--bin", str(program), "--python", str(program), "--alternations", "2", "--out", str(out),
                "--data-dir", f"{name}/data", "--cases",
                "small-resnet20:1:images=64,batch=8,steps=4,peer=best/fp32-eager/fp32-compile"]))
            (case,) = json.loads(out.read_text())["cases"]
        self.assertEqual(code, 0)
        self.assertEqual((case["against"], case["trials"]), ("fp32-compile", {"fp32-eager": 40, "fp32-compile": 80}))
        self.assertEqual(case["ours"]["median"], 80, "the rate of steps at 50 and at 200 images a second")
        self.assertEqual((case["ratio"], case["bound"]["ratio"], case["torch"]), (2, 1, "9"))
        self.assertIn("reads nothing", printed.getvalue())

    def test_both_sides_train_the_same(self):
        one, two = self.cases_of("--cases", "resnet18-cifar:1,2:batch=32,augment=1,peer=bf16-graphs-inner", mode="vision")
        for case, ranks in ((one, 1), (two, 2)):
            words = case.ours.command
            self.assertEqual(words[words.index("-n") + 1], str(ranks))
            for word in ("--train.rank_batch=32", "--data.pad=4", "--train.steps=220", "--model.norm=batch",
                         "--precision.compute=bf16", "--optim.lr=0.01"):
                self.assertIn(word, words)
            for word in ("--batch=32", "--augment", "--steps=200", "--warmup=20", "--norm=batch", "--precision=bf16",
                         "--mode=graphs", "--inner", "--lr=0.01"):
                self.assertIn(word, case.peer.command)
            self.assertEqual(case.ours.scale, 1.0 / ranks)
            self.assertEqual(case.peer.environment["PYTORCH_ALLOC_CONF"], "expandable_segments:True")
        self.assertEqual("torch.distributed.run" in one.peer.command, False)
        self.assertIn("torch.distributed.run", two.peer.command)

    def test_files_belong_to_what_reads_them(self):
        arguments = self.arguments("--data-dir", "d")
        work, ranks = vision.read_case("resnet50:1,2:images=64,classes=8")
        self.assertEqual((ranks, str(vision.data_folder(work, arguments))), ([1, 2], "d/jpeg-64-8-256"))
        self.assertIn("--side=256", vision.data_commands(work, "d/x", arguments)[0])

    def test_without_fonts_there_are_other_pictures(self):
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()) as log:
            program = pathlib.Path(name) / "python"
            program.write_text("#!/bin/sh\nmkdir $2 && touch $2/drawn\n")
            program.chmod(0o755)
            arguments = compare.parse_arguments(["vision-cpu", "--bin", "false", "--python", str(program),
                                                 "--data-dir", f"{name}/data"])
            work, _ = vision.read_case("small-resnet20:1:images=64")
            vision.prepare(work, arguments)
            self.assertTrue((pathlib.Path(name) / "data" / "cifar-64" / "drawn").exists())
        self.assertIn("make_pictures.py", log.getvalue())

    def test_what_is_not_there_is_refused(self):
        for words in ("no-such-net:1", "resnet50:one", "resnet50:1:colour=red", "resnet50:1:batch=many",
                      "resnet50:1:peer=amp", "resnet50:1:peer=amp-magic", "resnet50:1:peer=best/amp-eager-outer"):
            with self.assertRaises(programs.BenchError) as refused:
                self.cases_of("--cases", words, mode="vision")
            self.assertEqual(refused.exception.code, programs.EXIT_USAGE, words)

    def test_networks_of_the_peer_have_as_many_parameters_as_ours(self):
        if problem := cases.import_error(sys.executable, "torch"):
            self.skipTest(f"{sys.executable} has no PyTorch: {problem}")
        import torch
        import torch_vision_model

        for name, classes, expected in (("small-resnet20", 10, 272474), ("resnet18-cifar", 10, 11173962),
                                        ("resnet50-cifar", 10, 23520842), ("resnet18", 1000, 11689512),
                                        ("resnet34", 1000, 21797672), ("resnet50", 1000, 25557032)):
            with torch.device("meta"):
                network = torch_vision_model.ResNet(torch_vision_model.MODELS[name], classes)
            self.assertEqual(sum(p.numel() for p in network.parameters()), expected, name)


class Pipelines(unittest.TestCase):
    def test_the_peer_has_every_stage_once_and_schedules_that_torch_has(self):
        if problem := cases.import_error(sys.executable, "torch"):
            self.skipTest(f"{sys.executable} has no PyTorch: {problem}")
        import torch_pipe
        for kind, layout in torch_pipe.SCHEDULES.values():
            self.assertTrue(hasattr(torch_pipe.schedules, kind), kind)
            for world in (1, 2, 4):
                found = [torch_pipe.stages_of(layout, rank, world) for rank in range(world)]
                self.assertEqual(sorted(stage for stages, _ in found for stage in stages), list(range(found[0][1])))


class Tables(unittest.TestCase):
    CASE = {"model": "llama-1b", "policy": "fsdp", "ranks": 1, "seq_len": 4096, "micro_batch": 4, "ratio": 1.1,
            "ratio_min": 1.0, "ratio_max": 1.2, "alternations": [{}],
            "ours": {"median": 110.0, "command": "trireme train", "mfu": 0.5},
            "peer": {"median": 100.0}}

    def lacks(self, command, file=None, **changes):
        return tables.lacks(self.case(command, **changes), {"commit": "a"} if file is None else file)

    def case(self, command, **changes):
        return self.CASE | changes | {"peer": {"median": 100.0, "command": command}}

    def run_in(self, folder, *words):
        with mock.patch.multiple(tables, ROOT=folder, RESULTS=folder / "bench" / "results"), \
                mock.patch.object(sys, "argv", ["tables.py", *words]), \
                contextlib.redirect_stderr(io.StringIO()) as log:
            return tables.main(), log.getvalue()

    def test_are_written_and_differences_are_found(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "docs").mkdir()
            (folder / "bench" / "results").mkdir(parents=True)
            raw, page = folder / "bench" / "results" / "a.json", folder / "docs" / "page.md"
            raw.write_text(json.dumps({"cases": [self.case("python torch_train.py --strategy=fsdp2"),
                                                 self.case("", alternations=[])]}))
            page.write_text("before\n<!-- table: speed a.json -->\n<!-- end of table -->\nafter\n")
            (folder / "README.md").write_text("<!-- table: speed a.json -->\n<!-- end of table -->\n")
            self.assertEqual(self.run_in(folder, "--check")[0], 8)
            self.assertEqual(self.run_in(folder)[0], 0)
            self.assertEqual(self.run_in(folder, "--check")[0], 0)
            self.assertIn("| **1.100** | 1.000 to 1.200 | 50.0% |", page.read_text())
            self.assertEqual(page.read_text().count("llama-1b"), 1, "a case without alternations is no row")
            self.assertIn("(../bench/results/a.json)", page.read_text())
            self.assertIn("(bench/results/a.json)", (folder / "README.md").read_text())
            page.write_text(page.read_text().replace("1.100", "1.300"))
            code, log = self.run_in(folder, "--check")
            self.assertEqual(code, 8)
            self.assertIn("docs/page.md", log)
            raw.write_text(json.dumps({"cases": [self.case(""), self.case("", model="gpt2-124m")]}))
            page.write_text("<!-- table: speed a.json:gpt2-124m -->\n<!-- end of table -->\n")
            self.assertEqual(self.run_in(folder)[0], 0)
            self.assertIn("gpt2-124m`", page.read_text())
            self.assertNotIn("llama-1b", page.read_text())
            page.write_text(page.read_text().replace("a.json:gpt2-124m", "a.json:gpt3"))
            self.assertEqual(self.run_in(folder)[0], 2)
            page.write_text("<!-- table: speed b.json -->\n<!-- end of table -->\n")
            code, log = self.run_in(folder, "--check")
            self.assertEqual(code, 2)
            self.assertIn("bench/results/b.json", log)

    def test_of_images_has_both_ratios(self):
        case = {"model": "resnet50", "device": "cuda", "ranks": 2, "image_size": 224, "batch": 256, "augment": True,
                "against": "bf16-graphs-inner", "ratio": 1.1, "ratio_min": 1.0, "ratio_max": 1.2, "alternations": [{}],
                "ours": {"median": 3300.0, "peak_bytes": 2**31}, "peer": {"median": 3000.0},
                "bound": {"peer": {"median": 3100.0}, "ratio": 1.0645}}
        cpu = case | {"device": "cpu", "threads": 1, "against": "fp32-eager", "augment": False}
        with tempfile.TemporaryDirectory() as name:
            (pathlib.Path(name) / "v.json").write_text(json.dumps({"commit": "a", "cases": [case, case | {"alternations": []}, cpu]}))
            with mock.patch.object(tables, "RESULTS", pathlib.Path(name)):
                lines = tables.make("vision v.json").splitlines()
        self.assertEqual(lines[2:], [
            "| `resnet50`, 2 GPUs, 224x224, batch 256, augmented ([raw](results:v.json)) | bf16 weights, compiled with "
            "CUDA graphs, inner | 3,300 | 3,000 | **1.100** | 1.000 to 1.200 | 3,100 | 1.065 | 2.0 GiB | - |",
            "| `resnet50`, 2 x 1 threads, 224x224, batch 256 ([raw](results:v.json)) | fp32, eager | 3,300 | 3,000 | "
            "**1.100** | 1.000 to 1.200 | 3,100 | 1.065 | 2.0 GiB | - |"])

    def test_a_peer_says_what_it_lacks(self):
        strong = "PYTORCH_ALLOC_CONF=expandable_segments:True python torch_train.py --strategy={}"
        for strategy, options in (("fsdp2", "--compile --compile-loss"), ("amp", "--whole")):
            self.assertEqual(self.lacks(f"{strong.format(strategy)} {options}", ranks=2), [])
        self.assertEqual(self.lacks(f"{strong.format('ddp')} --compile", ranks=2), ["compiled loss"])
        self.assertEqual(self.lacks("python torch_train.py --strategy=fsdp2", {}, ranks=2),
                         ["compiled blocks", "compiled loss", "fresh tokens", "a root that stays gathered",
                          "expandable segments"])
        alone = f"{strong.format('fsdp2')} --compile --compile-loss"
        self.assertEqual(self.lacks(alone), ["a trial without FSDP2 around its only rank"])
        self.assertEqual(self.lacks(alone, trials={"torch": 2.0, "torch-whole": 1.0}), [])
        self.assertEqual(self.lacks(f"{strong.format('ddp')} --whole --dtype=bf16", ranks=2),
                         ["gradients sent in bf16"])
        self.assertEqual(self.lacks("PYTORCH_ALLOC_CONF=expandable_segments:True deepspeed_train.py --stage=2", ranks=2),
                         ["compiled blocks", "compiled loss"])

    def test_a_peer_without_nvls_or_that_recomputes_says_so(self):
        sharded = "PYTORCH_ALLOC_CONF=expandable_segments:True torch_train.py --strategy=fsdp2 --compile --compile-loss"
        for variable in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
            off = {"commit": "a", "environment": {variable: "0" if "NCCL" in variable else "1"}}
            self.assertEqual(self.lacks(sharded, off, ranks=2), ["NVLS, off on this machine"])
            self.assertEqual(self.lacks(sharded, off, trials={"torch-whole": 1.0}), [], "a GPU alone has no switch")
        for recompute, missing in (("block", []), ("cheap", ["activations that are kept"])):
            ours = self.CASE["ours"] | {"settings": {"memory": {"recompute": recompute}}}
            self.assertEqual(self.lacks(f"{sharded} --ac", ranks=2, ours=ours), missing)
        self.assertIn("blocks recomputed", tables.peer_name(self.case(f"{sharded} --ac", ranks=2), {"commit": "a"}))

    def test_a_row_says_what_its_file_makes_doubtful(self):
        busy = {"load_average": [9.0, 1.0, 1.0], "cores": 16}
        for file, said in (({"commit": "a", "changed_files": 0}, []), ({"commit": "a"}, []), ({}, ["no commit"]),
                           ({"commit": "unknown", "changed_files": None}, ["no commit"]),
                           ({"commit": "a", "changed_files": 83}, ["sources differ by 83 files"]),
                           ({"commit": "a", "changed_files": None}, ["sources not compared with their commit"]),
                           ({"commit": "a", "machine": busy}, ["load average 9.0 on 16 cores at the start"]),
                           ({"commit": "a", "machine": busy | {"cores": 64}}, [])):
            self.assertEqual(tables.doubts(file), said)
        with tempfile.TemporaryDirectory() as name:
            file = {"commit": "a", "changed_files": 83, "cases": [self.case("torch_train.py")]}
            (pathlib.Path(name) / "a.json").write_text(json.dumps(file))
            with mock.patch.object(tables, "RESULTS", pathlib.Path(name)):
                self.assertIn("([raw](results:a.json); sources differ by 83 files)", tables.make("speed a.json"))


class Commit(unittest.TestCase):
    def git(self, *words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=self.folder, check=True,
                       capture_output=True)

    def describe(self, said=None):
        with mock.patch.object(programs, "ROOT", self.folder):
            return machine.describe_commit(said)

    def test_the_sources_are_compared_with_the_commit_that_was_said(self):
        with tempfile.TemporaryDirectory() as name:
            self.folder = pathlib.Path(name)
            self.assertEqual(self.describe(), {"commit": "unknown", "changed_files": None})
            self.git("init", "-q")
            for number in range(2):
                (self.folder / f"{number}.cpp").write_text("")
                self.git("add", ".")
                self.git("commit", "-qm", "one more")
                self.git("tag", f"v{number}")
            self.assertEqual(self.describe()["changed_files"], 0)
            self.assertEqual(self.describe("v0"), {"commit": "v0", "changed_files": 1})
            self.assertEqual(self.describe("feed123"), {"commit": "feed123", "changed_files": None})
            (self.folder / "new.cpp").write_text("")
            (self.folder / "bench" / "results").mkdir(parents=True)
            (self.folder / "bench" / "results" / "a.json").write_text("")
            self.assertEqual(self.describe("v1")["changed_files"], 1, "a source that git does not know counts")


class Start(unittest.TestCase):
    def test_a_python_without_torch_is_refused_once(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            out = str(pathlib.Path(folder) / "out.json")
            for mode in ("gpu", "cpu", "vision"):
                arguments = compare.parse_arguments([mode, "--python", "/no/python", "--bin", "true", "--out", out])
                with self.assertRaisesRegex(programs.BenchError, "cannot import torch") as refused:
                    compare.compare(arguments)
                self.assertEqual(refused.exception.code, programs.EXIT_ENVIRONMENT)
            for words in (["gpu", "--peer", "replicas,bf16"], ["--ours", "a", "--peer", "b"]):
                compare.check_torch(compare.parse_arguments([*words, "--python", "/no/python"]))

    def test_a_busy_machine_is_noted_in_the_file(self):
        busy = {"load_average": [99.0, 1.0, 1.0], "cores": 1}
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()), \
                contextlib.redirect_stdout(io.StringIO()), \
                mock.patch.object(compare, "describe_machine", lambda _: dict(busy)):
            out = pathlib.Path(folder) / "out.json"
            words = [shlex.join(speed_side(4).command)] * 2
            compare.compare(compare.parse_arguments(["--ours", words[0], "--peer", words[1], "--metric", "speed",
                                                     "--alternations", "1", "--out", str(out)]))
            self.assertIn("not worth much", json.loads(out.read_text())["machine"]["warning"])


class KernelGroups(unittest.TestCase):
    def test_every_kernel_of_a_step_belongs_to_a_group(self):
        source = (BENCH.parent / "trireme/train/profile.cpp").read_text()
        table = source[source.index("kMarks"):source.index("using Interval")]
        marks = [mark.removesuffix("<") for mark in re.findall(r'{"([^"]+)", "', table)]
        self.assertGreater(len(marks), 20)
        before_the_first_step = {"checksum_kernel", "draw_kernel", "any_kernel"}
        for path in sorted((BENCH.parent / "trireme/kernels").glob("*.cu")):
            launch_bounds = r"(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?"
            for name in re.findall(rf"__global__\s+void\s+{launch_bounds}(\w+)\(", path.read_text()):
                known = name in before_the_first_step or any(mark in name for mark in marks)
                self.assertTrue(known, f"{path.name}: {name}")


if __name__ == "__main__":
    unittest.main()
