// The page: which job is looked at, what is asked of the daemon and when, and what stands in each of its parts.

import { chart, laneRows } from "./charts.js";
import { isWait, label, swatch } from "./colours.js";
import { duration, element, nanoseconds, number, percent } from "./format.js";
import { TimelineView } from "./timeline.js";

const CHOICES = [1, 2, 4, 8, 16, 32, 64];
const ENDED = ["completed", "failed", "cancelled"];
const AGAIN_MS = 5000; // before the events are asked for anew where the daemon refuses or is gone
const REST = 4; // times as long as an answer took: what a page may cost a daemon that has much to tell
const MAX_TABLE_ROWS = 500;

const part = (id) => document.getElementById(id);
const state = { jobs: [], listed: false, job: null, shown: null, told: null, paused: false, states: "", asking: false, again: false, done: null, restUntil: 0 };

export const view = new TimelineView(part("canvas"), part("tip"), { onChoose: showDetail, onLook: () => pause(true) });

// --- asking

async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error ?? `${path}: ${answer.status}`);
  return told;
}

function listen() {
  const events = new EventSource("api/events");
  events.onmessage = (event) => heard(JSON.parse(event.data));
  events.onerror = () => {
    connection("the daemon does not answer; trying again");
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, AGAIN_MS);
  };
}

function connection(text) {
  if (part("connection").textContent !== text) part("connection").textContent = text;
}

async function heard(event) {
  connection("connected");
  const states = JSON.stringify([event.jobs, event.changes]);
  if (states !== state.states) {
    state.states = states;
    await listJobs().catch((error) => connection(error.message));
  }
  for (const [job, told] of Object.entries(event.progress)) {
    const known = state.jobs.find((each) => each.job === job);
    if (known) Object.assign(known, { step: told.step, steps: told.steps, loss: told.loss });
  }
  showJobs();
  if (!document.hidden && state.job !== state.done && performance.now() >= state.restUntil) refresh();
}

async function listJobs() {
  state.jobs = (await ask("api/jobs")).jobs;
  state.listed = true;
  if (!state.job && state.jobs.length) choose((state.jobs.find((job) => job.state === "running") ?? state.jobs[0]).job);
  const known = state.jobs.find((job) => job.job === state.job);
  if (known && !ENDED.includes(known.state)) state.done = null;
  showJobs();
}

/** Asks for the chosen job and its timeline; one question at a time, and once more if another job was chosen meanwhile. */
async function refresh() {
  if (state.asking) {
    state.again = true;
    return;
  }
  state.asking = true;
  const { job } = state;
  const began = performance.now();
  try {
    const path = `api/jobs/${encodeURIComponent(job)}`;
    const told = await ask(path);
    const wanted = !state.paused || state.told?.job !== job;
    const timeline = wanted ? await ask(`${path}/timeline?iterations=${part("iterations").value}`) : null;
    if (job === state.job) {
      showJob(told);
      if (timeline) showTimeline(timeline);
      state.done = ENDED.includes(told.state) ? job : null;
    }
  } catch (error) {
    if (job === state.job) notice("This job cannot be shown", error.message);
  } finally {
    state.asking = false;
    state.restUntil = performance.now() + REST * (performance.now() - began);
    if (state.again) {
      state.again = false;
      refresh();
    }
  }
}

function choose(job) {
  const asked = `#job=${encodeURIComponent(job)}`;
  if (state.job === job) return;
  Object.assign(state, { job, done: null, told: null });
  pause(false);
  if (location.hash !== asked) history.replaceState(null, "", asked);
  document.title = `${job} · Weft`;
  showJobs();
  showDetail(null);
  refresh();
}

