// The report's curves: one uPlot chart for each, under one bar of controls; all charts share zoom and hover.
"use strict";

Report.charts = (() => {
  const { make, number } = Report;
  const HEIGHT = 210;
  const SHARES = [0, 0.02, 0.05, 0.1, 0.2, 0.4]; // of a line that a running mean goes over
  const FEW = 8; // a line with fewer points is not smoothed
  const T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]; // Student's t, 97.5 %

  const state = { smoothing: 2, log: false, axis: "iteration", seeds: "each", hidden: new Set(), zoom: null };
  const charts = [];
  let report = null;
  let observer = null;

  /** Returns running means over a centred window, narrower toward the ends, so that nothing is shifted. */
  function smooth(values, share) {
    const half = Math.floor((values.length * share) / 2);
    if (half < 1 || values.length < FEW) return values;
    const sums = [0];
    for (const value of values) sums.push(sums[sums.length - 1] + value);
    return values.map((_, i) => {
      const reach = Math.min(half, i, values.length - 1 - i);
      return (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1);
    });
  }

  /** Returns iterations as the chosen axis counts them: from 1, in cycles, or in hours. Values between known ones are
   * interpolated. */
  function onAxis(iterations, run) {
    if (state.axis === "iteration") return iterations.map((iteration) => iteration + 1);
    const clock = report.clocks[run];
    const known = clock[state.axis];
    let place = 0;
    return iterations.map((iteration) => {
      while (place < clock.iteration.length - 1 && clock.iteration[place + 1] <= iteration) place += 1;
      const next = Math.min(place + 1, known.length - 1);
      const width = clock.iteration[next] - clock.iteration[place];
      const share = width > 0 ? Math.min(1, Math.max(0, (iteration - clock.iteration[place]) / width)) : 0;
      return known[place] + share * (known[next] - known[place]);
    });
  }

  /** Returns the mean over runs at each iteration that one of them has; of several, with its 95 % interval. */
  function overSeeds(lines) {
    const found = new Map();
    for (const line of lines) {
      line.x.forEach((iteration, i) => found.set(iteration, [...(found.get(iteration) ?? []), line.y[i]]));
    }
    const x = [...found.keys()].sort((a, b) => a - b);
    const y = [], low = [], high = [];
    for (const iteration of x) {
      const values = found.get(iteration);
      const mean = values.reduce((a, b) => a + b, 0) / values.length;
      const spread = values.reduce((a, b) => a + (b - mean) ** 2, 0);
      const degrees = values.length - 1;
      const half = degrees ? (T[degrees - 1] ?? 1.96 + 2.6 / degrees) * Math.sqrt(spread / degrees / values.length) : 0;
      y.push(mean);
      low.push(mean - half);
      high.push(mean + half);
    }
    return { x, y, low, high };
  }

  /** Returns the lines of a chart that are to be drawn: {name, colour, dash, x, y, low, high}. */
  function drawn(chart) {
    const many = report.runs.length > 1;
    if (!many) {
      const bases = [...new Set(chart.lines.map((line) => base(line.name)))];
      return chart.lines.map((line) => ({
        ...line, colour: colour(bases.indexOf(base(line.name))), dash: line.name.startsWith("greedy "),
      }));
    }
    const shown = chart.lines.filter((line) => !state.hidden.has(line.run));
    if (state.seeds === "each") {
      return shown.map((line) => ({ ...line, name: report.runs[line.run].name, colour: report.runs[line.run].colour }));
    }
    return report.arms.map((label, arm) => {
      const own = shown.filter((line) => report.runs[line.run].arm === arm);
      return own.length === 0 ? null
        : { ...overSeeds(own), run: own[0].run, name: `${label} (${own.length})`,
          colour: colour(arm) };
    }).filter((line) => line !== null);
  }

  const colour = (place) => report.colours[place % report.colours.length];
  const base = (name) => name.replace(/^(greedy|sampled) /, "");
  const ink = () => getComputedStyle(document.body).color;

  /** Returns uPlot's data and series of a chart. Each line is drawn as measured, pale, and smoothed, on top. */
  function content(chart) {
    const lines = drawn(chart);
    const share = chart.dots || state.seeds === "mean" ? 0 : SHARES[state.smoothing];
    const positive = (values) => (chart.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = [], series = [{ label: state.axis }], bands = [];
    for (const line of lines) {
      const x = onAxis(line.x, line.run);
      const dots = chart.dots || x.length < FEW;
      const mean = smooth(line.y, share);
      const style = { stroke: line.colour, spanGaps: true, value: (_, value) => number(value) };
      const points = { show: dots, size: 6, fill: line.colour };
      if (line.low) {
        tables.push([x, positive(line.high), positive(line.low)]);
        bands.push({ series: [series.length, series.length + 1], fill: `${line.colour}2e` });
        const edge = { ...style, width: 0, points: { show: false }, hover: false };
        series.push({ ...edge, label: `${line.name} greatest` }, { ...edge, label: `${line.name} least` });
      } else if (mean !== line.y) {
        tables.push([x, positive(line.y)]);
        series.push({ ...style, width: 1, alpha: 0.3, label: `${line.name} as measured`, points: { show: false } });
      }
      tables.push([x, positive(mean)]);
      series.push({ ...style, width: 2, label: line.name, points, dash: line.dash ? [6, 4] : undefined });
    }
    const ready = tables.map((table) => inOrder(table));
    return { data: ready.length ? uPlot.join(ready) : [[]], series, bands, lines };
  }

  /** Returns a table by growing x with one row for each x: uPlot needs it, and a clock may stand still. */
  function inOrder([x, ...rest]) {
    const order = x.map((_, i) => i).sort((a, b) => x[a] - x[b] || a - b).filter((i, k, all) => x[i] !== x[all[k - 1]]);
    return order.length === x.length && order.every((i, k) => i === k)
      ? [x, ...rest]
      : [order.map((i) => x[i]), ...rest.map((column) => order.map((i) => column[i]))];
  }

  function options(chart, found) {
    const stroke = ink();
    const axis = { stroke, grid: { stroke: stroke.replace("rgb(", "rgba(").replace(")", ", 0.1)"), width: 1 },
      ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const values = (_, splits) => splits.map((split) => (split === null ? "" : number(split, 5)));
    return {
      width: Math.max(200, chart.box.clientWidth), height: HEIGHT, series: found.series, bands: found.bands,
      legend: { show: false },
      cursor: { sync: { key: "report", scales: ["x", null] }, drag: { x: true, y: false, setScale: false },
        points: { size: 7 } },
      scales: {
        x: { time: false, range: (_, least, most) => state.zoom ?? padded(least, most) },
        y: chart.log ? { distr: 3 } : {},
      },
      axes: [{ ...axis, size: 28, values }, { ...axis, size: 52, values }],
      hooks: {
        setSelect: [(plot) => zoomTo(plot)],
        setCursor: [(plot) => tell(chart, plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => zoom(null))],
      },
    };
  }

  const padded = (least, most) => (least === most ? [least - 1, most + 1] : [least, most]);

  function zoomTo(plot) {
    if (plot.select.width < 4) return;
    zoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
  }

  /** Shows the same part of the axis in all charts; null shows all of it. */
  function zoom(range) {
    state.zoom = range;
    document.getElementById("unzoom").hidden = range === null;
    refresh();
  }

  /** Writes the values under the pointer into the chart's legend: of the drawn lines, not of their edges. */
  function tell(chart, plot) {
    const place = plot.cursor.idx;
    chart.where.textContent = place === null || place === undefined
      ? "" : `${state.axis} ${number(plot.data[0][place], 6)}`;
    for (const [name, cell] of chart.cells) {
      const own = plot.series.findIndex((one) => one.label === name);
      cell.textContent = place === null || place === undefined ? "" : ` ${number(nearest(plot.data[own], place))}`;
    }
  }

  /** Returns the value at a place; where the line has none there, the one before. */
  function nearest(values, place) {
    for (let i = place; i >= 0; i -= 1) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  }

  function draw(chart) {
    chart.plot?.destroy();
    chart.stale = false;
    const found = content(chart);
    chart.cells = new Map();
    chart.where = make("span", { class: "where" });
    const items = found.lines.map((line) => {
      const cell = make("b");
      chart.cells.set(line.name, cell);
      const mark = make("i", { style: { background: line.colour }, class: line.dash ? "dashed" : null });
      return make("span", { title: line.broken || null }, mark, line.name, cell, line.broken ? " ⚠" : null);
    });
    chart.legend.replaceChildren(...items, chart.where);
    chart.plot = new uPlot(options(chart, found), found.data, chart.box);
  }

  /** Draws again what can be seen, and the rest when it comes into sight. */
  function refresh() {
    for (const chart of charts) {
      chart.stale = true;
      observer.unobserve(chart.box);
      observer.observe(chart.box);
    }
  }

  function setLog(chart, log) {
    chart.log = log;
    chart.button.setAttribute("aria-pressed", String(log));
    draw(chart);
  }

  /** Connects the controls of the page with what they do. */
  function connect() {
    const on = (id, type, act) => {
      const control = document.getElementById(id);
      control?.addEventListener(type, () => act(control));
    };
    on("smoothing", "input", (slider) => { state.smoothing = Number(slider.value); refresh(); });
    on("log-axes", "change", (box) => charts.forEach((chart) => setLog(chart, box.checked)));
    on("axis", "change", (list) => { state.axis = list.value; zoom(null); });
    on("seeds", "change", (list) => { state.seeds = list.value; refresh(); });
    on("find-curve", "input", (find) => charts.forEach((chart) => {
      chart.card.hidden = !chart.title.toLowerCase().includes(find.value.toLowerCase());
    }));
    on("unzoom", "click", () => zoom(null));
    const boxes = [...document.querySelectorAll("[data-run]")];
    const pick = (box) => state.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
    boxes.forEach((box) => box.addEventListener("change", () => { pick(box); refresh(); }));
    for (const [id, shown] of [["all-runs", true], ["no-runs", false]]) {
      on(id, "click", () => { boxes.forEach((box) => { box.checked = shown; pick(box); }); refresh(); });
    }
  }

  function start(found) {
    report = found;
    if (report.charts.length === 0) return;
    observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = charts.find((one) => one.box === entry.target);
        if (entry.isIntersecting && chart.stale) draw(chart);
      }
    }, { rootMargin: "300px" });
    for (const card of document.querySelectorAll("[data-chart]")) {
      const [box, legend, button] = [".plot", ".lines", ".log"].map((name) => card.querySelector(name));
      const chart = Object.assign(report.charts[card.dataset.chart], { card, box, legend, button, log: false });
      button.addEventListener("click", () => setLog(chart, !chart.log));
      charts.push(chart);
    }
    connect();
    refresh();
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth !== width) { width = window.innerWidth; refresh(); }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  }

  return { start, smooth, overSeeds, state, all: charts };
})();
