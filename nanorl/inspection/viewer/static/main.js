// The page: which view is shown, filters, keys, and following runs that go on.
// Next: place.js (addresses), list.js, rollout.js, tokens.js, compare.js; text.js is the one door
// through which text enters.

import { moveAttempt, showGroup, showTask } from "./compare.js";
import { RolloutList } from "./list.js";
import { FILTERS, filters, go, here, link } from "./place.js";
import { placeOf, show } from "./rollout.js";
import { ask, askDrawing } from "./server.js";
import { el } from "./text.js";
import { showTokens } from "./tokens.js";

const POLL_MS = 2_000;
const byId = (id) => document.getElementById(id);
const list = new RolloutList(byId("list"), byId("rows"), byId("count"));
const form = byId("filters");
let runs = [];
let drawn = ""; // what the reader, or the wide view, shows
let task = null; // of the view of a task
let turn = 0; // counts what was asked for: an answer that comes later than the next one's is dropped

// -- what is shown --------------------------------------------------------------------------------

async function render() {
  const mine = ++turn;
  const place = complete(here());
  const wide = { overview: "overview", runs: "overview", rollouts: "rollouts" }[place.view] ?? "wide";
  for (const name of ["overview", "rollouts", "wide"]) byId(name).hidden = name !== wide;
  for (const tab of byId("tabs").children) {
    tab.href = link({ view: tab.dataset.view, run: place.run, phase: place.phase });
    tab.setAttribute("aria-current", tab.dataset.view === place.view ? "page" : "false");
  }
  byId("run").value = place.run;
  byId("run").closest("label").hidden = place.view === "runs" || place.view === "task";
  document.body.dataset.open = place.view === "rollouts" && place.id ? "reader" : "list";
  document.title = `${place.id || place.task || place.view} – ${place.run}`;
  sayStatus(place);
  try {
    if (place.view === "rollouts") await showRollouts(place, mine);
    else await showWide(byId(wide), place, mine);
  } catch (error) {
    if (mine !== turn) return;
    const node = place.view === "rollouts" ? byId("reader") : byId(wide);
    node.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
  }
}

/** The address with what it leaves open; the views below may rely on it. */
function complete(place) {
  const run = runs.find((one) => one.name === place.run) ?? runs[0];
  const phases = run.phases.map((phase) => phase.id);
  const preferred = phases.includes("rl") ? "rl" : (phases[0] ?? "rl");
  const phase = phases.includes(place.phase) ? place.phase : preferred;
  const whole = { ...place, view: place.view ?? "overview", run: run.name, phase };
  if (place.run !== whole.run || place.view !== whole.view || place.phase !== whole.phase) {
    history.replaceState(null, "", link(whole));
  }
  return whole;
}

async function showRollouts(place, mine) {
  await fillFilters(place);
  if (mine !== turn) return;
  const shown = list.show();
  const key = JSON.stringify([place.run, place.phase, place.id, place.mode]);
  if (key !== drawn) {
    drawn = key;
    const reader = byId("reader");
    if (!place.id) reader.replaceChildren(el("p", { class: "empty soft" }, "Choose a rollout: j and k go through the list, ? shows all keys."));
    else await showReader(reader, place, key);
  }
  await shown;
}

async function showReader(reader, place, key) {
  const tab = (mode, name) => el("a", {
    href: link({ ...here(), mode }), "aria-current": (place.mode ?? "") === mode && "true",
  }, name);
  const node = el("div");
  const doc = await show(node, place, { actions: [tab("", "Read"), tab("tokens", "Tokens")] });
  if (drawn !== key) return; // another one was opened meanwhile
  reader.replaceChildren(node);
  reader.scrollTop = 0;
  if (place.mode === "tokens") showTokens(node.querySelector(".body"), doc, placeOf(place));
}

async function showWide(node, place, mine) {
  drawn = "";
  task = null;
  const fresh = el("div");
  const parts = {
    overview: () => drawing(fresh, "overview", { run: place.run }),
    runs: () => drawing(fresh, "overview", {}),
    group: () => showGroup(fresh, place),
    task: () => showTask(fresh, place),
  };
  if (!(place.view in parts)) throw new Error(`there is no view ${place.view}`);
  const found = await parts[place.view]();
  if (mine !== turn) return;
  node.replaceChildren(...fresh.childNodes);
  task = found ?? null;
}

async function drawing(node, path, query) {
  node.replaceChildren(...(await askDrawing(path, query)));
}

