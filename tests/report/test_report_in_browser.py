"""The report as a person sees it: in a real browser, light and dark, on a wide screen and on a phone."""

from itertools import pairwise

import pytest
from browser import chromium, needs_chromium, visit
from report_runs import write_all, write_bench, write_demo

from nystromformer.report.page import write_report

pytestmark = [needs_chromium, pytest.mark.slow(seconds=1)]
PHONE, SCREEN = 390, 1100


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report of runs of every kind."""
    folder = tmp_path_factory.mktemp("whole")
    write_report([write_all(folder / "runs")], folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def partial(tmp_path_factory):
    """A report of one benchmark."""
    folder = tmp_path_factory.mktemp("partial")
    write_report([write_bench(folder / "runs")], folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The page of a demo."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder / "runs")
    write_bench(folder / "runs" / "efficiency")
    write_report([folder / "runs"], folder, gaps=False)
    return folder / "report.html"


def brightness(color: str) -> float:
    """Of a color as browsers write it: rgb(255, 255, 255) is 1."""
    return sum(map(int, color.removeprefix("rgb(").rstrip(")").split(","))) / (3 * 255)


def colors(page) -> tuple[float, float]:
    """How bright the ground and the text of a page are."""
    style = "getComputedStyle(document.body)"
    return tuple(brightness(page.evaluate(f"{style}.{name}")) for name in ("backgroundColor", "color"))


def ink(page) -> float:
    """How bright the words in a drawing are."""
    return brightness(page.evaluate("getComputedStyle(document.querySelector('.plot svg text')).fill"))


@pytest.mark.parametrize("width", [PHONE, SCREEN], ids=["phone", "screen"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_needs_nothing_else_and_fits(scheme, width, whole, browser):
    with visit(browser, whole, scheme=scheme, width=width) as seen:
        page = seen.page
        assert [url for url in seen.requests if not url.startswith("data:")] == [whole.resolve().as_uri()]
        assert seen.complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page itself never scrolls sideways"
        assert page.locator(".gap").count() == 0


def test_all_pictures_are_decoded(whole, browser):
    with visit(browser, whole) as seen:
        assert seen.page.locator(".plot svg").count() == 6
        images = seen.page.locator("img")
        assert images.count() == 1
        for image in images.all():
            assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 300
            assert len(image.get_attribute("alt")) > 20


def test_the_readers_color_scheme_is_kept(whole, browser):
    with visit(browser, whole, scheme="light") as seen:
        ground, text = colors(seen.page)
        assert ground > 0.9
        assert text < 0.2
        assert ink(seen.page) < 0.2
    with visit(browser, whole, scheme="dark") as seen:
        ground, text = colors(seen.page)
        assert ground < 0.15
        assert text > 0.8
        assert ink(seen.page) > 0.8, "drawings have the color of the text around them"
        assert seen.page.evaluate("getComputedStyle(document.querySelector('.map img')).filter") == "none"


def test_text_can_be_read_on_a_phone(whole, browser):
    with visit(browser, whole, width=PHONE) as seen:
        sizes = seen.page.evaluate(
            "[...document.querySelectorAll('p, td, th, figcaption, .made div')]"
            ".map(element => parseFloat(getComputedStyle(element).fontSize))"
        )
        assert min(sizes) >= 12
        table = seen.page.locator("table").first
        table.scroll_into_view_if_needed()
        assert table.is_visible()


@pytest.mark.parametrize("width", [PHONE, SCREEN], ids=["phone", "screen"])
def test_charts_fit_and_nothing_in_them_is_cut_off(width, whole, browser):
    with visit(browser, whole, width=width) as seen:
        charts = seen.page.locator(".plot svg")
        for chart in charts.all():
            frame = chart.bounding_box()
            assert frame["x"] >= 0
            assert frame["x"] + frame["width"] <= width
        cut = seen.page.evaluate(
            "[...document.querySelectorAll('.plot svg text, .plot svg .point')].filter(each => {"
            "  const own = each.getBoundingClientRect(), frame = each.closest('svg').getBoundingClientRect();"
            "  return own.left < frame.left - 1 || own.right > frame.right + 1 || own.bottom > frame.bottom + 1; })"
            ".map(each => each.textContent)"
        )
        assert cut == []


def test_a_phone_shows_more_than_the_first_column_of_a_table(demo, browser):
    """Which stays in view while the others are scrolled: as wide as the screen, it would hide them for good."""
    with visit(browser, demo, width=PHONE) as seen:
        widths = seen.page.evaluate(
            "[...document.querySelectorAll('tbody th')].map(each => each.getBoundingClientRect().width)"
        )
        assert len(widths) > 10
        assert max(widths) <= 0.5 * PHONE


def test_links_lead_to_sections(whole, browser):
    with visit(browser, whole) as seen:
        links = seen.page.locator("nav a")
        assert links.all_inner_texts() == [
            "Efficiency", "Long Range Arena", "Pretraining", "Fine-tuning", "Distillation", "Attention maps",
        ]  # fmt: skip
        links.nth(2).click()
        place = seen.page.locator("#pretraining").bounding_box()
        assert -1 < place["y"] < 850


def test_gaps_are_named_and_hold_no_figure(partial, browser):
    with visit(browser, partial) as seen:
        sections = seen.page.locator("section").filter(has=seen.page.locator(".gap"))
        assert sections.locator("h2").all_inner_texts() == [
            "Long Range Arena", "Pretraining", "Fine-tuning", "Distillation", "Attention maps",
        ]  # fmt: skip
        for text in sections.locator(".gap").all_inner_texts():
            assert text.startswith("Not among the given runs. nystromformer ")
        assert sections.locator("figure, table").count() == 0
        assert seen.page.locator("figure").count() == 2


def test_points_answer_the_pointer_with_their_values(whole, browser):
    with visit(browser, whole) as seen:
        tip = seen.page.locator("#tip")
        assert tip.is_hidden()
        point = seen.page.locator(".plot svg .point").first
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        seen.page.mouse.move(box["x"] + 6, box["y"] + 9)  # near it is enough
        assert tip.inner_text() == "standard, n = 4,096: 375 ms"
        place = tip.bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= SCREEN
        seen.page.mouse.move(2, 2)
        assert tip.is_hidden()


def test_the_figures_to_see_first_lead_to_their_sections(whole, browser):
    with visit(browser, whole) as seen:
        first = seen.page.locator(".headlines a").first
        assert first.inner_text().split()[0] == "30.0×"
        assert "faster than exact attention at 8,192 tokens" in first.inner_text()
        assert first.get_attribute("href") == "#efficiency"


def test_everything_is_named_for_those_who_do_not_see_it(whole, browser):
    with visit(browser, whole) as seen:
        page = seen.page
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.locator("h1").count() == page.locator("main").count() == 1
        levels = [
            int(name[1]) for name in page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(e => e.tagName)")
        ]
        assert all(after <= before + 1 for before, after in pairwise(levels))
        for picture in page.locator("[role=img], img").all():
            assert len(picture.get_attribute("aria-label") or picture.get_attribute("alt")) > 20
        assert page.locator("table").count() == page.locator("table:has(th[scope=col]):has(th[scope=row])").count()


def test_it_prints_in_black_on_white_whatever_the_screen(whole, browser):
    with visit(browser, whole, scheme="dark") as seen:
        seen.page.emulate_media(media="print", color_scheme="dark")
        ground, text = colors(seen.page)
        assert ground > 0.9
        assert text < 0.2
        assert seen.page.locator("nav").is_hidden()
        assert not any(choice.is_visible() for choice in seen.page.locator("select").all()), "nothing can be chosen"


def test_layer_head_and_token_of_a_map_are_chosen(whole, browser):
    with visit(browser, whole) as seen:
        explorer = seen.page.locator(".explorer")
        weights = lambda: (
            explorer.locator(".rows p").first.locator("span").evaluate_all("all => all.map(one => one.title)")
        )
        assert explorer.locator(".rows b").all_inner_texts() == ["exact", "nystrom, m = 64"]
        assert weights() == ["the: 100.0 %", "cat: 0.0 %", "sat: 0.0 %"]
        explorer.locator("select[name=token]").select_option("2")
        assert weights() == ["the: 0.0 %", "cat: 0.0 %", "sat: 100.0 %"]
        explorer.locator("select[name=head]").select_option("1")
        assert weights() == ["the: 100.0 %", "cat: 0.0 %", "sat: 0.0 %"]
        explorer.locator("select[name=head]").select_option("0")
        explorer.locator("select[name=layer]").select_option("1")
        explorer.locator(".rows span").nth(1).click()
        assert weights() == ["the: 0.0 %", "cat: 100.0 %", "sat: 0.0 %"]
