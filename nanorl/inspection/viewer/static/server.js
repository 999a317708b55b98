// Asking the server. The key came behind the # of the printed address, and leaves it at once. It is
// kept for this address and port, which no other server's page can read, so that links and new tabs
// work until the viewer ends.

const KEY = "nanorl-view-key";
const opened = new URLSearchParams(location.hash.slice(1));
if (opened.has("key")) {
  localStorage.setItem(KEY, opened.get("key"));
  opened.delete("key");
  history.replaceState(null, "", `${location.pathname}#${opened}`);
}

function headers() {
  const key = localStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function address(path, query) {
  const there = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined);
  const words = new URLSearchParams(there).toString();
  return words ? `${path}?${words}` : path;
}

/** The JSON of an answer. An Error with the server's own words where it refuses. */
export async function ask(path, query = {}, signal = undefined) {
  const answer = await fetch(address(`api/${path}`, query), { headers: headers(), signal });
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error);
  return data;
}

/** The file of an answer. */
export async function askFile(path, query = {}) {
  const answer = await fetch(address(`api/${path}`, query), { headers: headers() });
  if (!answer.ok) throw new Error((await answer.json()).error);
  return answer.blob();
}

/** The parts of an HTML answer of our own server: read by the browser in a document of its own, in
 * which nothing runs. */
export function askDrawing(path, query = {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("GET", address(path, query));
    request.responseType = "document";
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.onload = () => {
      if (request.status === 200) {
        resolve([...request.responseXML.body.childNodes].map((n) => document.importNode(n, true)));
      } else reject(new Error(`the server answered ${request.status}`));
    };
    request.onerror = () => reject(new Error("the server does not answer"));
    request.send();
  });
}