let known = "", wanted = "";
/** The choices of the filters, where they are not those of the run and phase yet. */
async function fillFilters(place) {
  const key = JSON.stringify([place.run, place.phase, runs.find((r) => r.name === place.run).version]);
  wanted = key;
  if (key !== known) {
    const found = await ask("facets", { run: place.run, phase: place.phase });
    if (wanted !== key) return;
    known = key;
    const run = runs.find((one) => one.name === place.run);
    options(form.elements.phase, run.phases.map((phase) => [phase.id, phase.title]));
    options(form.elements.kind, [["", "any"], ...found.kinds.map((kind) => [kind, kind])]);
    form.elements.steps.placeholder = found.steps ? found.steps.join("-") : "all";
    form.elements.steps.disabled = found.steps === null;
  }
  for (const [name, value] of Object.entries({ ...filters(), phase: place.phase })) {
    const field = form.elements[name];
    const shown = name === "order" && !value ? "newest" : value;
    if (field !== document.activeElement && field.value !== shown) field.value = shown;
  }
}

function options(select, pairs) {
  const value = select.value;
  select.replaceChildren(...pairs.map(([id, title]) => el("option", { value: id }, title)));
  select.value = value;
}

// -- following ------------------------------------------------------------------------------------

function sayStatus(place) {
  const run = runs.find((one) => one.name === place.run);
  byId("status").textContent = run.status;
  byId("status").classList.toggle("live", run.status === "goes on");
  byId("status").title = run.notes.join("\n");
}

async function follow() {
  const before = new Map(runs.map((run) => [run.name, run.version]));
  runs = await ask("runs");
  const place = complete(here());
  sayStatus(place);
  const isNew = runs.some((run) => run.name === place.run && run.version !== before.get(run.name));
  if (!isNew) return;
  if (place.view === "rollouts") {
    if (list.total === null) return render(); // there was nothing yet
    await fillFilters(place);
    await list.refresh();
  } else if (place.view === "overview" || place.view === "runs") await showWide(byId("overview"), place, ++turn);
}

async function watch() {
  try {
    if (!document.hidden) await follow();
  } catch {
    byId("status").textContent = "the viewer's server does not answer";
    byId("status").classList.remove("live");
  }
  setTimeout(watch, POLL_MS);
}

// -- what a person does ---------------------------------------------------------------------------

let typing = 0;
form.addEventListener("input", (event) => {
  clearTimeout(typing);
  const apply = () => {
    const values = Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value]));
    go({ ...values, id: "", mode: "" }, { replace: true });
  };
  if (event.target.tagName === "SELECT") apply();
  else typing = setTimeout(apply, 250);
});
form.addEventListener("submit", (event) => event.preventDefault());
byId("run").addEventListener("change", (event) =>
  go({ run: event.target.value, phase: "", id: "", group: "", kind: "", steps: "" }));
byId("ask").addEventListener("click", () => byId("keys").showModal());

const KEYS = {
  j: () => list.move(1),
  k: () => list.move(-1),
  "/": () => {
    go({ view: "rollouts" });
    form.elements.text.focus();
  },
  "?": () => byId("keys").showModal(),
  o: () => go({ view: "overview" }),
  t: () => here().id && go({ mode: here().mode === "tokens" ? "" : "tokens" }),
  g: () => document.querySelector('#reader a[href*="view=group"]')?.click(),
  a: () => document.querySelector('#reader a[href*="view=task"]')?.click(),
  "[": () => task && moveAttempt(task, "b", -1),
  "]": () => task && moveAttempt(task, "b", 1),
  "{": () => task && moveAttempt(task, "a", -1),
  "}": () => task && moveAttempt(task, "a", 1),
  Enter: () => byId("reader").focus(),
  Escape: () => leave(),
};

function leave() {
  const place = here();
  if (place.view === "group" || place.view === "task") history.back();
  else if (document.activeElement !== byId("list") && document.activeElement !== document.body) {
    byId("list").focus();
  } else go({ id: "", mode: "" });
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const isField = event.target.matches("input, select, textarea");
  if (isField && event.key !== "Escape") return;
  if (event.key === "Enter" && event.target.matches("a, button, summary")) return;
  if (!(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

addEventListener("hashchange", render);

runs = await ask("runs").catch((error) => {
  byId("status").textContent = error.message;
  return [];
});
if (runs.length > 0) {
  options(byId("run"), runs.map((run) => [run.name, run.name]));
  document.querySelector('[data-view="runs"]').hidden = runs.length < 2;
  await render();
  setTimeout(watch, POLL_MS);
}
