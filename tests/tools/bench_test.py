"""The benchmark's arithmetic: which tokens the peer reads, when losses agree, what is counted."""
import pathlib
import struct
import sys
import tempfile
import unittest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.dont_write_bytecode = True
sys.path[:0] = [str(BENCH), str(BENCH / "peers")]

import efficiency  # noqa: E402
import losses  # noqa: E402
import programs  # noqa: E402
import same_data  # noqa: E402


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


class Commands(unittest.TestCase):
    def test_options_replace_those_of_the_same_key(self):
        command = ["x", "--a.b=1", "--run-dir", "r", "--json", "--flag", "-n", "1", "--a.b=2"]
        found = programs.with_options(command, {"a.b": 3, "run-dir": "s", "flag": "yes"})
        self.assertEqual(found, ["x", "--json", "-n", "1", "--a.b=3", "--run-dir=s", "--flag=yes"])

    def test_flops_are_those_that_train_announces(self):
        model = {"family": "llama", "d_model": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2,
                 "d_ff": 352, "vocab_size": 256}
        flops = efficiency.flops_per_token({"model": model, "data": {"seq_len": 128}})
        self.assertEqual(flops, 5013504)


if __name__ == "__main__":
    unittest.main()
