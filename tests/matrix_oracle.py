"""What each row of a batch should give: PEFT with one adapter at a time, or base weights with the adapter merged in f64.

`merge` reads adapter_config.json, adapter_model.safetensors and the base's parameters, and imports neither hotslot nor PEFT. It
stands in where PEFT refuses an adapter or serves it wrong, and it agrees with PEFT everywhere else (a test says so).
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file

NEW_TOKENS = 6

_PREFIX = "base_model.model."
_ONE_EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


@dataclass(frozen=True)
class Run:
    """What a model said to some rows.

    Attributes:
        logits: Of the prompt, [rows, tokens, vocabulary] or [rows, labels].
        tokens: Generated greedily, [rows, new].
        steps: The logits that each of them was chosen from, [rows, new, vocabulary].
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    steps: torch.Tensor

    def rows(self, *rows: int) -> Run:
        """Some of the rows."""
        at = list(rows)
        return Run(self.logits[at], self.tokens[at], self.steps[at])


@torch.no_grad()
def run(model: torch.nn.Module, kind: str, ids: torch.Tensor) -> Run:
    """Forward over the prompt, and greedy generation with a cache.

    Args:
        model: The model.
        kind: "causal", "classifier" or "seq2seq".
        ids: The prompt, [rows, tokens]; a seq2seq model also gets it, reversed, as the decoder's.
    """
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decoder = {"decoder_input_ids": ids.flip(1)} if kind == "seq2seq" else {}
    logits = model(**inputs, **decoder).logits
    if kind == "classifier":
        return Run(logits, ids[:, :0], logits[:, :0, None])
    found = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return Run(logits, found.sequences[:, -NEW_TOKENS:], torch.stack(found.logits, 1))


def with_peft(model: torch.nn.Module, folder: Path, kind: str, ids: torch.Tensor) -> Run:
    """PEFT's own model with this one adapter.

    Args:
        model: The base; PEFT may write into it.
        folder: The adapter.
        kind: As in `run`.
        ids: As in `run`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(PeftModel.from_pretrained(model, folder).eval(), kind, ids)


def with_merge(model: torch.nn.Module, folder: Path, kind: str, ids: torch.Tensor) -> Run:
    """The base with the adapter merged; for aLoRA, each layer is the base's before the invocation and the merged one from there.

    Args:
        model: The base; it stays as it is.
        folder: The adapter.
        kind: As in `run`.
        ids: As in `run`.
    """
    merged = merge(model, folder)
    invocation = json.loads((folder / "adapter_config.json").read_text()).get("alora_invocation_tokens")
    if not invocation:
        return run(merged, kind, ids)
    rows = [_run_from(model, merged, row, _last_occurrence(row[0].tolist(), invocation)) for row in ids.split(1)]
    return Run(*(torch.cat([getattr(row, part) for row in rows]) for part in ("logits", "tokens", "steps")))


@torch.no_grad()
def _run_from(before: torch.nn.Module, after: torch.nn.Module, ids: torch.Tensor, start: int) -> Run:
    """One row, each layer with the weights of one model up to `start` and of another from there; without a cache."""
    model, length, steps = copy.deepcopy(before), ids.shape[1], []
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D":
            layer.register_forward_hook(partial(_switch, after.get_submodule(path), start))
    logits = model(input_ids=ids, use_cache=False).logits
    for _ in range(NEW_TOKENS):
        steps.append(model(input_ids=ids, use_cache=False).logits[:, -1:])
        ids = torch.cat([ids, steps[-1].argmax(-1)], 1)
    return Run(logits, ids[:, length:], torch.cat(steps, 1))


def _switch(other: torch.nn.Module, start: int, _: torch.nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """A layer's output, from token `start` on another layer's."""
    is_before = torch.arange(out.numel() // out.shape[-1]).reshape(*out.shape[:-1], 1) < start
    return torch.where(is_before, out, other(*args))


def _last_occurrence(ids: list[int], sequence: list[int]) -> int:
    return max(at for at in range(len(ids)) if ids[at : at + len(sequence)] == sequence)


# --- the merge ----------------------------------------------------------------------------------------------------------------


def merge(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """A copy of `model` whose own weights do what the adapter says.

    Args:
        model: The base model.
        folder: A PEFT folder.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {
        name.removeprefix(_PREFIX): value.double() for name, value in load_file(folder / "adapter_model.safetensors").items()
    }
    model = copy.deepcopy(model)
    tied = _untie(model)
    done = {name for name in tensors if name.endswith("base_layer.weight")}
    with torch.no_grad():
        for name in tensors:
            if name.endswith(".lora_A.weight"):
                done |= _merge_pair(model, config, tensors, name.removesuffix(".lora_A.weight"))
            elif name.endswith(".lora_embedding_A"):
                path, other = name.removesuffix(".lora_embedding_A"), name.replace("_A", "_B")
                weight = model.get_submodule(path).weight
                scale = _scale(config, path)[1]
                weight.copy_(weight.double() + scale * (tensors[other] @ tensors[name]).T)
                done |= {name, other}
            elif name.endswith("trainable_tokens_delta"):
                path = name.removesuffix(".trainable_tokens_delta").removesuffix(".token_adapter")
                indices = config["trainable_token_indices"]
                ids = indices if isinstance(indices, list) else indices[path.rpartition(".")[2]]
                own = model.get_submodule(path).weight
                for weight in tied if own is tied[0] else [own]:
                    weight[ids] = tensors[name].float()
                done.add(name)
        for name in tensors.keys() - done:
            parameter = model.get_parameter(name.replace(".base_layer.", "."))
            parameter.copy_(tensors[name])
    return model


