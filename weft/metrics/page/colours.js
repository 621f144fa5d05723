// The colour of each kind of task, as in weft/metrics/views/timeline.py, and the hatching of each cause of a stall.

import { element } from "./format.js";

// Okabe and Ito's palette; the second is the first, half white, for every second iteration.
export const COLOURS = {
  forward: ["#56b4e9", "#abdaf4"],
  backward: ["#009e73", "#80cfb9"],
  sync: ["#f0e442", "#f8f2a1"],
  update: ["#e69f00", "#f3cf80"],
  load: ["#a0a0a0", "#d0d0d0"],
  transfer: ["#cc79a7", "#e6bcd3"],
  snapshot: ["#d8a48f", "#ecd2c7"],
};

// A wait is hatched in the colour of what it waits for; every cause has a drawing of its own besides.
const HATCHES = {
  stall_data: ["rising", "#8a8a8a"],
  stall_activation: ["falling", "#3d9fd8"],
  stall_gradient: ["rising", "#009e73"],
  stall_sync: ["level", "#b5a800"],
  stall_update: ["upright", "#e69f00"],
  stall_slot: ["crossed", "#8f7fc4"],
  stall_dispatch: ["dotted", "#d55e00"],
  recovery: ["crossed", "#c0392b"],
  idle: ["sparse", "#9aa0a8"],
};

const LINES = {
  rising: [[0, 8, 8, 0], [-2, 2, 2, -2], [6, 10, 10, 6]],
  falling: [[0, 0, 8, 8], [-2, 6, 2, 10], [6, -2, 10, 2]],
  level: [[0, 2, 8, 2], [0, 6, 8, 6]],
  upright: [[2, 0, 2, 8], [6, 0, 6, 8]],
  crossed: [[0, 8, 8, 0], [0, 0, 8, 8]],
  dotted: [[1, 2, 3, 2], [5, 6, 7, 6]],
  sparse: [[3, 4, 5, 4]],
};

export const isWait = (mode) => mode in HATCHES;

export const label = (mode) => mode.replace(/^stall_/, "wait for ").replace("wait for dispatch", "wait for the daemon");

export const cause = (mode) => mode.replace(/^stall_/, "");

/** A tile of 8 × 8 pixels, times `scale`. */
function tile(mode, scale) {
  const [drawing, colour] = HATCHES[mode];
  const canvas = element("canvas", { width: 8 * scale, height: 8 * scale });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.strokeStyle = colour;
  context.lineWidth = drawing === "dotted" || drawing === "sparse" ? 2 : 1.5;
  for (const [fromX, fromY, toX, toY] of LINES[drawing]) {
    context.beginPath();
    context.moveTo(fromX, fromY);
    context.lineTo(toX, toY);
    context.stroke();
  }
  return canvas;
}

const patterns = new Map();

/** What to fill a bar with on a canvas whose pixels are `scale` to one of CSS. */
export function fill(context, mode, odd, scale) {
  if (!isWait(mode)) return (COLOURS[mode] ?? COLOURS.snapshot)[odd];
  const key = `${mode} ${scale}`;
  if (!patterns.has(key)) {
    const pattern = context.createPattern(tile(mode, scale), "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / scale));
    patterns.set(key, pattern);
  }
  return patterns.get(key);
}

/** The plain colour of a wait that is too short to be hatched. */
export const thin = (mode) => `${HATCHES[mode][1]}66`;

const images = new Map();

/** Gives an element the look of a mode. */
export function paint(target, mode) {
  if (!isWait(mode)) {
    target.style.backgroundColor = (COLOURS[mode] ?? COLOURS.snapshot)[0];
    return target;
  }
  if (!images.has(mode)) images.set(mode, `url(${tile(mode, 2).toDataURL()})`);
  target.style.backgroundImage = images.get(mode);
  target.style.backgroundSize = "8px 8px";
  return target;
}

export const swatch = (mode) => paint(element("span", { class: "swatch" }), mode);
