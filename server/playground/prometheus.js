// What the page reads of Prometheus' text format. Pure functions.

const LINE = /^(offramp_\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** The samples of a /metrics page: `{name, labels, value}`; only our own. */
export function parse(page) {
  const samples = [];
  for (const line of page.split("\n")) {
    const found = LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\[n"\\]/g, (escape) => ESCAPES[escape]);
    }
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

/** Sums of the samples called `name` that `keep` keeps, by the value of `label`. */
export function sums(samples, name, label, keep = () => true) {
  const found = new Map();
  for (const sample of samples) {
    if (sample.name !== name || !keep(sample.labels)) continue;
    const key = sample.labels[label] ?? "";
    found.set(key, (found.get(key) ?? 0) + sample.value);
  }
  return found;
}

/** `later - earlier`, key by key; a counter that fell has begun anew. */
export function increase(later, earlier) {
  return new Map(
    [...later].map(([key, value]) => {
      const before = earlier?.get(key) ?? 0;
      return [key, value >= before ? value - before : value];
    }),
  );
}

/** The total of a map of numbers. */
export const total = (numbers) => [...numbers.values()].reduce((sum, value) => sum + value, 0);

/** Cumulative buckets (upper bound as text to count) as `[lower, upper, count]`, from the first that holds any to the last. */
export function counts(buckets) {
  const bounds = [...buckets].map(([bound, count]) => [Number(bound.replace("+Inf", "Infinity")), count]);
  bounds.sort(([left], [right]) => left - right);
  const found = bounds.map(([upper, count], index) => {
    const [lower, before] = bounds[index - 1] ?? [0, 0];
    return [lower, upper, count - before];
  });
  const filled = found.map(([, , count]) => count > 0);
  return found.slice(Math.max(0, filled.indexOf(true)), filled.lastIndexOf(true) + 1);
}

/**
 * The `q`-quantile of such buckets, straight between the bounds of its bucket, as PromQL's histogram_quantile has it;
 * null where nothing was counted.
 */
export function quantile(buckets, q) {
  const parts = counts(buckets);
  const rank = q * parts.reduce((sum, [, , count]) => sum + count, 0);
  let before = 0;
  for (const [lower, upper, count] of parts) {
    if (before + count >= rank) return upper === Infinity ? lower : lower + ((upper - lower) * (rank - before)) / count;
    before += count;
  }
  return null;
}
