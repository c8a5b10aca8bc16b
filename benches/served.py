"""What the server's benches share: adapters in a folder, and `hotslot serve` and a plain PEFT server as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import harness
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from hotslot import smollm

NUM_ADAPTERS, NUM_SLOTS, NUM_ROWS = 200, 8, 16
MAX_LENGTH = 512
PROMPT = "Write a short story about a lighthouse keeper who finds a map."


def model_folder(root: Path, *, quick: bool) -> Path:
    """SmolLM2-135M in f32; for a smoke run a tiny model with a tokenizer of single characters."""
    if not quick:
        return smollm.ensure()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = root / "model"
    harness.new_model("tiny").save_pretrained(folder)
    words = ["<eos>", *map(chr, range(32, 32 + harness.SHAPES["tiny"]["vocab_size"] - 1))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def write_adapters(root: Path, model: Path, count: int = NUM_ADAPTERS) -> list[str]:
    """Adapters of rank 4 on q_proj and v_proj with random weights, below `root`; their names."""
    config = AutoConfig.from_pretrained(model)
    shapes = {"q_proj": config.num_attention_heads * config.head_dim, "v_proj": config.num_key_value_heads * config.head_dim}
    names = [f"a{seed:03}" for seed in range(count)]
    for seed, name in enumerate(names):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for module, out in shapes.items():
                path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(4, config.hidden_size, generator=generator) * 0.02
                tensors[f"{path}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.02
        target = root / name
        target.mkdir(parents=True)
        save_file(tensors, target / "adapter_model.safetensors")
        written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
        (target / "adapter_config.json").write_text(json.dumps(written))
    return names


@contextmanager
def hotslot_server(model: Path, adapters: Path, threads: int) -> Iterator[tuple[str, int]]:
    """`hotslot serve` with the adapters in its root: its URL and process id; ended when left."""
    command = ["-m", "hotslot", "serve", str(model), "--served-model-name", "base", "--port", "0", "--adapter-root", str(adapters)]
    command += ["--max-loras", str(NUM_SLOTS), "--max-lora-rank", "8", "--max-model-len", str(MAX_LENGTH)]
    command += ["--max-num-seqs", str(NUM_ROWS), "--max-queue", "10000", "--max-queue-per-adapter", "10000"]
    with _process(command, threads, "startup complete") as found:
        yield found


@contextmanager
def peft_server(model: Path, adapters: Path, names: Sequence[str], threads: int) -> Iterator[tuple[str, int]]:
    """peft_server.py with these adapters in memory: its URL and process id; ended when left."""
    command = [str(harness.HERE / "peft_server.py"), str(model), str(adapters), *names]
    with _process(command, threads, '"port"') as found:
        yield found


@contextmanager
def _process(arguments: Sequence[str], threads: int, ready: str) -> Iterator[tuple[str, int]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-W", "ignore", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    port, told = None, []
    for line in process.stderr:
        told.append(line)
        if '"port"' in line:
            port = json.loads(line)["port"]
        if ready in line:
            break
    try:
        if port is None:
            raise RuntimeError(f"{' '.join(arguments[:3])} did not start: {''.join(told[-20:])}")
        # Somebody has to read what it logs.
        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # a busy machine; what was measured must not be lost for it
            process.kill()
            process.wait()


def resident(pid: int) -> int:
    """Bytes of a process that are in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
