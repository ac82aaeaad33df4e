"""HTML of the report: one file that fetches nothing; its own content security policy forbids it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from plotly.offline import get_plotlyjs

from phyai_engine.replay.look import Chart, Key

CSS = """
:root { color-scheme: light; --ink:#1c2733; --muted:#5a6675; --rule:#dde3e9; --soft:#f4f6f8;
  --good:#2e7d43; --bad:#c0312b; --unsure:#8792a0; --hold:#c47a12; --action:#2463a6; --event:#7d54a8; }
* { box-sizing: border-box; }
body { margin:0; background:#fff; color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif; }
main { max-width:1200px; margin:0 auto; padding:24px 20px 64px; }
h1 { font-size:22px; line-height:1.25; margin:0 0 2px; }
h2 { font-size:17px; line-height:1.3; margin:0 0 2px; }
section { margin-top:34px; min-width:0; }
p { margin:4px 0; }
a { color:var(--action); }
nav { margin-top:14px; font-size:14px; }
nav a { margin-right:14px; text-decoration:none; white-space:nowrap; }
nav a:hover { text-decoration:underline; }
nav span { color:var(--muted); white-space:nowrap; }
.note, .sub { color:var(--muted); font-size:14px; }
.verdict { margin-top:16px; padding:12px 18px;
  border-left:6px solid var(--unsure); background:var(--soft); }
.verdict.pass { border-color:var(--good); }
.verdict.fail { border-color:var(--bad); }
.verdict > strong { display:block; font-size:19px; line-height:1.35; }
.pass > strong { color:var(--good); }
.fail > strong { color:var(--bad); }
.verdict ul { margin:6px 0 0; padding-left:20px; }
.verdict li { margin:2px 0; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px; margin-top:16px; }
.tile { border:1px solid var(--rule); border-radius:6px; padding:9px 12px; }
.tile b { display:block; font-size:20px; line-height:1.25; font-variant-numeric:tabular-nums; }
.tile.bad b { color:var(--bad); }
.tile span { color:var(--muted); font-size:13px; line-height:1.35; display:block; }
.pair { display:grid; grid-template-columns:minmax(0,2fr) minmax(0,3fr); gap:28px; }
.pair.even { grid-template-columns:minmax(0,1fr) minmax(0,1fr); }
.chart { width:100%; min-width:0; }
.keys { display:flex; flex-wrap:wrap; gap:2px 16px; margin:6px 0 0; padding:0; list-style:none;
  font-size:13px; }
.keys svg { width:20px; height:12px; vertical-align:-1px; margin-right:5px; }
.empty { color:var(--muted); background:var(--soft); padding:12px 16px; border-radius:6px; }
.wide { overflow-x:auto; margin-top:8px; }
table { border-collapse:collapse; font-size:13px; font-variant-numeric:tabular-nums; }
th, td { padding:4px 10px; text-align:right; border-bottom:1px solid var(--rule); white-space:nowrap; }
th { color:var(--muted); font-weight:600; vertical-align:bottom; }
th:first-child, td:first-child, .text { text-align:left; }
td.text { white-space:normal; min-width:180px; }
td.bad { color:var(--bad); font-weight:600; }
dl { display:grid; grid-template-columns:max-content minmax(0,1fr); gap:2px 16px; margin:8px 0 0;
  font-size:14px; }
dt { color:var(--muted); }
dd { margin:0; overflow-wrap:anywhere; }
ol.events { list-style:none; margin:8px 0 0; padding:0; font-size:14px; }
ol.events li { display:grid; grid-template-columns:24px 68px 84px minmax(0,1fr); gap:0 8px; padding:3px 0; }
ol.events .n { color:#fff; border-radius:2px; font-size:11px; line-height:16px; height:16px; min-width:16px;
  text-align:center; justify-self:start; padding:0 3px; margin-top:3px; }
ol.events .t { text-align:right; font-variant-numeric:tabular-nums; }
ol.events .kind { font-weight:600; }
summary { cursor:pointer; font-weight:600; font-size:17px; }
.strip { display:flex; gap:10px; overflow-x:auto; padding:6px 0 10px; }
.strip figure { margin:0; flex:0 0 168px; font-size:12px; line-height:1.35; }
.strip img { width:168px; height:126px; object-fit:contain; background:#e9edf1; display:block;
  border-radius:4px; }
.strip figcaption { border-top:3px solid var(--unsure); margin-top:4px; padding-top:3px; }
.strip figcaption.action { border-color:var(--action); }
.strip figcaption.hold { border-color:var(--hold); }
.strip figcaption.stop { border-color:var(--bad); }
.strip .plan { display:block; width:168px; height:46px; background:var(--soft); border-radius:4px; margin:3px 0; }
.strip .values { color:var(--muted); font-variant-numeric:tabular-nums; }
.strip .values span { display:inline-block; margin-right:8px; white-space:nowrap; }
h3 { font-size:14px; margin:14px 0 0; }
@media (max-width:820px) {
  main { padding:16px 12px 40px; }
  .pair, .pair.even { grid-template-columns:minmax(0,1fr); }
  ol.events li { grid-template-columns:24px 60px minmax(0,1fr); }
  ol.events .what { grid-column:3; }
}
@media print { .strip { flex-wrap:wrap; } nav { display:none; } }
"""

# A chart inside closed <details> has no width yet: it is drawn when opened. On a touch screen dragging scrolls.
SCRIPT = """
const touch = matchMedia('(pointer: coarse)').matches;
const settings = {responsive: true, displayModeBar: false};
const draw = place => {
  const spec = JSON.parse(place.nextElementSibling.textContent);
  if (touch) spec.layout.dragmode = false;
  return Plotly.newPlot(place, spec.data, spec.layout, settings);
};
const drawn = [];
for (const place of document.querySelectorAll('.chart')) {
  const fold = place.closest('details');
  if (fold && !fold.open) fold.addEventListener('toggle', () => draw(place), {once: true});
  else drawn.push(draw(place));
}
Promise.all(drawn).then(all => { document.body.dataset.drawn = all.length; });
"""

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_FORMS = {
    "line": '<path d="M1 6H19" stroke="{c}" stroke-width="2.5"/>',
    "dash": '<path d="M1 6H19" stroke="{c}" stroke-width="2" stroke-dasharray="5 3"/>',
    "dotted": '<path d="M1 6H19" stroke="{c}" stroke-width="2" stroke-dasharray="2 2"/>',
    "dot": '<circle cx="10" cy="6" r="4" fill="{c}"/>',
    "ring": '<circle cx="10" cy="6" r="4" fill="none" stroke="{c}" stroke-width="1.8"/>',
    "cross": '<path d="M6 2L14 10M14 2L6 10" stroke="{c}" stroke-width="2.5"/>',
    "area": '<rect x="3" y="1" width="14" height="10" fill="{c}"/>',
    "tint": '<rect x="3" y="1" width="14" height="10" fill="{c}" opacity="0.3"/>',
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = ()) -> str:
    """Cells are HTML, the head is text. ``text``: columns aligned left that may wrap. A cell ``!…`` is red."""

    def cell(column: int, value: str) -> str:
        classes = ["text"] * (column in text) + ["bad"] * value.startswith("!")
        opening = f'<td class="{" ".join(classes)}">' if classes else "<td>"
        return f"{opening}{value.removeprefix('!')}</td>"

    top = "".join(
        f'<th class="text">{escape(h)}</th>' if i in text else f"<th>{escape(h)}</th>" for i, h in enumerate(head)
    )
    body = "".join(f"<tr>{''.join(cell(i, value) for i, value in enumerate(row))}</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _key(key: Key) -> str:
    mark = _FORMS[key.form].format(c=key.colour)
    return f'<li><svg viewBox="0 0 20 12" aria-hidden="true">{mark}</svg>{escape(key.text)}</li>'


def chart(entry: Chart, *, titled: bool = True) -> str:
    """Title, legend and the place the script draws into, or the reason why there is nothing to draw."""
    title = f"<h2>{escape(entry.title)}</h2>" if titled else ""
    if entry.figure is None:
        return f'{title}<p class="empty">{escape(entry.note)}</p>'
    keys = f'<ul class="keys">{"".join(map(_key, entry.keys))}</ul>' if entry.keys else ""
    spec = entry.figure.to_json()  # plotly writes "<" as an escape, so that no text can end the script element
    height = int(entry.figure.layout.height)
    return (
        f'{title}<p class="note">{escape(entry.note)}</p>{keys}'
        f'<div class="chart" id="{entry.name}" style="height:{height}px"></div>'
        f'<script type="application/json">{spec}</script>'
    )


def document(title: str, body: str) -> str:
    """The whole file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style></head>\n<body><main>\n{body}\n</main>\n"
        f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n</body></html>\n"
    )
