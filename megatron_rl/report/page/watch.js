// Loads the page again when the run that `megatron-rl watch` shows has gone on, unless a rollout is being read.
"use strict";

(() => {
  const EVERY_MS = 3000;
  const shown = document.querySelector("meta[name=version]").content;

  async function look() {
    const answer = await fetch("version").catch(() => null);
    const version = answer?.ok ? await answer.text() : shown;
    if (version !== shown && document.querySelector("#rollout-page .sample[open]") === null) location.reload();
  }

  look();
  setInterval(look, EVERY_MS);
  document.addEventListener("visibilitychange", look);
})();
