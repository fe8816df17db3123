"""Records from anybody: the report shows what they say and does nothing else.

Every text of ten kinds of record is an attack, looked at in a real browser's DOM; every field in turn holds something
of another kind; pictures and names point out of the run's folder.
"""

import itertools
import json
import os
import re
from pathlib import Path

import pytest
from browser import chromium, needs_chromium, visit
from markdown_it import MarkdownIt
from report_runs import (
    maps,
    write_attention_map,
    write_bench,
    write_distillation,
    write_finetuning,
    write_lra,
    write_pretraining,
)

from nystromformer.cli import main
from nystromformer.records import RECORDS, Recorder
from nystromformer.report.page import read_runs, write_report
from nystromformer.report.sections import all_sections

ATTACKS = [
    "<script>window.attacked = 1</script>",
    "</script><script>window.attacked = 1</script><!--",
    "\"><img src=x onerror='window.attacked = 1'>",
    "' onmouseover='window.attacked = 1' autofocus onfocus='window.attacked = 1'",
    "<svg onload='window.attacked = 1'><animate onbegin='window.attacked = 1'></svg>",
    "<a href='javascript:window.attacked = 1'>x</a> [x](javascript:window.attacked=1) <javascript:window.attacked=1>",
    "</title></style></textarea></table><iframe srcdoc='<script>parent.attacked = 1</script>'></iframe>",
    "<meta http-equiv=refresh content='0;url=https://example.org'><base href='https://example.org/'>",
    "<link rel=stylesheet href='https://example.org/x.css'><style>@import 'https://example.org/y.css'</style>",
    "]]> <![CDATA[ &lt;script&gt; &#60;script&#62; {{ 7 * 7 }} {% raw %} ${7*7} $\\frac$ a|b\\|c `d`\n# g\n\n- h",
    "\u202e\u0000\u001b[31m \ud800 \ufeff",
]
KINDS = {
    "bench": write_bench,
    "lra": write_lra,
    "pretrain": write_pretraining,
    "finetune": write_finetuning,
    "distill": write_distillation,
    "attention-map": write_attention_map,
}
STRUCTURE = ("job", "metric")
"""Fields that say what a record is: another value makes it another record."""
WRONG = (None, True, -1, 0, 10**30, float("nan"), "", [[]], {"a": {}})


def records_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]


