// Draws the cluster from /status and /metrics of its router, every two seconds. The history of the last 15 minutes
// is this page's own: the router keeps none.
import { api, element, fill, number, percent, seconds, short, table } from "./parts.js";

const PERIOD = 2000, MINUTES = 15, POINTS = MINUTES * 60_000 / PERIOD;
const ids = ["main", "model", "state", "ask", "key", "cards", "workers", "plots", "failures", "requests", "pools",
  "sizes", "alone", "why", "defect", "timeline", "title", "lanes", "close",
  "network", "links"];
const at = Object.fromEntries(ids.map(id => [id, document.getElementById(id)]));

// ---------------------------------------------------------------- scrapes

const HISTOGRAMS = { ttft: "vllm:time_to_first_token_seconds", gap: "vllm:inter_token_latency_seconds" };
const SUMS = ["vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:num_requests_running",
  "vllm:num_requests_waiting", "vllm:request_success_total", "baton:request_errors_total"];

// Sums of the samples that the page needs, and histograms as maps of a bound to its cumulative count.
export function parse(text) {
  const page = { ttft: new Map(), gap: new Map() };
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^([\w:]+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
    if (SUMS.includes(name)) page[name] = (page[name] ?? 0) + Number(value);
    for (const [short, metric] of Object.entries(HISTOGRAMS)) {
      if (name !== `${metric}_bucket`) continue;
      const bound = Number(/le="([^"]*)"/.exec(labels)[1].replace("+Inf", "Infinity"));
      page[short].set(bound, (page[short].get(bound) ?? 0) + Number(value));
    }
  }
  return page;
}

