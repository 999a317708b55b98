// One rollout as a person reads it: the question, what came of it, turn by turn.

import { picture } from "./picture.js";
import { here, link } from "./place.js";
import { ask } from "./server.js";
import { el, num, outcome, plural, put, range, signed } from "./text.js";

const PART_CHARS = 250_000;

/** The place of a rollout as the server wants it. */
export const placeOf = (place) => ({ run: place.run, phase: place.phase, id: place.id });

/** What was said: a text, or texts and pictures. A text that may be long is its beginning, and
 * buttons for the rest. */
export function longText(part, place, kind = "") {
  if (part.parts) {
    return el("div", { class: "parts" }, part.parts.map((one) =>
      one.sha256 === undefined ? longText(one, place, kind) : picture(one, place)));
  }
  const box = el("pre", { class: `said ${kind}`, dir: "auto", tabindex: kind === "out" ? 0 : null });
  put(box, part.text);
  if (part.place === undefined) return box;
  let shown = part.text.length;
  const more = el("div", { class: "more" });
  const draw = () => {
    const rest = part.length - shown;
    more.replaceChildren();
    if (rest <= 0) return;
    const next = Math.min(rest, PART_CHARS);
    more.append(
      el("button", { type: "button", onclick: load }, `Show ${num(next)} more characters`),
      el("span", { class: "soft" }, `${num(shown)} of ${num(part.length)}`),
    );
  };
  const load = async () => {
    const asked = { ...place, place: part.place, start: shown, end: shown + PART_CHARS };
    const found = await ask("text", asked);
    box.append(put(el("span"), found.text));
    shown += found.text.length;
    draw();
  };
  draw();
  return el("div", {}, box, more);
}

/** The head of a rollout: what was asked and wanted, what came of it, and where it belongs. A short
 * one stands below a question that is shown already. */
export function head(doc, place, { isShort = false } = {}) {
  const facts = [
    ["Reward", num(doc.reward)],
    ["With turns", doc.total_reward === doc.reward ? null : num(doc.total_reward)],
    ...Object.entries(doc.parts).map(([name, value]) => [name, num(value)]),
    ["Advantage", range(doc.advantage, signed) ?? "not recorded"],
    ["Version", range(doc.versions) ?? "–"],
    ["Step", place.phase === "rl" ? num(doc.step) : null],
    ["Turns", num(doc.num_turns)],
    ["Tokens", `${num(doc.num_sampled)} sampled of ${num(doc.num_tokens)}`],
  ].filter(([, value]) => value !== null);
  return el(
    "header",
    { class: "head" },
    el("div", { class: "line" }, outcome(doc.outcome), doc.outcome === "cut" || doc.outcome === "failed" ? el("span", { class: "soft" }, doc.verdict) : null),
    !isShort && doc.asked && el("div", { class: "asked" }, longText(doc.asked, place)),
    el("dl", { class: "facts" }, facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    doc.answer && doc.answer.length > 0 && el("div", { class: "wanted" },
      el("b", {}, "Expected answer"), longText(doc.answer, place)),
    doc.error && el("div", { class: "error" }, el("b", {}, "Error"), longText(doc.error, place)),
    !isShort && details(doc, place),
  );
}

function details(doc, place) {
  const rows = [
    ["Rollout", doc.id], ["Group", doc.group], ["Task", doc.task_id], ["Type", doc.kind],
    ["Status", doc.status], ["Recorded of tokens", doc.recorded.join(", ") || "log-probs alone"],
    ...Object.entries(doc.metrics).map(([name, value]) => [name, num(value)]),
  ];
  return el("details", { class: "fold" },
    el("summary", {}, "All numbers and names"),
    el("div", { class: "inside" },
      el("table", { class: "config" }, el("tbody", {}, rows.map(([name, value]) =>
        el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))))),
      doc.files.map((file) =>
        el("div", {}, el("h4", {}, file.name), longText(file.value, place)))));
}

/** All token sequences of a rollout: histories, the conversation, those beside it. */
export function body(doc, place) {
  const [own, ...others] = doc.sequences;
  const histories = others.filter((one) => one.is_history);
  const beside = others.filter((one) => !one.is_history);
  const parts = [...histories, own, ...beside].map((one) => sequence(one, place, doc));
  return el("div", { class: "body" }, others.length > 0 && tree(histories, own, beside), parts);
}

