// The dashboard: asks this server for its figures once a second, and chats with it. What a model
// writes is only ever put in as text.
import { askStreaming } from "./chat.js";
import { ExpertMap } from "./experts.js";

const POLL_MS = 1000;
const HISTORY = 120;

const by = (id) => document.getElementById(id);
const show = (id, text) => { if (by(id).textContent !== text) by(id).textContent = text; };

let key = sessionStorage.getItem("flashmoe-key") || "";
let before = null;
const history = { rate: [], hits: [], read: [] };
const experts = new ExpertMap(by("experts"), (text) => show("cell", text));

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function get(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  if (answer.status === 401) {
    by("key-form").hidden = false;
    throw new Error("an API key is needed");
  }
  by("key-form").hidden = true;
  return answer.json();
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${n >= 100 || i === 0 ? n.toFixed(0) : n.toFixed(1)} ${units[i]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const share = (part, whole) => (whole > 0 ? part / whole : null);

function remember(name, value) {
  const values = history[name];
  values.push(value);
  if (values.length > HISTORY) values.shift();
  const canvas = by(`${name}-spark`);
  const scale = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const context = canvas.getContext("2d");
  context.strokeStyle = getComputedStyle(canvas).color;
  context.lineWidth = 1.5 * scale;
  const most = Math.max(...values, 1e-9);
  context.beginPath();
  values.forEach((v, i) => {
    const x = (i / (HISTORY - 1)) * canvas.width;
    const y = canvas.height - 2 - (v / most) * (canvas.height - 4);
    if (i) context.lineTo(x, y); else context.moveTo(x, y);
  });
  context.stroke();
}

function statusText(stats) {
  if (stats.status === "loading") return `loading, ${percent(stats.loaded)}`;
  if (stats.status === "prefill") return `reading the prompt, ${stats.prefill.done} of ${stats.prefill.total} tokens`;
  if (stats.status === "error") return `error: ${stats.error}`;
  return stats.running ? "answering" : "ready";
}

function showRegret(regret) {
  if (!regret || typeof regret.belady !== "number") {
    show("regret", "not measured yet");
    by("regret-bar").hidden = true;
    return;
  }
  const reached = share(regret.actual, regret.belady) || 0;
  show("regret", `${percent(reached)} of Belady`);
  by("regret-bar").hidden = false;
  by("regret-bar").value = reached;
  show("regret-note", `last ${regret.tokens} tokens: this ${percent(regret.actual)}, LRU ${percent(regret.lru)}, Belady ${percent(regret.belady)}`);
}

function showStats(stats) {
  const now = performance.now() / 1000;
  const seconds = before ? now - before.at : 0;
  const cache = stats.cache;
  show("model", stats.model || "no model");
  show("status", statusText(stats));
  by("status").classList.toggle("bad", stats.status === "error");

  const rate = before ? Math.max(stats.tokens.answer - before.stats.tokens.answer, 0) / seconds : 0;
  show("rate", rate.toFixed(1));
  show("rate-note", `${stats.tokens.answer} in all; ${stats.tokens.decode_per_second.toFixed(1)} while decoding`);
  remember("rate", rate);

  if (cache) {
    const old = before && before.stats.cache;
    const lookups = old ? cache.lookups - old.lookups : 0;
    const lately = lookups > 0 ? (cache.hits - old.hits) / lookups : cache.hit_rate;
    show("hits", percent(lately));
    show("hits-note", `${percent(cache.decode_hit_rate)} in decode, ${percent(cache.hit_rate)} in all`);
    remember("hits", lately);
    const speed = old && seconds > 0 ? Math.max(cache.bytes_read - old.bytes_read, 0) / seconds : 0;
    show("read", `${bytes(speed)}/s`);
    show("read-note", `${bytes(cache.bytes_read)} in all, waited ${cache.wait_seconds.toFixed(1)} s, I/O ${cache.io_mode}`);
    remember("read", speed);
  } else {
    show("hits", "-");
    show("hits-note", stats.status === "ready" ? "this model has no experts to stream" : "");
  }

  const memory = stats.memory;
  show("memory", bytes(memory.resident_bytes));
  if (memory.budget_bytes) {
    by("memory-bar").value = memory.resident_bytes / memory.budget_bytes;
    show("memory-note", `of ${bytes(memory.budget_bytes)}; experts ${bytes(cache.resident_bytes)} of ${bytes(cache.slot_bytes)}`);
  } else {
    by("memory-bar").value = 0;
    show("memory-note", "no budget was given");
  }
  showRegret(stats.regret);

  const answered = stats.requests.reduce((sum, row) => sum + row.count, 0);
  const failed = Object.values(stats.errors).reduce((sum, n) => sum + n, 0);
  show("requests", String(answered));
  const first = stats.first_token;
  const wait = first.count ? `, first token after ${(first.seconds / first.count).toFixed(2)} s on average` : "";
  show("requests-note", `${stats.waiting} waiting, ${failed} errors${wait}`);
  before = { at: now, stats };
}

async function poll() {
  try {
    showStats(await get("flashmoe/stats"));
    experts.update((await get("flashmoe/experts")).layers);
  } catch (error) {
    show("status", error instanceof TypeError ? "the server does not answer" : error.message);
    by("status").classList.add("bad");
  }
  setTimeout(poll, POLL_MS);
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value;
  sessionStorage.setItem("flashmoe-key", key);
  by("key").value = "";
});

// The chat box.
let messages = [];
let running = null;

function line(kind, text) {
  const p = document.createElement("p");
  p.className = kind;
  p.textContent = text;
  by("log").append(p);
  by("log").scrollTop = by("log").scrollHeight;
  return p;
}

by("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const question = by("question").value.trim();
  if (!question || running) return;
  by("question").value = "";
  line("user", question);
  messages.push({ role: "user", content: question });
  const answer = line("assistant", "");
  running = new AbortController();
  by("send").disabled = true;
  by("stop").disabled = false;
  let text = "";
  try {
    for await (const piece of askStreaming(messages, headers(), running.signal)) {
      text += piece;
      answer.textContent = text;
      by("log").scrollTop = by("log").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") line("error", error.message);
  }
  if (text) messages.push({ role: "assistant", content: text });
  else { messages.pop(); answer.remove(); }
  running = null;
  by("send").disabled = false;
  by("stop").disabled = true;
  by("question").focus();
});

by("stop").addEventListener("click", () => running && running.abort());
by("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  by("log").replaceChildren();
});
by("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) by("chat").requestSubmit();
});

poll();
