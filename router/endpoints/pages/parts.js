// What several pages use: elements, tables, numbers, and requests with the API key that the user gave.

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.map(each => each ?? ""));
  return made;
}

export const fill = (parent, children) => parent.replaceChildren(...children);

// `rows` are cells by the name of their column. `texts`: columns that begin on the left.
export function table(parent, columns, rows, texts, none) {
  if (!rows.length) return fill(parent, [element("tr", {}, element("td", { className: "dim" }, none))]);
  const kind = column => ({ className: texts.includes(column) ? "" : "number" });
  fill(parent, [
    element("tr", {}, ...columns.map(column => element("th", kind(column), column))),
    ...rows.map(cells => element("tr", {}, ...columns.map(column => element("td", kind(column), cells[column] ?? "–")))),
  ]);
}

export const number = value => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
export const percent = share => share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;

// A number with three digits that matter.
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (!size) return "0";
  return size >= 100 ? number(value) : size >= 10 ? value.toFixed(1) : size >= .01 ? value.toFixed(2) : value.toExponential(0);
}

export const seconds = value => value === null || value === undefined ? "–" : value < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`;

// The JSON of this router. Throws an Error with its message and `status`.
export async function api(path) {
  const key = sessionStorage.getItem("key");
  const answer = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? answer.statusText), { status: answer.status });
}
