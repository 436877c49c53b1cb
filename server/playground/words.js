// Numbers and reasons in words that need no manual. Pure functions.

// No line ends between a number and its unit.
const GAP = "\u00a0";

/** 0.98765 as `98.7 %`; rounded down, so that only 1 is called 100 %. */
export function percent(share, digits = 1) {
  const scale = 10 ** (digits + 2);
  return share === 1 ? `100${GAP}%` : `${(Math.floor(share * scale + 1e-9) / 10 ** digits).toFixed(digits)}${GAP}%`;
}

/** The same with two decimals from 95 % on, where thresholds crowd. */
const fine = (share) => percent(share, share >= 0.95 ? 2 : 1);

/** A certified quality as it is written: 0.995 as `99.5 %`. */
export const quality = (share) => `${short(share * 100)}${GAP}%`;

/** 0.99 as `99 of 100`, 0.995 as `995 of 1,000`. */
export function outOf(share) {
  const hundred = share * 100;
  return Math.abs(hundred - Math.round(hundred)) < 1e-9
    ? `${Math.round(hundred)} of 100`
    : `${Math.round(share * 1000)} of 1,000`;
}

/** Milliseconds with as many digits as they deserve. */
export function milliseconds(ms) {
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)}${GAP}ms`;
}

/** `1 layer`, `6 layers`. */
export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** A number with at most two decimals. */
export const short = (number) => String(Math.round(number * 100) / 100);

/**
 * Where a probability stands on a gauge from 50 % to 99.95 %, 0 to 1: every ninth more (90 %, 99 %, 99.9 %) is the same
 * step, since thresholds crowd near 1.
 */
export function onGauge(probability) {
  const step = Math.log10(0.5 / Math.max(1 - probability, 5e-4)) / 3;
  return Math.min(1, Math.max(0, step));
}

/** What the slider's stop promises. `tier` is one of /models, or null for full depth. */
export function promise(tier) {
  if (!tier) return "Full depth: every text goes to the last exit. The model's own answer, and all of its work.";
  return (
    `At least ${outOf(tier.quality)} answers are the ones that full depth would give: certified. ` +
    `On average ${tier.speedup.toFixed(1)} times less work.`
  );
}

/**
 * How sure an exit was by the tier's criterion, and how sure was enough. Returns `{name, value, needs, at, mark}`: words,
 * and places on a gauge from 0 to 1. `streak` counts exits in a row that agreed with the one before.
 */
export function sureness(exit, tier, streak) {
  const criterion = tier?.criterion ?? "agreement";
  const threshold = tier?.threshold;
  if (criterion === "patience") {
    const most = threshold + 1;
    return {
      name: "Same answer in a row",
      value: String(streak),
      needs: String(threshold),
      at: Math.min(1, streak / most),
      mark: threshold / most,
    };
  }
  const [name, value, place] = {
    agreement: ["Same as full depth", exit.agreement, onGauge],
    confidence: ["Sure of its label", exit.confidence, onGauge],
    entropy: ["Undecided", exit.entropy, (entropy) => 1 - entropy],
  }[criterion];
  return {
    name,
    value: fine(value),
    needs: threshold === undefined ? null : `${criterion === "entropy" ? "at most " : ""}${fine(threshold)}`,
    at: place(value),
    mark: threshold === undefined ? null : place(threshold),
  };
}

/** Why a text left where it did, in one sentence. `exit` is that of an answer, `tier` as above. */
export function why(exit, tier) {
  const here = `Exit ${exit.number}`;
  switch (exit.reason) {
    case "agreement":
      return (
        `${here} puts the chance that full depth would say the same at ${fine(exit.agreement)}. ` +
        `For ${outOf(tier.quality)} answers to match it, ${fine(tier.threshold)} is enough: the text left here.`
      );
    case "confidence":
      return `${here} gives its label ${fine(exit.confidence)}; the quality you asked for takes ${fine(tier.threshold)}.`;
    case "entropy":
      return `${here} was ${fine(exit.entropy)} undecided; the quality you asked for allows ${fine(tier.threshold)}.`;
    case "patience":
      return `${here} said the same as the exits before it, ${counted(tier.threshold, "time")} in a row: enough for the quality you asked for.`;
    case "deadline":
      return `The server's deadline came first: this is what ${here.toLowerCase()} said, without a promise.`;
    case "max_exit":
      return `${here} was the deepest that this request allowed.`;
    default:
      return tier
        ? "No earlier exit was sure enough, so the text went to the last one: the model's own answer."
        : "You asked for full depth, so the text passed every exit but the last.";
  }
}

/** What a passed exit decided. */
export function verdict(tier) {
  return tier ? "not sure enough" : "drives on";
}

/** An answer for people who listen. */
export function spoken(result, tier) {
  const { exit, label, score } = result;
  return `${label}, ${percent(score)}. Left at exit ${exit.number}, ${saved(exit)}. ${why(exit, tier)}`;
}

/** `6 of 6 layers saved`. */
const saved = (exit) => `${exit.of - exit.layer} of ${counted(exit.of, "layer")} saved`;