// A quantile of what a histogram got between two pages, interpolated within its bucket. null: nothing.
export function quantile(before, after, q) {
  const counts = [...after].sort(([a], [b]) => a - b).map(([bound, count]) => [bound, count - (before?.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  let lower = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= q * total && count > below)
      return bound === Infinity ? lower : lower + (bound - lower) * (q * total - below) / (count - below);
    [lower, below] = [bound, count];
  }
  return lower;
}

const added = (before, after) => before === undefined || after < before ? null : after - before;
const sum = values => values.filter(each => each !== null && each !== undefined).reduce((a, b) => a + b, 0);
const ROLES = ["prefill", "decode", "encode"];
const nameOf = worker => ROLES.includes(worker.role) ? `${worker.role} ${worker.index}` : worker.address;
const poolOf = worker => (worker.status.pool ?? "").replace("pool_", "") || worker.role;

const scrapes = []; // of the last 15 minutes; the newest is the last
const series = { at: [], output: [], prompt: [], ttft50: [], ttft99: [], gap50: [], gap99: [], running: [], waiting: [],
  wait: [], hits: [] };
const pairs = new Map(); // "prefill 0 → decode 0" to its GB/s at each time of `series`

function record(scrape) {
  const before = scrapes.at(-1);
  scrapes.push(scrape);
  if (scrapes.length > POINTS) scrapes.shift();
  if (!before) return;
  const passed = (scrape.at - before.at) / 1000;
  const rate = name => (each => each === null ? null : each / passed)(added(before.page[name], scrape.page[name]));
  // A quantile of few requests jumps: each point is of the last ten seconds.
  const recent = scrapes.find(each => each.at >= scrape.at - 10_500) ?? before;
  const from = recent === scrape ? before : recent;
  const point = {
    at: scrape.at / 1000, output: rate("vllm:generation_tokens_total"), prompt: rate("vllm:prompt_tokens_total"),
    running: scrape.page["vllm:num_requests_running"] ?? 0, waiting: scrape.page["vllm:num_requests_waiting"] ?? 0,
    wait: scrape.status.router.expected_wait_seconds ?? null, hits: hitShare(from, scrape),
  };
  for (const kind of ["ttft", "gap"])
    for (const q of [50, 99])
      point[kind + q] = (found => found === null ? null : found * 1000)(quantile(from.page[kind], scrape.page[kind], q / 100));
  const rates = pairRates(before, scrape, passed);
  for (const name of rates.keys())
    if (!pairs.has(name) && pairs.size < 64) pairs.set(name, series.at.map(() => null));
  for (const [name, list] of Object.entries(series)) list.push(point[name] ?? null);
  for (const [name, list] of pairs) list.push(rates.get(name) ?? null);
  if (series.at.length > POINTS) [...Object.values(series), ...pairs.values()].forEach(list => list.shift());
}

function earlier(scrape, worker) {
  return scrape?.workers.get(worker.incarnation)?.status;
}

function pairRates(before, after, passed) {
  const rates = new Map();
  for (const worker of after.status.workers)
    for (const [reader, bytes] of Object.entries(worker.status.kv_sent ?? {})) {
      const more = added(earlier(before, worker)?.kv_sent?.[reader] ?? (earlier(before, worker) ? 0 : undefined), bytes);
      if (more !== null) rates.set(`${nameOf(worker)} → ${reader}`, more / passed / 1e9);
    }
  return rates;
}

function hitShare(before, after) {
  const change = name => sum(after.status.workers.map(each => added(earlier(before, each)?.[name], each.status[name])));
  const asked = change("prefix_cache_queries");
  return asked ? change("prefix_cache_hits") / asked * 100 : null;
}

// ---------------------------------------------------------------- cards and tables

function drawCards(now, before) {
  const { router } = now.status, page = now.page, last = name => series[name].at(-1);
  // From the first scrape of this page on, which is at most 15 minutes ago.
  const whole = (kind, q) => scrapes.length < 2 ? null : quantile(scrapes[0].page[kind], page[kind], q);
  const ms = value => value === null || value === undefined ? "–" : short(value * 1000);
  const handovers = router.handovers, alone = Object.values(router.overflow).reduce((a, b) => a + b, 0);
  const hidden = now.status.workers.reduce(([part, all], each) =>
    [part + each.status.handovers_hidden, all + each.status.handovers], [0, 0]);
  const minute = router.last_minute;
  fill(at.cards, [
    [`${number(page["vllm:num_requests_running"])} + ${number(page["vllm:num_requests_waiting"])}`, "requests running + waiting"],
    [seconds(router.expected_wait_seconds), "expected wait"],
    [short(last("output")), "output tokens/s"],
    [short(last("prompt")), "prompt tokens/s"],
    [`${ms(whole("ttft", .5))} / ${ms(whole("ttft", .99))}`, "TTFT p50 / p99, ms"],
    [`${ms(whole("gap", .5))} / ${ms(whole("gap", .99))}`, "gap p50 / p99, ms"],
    [percent(last("hits") === null || last("hits") === undefined ? null : last("hits") / 100), "of prompts cached, last 10 s"],
    [`${number(handovers)} / ${number(alone)}`, "with a handover / on one worker"],
    [hidden[1] ? percent(hidden[0] / hidden[1]) : "–", "of transfers hidden by prefill"],
    [number(router.split_prompts), "split prompts"],
    [number(router.pool_changes), "flips of workers"],
    [`${minute.errors} of ${minute.requests}`, "errors and requests, last minute", minute.errors ? "bad" : ""],
  ].map(([value, text, kind = ""]) => element("div", {}, element("b", { className: kind }, value), element("span", {}, text))));
}

function supervised(worker, roles) {
  return roles.find(role => role.address === worker.address) ?? {};
}

/** Workers of the supervisor that the router does not know: they start, or have ended. */
function absent(status) {
  const known = new Set(status.workers.map(each => each.address));
  return (status.cluster?.roles ?? []).filter(role => ROLES.includes(role.role) && !known.has(role.address));
}

function drawWorkers(now, before) {
  const passed = before ? (now.at - before.at) / 1000 : 0;
  const roles = now.status.cluster?.roles ?? [];
  const sees = now.status.workers.some(each => each.status.images_encoded || each.status.images_waiting);
  const rows = now.status.workers.map(worker => {
    const load = worker.status, old = earlier(before, worker), role = supervised(worker, roles);
    const rate = name => (each => each === null || !passed ? "–" : short(each / passed))(added(old?.[name], load[name]));
    const used = load.blocks_total ? 1 - load.blocks_free / load.blocks_total : null;
    const target = load.gap_target_seconds ? ` / ${short(load.gap_target_seconds * 1000)}` : "";
    const why = [worker.reason, worker.remedy].filter(Boolean).join(". ");
    return {
      worker: element("span", { className: "nowrap" }, nameOf(worker)), pool: poolOf(worker),
      state: element("span", { className: worker.state === "ready" ? "good" : "bad", title: why },
        worker.state + (why && worker.state !== "ready" ? `: ${why}` : "")),
      seats: `${load.requests_running} / ${worker.description.max_num_seqs}`, waiting: number(load.requests_waiting),
      "KV used": used === null ? "–" : element("span", { className: "nowrap" },
        element("meter", { value: used, min: 0, max: 1 }), ` ${percent(used)}`),
      "prompt/s": rate("prompt_tokens"), "output/s": rate("generation_tokens"),
      "step / target, ms": load.step_seconds ? short(load.step_seconds * 1000) + target : "–",
      "KV MB/s": (each => each === null || !passed ? "–" : short(each / passed / 1e6))(added(old?.kv_bytes, load.kv_bytes)),
      "images/s (waiting)": `${rate("images_encoded")} (${number(load.images_waiting)})`,
      restarts: role.restarts ?? "–", device: worker.description.device || "–",
    };
  });
  for (const role of absent(now.status))
    rows.push({ worker: element("span", { className: "nowrap" }, `${role.role} ${role.index}`), pool: role.role,
      state: element("span", { className: "warn" }, [...new Set([role.phase, role.stage, role.last_exit])].filter(Boolean).join(": ")),
      restarts: role.restarts });
  rows.sort((a, b) => (a.pool < b.pool) - (a.pool > b.pool) || a.worker.textContent.localeCompare(b.worker.textContent, "en", { numeric: true }));
  table(at.workers, ["worker", "pool", "state", "seats", "waiting", "KV used", "prompt/s", "output/s",
    "step / target, ms", "KV MB/s", ...(sees ? ["images/s (waiting)"] : []), "restarts", "device"], rows, ["worker", "pool", "state", "KV used", "device"],
    "The router knows no worker.");
}

function drawLinks({ status: { workers } }) {
  const names = new Map(workers.map(each => [each.incarnation, nameOf(each)]));
  const rows = workers.flatMap(worker => worker.status.kv_links.map(link => ({
    from: names.get(link.incarnation) ?? "–", to: nameOf(worker), "carries GB/s": short(link.bytes_per_s / 1e9),
    used: element("span", { className: "nowrap" }, element("meter", { value: link.used, min: 0, max: 1 }), ` ${percent(link.used)}`),
    "under way MB": short(link.bytes_waiting / 1e6) })));
  at.network.hidden = !rows.length;
  table(at.links, ["from", "to", "carries GB/s", "used", "under way MB"], rows, ["from", "to", "used"], "");
}

const clock = time => new Date(time * 1000).toLocaleTimeString();
const link = id => id ? element("button", { onclick: () => showRequest(id), title: "its timeline" }, id) : "–";

function drawRecords({ status: { router, cluster } }) {
  table(at.failures, ["time", "request", "what", "worker", "message", "remedy"], router.failures.toReversed().map(each => ({
    time: clock(each.at), request: link(each.request_id), what: each.code, worker: each.worker,
    message: long(each.message), remedy: long(each.remedy) })), ["time", "request", "what", "worker", "message", "remedy"], "None.");
  table(at.requests, ["time", "request", "prompt", "cached", "output", "TTFT ms", "ms/token", "end", "route"],
    router.recent_requests.toReversed().map(each => ({
      time: clock(each.began), request: link(each.id), prompt: number(each.prompt_tokens), cached: number(each.cached_tokens),
      output: number(each.output_tokens), "TTFT ms": short(each.first_token_seconds * 1000),
      "ms/token": each.output_tokens ? short(each.seconds * 1000 / each.output_tokens) : "–",
      end: element("span", { className: each.error ? "bad" : "", title: each.error }, each.finish_reason),
      route: each.route.join(" → ") })), ["time", "request", "end", "route"], "None has ended yet.");
  const alone = Object.entries(router.overflow).filter(([, count]) => count);
  at.alone.hidden = !alone.length;
  table(at.why, ["requests", "where, and why", "reason"], alone.map(([reason, count]) => ({ requests: number(count),
    "where, and why": router.overflow_why?.[reason], reason })), ["where, and why", "reason"], "");
  const pools = Object.entries(cluster?.pools ?? {});
  at.pools.hidden = !pools.length;
  table(at.sizes, ["pool", "workers", "needed", "why"], pools.map(([name, pool]) => ({ pool: name,
    workers: `${pool.size}${pool.group > 1 ? ` groups of ${pool.group}` : ""} (${pool.least} to ${pool.most})`, needed: number(pool.needed), why: pool.why })), ["pool", "why"], "");
}

const long = text => element("span", { className: "long" }, text.length > 300 ? `${text.slice(0, 300)}…` : text);

// ---------------------------------------------------------------- the timeline of a request

async function showRequest(id) {
  at.title.textContent = id;
  fill(at.lanes, [element("p", { className: "dim" }, "Asking the workers …")]);
  at.timeline.showModal();
  let found;
  try {
    found = await api(`status/requests/${encodeURIComponent(id)}`);
  } catch (error) {
    return fill(at.lanes, [element("p", {}, error.message)]);
  }
  const phases = Object.entries(found.phases).flatMap(([worker, list]) => list.map(each => ({ ...each, worker })));
  const starts = phases.map(each => each.start - found.began);
  const begin = Math.min(0, ...starts);
  const end = Math.max(found.seconds, ...phases.map(each => each.start - found.began + each.seconds));
  const lane = (label, title, shapes, value) => element("div", { className: "lane", title },
    element("span", {}, label), svg(shapes, begin, end), element("span", {}, value));
  const lanes = phases.sort((a, b) => a.start - b.start).map(each => lane(`${each.kind} · ${each.worker.split(" at ")[0]}`,
    Object.entries(each.about).map(([key, value]) => `${key}: ${value}`).join("\n"),
    [{ kind: each.kind, from: each.start - found.began, to: each.start - found.began + each.seconds }], seconds(each.seconds)));
  lanes.unshift(lane("router", "", found.events.map(each => ({ kind: "event", from: each.seconds, to: each.seconds })), seconds(found.seconds)));
  const events = element("table");
  table(events, ["after", "what", "worker"], found.events.map(each => ({ after: seconds(each.seconds), what: each.what,
    worker: each.worker })), ["what", "worker"], "");
  fill(at.lanes, [
    element("p", { className: "dim" }, `${found.prompt_tokens} prompt tokens, ${found.cached_tokens} of them cached, ` +
      `${found.output_tokens} output tokens, ${found.finish_reason}`),
    ...(found.error ? [element("p", { className: "bad" }, found.error)] : []), ...lanes, events]);
}

function svg(shapes, begin, end) {
  const make = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    return made;
  };
  const x = at => 1000 * (at - begin) / (end - begin || 1);
  const drawn = make("svg", { viewBox: "0 0 1000 20", preserveAspectRatio: "none" });
  drawn.append(...shapes.map(({ kind, from, to }) => kind === "event"
    ? make("path", { class: "event", d: `M${x(from)} 0V20`, "vector-effect": "non-scaling-stroke" })
    : make("rect", { class: kind, x: x(from), y: 3, width: Math.max(2, x(to) - x(from)), height: 14 })));
  return drawn;
}