def _untie(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Give each module that shares the embedding's weight one of its own; those weights are returned, the embedding's first."""
    embedding = model.get_input_embeddings()
    tied = [module for module in model.modules() if getattr(module, "weight", None) is embedding.weight]
    for module in tied:
        module.weight = torch.nn.Parameter(module.weight.clone())
    return [embedding.weight, *(module.weight for module in tied if module is not embedding)]


def _merge_pair(model: torch.nn.Module, config: dict[str, Any], tensors: Mapping[str, torch.Tensor], name: str) -> set[str]:
    """Merge A and B of a module with its bias and magnitude; the names of what was used are returned."""
    a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    used = {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
    path = name.replace(".base_layer", "")
    one = _ONE_EXPERT.fullmatch(path)
    if one is not None:
        _merge_one_expert(model.get_submodule(f"{one[1]}mlp.experts"), int(one[2]), one[3], _scale(config, path)[1] * b @ a)
        return used
    module = model.get_submodule(path)
    if path.endswith(".experts"):
        _merge_all_experts(module, config, path, name.count(".base_layer"), a, b)
        return used
    is_parameter = any(f".{path}.weight".endswith(f".{target}") for target in config.get("target_parameters") or ())
    rank, scale = _scale(config, f"{path}.weight" if is_parameter else path)
    assert rank == len(a), f"{path}: rank {len(a)} in the file, {rank} in the config"
    is_conv1d = type(module).__name__ == "Conv1D"
    weight = module.weight.double().T if is_conv1d else module.weight.double()
    weight = weight + scale * b @ a
    if f"{name}.lora_magnitude_vector" in tensors:
        weight *= (tensors[f"{name}.lora_magnitude_vector"] / weight.norm(dim=1))[:, None]
        used.add(f"{name}.lora_magnitude_vector")
    module.weight.copy_(weight.T if is_conv1d else weight)
    if f"{name}.lora_B.bias" in tensors:
        bias = scale * tensors[f"{name}.lora_B.bias"] + (0 if module.bias is None else module.bias.double())
        module.bias = torch.nn.Parameter(bias.float())
        used.add(f"{name}.lora_B.bias")
    return used


def _merge_one_expert(experts: torch.nn.Module, expert: int, projection: str, delta: torch.Tensor) -> None:
    """Add the delta [out, in] of one projection of one expert; gate and up are the halves of one parameter."""
    parameter = experts.gate_up_proj if projection in _HALVES else experts.down_proj
    part = parameter[expert]
    if projection in _HALVES:
        part = part.chunk(2)[_HALVES[projection]]
    part.copy_(part.double() + delta)


def _merge_all_experts(
    experts: torch.nn.Module, config: dict[str, Any], path: str, depth: int, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Add the delta of one parameter of all experts: A's rows are expert-major, B's columns rank-major."""
    targeted = [
        name
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() == 3 and any(f".{path}.{name}".endswith(f".{target}") for target in config["target_parameters"])
    ]
    name = targeted[len(targeted) - 1 - depth]
    parameter = getattr(experts, name)
    rank, scale = _scale(config, f"{path}.{name}")
    count = len(parameter)
    assert len(a) == count * rank
    delta = scale * torch.einsum("ore,eri->eoi", b.reshape(-1, rank, count), a.reshape(count, rank, -1))
    parameter.copy_(parameter.double() + (delta if delta.shape == parameter.shape else delta.transpose(1, 2)))


def _scale(config: dict[str, Any], name: str) -> tuple[int, float]:
    """Rank and scale of a module or parameter, by the config's patterns."""

    def first(patterns: dict[str, Any] | None, default: Any) -> Any:
        hits = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", name))
        return next(hits, default)

    rank, alpha = first(config.get("rank_pattern"), config["r"]), first(config.get("alpha_pattern"), config["lora_alpha"])
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)
