"""PyTorch peer: trains a Llama/GPT-shaped model with one stock strategy and prints one JSON line.

Launch: torchrun --standalone --nproc_per_node N torch_train.py --model llama-1b --strategy fsdp2 --compile
The strongest settings a PyTorch user would pick are the defaults: fused AdamW, SDPA, bf16 compute with fp32 master weights.

With --config (what `trireme config show --json` prints), --tokens (our train-*.tokens, in order) and --init (our weights,
safetensors) it trains our model from our weights on our windows in our order, with our optimizer constants, learning rates
and clipping, so that "losses" can be held against ours. --device cpu tries that without a GPU.
"""
import argparse, contextlib, json, os, resource, statistics, time
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist

MODELS = {  # dim, layers, heads, kv_heads, ffn, vocab, tied, kind
    "nano": (128, 4, 4, 4, 512, 256, True, "llama"),
    "gpt-tiny": (128, 4, 4, 4, 512, 256, True, "gpt"),
    "llama-tiny": (128, 4, 4, 2, 352, 256, True, "llama"),
    "gpt2-124m": (768, 12, 12, 12, 3072, 50304, True, "gpt"),
    "gpt-154m": (1024, 8, 16, 16, 4096, 50257, True, "gpt"),
    "llama-1b": (2048, 16, 32, 8, 8192, 128256, True, "llama"),
    "llama-3b": (3072, 28, 24, 8, 8192, 128256, True, "llama"),
    "llama-8b": (4096, 32, 32, 8, 14336, 128256, False, "llama"),
}

def rope_cache(T, hd, base=500000.0, device=None):
    inv = 1.0 / (base ** (torch.arange(0, hd, 2, device=device).float() / hd))
    f = torch.outer(torch.arange(T, device=device).float(), inv)
    return torch.cos(f), torch.sin(f)

def apply_rope(x, cos, sin):
    x1, x2 = x.float().chunk(2, -1)
    c, s = cos[None, None], sin[None, None]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(x.dtype)

class Block(nn.Module):
    def __init__(s, d, h, kv, f, kind):
        super().__init__()
        s.h, s.kv, s.hd, s.kind = h, kv, d // h, kind
        b = kind == "gpt"
        s.n1 = nn.LayerNorm(d) if b else nn.RMSNorm(d, eps=1e-5)
        s.n2 = nn.LayerNorm(d) if b else nn.RMSNorm(d, eps=1e-5)
        s.qkv = nn.Linear(d, (h + 2 * kv) * s.hd, bias=b)
        s.o = nn.Linear(d, d, bias=b)
        if b:
            s.up, s.down = nn.Linear(d, f), nn.Linear(f, d)
        else:
            s.gate_up, s.down = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def forward(s, x, cos, sin):
        B, T, D = x.shape
        q, k, v = s.qkv(s.n1(x)).split([s.h * s.hd, s.kv * s.hd, s.kv * s.hd], -1)
        q = q.view(B, T, s.h, s.hd).transpose(1, 2)
        k = k.view(B, T, s.kv, s.hd).transpose(1, 2)
        v = v.view(B, T, s.kv, s.hd).transpose(1, 2)
        if s.kind == "llama":
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.kv != s.h)
        x = x + s.o(y.transpose(1, 2).reshape(B, T, D))
        z = s.n2(x)
        if s.kind == "gpt":
            return x + s.down(F.gelu(s.up(z), approximate="tanh"))
        g, u = s.gate_up(z).chunk(2, -1)
        return x + s.down(F.silu(g) * u)

