// The picture: a road of layers, an off-ramp at every exit, and how sure the network was at each.

import { el, svg } from "./dom.js";
import { counted, milliseconds, percent, short, sureness, verdict } from "./words.js";

const MOST_LABELS = 3;
// More exits than this never stand side by side; style.css turns the road upright where they would not fit.
const MOST_ABREAST = 6;

/**
 * Draws the way of `result`, an answer with `explain` (so that it has a reading for every exit up to the one taken), past
 * the exits of `model` into `list`. `tier` is the certified tier that was asked for, null for full depth.
 */
export function drawRoad(list, model, tier, result) {
  const readings = result.exits;
  const streaks = streaksOf(readings);
  list.parentElement.classList.toggle("abreast", model.exits.length <= MOST_ABREAST);
  list.style.setProperty("--exits", model.exits.length);
  list.replaceChildren(
    ...model.exits.map((exit, index) => {
      const reading = readings[index];
      const taken = reading !== undefined && index === readings.length - 1;
      const state = reading === undefined ? "ahead" : taken ? "taken" : "passed";
      const layers = layersBefore(model, index);
      return el(
        "li",
        { "data-state": state, "--place": index, "--ticks": layers.length, ...(taken && { "aria-current": "step" }) },
        lane(layers),
        el(
          "div",
          { class: "sign" },
          el("h3", {}, `Exit ${exit.number}`),
          el("p", { class: "where" }, exit.after_layer === 0 ? "before layer 1" : `after layer ${exit.after_layer}`),
          ...(reading === undefined
            ? [el("p", { class: "verdict" }, "not needed")]
            : boards(reading, tier, streaks[index], taken, index === model.exits.length - 1)),
        ),
      );
    }),
  );
}

/** The labels as bars, the likeliest first. */
function labelBars(scores) {
  const shown = scores.slice(0, MOST_LABELS);
  const more = scores.length - shown.length;
  return el(
    "ul",
    { class: "labels" },
    ...shown.map(({ label, score }) =>
      el(
        "li",
        {},
        el("span", { class: "name" }, label),
        el("span", { class: "share" }, percent(score)),
        el("span", { class: "bar", "--share": score, "aria-hidden": "true" }),
      ),
    ),
    more > 0 ? el("li", { class: "more" }, `and ${counted(more, "other label")}`) : null,
  );
}

/** What a sign says of an exit that was read: its labels, how sure it was, what it decided, and what it cost. */
function boards(reading, tier, streak, taken, last) {
  const { name, value, needs, at, mark } = sureness(reading, tier, streak);
  const parts = [labelBars(reading.scores)];
  if (!last) {
    parts.push(
      el(
        "div",
        { class: "sure" },
        el("span", { class: "name" }, name),
        el("span", { class: "share" }, value),
        el("span", { class: "needs" }, tier && needs ? `needs ${needs}` : ""),
        el(
          "span",
          { class: "gauge", "--at": at, "aria-hidden": "true" },
          tier && mark !== null ? el("span", { class: "mark", "--at": mark }) : null,
        ),
      ),
    );
  }
  parts.push(el("p", { class: "verdict" }, taken ? "leaves here" : verdict(tier)));
  const work = el("span", {}, `${short(reading.cost)} layers`);
  parts.push(el("p", { class: "facts" }, work, el("span", {}, milliseconds(reading.inference_ms))));
  return parts;
}

/** How many exits in a row agreed with the one before, up to and with each. */
function streaksOf(readings) {
  let streak = 0;
  return readings.map((reading, index) => {
    streak = index > 0 && readings[index - 1].label === reading.label ? streak + 1 : 0;
    return streak;
  });
}

/** The layers between the exit before and this one. */
function layersBefore(model, index) {
  const from = index === 0 ? 0 : model.exits[index - 1].after_layer;
  return Array.from({ length: model.exits[index].after_layer - from }, (_, step) => from + step + 1);
}

/** A stretch of road, its layers as milestones, and the ramp at its end; style.css lays it along or upright. */
function lane(layers) {
  const ramp = (name, ...lines) =>
    svg(
      "svg",
      { class: `ramp ${name}`, viewBox: "0 0 60 64", width: 60, height: 64 },
      ...lines.map((line) => svg("path", { class: line, d: "M0 11C34 11 48 20 48 64", pathLength: line === "driven" && 1 })),
    );
  return el(
    "div",
    { class: "lane", "aria-hidden": "true" },
    ramp("below", "edge", "line"),
    el("span", { class: "asphalt" }),
    el("span", { class: "route" }),
    ramp("above", "driven"),
    el("span", { class: "layers" }, ...layers.map((layer) => el("span", {}, String(layer)))),
  );
}
