// The inspector's page: asks the server twice a second, and draws. No library, no network but the server's own.
"use strict";

const $ = (id) => document.getElementById(id);
const EVERY = 500; // ms
const shown = { id: null, layer: "", spans: [], place: null, prompt: 0, follow: true };
const history = []; // [time, tokens], of a minute
let last = null; // the latest state

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function owned(id) { // a colour for a request: far from its neighbours' on the wheel
  return `hsl(${(id * 137.5) % 360} 62% ${document.documentElement.dataset.theme === "dark" ? 62 : 46}%)`;
}

async function ask(path) {
  const key = sessionStorage.getItem("key");
  const said = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  $("key").hidden = said.status !== 401;
  if (!said.ok) throw new Error((await said.json()).error?.message ?? said.statusText);
  return said.json();
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${n.toFixed(n < 10 && i ? 1 : 0)} ${units[i]}`;
}

// ---- the head of the page ---------------------------------------------------------------------------------------------

function head(state) {
  history.push([state.time, state.tokens]);
  while (history.length > 2 && history[0][0] < state.time - 60) history.shift();
  const rates = history.slice(1).map(([t, n], i) => (n - history[i][1]) / Math.max(t - history[i][0], 1e-3));
  const recent = history.findLast(([t]) => t <= state.time - 2) ?? history[0];
  const rate = (state.tokens - recent[1]) / Math.max(state.time - recent[0], 1e-3);
  $("rate").textContent = history.length > 1 ? rate.toFixed(rate < 10 ? 1 : 0) : "–";
  $("running").textContent = state.running;
  $("waiting").textContent = state.waiting;
  const all = Object.values(state.pages).reduce((a, b) => a + b, 0);
  const used = all - state.pages.free - state.pages.cached;
  $("used").textContent = `${((100 * used) / all).toFixed(used ? 1 : 0)} %`;
  const canvas = $("spark"), pen = canvas.getContext("2d"), most = Math.max(...rates, 1);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.strokeStyle = colour("pick");
  pen.lineWidth = 2;
  pen.beginPath();
  rates.forEach((r, i) => pen.lineTo((i / Math.max(rates.length - 1, 1)) * canvas.width, canvas.height - 2 - (r / most) * (canvas.height - 4)));
  pen.stroke();
}

// ---- requests --------------------------------------------------------------------------------------------------------

function list(state) {
  $("none").hidden = state.requests.length > 0;
  const items = $("requests");
  const wanted = new Set(state.requests.map((r) => String(r.id)));
  for (const item of [...items.children]) if (!wanted.has(item.dataset.id)) item.remove();
  state.requests.forEach((r, i) => {
    let item = items.querySelector(`[data-id="${r.id}"]`);
    if (!item) {
      item = document.createElement("li");
      item.dataset.id = r.id;
      const button = document.createElement("button");
      button.type = "button";
      button.append(document.createElement("span"), document.createElement("small"));
      button.addEventListener("click", () => choose(r.id));
      item.append(button);
    }
    if (items.children[i] !== item) items.insertBefore(item, items.children[i] ?? null);
    const button = item.firstChild, live = r.state === "running" || r.state === "waiting";
    button.setAttribute("aria-current", r.id === shown.id);
    button.firstChild.textContent = `#${r.id} ${r.state}`;
    button.firstChild.className = live ? "live" : "";
    button.lastChild.textContent = `${r.policy} · ${r.prompt} + ${r.length - r.prompt} tokens · ${bytes(r.pages * state.page_bytes)}`;
  });
  if (shown.follow && state.requests.length) {
    const first = state.requests.find((r) => r.state === "running") ?? state.requests[0];
    if (shown.id === null || (first.state === "running" && !state.requests.some((r) => r.id === shown.id && r.state === "running"))) choose(first.id, false);
  }
  if ($("layer").options.length === 1) {
    state.windows.forEach((w, i) => $("layer").add(new Option(w ? `${i} (slides over ${w}: no colours)` : `${i}`, i)));
  }
}

function choose(id, byHand = true) {
  if (byHand) shown.follow = false;
  if (id !== shown.id) {
    Object.assign(shown, { id, spans: [], place: null });
    $("text").replaceChildren();
    $("token").hidden = true;
  }
  one().catch(trouble);
}

