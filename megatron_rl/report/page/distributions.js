// How rewards and lengths of the rollouts that pass the filters are spread, in the first and in the last iterations.
"use strict";

Report.distributions = (() => {
  const { make, number } = Report;
  const BINS = 20;
  const WINDOW = 0.2; // the first iterations are this share of all, and so are the last iterations

  /** Returns a card for each column that varies. `places`: of the rollouts that are counted. */
  function cards(index, places) {
    const iterations = places.map((i) => index.iteration[i]);
    const least = iterations.reduce((a, b) => Math.min(a, b), Infinity);
    const most = iterations.reduce((a, b) => Math.max(a, b), -1);
    if (most <= least) return [];
    const width = WINDOW * (most - least);
    const parts = [["first iterations", "early", places.filter((i) => index.iteration[i] <= least + width)],
      ["last iterations", "late", places.filter((i) => index.iteration[i] >= most - width)]];
    return [["reward", index.reward], ["tokens", index.length], ["reasoning steps", index.steps]]
      .map(([name, column]) => card(name, column, parts)).filter((one) => one !== null);
  }

  function card(name, column, parts) {
    const values = parts.map(([, , own]) => own.map((i) => column[i]).filter((value) => value !== null));
    const all = values.flat();
    const low = all.reduce((a, b) => Math.min(a, b), Infinity), high = all.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!(high > low)) return null;
    const shares = values.map((own) => counted(own, low, high));
    const tallest = Math.max(...shares.flat());
    const edge = (bin) => number(low + ((high - low) * bin) / BINS, 3);
    const height = (share) => ({ height: `${(100 * share) / tallest}%` });
    const bars = [...Array(BINS).keys()].map((bin) => {
      const told = parts.map(([part], k) => `${(100 * shares[k][bin]).toFixed(1)} % of the ${part}`).join(", ");
      return make("div", { title: `${edge(bin)} to ${edge(bin + 1)}: ${told}` },
        parts.map(([, tone], k) => make("i", { class: tone, style: height(shares[k][bin]) })));
    });
    const mean = (own) => number(own.reduce((a, b) => a + b, 0) / Math.max(1, own.length), 3);
    return make("div", { class: "card distribution" }, make("h3", {}, name), make("div", { class: "bars" }, bars),
      make("p", { class: "ends" }, make("span", {}, number(low, 3)), make("span", {}, number(high, 3))),
      make("p", { class: "legend" }, parts.map(([part, tone], k) => make("span", {}, make("i", { class: tone }),
        `${part}, mean ${mean(values[k])}`))));
  }

  /** Returns the share of the values in each bin. */
  function counted(values, low, high) {
    const counts = Array(BINS).fill(0);
    for (const value of values) counts[Math.min(BINS - 1, Math.floor((BINS * (value - low)) / (high - low)))] += 1;
    return counts.map((count) => count / Math.max(1, values.length));
  }

  return { cards };
})();
