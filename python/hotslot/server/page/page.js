// The page's only script: polls /slots, lists models, and streams one prompt to several of them at once.
"use strict";

const POLL_MS = 1000;
const KEPT_EVENTS = 100;
const $ = (id) => document.getElementById(id);
let lastEvent = 0;
let timer = 0;
let running = null; // the AbortController of what is being streamed

function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// Everything that comes from the server goes in as text, never as markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

async function fetchJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `HTTP ${response.status}`);
  }
  return response.json();
}

function bytes(count) {
  for (const unit of ["B", "kB", "MB"]) {
    if (count < 1000) return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
  return `${count.toFixed(1)} GB`;
}

function showSlot(slot) {
  const held = slot.references > 0 && slot.state === "ready" ? " held" : "";
  const facts = element("dl");
  for (const [name, value] of [
    ["refs", slot.references], ["tick", slot.tick], ["tier", slot.tier || "none"], ["size", bytes(slot.bytes)],
    ["hits", slot.hits], ["misses", slot.misses], ["rows", slot.rows], ["rank", slot.rank],
  ]) facts.append(element("dt", {}, name), element("dd", {}, String(value)));
  const state = [slot.state, slot.pinned ? "pinned" : "", slot.waiting ? `${slot.waiting} waiting` : ""].filter(Boolean).join(", ");
  return element("li", { class: `slot ${slot.state}${held}`, "data-slot": slot.slot },
    element("strong", {}, slot.name || "empty"), element("span", { class: "state" }, `slot ${slot.slot}: ${state}`), facts);
}

function showEvent(event) {
  const texts = {
    loaded: `${event.adapter} loaded in ${Math.round(event.seconds * 1000)} ms`,
    evicted: `${event.adapter} evicted by ${event.by}`,
    refused: `${event.adapter} refused: ${event.reason}`,
    unloaded: `${event.adapter} unloaded`,
  };
  const time = new Date(event.time * 1000).toLocaleTimeString();
  return element("li", { class: event.kind }, `${time} ${texts[event.kind] ?? event.kind}`);
}

async function poll() {
  try {
    const found = await fetchJson(`/slots?after=${lastEvent}`);
    $("slots").replaceChildren(...found.slots.map(showSlot));
    const waiting = Object.entries(found.waiting).map(([name, count]) => `${name} (${count})`);
    $("queue").textContent = waiting.length ? `waiting for a slot: ${waiting.join(", ")}` : "";
    const list = $("events");
    for (const event of found.events) {
      list.prepend(showEvent(event));
      lastEvent = event.number;
    }
    while (list.children.length > KEPT_EVENTS) list.lastChild.remove();
    const cache = Math.round(found.engine.cache_usage * 100);
    $("status").textContent = `${found.running_sequences} running, ${found.waiting_requests} waiting, cache ${cache} %`;
    $("status").className = "";
    if (!$("models").querySelector("input")) await listModels();
  } catch (error) {
    $("status").textContent = String(error.message ?? error);
    $("status").className = "bad";
  } finally {
    timer = setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
  }
}

async function listModels() {
  const chosen = new Set([...document.querySelectorAll("#models input:checked")].map((box) => box.value));
  const { data } = await fetchJson("/v1/models");
  const labels = data.map((model, index) => {
    const box = element("input", { type: "checkbox", name: "model", value: model.id });
    box.checked = chosen.size ? chosen.has(model.id) : index < 4;
    return element("label", {}, box, model.id);
  });
  $("models").replaceChildren(element("legend", {}, "Models"), ...labels);
}

// The objects of a stream of server-sent events, whatever pieces they come in.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function ask(model, settings, signal) {
  const text = element("pre");
  const facts = element("p", { class: "facts" }, "waiting");
  const card = element("article", { class: "answer", "data-model": model }, element("h3", {}, model), text, facts);
  $("answers").append(card);
  const begun = performance.now();
  let first = null;
  let tokens = 0;
  let reason = "";
  try {
    const { path, body } = settings;
    const response = await fetch(path, {
      method: "POST", signal, headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify({ ...body, model }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      const choice = event.choices[0];
      if (!choice) continue;
      first ??= performance.now() - begun;
      text.textContent += choice.delta?.content ?? choice.text ?? "";
      reason = choice.finish_reason ?? reason;
    }
    const seconds = (performance.now() - begun) / 1000;
    facts.textContent = `${tokens} tokens, first after ${Math.round(first)} ms, ${(tokens / seconds).toFixed(1)} tokens/s, ${reason}`;
  } catch (error) {
    if (error.name === "AbortError") facts.textContent = "stopped";
    else {
      card.classList.add("failed");
      text.textContent = error.message;
      facts.textContent = "failed";
    }
  }
}

async function send(submitted) {
  submitted.preventDefault();
  if (running) return;
  const models = [...document.querySelectorAll("#models input:checked")].map((box) => box.value);
  const prompt = $("prompt").value;
  const isChat = $("mode").value === "chat";
  const settings = {
    path: isChat ? "/v1/chat/completions" : "/v1/completions",
    body: {
      ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
      stream: true, stream_options: { include_usage: true },
    },
  };
  $("answers").replaceChildren();
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  await Promise.all(models.map((model) => ask(model, settings, running.signal)));
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => running?.abort());
$("key").value = sessionStorage.getItem("hotslot-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("hotslot-key", $("key").value.trim());
  clearTimeout(timer);
  poll();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
poll();
