// The inspector's page: polls the server twice a second and draws. It uses common.js, no library and no other host.
"use strict";

const POLL_MS = 500;
const MAP_COLUMNS = 32, CELL_PX = 10; // of the page map
const HISTORY_S = 60, RATE_S = 2; // seconds of the throughput curve, and of its latest value
const selection = { id: null, layer: "", spans: [], position: null, follow: true };
const history = []; // [time, generated tokens]
let latestState = null;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function requestColour(id) { // the golden angle: neighbouring ids differ most
  return `hsl(${(id * 137.5) % 360} 62% ${document.documentElement.dataset.theme === "dark" ? 62 : 46}%)`;
}

function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}

// ---- header ----------------------------------------------------------------------------------------------------------

function updateHeader(state) {
  history.push([state.time, state.generated_tokens]);
  while (history.length > 2 && history[0][0] < state.time - HISTORY_S) history.shift();
  const rates = history.slice(1).map(([t, n], i) => (n - history[i][1]) / Math.max(t - history[i][0], 1e-3));
  const [since, tokensThen] = history.findLast(([t]) => t <= state.time - RATE_S) ?? history[0];
  const rate = (state.generated_tokens - tokensThen) / Math.max(state.time - since, 1e-3);
  $("rate").textContent = history.length > 1 ? rate.toFixed(rate < 10 ? 1 : 0) : "–";
  $("running").textContent = state.running;
  $("waiting").textContent = state.waiting;
  const numPages = sum(Object.values(state.pages));
  const used = numPages - state.pages.free - state.pages.cached;
  $("pool-usage").textContent = `${((100 * used) / numPages).toFixed(used ? 1 : 0)} %`;
  const canvas = $("spark"), pen = canvas.getContext("2d"), max = Math.max(...rates, 1);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.strokeStyle = colour("accent");
  pen.lineWidth = 2;
  pen.beginPath();
  rates.forEach((r, i) => pen.lineTo((i / Math.max(rates.length - 1, 1)) * canvas.width, canvas.height - 2 - (r / max) * (canvas.height - 4)));
  pen.stroke();
}

// ---- requests --------------------------------------------------------------------------------------------------------

function createRequestItem(id) {
  const item = document.createElement("li"), button = document.createElement("button");
  item.dataset.id = id;
  button.type = "button";
  button.append(document.createElement("span"), document.createElement("small"));
  button.addEventListener("click", () => selectRequest(id));
  item.append(button);
  return item;
}

function updateRequestList(state) {
  $("no-requests").hidden = state.requests.length > 0;
  const items = $("requests");
  const ids = new Set(state.requests.map((r) => String(r.id)));
  for (const item of [...items.children]) if (!ids.has(item.dataset.id)) item.remove();
  state.requests.forEach((r, i) => {
    const item = items.querySelector(`[data-id="${r.id}"]`) ?? createRequestItem(r.id);
    if (items.children[i] !== item) items.insertBefore(item, items.children[i] ?? null);
    const button = item.firstChild, live = r.state === "running" || r.state === "waiting";
    button.setAttribute("aria-current", r.id === selection.id);
    button.firstChild.textContent = `#${r.id} ${r.state}`;
    button.firstChild.className = live ? "live" : "";
    button.lastChild.textContent = `${r.policy} · ${r.num_prompt_tokens} + ${r.num_tokens - r.num_prompt_tokens} tokens · ${formatBytes(r.num_pages * state.page_bytes)}`;
  });
  if (selection.follow && state.requests.length) followRunning(state.requests);
  if ($("layer").options.length === 1) {
    state.windows.forEach((w, i) => { const l = state.layers[i]; $("layer").add(new Option(w ? `${l} (sliding window of ${w}: masses not recorded)` : `${l}`, l)); });
  }
}

function followRunning(requests) { // until the user selects a request, show a running one
  const first = requests.find((r) => r.state === "running") ?? requests[0];
  const selected = requests.find((r) => r.id === selection.id);
  if (selection.id === null || (first.state === "running" && selected?.state !== "running")) selectRequest(first.id, false);
}

function selectRequest(id, manual = true) {
  if (manual) selection.follow = false;
  if (id !== selection.id) {
    Object.assign(selection, { id, spans: [], position: null });
    $("text").replaceChildren();
    $("token").hidden = true;
  }
  updateRequest().catch(showError);
}

function rankHeat(mass) { // by rank: the mass of the first token would outshine all others
  const order = mass.map((m, i) => [m, i]).sort((a, b) => a[0] - b[0]);
  const heat = new Array(mass.length).fill(0);
  order.forEach(([m, i], rank) => { heat[i] = m > 0 ? ((rank + 1) / order.length) ** 2 : 0; });
  return heat;
}

