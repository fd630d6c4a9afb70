// What the report's other scripts share: the page's data, elements made of plain text, numbers as people read them.
"use strict";

const Report = {
  /** Returns the JSON value of a data block of the page; null where there is none. The block is freed. */
  data(id) {
    const block = document.getElementById(id);
    if (block === null) return null;
    const value = JSON.parse(block.textContent);
    block.remove();
    return value;
  },

  /** Returns the JSON value of a packed data block (base64 of gzip). */
  async packed(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  },

  /** Returns a new element. Strings among the children become text, never markup; null children are left out. */
  make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  },

  /** Returns a number with about `digits` significant digits. */
  number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(digits)));
  },
};
