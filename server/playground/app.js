// The page: reads what the server serves, asks it about a text, and shows the way that the text took.

import { Problem, ask, curlOf, keepKey, readKey } from "./api.js";
import { comparison } from "./compare.js";
import { $, el } from "./dom.js";
import { watch } from "./live.js";
import { drawRoad } from "./road.js";
import { counted, milliseconds, percent, promise, quality, short, spoken, why } from "./words.js";

const SLIDER_PAUSE_MS = 120;

const EXAMPLES = {
  sentiment: [
    ["Somewhere in there is a good film."],
    ["A warm, funny and wonderfully acted story."],
    ["Less a film than a very long trailer for a better one."],
    ["It is not without charm, but the jokes are older than the cast."],
  ],
  pairs: [
    ["A man is playing a flute on a bench.", "Someone makes music outdoors."],
    ["The shop closes at six.", "The shop is open all night."],
    ["Two dogs run along the beach.", "The dogs belong to a fisherman."],
  ],
  texts: [
    ["I have been waiting for over a week now."],
    ["Could you tell me how this works?"],
    ["Thank you, that solved it at once."],
    ["The new version is slower than the old one, though it looks better."],
  ],
};

/** Models of /models, the one chosen, its stops on the slider (tiers, then null for full depth), what runs now. */
const page = { models: [], model: null, stops: [], defaultQuality: 0.99, running: null, pause: 0 };

const drawLive = watch($("live"), $("live-note"), $("live-numbers"), () => ({
  model: page.model,
  span: document.querySelector("input[name=span]:checked").value,
}));

async function start() {
  $("forget-key").hidden = !readKey();
  lockLinks(readKey() !== "");
  try {
    const [models, info] = await Promise.all([ask("models"), ask("info")]);
    page.models = models.document.models;
    page.defaultQuality = info.document.default_quality;
    $("version").textContent = info.document.version;
  } catch (problem) {
    show(problem);
    return;
  }
  hideProblem();
  $("model").replaceChildren(...page.models.map(({ name }) => el("option", { value: name }, name)));
  $("model").value = page.models.find((model) => model.default).name;
  chooseModel();
  await classify();
}

function chooseModel() {
  const model = page.models.find(({ name }) => name === $("model").value);
  page.model = model;
  page.stops = [...cheapest(model.tiers).sort((left, right) => left.quality - right.quality), null];
  const wanted = page.stops.findIndex((tier) => tier && tier.quality >= page.defaultQuality);
  Object.assign($("quality"), { max: page.stops.length - 1, disabled: page.stops.length === 1 });
  $("quality").value = wanted < 0 ? page.stops.length - 1 : wanted;
  $("stops").replaceChildren(
    ...page.stops.map((tier) => el("span", {}, tier ? short(tier.quality * 100) : "full")),
  );
  $("pair-field").hidden = !model.takes_pairs;
  $("text-label").textContent = model.takes_pairs ? "First text" : "Your text";
  offerExamples(model);
  describeQuality();
  forgetAnswer();
  drawLive();
}

/** Of several tiers of one quality, the one that the server takes. */
function cheapest(tiers) {
  const best = new Map();
  for (const tier of tiers) {
    const known = best.get(tier.quality);
    if (!known || tier.mean_cost < known.mean_cost) best.set(tier.quality, tier);
  }
  return [...best.values()];
}

function offerExamples(model) {
  const opinions = ["negative", "positive"].every((label) => model.labels.includes(label));
  const examples = EXAMPLES[model.takes_pairs ? "pairs" : opinions ? "sentiment" : "texts"];
  $("examples").replaceChildren(
    ...examples.map(([text, pair]) => {
      const button = el("button", { type: "button", class: "example" }, pair ? `${text} | ${pair}` : text);
      button.addEventListener("click", () => {
        write(text, pair);
        classify();
      });
      return button;
    }),
  );
  write(...examples[0]);
}

function write(text, pair = "") {
  $("text").value = text;
  $("pair").value = pair;
}

const chosenTier = () => page.stops[Number($("quality").value)];

function describeQuality() {
  const tier = chosenTier();
  const none = page.stops.length === 1 ? " No lower quality is certified for this model." : "";
  $("quality-help").textContent = promise(tier) + none;
  $("quality").setAttribute("aria-valuetext", tier ? `${short(tier.quality * 100)} percent` : "full depth");
  [...$("stops").children].forEach((stop, index) => {
    stop.classList.toggle("chosen", index === Number($("quality").value));
  });
}

/** The request for what the fields say, at `tier`. */
function requestAt(tier, explain) {
  const text = $("text").value;
  return {
    inputs: page.model.takes_pairs ? { text, text_pair: $("pair").value } : text,
    model: page.model.name,
    quality: tier ? tier.quality : 1,
    ...(explain && { explain }),
  };
}

async function classify() {
  if (!page.model) return;
  const signal = newest();
  const tier = chosenTier();
  const body = requestAt(tier, true);
  document.body.setAttribute("aria-busy", "true");
  try {
    const { document: answer, timing } = await ask("classify", { body, signal });
    hideProblem();
    showAnswer(answer, timing, tier, body);
  } catch (problem) {
    if (problem.name !== "AbortError") {
      forgetAnswer();
      show(problem);
    }
  } finally {
    if (page.running?.signal === signal) document.body.removeAttribute("aria-busy");
  }
}

