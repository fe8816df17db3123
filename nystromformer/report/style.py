"""How the page looks: by the reader's colour scheme, from a phone to a wide screen, without anything from elsewhere."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --dim: #57606c; --line: #d9dee4; --paper: #ffffff; --card: #f5f7f9;
        --mark: #0b6e99; --ours: #eaf4f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9fa9b4; --line: #363d46; --paper: #14181d; --card: #1d232a; --mark: #6cc3e8;
          --ours: #1b2f3a; }
  .plot div { filter: invert(.9) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.2rem; background: var(--paper); color: var(--ink);
       font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .4rem 0; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; } h4 { font-size: .95rem; margin: 1rem 0 .2rem; color: var(--dim); }
p { margin: .5rem 0; } a { color: var(--mark); }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; } nav a.missing { color: var(--dim); }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
.words, .long { text-align: left; } td.long { white-space: normal; min-width: 14rem; }
thead th { border-bottom: 2px solid var(--line); font-weight: 600; }
tr.ours td { font-weight: 600; background: var(--ours); }
.figures { display: grid; gap: .9rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
figure { margin: .4rem 0; min-width: 0; border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
figure div { background: #ffffff; padding: .3rem; overflow-x: auto; }
figure img { display: block; width: 100%; height: auto; }
figure.wide { grid-column: 1 / -1; } figure.wide img { min-width: 34rem; max-width: 60rem; margin: 0 auto; }
figcaption { padding: .4rem .6rem; background: var(--card); color: var(--dim); font-size: .85rem; }
.gap { border: 1px dashed var(--dim); border-radius: 8px; padding: .8rem; color: var(--dim); }
.made { background: var(--card); border-radius: 8px; padding: .5rem .8rem; margin: .8rem 0; font-size: .82rem; }
.made b { color: var(--dim); font-weight: 600; } .note { color: var(--dim); font-size: .9rem; }
code { font-size: .92em; overflow-wrap: anywhere; }
"""
