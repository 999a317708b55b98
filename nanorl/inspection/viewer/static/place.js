// Where one is: what the address says behind its #, so that every view has a link of its own.

export const FILTERS = ["phase", "outcome", "kind", "order", "steps", "task", "slice", "text"];

/** {view, run, phase, id, ...} of the address. */
export function here() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function link(place) {
  const there = Object.entries(place).filter(([, value]) => value);
  return `#${new URLSearchParams(there)}`;
}

/** Go on with the present place changed in some of its parts. */
export function go(changes, { replace = false } = {}) {
  const target = link({ ...here(), ...changes });
  if (target === location.hash) return;
  if (replace) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = target;
}

/** The filters of the present place. */
export function filters() {
  const place = here();
  return Object.fromEntries(FILTERS.map((name) => [name, place[name] ?? ""]));
}
