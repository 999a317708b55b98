// Rollouts beside each other: a whole group; two attempts at one task, of one run or of two, and
// what changed between them.

import { go, here, link } from "./place.js";
import { body, head } from "./rollout.js";
import { ask } from "./server.js";
import { el, MARKS, num, plural, put, WORDS } from "./text.js";

export async function showGroup(node, place) {
  const docs = await ask("group", { run: place.run, phase: place.phase, group: place.group });
  const [first] = docs;
  const right = docs.filter((doc) => doc.outcome === "right").length;
  node.replaceChildren(
    el("nav", { class: "actions" },
      el("a", { href: link({ view: "rollouts", run: place.run, phase: place.phase, id: place.id }) }, "‹ Back"),
      first && el("a", { href: link({ view: "task", task: first.task_id, run: place.run }) }, "Attempts at this task")),
    el("h1", { class: "question", dir: "auto" }, first?.question ?? `Group ${place.group}`),
    el("p", { class: "soft" },
      `Group ${place.group}: ${plural(docs.length, "rollout")} of one task, ${num(right)} right`),
    el("div", { class: "columns" }, docs.map((doc) => {
      const at = { run: place.run, phase: place.phase, id: doc.id };
      return el("article", { class: "column", tabindex: 0, "aria-label": `rollout ${doc.id}, ${WORDS[doc.outcome]}` },
        el("h3", {}, el("a", { href: link({ view: "rollouts", ...at }) }, doc.id)),
        head(doc, at, { isShort: true }), body(doc, at));
    })));
}

const nameOf = (row) => JSON.stringify([row.run, row.phase, row.id]);

/** Two attempts at the task of the place: a and b, by default the first and the last; where runs
 * are compared, the last of each of two. */
export async function showTask(node, place) {
  const rows = await ask("attempts", { task: place.task });
  if (rows.length === 0) throw new Error(`no attempt at ${place.task} is stored`);
  const lines = Object.values(Object.groupBy(rows, (row) => JSON.stringify([row.run, row.phase])));
  const runs = [...new Set(rows.map((row) => row.run))];
  const lastOf = (run) => rows.findLast((row) => row.run === run);
  const start = runs.length > 1 ? [lastOf(runs[0]), lastOf(runs[1])] : [rows[0], rows.at(-1)];
  const find = (name, other) => rows.find((row) => nameOf(row) === name) ?? other;
  const chosen = { a: find(place.a, start[0]), b: find(place.b, start[1]) };
  const sides = el("div", { class: "columns two" });
  node.replaceChildren(
    el("nav", { class: "actions" },
      el("a", { href: link({ view: "rollouts", run: chosen.b.run, phase: chosen.b.phase, id: chosen.b.id }) }, "‹ Rollouts"),
      el("a", { href: link({ ...here(), mode: "" }), "aria-current": !place.mode && "true" }, "Side by side"),
      el("a", { href: link({ ...here(), mode: "changes" }), "aria-current": place.mode === "changes" && "true" }, "What changed")),
    el("h1", { class: "question", dir: "auto" }, chosen.b.question ?? place.task),
    el("div", { class: "lines" }, lines.map((line) => strip(line, chosen))),
    el("p", { class: "soft" }, "A and B are shown below. Choose B with a click or with [ and ], A with Shift."),
    sides);
  if (place.mode === "changes") await showChanges(sides, chosen);
  else await Promise.all(["a", "b"].map((side) => showSide(sides, side, chosen[side])));
  return { rows, chosen };
}

/** The attempts of one run and phase in a line, by step. */
function strip(line, chosen) {
  const [first] = line;
  return el("div", { class: "line strip" },
    el("span", { class: "soft" }, `${first.run}, ${first.phase_title}`),
    el("span", { class: "marks" }, line.map((row) => {
      const side = ["a", "b"].filter((one) => nameOf(chosen[one]) === nameOf(row)).join("");
      const said = `step ${row.step}, ${WORDS[row.outcome]}, reward ${num(row.reward)}`;
      return el("button", {
        type: "button", class: `mark-of ${row.outcome}`, title: said, "aria-label": said,
        "aria-pressed": side !== "" && "true", "data-side": side.toUpperCase(),
        onclick: (event) => go({ [event.shiftKey ? "a" : "b"]: nameOf(row) }),
      }, MARKS[row.outcome]);
    })));
}

async function showSide(node, side, row) {
  const column = el("article", { class: `column side-${side}` });
  node.append(column);
  const at = { run: row.run, phase: row.phase, id: row.id };
  const doc = await ask("rollout", at);
  column.append(
    el("h3", {}, `${side.toUpperCase()}: `, el("a", { href: link({ view: "rollouts", ...at }) }, title(row))),
    head(doc, at, { isShort: true }), body(doc, at));
}

const title = (row) => `${row.run}, ${row.phase_title}${row.phase === "rl" ? `, step ${row.step}` : ""}`;

async function showChanges(node, { a, b }) {
  const found = await ask("changes", {
    a: a.run, a_phase: a.phase, a_id: a.id, b: b.run, b_phase: b.phase, b_id: b.id,
  });
  node.className = "changes";
  node.append(
    el("p", {}, "From ", el("b", {}, `A: ${title(a)} (${MARKS[a.outcome]} ${WORDS[a.outcome]})`), " to ",
      el("b", {}, `B: ${title(b)} (${MARKS[b.outcome]} ${WORDS[b.outcome]})`), ". ",
      el("del", {}, "Gone"), " and ", el("ins", {}, "new"), "."),
    found.is_same ? el("p", {}, "Word by word the same.") : "",
    ...found.parts.filter((part) => part.pieces.length > 0).map((part) =>
      el("div", { class: `step from-${part.role}` },
        el("div", { class: "role" }, part.role),
        el("pre", { class: "said words", dir: "auto" }, part.pieces.map(([kind, text]) =>
          put(el({ same: "span", gone: "del", new: "ins" }[kind]), text))))));
}

/** Another attempt in place of a or b, within its own line. */
export function moveAttempt({ rows, chosen }, side, by) {
  const row = chosen[side];
  const line = rows.filter((one) => one.run === row.run && one.phase === row.phase);
  const next = line[line.findIndex((one) => one.id === row.id) + by];
  if (next) go({ a: nameOf(chosen.a), b: nameOf(chosen.b), [side]: nameOf(next) }, { replace: true });
}
