// The timeline that people look at: zoom and pan, hover, a click, the keys.

import { label } from "./colours.js";
import { Drawing, Layout } from "./drawing.js";
import { element, nanoseconds } from "./format.js";
import { Timeline } from "./model.js";

const CHARACTER = 6.7; // the width of one in the canvas' font, rounded up
const REACH = 4; // pixels beside a bar that still hit it
const NEAREST = 2000; // nanoseconds: no closer look than this

export class TimelineView {
  /** onChoose: called with the chosen bar or null. onLook: when somebody has begun to look at one place. */
  constructor(canvas, tip, { onChoose, onLook }) {
    this.canvas = canvas;
    this.tip = tip;
    this.onChoose = onChoose;
    this.onLook = onLook;
    this.timeline = null;
    this.view = { from: 0, to: 1 }; // parts of the window, so that a zoom outlives an update
    this.hovered = this.chosen = this.dragged = null;
    this.showPath = true;
    this.listen();
  }

  show(told) {
    const timeline = new Timeline(told), older = this.timeline;
    if (older?.told.job !== told.job) [this.view, this.chosen] = [{ from: 0, to: 1 }, null];
    this.timeline = timeline;
    this.hovered = null;
    this.tip.hidden = true;
    this.chosen = timeline.same(this.chosen, older);
    this.draw();
  }

