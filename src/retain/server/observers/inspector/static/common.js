// What the inspector's pages share: access to the server, the API key, formats and the theme.
"use strict";

const $ = (id) => document.getElementById(id);

function keyHeaders() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function fetchOk(path, options = {}) { // throws what the server says, and asks for a key where one is missing
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...keyHeaders() } });
  $("key").hidden = response.status !== 401;
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
  }
  return response;
}

async function fetchJson(path) {
  return (await fetchOk(path)).json();
}

function formatBytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${n.toFixed(n < 10 && i ? 1 : 0)} ${units[i]}`;
}

function showError(error) {
  $("error").hidden = !error;
  $("error").textContent = error ? `${error.message}` : "";
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
}

$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("key").addEventListener("submit", (e) => { e.preventDefault(); sessionStorage.setItem("key", $("api-key").value); });
setTheme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