// ---------------------------------------------------------------- plots

const COLOURS = ["#4a7bea", "#e0783a", "#38a169", "#b25fd0", "#c9485b", "#2aa5b8", "#8a8f3c", "#7d6bd9"];
const PLOTS = [
  ["Tokens per second", { output: "output", prompt: "prompt" }],
  ["First tokens, ms", { ttft50: "p50", ttft99: "p99" }],
  ["Gaps between tokens, ms", { gap50: "p50", gap99: "p99" }],
  ["Requests", { running: "running", waiting: "waiting" }],
  ["Expected wait, s", { wait: "new request" }],
  ["Prompt tokens found in caches, %", { hits: "cached" }],
];
const drawn = new Map(); // title to its plot, and the names of the series that it has

function drawPlots() {
  if (series.at.length < 2) return;
  for (const [title, names] of PLOTS) draw(title, Object.values(names), Object.keys(names).map(name => series[name]));
  if (pairs.size) draw("KV between workers, GB/s", [...pairs.keys()], [...pairs.values()]);
}

function draw(title, labels, lists) {
  const data = [series.at, ...lists], known = drawn.get(title);
  if (known?.labels.join() === labels.join()) return known.plot.setData(data);
  const section = known?.section ?? element("section", {}, element("h2", {}, title));
  if (!known) at.plots.append(section);
  known?.plot.destroy();
  const axis = { stroke: () => getComputedStyle(document.body).color, grid: { stroke: "#8883", width: 1 }, ticks: { show: false } };
  const plot = new uPlot({
    width: Math.max(240, section.clientWidth - 26), height: 190, legend: { live: true }, cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, space: 90 }, { ...axis, size: 55, values: (_, ticks) => ticks.map(short) }],
    series: [{ label: "time" }, ...labels.map((label, index) => ({ label, stroke: COLOURS[index % COLOURS.length], width: 1.5,
      spanGaps: false, points: { show: false }, value: (_, value) => value === null ? "–" : short(value) }))],
  }, data, section);
  drawn.set(title, { plot, labels, section });
}