function scale(mass) { // by rank: the first token would outshine all others
  const order = mass.map((m, i) => [m, i]).sort((a, b) => a[0] - b[0]);
  const out = new Array(mass.length).fill(0);
  order.forEach(([m, i], rank) => { out[i] = m > 0 ? ((rank + 1) / order.length) ** 2 : 0; });
  return out;
}

async function one() {
  if (shown.id === null) return;
  const id = shown.id, layer = shown.layer;
  const r = await ask(`/inspect/requests/${id}${layer === "" ? "" : `?layer=${layer}`}`);
  if (id !== shown.id || layer !== shown.layer) return;
  shown.prompt = r.prompt;
  const heat = scale(r.mass);
  for (let i = shown.spans.length; i < r.tokens.length; i++) {
    const span = document.createElement("span");
    span.className = i < r.prompt ? "t" : "t answer";
    span.textContent = r.tokens[i];
    span.setAttribute("role", "option");
    span.dataset.i = i;
    shown.spans.push(span);
    $("text").append(span);
  }
  shown.spans.forEach((span, i) => {
    const known = i < r.held.length;
    paint(span, known ? heat[i] : 0, known ? (1 - r.held[i]) ** 2 : 0);
  });
  const held = r.held.reduce((a, b) => a + b, 0);
  $("title").textContent = `#${r.id} ${r.state}`;
  const part = r.held.length ? Math.round((100 * held) / r.held.length) : 100;
  const where = layer === "" ? "On average a head" : `In layer ${layer} a head`;
  $("summary").textContent = `${r.policy}: ${r.prompt} tokens of prompt (${r.cached} of them were there), ` +
    `${r.length - r.prompt} of answer. ${where} keeps ${Math.round(held)} of ${r.held.length} tokens (${part} %).`;
  if (shown.place !== null) await token(shown.place);
}

function paint(span, heat, gone) {
  const s = heat.toFixed(3), g = gone.toFixed(3);
  if (span.dataset.s !== s) { span.dataset.s = s; span.style.setProperty("--s", s); }
  if (span.dataset.gone !== g) { span.dataset.gone = g; span.style.setProperty("--gone-a", g); }
}

// ---- one token -------------------------------------------------------------------------------------------------------

async function token(i) {
  shown.place = i;
  for (const span of $("text").querySelectorAll('[aria-selected="true"]')) span.removeAttribute("aria-selected");
  const chosen = shown.spans[i];
  if (!chosen) return;
  chosen.setAttribute("aria-selected", "true");
  const id = shown.id;
  const t = await ask(`/inspect/requests/${id}/tokens/${i}`).catch(() => null);
  if (id !== shown.id || i !== shown.place) return;
  $("token").hidden = false;
  $("token-name").textContent = `Token ${i}: “${chosen.textContent}”`;
  if (!t) {
    $("token-says").textContent = "Nobody has looked at it yet.";
    return;
  }
  const all = t.mass.flat(), keep = t.held.flat().filter(Boolean).length, most = Math.max(...all, 1e-9);
  const sum = all.reduce((a, b) => a + b, 0);
  $("token-says").textContent = `received ${(sum / all.length).toFixed(3)} of attention on average (at most ${most.toFixed(3)}); ` +
    `${keep} of ${all.length} heads keep it.`;
  const L = t.mass.length, G = t.mass[0].length, cell = 18, canvas = $("heads"), pen = canvas.getContext("2d");
  canvas.width = L * cell;
  canvas.height = G * cell;
  for (let l = 0; l < L; l++) {
    for (let g = 0; g < G; g++) {
      pen.fillStyle = colour("hot");
      pen.globalAlpha = t.held[l][g] ? 0.08 + 0.92 * Math.sqrt(t.mass[l][g] / most) : 0;
      pen.fillRect(l * cell + 1, g * cell + 1, cell - 2, cell - 2);
      pen.globalAlpha = 1;
      pen.strokeStyle = colour("line");
      pen.strokeRect(l * cell + 0.5, g * cell + 0.5, cell - 1, cell - 1);
    }
  }
}

// ---- pool and tiers --------------------------------------------------------------------------------------------------

const SIDE = 32, CELL = 10;

