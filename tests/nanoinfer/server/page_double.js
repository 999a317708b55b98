// Enough of a browser for the script of the server's page: elements that remember what they are
// given, and `fetch` at an address. test_chat_page.py puts it before the script.
const elements = new Map();
function element(tag) {
  return {
    tag, value: "", textContent: "", className: "", hidden: false, open: false, children: [],
    scrollHeight: 0, scrollTop: 0, clientHeight: 0, listeners: {},
    addEventListener(kind, listener) { this.listeners[kind] = listener; },
    append(child) { this.children.push(child); child.parent = this; },
    replaceChildren(...children) {
      this.children = children;
      if (this.tag === "article" && children.length > 0) globalThis.onShow?.(this);
      if (this.tag === "model") this.value = children[0].value;
    },
    remove() { this.parent.children = this.parent.children.filter((one) => one !== this); },
    focus() {},
  };
}
globalThis.document = {
  ...element("document"),
  getElementById(id) {
    if (!elements.has(id)) elements.set(id, element(id));
    return elements.get(id);
  },
  createElement: element,
  querySelector: () => document.getElementById("options"),
};
globalThis.Option = class { constructor(name, value) { this.value = value; } };
let copied = null;
const clipboard = { async writeText(text) { copied = text; } };
Object.defineProperty(globalThis, "navigator", { value: { clipboard }, configurable: true });
globalThis.sessionStorage = { getItem: () => null, setItem() {} };
const fetchAt = globalThis.fetch;
globalThis.fetch = (path, options) => fetchAt(ADDRESS + path, options);
const by = (id) => document.getElementById(id);
by("temperature").value = "0";
by("max-tokens").value = "8";
by("send").hidden = false;
by("stop").hidden = true;
const shown = () => by("chat").children.map((one) => [
  one.className, one.children.filter((part) => part.tag !== "footer").map((p) => p.textContent),
]);
const notes = () => by("chat").children.flatMap((one) => one.children)
  .filter((part) => part.tag === "footer").map((part) => part.textContent);
async function until(condition) {
  while (!condition()) await new Promise((done) => setTimeout(done, 5));
}
async function submit(text) {
  by("text").value = text;
  by("form").listeners.submit({ preventDefault() {} });
}
