// The server's metrics: reading Prometheus' text, and what has changed between two readings.

/** Name -> [[labels, value], ...] of the server's own metrics. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split('\n')) {
    const match = /^headrace[:_](\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push([labels, Number(match[3])]);
  }
  return found;
}

/** The sum over all labels; null if the server has no such metric. */
export function total(metrics, name) {
  const values = metrics.get(name);
  return values ? values.reduce((sum, [, value]) => sum + value, 0) : null;
}

export function mean(metrics, name) {
  const sum = total(metrics, name);
  return sum === null ? null : sum / metrics.get(name).length;
}

/** How much a counter has grown; what it is now if the server was restarted in between. */
export function growth(before, now, name) {
  const [from, to] = [total(before, name), total(now, name)];
  if (from === null || to === null) return null;
  return to >= from ? to - from : to;
}

/** Quantiles of what a histogram counted between two readings, linear within a bucket; null if it counted nothing. */
export function quantiles(before, now, name, shares) {
  const at = (metrics) => new Map((metrics.get(`${name}_bucket`) ?? []).map(([labels, value]) => [Number(labels.le.replace('+Inf', 'Infinity')), value]));
  const [old, fresh] = [at(before), at(now)];
  const isRestarted = [...fresh].some(([bound, value]) => value < (old.get(bound) ?? 0));
  const counts = [...fresh].map(([bound, value]) => [bound, isRestarted ? value : value - (old.get(bound) ?? 0)]).sort((a, b) => a[0] - b[0]);
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return shares.map(() => null);
  return shares.map((share) => {
    const wanted = share * all;
    let [low, below] = [0, 0];
    for (const [bound, count] of counts) {
      if (count >= wanted) return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / (count - below);
      [low, below] = [bound, count];
    }
    return low;
  });
}