  get layout() {
    const { duration } = this.timeline;
    const view = { from: this.view.from * duration, to: this.view.to * duration };
    return new Layout(this.timeline, this.canvas.clientWidth, view, CHARACTER);
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = null;
      this.drawNow();
    });
  }

  drawNow() {
    if (!this.timeline || this.timeline.isEmpty || !this.canvas.clientWidth) return;
    const { layout } = this;
    const scale = devicePixelRatio || 1;
    const [width, height] = [Math.round(layout.width * scale), Math.round(layout.height * scale)];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      [this.canvas.width, this.canvas.height] = [width, height];
      this.canvas.style.height = `${layout.height}px`;
    }
    new Drawing(this.canvas, layout, scale).draw(this);
  }

  /** The middle of a bar on the canvas, in its pixels; what of it is in view. */
  placeOf(bar) {
    const { layout } = this;
    const [x, width] = layout.span(bar.start, bar.duration);
    return { x: x + width / 2, y: layout.barTop(bar.lane) + layout.bar / 2 };
  }

  // --- what is chosen

  choose(bar) {
    this.chosen = bar;
    if (bar) this.bringIntoView(bar);
    this.draw();
    this.onChoose(bar);
    if (bar) this.onLook();
  }

  bringIntoView(bar) {
    const { duration } = this.timeline;
    const [from, to] = [Math.max(bar.start, 0) / duration, Math.min(bar.start + bar.duration, duration) / duration];
    const length = this.view.to - this.view.from;
    if (to - from < length && (from < this.view.from || to > this.view.to)) {
      this.move((from + to) / 2 - (this.view.from + this.view.to) / 2);
    }
  }

  /** Bar by bar within the window, from the chosen one or from the first in view. */
  step(by) {
    const { timeline, chosen } = this;
    const from = this.view.from * timeline.duration;
    const lane = chosen?.lane ?? Math.max(0, timeline.lanes.findIndex((_, each) => timeline.firstAfter(each, from) < timeline.count(each)));
    const index = chosen ? chosen.index + by : timeline.firstAfter(lane, from);
    if (index >= 0 && index < timeline.count(lane)) this.choose(timeline.bar(lane, index));
  }

  stepLane(by) {
    const { timeline, chosen } = this;
    if (!chosen) return this.step(0);
    const time = chosen.start + chosen.duration / 2;
    for (let lane = chosen.lane + by; lane >= 0 && lane < timeline.lanes.length; lane += by) {
      const bar = timeline.at(lane, time, Infinity);
      if (bar) return this.choose(bar);
    }
  }

  stepPath(by) {
    const { path } = this.timeline;
    if (!path.length) return;
    const { chosen } = this;
    const end = chosen ? chosen.start + chosen.duration : -1;
    const at = path.findIndex((step) => chosen && step.task === chosen.task && step.iteration === chosen.iteration);
    const next = at >= 0 ? at + by : path.findIndex((step) => step.start >= end);
    const step = path[Math.min(Math.max(next, 0), path.length - 1)];
    const bar = this.timeline.run(step.task, step.iteration);
    if (bar) this.choose(bar);
  }

  goToAwaited() {
    const bar = this.chosen && this.timeline.waitedFor(this.chosen);
    if (bar) this.choose(bar);
  }

  end(by) {
    const lane = this.chosen?.lane ?? 0;
    const count = this.timeline.count(lane);
    if (count) this.choose(this.timeline.bar(lane, by < 0 ? 0 : count - 1));
  }

  // --- what is in view

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    const least = NEAREST / this.timeline.duration;
    const length = Math.min(1, Math.max(least, (this.view.to - this.view.from) / factor));
    const part = (around - this.view.from) / (this.view.to - this.view.from);
    this.place(around - part * length, length);
    this.onLook();
  }

  zoomAll() {
    this.place(0, 1);
  }

  move(by) {
    this.place(this.view.from + by, this.view.to - this.view.from);
  }

  place(from, length) {
    const begin = Math.min(Math.max(from, 0), 1 - length);
    this.view = { from: begin, to: begin + length };
    this.draw();
  }

  // --- pointer and keys

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.pointerMoved(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.timeline) return;
      this.dragged = { x: event.offsetX, moved: false, from: this.view.from };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      const dragged = this.dragged;
      this.dragged = null;
      if (dragged && !dragged.moved) this.choose(this.barAt(event));
    });
    canvas.addEventListener("pointercancel", () => (this.dragged = null));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.drawNow()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  barAt(event) {
    const { layout, timeline } = this;
    const lane = layout.laneAt(event.offsetY);
    return lane < 0 || event.offsetX < layout.left ? null : timeline.at(lane, layout.time(event.offsetX), REACH / layout.scale);
  }

  pointerMoved(event) {
    if (!this.timeline || this.timeline.isEmpty) return;
    if (!this.dragged) return this.hover(this.barAt(event), event);
    const by = event.offsetX - this.dragged.x;
    if (Math.abs(by) > 3 || this.dragged.moved) {
      this.dragged.moved = true;
      const width = this.canvas.clientWidth - this.layout.left;
      this.place(this.dragged.from - (by / width) * (this.view.to - this.view.from), this.view.to - this.view.from);
      this.hover(null);
    }
  }

  hover(bar, event) {
    const same = this.hovered?.lane === bar?.lane && this.hovered?.index === bar?.index;
    this.hovered = bar;
    this.tip.hidden = !bar;
    if (!same) this.draw();
    if (!bar) return;
    if (!same) this.tip.replaceChildren(element("strong", {}, this.title(bar)), this.sentence(bar));
    const room = this.canvas.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(0, Math.min(event.offsetX + 12, room))}px`;
    this.tip.style.top = `${event.offsetY + 16}px`;
  }

  wheel(event) {
    if (!this.timeline || this.timeline.isEmpty) return;
    const { layout } = this;
    const zooms = event.ctrlKey || event.metaKey || document.activeElement === this.canvas;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      this.move(((event.deltaX || event.deltaY) / layout.width) * (this.view.to - this.view.from));
    } else if (zooms) {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 300), layout.time(Math.max(event.offsetX, layout.left)) / this.timeline.duration);
    }
  }

  key(event) {
    if (!this.timeline || this.timeline.isEmpty || event.ctrlKey || event.metaKey || event.altKey) return;
    const around = this.chosen && (this.chosen.start + this.chosen.duration / 2) / this.timeline.duration;
    const tenth = (this.view.to - this.view.from) / 10;
    const act = {
      ArrowLeft: () => (event.shiftKey ? this.move(-tenth) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.move(tenth) : this.step(1)),
      ArrowUp: () => this.stepLane(-1),
      ArrowDown: () => this.stepLane(1),
      Home: () => this.end(-1),
      End: () => this.end(1),
      Escape: () => this.choose(null),
      "+": () => this.zoom(1.5, around ?? undefined),
      "=": () => this.zoom(1.5, around ?? undefined),
      "-": () => this.zoom(1 / 1.5, around ?? undefined),
      0: () => this.zoomAll(),
      n: () => this.stepPath(1),
      p: () => this.stepPath(-1),
      w: () => this.goToAwaited(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // --- in words

  title(bar) {
    if (!this.timeline.isWait(bar)) return this.timeline.name(bar.task) || label(bar.mode);
    return bar.mode.startsWith("stall_") ? label(bar.mode) : bar.mode;
  }

  /** "backward on cpu-0/compute, step 7: 12.1 ms from 40.2 ms, on the critical path" */
  sentence(bar) {
    const { timeline } = this;
    const times = `${nanoseconds(bar.duration)} from ${nanoseconds(bar.start, timeline.duration)}`;
    const iteration = bar.iteration >= 0 ? `, ${timeline.label(bar.iteration)}` : "";
    if (!timeline.isWait(bar)) {
      const path = timeline.isOnPath(bar) ? ", on the critical path" : "";
      return `${bar.mode} on ${timeline.lanes[bar.lane]}${iteration}: ${times}${path}`;
    }
    const awaited = bar.waitedFor >= 0 ? ` for ${timeline.name(bar.waitedFor)} on ${timeline.lanes[timeline.laneOf(bar.waitedFor)]}` : "";
    const before = bar.task >= 0 ? `, before ${timeline.name(bar.task)}` : "";
    return `${timeline.lanes[bar.lane]} waited${awaited}${before}${iteration}: ${times}`;
  }
}
