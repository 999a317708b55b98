// The tokens of a rollout, coloured by one of their numbers. What a colour says, a line says too:
// the more, the heavier; below the text where it is positive, above it where it is negative.

import { picture } from "./picture.js";
import { ask } from "./server.js";
import { el, num, put, signed } from "./text.js";

const PART = 4_000;
// Surprises and entropies (nats) from which a token has the next level, as in report.html.
const NATS = [0.05, 0.25, 0.7, 1.4, 2.5, 4.5];
const NAMES = { mask: "what was trained on", logp: "log-prob", gap: "gap between the engines" };

const valueOf = (token, by) => (by === "logp" ? token.logp : (token.stats[by] ?? null));

/** Draws the tokens of one sequence after the other into a node. */
export function showTokens(node, doc, place) {
  const by = el("select", { name: "by" }, ["mask", "logp", ...doc.recorded].map((name) =>
    el("option", { value: name }, NAMES[name] ?? name.replaceAll("_", " "))));
  const numbers = el("input", { type: "checkbox", name: "numbers" });
  const legend = el("p", { class: "soft legend-line" });
  const readout = el("output", { class: "readout" }, "Point at a token, or step through them with ← and →.");
  const flow = el("div", { class: "flow" });
  const known = [];
  const paint = () => {
    const most = Math.max(0, ...known.map(({ token }) => Math.abs(valueOf(token, by.value) ?? 0)));
    for (const { token, span } of known) dress(span, token, by.value, most);
    legend.textContent = explain(by.value, most);
    flow.classList.toggle("numbers", numbers.checked);
  };
  by.addEventListener("change", paint);
  numbers.addEventListener("change", paint);
  const say = (span) => {
    const one = known[Number(span?.dataset?.n)];
    if (one) readout.replaceChildren(...readings(one.token));
  };
  flow.addEventListener("pointerover", (event) => say(event.target.closest(".tk")));
  flow.addEventListener("focusin", (event) => say(event.target.closest(".tk")));
  flow.addEventListener("keydown", (event) => step(event, known));
  const missing = ["advantage", "entropy", "gap"].filter((name) => !doc.recorded.includes(name));
  node.replaceChildren(
    el("form", { class: "paint" }, el("label", {}, "Colour by ", by),
      el("label", {}, numbers, " numbers"),
      missing.length > 0 && el("span", { class: "soft" }, `not recorded: ${missing.join(", ")}`)),
    legend, flow, readout);
  for (const [index, one] of doc.sequences.entries()) {
    const box = el("div", { class: "tokens" });
    flow.append(doc.sequences.length > 1 ? el("h3", {}, `${one.name}: ${one.title}`) : "", box);
    load(box, one, { ...place, place: index }, 0, known, paint);
  }
}

async function load(box, one, place, start, known, paint) {
  const found = await ask("tokens", { ...place, start, end: start + PART });
  const heads = new Map([[0, "prompt"]]);
  one.turns.forEach((turn, index) => {
    heads.set(turn.span[2], "template");
    if (turn.span[2] > turn.span[1]) heads.set(turn.span[1], "read");
    heads.set(turn.span[0], `agent, turn ${index + 1}`);
  });
  const pictures = [...found.pictures];
  for (let i = 0; i < found.text.length; i++) {
    if (heads.has(start + i)) box.append(el("h4", {}, heads.get(start + i)));
    if (pictures[0]?.end <= start + i) pictures.shift();
    if (pictures[0]?.start <= start + i) { // its tokens are one picture; the part before has shown it
      if (pictures[0].start === start + i) box.append(picture(pictures[0], place));
      continue;
    }
    const stats = Object.fromEntries(Object.entries(found.stats).map(([n, list]) => [n, list[i]]));
    const token = {
      place: start + i, id: found.id[i], text: found.text[i], isSampled: found.mask[i] === 1,
      logp: found.mask[i] ? found.logp[i] : null, version: found.version[i], stats,
    };
    const span = put(el("span", { class: "tk", tabindex: -1, "data-n": known.length, dir: "auto" }), token.text);
    known.push({ token, span });
    box.append(span);
  }
  if (known.length && known[0].span.tabIndex < 0) known[0].span.tabIndex = 0;
  if (found.end < found.length) {
    const button = el("button", { type: "button", onclick: () => {
      button.remove();
      load(box, one, place, found.end, known, paint);
    } }, `Show the next of ${num(found.length)} tokens`);
    box.append(button);
  }
  paint();
}

function dress(span, token, by, most) {
  span.className = `tk ${token.isSampled ? "sampled" : "given"}`;
  delete span.dataset.value;
  if (by === "mask") return;
  const value = valueOf(token, by);
  if (value === null) return;
  span.dataset.value = num(value);
  span.classList.add(`q${level(value, by, most)}`, value < 0 && by !== "logp" ? "negative" : "positive");
}

function level(value, by, most) {
  if (by === "logp") return NATS.filter((nats) => -value >= nats).length;
  if (by === "entropy") return NATS.filter((nats) => value >= nats).length;
  return most > 0 ? Math.ceil((6 * Math.abs(value)) / most - 1e-9) : 0;
}

function explain(by, most) {
  if (by === "mask") return "Underlined: sampled by the policy and trained on. Grey: read alone.";
  if (by === "logp" || by === "entropy") {
    const what = by === "logp" ? "less likely a token was" : "surer another one would have been";
    return `The heavier the line, the ${by === "logp" ? what : "higher the entropy"}: from ${NATS.join(", ")} nats on.`;
  }
  return `The heavier the line, the greater the number, up to ${num(most)}: below the text positive, above it negative.`;
}

function readings(token) {
  const chance = token.logp === null ? null : `${(100 * Math.exp(Math.min(0, token.logp))).toFixed(1)} %`;
  const facts = [
    ["id", token.id],
    [token.isSampled ? "sampled" : "read, not trained on", ""],
    token.logp !== null && ["log-prob", `${num(token.logp)} (${chance})`],
    ...Object.entries(token.stats).filter(([, v]) => v !== null).map(([name, v]) => [name.replaceAll("_", " "), signed(v)]),
    token.version >= 0 && ["version", token.version],
    ["place", token.place],
  ].filter(Boolean);
  return [el("code", {}, JSON.stringify(token.text)), ...facts.map(([name, value]) =>
    el("span", {}, `${name} `, el("b", {}, String(value))))];
}

function step(event, known) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const place = Number(event.target.dataset?.n);
  const next = by && known[place + by];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.span.tabIndex = 0;
  next.span.focus();
}