addEventListener("resize", () => drawn.forEach(({ plot, section }) =>
  plot.setSize({ width: Math.max(240, section.clientWidth - 26), height: 190 })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(({ plot }) => plot.redraw()));

// ---------------------------------------------------------------- the loop

async function scrape() {
  const [status, text] = await Promise.all([api("status"), fetch("metrics").then(answer => answer.text())]);
  return { at: Date.now(), status, page: parse(text), workers: new Map(status.workers.map(each => [each.incarnation, each])) };
}

async function update() {
  if (document.hidden) return;
  let now;
  try {
    now = await scrape();
  } catch (error) {
    at.state.className = "bad";
    at.state.textContent = error.status === 401 ? "This cluster has API keys." : `No answer: ${error.message}`;
    if (error.status === 401) {
      at.ask.hidden = false;
      at.main.hidden = true;
    }
    return;
  }
  const before = scrapes.at(-1);
  at.main.hidden = false;
  at.ask.hidden = true;
  // What fails is a defect of this page. The rest is drawn all the same.
  const failed = [];
  for (const draw of [record, drawState, drawCards, drawWorkers, drawLinks, drawRecords, drawPlots]) {
    try {
      draw(now, before);
    } catch (error) {
      failed.push(`${draw.name}: ${error.message}`);
    }
  }
  at.defect.hidden = !failed.length;
  at.defect.textContent = `The cluster answers, but this page fails: ${failed.join("; ")}`;
  // Of scrapes that no rate needs any more only the histograms stay: a thousand workers are megabytes.
  Object.assign(scrapes.at(-10) ?? {}, { status: { router: {}, workers: [] }, workers: new Map() });
}

function drawState({ status: { router, workers, ...rest } }) {
  const ready = workers.filter(each => each.state === "ready").length, all = workers.length + absent({ workers, ...rest }).length;
  at.model.textContent = router.model;
  at.state.textContent = `${router.state} · Baton ${router.version} · up ${uptime(router.uptime_seconds)} · ${ready} of ${all} workers ready`;
  at.state.className = router.ready ? "good" : "bad";
}

const uptime = value => value < 3600 ? `${Math.floor(value / 60)} min` : value < 86400 ? `${(value / 3600).toFixed(1)} h`
  : `${(value / 86400).toFixed(1)} days`;

at.ask.addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("key", at.key.value);
  update();
});
at.close.addEventListener("click", () => at.timeline.close());

async function run() {
  await update();
  setTimeout(run, PERIOD);
}
run();
