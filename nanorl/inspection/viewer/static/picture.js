// A picture where it stands among texts: a small image, a line about it, and a click for its own
// size. Files come by their hash, with the key, when they are about to be seen; what is not there,
// or is no picture, is a line that says so.

import { askFile } from "./server.js";
import { el, put } from "./text.js";

const HASH_CHARS = 12;
const soon = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    soon.unobserve(entry.target);
    entry.target.dispatchEvent(new Event("load-picture"));
  }
}, { scrollMargin: "400px" });

/** The picture of a part of a message, `{sha256, title}`, of the run of a place. */
export function picture(part, place) {
  const line = el("figcaption", { class: "soft" }, part.title);
  const image = el("img", { class: "small", alt: part.title, decoding: "async" });
  const button = el("button", {
    type: "button", class: "plain", "aria-expanded": "false", "aria-label": `${part.title}: its own size`,
    onclick: () => enlarge(button, image, line, part),
  }, image);
  const figure = el("figure", { class: "picture", "data-sha256": part.sha256 }, button, line);
  const fail = (reason) => {
    button.remove();
    put(line, ` · sha256 ${part.sha256.slice(0, HASH_CHARS)}: ${reason}`);
  };
  figure.addEventListener("load-picture", async () => {
    try {
      const address = URL.createObjectURL(await askFile("picture", { run: place.run, sha256: part.sha256 }));
      image.onload = () => URL.revokeObjectURL(address);
      image.onerror = () => {
        URL.revokeObjectURL(address);
        fail("it cannot be shown");
      };
      image.src = address;
    } catch (error) {
      fail(error.message);
    }
  });
  soon.observe(figure);
  return figure;
}

function enlarge(button, image, line, part) {
  const isLarge = button.getAttribute("aria-expanded") !== "true";
  button.setAttribute("aria-expanded", String(isLarge));
  image.classList.toggle("small", !isLarge);
  line.replaceChildren(part.title);
  if (isLarge) put(line, ` · the file: ${image.naturalWidth} x ${image.naturalHeight}, sha256 ${part.sha256.slice(0, HASH_CHARS)}`);
}
