"""The report's style sheet and the small script that reads values off its charts."""

STYLE = """
:root{--paper:#fbfaf8;--card:#fff;--ink:#1d2126;--soft:#646b75;--rule:#e3e1dc;--main:#1f6feb;--second:#d9622b;
--good:#1a7f4b;--code:#f4f2ee}
@media (prefers-color-scheme:dark){:root{--paper:#14171b;--card:#1c2026;--ink:#e6e8eb;--soft:#98a1ad;--rule:#2e343c;
--main:#6aa8ff;--second:#f0925f;--good:#5cc98f;--code:#171a1f}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
header h1{font-size:28px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em;overflow-wrap:anywhere}
header p{margin:0 0 24px;color:var(--soft);font-size:16px}
h2{font-size:18px;margin:40px 0 14px}
h3{font-size:14px;margin:20px 0 8px;color:var(--soft);font-weight:600}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px}
.figure,article,figure,table,pre{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.figure{padding:14px 16px}
.name{color:var(--soft);font-size:12.5px}
.value{font-size:23px;font-weight:650;letter-spacing:-.01em;margin-top:2px;font-variant-numeric:tabular-nums}
.remark{color:var(--soft);font-size:12.5px;min-height:1.2em}
article{padding:16px;margin-bottom:12px}
.prompt{font-weight:600;margin:0 0 10px;white-space:pre-wrap;overflow-wrap:anywhere}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(260px,1fr));gap:12px}
.answer{border-left:3px solid var(--rule);padding:2px 0 2px 12px}
.answer.after{border-color:var(--good)}
.answer.expected{border-style:dotted;border-width:0 0 0 3px}
.said{white-space:pre-wrap;overflow-wrap:anywhere}
details{margin-top:12px;color:var(--soft)}
details .answer{margin-top:8px}
summary{cursor:pointer;font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
figure{margin:0;padding:14px 14px 6px;position:relative}
figcaption{font-weight:600;font-size:14px;margin-bottom:6px}
.key{font-weight:400;color:var(--soft);margin-left:14px;font-size:13px}
.key::before{content:"";display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle;
background:var(--main)}
.key.second::before{background:var(--second)}
svg.chart{width:100%;height:auto;display:block}
.grid{stroke:var(--rule);stroke-width:1}
.tick{fill:var(--soft);font-size:12px;font-family:inherit;font-variant-numeric:tabular-nums}
.line{fill:none;stroke:var(--main);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.line.faint{stroke-width:1;opacity:.35}
.line.second{stroke:var(--second)}
.dot{fill:var(--main)}.dot.faint{opacity:.35}.dot.second{fill:var(--second)}
.cross{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3;opacity:0}
.tip{position:absolute;pointer-events:none;background:var(--ink);color:var(--paper);font-size:12.5px;padding:5px 9px;
border-radius:6px;white-space:nowrap;transform:translate(-50%,0)}
table{border-collapse:separate;border-spacing:0;width:100%;overflow:hidden}
th,td{text-align:left;padding:8px 14px;border-top:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere}
tr:first-child th,tr:first-child td{border-top:0}
th{font-weight:500;color:var(--soft);width:32%}
td{font-variant-numeric:tabular-nums}
pre{padding:14px 16px;overflow-x:auto;background:var(--code);font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,
monospace;margin:0}
.warnings{background:var(--card);border:1px solid var(--second);border-radius:10px;padding:12px 16px 12px 34px;margin:0}
.none{color:var(--soft)}
footer{margin-top:40px;color:var(--soft);font-size:13px}
@media print{body{background:#fff}main{padding:0}article,figure,.figure{break-inside:avoid}}
"""

SCRIPT = """
for (const svg of document.querySelectorAll('svg.chart')) {
  const lines = JSON.parse(svg.dataset.lines), cross = svg.querySelector('.cross');
  const figure = svg.parentElement, tip = figure.querySelector('.tip'), width = svg.viewBox.baseVal.width;
  const short = value => Number(value.toPrecision(4)).toLocaleString('en', {maximumSignificantDigits: 4});
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    const near = line => line.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    const found = lines.filter(line => line.points.length).map(line => [line.name, near(line)]);
    if (!found.length) return;
    const at = found[0][1];
    cross.setAttribute('x1', at[0]); cross.setAttribute('x2', at[0]); cross.style.opacity = 1;
    tip.textContent = 'step ' + short(at[2]) + found.map(
      ([name, point]) => ' \\u00b7 ' + (found.length > 1 ? name + ' ' : '') + short(point[3])).join('');
    tip.hidden = false;
    const half = tip.offsetWidth / 2 + 6, edge = figure.getBoundingClientRect().left;
    const left = box.left - edge + at[0] / width * box.width;
    tip.style.left = Math.min(Math.max(left, half), figure.clientWidth - half) + 'px';
    tip.style.top = '34px';
  });
  svg.addEventListener('pointerleave', () => { tip.hidden = true; cross.style.opacity = 0; });
}
"""
