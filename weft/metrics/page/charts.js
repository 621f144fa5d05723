// Curves with axes, and the bars of where each lane's time went.

import { cause, isWait, label, paint } from "./colours.js";
import { duration, element, number, percent, svg, ticks } from "./format.js";

const LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 34;

/** Draws curves into `target`. curves: [{name, points: [[step, value]], class}]; the first one is read off by pointing. */
export function chart(target, curves, unit) {
  const told = curves.filter((curve) => curve.points?.length);
  if (!told.length) {
    target.replaceChildren(element("p", { class: "muted" }, "No step has been recorded yet."));
    return;
  }
  const [width, height] = [Math.max(target.clientWidth, 240), target.clientHeight || 210];
  const points = told.flatMap((curve) => curve.points);
  const range = (index) => {
    const values = points.map((point) => point[index]);
    return [Math.min(...values), Math.max(...values)];
  };
  const [first, last] = range(0);
  let [low, high] = range(1);
  const pad = (high - low || Math.abs(high) || 1) * 0.08;
  [low, high] = [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  const x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spoken(told, unit) });
  for (const tick of ticks(low, high, 4)) {
    drawn.append(svg("path", { class: "grid", d: `M${LEFT} ${y(tick)}H${width - RIGHT}` }));
    drawn.append(svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of ticks(first, last, 5).filter(Number.isInteger)) {
    drawn.append(svg("text", { x: x(tick), y: height - 18, "text-anchor": "middle" }, tick.toLocaleString("en")));
  }
  drawn.append(svg("text", { x: (LEFT + width - RIGHT) / 2, y: height - 2, "text-anchor": "middle" }, "step"));
  drawn.append(svg("text", { x: LEFT + 4, y: TOP + 4 }, unit));
  for (const curve of told) {
    if (curve.points.length === 1) {
      const [[step, value]] = curve.points;
      drawn.append(svg("circle", { class: "point", cx: x(step), cy: y(value), r: 3 }));
    }
    const path = curve.points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    drawn.append(svg("path", { class: `curve ${curve.class ?? ""}`, d: path.join("") }));
  }
  legend(drawn, told, width);
  readOff(drawn, told[0], x, y, width, height, unit);
  target.replaceChildren(drawn);
}

function legend(drawn, told, width) {
  if (told.length < 2) return;
  let right = width - RIGHT;
  for (const curve of [...told].reverse()) {
    drawn.append(svg("text", { x: right, y: TOP + 4, "text-anchor": "end" }, curve.name));
    right -= curve.name.length * 6.4 + 6;
    drawn.append(svg("path", { class: `curve ${curve.class ?? ""}`, d: `M${right - 22} ${TOP}H${right}` }));
    right -= 36;
  }
}

function readOff(drawn, curve, x, y, width, height, unit) {
  const cursor = svg("path", { class: "cursor", d: "" });
  const dot = svg("circle", { class: "point", r: 0 });
  const reading = svg("text", { class: "reading", y: TOP + 18 });
  drawn.append(cursor, dot, reading);
  drawn.addEventListener("pointermove", (event) => {
    const at = (event.offsetX / drawn.clientWidth) * width;
    const near = curve.points.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best));
    const [left, top] = [x(near[0]), y(near[1])];
    cursor.setAttribute("d", `M${left} ${TOP}V${height - BOTTOM}`);
    for (const [name, value] of [["cx", left], ["cy", top], ["r", 3.5]]) dot.setAttribute(name, value);
    const atLeft = left < width / 2;
    reading.setAttribute("x", atLeft ? left + 8 : left - 8);
    reading.setAttribute("text-anchor", atLeft ? "start" : "end");
    reading.textContent = `${number(near[1])} ${unit} at step ${near[0].toLocaleString("en")}`;
  });
  drawn.addEventListener("pointerleave", () => {
    cursor.setAttribute("d", "");
    dot.setAttribute("r", 0);
    reading.textContent = "";
  });
}

function spoken(told, unit) {
  return told.map(({ name, points }) => {
    const [[first, from], [last, to]] = [points[0], points[points.length - 1]];
    return `${name}: ${number(from)} ${unit} at step ${first}, ${number(to)} at step ${last}`;
  }).join("; ");
}

/** The rows of the table of lanes, in the timeline's order; modes in theirs, each with its part of the lane's time. */
export function laneRows(lanes, modes, order) {
  return Object.entries(lanes).sort(([one], [other]) => order.indexOf(one) - order.indexOf(other) || one.localeCompare(other, "en", { numeric: true })).map(([lane, told]) => {
    const total = Object.values(told.modes).reduce((sum, seconds) => sum + seconds, 0);
    const parts = modes.filter((mode) => told.modes[mode]).map((mode) => [mode, told.modes[mode] / total, told.modes[mode]]);
    const stack = element("div", { class: "stack", role: "img", "aria-label": parts.map(([mode, part]) => `${label(mode)} ${percent(part)}`).join(", ") });
    for (const [mode, part, seconds] of parts) {
      const text = `${cause(mode)} ${percent(part)}`;
      const shown = part > 0.055 ? (part > 0.013 * text.length ? text : percent(part)) : "";
      const segment = paint(element("span", { class: isWait(mode) ? "wait" : "busy", title: `${label(mode)}: ${percent(part)}, ${duration(seconds)}` }), mode);
      segment.style.width = `${part * 100}%`;
      if (shown) segment.append(element("span", {}, shown));
      stack.append(segment);
    }
    return element("tr", {}, element("th", { scope: "row" }, lane), element("td", {}, stack), element("td", {}, duration(told.wall_seconds)));
  });
}
