// One text at every quality, side by side.

import { el } from "./dom.js";
import { milliseconds, percent, quality, short } from "./words.js";

/** A table of `rows`: `{tier, result, timing}` for each stop of the slider, shallowest first. */
export function comparison(model, rows) {
  const deepest = rows.at(-1).result.label;
  return el(
    "table",
    { class: "comparison" },
    el("caption", { class: "unseen" }, "The same text at every quality"),
    el("thead", {}, el("tr", {}, ...["Quality", "Answer", "Way", "Time"].map((name) => el("th", { scope: "col" }, name)))),
    el(
      "tbody",
      {},
      ...rows.map(({ tier, result, timing }) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, tier ? quality(tier.quality) : "full depth"),
          el(
            "td",
            { class: result.label === deepest ? "" : "differs" },
            result.label,
            " ",
            el("small", {}, percent(result.score)),
            result.label === deepest ? null : el("small", { class: "unlike" }, " unlike full depth"),
          ),
          el(
            "td",
            {},
            way(model, result.exit),
            el("small", {}, `exit ${result.exit.number}, ${short(result.exit.cost)} layers of work`),
          ),
          el("td", { class: "number" }, milliseconds(timing.tokenize + timing.queue + timing.inference)),
        ),
      ),
    ),
  );
}

/** The road as a line: how far the text went, and where the exits are. */
function way(model, exit) {
  const full = model.exits.at(-1).cost_in_layers;
  const place = (number) => model.exits[number - 1].cost_in_layers / full;
  return el(
    "span",
    { class: "way", "--at": place(exit.number), "aria-hidden": "true" },
    ...model.exits.map(({ number }) => el("span", { class: number === exit.number ? "here" : "", "--at": place(number) })),
  );
}
