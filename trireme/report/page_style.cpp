// Colours, type and columns of a page, on screens of any width, light and dark, and on paper.
#include "trireme/report/page_parts.h"

namespace trireme::report {

// Colours of lines are Okabe and Ito's, darker or lighter where the page asks for it.
std::string_view page_style() {
  return R"css(
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f5f6f8; --ink: #1b1f24; --quiet: #5b6470; --rule: #dfe3e8; --grid: #e9ecf0;
  --good: #0a7d50; --fair: #9a5b00; --poor: #b3261e; --open: #1f5fa8;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b65c97; --c4: #b8860b; --c5: #56a0d3; --c6: #6b4fbb; --c7: #7a7a7a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1d2127; --ink: #e6e9ed; --quiet: #9aa4b0; --rule: #333a43; --grid: #262c33;
    --good: #4cc38a; --fair: #e5a54b; --poor: #f2776d; --open: #74b0f4;
    --c0: #56b4e9; --c1: #f08a4b; --c2: #2fc79a; --c3: #dd92c0; --c4: #e6c229; --c5: #8ab8ff; --c6: #b39ddb; --c7: #a8a8a8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1220px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; padding-bottom: 6px; border-bottom: 1px solid var(--rule); }
p { margin: 6px 0; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
code { overflow-wrap: anywhere; }
pre { background: var(--card); border-radius: 8px; padding: 12px 14px; overflow: auto; max-height: 460px; margin: 8px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.quiet, .note, .of { color: var(--quiet); }
.note { font-size: 13px; }
.of { margin-left: 8px; font-size: 13px; }
.pill { display: inline-block; border-radius: 999px; padding: 1px 11px; font-size: 13px; font-weight: 600; border: 1px solid currentColor; white-space: nowrap; vertical-align: 3px; margin-left: 10px; }
td .pill { margin-left: 0; vertical-align: baseline; }
.good { color: var(--good); } .fair { color: var(--fair); } .poor { color: var(--poor); } .open { color: var(--open); }
.warn { border-left: 3px solid var(--fair); padding: 4px 0 4px 12px; margin: 12px 0; }
.cause { border-left: 3px solid var(--poor); padding: 4px 0 4px 12px; margin: 12px 0; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 200px), 1fr)); gap: 12px; margin: 22px 0 0; }
.card { background: var(--card); border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 13px; font-weight: 500; color: var(--quiet); }
.card span { display: block; font-size: 22px; font-weight: 600; line-height: 1.35; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.card i { display: block; font-style: normal; font-size: 13px; color: var(--quiet); }
.card code { font-size: 15px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 26px 28px; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure svg, figure img { height: auto; display: block; }
figure svg:not([width]), figure img { width: 100%; }
.chart svg { overflow: visible; }
figcaption { margin-bottom: 4px; }
.chart svg text { fill: var(--quiet); font-size: 12px; font-family: inherit; }
.legend { font-size: 13px; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 4px; overflow-wrap: anywhere; }
.box { display: inline-block; width: 18px; height: 0; border-top: 3px solid var(--c); margin-right: 6px; vertical-align: 4px; }
.box.dash1 { border-top-style: dashed; } .box.dash2 { border-top-style: dotted; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.grid { stroke: var(--grid); } .axis { stroke: var(--quiet); stroke-width: 0.8; }
.line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.dash1 { stroke-dasharray: 6 3; } .dash2 { stroke-dasharray: 2 3; }
.band { fill: var(--c); fill-opacity: 0.22; stroke: none; }
.dot { fill: var(--c); stroke: none; }
.line.under { stroke-width: 5; stroke-opacity: 0.45; }
.dot.under { fill-opacity: 0.45; }
.bar { fill: var(--c); fill-opacity: 0.8; }
.mark { stroke: var(--quiet); stroke-width: 1.4; stroke-dasharray: 4 3; }
.bad { stroke: var(--poor); stroke-width: 1.6; }
.hover { fill: transparent; } .hover:hover { fill: var(--ink); fill-opacity: 0.12; }
.bar:hover { fill-opacity: 1; }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 6px 0; }
th { text-align: left; font-weight: 600; font-size: 13px; color: var(--quiet); white-space: nowrap; }
th, td { padding: 5px 18px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.facts td:first-child { color: var(--quiet); white-space: nowrap; }
.facts td, .config td { overflow-wrap: anywhere; }
.config td { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; padding-top: 2px; padding-bottom: 2px; }
.config td:first-child { white-space: nowrap; }
.config td:last-child { color: var(--quiet); }
.differs td:last-child { color: inherit; }
.differs td:not(:first-child) { min-width: 90px; }
.attempts td:not(:nth-child(2)), .attempts th { white-space: nowrap; }
.attempts td:nth-child(2) { min-width: 200px; }
.numbers td:first-child, .runs td:first-child { white-space: nowrap; }
.runs td { min-width: 130px; overflow-wrap: anywhere; }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; white-space: nowrap; }
.memory td:first-child { white-space: nowrap; }
.memory td:nth-child(2), .memory td:nth-child(3), .memory th:nth-child(2), .memory th:nth-child(3) { text-align: right; white-space: nowrap; }
.memory, .memory td:last-child { width: 100%; }
.memory td:last-child { min-width: 140px; vertical-align: middle; }
.share { display: block; height: 7px; border-radius: 3px; background: var(--c); margin: 2px 0; min-width: 1px; }
.share.expected { background: none; border: 1px solid var(--c); }
.picture { margin: 16px 0; overflow-x: auto; }
.picture svg, .picture img { background: #ffffff; border-radius: 6px; }
.picture img { max-width: 100%; width: auto; }
.picture svg { max-width: max(100%, 640px); }
.picture svg:not([width]) { width: 100%; min-width: 640px; }
details { margin: 10px 0; }
summary { cursor: pointer; font-weight: 500; padding: 4px 0; }
footer { margin-top: 48px; font-size: 13px; color: var(--quiet); }
@media (max-width: 620px) {
  main { padding: 18px 14px 40px; }
  h1 { font-size: 22px; }
  .chart svg text { font-size: 16px; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .card span { font-size: 18px; }
  .card code { font-size: 12px; }
  th, td { padding-right: 12px; }
  .facts td:first-child { white-space: normal; }
}
@media print {
  body { font-size: 12px; }
  main { max-width: none; padding: 0; }
  pre { max-height: none; }
  .charts { grid-template-columns: 1fr 1fr; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
)css";
}

}  // namespace trireme::report
