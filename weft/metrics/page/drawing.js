// Draws a timeline on a canvas. What is narrower than a pixel shares it: 10,000 bars are drawn in a frame.

import { fill, isWait, thin } from "./colours.js";
import { nanoseconds, ticks } from "./format.js";

const TOP = 38, BOTTOM = 6, RIGHT = 2;
const THIN = 4; // pixels below which hatching is no longer seen: the cause's colour, half white
const MIN_BAR = 0.75; // what is shorter is drawn this wide, so that nothing that ran is invisible
const NAMES = ["ink", "muted", "line", "row", "stall", "path", "accent"];
const FONT = "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

/** Where things stand: the height of a lane follows from how many there are. */
export class Layout {
  constructor(timeline, width, view, characterWidth) {
    const count = timeline.lanes.length;
    this.timeline = timeline;
    this.view = view;
    this.width = width;
    this.lane = count <= 8 ? 46 : count <= 16 ? 34 : 25;
    this.planned = count <= 8 ? 9 : count <= 16 ? 7 : 5;
    this.bar = this.lane - this.planned - (count <= 8 ? 10 : 6);
    this.left = Math.min(220, Math.max(40, 14 + characterWidth * Math.max(...timeline.lanes.map((lane) => lane.length))));
    this.height = TOP + this.lane * count + BOTTOM;
    this.scale = (width - this.left - RIGHT) / (view.to - view.from);
  }

  x(time) {
    return this.left + (time - this.view.from) * this.scale;
  }

  time(x) {
    return this.view.from + (x - this.left) / this.scale;
  }

  top(lane) {
    return TOP + this.lane * lane;
  }

  /** The lane at a height, or -1. */
  laneAt(y) {
    const lane = Math.floor((y - TOP) / this.lane);
    return lane >= 0 && lane < this.timeline.lanes.length ? lane : -1;
  }

  barTop(lane) {
    return this.top(lane) + this.planned + (this.lane >= 46 ? 6 : 4);
  }

  plannedTop(lane) {
    return this.top(lane) + (this.lane >= 46 ? 4 : 2);
  }

  /** Left edge and width of an interval; the part of it that is in view. */
  span(start, duration) {
    const from = Math.max(this.x(start), this.left);
    return [from, Math.max(Math.min(this.x(start + duration), this.width - RIGHT) - from, MIN_BAR)];
  }
}

