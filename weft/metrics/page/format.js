// Numbers as people read them, and elements whose texts are texts: nothing that a job is called becomes markup.

/** 3 significant digits with the unit that suits: "253 ms". `total`: a span whose unit to take, for values beside it. */
export function duration(seconds, total = seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(total);
  if (size >= 7200) return `${number(seconds / 3600)} h`;
  if (size >= 120) return `${number(seconds / 60)} min`;
  if (size >= 0.9995 || size === 0) return `${number(seconds)} s`;
  return size >= 0.9995e-3 ? `${number(seconds * 1e3)} ms` : `${number(seconds * 1e6)} µs`;
}

export const nanoseconds = (ns, total = ns) => duration(ns / 1e9, total / 1e9);

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-4 && size > 0)) return value.toExponential(2);
  if (size >= 100) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export function percent(part) {
  if (part === null || part === undefined || !isFinite(part)) return "–";
  return `${part < 0.0995 ? Number((part * 100).toPrecision(2)) : Math.round(part * 100)} %`;
}

/** An element; children are elements or texts. Attributes are set as attributes, `class` and `data-` among them. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function svg(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** Ticks at 1, 2 or 5 times a power of ten: at most so many between the two values. */
export function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => (high - low) / each <= most * (1 + 1e-9));
  const found = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high * (1 + 1e-12); count += 1) found.push(count * step);
  return found;
}
