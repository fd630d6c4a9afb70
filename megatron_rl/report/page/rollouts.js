// The report's rollouts: filtered by the index, a page at a time; texts are unpacked only when they are shown.
"use strict";

Report.rollouts = (() => {
  const { make, number, signed } = Report;
  const PAGE = 25; // rollouts at a time
  const CACHED = 40; // unpacked chunks that are kept
  const MAX_OPEN = 1500; // characters; longer turns of a conversation are folded
  const ENVIRONMENT = 2, PARTNER = 1; // authors of pieces
  const UNREADABLE = 2; // of `says`
  // Calls of tools in the forms that models write them: in tags, or as a block of code. The last one may be cut short.
  const TAGS = "tool_call|function_call|function|tool|python|calculator|code|bash|search|query";
  const CALL = new RegExp(`<(${TAGS})\\b[^<>]*>[^]*?(?:</\\1>|$)|\`\`\`[^]*?(?:\`\`\`|$)`, "g");

  let index = null; // the columns, see shown_rollouts.Index
  let place = null; // the element that all of this is in
  let wanted = {}; // the filters: name -> value
  let found = []; // places in the index of rollouts that pass the filters
  let first = 0; // the first on the page shown
  let searched = 0; // number of the newest search
  const chunks = new Map();

  /** Returns the texts of a rollout. */
  async function textsOf(i) {
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
        if (JSON.stringify(Object.values(await textsOf(i))).toLowerCase().includes(quoted(words))) found.push(i);
        if (own !== searched) return; // another search has begun
      }
    } else {
      found = candidates;
    }
    if (own === searched) await show(0);
  }

  const quoted = (words) => JSON.stringify(words).slice(1, -1);

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
    if (start === 0) {
      const cards = Report.distributions.cards(index, found);
      place.querySelector("#rollout-spread").replaceChildren(...cards);
      place.querySelector(".spread").hidden = cards.length === 0;
    }
    const rows = await Promise.all(shown.map(textsOf));
    const [from, to, of] = [first + 1, first + shown.length, found.length].map((count) => count.toLocaleString());
    place.querySelector("#rollout-count").textContent = found.length === 0 ? "no rollout passes these filters"
      : `${from}–${to} of ${of}`;
    place.querySelector("#rollouts-before").disabled = first === 0;
    place.querySelector("#rollouts-after").disabled = first + PAGE >= found.length;
    place.querySelector("#rollout-page").replaceChildren(...shown.map((i, k) => item(i, rows[k])));
  }

  /** Returns one line of the list, which unfolds to the rollout. */
  function item(i, texts) {
    const agent = index.agent[i] >= 0 ? ` · ${index.agents[index.agent[i]]}` : "";
    const run = index.runs.length > 1 ? `${index.runs[index.run[i]]} · ` : "";
    const facts = `${run}iteration ${index.iteration[i] + 1} · ${index.roles[index.role[i]]}${agent}`;
    const figures = `reward ${number(index.reward[i], 3)} · ${index.length[i].toLocaleString()} tokens`;
    const line = make("summary", {}, make("span", { class: "badges" }, badges(i)),
      make("span", { class: "facts" }, facts), make("span", { class: "figures" }, figures),
      make("span", { class: "title" }, (texts.question ?? texts.group ?? "").slice(0, 160)));
    const whole = make("details", { class: "sample", "data-rollout": i }, line);
    whole.addEventListener("toggle", () => {
      if (whole.open && whole.children.length === 1) whole.append(...body(i, texts));
    });
    return whole;
  }

  /** Returns what is known of whether a rollout is correct: whose opinion it is stands in each badge. */
  function badges(i) {
    const says = index.says[i], truth = index.truth[i], outcome = index.outcome[i];
    const word = (value) => (value === 1 ? "✓ correct" : value === 0 ? "✗ wrong" : "unreadable");
    const tone = (value) => (value === 1 ? "right" : value === 0 ? "wrong" : "unread");
    const out = [];
    if (truth >= 0) out.push(make("span", { class: `tag ${tone(truth)}` }, `truth: ${word(truth)}`));
    else if (outcome >= 0) out.push(make("span", { class: `tag ${tone(outcome)}` }, `graded ${word(outcome)}`));
    else out.push(make("span", { class: "tag unread" }, "not graded"));
    if (says >= 0) out.push(make("span", { class: `tag opinion ${tone(says)}` }, `verifier says: ${word(says)}`));
    if (says >= 0 && truth >= 0 && says !== UNREADABLE && says !== truth) {
      out.push(make("span", { class: "tag clash" }, "disagrees"));
    }
    return out;
  }

  /** Returns the unfolded rollout. */
  function body(i, texts) {
    const rewards = Object.entries(texts.rewards ?? {}).map(([name, value]) => `${name} ${number(value, 3)}`);
    const facts = [`${index.length[i]} tokens`, `stop: ${texts.stop}`, `weights ${texts.version}`, ...rewards,
      index.advantage[i] === null ? "" : `advantage ${signed(index.advantage[i])}`,
      texts.episode === undefined ? "" : `episode ${texts.episode}`];
    const line = (name, text) => (text === undefined ? null : make("p", {}, make("b", {}, name), ` ${text}`));
    const said = texts.pieces ? conversation(texts.pieces) : [make("div", { class: "text" }, stepwise(texts))];
    return [make("p", { class: "meta" }, facts.filter((fact) => fact).join(" · ")), line("Question", texts.question),
      line("Known answer", texts.answer), folded("Prompt", texts.prompt), ...said,
      folded("What the verifier wrote about it", texts.review), others(i)].filter((part) => part !== null);
  }

  function folded(name, text) {
    return text === undefined ? null
      : make("details", {}, make("summary", {}, name), make("pre", {}, text));
  }

  /** Returns a button that adds the other agents of the episode; null where there are none on the page. */
  function others(i) {
    const episode = index.episode[i];
    const agents = episode < 0 ? [] : index.episode.map((one, k) => (one === episode && k !== i ? k : -1));
    const own = agents.filter((k) => k >= 0);
    if (own.length === 0) return null;
    const button = make("button", { type: "button", class: "others", onclick: async () => {
      const items = await Promise.all(own.map(async (k) => item(k, await textsOf(k))));
      items.forEach((one) => { one.open = true; });
      button.replaceWith(...items);
    } }, `show the other ${own.length === 1 ? "agent" : `${own.length} agents`} of this episode`);
    return button;
  }

  /** Returns a solution's text, each reasoning step in the colour of its verdict, with whose verdict it is. */
  function stepwise(texts) {
    const text = texts.text ?? "", steps = texts.steps ?? [], verdicts = texts.verdicts ?? [];
    const matching = verdicts.length === steps.length;
    const whose = texts.review === undefined ? "its verdict" : "verifier";
    const out = [];
    let at = 0;
    steps.forEach((step, k) => {
      const start = text.indexOf(step, at);
      if (start > at) out.push(text.slice(at, start));
      const verdict = matching ? verdicts[k] : null;
      const kind = verdict === 1 ? "right" : verdict === -1 ? "wrong" : "unread";
      const mark = verdict === 1 ? "✓ correct" : verdict === -1 ? "✗ incorrect" : "no verdict";
      const credit = texts.credit?.[k] === undefined ? "" : ` · advantage ${signed(texts.credit[k])}`;
      const badge = make("span", { class: "badge" }, `${whose}: ${mark}${credit}`);
      out.push(make("span", { class: `step ${kind}` }, step, badge));
      at = start >= 0 ? start + step.length : at;
    });
    out.push(text.slice(at));
    if (verdicts.length && !matching) {
      const told = `\n${verdicts.length} verdicts for ${steps.length} steps: no step rewards`;
      out.push(make("span", { class: "meta" }, told));
    }
    return out;
  }

  /** Returns a conversation, turn by turn. A piece is [author, tokens, advantage, text]. */
  function conversation(pieces) {
    const turns = [];
    for (const piece of pieces) {
      const last = turns[turns.length - 1];
      if (last && (last[0][0] === ENVIRONMENT) === (piece[0] === ENVIRONMENT)) last.push(piece);
      else turns.push([piece]);
    }
    const credits = [...new Set(pieces.map((piece) => piece[2]).filter((credit) => credit !== null))];
    const most = credits.length > 1 ? Math.max(...credits.map(Math.abs)) : 0; // one advantage needs no colours
    const answers = turns.filter((own) => own[0][0] !== ENVIRONMENT).length;
    let answer = 0;
    const out = most ? [legend(most)] : [];
    for (const own of turns) {
      const isAnswer = own[0][0] !== ENVIRONMENT;
      answer += isAnswer ? 1 : 0;
      const text = own.map((piece) => piece[3]).join("");
      if (!isAnswer && text.trim() === "") continue; // the frame of a chat template
      const tokens = own.reduce((sum, piece) => sum + piece[1], 0);
      const who = isAnswer ? `answer ${answer} of ${answers}` : "environment";
      const words = make("div", { class: "words" }, credited(own, text, most));
      const long = text.length <= MAX_OPEN ? words : make("details", {},
        make("summary", {}, `${text.slice(0, 120)} … (${text.length} characters)`), words);
      out.push(make("div", { class: `said ${isAnswer ? "answer" : "environment"}` },
        make("p", { class: "who" }, `${who} · ${tokens} ${tokens === 1 ? "token" : "tokens"}`), long));
    }
    return out;
  }

  /** Returns the text of pieces: each in the colour of its advantage, a partner's set apart, calls of tools framed. */
  function credited(pieces, text, most) {
    const isAnswer = pieces[0][0] !== ENVIRONMENT;
    const calls = isAnswer ? [...text.matchAll(CALL)].map((found) => [found.index, found.index + found[0].length]) : [];
    const out = [];
    let at = 0;
    for (const piece of pieces) {
      const end = at + piece[3].length;
      const inside = calls.flat().filter((cut) => cut > at && cut < end);
      const cuts = [...new Set([at, end, ...inside])].sort((a, b) => a - b);
      for (let k = 0; k + 1 < cuts.length; k += 1) {
        const call = calls.findIndex(([start, stop]) => start <= cuts[k] && cuts[k] < stop);
        const words = coloured(text.slice(cuts[k], cuts[k + 1]), piece, most);
        const last = out[out.length - 1];
        if (call < 0) out.push(words);
        else if (last instanceof Element && last.dataset.call === String(call)) last.append(words);
        else out.push(make("span", { class: "call", "data-call": call }, words));
      }
      at = end;
    }
    return out;
  }

  function coloured(text, [author, , advantage], most) {
    if (author === PARTNER) return make("span", { class: "partner", title: "written by a partner" }, text);
    if (!most || advantage === null) return text;
    return make("span", { title: signed(advantage), style: { background: colour(advantage, most) } }, text);
  }

  function colour(advantage, most) {
    const share = Math.round(60 * Math.min(1, Math.abs(advantage) / most));
    return `color-mix(in srgb, var(${advantage > 0 ? "--good" : "--bad"}) ${share}%, transparent)`;
  }

  function legend(most) {
    const marks = [-most, -most / 2, 0, most / 2, most].map((advantage) =>
      make("span", { style: { background: colour(advantage, most) } }, signed(advantage)));
    return make("p", { class: "legend" }, "advantage of each token: ", marks);
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
    place.querySelector(".spread").open = innerWidth > 600;
    filter();
  }

  return { start };
})();

Report.charts.start(Report.data("report-data"));
Report.rollouts.start();