function pool(state) {
  const { cells, shares, owners } = state.map;
  const data = Uint8Array.from(atob(shares), (c) => c.charCodeAt(0));
  const canvas = $("map"), pen = canvas.getContext("2d"), n = state.states.length;
  canvas.width = SIDE * CELL;
  canvas.height = Math.ceil(cells / SIDE) * CELL;
  const paints = state.states.map(colour);
  for (let c = 0; c < cells; c++) {
    const x = (c % SIDE) * CELL, y = Math.floor(c / SIDE) * CELL;
    let left = 0;
    for (let s = 0; s < n; s++) {
      const width = (data[c * n + s] / 255) * (CELL - 1);
      pen.fillStyle = $("colours").value === "owner" && s > 1 && owners[c] >= 0 ? owned(owners[c]) : paints[s];
      pen.fillRect(x + left, y, Math.max(width, data[c * n + s] ? 1 : 0), CELL - 1);
      left += width;
    }
  }
  const legend = $("states");
  legend.replaceChildren(...state.states.map((name) => {
    const item = document.createElement("li"), swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colour(name);
    item.append(swatch, `${name} ${bytes(state.pages[name] * state.page_bytes)}`);
    return item;
  }));
}

function tiers(state) {
  $("no-tiers").hidden = state.tiers.length > 0;
  const box = $("tiers");
  box.replaceChildren(...state.tiers.map((t) => {
    const [tier, bar, full, hint] = [0, 0, 0, 0].map(() => document.createElement("div"));
    tier.className = "tier";
    bar.className = "fill";
    full.style.width = `${(100 * t.bytes) / Math.max(t.capacity, 1)}%`;
    bar.append(full);
    hint.className = "hint";
    hint.textContent = ["read", "written"].filter((k) => k in t).map((k) => `${bytes(t[k])} ${k}`).join(", ");
    tier.append(`${t.tier}: ${bytes(t.bytes)} of ${bytes(t.capacity)}, ${t.spans} spans`, bar, hint);
    return tier;
  }));
  const found = Object.entries(state.prefixes).map(([k, n]) => `${n} from ${k}`).join(", ");
  $("prefixes").textContent = `Tokens that were not computed again: ${found}. Holes: ${state.holes}.`;
}

// ---- life ------------------------------------------------------------------------------------------------------------

function trouble(error) {
  $("trouble").hidden = !error;
  $("trouble").textContent = error ? `${error.message}` : "";
}

async function round() {
  try {
    if (!document.hidden) {
      last = await ask("/inspect/state");
      head(last);
      list(last);
      pool(last);
      tiers(last);
      const mine = last.requests.find((r) => r.id === shown.id);
      if (mine && (mine.state === "running" || mine.computed !== shown.computed)) {
        shown.computed = mine.computed;
        await one();
      }
      trouble(null);
    }
  } catch (error) {
    trouble(error);
  }
  setTimeout(round, EVERY);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  if (shown.place !== null) token(shown.place);
}

$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("layer").addEventListener("change", (e) => { shown.layer = e.target.value; one().catch(trouble); });
$("colours").addEventListener("change", () => last && pool(last));
$("text").addEventListener("click", (e) => e.target.dataset.i && token(Number(e.target.dataset.i)));
$("text").addEventListener("keydown", (e) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[e.key];
  if (!step || !shown.spans.length) return;
  e.preventDefault();
  const to = Math.min(Math.max((shown.place ?? -1) + step, 0), shown.spans.length - 1);
  token(to).then(() => shown.spans[to].scrollIntoView({ block: "nearest" }));
});
$("requests").addEventListener("keydown", (e) => {
  const next = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[e.key];
  const to = next && document.activeElement.parentElement[next];
  if (to) { e.preventDefault(); to.firstChild.focus(); to.firstChild.click(); }
});
$("key").addEventListener("submit", (e) => { e.preventDefault(); sessionStorage.setItem("key", $("secret").value); });
$("map").addEventListener("mousemove", (e) => {
  if (!last) return;
  const box = $("map").getBoundingClientRect(), unit = box.width / SIDE;
  const c = Math.floor((e.clientY - box.top) / unit) * SIDE + Math.floor((e.clientX - box.left) / unit);
  const owner = last.map.owners[c];
  const all = Object.values(last.pages).reduce((a, b) => a + b, 0), each = all / last.map.cells;
  $("cell").textContent = c < last.map.cells ? `pages ${Math.round(c * each) + 1} to ${Math.round((c + 1) * each)}` + (owner >= 0 ? `: request #${owner}` : "") : " ";
});
for (const s of document.querySelectorAll(".sample")) paint(s, Number(s.dataset.s ?? 0), Number(s.dataset.gone ?? 0));
theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
round();
