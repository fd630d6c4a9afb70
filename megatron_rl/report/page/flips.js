// The report's problems that flipped between two looks at them; and the start of all scripts.
"use strict";

Report.flips = (() => {
  const { make, visible } = Report;
  const PAGE = 10;

  /** Returns the rows of one comparison, what was lost first, a page at a time. */
  function rows(found) {
    const shown = make("div");
    const more = make("button", { type: "button", onclick: () => add() }, "more");
    let next = 0;
    const add = () => {
      shown.append(...found.rows.slice(next, next + PAGE).map((row) => line(found, row)));
      next += PAGE;
      more.hidden = next >= found.rows.length;
    };
    add();
    return [shown, more];
  }

  function line(found, row) {
    const share = ([correct, of]) => `${correct} of ${of}`;
    const tag = row.gained ? ["right", "now solved"] : ["wrong", "no longer solved"];
    const iterations = row.iterations ? `iteration ${row.iterations[0]} → ${row.iterations[1]} · ` : "";
    const facts = `${iterations}${visible(row.set)} · correct: ${share(row.before)} → ${share(row.after)}`;
    const badge = make("span", { class: `tag ${tag[0]}` }, tag[1]);
    const head = make("summary", {}, make("span", { class: "badges" }, badge), make("span", { class: "facts" }, facts),
      make("span", { class: "title" }, visible(row.question.slice(0, 160))));
    const part = (name, text) => (text === null || text === undefined ? null
      : make("div", {}, make("b", {}, name), make("pre", {}, visible(text))));
    return make("details", { class: "sample" }, head, part("Question", row.question), part("Known answer", row.answer),
      row.texts ? part(found.first, row.texts[0]) : null, row.texts ? part(found.second, row.texts[1]) : null);
  }

  function start(all) {
    const place = document.getElementById("flips");
    for (const found of place === null ? [] : all) {
      place.append(make("div", { class: "card flips" },
        make("h3", {}, `${visible(found.first)} → ${visible(found.second)}`),
        make("p", {}, make("b", { class: "good" }, `${found.gained} now solved`), ", ",
          make("b", { class: "bad" }, `${found.lost} no longer solved`),
          `, of ${found.common.toLocaleString()} problems`),
        rows(found)));
    }
  }

  return { start };
})();

{
  const report = Report.data("report-data");
  Report.charts.start(report);
  Report.flips.start(report.flips);
  Report.rollouts.start();
}
