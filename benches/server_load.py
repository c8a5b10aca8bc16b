"""The server under an open loop: 200 adapters on 8 slots, against the same engine serving the base model alone, and PEFT in a loop.

    python benches/server_load.py [--requests 60] [--rounds 2] [--minutes 0]      --minutes 30 is the soak: RSS must stay flat

SmolLM2-135M in f32; adapters of rank 4 on q_proj and v_proj with random weights. The load saturates the server, so tokens per
second are what it can do. The three loads take turns within a round, so that a slow moment of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from hotslot import smollm
from hotslot.server.bench import Client, Load, measure

NUM_ADAPTERS, NUM_SLOTS = 200, 8
PROMPT = "Write a short story about a lighthouse keeper who finds a map."


def write_adapters(folder: Path, model: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    shapes = {"q_proj": config.num_attention_heads * 64, "v_proj": config.num_key_value_heads * 64}
    for seed in range(NUM_ADAPTERS):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for name, out in shapes.items():
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(4, config.hidden_size, generator=generator) * 0.02
                tensors[f"{path}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.02
        target = folder / f"a{seed:03}"
        target.mkdir()
        save_file(tensors, target / "adapter_model.safetensors")
        written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        (target / "adapter_config.json").write_text(json.dumps(written))


def start(model: Path, adapters: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-W", "ignore", "-m", "hotslot", "serve", str(model), "--served-model-name", "base", "--port", "0"]
    command += ["--adapter-root", str(adapters), "--max-loras", str(NUM_SLOTS), "--max-lora-rank", "8", "--max-model-len", "512"]
    command += ["--max-num-seqs", "16", "--max-queue", "10000", "--max-queue-per-adapter", "10000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if '"port"' in line:
            port = json.loads(line)["port"]
        if "startup complete" in line:
            break
    else:
        raise RuntimeError("the server did not start")
    # Somebody has to read what it logs.
    import threading

    threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
    return process, f"http://127.0.0.1:{port}"


def rss(process: subprocess.Popen[str]) -> float:
    """Resident megabytes."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def peft_loop(model: Path, adapters: Path, requests: int, tokens: int) -> float:
    """Tokens per second of PEFT in the loop that a plain server would be: one request after the other, its adapter set."""
    from peft import PeftModel

    base, tokenizer = smollm.load()
    served = PeftModel.from_pretrained(base, adapters / "a000", adapter_name="a000")
    for seed in range(1, NUM_SLOTS):
        served.load_adapter(adapters / f"a{seed:03}", f"a{seed:03}")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    begun = time.perf_counter()
    for request in range(requests):
        served.set_adapter(f"a{request % NUM_SLOTS:03}")
        served.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return requests * tokens / (time.perf_counter() - begun)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=0.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = smollm.ensure()
    with tempfile.TemporaryDirectory() as folder:
        adapters = Path(folder)
        write_adapters(adapters, model)
        process, url = start(model, adapters)
        try:
            client = Client(url)
            names = [f"a{seed:03}" for seed in range(NUM_ADAPTERS)]
            kinds = {
                "base": (["base"], 0.0),
                "8 adapters on 8 slots": (names[:NUM_SLOTS], 0.0),
                "200 adapters on 8 slots": (names, 1.0),
            }
            asyncio.run(measure(client, names[:NUM_SLOTS], Load(rate=50, seconds=0.4, max_tokens=4, prompt=PROMPT)))
            reports: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for round_ in range(options.rounds):
                for kind, (models, zipf) in kinds.items():
                    rate = 40.0
                    load = Load(rate, options.requests / rate, zipf, options.tokens, PROMPT, seed=round_)
                    reports[kind].append(asyncio.run(measure(client, models, load)))
                    print(kind, json.dumps(reports[kind][-1]), flush=True)
            ratios = {
                kind: statistics.median(
                    one["tokens_per_second"] / base["tokens_per_second"] for one, base in zip(found, reports["base"], strict=True)
                )
                for kind, found in reports.items()
            }
            print("tokens/s as a part of base:", {kind: round(ratio, 3) for kind, ratio in ratios.items()})
            before = rss(process)
            end = time.monotonic() + 60 * options.minutes
            while time.monotonic() < end:
                report = asyncio.run(measure(client, names, Load(2.0, 60.0, 1.0, options.tokens, PROMPT, seed=int(time.time()))))
                print(f"rss {rss(process):.0f} MB (began with {before:.0f})", json.dumps(report), flush=True)
        finally:
            process.terminate()
            process.wait(60)
        print(f"PEFT, one after the other: {peft_loop(model, adapters, 8, options.tokens):.1f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