export class Drawing {
  constructor(canvas, layout, scale) {
    this.context = canvas.getContext("2d");
    this.layout = layout;
    this.timeline = layout.timeline;
    this.scale = scale;
    const style = getComputedStyle(canvas);
    this.colour = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`)]));
    this.waiting = new Map(); // style -> rectangles, to be drawn together
  }

  draw({ showPath, hovered, chosen }) {
    const { context, layout } = this;
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, layout.width, layout.height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.lanes();
    this.iterations();
    context.save();
    context.beginPath();
    context.rect(layout.left, 0, layout.width - layout.left, layout.height);
    context.clip();
    for (let lane = 0; lane < this.timeline.lanes.length; lane += 1) {
      this.plannedOf(lane);
      this.barsOf(lane);
    }
    if (showPath) this.path();
    if (hovered) this.frame(hovered, this.colour.ink, 1.5);
    if (chosen) this.frame(chosen, this.colour.accent, 3);
    context.restore();
  }

  lanes() {
    const { context, layout } = this;
    this.timeline.lanes.forEach((lane, place) => {
      context.fillStyle = this.colour.row;
      if (place % 2 === 0) context.fillRect(0, layout.top(place), layout.width, layout.lane);
      context.fillStyle = this.colour.ink;
      context.fillText(lane, 6, layout.barTop(place) + layout.bar / 2, layout.left - 12);
    });
  }

  iterations() {
    const { context, layout, timeline } = this;
    const { from, to } = layout.view;
    const unit = to - from;
    context.textAlign = "center";
    for (const tick of ticks(from, to, Math.max(2, Math.floor((layout.width - layout.left) / 90)))) {
      this.line(layout.x(tick), 31, layout.height - BOTTOM, this.colour.line);
      context.fillStyle = this.colour.muted;
      const half = context.measureText(nanoseconds(tick, unit)).width / 2;
      context.fillText(nanoseconds(tick, unit), Math.min(Math.max(layout.x(tick), layout.left + half), layout.width - half), 24);
    }
    for (const { iteration, start, end, trains } of timeline.iterations) {
      if (end < from || start > to) continue;
      const [left, width] = layout.span(start, end - start);
      for (const x of [layout.x(start), layout.x(end)].filter((each) => each >= layout.left - 1)) {
        this.line(x, 0, 16, this.colour.muted); // the times stand between
        this.line(x, 31, layout.height - BOTTOM, this.colour.muted);
      }
      context.fillStyle = this.colour.ink;
      const label = timeline.label(iteration);
      const short = trains ? label.replace("step ", "") : "validation";
      const texts = [`${label} · ${nanoseconds(end - start)}`, `${short} · ${nanoseconds(end - start)}`, short];
      const fits = texts.find((text) => context.measureText(text).width + 8 < width);
      if (fits) context.fillText(fits, left + width / 2, 8);
    }
    context.textAlign = "start";
  }

  line(x, from, to, colour) {
    this.context.fillStyle = colour;
    this.context.fillRect(Math.round(x), from, 1, to - from);
  }

  /** The planned iteration, laid over each that trained, from where it began. */
  plannedOf(lane) {
    const { layout, timeline } = this;
    for (const { iteration, start, trains } of timeline.iterations) {
      if (!trains) continue;
      let free = -Infinity;
      for (const span of timeline.planned[lane]) {
        const begin = start + span.start;
        if (begin > layout.view.to || begin + span.duration < layout.view.from) continue;
        const [x, width] = layout.span(begin, span.duration);
        if (x + width < free) continue;
        free = Math.floor(x + width) + (width < 1 ? 1 : 0);
        this.rect(fill(this.context, span.kind, iteration % 2, this.scale), x, layout.plannedTop(lane), Math.max(width - 0.5, MIN_BAR), layout.planned);
      }
    }
    this.flush();
  }

  barsOf(lane) {
    const { layout, timeline } = this;
    const top = layout.barTop(lane);
    const labels = [];
    let free = -Infinity; // the pixel from which on nothing is drawn yet
    for (let index = timeline.firstAfter(lane, layout.view.from); index < timeline.count(lane); index += 1) {
      const start = timeline.start(lane, index);
      if (start >= layout.view.to) break;
      const [x, width] = layout.span(start, timeline.end(lane, index) - start);
      if (x + width < free) continue;
      free = Math.floor(x + width) + (width < 1 ? 1 : 0);
      const mode = timeline.modes[timeline.mode(lane, index)];
      const odd = timeline.iteration(lane, index) & 1;
      if (isWait(mode)) {
        if (width < THIN) this.rect(thin(mode), x, top + 2, width, layout.bar - 4);
        else {
          this.rect(this.colour.stall, x, top + 2, width, layout.bar - 4);
          this.rect(fill(this.context, mode, odd, this.scale), x, top + 2, width - 0.75, layout.bar - 4);
        }
        continue;
      }
      this.rect(fill(this.context, mode, odd, this.scale), x, top, width > 3 ? width - 0.75 : width, layout.bar);
      if (width > 18) labels.push([timeline.bar(lane, index), x, width]);
    }
    this.flush();
    for (const [bar, x, width] of labels) this.label(bar, x, width, top);
  }

  /** To be filled by `flush`: a canvas is quick where many rectangles in a row have one style. */
  rect(style, x, y, width, height) {
    const rects = this.waiting.get(style);
    if (rects) rects.push(x, y, width, height);
    else this.waiting.set(style, [x, y, width, height]);
  }

  flush() {
    for (const [style, rects] of this.waiting) {
      this.context.fillStyle = style;
      for (let at = 0; at < rects.length; at += 4) this.context.fillRect(rects[at], rects[at + 1], rects[at + 2], rects[at + 3]);
    }
    this.waiting.clear();
  }

  label(bar, x, width, top) {
    const name = this.timeline.name(bar.task);
    const text = [name, name.replace(/^([A-Z])[A-Z]*\((.*)\)$/, "$1 $2"), name.slice(0, 1)].find(
      (each) => this.context.measureText(each).width + 6 < width);
    if (!text) return;
    this.context.textAlign = "center";
    this.context.fillStyle = "#111";
    this.context.fillText(text, x + width / 2, top + this.layout.bar / 2);
    this.context.textAlign = "start";
  }

  /** The critical path: its tasks outlined, a line from each to the next where it changes the lane. */
  path() {
    const { context, layout } = this;
    context.strokeStyle = this.colour.path;
    context.lineWidth = 2;
    context.beginPath();
    let before = null;
    for (const step of this.timeline.path) {
      if (step.start > layout.view.to) break;
      const [x, width] = layout.span(step.start, step.duration);
      const top = layout.barTop(step.lane);
      if (step.start + step.duration >= layout.view.from) {
        if (width >= 3) context.rect(x + 1, top + 1, Math.max(width - 2.75, 1), layout.bar - 2);
        else context.rect(x, top + layout.bar - 1, width, 0);
        if (before && before.lane !== step.lane) {
          const down = step.lane > before.lane;
          context.moveTo(before.x, layout.barTop(before.lane) + (down ? layout.bar : 0));
          context.lineTo(x + 1, top + (down ? 0 : layout.bar));
        }
      }
      before = { lane: step.lane, x: layout.x(step.start + step.duration) - 1 };
    }
    context.stroke();
  }

  frame(bar, colour, width) {
    const [x, length] = this.layout.span(bar.start, bar.duration);
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.strokeRect(x - 1, this.layout.barTop(bar.lane) - 2, length + 1.5, this.layout.bar + 4);
  }
}