/** How the sequences hang together; each line leads to its sequence. */
function tree(histories, own, beside) {
  const leaf = (one, name) => {
    const below = beside.filter((other) => other.caller?.[0] === one.name);
    const target = () => document.getElementById(`sequence-${one.name}`).scrollIntoView();
    return el("li", {},
      el("button", { type: "button", class: "plain", onclick: target }, name),
      el("span", { class: "soft" }, ` ${plural(one.turns.length, "turn")}, ${num(one.num_tokens)} tokens`),
      below.length > 0 && el("ul", {}, below.map((other) => leaf(other, `called: ${other.name}`))));
  };
  const free = beside.filter((one) => !one.caller);
  return el("nav", { class: "tree", "aria-label": "Conversations of this rollout" },
    el("ul", {},
      histories.map((one, index) => leaf(one, `history ${index + 1}, then compacted`)),
      leaf(own, histories.length ? "after it" : "the conversation"),
      free.map((one) => leaf(one, one.name))));
}

function sequence(one, place, doc) {
  const isAlone = doc.sequences.length === 1;
  const asked = doc.asked?.text;
  return el("section", { class: "sequence", id: `sequence-${one.name}` },
    !isAlone && el("h3", {}, `${one.name}: ${one.title}`),
    one.prompt.map((message) => prompt(message, place, asked)),
    one.turns.map((turn, index) => turnPart(turn, index, place, one)));
}

/** What the policy read first. What the head says already is folded away. */
function prompt(message, place, asked) {
  const isLong = message.content.length > 600 || message.role === "system";
  const isKnown = message.role === "user" && asked !== undefined && message.content.text === asked;
  const text = longText(message.content, place);
  if (!isLong && !isKnown) return step(message.role, "from-prompt", text);
  return step(message.role, "from-prompt", el("details", { class: "fold" },
    el("summary", {}, isKnown ? "the question" : plural(message.content.length, "character")), text));
}

function turnPart(turn, index, place, one) {
  const facts = [
    `turn ${index + 1}`,
    turn.version >= 0 && `version ${turn.version}`,
    turn.mean_logp !== null && `mean log-prob ${num(turn.mean_logp)}`,
    turn.reward !== null && `reward ${num(turn.reward)}`,
    turn.is_cut && "✂ cut off here",
    turn.is_copied && "repeated from another conversation",
    turn.num_malformed > 0 && `${plural(turn.num_malformed, "malformed call")}`,
  ].filter(Boolean);
  const said = turn.content.length > 0 || (!turn.reasoning && turn.calls.length === 0);
  return el("div", { class: "turn" },
    step("agent", "from-agent", [
      el("p", { class: "meta" }, facts.join(" · ")),
      turn.reasoning && el("details", { class: "fold thought", open: turn.reasoning.length < 600 },
        el("summary", {}, "thought"), longText(turn.reasoning, place)),
      said && longText(turn.content, place),
      turn.calls.map((call) => callPart(call, place)),
    ]),
    turn.calls.map((call) => call.result &&
      step("tool", "from-tool", longText(call.result, place, "out"))),
    turn.replies.map((reply) => step(reply.role, "from-tool", longText(reply.content, place, "out"))));
}

function callPart(call, place) {
  const [first] = call.arguments;
  const isOne = call.arguments.length === 1;
  return el("div", { class: "call" },
    el("p", { class: "name" }, "calls ", el("b", {}, call.name), isOne && ` (${first.name})`),
    call.arguments.map((one) => [
      !isOne && el("p", { class: "meta" }, one.name),
      longText(one.value, place),
    ]));
}

function step(role, kind, content) {
  return el("div", { class: `step ${kind}` }, el("div", { class: "role" }, role),
    el("div", { class: "words" }, content));
}

/** Draws a whole rollout into a node. */
export async function show(node, place, { actions = [] } = {}) {
  const doc = await ask("rollout", placeOf(place));
  const at = here();
  const to = (changes) => link({ ...at, ...changes });
  node.replaceChildren(
    el("nav", { class: "actions" },
      el("a", { class: "back", href: to({ id: "", mode: "" }) }, "‹ List"),
      actions,
      doc.group && el("a", { href: link({ view: "group", run: place.run, phase: place.phase, group: doc.group, id: doc.id }) }, "Group"),
      el("a", { href: link({ view: "task", task: doc.task_id, run: place.run }) }, "Attempts at this task")),
    head(doc, placeOf(place)),
    body(doc, placeOf(place)));
  return doc;
}
