"""The style sheet of report.html: light and dark, wide and narrow, screen and paper."""

STYLE = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #fff; --ink: #14181f; --soft: #5a6472; --line: #e2e6ec; --track: #eef1f5;
  --accent: #2563eb; --good: #0f7b4f; --bad: #b42318; --warn: #9a5b00;
  --prompt: #f1f3f6; --model: #eaf1ff; --tool: #fdf3e1; --shade: 234, 88, 12;
  --c0: #2563eb; --c1: #d9730d; --c2: #0f8a6d; --c3: #9b3fc4; --c4: #c92a4b; --c5: #0b7fa5;
  --c6: #7a6a00; --c7: #64707f; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #0e1116; --card: #171b22; --ink: #e8ebf0; --soft: #9aa5b4; --line: #2a313c;
  --track: #222833;
  --accent: #6ea3ff; --good: #4cc38a; --bad: #ff8078; --warn: #f0b556;
  --prompt: #1d222b; --model: #16233d; --tool: #2f2615; --shade: 251, 146, 60;
  --c0: #6ea3ff; --c1: #f5a04c; --c2: #3fc7a2; --c3: #c88af0; --c4: #ff7d97; --c5: #4cc2e6;
  --c6: #cdbb4b; --c7: #9aa5b4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 80px; }
header h1 { margin: 0; font-size: 26px; letter-spacing: -0.01em; }
header p { margin: 4px 0 0; color: var(--soft); }
h2 { margin: 40px 0 12px; font-size: 18px; }
h2 + p { margin: -6px 0 14px; color: var(--soft); }
nav { margin-top: 10px; display: flex; flex-wrap: wrap; gap: 4px 18px; }
a { color: var(--accent); }
.card { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr));
  margin: 12px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 12px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { font-size: 13px; font-weight: 400; color: var(--soft); }
.charts { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); }
figcaption { font-weight: 600; margin-bottom: 8px; }
figcaption small { font-weight: 400; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-weight: 400; font-size: 13px;
  color: var(--soft); }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .y, svg .name { text-anchor: end; }
svg .x { text-anchor: middle; }
.grid { stroke: var(--line); fill: none; }
.grid.base { stroke: var(--soft); stroke-opacity: .5; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-opacity: .3; stroke-width: 1.2; }
.mark { fill-opacity: 0; stroke: transparent; stroke-width: 9; }
.mark.shown, .mark:hover { fill-opacity: 1; }
.bar:hover { opacity: .75; }
.rate { display: grid; grid-template-columns: 11em 1fr 8em; gap: 3px 12px; align-items: center;
  margin: 9px 0; }
.rate svg { grid-area: 1 / 2; height: 26px; border-radius: 5px; overflow: hidden; }
.rate .value { grid-area: 1 / 3; font-weight: 600; font-variant-numeric: tabular-nums; }
.rate small, td small { font-weight: 400; color: var(--soft); }
.track { fill: var(--track); }
.h0, .h1, .h3 { fill: var(--soft); fill-opacity: .55; }
.h1 { fill: var(--c1); fill-opacity: .8; }
.h2 { fill: var(--accent); }
.whisker { stroke: var(--ink); stroke-opacity: .65; stroke-width: 1.4; fill: none;
  vector-effect: non-scaling-stroke; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child, .config td { text-align: left; }
.config td { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  font-size: 13px; }
tbody tr:last-child > * { border-bottom: 0; }
.config th { width: 30%; vertical-align: top; }
tbody th { color: var(--ink); font-size: 15px; }
.gain { color: var(--good); } .drop { color: var(--bad); }
details { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  margin: 10px 0; }
summary { cursor: pointer; padding: 12px 16px; display: flex; flex-wrap: wrap; gap: 4px 12px;
  align-items: center; }
summary::before { content: "\\25B8"; color: var(--soft); }
details[open] > summary::before { content: "\\25BE"; }
summary:focus-visible, a:focus-visible, input:focus-visible { outline: 2px solid var(--accent);
  outline-offset: 2px; border-radius: 6px; }
details > .inside { padding: 0 16px 16px; }
.badge { border-radius: 999px; padding: 1px 10px; font-size: 13px; border: 1px solid currentColor; }
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); }
.badge.warn { color: var(--warn); }
.meta { color: var(--soft); font-size: 13px; }
.segment { border-radius: 8px; margin-top: 8px; padding: 8px 12px; border-left: 4px solid; }
.segment h4 { margin: 0 0 2px; font-size: 12px; font-weight: 600; color: var(--soft); }
.segment pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.prompt, .template { background: var(--prompt); border-color: var(--c7); }
.model { background: var(--model); border-color: var(--c0); }
.tool { background: var(--tool); border-color: var(--c1); }
.t { border-radius: 3px; }
.t:hover { outline: 1px solid var(--accent); }
.control { display: inline-flex; gap: 8px; align-items: center; margin: 0 0 4px; }
.key { display: inline-block; padding: 0 8px; border-radius: 5px; border-width: 0 0 0 4px;
  border-style: solid; }
details.kind > .inside { padding: 0 10px 10px; }
details.kind details { background: var(--bg); }
.wanted { margin: 0 0 4px; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 18px 12px 60px; }
  header h1 { font-size: 23px; }
  .card { padding: 12px; }
  .rate { grid-template-columns: 1fr auto; }
  .rate svg { grid-area: 2 / 1 / 3 / 3; }
  .rate .value { grid-area: 1 / 2; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .plot text { font-size: 19px; }
  summary { padding: 10px 12px; }
  details > .inside { padding: 0 10px 12px; } }
@media print { details { break-inside: avoid; } body { background: #fff; } }
"""

# Seven shades of surprise (nats): on hover, or always while the box is ticked.
SHADE_FROM_NATS = (0.05, 0.25, 0.7, 1.4, 2.5, 4.5)

STYLE += "".join(
    f".model:hover .p{level}, #shade:checked ~ .rollout .p{level} "
    f"{{ background: rgba(var(--shade), {0.11 * level:.2f}); }}\n"
    for level in range(1, len(SHADE_FROM_NATS) + 1)
)
STYLE += "".join(
    f".c{i} {{ stroke: var(--c{i}); fill: var(--c{i}); }}"
    f" .line.c{i} {{ fill: none; }} .bar.c{i} {{ stroke: none; }}"
    f" .mark.c{i} {{ stroke: transparent; }} i.c{i} {{ background: var(--c{i}); }}\n"
    for i in range(8)
)
