// Requests to the server that this page came from. Addresses are relative: the server may live behind a path prefix.

const KEY = "offramp-key";
let keyInMemory = "";

/** What the server, or the way to it, refused: `status` is 0 where no answer came. */
export class Problem extends Error {
  constructor(status, { type = "", message, param = null }, retryAfter = null) {
    super(message);
    Object.assign(this, { status, type, param, retryAfter });
  }
}

/** The key of this tab; an empty string means none. */
export function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? keyInMemory;
  } catch {
    return keyInMemory; // storage is switched off
  }
}

/** Keeps `key` for this tab; an empty string forgets it. */
export function keepKey(key) {
  keyInMemory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // storage is switched off: memory it is
  }
}

/**
 * The server's answer to `path`, posted where there is a `body`: `{document, timing}`, timing in ms by the names of its
 * Server-Timing header. Throws a Problem.
 */
export async function ask(path, { body, signal } = {}) {
  const response = await send(path, { body, signal });
  return { document: await response.json(), timing: timingOf(response.headers.get("server-timing") ?? "") };
}

/** The text behind `path`. Throws a Problem. */
export async function read(path) {
  return (await send(path, {})).text();
}

async function send(path, { body, signal }) {
  const headers = {};
  const key = readKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { message: "the server cannot be reached" });
  }
  if (response.ok) return response;
  const retryAfter = response.headers.get("retry-after");
  let told;
  try {
    told = (await response.json()).error;
  } catch {
    // not the server's own words: a proxy's, perhaps
  }
  throw new Problem(response.status, told ?? { message: response.statusText || "no reason was given" }, retryAfter);
}

/** `tokenize;dur=0.3, queue;dur=0.1` as `{tokenize: 0.3, queue: 0.1}`. */
function timingOf(header) {
  return Object.fromEntries([...header.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]));
}

/** The request as a command for a shell. The key stays out: the command names a variable. */
export function curlOf(body) {
  const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;
  const parts = [
    `curl -s ${quoted(new URL("classify", document.baseURI).href)}`,
    "-H 'Content-Type: application/json'",
    ...(readKey() ? ['-H "Authorization: Bearer $OFFRAMP_KEY"'] : []),
    `-d ${quoted(JSON.stringify(body))}`,
  ];
  return parts.join(" \\\n  ");
}