function chooseByAddress() {
  const [, job] = location.hash.match(/^#job=(.+)$/) ?? [];
  try {
    if (job) choose(decodeURIComponent(job));
  } catch {
    connection("the address names no job");
  }
}

function pause(paused) {
  state.paused = paused;
  part("live").textContent = paused ? "resume" : "pause";
  part("live").setAttribute("aria-pressed", paused);
}

// --- showing

function notice(title, text) {
  part("job").hidden = true;
  part("notice").hidden = false;
  part("notice").replaceChildren(element("h3", {}, title), element("p", { class: "muted" }, text));
}

function showJobs() {
  if (!state.listed) {
    part("jobs").replaceChildren(element("li", { class: "muted" }, "not known yet"));
    return;
  }
  if (!state.jobs.length) {
    part("jobs").replaceChildren(element("li", { class: "muted" }, "none yet"));
    if (!state.job) notice("No job yet", "Submit one with: weft submit JOB.toml. It appears here by itself.");
    return;
  }
  const links = () => [...part("jobs").querySelectorAll("a")];
  const focused = document.activeElement?.dataset.job;
  if (links().map((link) => link.dataset.job).join("\n") !== state.jobs.map((job) => job.job).join("\n")) {
    part("jobs").replaceChildren(...state.jobs.map(({ job }) => element("li", {}, element("a", { href: `#job=${encodeURIComponent(job)}`, "data-job": job },
      element("strong", { title: job }, job), element("small", {}, element("span"), element("span"))))));
    links().find((link) => link.dataset.job === focused)?.focus();
  }
  links().forEach((link, at) => { // in place: a link that is replaced under the pointer swallows the click
    const job = state.jobs[at];
    const [told, steps] = link.querySelectorAll("span");
    [told.className, told.textContent] = [`state ${job.state}`, job.state];
    steps.textContent = job.steps ? ` · ${job.step.toLocaleString("en")}/${job.steps.toLocaleString("en")}` : "";
    if (job.job === state.job) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
}

function showJob(job) {
  part("notice").hidden = true;
  part("job").hidden = false;
  state.shown = job;
  part("job-name").textContent = job.job;
  part("job-state").textContent = job.state;
  part("job-state").className = `state ${job.state}`;
  part("job-plan").textContent = planOf(job);
  part("job").classList.toggle("bare", !job.time); // it has no plan yet, or never had one
  part("job-progress").hidden = !job.steps;
  if (job.steps) {
    part("job-bar").max = job.steps;
    part("job-bar").value = job.step;
    part("job-steps").textContent = `${job.step.toLocaleString("en")} of ${job.steps.toLocaleString("en")} steps`;
  }
  showNotice(job);
  showFigures(job);
  const lanes = job.time?.lanes ?? {};
  part("lanes").replaceChildren(...laneRows(lanes, state.told?.modes ?? modesOf(lanes), state.told?.lanes.map((each) => each.lane) ?? []));
  showStalls(job.time);
  showCurves();
}

function showCurves() {
  const curves = state.shown?.history ?? {};
  chart(part("loss"), [{ name: "training", points: curves.loss }, { name: "validation", points: curves.validation_loss, class: "validation" }], "loss");
  chart(part("speed"), [{ name: "throughput", points: curves.samples_per_second }], "samples/s");
}

function modesOf(lanes) {
  return [...new Set(Object.values(lanes).flatMap((lane) => Object.keys(lane.modes)))];
}

function planOf(job) {
  if (!job.plan) return "";
  const { schedule, microbatches, stages } = job.plan;
  const replicas = new Set(stages.map((stage) => stage.replica)).size;
  const count = (of, what) => `${of} ${what}${of === 1 ? "" : "s"}`;
  const workers = new Set(stages.map((stage) => stage.worker)).size;
  return [schedule, replicas > 1 && count(replicas, "replica"), count(stages.length, "stage"), count(microbatches, "microbatch").replace("hs", "hes"),
    count(workers, "worker"), job.attempt > 1 && `attempt ${job.attempt}`].filter(Boolean).join(" · ");
}

function showNotice(job) {
  const [title, text] = job.state === "failed" ? [`Failed: ${job.reason ?? "no reason is known"}`, job.error]
    : job.state === "queued" ? ["It waits", sentence(job.why ?? "it is about to start")]
    : job.state === "planning" ? ["It is being planned", "A worker imports the job and measures its model."]
    : job.state === "recovering" ? ["It starts again", job.reason ?? "after a lost worker"]
    : job.state === "cancelled" ? ["Cancelled", job.reason ?? ""] : [null, null];
  part("job-notice").hidden = !title;
  part("job-notice").classList.toggle("failed", job.state === "failed");
  if (title) part("job-notice").replaceChildren(element("h3", {}, title), job.state === "failed" ? element("pre", {}, text ?? "") : element("p", {}, text ?? ""));
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function showFigures(job) {
  for (const each of document.querySelectorAll(".since")) each.textContent = `since ${job.attempt > 1 ? `attempt ${job.attempt}` : "the job"} began`;
  const { iteration_seconds: iteration, limit_seconds: limit, time, progress, overlap } = job;
  const [hidden, exposed] = ["hidden", "exposed"].map((what) => Object.values(overlap ?? {}).flatMap((kinds) => Object.values(kinds))
    .reduce((sum, each) => sum + each[what], 0));
  const planned = job.plan?.predicted_iteration_seconds;
  const speed = progress?.samples_per_second ?? job.history?.samples_per_second?.at(-1)?.[1];
  const validation = (job.validation ?? progress?.validation)?.loss;
  const figures = [
    ["Iteration", duration(iteration), planned ? `planned ${duration(planned)}` : "median"],
    ["Speed limit", duration(limit), limit ? "of the measured graph" : "not known"],
    ["Iteration ÷ limit", iteration && limit ? number(iteration / limit) : "–", "1 is the best there is"],
    ["Bubble ratio", percent(time?.bubble_ratio), "waits between stages"],
    ["Stalled", percent(stalled(time?.lanes)), "of compute lanes"],
    ["Imbalance", percent(time?.imbalance), "busiest over mean"],
    ["Overlap", hidden + exposed > 0 ? percent(hidden / (hidden + exposed)) : "–", hidden + exposed > 0 ? `hidden; ${duration(exposed)} exposed` : "no sync or transfer"],
    ["Throughput", speed ? `${number(speed)}/s` : "–", "samples"],
    ["Loss", number(job.loss), validation === undefined ? "" : `validation ${number(validation)}`],
    ENDED.includes(job.state) ? ["Took", duration(job.seconds), ""] : ["Time left", duration(progress?.eta_seconds), "at this speed"],
  ];
  part("figures").replaceChildren(...figures.map(([name, value, more]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", { title: more || undefined }, more ?? "")))));
}

/** The part of the compute lanes' time in which they did not compute, update or synchronise. */
function stalled(lanes) {
  const modes = Object.entries(lanes ?? {}).filter(([lane]) => /\/compute(-\d+)?$/.test(lane)).flatMap(([, told]) => Object.entries(told.modes));
  const sum = (chosen) => chosen.reduce((total, [, seconds]) => total + seconds, 0);
  return modes.length ? sum(modes.filter(([mode]) => isWait(mode))) / sum(modes) : null;
}

function showStalls(time) {
  const stalls = time?.stalls ?? [];
  part("stalls").replaceChildren(...stalls.map((stall) => {
    const mode = ["recovery", "idle"].includes(stall.cause) ? stall.cause : `stall_${stall.cause}`;
    const cause = element("td", {}, element("span", {}, swatch(mode), stall.cause));
    return element("tr", {}, element("td", {}, stall.lane), cause, element("td", {}, stall.task ?? "–"), element("td", {}, stall.on ?? "–"),
      element("td", { class: "number" }, duration(stall.seconds)),
      element("td", { class: "number" }, percent(stall.seconds / time.lanes[stall.lane].wall_seconds)));
  }));
  if (!stalls.length) part("stalls").replaceChildren(element("tr", {}, element("td", { colspan: 6, class: "muted" }, "No lane has waited yet.")));
}

function showTimeline(told) {
  state.told = told;
  const empty = told.iterations.length === 0;
  part("timeline").hidden = part("legend").hidden = part("keys").hidden = part("rows").hidden = empty;
  part("no-rows").hidden = !empty;
  if (empty) {
    part("window").textContent = "";
    const ended = ENDED.includes(state.shown?.state);
    part("no-rows").textContent = told.error ?? (ended ? "This job has no recording of a whole iteration." : "No iteration is whole yet; the first ones appear here.");
    return;
  }
  view.show(told);
  part("window").textContent = windowOf(told);
  showLegend(told);
  showDetail(view.chosen);
  const lanes = part("rows-lane");
  if (lanes.options.length !== told.lanes.length || lanes.options[0].textContent !== told.lanes[0].lane) {
    lanes.replaceChildren(...told.lanes.map((lane, at) => element("option", { value: at }, lane.lane)));
    lanes.value = Math.max(0, told.lanes.findIndex((lane) => lane.rows.length)); // a loader may be done with these iterations
  }
  showRows();
}

function windowOf(told) {
  const [first, last] = [told.iterations[0], told.iterations.at(-1)].map(({ iteration }) => view.timeline.label(iteration));
  const several = /^step \d+ step \d+$/.test(`${first} ${last}`) ? `${first.replace("step", "steps")} to ${last.replace("step ", "")}` : `${first} to ${last}`;
  const end = new Date(told.ended_at * 1000);
  const when = end.toDateString() === new Date().toDateString() ? end.toLocaleTimeString("en-GB") : end.toLocaleString("en-GB");
  return `${first === last ? first : several}, ${nanoseconds(told.duration)}, until ${when}`;
}

function showLegend(told) {
  const seen = new Set(told.lanes.flatMap((lane) => lane.rows.filter((_, at) => at % 6 === 0)));
  const key = [...seen].sort((one, other) => one - other).join();
  if (part("legend").dataset.modes === key) return;
  part("legend").dataset.modes = key;
  const items = told.modes.filter((_, at) => seen.has(at)).map((mode) => element("li", {}, swatch(mode), label(mode)));
  const planned = swatch("forward");
  planned.classList.add("planned");
  part("legend").replaceChildren(...items, element("li", {}, planned, "planned, above the actual"),
    element("li", {}, element("span", { class: "swatch path" }), "critical path"));
}

function showDetail(bar) {
  const { timeline } = view;
  part("said").textContent = bar ? `${view.title(bar)}. ${view.sentence(bar)}` : "";
  if (!bar || !timeline) {
    part("detail").replaceChildren(element("p", { class: "muted" }, "Choose a bar to see what it is."));
    return;
  }
  const facts = [["lane", timeline.lanes[bar.lane]]];
  if (timeline.isWait(bar)) {
    facts.unshift(["cause", label(bar.mode)]);
    if (bar.waitedFor >= 0) facts.push(["waited for", timeline.name(bar.waitedFor)], ["on", timeline.lanes[timeline.laneOf(bar.waitedFor)]]);
    if (bar.task >= 0) facts.push(["before", timeline.name(bar.task)]);
  } else {
    facts.unshift(["task", timeline.name(bar.task)], ["kind", bar.mode]);
    if (timeline.plannedOf.has(bar.task)) facts.push(["planned", nanoseconds(timeline.plannedOf.get(bar.task))]);
  }
  if (bar.iteration >= 0) facts.push(["iteration", timeline.label(bar.iteration)]);
  facts.push(["start", nanoseconds(bar.start, timeline.duration)], ["duration", nanoseconds(bar.duration)]);
  if (timeline.isOnPath(bar)) facts.push(["critical path", "yes"]);
  const list = element("dl", {}, ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  const awaited = timeline.isWait(bar) && timeline.waitedFor(bar);
  if (awaited) {
    const go = element("button", { type: "button" }, `to ${view.title(awaited)}`);
    go.addEventListener("click", () => view.choose(awaited));
    list.append(element("div", {}, go));
  }
  part("detail").replaceChildren(list);
}

function showRows() {
  if (!part("rows").open || !view.timeline) return;
  const { timeline } = view;
  const lane = Number(part("rows-lane").value);
  const count = timeline.count(lane);
  const cells = (bar) => [bar.iteration >= 0 ? timeline.label(bar.iteration) : "–", timeline.name(bar.task) || "–", label(bar.mode), timeline.name(bar.waitedFor) || "–"];
  part("rows-body").replaceChildren(...Array.from({ length: Math.min(count, MAX_TABLE_ROWS) }, (_, index) => {
    const bar = timeline.bar(lane, index);
    return element("tr", {}, ...cells(bar).map((text) => element("td", {}, text)),
      ...[nanoseconds(bar.start, timeline.duration), nanoseconds(bar.duration)].map((text) => element("td", { class: "number" }, text)));
  }));
  part("rows-more").textContent = count > MAX_TABLE_ROWS ? `the first ${MAX_TABLE_ROWS} of ${count}; show fewer iterations to see the rest` : "";
}

// --- beginning

part("iterations").append(...CHOICES.map((count) => element("option", { value: count, selected: count === 4 }, count === 1 ? "1 iteration" : `${count} iterations`)));
part("iterations").addEventListener("change", () => {
  state.told = null; // asked for even while paused
  if (state.job) refresh();
});
part("live").addEventListener("click", () => {
  pause(!state.paused);
  if (!state.paused) refresh();
});
part("show-path").addEventListener("change", (event) => {
  view.showPath = event.target.checked;
  view.draw();
});
part("zoom-in").addEventListener("click", () => view.zoom(1.5));
part("zoom-out").addEventListener("click", () => view.zoom(1 / 1.5));
part("zoom-all").addEventListener("click", () => view.zoomAll());
part("rows").addEventListener("toggle", showRows);
part("rows-lane").addEventListener("change", showRows);
addEventListener("hashchange", chooseByAddress);
addEventListener("visibilitychange", () => !document.hidden && state.job && state.job !== state.done && refresh());
let resized;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => state.shown && showCurves(), 100);
});
showJobs();
chooseByAddress();
listen();
