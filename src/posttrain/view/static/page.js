// What every page has: theme, live updates, keyboard, selection of runs. Only pages with charts load their script.
const $ = (selector) => document.querySelector(selector);
const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function switchTheme() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch {}
  charts?.redraw();
}

const place = $("[data-charts]");
const charts = place ? new (await import("./charts.js")).Charts(place, dark) : null;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts?.redraw());
$("#theme").addEventListener("click", switchTheme);
$("#help").addEventListener("click", () => $("#keys").showModal());

// Live: the server says that files have changed, and parts of the page fetch themselves again.
const source = new EventSource(document.body.dataset.events);
source.addEventListener("change", () => {
  document.body.dispatchEvent(new CustomEvent("posttrain:change"));
  charts?.load();
});
source.onopen = () => { $("#live").hidden = false; };
source.onerror = () => { $("#live").hidden = true; };
addEventListener("pagehide", () => source.close());

// Selected runs stay selected when the list is fetched again.
const selected = new Set();
function showSelected() {
  for (const box of document.querySelectorAll("[data-select]")) box.checked = selected.has(box.value);
  const button = $("[data-compare]");
  if (button) button.disabled = [...selected].join("\n").split("\n").filter(Boolean).length < 2;
}
document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-select]")) return;
  selected[event.target.checked ? "add" : "delete"](event.target.value);
  showSelected();
});
document.addEventListener("click", (event) => {
  if (!event.target.matches("[data-compare]")) return;
  const names = [...selected].join("\n").split("\n");
  location.href = "/compare?" + new URLSearchParams(names.map((name) => ["run", name]));
});
document.addEventListener("htmx:afterSettle", showSelected);

function step(direction) {
  const items = [...document.querySelectorAll("[data-go]")];
  const at = items.indexOf(document.activeElement);
  const next = items[at < 0 ? (direction > 0 ? 0 : items.length - 1) : Math.min(items.length - 1, Math.max(0, at + direction))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]):not([type=range]), textarea, select")) return;
  const keys = {
    "/": () => $("[data-search]")?.focus(),
    j: () => step(1),
    k: () => step(-1),
    g: () => { location.href = "/"; },
    t: switchTheme,
    "?": () => $("#keys").showModal(),
  };
  if (keys[event.key]) {
    keys[event.key]();
    event.preventDefault();
  }
});

// The values of a token: under the mouse, or with the arrow keys on an answer.
const readToken = (span) => {
  if (!span || !$("#token")) return;
  document.querySelector(".tokens .now, .units .now")?.classList.remove("now");
  span.classList.add("now");
  $("#token").textContent = `${JSON.stringify(span.textContent)} ${span.title}`;
};
document.addEventListener("mouseover", (event) => { if (event.target.matches(".tokens span, .units .text span")) readToken(event.target); });
document.addEventListener("keydown", (event) => {
  const answer = event.target.closest?.(".tokens, .units");
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!answer || !move) return;
  const spans = [...answer.querySelectorAll(answer.matches(".units") ? ".text span" : "span")];
  readToken(spans[Math.max(0, spans.indexOf(answer.querySelector(".now")) + move)]);
  event.preventDefault();
});
