// The list of rollouts: only what can be seen is in the page, and it comes from the server in parts,
// so a million rollouts cost no more than a hundred.

import { filters, go, here, link } from "./place.js";
import { ask } from "./server.js";
import { el, num, outcome, plural } from "./text.js";

const ROW = 66; // px, as in style.css
const PART = 100; // rows of one answer
const MOST_PX = 8e6; // browsers do not draw elements much higher than this

export class RolloutList {
  constructor(box, rows, count) {
    this.box = box;
    this.inner = rows;
    this.count = count;
    this.query = "";
    this.forget();
    box.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(box);
  }

  forget() {
    this.rows = new Map(); // place in the list -> row
    this.asked = new Set();
    this.total = null;
    this.next = 0; // of a search: where it goes on; null at its end
    this.stop?.abort();
    this.stop = new AbortController();
  }

  /** Show what the address asks for. */
  async show() {
    const query = JSON.stringify([here().run, filters()]);
    if (query === this.query) return this.draw();
    this.query = query;
    this.forget();
    this.box.scrollTop = 0;
    this.inner.replaceChildren();
    this.count.textContent = "…";
    await this.load(0);
  }

  /** The run has written more: ask again for what is on the screen. A search is left alone. */
  async refresh() {
    if (this.isSearch || this.total === null) return;
    const first = this.visible()[0];
    this.asked.clear();
    await this.load(Math.floor(first / PART) * PART, { isFresh: true });
  }

  get isSearch() {
    return filters().text !== "";
  }

  get size() {
    return this.isSearch ? this.rows.size : (this.total ?? 0);
  }

  async load(offset, { isFresh = false } = {}) {
    if (this.asked.has(offset)) return;
    this.asked.add(offset);
    const signal = this.stop.signal;
    try {
      const query = { run: here().run, ...filters(), offset, limit: PART };
      const found = await ask("rollouts", query, signal);
      if (signal.aborted) return;
      if (isFresh) this.rows.clear();
      const start = this.isSearch ? this.rows.size : offset;
      found.rows.forEach((row, index) => this.rows.set(start + index, row));
      this.total = found.total;
      this.next = found.next;
      this.draw();
    } catch (error) {
      if (signal.aborted) return;
      this.asked.delete(offset);
      if (this.total === null) this.query = ""; // to be asked again
      this.count.textContent = error.message;
    }
  }

  /** The first and last place on the screen, and so many rows a pixel. */
  visible() {
    const scale = Math.max(1, (this.size * ROW) / MOST_PX);
    const first = Math.floor((this.box.scrollTop * scale) / ROW);
    return [first, Math.min(this.size - 1, first + Math.ceil(this.box.clientHeight / ROW)), scale];
  }

  draw() {
    if (this.total === null) return;
    const [first, last, scale] = this.visible();
    this.inner.style.height = `${(this.size * ROW) / scale}px`;
    const shift = scale > 1 ? this.box.scrollTop - first * ROW : 0;
    const shown = [];
    for (let place = Math.max(0, first - 3); place <= Math.min(this.size - 1, last + 3); place++) {
      const row = this.rows.get(place);
      if (row) shown.push(this.row(row, place, place * ROW + shift));
      else if (!this.isSearch) this.load(Math.floor(place / PART) * PART);
    }
    const focused = document.activeElement?.dataset?.id;
    this.inner.replaceChildren(...shown);
    if (focused) this.inner.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
    if (this.isSearch && this.next !== null && last >= this.size - 3) this.load(this.next);
    this.say();
  }

  say() {
    const total = num(this.total);
    if (!this.isSearch) this.count.textContent = plural(this.total, "rollout");
    else if (this.next === null) this.count.textContent = `${num(this.size)} of ${total} have it`;
    else this.count.textContent = `${num(this.size)} have it, ${num(this.next)} of ${total} read …`;
  }

  row(row, place, top) {
    const isOpen = row.id === here().id;
    const meta = [row.kind, `step ${row.step}`, plural(row.num_turns, "turn")];
    const node = el(
      "a",
      {
        class: "row",
        role: "listitem",
        href: link({ ...here(), view: "rollouts", id: row.id, mode: "" }),
        "data-id": row.id,
        "data-place": place,
        "aria-current": isOpen && "true",
        "aria-setsize": this.size,
        "aria-posinset": place + 1,
      },
      el("span", { class: "what", dir: "auto" }, row.question ?? row.task_id),
      el("span", { class: "score" }, num(row.reward)),
      el("span", { class: "meta" }, outcome(row.outcome), ` · ${meta.join(" · ")}`),
      el("span", { class: "meta end" }, `${num(row.num_tokens)} tokens`),
    );
    node.style.top = `${top}px`;
    return node;
  }

  /** Open the next rollout, or with -1 the one before. */
  move(by) {
    const open = [...this.rows].find(([, row]) => row.id === here().id);
    const place = open ? open[0] + by : this.visible()[0];
    const row = this.rows.get(place);
    if (!row) return;
    const [first, last, scale] = this.visible();
    if (place <= first || place >= last - 1) this.box.scrollTop = ((place - 2) * ROW) / scale;
    go({ view: "rollouts", id: row.id }, { replace: true });
  }
}
