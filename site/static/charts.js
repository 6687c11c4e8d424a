// Puts a zoomable uPlot chart in place of each drawn one. Drag zooms, a double click goes back; the toolbar does both
// by keyboard. Charts of a group share their zoom, their cursor and the legend's switches.
"use strict";
(function () {
  if (typeof uPlot === "undefined") return;
  const HEIGHT = 270;
  const MARKERS = { // as in suite/report/svg.py
    circle: "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0 -6.8 0", square: "M-3-3h6v6h-6z", triangle: "M0-4L3.8 3h-7.6z",
    cross: "M-3.6-2.4l1.2-1.2L0-1.2l2.4-2.4 1.2 1.2L1.2 0l2.4 2.4-1.2 1.2L0 1.2l-2.4 2.4-1.2-1.2L-1.2 0z",
    wedge: "M0 4L3.8-3h-7.6z", diamond: "M0-4.2L4.2 0 0 4.2-4.2 0z",
    plus: "M-1.2-4h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8v-2.4h2.8z",
  };
  const charts = new Map(); // figure -> uPlot
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const withAlpha = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");

  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    const text = size !== 0 && (size >= 1e6 || size < 1e-4) ? value.toExponential(2) : String(+value.toPrecision(4));
    return text.replace("-", "\u2212");
  }

  // The figure's data as uPlot wants it: columns, series and the bands between lowest and highest seed.
  function columns(data) {
    const values = [data.x], series = [{}], bands = [];
    for (const line of data.series) {
      const stroke = color("--s" + line.color);
      const dash = line.dash ? line.dash.split(" ").map(Number) : undefined;
      values.push(line.mean);
      series.push({ label: line.label, marker: line.marker, ink: stroke, stroke, dash, width: 1.8, spanGaps: true, points: { show: line.mean.length < 2 } });
      if (line.low) {
        values.push(line.high, line.low);
        const edge = { label: line.label, isEdge: true, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [series.length - 2, series.length - 1], fill: withAlpha(stroke, 0.13) });
      }
    }
    return { values, series, bands };
  }

  function isZoomed(chart) {
    const x = chart.data[0], { min, max } = chart.scales.x;
    return min != null && (min > x[0] || max < x[x.length - 1]);
  }

  // Round values between the ends; on an asinh axis zero and powers of ten.
  function ticks(low, high, asinh) {
    if (asinh) {
      const first = Math.round(Math.log10(asinh)), last = Math.ceil(Math.log10(Math.max(-low, high)));
      const sizes = Array.from({ length: Math.max(1, last - first + 1) }, (_, i) => 10 ** (first + i));
      const all = [...sizes.map((v) => -v).reverse(), 0, ...sizes].filter((v) => v >= low && v <= high);
      if (all.length > 1) return all;
    }
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((v) => v >= raw * 0.999);
    const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
    return Array.from({ length: count }, (_, i) => +((Math.ceil(low / step - 1e-9) + i) * step).toPrecision(12));
  }

  function drawMarkers(chart) {
    const ratio = devicePixelRatio;
    chart.series.forEach((s, i) => {
      if (!s.marker || !s.show) return;
      const column = chart.data[i];
      let last = chart.series[0].idxs[1];
      while (last >= 0 && column[last] == null) last--;
      if (last < 0) return;
      const x = chart.valToPos(chart.data[0][last], "x", true), y = chart.valToPos(column[last], "y", true);
      if (y < chart.bbox.top || x < chart.bbox.left) return;
      chart.ctx.save();
      chart.ctx.translate(x, y); chart.ctx.scale(ratio, ratio);
      chart.ctx.globalAlpha = s.alpha ?? 1;
      chart.ctx.fillStyle = s.ink;
      chart.ctx.fill(new Path2D(MARKERS[s.marker]));
      chart.ctx.restore();
    });
  }

  function axis(side) {
    const font = "12px " + color("--sans");
    const tick = { stroke: color("--line"), width: 1 };
    const size = side === "y" ? 52 : 30;
    return { stroke: color("--soft"), font, grid: { ...tick, show: side === "y" }, ticks: { ...tick, size: 4 }, size, gap: 5,
      values: (_, splits) => splits.map((value) => (value == null ? "" : number(value))) };
  }

  function options(figure, data, parts, group) {
    const y = data.y;
    return {
      width: Math.max(240, figure.querySelector(".canvas").clientWidth), height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: group }, drag: { x: true, y: false }, focus: { prox: 24 }, points: { size: 7 } },
      focus: { alpha: 0.3 },
      scales: {
        x: { time: false },
        y: {
          distr: y.asinh ? 4 : 1, asinh: y.asinh || undefined,
          // The drawn chart's ends until the reader zooms; then whatever the zoomed part needs.
          range: (chart, low, high) => {
            if (!isZoomed(chart) || low == null) return [y.low, y.high];
            const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
            return [low - room, high + room];
          },
        },
      },
      axes: [axis("x"), {
        ...axis("y"),
        splits: (chart, _, low, high) => (isZoomed(chart) ? ticks(low, high, y.asinh) : y.ticks),
        filter: (_, splits) => splits,
      }],
      series: parts.series, bands: parts.bands,
      hooks: {
        draw: [(chart) => {
          if (data.reference == null) return;
          const at = Math.round(chart.valToPos(data.reference, "y", true)) + 0.5;
          const { left, top, width, height } = chart.bbox;
          if (at < top || at > top + height) return;
          chart.ctx.save();
          chart.ctx.strokeStyle = color("--strong");
          chart.ctx.beginPath(); chart.ctx.moveTo(left, at); chart.ctx.lineTo(left + width, at); chart.ctx.stroke();
          chart.ctx.restore();
        }, drawMarkers],
        setCursor: [(chart) => readout(figure, chart)],
        setSeries: [(chart) => readout(figure, chart)],
      },
    };
  }

  // One line under the chart: the step and the line nearest to the pointer.
  function readout(figure, chart) {
    const place = figure.querySelector(".readout");
    const index = chart.cursor.idx;
    let nearest = chart.series.findIndex((s, i) => i > 0 && s._focus && s.show);
    if (chart.series.length === 2) nearest = 1;
    if (index == null || nearest < 1) { place.textContent = index == null ? "" : "step " + chart.data[0][index]; return; }
    while (nearest > 1 && chart.series[nearest].isEdge) nearest--;
    let text = `step ${chart.data[0][index]} · ${chart.series[nearest].label}: ${number(chart.data[nearest][index])}`;
    if (chart.series[nearest + 1]?.isEdge) {
      text += ` (seeds ${number(chart.data[nearest + 2][index])} to ${number(chart.data[nearest + 1][index])})`;
    }
    place.textContent = text;
  }

  function build(figure) {
    if (charts.has(figure)) return;
    const data = JSON.parse(figure.querySelector("script[type='application/json']").textContent);
    if (data.x.length < 2) return;
    const group = figure.closest(".chart-group");
    const parts = columns(data);
    figure.classList.add("live");
    const canvas = figure.querySelector(".canvas");
    const chart = new uPlot(options(figure, data, parts, group.dataset.group), parts.values, canvas);
    const image = chart.root.querySelector("canvas");
    image.setAttribute("role", "img");
    image.setAttribute("aria-label", figure.querySelector(".plot").getAttribute("aria-label"));
    charts.set(figure, chart);
    for (const button of group.querySelectorAll(".legend button")) applySwitch(chart, button);
  }

  function applySwitch(chart, button) {
    const show = button.getAttribute("aria-pressed") === "true";
    chart.series.forEach((s, i) => {
      if (i > 0 && s.label === button.dataset.series && s.show !== show) chart.setSeries(i, { show }, false);
    });
  }

  function chartsOf(group) {
    return Array.from(group.querySelectorAll("figure.chart"), (figure) => (build(figure), charts.get(figure))).filter(Boolean);
  }

  function addSwitches(group) {
    for (const item of group.querySelectorAll(".legend li[data-series]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.series = item.dataset.series;
      button.setAttribute("aria-pressed", "true");
      button.append(...item.childNodes);
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
        for (const chart of chartsOf(group)) applySwitch(chart, button);
      });
      item.append(button);
    }
  }

  const MOVES = [
    ["+", "Zoom in", (low, high) => [low + (high - low) / 4, high - (high - low) / 4]],
    ["\u2212", "Zoom out", (low, high) => [low - (high - low) / 2, high + (high - low) / 2]],
    ["\u2190", "Earlier steps", (low, high) => [low - (high - low) / 4, high - (high - low) / 4]],
    ["\u2192", "Later steps", (low, high) => [low + (high - low) / 4, high + (high - low) / 4]],
    ["Reset", "Show all steps", () => [-Infinity, Infinity]],
  ];

  function addToolbar(group) {
    const bar = group.querySelector(".toolbar");
    bar.hidden = false;
    for (const [face, name, move] of MOVES) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = face;
      button.setAttribute("aria-label", name);
      button.addEventListener("click", () => {
        for (const chart of chartsOf(group)) {
          const x = chart.data[0];
          const [low, high] = move(chart.scales.x.min, chart.scales.x.max);
          chart.setScale("x", { min: Math.max(low, x[0]), max: Math.min(high, x[x.length - 1]) });
        }
      });
      bar.append(button);
    }
    if (group === document.querySelector(".chart-group")) bar.append("Drag to zoom, double-click to reset.");
  }

  for (const group of document.querySelectorAll(".chart-group")) {
    addSwitches(group);
    addToolbar(group);
  }
  const figures = Array.from(document.querySelectorAll("figure.chart"));
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { near.unobserve(entry.target); build(entry.target); }
  }, { rootMargin: "300px" });
  figures.forEach((figure) => near.observe(figure));
  new ResizeObserver(() => {
    for (const [figure, chart] of charts) {
      const width = Math.max(240, figure.querySelector(".canvas").clientWidth);
      if (width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [figure, chart] of [...charts]) { chart.destroy(); charts.delete(figure); build(figure); }
  });
})();
