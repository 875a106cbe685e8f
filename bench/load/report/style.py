"""Style and script of the HTML report, inlined into every page: it loads nothing from anywhere."""

CSS = """
:root { color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5c6878; --line: #dfe4ea; --shade: #1b243012;
  --bad: #c62839; --warn: #a15c00; --good: #18794e;
  --c0: #2563c9; --c1: #d9580d; --c2: #178a6a; --c3: #9333b5; --c4: #b3861b; --c5: #cf2f6f; --c6: #4b7f8c;
  --c7: #6b7280; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #0f141b; --card: #171e27; --ink: #e6ebf2; --soft: #98a5b5; --line: #2a3441; --shade: #ffffff12;
  --bad: #ff7b86; --warn: #f0b45b; --good: #5fd09b;
  --c0: #6ea8ff; --c1: #ff9a57; --c2: #4fd0a6; --c3: #cf8bea; --c4: #e2bf57; --c5: #ff7fae; --c6: #83c5d4;
  --c7: #a9b3c0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1220px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 34px 0 12px; }
h3 { font-size: 14px; margin: 18px 0 8px; color: var(--soft); font-weight: 600; }
.sub { color: var(--soft); margin: 4px 0 0; }
.banner { margin: 16px 0 0; padding: 10px 14px; border-radius: 8px; border: 1px solid; font-weight: 600; }
.banner.bad { color: var(--bad); } .banner.warn { color: var(--warn); }
.banner ul { margin: 4px 0 0; padding-left: 20px; font-weight: 400; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 20px 0 0; }
.tile, .chart, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 24px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; } .tile small { color: var(--soft); font-size: 12px; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px; }
.chart { margin: 0; padding: 12px 14px 10px; }
.chart figcaption { font-weight: 600; margin-bottom: 4px; }
.plot { position: relative; } .empty { color: var(--soft); }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { fill: var(--soft); font-size: 11px; } svg text.axis { font-size: 11.5px; }
svg text.point { fill: var(--ink); font-size: 10.5px; }
.grid { stroke: var(--line); stroke-width: 1; } .shade { fill: var(--shade); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .line.dash { stroke-dasharray: 5 4; }
.mark { stroke: var(--bad); stroke-width: 2; }
.cross { stroke: var(--soft); stroke-width: 1; visibility: hidden; }
.tip { position: absolute; top: 8px; pointer-events: none; visibility: hidden; background: var(--card);
  border: 1px solid var(--line); border-radius: 6px; padding: 4px 8px; font-size: 12px; white-space: nowrap;
  box-shadow: 0 2px 10px #0003; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12.5px; color: var(--soft);
  margin-top: 4px; }
.key { display: inline-block; width: 18px; border-top: 3px solid; margin-right: 6px; vertical-align: middle; }
.key.dash { border-top-style: dashed; }
.card { padding: 4px 14px 10px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.wrap { white-space: normal; overflow-wrap: anywhere; text-align: left; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
td small { color: var(--soft); }
.bad { color: var(--bad); } .warn { color: var(--warn); } .good { color: var(--good); }
.bar { display: flex; height: 22px; border-radius: 5px; overflow: hidden; margin: 4px 0 2px; }
.bar i { display: block; min-width: 2px; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); }
ul.notes { color: var(--soft); font-size: 13.5px; padding-left: 20px; }
footer { color: var(--soft); font-size: 12.5px; margin-top: 36px; }
""" + "".join(
    f".line.c{i}, .dot.c{i} {{ stroke: var(--c{i}); }} .dot.c{i} {{ fill: var(--card); stroke-width: 2; }} "
    f".key.c{i} {{ border-color: var(--c{i}); }} .bar .c{i} {{ background: var(--c{i}); }}\n"
    for i in range(8)
)

# The value of every line at the point nearest to the pointer.
JS = """
for (const svg of document.querySelectorAll('svg[data-series]')) {
  const series = JSON.parse(svg.dataset.series), tip = svg.parentNode.querySelector('.tip');
  const cross = svg.querySelector('.cross'), width = svg.viewBox.baseVal.width;
  const hide = () => { tip.style.visibility = cross.style.visibility = 'hidden'; };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    let at = null;
    tip.replaceChildren(...series.map(line => {
      const near = line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      if (at === null || Math.abs(near[0] - x) < Math.abs(at - x)) at = near[0];
      const row = document.createElement('div'), key = document.createElement('i');
      key.className = 'key c' + line.color;
      row.append(key, line.name + ': ' + near[2]);
      return row;
    }));
    cross.setAttribute('x1', at); cross.setAttribute('x2', at);
    tip.style.visibility = cross.style.visibility = 'visible';
    const left = at / width * box.width;
    tip.style.left = Math.min(left + 10, box.width - tip.offsetWidth - 4) + 'px';
  });
}
"""
