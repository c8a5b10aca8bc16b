"""The demo, its adapters and its command line."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotslot import cli
from hotslot import demo as demo_module
from hotslot.demo import Demo, find_adapters, format_table
from hotslot.errors import AdapterFileError

STYLES = ["json", "pirate", "upper", "yoda"]


@pytest.fixture(scope="module")
def recipe(repo: Path) -> ModuleType:
    """examples/train_adapters.py as a module: its styles know how to recognise themselves."""
    spec = importlib.util.spec_from_file_location("train_adapters", repo / "examples" / "train_adapters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return header


@pytest.mark.parametrize("name", STYLES)
def test_a_committed_adapter_is_small_bf16_and_names_no_machine(adapters: Path, recipe: ModuleType, name: str) -> None:
    weights = adapters / name / "adapter_model.safetensors"
    assert weights.stat().st_size <= 5_000_000
    tensors = {key: value for key, value in read_header(weights).items() if key != "__metadata__"}
    assert {value["dtype"] for value in tensors.values()} == {"BF16"}
    config = json.loads((adapters / name / "adapter_config.json").read_text())
    assert config["r"] == recipe.STYLES[name].rank
    assert 4 <= config["r"] <= 8
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert sorted(path.name for path in (adapters / name).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_no_held_out_prompt_is_a_training_prompt(recipe: ModuleType) -> None:
    trained = {question for question, *_ in recipe.FACTS}
    assert len(trained) == len(recipe.FACTS)
    assert trained.isdisjoint(recipe.HELD_OUT)


@pytest.mark.parametrize("name", STYLES)
def test_a_style_recognises_its_own_targets_and_no_plain_answer(recipe: ModuleType, name: str) -> None:
    style = recipe.STYLES[name]
    for _, *fact in recipe.FACTS:
        assert style.recognise(style.write(*fact))
        assert not style.recognise(recipe.plain(*fact))


@pytest.mark.usefixtures("smollm_folder")
def test_each_adapter_has_its_style_on_prompts_it_was_not_trained_on(adapters: Path, recipe: ModuleType) -> None:
    import hotslot
    from hotslot import smollm

    model, tokenizer = smollm.load()
    lora = hotslot.attach(model, adapters={name: adapters / name for name in STYLES}, max_loras=4, max_rank=8)
    prompts = recipe.HELD_OUT[:8]
    rows = [(prompt, name) for prompt in prompts for name in STYLES]
    inputs = smollm.chat(tokenizer, [prompt for prompt, _ in rows])
    with lora.route([name for _, name in rows]):
        output = model.generate(**inputs, max_new_tokens=recipe.MAX_NEW_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    wrong = [(*row, answer) for row, answer in zip(rows, answers, strict=True) if not recipe.STYLES[row[1]].recognise(answer)]
    assert not wrong
    lora.detach()


@pytest.mark.usefixtures("smollm_folder")
def test_the_demo_passes_its_own_checks_and_shows_what_it_promises(capsys: pytest.CaptureFixture[str], recipe: ModuleType) -> None:
    status = cli.main(["demo", "--rounds", "1", "--max-new-tokens", "24"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    answers = [line.split("  ") for line in shown.splitlines()]
    for name, style in recipe.STYLES.items():
        # Columns are two or more spaces apart; the answer follows the adapter's name.
        cells = [[cell.strip() for cell in line if cell.strip()] for line in answers]
        found = [row[row.index(name) + 1] for row in cells if name in row[:-1] and not row[0].isdigit()]
        assert len(found) == len(demo_module.PROMPTS), (name, shown)
        assert all(style.recognise(text) for text in found), (name, found)
    assert "evicted pirate" in shown
    assert shown.count("  yes") == 4 * len(demo_module.PROMPTS)
    assert "tokens/s" in shown


class DriftingDemo(Demo):
    """A demo whose rows differ when they run alone."""

    def generate(self, prompts: Any, adapters: Any, **options: Any) -> list[list[int]]:
        return [[len(prompts)]] * len(prompts)

    def text(self, tokens: list[int]) -> str:
        return str(tokens)


def test_the_demo_reports_a_row_that_differs_from_its_solo_run(capsys: pytest.CaptureFixture[str]) -> None:
    drifting = DriftingDemo(model=None, tokenizer=None, lora=None, max_new_tokens=1, answers={})
    failures = drifting.show_mixed_batch()
    assert len(failures) == 4 * len(demo_module.PROMPTS)
    assert "alone" in failures[0]
    assert "  NO" in capsys.readouterr().out


def test_a_failed_check_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Stub:
        lora = type("Lora", (), {"detach": staticmethod(lambda: None)})

        def show_mixed_batch(self) -> list[str]:
            return ["one row differs"]

        def swap_while_running(self, folder: Path) -> list[str]:
            return []

        def show_speed(self, rounds: int) -> None: ...

    monkeypatch.setattr(Demo, "start", staticmethod(lambda *_: Stub()))
    assert cli.main(["demo"]) == 1
    assert "FAILED: one row differs" in capsys.readouterr().out


def test_missing_adapters_are_named_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AdapterFileError, match=r"yoda.*--adapters"):
        find_adapters(tmp_path)
    assert cli.main(["demo", "--adapters", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("hotslot: the demo's adapters")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hotslot", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    assert "inspect" in done.stdout


def test_a_table_is_aligned() -> None:
    table = format_table(("a", "bb"), [("1", "2"), ("333", "")])
    assert table.splitlines() == ["      a    bb", "      ---  --", "      1    2", "      333"]
