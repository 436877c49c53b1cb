// What the server does now, from its own metrics: read every few seconds while somebody looks.

import { read } from "./api.js";
import { el } from "./dom.js";
import { counts, increase, parse, quantile, sums, total } from "./prometheus.js";
import { counted, milliseconds, percent } from "./words.js";

const EVERY_MS = 3000;
const MINUTE_MS = 60_000;

/**
 * Keeps `numbers` and `note` up to date. `choice()` says `{model, span}`: a model of /models (or null), and `minute` or
 * `start`. Returns a function that draws at once.
 */
export function watch(section, note, numbers, choice) {
  const snapshots = [];
  let visible = false;
  let elsewhere = false;
  let watching = false;

  async function wake() {
    if (watching) return;
    watching = true;
    while (visible && !document.hidden && !elsewhere) {
      await poll();
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
    watching = false;
  }

  async function poll() {
    try {
      snapshots.push({ at: performance.now(), samples: parse(await read("metrics")) });
      while (snapshots.length > 2 && snapshots[1].at < snapshots.at(-1).at - MINUTE_MS) snapshots.shift();
      draw();
    } catch (problem) {
      elsewhere = problem.status === 404;
      note.textContent = elsewhere
        ? "This server publishes its metrics on a port of its own, which this page cannot read."
        : `No metrics: ${problem.message}. Trying again.`;
      numbers.replaceChildren();
    }
  }

  function draw() {
    const { model, span } = choice();
    if (!model || snapshots.length === 0) return;
    const now = snapshots.at(-1);
    const then = span === "minute" ? snapshots[0] : null;
    const seen = figures(now.samples, then?.samples, model);
    const seconds = then ? Math.round((now.at - then.at) / 1000) : null;
    note.textContent =
      seconds === null
        ? `${counted(seen.texts, "text")} classified by ${model.name} since the server started.`
        : `${counted(seen.texts, "text")} classified by ${model.name} in the ${counted(seconds, "second")} that this page has watched.`;
    numbers.replaceChildren(...panels(model, seen));
  }

  new IntersectionObserver(([entry]) => {
    visible = entry.isIntersecting;
    wake();
  }).observe(section);
  document.addEventListener("visibilitychange", wake);
  return draw;
}

/** What happened between two readings of the metrics (`before` may be undefined: since the start). */
function figures(after, before, model) {
  const ours = (labels) => labels.model === model.name;
  const moved = (name, label) =>
    increase(sums(after, name, label, ours), before && sums(before, name, label, ours));
  const exits = moved("offramp_exits_total", "exit");
  const run = total(moved("offramp_layers_run_total", "model"));
  const spared = total(moved("offramp_layers_saved_total", "model"));
  return {
    exits,
    texts: total(exits),
    buckets: moved("offramp_request_duration_seconds_bucket", "le"),
    saved: run + spared ? spared / (run + spared) : null,
    inWork: total(sums(after, "offramp_inflight_requests", "")),
    waiting: total(sums(after, "offramp_queue_depth", "segment", ours)),
  };
}

function panels(model, seen) {
  const time = (q) => {
    const seconds = quantile(seen.buckets, q);
    return seconds === null ? "–" : milliseconds(seconds * 1000);
  };
  const facts = [
    ["Half of requests within", time(0.5)],
    ["99 % within", time(0.99)],
    ["Layers saved", seen.saved === null ? "–" : percent(seen.saved)],
    ["Requests in work", String(seen.inWork)],
    ["Texts waiting", String(seen.waiting)],
  ];
  return [
    el("dl", { class: "facts-row" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    chart(
      "Where texts left",
      model.exits.map(({ number }) => [`Exit ${number}`, seen.exits.get(String(number)) ?? 0]),
    ),
    chart(
      "How long requests took",
      counts(seen.buckets).map(([lower, upper, count]) => [
        upper === Infinity ? `over ${milliseconds(lower * 1000)}` : `up to ${milliseconds(upper * 1000)}`,
        count,
      ]),
    ),
  ];
}

/** Bars of `[name, count]`, each as a share of them all. */
function chart(title, rows) {
  const all = rows.reduce((sum, [, count]) => sum + count, 0);
  return el(
    "div",
    { class: "chart" },
    el("h3", {}, title),
    el(
      "ul",
      { class: "labels" },
      ...rows.map(([name, count]) =>
        el(
          "li",
          {},
          el("span", { class: "name" }, name),
          el("span", { class: "share" }, all ? percent(count / all) : "–"),
          el("span", { class: "bar", "--share": all ? count / all : 0, "aria-hidden": "true" }),
        ),
      ),
    ),
  );
}
