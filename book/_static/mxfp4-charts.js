// Draws the charts of a page with the Vega bundle that lies beside this file, in the page's light or dark colours.
// Without scripts, or should drawing fail, the still picture inside each figure stays.
(function () {
  "use strict";
  const here = document.currentScript.src;
  const bundle = here ? new URL("vega/vega.js", here).href : ""; // a page of its own holds both scripts
  const INK = {
    light: { ink: "#1f2328", muted: "#57606a", grid: "#d8dee4" },
    dark: { ink: "#e6edf3", muted: "#9da7b1", grid: "#3d444d" },
  };

  function ground() {
    return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
  }

  function merge(base, over) {
    const out = Object.assign({}, base);
    for (const [key, value] of Object.entries(over)) {
      const both = value && typeof value === "object" && !Array.isArray(value);
      out[key] = both ? merge(out[key] || {}, value) : value;
    }
    return out;
  }

  function colours() {
    const { ink, muted, grid } = INK[ground()];
    const text = { labelColor: ink, titleColor: muted };
    return {
      background: "transparent",
      title: { color: ink, subtitleColor: muted },
      axis: { labelColor: muted, titleColor: ink, gridColor: grid, domainColor: muted, tickColor: muted },
      legend: text,
      header: text,
      rule: { color: muted },
      text: { color: ink },
    };
  }

  // Small multiples have sizes of their own; on a page too narrow for two side by side they stand in one column.
  function stack(spec, room) {
    if (room > 560) return spec;
    const fit = (unit) => Object.assign({}, unit, typeof unit.width === "number" ? { width: Math.min(unit.width, room - 75) } : {});
    if (spec.hconcat) {
      const { hconcat, ...rest } = spec;
      return Object.assign(rest, { vconcat: hconcat.map(fit) });
    }
    if (spec.facet && spec.spec && !spec.facet.row && !spec.facet.column) return Object.assign({}, spec, { columns: 1, spec: fit(spec.spec) });
    if (spec.concat) return Object.assign({}, spec, { columns: 1, concat: spec.concat.map(fit) });
    return spec;
  }

  // A title longer than the chart is wide goes on in a second line.
  function wrapTitle(spec, room) {
    const title = typeof spec.title === "string" ? { text: spec.title } : spec.title;
    if (!title || typeof title.text !== "string") return spec;
    const lines = [""];
    for (const word of title.text.split(" ")) {
      const longer = lines[lines.length - 1] ? `${lines[lines.length - 1]} ${word}` : word;
      if (longer.length * 9.3 > room - 60 && lines[lines.length - 1]) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    return Object.assign({}, spec, { title: Object.assign({}, title, { text: lines.length > 1 ? lines : lines[0] }) });
  }

  async function draw(figure) {
    const host = figure.querySelector(".mx-vega");
    const room = host.clientWidth;
    const spec = wrapTitle(stack(JSON.parse(figure.querySelector(".mx-spec").textContent), room), room);
    const still = host.querySelector(".mx-still");
    spec.config = merge(spec.config || {}, colours());
    delete spec.background;
    let canvas = host.querySelector(".mx-canvas");
    if (canvas && canvas.view) canvas.view.finalize();
    if (canvas) canvas.remove();
    canvas = document.createElement("div");
    canvas.className = "mx-canvas";
    host.appendChild(canvas);
    figure.classList.add("mx-drawing");
    try {
      const result = await window.mxfp4Vega.embed(canvas, spec, {
        renderer: "svg",
        actions: { export: true, source: false, compiled: false, editor: false },
        downloadFileName: "mxfp4-chart",
      });
      canvas.view = result.view;
      still.hidden = true;
      figure.dataset.drawn = ground();
    } catch (error) {
      canvas.remove();
      still.hidden = false;
      console.error("chart not drawn:", error);
    }
    figure.classList.remove("mx-drawing");
  }

  function drawAll() {
    document.querySelectorAll(".mx-figure").forEach((figure) => {
      if (figure.dataset.drawn !== ground()) draw(figure);
    });
  }

  function start() {
    if (!document.querySelector(".mx-figure")) return;
    function ready() {
      drawAll();
      new MutationObserver(drawAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    }
    if (window.mxfp4Vega) return ready();
    const script = document.createElement("script");
    script.src = bundle;
    script.onload = ready;
    document.head.appendChild(script);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
