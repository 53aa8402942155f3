// The playground: one prompt under two policies, both streamed by the server's public API. It uses common.js.
"use strict";

const columns = ["left", "right"].map(createColumn);
let controller = null; // aborts the running requests
let numEqual = 0; // characters at the beginning of both answers that are the same

function createColumn(side) {
  const element = $("column").content.firstElementChild.cloneNode(true);
  element.id = side;
  element.setAttribute("aria-label", `${side} answer`);
  document.querySelector("main").append(element);
  return { element, find: (name) => element.querySelector(name), answer: "" };
}

// ---- requests --------------------------------------------------------------------------------------------------------

function buildBody(model, policy) {
  const prompt = $("prompt").value, seed = $("seed").value;
  return JSON.stringify({
    model,
    ...($("chat").checked ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    seed: seed === "" ? undefined : Number(seed),
    kv_policy: policy.trim() || undefined,
    stream: true,
    stream_options: { include_usage: true },
  });
}

async function* readEvents(response) { // the JSON of each server-sent event
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection was lost before the answer ended");
    const events = (unread + value).split("\n\n");
    unread = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function generate(column, model, signal) {
  const path = $("chat").checked ? "/v1/chat/completions" : "/v1/completions";
  const headers = { "Content-Type": "application/json" };
  column.startTime = performance.now();
  const body = buildBody(model, column.find(".policy").value);
  const response = await fetchOk(path, { method: "POST", headers, body, signal });
  for await (const event of readEvents(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const { text, delta } of event.choices) {
      column.lastTime = performance.now();
      column.firstTime ??= column.lastTime;
      column.numTokens++; // a chunk is about a token; the usage has the exact number
      column.answer += text ?? (delta.reasoning_content ?? "") + (delta.content ?? "");
    }
    if (event.usage) Object.assign(column, { numTokens: event.usage.completion_tokens, kv: event.retain[0].kv });
    showStats(column);
    showAnswers();
  }
  column.isComplete = true;
}

async function run() {
  if (controller) return;
  controller = new AbortController();
  numEqual = 0;
  for (const column of columns) {
    Object.assign(column, { answer: "", numTokens: 0, firstTime: null, lastTime: null, kv: null, isComplete: false });
    showStats(column);
    showFailure(column, "");
  }
  showAnswers();
  showError(null);
  $("stop").disabled = !($("run").disabled = true);
  try {
    const model = await loadModel(), { signal } = controller;
    await Promise.all(columns.map((column) => generate(column, model, signal).catch((error) => {
      showFailure(column, error.name === "AbortError" ? "stopped" : error.message);
    })));
  } catch (error) {
    showError(error);
  }
  showAnswers();
  controller = null;
  $("stop").disabled = !($("run").disabled = false);
}

async function loadModel() {
  const [model] = (await fetchJson("/v1/models")).data;
  $("model").textContent = `${model.id}, ${model.retain.kv_policy} by default`;
  return model.id;
}

// ---- answers ---------------------------------------------------------------------------------------------------------

function showFailure(column, text) {
  column.find(".failure").hidden = !text;
  column.find(".failure").textContent = text;
}

function showStats(column) {
  const { startTime, firstTime, lastTime, numTokens, kv } = column;
  const show = (name, text) => { column.find(name).textContent = text; };
  const rate = (1000 * (numTokens - 1)) / (lastTime - firstTime);
  show(".ttft", firstTime ? `${(firstTime - startTime).toFixed(0)} ms` : "–");
  show(".rate", lastTime > firstTime ? rate.toFixed(rate < 10 ? 1 : 0) : "–");
  show(".count", numTokens || "–");
  show(".bytes", kv ? formatBytes(kv.bytes_end) : "–");
  show(".kv", kv ? `${kv.policy}: at most ${formatBytes(kv.bytes_peak)}, a full cache ${formatBytes(kv.bytes_if_full)}` : "\u00a0");
  column.find(".bytes").title = kv ? `${kv.bytes_end} bytes` : "";
}

function showAnswers() { // up to the first difference, and what follows it
  const [a, b] = columns.map((column) => column.answer), shorter = Math.min(a.length, b.length);
  while (numEqual < shorter && a[numEqual] === b[numEqual]) numEqual++;
  const bothComplete = columns.every((column) => column.isComplete);
  const differ = numEqual < shorter || (bothComplete && a.length !== b.length);
  const isInsidePair = /[\uD800-\uDBFF]/.test(a[numEqual - 1] ?? ""); // of surrogates
  const start = differ ? numEqual - isInsidePair : Infinity;
  for (const { find, answer } of columns) {
    find(".same").textContent = answer.slice(0, start);
    find("mark").textContent = answer.slice(start);
    find("mark").hidden = !differ;
  }
  const equal = bothComplete ? "The answers are equal." : "\u00a0";
  $("difference").textContent = differ ? `The answers first differ at character ${[...a.slice(0, start)].length + 1}.` : equal;
}

// ---- events and URL parameters ---------------------------------------------------------------------------------------

const parameters = new URLSearchParams(location.search);
for (const id of ["prompt", "max-tokens", "temperature", "seed"]) {
  if (parameters.has(id)) $(id).value = parameters.get(id);
}
$("chat").checked = parameters.get("chat") === "1";
columns[0].find(".policy").value = parameters.get("left") ?? "full";
columns[1].find(".policy").value = parameters.get("right") ?? "h2o:budget=50%";
$("form").addEventListener("submit", (e) => { e.preventDefault(); run(); });
$("stop").addEventListener("click", () => controller?.abort());
$("key").addEventListener("submit", () => loadModel().then(() => showError(null), showError));
if (parameters.get("run") === "1") $("form").requestSubmit();
else loadModel().catch(showError);
