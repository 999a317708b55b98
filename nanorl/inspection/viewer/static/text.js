// Elements, text and numbers. Whatever a model or a tool wrote enters the page through `put`: as
// text nodes, never as markup, with what is invisible in it made visible.

const UNSEEN =
  /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** Appends text to a node. A control character becomes its picture, any other that cannot be seen,
 * or that would reorder what is read, its code. */
export function put(node, text) {
  const plain = String(text).replaceAll("\r\n", "\n");
  let last = 0;
  for (const found of plain.matchAll(UNSEEN)) {
    if (found.index > last) node.append(plain.slice(last, found.index));
    const code = found[0].codePointAt(0);
    const name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    const mark = document.createElement("span");
    mark.className = "unseen";
    mark.title = name;
    mark.textContent = code < 0x20 ? String.fromCharCode(0x2400 + code) : name;
    node.append(mark);
    last = found.index + found[0].length;
  }
  node.append(plain.slice(last));
  return node;
}

/** An element. `given` are its attributes (`class`, `href`, ...) and listeners (`onclick`); strings
 * among the children pass `put`; null and false leave no trace. */
export function el(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) node.append(child);
    else put(node, child);
  }
  return node;
}

/** Short and readable: 1,234, 0.0312, 1.5e-5. */
export function num(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const sign = value < 0 ? "−" : "";
  const size = Math.abs(value);
  if (Number.isSafeInteger(value)) return sign + size.toLocaleString("en");
  if (size >= 1e6 || size < 1e-3) return sign + size.toExponential(1).replace("e+", "e");
  return sign + (size >= 1000 ? Math.round(size).toLocaleString("en") : +size.toPrecision(3));
}

export const signed = (value) => (value > 0 ? "+" : "") + num(value);

/** "0.7", or "−0.2 to 0.7". */
export function range(ends, show = num) {
  if (ends === null) return null;
  return ends[0] === ends[1] ? show(ends[0]) : `${show(ends[0])} to ${show(ends[1])}`;
}

export const MARKS = { right: "✓", wrong: "✗", cut: "✂", failed: "!" };
export const WORDS = { right: "right", wrong: "wrong", cut: "cut off", failed: "failed" };

/** What came of a rollout, as a sign and a word. */
export const outcome = (name) =>
  el("span", { class: `outcome ${name}` }, `${MARKS[name]} ${WORDS[name]}`);

export const plural = (count, word) => `${num(count)} ${word}${count === 1 ? "" : "s"}`;
