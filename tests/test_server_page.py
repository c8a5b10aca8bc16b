"""The page in a real headless Chromium: what it shows, by keyboard, at phone width, dark and light."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Running, serving
from tiny import tiny_model, write_adapter

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (on Debian: apt-get install chromium)")
torch.set_num_threads(1)

EVIL = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("root")
    model = tiny_model()
    for seed, name in enumerate(("pirate", "poet", "json", "yoda")):
        write_adapter(model, root / name, seed=seed)
    with serving(
        model, adapter_root=str(root), lora_modules={"pirate": str(root / "pirate")}, max_loras=3, api_keys=("the-key",)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        yield made
        made.close()


@pytest.fixture
def page(server: Running, browser: Any) -> Iterator[Any]:
    """The page with its key given, and a check that its console stayed clean."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    made = context.new_page()
    faults: list[str] = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on(
        "console",
        lambda message: faults.append(message.text) if message.type == "error" and "status of 4" not in message.text else None,
    )
    made.goto(server.url)
    made.get_by_text("API key", exact=True).click()
    made.get_by_label("Key, kept in this tab only").fill("the-key")
    made.keyboard.press("Tab")
    made.wait_for_selector("#models input")
    yield made
    assert faults == []
    context.close()


def until(page: Any, expression: str) -> None:
    """Wait for what an expression says; the page itself allows no evaluation."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def choose(page: Any, *names: str) -> None:
    for box in page.locator("#models input").all():
        box.set_checked(box.get_attribute("value") in names)


def answers(page: Any, count: int) -> dict[str, str]:
    """Model -> text, once all have ended."""
    until(page, f"document.querySelectorAll('.answer').length === {count} && !document.getElementById('send').disabled")
    return {card.get_attribute("data-model"): card.locator("pre").inner_text() for card in page.locator(".answer").all()}


def test_without_a_key_the_page_says_so_and_shows_nothing(server: Running, browser: Any) -> None:
    page = browser.new_page()
    page.goto(server.url)
    page.wait_for_selector("#status.bad")
    assert "no valid API key" in page.locator("#status").inner_text()
    assert page.locator(".slot").count() == 0
    page.close()


def test_one_prompt_goes_to_several_models_and_the_answers_stand_side_by_side(server: Running, page: Any) -> None:
    choose(page, "tiny", "pirate", "poet", "json")
    page.get_by_label("As").select_option("completion")
    page.get_by_label("Tokens").fill("12")
    page.get_by_label("Prompt").fill("Once upon a time")
    page.get_by_role("button", name="Send").click()
    found = answers(page, 4)
    expected = {
        name: server.completion(name, "Once upon a time").json()["choices"][0]["text"]
        for name in ("tiny", "pirate", "poet", "json")
    }
    assert {name: text.strip() for name, text in found.items()} == {name: text.strip() for name, text in expected.items()}
    assert "12 tokens" in page.locator(".answer .facts").first.inner_text()
    boxes = [card.bounding_box() for card in page.locator(".answer").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] != boxes[1]["x"]


def test_slots_and_evictions_show_as_they_happen(server: Running, page: Any) -> None:
    for name in ("poet", "json", "yoda"):
        server.tokens(name, "x")
    until(page, "document.querySelector('#events').innerText.includes('evicted by yoda')")
    slots = {slot.locator("strong").inner_text(): slot.inner_text() for slot in page.locator(".slot").all()}
    assert {"pirate", "yoda"} <= slots.keys() and len(slots) == 3
    assert "pinned" in slots["pirate"]
    assert all(word in slots["yoda"] for word in ("refs", "tick", "tier", "size", "hits", "misses"))


def test_the_whole_page_works_by_keyboard(page: Any) -> None:
    page.reload()  # the key stays in the tab, and the focus is nowhere
    page.wait_for_selector("#models input")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the playground"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
        if reached[-1] == "send":
            break
    assert {"pirate", "mode", "max-tokens", "temperature", "send"} <= set(reached)
    choose(page, "pirate")
    page.get_by_label("As").select_option("chat")
    page.get_by_label("Tokens").fill("4")
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Control+Enter")
    answers(page, 1)


def test_escape_stops_what_runs_and_frees_its_row(server: Running, page: Any) -> None:
    choose(page, "tiny", "pirate")
    page.get_by_label("As").select_option("completion")
    page.get_by_label("Tokens").fill("200")
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Prompt").fill("Once upon a time")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer")
    page.keyboard.press("Escape")
    answers(page, 2)
    until(page, "document.getElementById('status').innerText.startsWith('0 running')")


def test_an_error_is_shown_in_its_card_as_text(server: Running, page: Any) -> None:
    choose(page, "pirate")
    page.get_by_label("As").select_option("completion")
    page.get_by_label("Tokens").fill("4000")
    page.get_by_label("Prompt").fill(EVIL)
    page.get_by_role("button", name="Send").click()
    assert "context of 256" in answers(page, 1)["pirate"]
    assert page.locator(".answer.failed").count() == 1
    assert page.title() == "hotslot" and page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_it_fits_its_width_and_its_words_can_be_read(server: Running, page: Any, scheme: str, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    choose(page, "tiny", "pirate", "poet")
    page.get_by_label("As").select_option("completion")
    page.get_by_label("Tokens").fill("10")
    page.get_by_role("button", name="Send").click()
    answers(page, 3)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) >= 4.5
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"
    assert dark == (scheme == "dark")
    folder = os.environ.get("HOTSLOT_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"page-{scheme}-{width}.png", full_page=True)


# The smallest contrast of any text on the page to what it stands on, as WCAG computes it.
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = rgb(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  let worst = 21;
  for (const node of document.querySelectorAll("body *")) {
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()) || !node.offsetParent) continue;
    if (node.disabled || node.closest(".skip")) continue;
    const [a, b] = [luminance(rgb(getComputedStyle(node).color)), luminance(ground(node))].sort((x, y) => y - x);
    worst = Math.min(worst, (a + 0.05) / (b + 0.05));
  }
  return worst;
}"""