async function updateRequest() {
  if (selection.id === null) return;
  const { id, layer } = selection;
  const r = await fetchJson(`/inspect/requests/${id}${layer === "" ? "" : `?layer=${layer}`}`);
  if (id !== selection.id || layer !== selection.layer) return;
  const heat = rankHeat(r.mass);
  for (let i = selection.spans.length; i < r.token_texts.length; i++) {
    const span = document.createElement("span");
    span.className = i < r.num_prompt_tokens ? "token" : "token answer";
    span.textContent = r.token_texts[i];
    span.setAttribute("role", "option");
    span.dataset.i = i;
    selection.spans.push(span);
    $("text").append(span);
  }
  selection.spans.forEach((span, i) => {
    const known = i < r.kept.length;
    paintToken(span, known ? heat[i] : 0, known ? (1 - r.kept[i]) ** 2 : 0);
  });
  const numKept = sum(r.kept), share = r.kept.length ? Math.round((100 * numKept) / r.kept.length) : 100;
  const where = layer === "" ? "On average a head" : `In layer ${layer} a head`;
  $("title").textContent = `#${r.id} ${r.state}`;
  $("summary").textContent = `${r.policy}: ${r.num_prompt_tokens} prompt tokens (${r.num_cached_tokens} cached), ` +
    `${r.num_tokens - r.num_prompt_tokens} generated. ${where} keeps ${Math.round(numKept)} of ${r.kept.length} tokens (${share} %).`;
  if (selection.position !== null) await showToken(selection.position);
}

function paintToken(span, heat, evicted) {
  const h = heat.toFixed(3), e = evicted.toFixed(3);
  if (span.dataset.heat !== h) { span.dataset.heat = h; span.style.setProperty("--heat-level", h); }
  if (span.dataset.evicted !== e) { span.dataset.evicted = e; span.style.setProperty("--evicted-level", e); }
}

// ---- one token -------------------------------------------------------------------------------------------------------

async function showToken(i) {
  selection.position = i;
  for (const span of $("text").querySelectorAll('[aria-selected="true"]')) span.removeAttribute("aria-selected");
  const selected = selection.spans[i];
  if (!selected) return;
  selected.setAttribute("aria-selected", "true");
  const id = selection.id;
  const detail = await fetchJson(`/inspect/requests/${id}/tokens/${i}`).catch(() => null);
  if (id !== selection.id || i !== selection.position) return;
  $("token").hidden = false;
  $("token-name").textContent = `Token ${i}: “${selected.textContent}”`;
  if (!detail) {
    $("token-detail").textContent = "Not observed yet.";
    return;
  }
  const masses = detail.mass.flat(), max = Math.max(...masses, 1e-9), numKept = detail.kept.flat().filter(Boolean).length;
  $("token-detail").textContent = `received ${(sum(masses) / masses.length).toFixed(3)} of attention on average (at most ${max.toFixed(3)}); ` +
    `${numKept} of ${masses.length} heads keep it.`;
  drawHeads(detail, max);
}

function drawHeads({ mass, kept }, max) {
  const L = mass.length, G = mass[0].length, cell = 18, canvas = $("heads"), pen = canvas.getContext("2d");
  canvas.width = L * cell;
  canvas.height = G * cell;
  for (let l = 0; l < L; l++) {
    for (let g = 0; g < G; g++) {
      pen.fillStyle = colour("heat");
      pen.globalAlpha = kept[l][g] ? 0.08 + 0.92 * Math.sqrt(mass[l][g] / max) : 0;
      pen.fillRect(l * cell + 1, g * cell + 1, cell - 2, cell - 2);
      pen.globalAlpha = 1;
      pen.strokeStyle = colour("line");
      pen.strokeRect(l * cell + 0.5, g * cell + 0.5, cell - 1, cell - 1);
    }
  }
}

// ---- pool and tiers --------------------------------------------------------------------------------------------------

function drawPoolMap(state) {
  const { cells, shares, request_ids: requestIds } = state.map;
  const data = Uint8Array.from(atob(shares), (c) => c.charCodeAt(0));
  const canvas = $("map"), pen = canvas.getContext("2d"), n = state.page_states.length;
  const byRequest = $("colours").value === "request";
  canvas.width = MAP_COLUMNS * CELL_PX;
  canvas.height = Math.ceil(cells / MAP_COLUMNS) * CELL_PX;
  const stateColours = state.page_states.map(colour);
  for (let c = 0; c < cells; c++) {
    const x = (c % MAP_COLUMNS) * CELL_PX, y = Math.floor(c / MAP_COLUMNS) * CELL_PX;
    let left = 0;
    for (let s = 0; s < n; s++) {
      const width = (data[c * n + s] / 255) * (CELL_PX - 1);
      pen.fillStyle = byRequest && s > 1 && requestIds[c] >= 0 ? requestColour(requestIds[c]) : stateColours[s];
      pen.fillRect(x + left, y, Math.max(width, data[c * n + s] ? 1 : 0), CELL_PX - 1);
      left += width;
    }
  }
  $("states").replaceChildren(...state.page_states.map((name) => {
    const item = document.createElement("li"), swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colour(name);
    item.append(swatch, `${name} ${formatBytes(state.pages[name] * state.page_bytes)}`);
    return item;
  }));
}

