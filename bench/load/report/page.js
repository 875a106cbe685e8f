// Draws the runs in the element #data: distributions, timelines, and sweeps. One colour is one run.
const runs = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#4a7bea", "#e0783a", "#38a169", "#b25fd0", "#c9485b", "#2aa5b8"];
// p50 is a thick line, p99 a thin and dashed one, also in the legend.
const STYLES = [{ width: 2 }, { width: 1, dash: [5, 4] }];
const text = value => value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toLocaleString("en");

// `curves`: {label, run, style, points}, where points are [x, y]. The styles of one run differ in their dashes.
function draw(title, xLabel, curves, options = {}) {
  const drawn = curves.filter(each => each.points.length);
  if (!drawn.length) return;
  const section = document.createElement("section"), heading = document.createElement("h2");
  heading.textContent = title;
  section.append(heading);
  document.getElementById("plots").append(section);
  const tables = drawn.map(({ points }) => [points.map(([x]) => x), points.map(([, y]) => y)]);
  const axis = { stroke: () => getComputedStyle(document.body).color, grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
  const width = () => Math.max(240, section.clientWidth - 26);
  const plot = new uPlot({
    width: width(), height: 240, cursor: { y: false },
    legend: { markers: { width: 2, dash: (_, index) => drawn[index - 1]?.style ? "dashed" : "solid" } },
    scales: { x: { time: false, distr: options.log ? 3 : 1 }, y: { range: (_, low, high) => [0, options.top ?? (high > 0 ? high * 1.05 : 1)] } },
    axes: [{ ...axis, label: xLabel, labelSize: 18, values: (_, ticks) => ticks.map(tick => tick === null ? "" : text(tick)) }, { ...axis, size: 60, values: (_, ticks) => ticks.map(tick => tick === null ? "" : text(tick)) }],
    series: [{ label: xLabel, value: (_, value) => text(value) }, ...drawn.map(({ label, run, style = 0, marks }) => ({
      label, stroke: COLOURS[run % COLOURS.length], ...STYLES[style], spanGaps: true,
      points: { show: marks ?? false }, value: (_, value) => text(value) }))],
  }, uPlot.join(tables), section);
  addEventListener("resize", () => plot.setSize({ width: width(), height: 240 }));
}

const name = (run, label) => runs.length > 1 ? `${run.name} ${label}`.trim() : label || run.name;

for (const [metric, title] of [["ttft", "Time to first token, ms"], ["itl", "Gaps between tokens, ms"],
  ["e2e.per_token", "Latency ÷ output tokens, ms"]])
  draw(`${title}: share of requests below`.replace("requests", metric === "itl" ? "gaps" : "requests"), "ms", runs.map((run, index) => {
    const values = run.curves.distributions?.[metric] ?? [];
    // Equal values are one point, the last.
    const points = values.map((value, at) => [value, at / (values.length - 1)]).filter(([value], at) => value !== values[at + 1]);
    if (values.length) points.unshift([values[0] * (1 - 1e-6), 0]);
    return { label: name(run, ""), run: index, points };
  }), { top: 1, log: runs.every(run => (run.curves.distributions?.[metric]?.[0] ?? 1) > 0) });

const timeline = (run, metric) => (run.curves.timeline?.at ?? []).map((at, index) => [at, run.curves.timeline[metric][index]])
  .filter(([, value]) => value !== null);
for (const [title, metrics] of [
  ["First tokens over time, ms", { "ttft.p50": "p50", "ttft.p99": "p99" }],
  ["Gaps over time, ms", { "itl.p50": "p50", "itl.p99": "p99" }],
  ["Output tokens per second", { tokens_per_s: "" }], ["Requests in flight", { in_flight: "" }],
  ["Failures per second", { failed_per_s: "" }]]) {
  const curves = runs.flatMap((run, index) => Object.entries(metrics).map(([metric, label], style) =>
    ({ label: name(run, label), run: index, style, points: timeline(run, metric) })));
  if (title !== "Failures per second" || curves.some(({ points }) => points.some(([, value]) => value)))
    draw(title, "seconds since the start", curves);
}

for (const [title, rows] of [
  ["First tokens by load, ms", { "ttft.p50": "p50", "ttft.p99": "p99" }], ["Gaps by load, ms", { "itl.p50": "p50", "itl.p99": "p99" }],
  ["Throughput and goodput by load, requests/s", { "throughput.requests": "all", "goodput.requests": "within the objectives" }],
  ["Output tokens per second by load", { "throughput.output_tokens": "" }]])
  draw(title, "load: sessions/s, or users", runs.flatMap((run, index) => Object.entries(rows).map(([row, label], style) =>
    ({ label: name(run, label), run: index, style, marks: true,
      points: run.points.filter(({ rows: found }) => row in found).map(({ x, rows: found }) => [x, found[row]]) }))));