def write_records(folder: Path, records: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORDS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def attacked(value: object, attack: str) -> object:
    """The same with an attack in the place of every text, keys included."""
    if isinstance(value, dict):
        return {name: attacked(each, attack) for name, each in value.items()}
    if isinstance(value, list):
        return [attacked(each, attack) for each in value]
    return attack if isinstance(value, str) else value


def hostile_runs(folder: Path, attack: str) -> Path:
    """A run of every kind, each text in it an attack; ten kinds of record with those that no section shows."""
    kinds = set()
    for job, write in KINDS.items():
        run = write(folder / job)
        records = []
        for record in records_in(run):
            kinds.add((record["job"], record["metric"]))
            kept = {name: record[name] for name in STRUCTURE}
            if record["metric"] in ("picture", "maps"):  # where they are, is tried below
                kept["value"] = record["value"]
            if record["job"] == "finetune":  # one name in two places
                kept |= {"part": attack, "scored_examples": {attack: 9}, "scores": {attack: {attack: 0.5, "<b>": 0.5}}}
            records.append(attacked(record, attack) | {"versions": {attack: attack}} | kept)
        write_records(run, records)
        if job == "attention-map":
            (run / "maps.json").write_text(
                json.dumps(attacked(maps(["a", "b"]), attack) | {"levels": maps(["a", "b"])["levels"]})
            )
    recorder = Recorder(folder / "other", job=attack, config={attack: attack})
    for metric in (attack, "<i>"):
        recorder.record(metric, attack)
        kinds.add(("other", metric))
    assert len(kinds) >= 10
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module", params=ATTACKS, ids=range(len(ATTACKS)))
def hostile(request, tmp_path_factory):
    """The folder of a report of hostile records, and what was in them."""
    folder = tmp_path_factory.mktemp("hostile")
    write_report([hostile_runs(folder / "runs", request.param)], folder)
    return folder, request.param


@pytest.mark.slow
@needs_chromium
def test_no_record_does_anything_in_a_browser(hostile, browser):
    folder, attack = hostile
    with visit(browser, folder / "report.html", width=900) as seen:
        page = seen.page
        for point in page.locator(".plot svg .point").all()[:3]:
            point.hover(force=True)
        assert seen.complaints == [], "not even tried"
        assert [url for url in seen.requests if not url.startswith("data:")] == [(folder / "report.html").as_uri()]
        assert page.evaluate("window.attacked") is None
        assert page.locator("script").count() == 1
        assert (
            page.locator("iframe, base, object, embed, form, link:not([rel=icon]), meta[http-equiv=refresh]").count()
            == 0
        )
        assert page.locator("style").count() == 1 + page.locator(".plot svg style").count()
        assert page.locator("img").count() == 1
        handlers = (
            "[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames()).filter(n => n.startsWith('on'))"
        )
        assert page.evaluate(handlers) == []
        links = page.evaluate(
            "[...document.querySelectorAll('[href], [src]')].map(e => e.getAttribute('href') || e.src)"
        )
        assert all(re.match(r"#|data:", link) for link in links)
        said = " ".join(page.locator("main").inner_text().split())
        assert " ".join("".join(c if c.isprintable() else " " for c in attack).split()) in said, "and it is shown"


@pytest.mark.slow
def test_no_record_is_html_or_a_link_in_markdown(hostile):
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse((hostile[0] / "report.md").read_text())
    every = [child for token in tokens for child in [token, *(token.children or [])]]
    assert not [token for token in every if token.type in ("html_block", "html_inline", "link_open")]
    assert all(token.attrGet("src").startswith("figures/") for token in every if token.type == "image")
    headings = [
        tokens[place + 1].content
        for place, token in enumerate(tokens)
        if token.type == "heading_open" and token.tag == "h2"
    ]
    assert headings == [
        "Efficiency", "Long Range Arena", "Pretraining", "Fine-tuning", "Distillation", "Attention maps",
        "Other records",
    ]  # fmt: skip


def fields_of(record: dict) -> list[tuple[str, ...]]:
    """The places of a record: its fields, and those of its objects."""
    found = []
    for name, value in record.items():
        found.append((name,))
        if isinstance(value, dict):
            found += [(name, *inner) for inner in fields_of(value)]
    return found


def changed(record: dict, place: tuple[str, ...], value: object) -> dict:
    first, *rest = place
    return record | {first: changed(record[first], tuple(rest), value) if rest else value}


def refusal_of(run: Path) -> str | None:
    """What the report says instead of making sections of a run; any other error is a fault."""
    try:
        all_sections(read_runs([run]))
    except ValueError as error:
        return str(error)
    return None


SAME_IN_ALL = ("machine", "versions")
"""Objects that all records of a job have, and whose fields are read in one place."""


def one_of_each() -> list[tuple[str, dict, list[tuple[str, ...]]]]:
    """A record of each job and metric, with the job that writes it and the fields to try: those inside the objects
    that are the same in all records of a job in the first of them only."""
    import tempfile

    found: dict[tuple[str, str], dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job, write in KINDS.items():
            for record in records_in(write(Path(folder) / job)):
                found.setdefault((job, record["metric"]), record)
    jobs, cases = set(), []
    for (job, _), record in found.items():
        places = [place for place in fields_of(record) if place[0] not in STRUCTURE]
        if job in jobs:
            places = [place for place in places if len(place) == 1 or place[0] not in SAME_IN_ALL]
        cases.append((job, record, places))
        jobs.add(job)
    return cases


HONEST = one_of_each()


@pytest.mark.slow
@pytest.mark.parametrize(
    "record, places", [case[1:] for case in HONEST], ids=[f"{j}-{r['metric']}" for j, r, _ in HONEST]
)
def test_a_field_of_another_kind_is_shown_or_refused_in_one_line(record, places, tmp_path, undrawn):
    """All fields, those inside configuration, machine and versions too, with values of every other kind."""
    refused = tried = 0
    for place, value in itertools.product(places, WRONG):
        run = write_records(tmp_path / "run", [changed(record, place, value)])
        tried += 1
        said = refusal_of(run)
        if said is not None:
            assert said.startswith(str(run))
            assert "\n" not in said
            assert len(said) < 400
            refused += 1
    assert 0.2 * tried < refused < tried


@pytest.mark.parametrize("field", ["machine", "versions", "settings"])
@pytest.mark.parametrize("value", ["a text", [1], 3, True])
def test_objects_of_another_kind_are_refused_by_name(field, value, tmp_path, capsys):
    run = write_lra(tmp_path / "run")
    place = ("config", field) if field == "settings" else (field,)
    write_records(run, [changed(record, place, value) for record in records_in(run)])
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{field} is {value}: must be an object" in error
    assert not (tmp_path / "out").exists()


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


PATHS = [
    "/../../escaped",
    "../../../escaped",
    "/tmp/escaped-by-a-record",
    "..",
    ".",
    "a/b",
    "C:\\escaped",
    "x" * 300,
    "",
]


@pytest.fixture
def undrawn(monkeypatch):
    """Figures without their drawing, which takes a second each."""
    content = {".svg": b"<svg/>", ".png": b""}
    monkeypatch.setattr("nystromformer.report.figures.Drawing.render", lambda self, salt: content)


@pytest.mark.parametrize("name", PATHS)
def test_names_of_records_are_no_paths(name, tmp_path, undrawn):
    fields = ("task", "preset", "attention", "model", "text", "from")
    for job, write in KINDS.items():
        run = write(tmp_path / "runs" / job)
        records = records_in(run)
        for record in records:
            record["config"] |= {field: name for field in fields if field in record["config"]}
        write_records(run, records)
    before = tree(tmp_path)
    write_report([tmp_path / "runs"], tmp_path / "deep" / "er" / "out")
    made = tree(tmp_path) - before - {"deep", "deep/er", "deep/er/out"}
    assert all(path.startswith("deep/er/out/") for path in made)
    assert all(re.fullmatch(r"[a-z0-9_/.-]+", path) for path in made)
    assert not Path("/tmp/escaped-by-a-record").exists()


def map_run(tmp_path: Path, picture: str) -> Path:
    """A run whose record names `picture`."""
    run = write_attention_map(tmp_path / "runs" / "map")
    write_records(run, [r | ({"value": picture} if r["metric"] == "picture" else {}) for r in records_in(run)])
    return run


def refusal(tmp_path: Path, capsys) -> str:
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists(), "whole or absent"
    return error


@pytest.mark.parametrize(
    "picture", ["{}/secret.png", "../../secret.png", "../map/../../secret.png", "link.png", "linked/secret.png"]
)
def test_pictures_outside_the_runs_folder_are_refused(picture, tmp_path, capsys):
    run = map_run(tmp_path, picture.format(tmp_path))
    secret = tmp_path / "secret.png"
    secret.write_bytes((run / "layer-0.png").read_bytes())
    (run / "link.png").symlink_to(secret)
    (run / "linked").symlink_to(tmp_path, target_is_directory=True)
    assert "must be a PNG or SVG file inside this folder" in refusal(tmp_path, capsys)


@pytest.mark.parametrize("picture", ["records.jsonl", "layer-0", "", ".", "layer-0.txt"])
def test_files_that_are_no_pictures_are_refused(picture, tmp_path, capsys):
    map_run(tmp_path, picture)
    assert "must be a PNG or SVG" in refusal(tmp_path, capsys)


def test_a_file_that_only_calls_itself_a_picture_is_refused(tmp_path, capsys):
    run = map_run(tmp_path, "key.png")
    (run / "key.png").write_text("-----BEGIN PRIVATE KEY-----")
    assert "is no PNG picture" in refusal(tmp_path, capsys)


def test_a_pipe_is_no_picture_and_nobody_waits_for_it(tmp_path, capsys):
    run = map_run(tmp_path, "pipe.png")
    os.mkfifo(run / "pipe.png")
    assert "pipe.png: must be a file of at most 32 MB" in refusal(tmp_path, capsys)


def test_scripts_in_a_runs_own_picture_do_not_run(tmp_path):
    run = map_run(tmp_path, "own.svg")
    (run / "own.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>parent.attacked = 1</script></svg>")
    write_report([run], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<script") == 1
    assert '<img src="data:image/svg+xml;base64,' in page


def test_a_report_that_fails_leaves_the_one_before_as_it_was(tmp_path, capsys):
    write_report([write_lra(tmp_path / "lra")], tmp_path / "out")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    map_run(tmp_path, "../x.png")
    arguments = ["report", str(tmp_path / "lra"), str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


MAPS = maps(["a", "b"])


@pytest.mark.parametrize(
    "content",
    [
        "not JSON", "[]", "{}", "[" * 100_000,
        *(json.dumps({name: value for name, value in MAPS.items() if name != left_out}) for left_out in MAPS),
        *(json.dumps(MAPS | {name: wrong}) for name in MAPS for wrong in (None, -1, 3, "x", [1, {}], {"x": 1}, True)),
    ],
    ids=lambda content: content[:20],
)  # fmt: skip
def test_weights_that_are_none_are_refused(content, tmp_path):
    run = write_attention_map(tmp_path / "run")
    (run / "maps.json").write_text(content)
    with pytest.raises(ValueError, match="maps.json: holds no attention weights") as error:
        read_runs([run])
    assert "\n" not in str(error.value)