function updateTiers(state) {
  $("no-tiers").hidden = state.tiers.length > 0;
  $("tiers").replaceChildren(...state.tiers.map((t) => {
    const [tier, bar, fill, hint] = [0, 0, 0, 0].map(() => document.createElement("div"));
    tier.className = "tier";
    bar.className = "fill";
    fill.style.width = `${(100 * t.bytes) / Math.max(t.capacity, 1)}%`;
    bar.append(fill);
    hint.className = "hint";
    hint.textContent = ["read", "written"].filter((k) => k in t).map((k) => `${formatBytes(t[k])} ${k}`).join(", ");
    tier.append(`${t.tier}: ${formatBytes(t.bytes)} of ${formatBytes(t.capacity)}, ${t.spans} spans`, bar, hint);
    return tier;
  }));
  const hits = Object.entries(state.prefix_hits).map(([tier, n]) => `${n} from ${tier}`).join(", ");
  const snapshots = `Snapshots: ${state.snapshots}, ${formatBytes(state.snapshot_pages * state.page_bytes)}`;
  $("prefixes").textContent = `Prefix cache hits (tokens): ${hits}. ${snapshots}. Holes: ${state.holes}.`;
}

function showCell(event) { // the pages and the request under the mouse
  if (!latestState) return;
  const { cells, request_ids: requestIds } = latestState.map;
  const box = $("map").getBoundingClientRect(), unit = box.width / MAP_COLUMNS;
  const c = Math.floor((event.clientY - box.top) / unit) * MAP_COLUMNS + Math.floor((event.clientX - box.left) / unit);
  const pagesPerCell = sum(Object.values(latestState.pages)) / cells;
  const pages = `pages ${Math.round(c * pagesPerCell) + 1} to ${Math.round((c + 1) * pagesPerCell)}`;
  $("cell").textContent = c < cells ? pages + (requestIds[c] >= 0 ? `: request #${requestIds[c]}` : "") : " ";
}

// ---- prompts that were computed again --------------------------------------------------------------------------------

function updateMisses(state) {
  const misses = state.prefix_misses, newest = misses.length ? `${misses[0].id} ${misses.length}` : "";
  $("no-misses").hidden = misses.length > 0;
  $("miss-table").hidden = !misses.length;
  if ($("miss-rows").dataset.newest === newest) return; // so that a selection of text stays
  $("miss-rows").dataset.newest = newest;
  $("miss-rows").replaceChildren(...misses.map((miss) => {
    const row = document.createElement("tr");
    const cause = miss.cause.replaceAll("_", " ") + (miss.detail && `: ${miss.detail}`) + (miss.prompt_text ? `, at token ${miss.common_tokens}` : "");
    for (const text of [`#${miss.id}`, miss.cached_tokens, miss.computed_tokens, cause]) row.insertCell().textContent = text;
    for (const text of [miss.before, miss.prompt_text, miss.nearest_text]) {
      const code = document.createElement("code");
      code.textContent = text;
      row.insertCell().append(code);
    }
    return row;
  }));
}

// ---- polling and events ----------------------------------------------------------------------------------------------

async function poll() {
  try {
    if (!document.hidden) {
      latestState = await fetchJson("/inspect/state");
      updateHeader(latestState);
      updateRequestList(latestState);
      drawPoolMap(latestState);
      updateTiers(latestState);
      updateMisses(latestState);
      const selected = latestState.requests.find((r) => r.id === selection.id);
      if (selected && (selected.state === "running" || selected.num_computed_tokens !== selection.numComputed)) {
        selection.numComputed = selected.num_computed_tokens;
        await updateRequest();
      }
      showError(null);
    }
  } catch (error) {
    showError(error);
  }
  setTimeout(poll, POLL_MS);
}

$("theme").addEventListener("click", () => selection.position !== null && showToken(selection.position));
$("layer").addEventListener("change", (e) => { selection.layer = e.target.value; updateRequest().catch(showError); });
$("colours").addEventListener("change", () => latestState && drawPoolMap(latestState));
$("text").addEventListener("click", (e) => e.target.dataset.i && showToken(Number(e.target.dataset.i)));
$("text").addEventListener("keydown", (e) => {
  const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[e.key];
  if (!step || !selection.spans.length) return;
  e.preventDefault();
  const to = Math.min(Math.max((selection.position ?? -1) + step, 0), selection.spans.length - 1);
  showToken(to).then(() => selection.spans[to].scrollIntoView({ block: "nearest" }));
});
$("requests").addEventListener("keydown", (e) => {
  const sibling = { ArrowUp: "previousElementSibling", ArrowDown: "nextElementSibling" }[e.key];
  const to = sibling && document.activeElement.parentElement[sibling];
  if (to) { e.preventDefault(); to.firstChild.focus(); to.firstChild.click(); }
});
$("map").addEventListener("mousemove", showCell);
for (const s of document.querySelectorAll(".sample")) paintToken(s, Number(s.dataset.heat ?? 0), Number(s.dataset.evicted ?? 0));
poll();
