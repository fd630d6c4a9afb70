// The report's rollouts: filtered by the index, a page at a time; their HTML is unpacked only when it is shown.
"use strict";

Report.rollouts = (() => {
  const { make } = Report;
  const PAGE = 25; // rollouts at a time
  const CACHED = 40; // unpacked chunks that are kept
  const UNREADABLE = 2; // of `says`
  // elements of a rollout whose text the page has added
  const PAGE_WORDS = ".badges, .facts, .figures, .legend, .who, .badge, b, details details > summary";
  let index = null; // the columns, see shown_rollouts.Index
  let place = null; // the element that all of this is in
  let wanted = {}; // the filters: name -> value
  let found = []; // places in the index of rollouts that pass the filters
  let first = 0; // the first on the page shown
  let searched = 0; // number of the newest search
  const chunks = new Map();

  /** Returns the HTML of a rollout. */
  async function htmlOf(i) {
    const chunk = Math.floor(i / index.chunk);
    if (!chunks.has(chunk)) {
      chunks.set(chunk, Report.packed(`texts-${chunk}`));
      if (chunks.size > CACHED) chunks.delete(chunks.keys().next().value);
    }
    return (await chunks.get(chunk))[i % index.chunk];
  }

  /** Returns whether a rollout passes the filters that need no text. */
  function passes(i) {
    const says = index.says[i], truth = index.truth[i];
    const known = (says === 0 || says === 1) && truth >= 0;
    const within = (name, value) => {
      const least = wanted[`${name}-least`] ?? "", most = wanted[`${name}-most`] ?? "";
      if (least === "" && most === "") return true;
      return value !== null && (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
    };
    const is = (name, value) => (wanted[name] ?? "") === "" || Number(wanted[name]) === value;
    const verdict = { "": true, disagrees: known && says !== truth, agrees: known && says === truth, correct: says === 1,
      wrong: says === 0, unreadable: says === UNREADABLE };
    return is("run", index.run[i]) && is("role", index.role[i]) && is("agent", index.agent[i])
      && is("outcome", index.outcome[i]) && verdict[wanted.verdict ?? ""] && within("reward", index.reward[i])
      && within("length", index.length[i])
      && within("iteration", index.iteration[i] + 1) && within("steps", index.steps[i]);
  }

  /** Finds the rollouts that pass all filters and shows the first page. */
  async function filter() {
    place.querySelector("#rollout-count").textContent = "looking …";
    const own = (searched += 1);
    const candidates = index.run.map((_, i) => i).filter(passes);
    order(candidates);
    const words = (wanted.words ?? "").toLowerCase();
    if (words !== "") {
      found = [];
      for (const i of candidates) {
        if (textOf(await htmlOf(i)).toLowerCase().includes(words)) found.push(i);
        if (own !== searched) return; // another search has begun
      }
    } else {
      found = candidates;
    }
    if (own === searched) await show(0);
  }

  /** Returns the texts of a rollout without the words of the page, such as "✓ correct" and "answer 1 of 3". */
  function textOf(html) {
    const parsed = parse(html);
    parsed.querySelectorAll(PAGE_WORDS).forEach((one) => one.remove());
    return parsed.textContent;
  }

  function parse(html) {
    const parsed = document.createElement("template");
    parsed.innerHTML = html;
    return parsed.content;
  }

  function order(places) {
    const column = { reward: index.reward, length: index.length, steps: index.steps }[wanted.order];
    const value = wanted.order === "advantage" ? (i) => Math.abs(index.advantage[i] ?? 0)
      : (i) => column[i] ?? -Infinity;
    if (wanted.order === "late") places.reverse();
    else if ((wanted.order ?? "") !== "") places.sort((a, b) => value(b) - value(a) || a - b);
  }

  /** Shows the page that begins with the `start`-th of the found rollouts. */
  async function show(start) {
    place.querySelector("#rollout-count").textContent = "looking …";
    first = Math.max(0, Math.min(start, Math.floor((found.length - 1) / PAGE) * PAGE));
    const shown = found.slice(first, first + PAGE);
    const rows = await Promise.all(shown.map(htmlOf));
    const [from, to, of] = [first + 1, first + shown.length, found.length].map((count) => count.toLocaleString());
    place.querySelector("#rollout-count").textContent = found.length === 0 ? "no rollout passes these filters"
      : `${from}–${to} of ${of}`;
    place.querySelector("#rollouts-before").disabled = first === 0;
    place.querySelector("#rollouts-after").disabled = first + PAGE >= found.length;
    place.querySelector("#rollout-page").replaceChildren(...shown.map((i, k) => item(i, rows[k])));
  }

  /** Returns the element of a rollout: one line of the list, which unfolds to the rollout. */
  function item(i, html) {
    const whole = parse(html).querySelector(".sample");
    whole.dataset.rollout = i;
    whole.addEventListener("toggle", () => colour(whole), { once: true });
    if (index.runs.length > 1) whole.querySelector(".facts").prepend(`${index.runs[index.run[i]]} · `);
    whole.append(others(i) ?? "");
    return whole;
  }

  /** Colours the parts of a conversation by their advantages, and tells the advantages when the mouse is on them. */
  function colour(whole) {
    for (const part of whole.querySelectorAll("[data-advantage]")) {
      const { advantage } = part.dataset;
      const share = Math.round(60 * Math.min(1, Math.abs(advantage) / whole.dataset.most));
      part.title = advantage;
      part.style.background = `color-mix(in srgb, var(${advantage > 0 ? "--good" : "--bad"}) ${share}%, transparent)`;
    }
  }

  /** Returns a button that adds the other agents of the episode; null where there are none on the page. */
  function others(i) {
    const episode = index.episode[i];
    const agents = episode < 0 ? [] : index.episode.map((one, k) => (one === episode && k !== i ? k : -1));
    const own = agents.filter((k) => k >= 0);
    if (own.length === 0) return null;
    const button = make("button", { type: "button", class: "others", onclick: async () => {
      const items = await Promise.all(own.map(async (k) => item(k, await htmlOf(k))));
      items.forEach((one) => { one.open = true; });
      button.replaceWith(...items);
    } }, `show the other ${own.length === 1 ? "agent" : `${own.length} agents`} of this episode`);
    return button;
  }

  function start() {
    place = document.getElementById("rollout-list");
    index = place === null ? null : Report.data("rollouts-data");
    if (index === null) return;
    const controls = [...place.querySelectorAll("[data-filter]")];
    for (const control of controls) {
      control.addEventListener(control.type === "number" ? "input" : "change", () => {
        wanted[control.dataset.filter] = control.value;
        filter();
      });
    }
    const on = (id, act) => document.getElementById(id).addEventListener("click", act);
    on("rollout-reset", () => {
      wanted = {};
      controls.forEach((control) => { control.value = ""; });
      filter();
    });
    on("rollouts-before", () => show(first - PAGE));
    on("rollouts-after", () => show(first + PAGE));
    filter();
  }

  return { start };
})();

Report.charts.start(Report.data("report-data"));
Report.rollouts.start();
