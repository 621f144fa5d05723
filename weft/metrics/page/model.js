// The timeline that the daemon told (weft/metrics/views/page_data.py), with its bars in order, to be found by time or by task.

const ROW = 6, SPAN = 4, STEP = 5;

/** A bar: {lane, index, mode, task, iteration, waitedFor, start, duration}; lane and index are places, times are ns. */
export class Timeline {
  constructor(told) {
    this.told = told;
    this.duration = told.duration;
    this.iterations = told.iterations;
    this.lanes = told.lanes.map((lane) => lane.lane);
    this.rows = told.lanes.map((lane) => Float64Array.from(lane.rows));
    this.numBusy = told.num_busy;
    this.modes = told.modes ?? [];
    this.planned = this.plannedByLane();
    this.plannedOf = plannedByTask(told.planned);
    this.path = steps(told.path);
    this.onPath = new Set(this.path.map((step) => `${step.task} ${step.iteration}`));
  }

  plannedByLane() {
    const lanes = this.lanes.map(() => []);
    const spans = this.told.planned?.spans ?? [];
    for (let at = 0; at < spans.length; at += SPAN) {
      const [lane, task, start, duration] = spans.slice(at, at + SPAN);
      lanes[lane]?.push({ kind: this.modes[this.told.tasks[task][2]], start, duration });
    }
    return lanes;
  }

  /** "step 126", "validation after step 63": as people count, and as Itinerary.label in weft/itinerary.py has it. */
  label(iteration) {
    const itinerary = this.told.itinerary;
    if (!itinerary) return `iteration ${iteration}`;
    const { steps, steps_per_epoch: training, validations_per_epoch: validations } = itinerary;
    const epoch = Math.floor(iteration / (training + validations));
    const here = Math.min(training, steps - epoch * training);
    const within = iteration - epoch * (training + validations);
    if (within < here) return `step ${epoch * training + within + 1}`;
    const which = validations > 1 ? ` ${within - here + 1} of ${validations}` : "";
    return `validation${which} after step ${epoch * training + here}`;
  }

  /** When its window begins: nanoseconds of the clock, to a quarter of a microsecond. */
  get began() {
    return this.told.ended_at * 1e9 - this.duration;
  }

  get isEmpty() {
    return this.iterations.length === 0;
  }

  count(lane) {
    return this.rows[lane].length / ROW;
  }

  bar(lane, index) {
    const [mode, task, iteration, waitedFor, start, duration] = this.rows[lane].subarray(index * ROW, index * ROW + ROW);
    return { lane, index, mode: this.modes[mode], task, iteration, waitedFor, start, duration };
  }

  mode(lane, index) {
    return this.rows[lane][index * ROW];
  }

  iteration(lane, index) {
    return this.rows[lane][index * ROW + 2];
  }

  start(lane, index) {
    return this.rows[lane][index * ROW + 4];
  }

  end(lane, index) {
    return this.rows[lane][index * ROW + 4] + this.rows[lane][index * ROW + 5];
  }

  isWait(bar) {
    return this.modes.indexOf(bar.mode) >= this.numBusy;
  }

  isOnPath(bar) {
    return !this.isWait(bar) && this.onPath.has(`${bar.task} ${bar.iteration}`);
  }

  name(task) {
    return task >= 0 ? (this.told.tasks[task]?.[0] ?? "") : "";
  }

  laneOf(task) {
    return this.told.tasks[task]?.[1] ?? -1;
  }

  /** The first bar of a lane that ends after a time: the number of bars where none does. */
  firstAfter(lane, time) {
    let low = 0, high = this.count(lane);
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end(lane, middle) > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The bar at a time, or the nearest one within `reach`. */
  at(lane, time, reach) {
    const index = this.firstAfter(lane, time);
    const near = [index, index - 1].filter((each) => each >= 0 && each < this.count(lane));
    const gap = (each) => Math.max(this.start(lane, each) - time, time - this.end(lane, each), 0);
    near.sort((one, other) => gap(one) - gap(other));
    return near.length && gap(near[0]) <= reach ? this.bar(lane, near[0]) : null;
  }

  /** A run of a task in an iteration; of several, where a stop cut it, the last that began before `time`. */
  run(task, iteration, time = Infinity) {
    const lane = this.laneOf(task);
    if (lane < 0) return null;
    let found = null;
    for (let index = 0; index < this.count(lane); index += 1) {
      const row = this.rows[lane].subarray(index * ROW, index * ROW + ROW);
      if (row[0] < this.numBusy && row[1] === task && (iteration === null || row[2] === iteration) && row[4] <= time) {
        found = this.bar(lane, index);
      }
    }
    return found;
  }

  /** The run whose end a wait waited for. It may be of another iteration than the waiter's. */
  waitedFor(bar) {
    return bar.waitedFor >= 0 ? this.run(bar.waitedFor, null, bar.start + bar.duration) : null;
  }

  /** The same bar as one of an older timeline, or null. */
  same(bar, older) {
    if (!bar || bar.lane >= this.lanes.length) return null;
    const start = bar.start + older.began - this.began;
    let [found, least] = [null, Infinity];
    for (let index = 0; index < this.count(bar.lane); index += 1) {
      const other = this.bar(bar.lane, index);
      const isAlike = other.mode === bar.mode && other.task === bar.task && other.iteration === bar.iteration;
      const distance = Math.abs(other.start - start); // waits for one thing may be several
      if (isAlike && distance < least) [found, least] = [other, distance];
    }
    return found;
  }
}

function plannedByTask(planned) {
  const found = new Map();
  const spans = planned?.spans ?? [];
  for (let at = 0; at < spans.length; at += SPAN) found.set(spans[at + 1], spans[at + 3]);
  return found;
}

function steps(path) {
  const found = [];
  for (let at = 0; at < path.length; at += STEP) {
    const [lane, task, iteration, start, duration] = path.slice(at, at + STEP);
    found.push({ lane, task, iteration, start, duration });
  }
  return found;
}