class Model(nn.Module):
    def __init__(s, name, T, rope_theta=500000.0):
        super().__init__()
        d, L, h, kv, f, V, tied, kind = MODELS[name]
        s.cfg = MODELS[name]
        s.emb = nn.Embedding(V, d)
        s.pos = nn.Embedding(T, d) if kind == "gpt" else None
        s.blocks = nn.ModuleList(Block(d, h, kv, f, kind) for _ in range(L))
        s.norm = nn.LayerNorm(d) if kind == "gpt" else nn.RMSNorm(d, eps=1e-5)
        s.head = nn.Linear(d, V, bias=False)
        if tied:
            s.head.weight = s.emb.weight
        cos, sin = rope_cache(T, d // h, rope_theta)
        s.register_buffer("cos", cos, persistent=False)
        s.register_buffer("sin", sin, persistent=False)

    def forward(s, idx, tgt):
        x = s.emb(idx)
        if s.pos is not None:
            x = x + s.pos(torch.arange(idx.shape[1], device=idx.device))
        for b in s.blocks:
            x = b(x, s.cos, s.sin)
        logits = s.head(s.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tgt.flatten())

def flops_per_token(cfg, T):
    """Model FLOPs a token, forward+backward: 6 a matmul weight plus causal attention (half of the full square)."""
    d, L, h, kv, f, V, tied, kind = cfg
    hd = d // h
    per_layer = d * (h + 2 * kv) * hd + d * d + (2 * d * f if kind == "gpt" else 3 * d * f)
    return 6 * (L * per_layer + d * V) + 6 * L * T * d  # causal: 12*L*T*d / 2

def shape_of(config):
    """The entry of MODELS for our config."""
    c = config["model"]
    if c["family"] not in ("gpt2", "llama") or c["dropout"] or c["norm_eps"] != 1e-5 or config["optim"]["name"] != "adamw":
        raise SystemExit("the peer has gpt2 and llama with eps 1e-5, no dropout, and AdamW; the config asks for something else")
    return (c["d_model"], c["n_layers"], c["n_heads"], c["n_kv_heads"], c["d_ff"], c["vocab_size"], c["tie_embeddings"],
            {"gpt2": "gpt", "llama": "llama"}[c["family"]])

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="llama-1b")
    p.add_argument("--strategy", default="fsdp2", choices=["ddp", "fsdp2", "fsdp2-nores", "zero1", "bf16"])
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--mbs", type=int, default=4)
    p.add_argument("--accum", type=int, default=1)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--fp8", default="", choices=["", "tensorwise", "rowwise"])
    p.add_argument("--ac", action="store_true")
    p.add_argument("--sdpa", default="")
    p.add_argument("--tag", default="")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    p.add_argument("--config", default="", help="our resolved config as JSON: shape, optimizer, seed")
    p.add_argument("--tokens", nargs="+", default=[], help="shards of the training split")
    p.add_argument("--init", default="", help="initial weights")
    a = p.parse_args()
    if bool(a.config) != bool(a.tokens) or bool(a.config) != bool(a.init):
        p.error("--config, --tokens and --init go together")
    same = None
    if a.config:
        with open(a.config) as file: same = json.load(file)["config"]
        MODELS[a.model] = shape_of(same)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = a.device == "cuda"
    dev = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(dev)
        dist.init_process_group("nccl", device_id=dev)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    dtype = torch.bfloat16 if a.dtype == "bf16" else torch.float32
    torch.manual_seed(1234)
    torch.set_float32_matmul_precision("high")
    with torch.device(dev):
        m = Model(a.model, a.seq, same["model"]["rope_theta"] if same else 500000.0)
    for q in m.parameters():
        if q.dim() > 1: nn.init.normal_(q, std=0.02)
    if same:
        from same_weights import load_weights
        load_weights(m, a.init, same["model"]["family"])
    n_params = sum(q.numel() for q in m.parameters())
    if a.fp8:
        from torchao.float8 import convert_to_float8_training, Float8LinearConfig
        cfg = Float8LinearConfig.from_recipe_name(a.fp8) if a.fp8 == "rowwise" else Float8LinearConfig(enable_fsdp_float8_all_gather=a.strategy.startswith("fsdp2"))
        convert_to_float8_training(m, config=cfg, module_filter_fn=lambda mod, fqn: "head" not in fqn)
    if a.ac:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        for i, b in enumerate(m.blocks):
            m.blocks[i] = checkpoint_wrapper(b)
    if a.compile:
        for i, b in enumerate(m.blocks):
            m.blocks[i] = torch.compile(b, fullgraph=not a.ac)
    net, autocast = m, None
    if a.strategy.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
        mp = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        res = a.strategy == "fsdp2"
        mesh = None if cuda else dist.init_device_mesh("cpu", (world,))
        for b in m.blocks:
            fully_shard(b, mesh=mesh, mp_policy=mp, reshard_after_forward=res)
        fully_shard(m, mesh=mesh, mp_policy=mp, reshard_after_forward=res)
    elif a.strategy == "bf16":
        m.to(torch.bfloat16)
        if world > 1:
            net = nn.parallel.DistributedDataParallel(m, device_ids=[dev.index] if cuda else None, gradient_as_bucket_view=True)
    else:
        autocast = torch.autocast(dev.type, dtype) if a.dtype == "bf16" else None
        if dist.is_initialized():
            net = nn.parallel.DistributedDataParallel(m, device_ids=[dev.index] if cuda else None, gradient_as_bucket_view=True,
                                                      static_graph=not a.ac and a.accum == 1)  # its first backward must synchronise
    adamw = dict(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    params, clip = net.parameters(), 1.0
    if same:  # decays matrices only
        o, clip = same["optim"], same["train"]["grad_clip"]
        adamw |= dict(lr=o["lr"], betas=(o["beta1"], o["beta2"]), eps=o["eps"], weight_decay=o["weight_decay"])
        params = [{"params": [q for q in net.parameters() if q.dim() >= 2]},
                  {"params": [q for q in net.parameters() if q.dim() < 2], "weight_decay": 0.0}]
    if a.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, **adamw)
    else:
        opt = torch.optim.AdamW(params, **adamw)
    if same:
        from same_data import Tokens, learning_rate
        tokens = Tokens(a.tokens, a.seq)
        def micro_batches(step):
            rows = tokens.rows(same["seed"], step, a.mbs * a.accum * world, rank, world)
            return torch.tensor(rows, device=dev).split(a.mbs)
    else:
        V = MODELS[a.model][5]
        g = torch.Generator(device=dev).manual_seed(7 + rank)  # data seed: 7 + rank
        batches = [torch.randint(0, V, (a.mbs, a.seq + 1), device=dev, generator=g) for _ in range(4)]
        def micro_batches(step):
            return [batches[(step * a.accum + mb) % 4] for mb in range(a.accum)]
    ctx = (lambda: torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, a.sdpa))) if a.sdpa else contextlib.nullcontext
    times, losses = [], []
    t_start = time.time()
    for step in range(a.warmup + a.steps):
        if step == a.warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        parts, xs = [], micro_batches(step)
        if same:
            for group in opt.param_groups:
                group["lr"] = learning_rate(same["optim"], step + 1, a.warmup + a.steps)
        synchronize()
        if dist.is_initialized(): dist.barrier()
        synchronize()
        t0 = time.perf_counter()
        for mb, x in enumerate(xs):
            last = mb == a.accum - 1
            if a.strategy.startswith("fsdp2"):
                m.set_requires_gradient_sync(last)
            sync = net.no_sync() if (not last and hasattr(net, "no_sync")) else contextlib.nullcontext()
            with sync, ctx():
                with (autocast or contextlib.nullcontext()):
                    loss = net(x[:, :-1], x[:, 1:]) / a.accum
                loss.backward()
            parts.append(loss.detach())
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step(); opt.zero_grad(set_to_none=True)
        synchronize()
        if step >= a.warmup:
            times.append(time.perf_counter() - t0)
        total = torch.stack(parts).double().sum()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    med = statistics.median(times)
    toks = a.mbs * a.seq * a.accum / med
    fl = flops_per_token(MODELS[a.model], a.seq)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rank == 0:
        print(json.dumps(dict(peer="torch", tag=a.tag, model=a.model, params=n_params, strategy=a.strategy, world=world, seq=a.seq, mbs=a.mbs, accum=a.accum,
            compile=a.compile, fp8=a.fp8, ac=a.ac, sdpa=a.sdpa, dtype=a.dtype, torch=torch.__version__,
            step_ms=round(med * 1e3, 2), tok_s_gpu=round(toks), samples={"tok_s_gpu": [round(toks * med / t) for t in times]},
            tflops_gpu=round(toks * fl / 1e12, 4), mfu989=round(toks * fl / 989e12, 4), peak_alloc_gib=round(peak / 2**30, 2),
            peak_reserved_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None, loss0=round(losses[0], 4),
            lossN=round(losses[-1], 4), losses=losses if same else None, seconds=times if same else None,
            wall_s=round(time.time() - t_start, 1))), flush=True)
    if dist.is_initialized() and not cuda:
        dist.barrier()
        os._exit(0)  # Gloo's threads may outlive their group, which would abort the process
    if cuda: dist.destroy_process_group()

if __name__ == "__main__":
    main()
