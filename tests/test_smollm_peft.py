"""The real model: sixty-four greedy steps of a mixed batch are those of PEFT with each adapter alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

import hotslot
from hotslot import smollm

NAMES = ("upper", "pirate", "json")
STEPS = 64


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_peft_over_64_steps_for_all_three_adapters(adapters: Path) -> None:
    model, tokenizer = smollm.load()
    inputs = smollm.chat(tokenizer, ["What is the capital of Greece?"] * 4)
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    lora = hotslot.attach(model, {name: adapters / name for name in NAMES}, max_loras=3, max_rank=8)
    with lora.route([hotslot.BASE, *NAMES]):
        mixed = model.generate(**inputs, **options)
    lora.detach()
    alone = {key: value[:1] for key, value in inputs.items()}
    assert torch.equal(mixed[0], model.generate(**alone, **options)[0])
    peft = PeftModel.from_pretrained(model, adapters / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        peft.load_adapter(adapters / name, name)
    for row, name in enumerate(NAMES, 1):
        peft.set_adapter(name)
        expected = peft.generate(**alone, **options)[0]
        assert expected.shape[0] - inputs["input_ids"].shape[1] == STEPS
        assert torch.equal(mixed[row], expected), name