/** Ends what still runs: only the newest request may draw. */
function newest() {
  page.running?.abort();
  page.running = new AbortController();
  return page.running.signal;
}

function showAnswer(answer, timing, tier, body) {
  const [result] = answer.results;
  const { exit } = result;
  const full = page.model.exits.at(-1).cost_in_layers;
  const facts = [
    ["Layers saved", `${exit.of - exit.layer} of ${exit.of}`],
    ["Work", exit.number === page.model.exits.length ? "all of it" : `${(full / exit.cost).toFixed(1)}× less`],
    ["Time", milliseconds(timing.tokenize + timing.queue + timing.inference)],
    ["Promise", exit.tier === null ? "none" : exit.tier === 1 ? "full depth" : quality(exit.tier)],
  ];
  $("sign").replaceChildren(
    el(
      "div",
      { class: "board" },
      el("p", { class: "tab" }, `Exit ${exit.number}`),
      el("p", { class: "label" }, result.label),
      el("p", { class: "score" }, percent(result.score)),
    ),
    el(
      "div",
      { class: "reasons" },
      el("p", { class: "why" }, why(exit, tier)),
      el("dl", { class: "facts-row" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      el(
        "p",
        { class: "help" },
        `In the server: ${milliseconds(timing.tokenize)} to cut the text into ${counted(result.tokens, "token")}, ` +
          `${milliseconds(timing.queue)} of waiting, ${milliseconds(timing.inference)} in the layers.` +
          (result.truncated ? " The text was longer than the model reads, and was cut." : ""),
      ),
    ),
  );
  $("start-tokens").textContent = counted(result.tokens, "token");
  drawRoad($("road"), page.model, tier, result);
  $("legend").textContent = legend(tier);
  $("curl").textContent = curlOf(body);
  $("answer").hidden = false;
  $("status").textContent = spoken(result, tier);
}

function legend(tier) {
  const criterion = tier?.criterion ?? "agreement";
  const lines = ["agreement", "confidence"].includes(criterion) ? "90 %, 99 % and 99.9 %" : "";
  return [
    lines && `The lines on a gauge stand at ${lines}: each step is ten times surer.`,
    tier && "The mark is what the chosen quality needs.",
    "At the foot stand the work until there, in layers, and the time that the last stretch took.",
  ]
    .filter(Boolean)
    .join(" ");
}

function forgetAnswer() {
  $("answer").hidden = true;
  $("status").textContent = "";
  $("comparison").replaceChildren();
}

async function compare() {
  const signal = newest();
  const rows = [];
  $("compare").disabled = true;
  try {
    // One after the other: side by side they would wait for each other, and the times would say so.
    for (const tier of page.stops) {
      // Unexplained: exits where a text may not leave are passed unread then, which is what full depth really takes.
      const { document: answer, timing } = await ask("classify", { body: requestAt(tier, false), signal });
      rows.push({ tier, result: answer.results[0], timing });
    }
    hideProblem();
    $("comparison").replaceChildren(comparison(page.model, rows));
  } catch (problem) {
    if (problem.name !== "AbortError") show(problem);
  } finally {
    $("compare").disabled = false;
  }
}

/** The server's refusal in its own words; for want of a key, the field for it. Anything else is a fault of this page. */
function show(problem) {
  if (!(problem instanceof Problem)) throw problem;
  const asksForKey = problem.status === 401;
  $("key-form").hidden = !asksForKey;
  if (asksForKey) {
    lockLinks(true);
    $("key").focus();
  }
  const heading = problem.status ? `${problem.status} ${problem.type}`.trim() : "No answer";
  $("problem").replaceChildren(
    el("strong", {}, heading),
    el("span", {}, `${problem.param ? `${problem.param}: ` : ""}${problem.message}`),
    ...(problem.retryAfter ? [el("span", {}, `Try again in ${problem.retryAfter} s.`)] : []),
  );
  $("problem").hidden = false;
}

/** Links carry no key, so where one is needed they lead nowhere. */
function lockLinks(locked) {
  for (const link of document.querySelectorAll("[data-needs-key]")) link.hidden = locked;
}

function hideProblem() {
  $("problem").hidden = true;
  $("problem").replaceChildren();
  $("key-form").hidden = true;
}

async function copyCurl() {
  const text = $("curl");
  try {
    await navigator.clipboard.writeText(text.textContent);
    $("copy").textContent = "Copied";
  } catch {
    // No clipboard outside of HTTPS and localhost: mark it, so that the keyboard can copy.
    getSelection().selectAllChildren(text);
    $("copy").textContent = "Marked: press Ctrl + C";
  }
  setTimeout(() => ($("copy").textContent = "Copy"), 2500);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  classify();
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) classify();
});
$("quality").addEventListener("input", () => {
  describeQuality();
  clearTimeout(page.pause);
  page.pause = setTimeout(classify, SLIDER_PAUSE_MS);
});
$("model").addEventListener("change", () => {
  chooseModel();
  classify();
});
for (const id of ["text", "pair"]) $(id).addEventListener("input", () => $("comparison").replaceChildren());
$("compare").addEventListener("click", compare);
$("copy").addEventListener("click", copyCurl);
for (const choice of document.querySelectorAll("input[name=span]")) choice.addEventListener("change", drawLive);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey($("key").value.trim());
  $("key").value = "";
  start();
});
$("forget-key").addEventListener("click", () => {
  keepKey("");
  location.reload();
});

start();
