"""The demo's report as a person sees it: in a real browser, narrow and wide, light and dark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prerequisites import absent, install

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.torch,
    pytest.mark.procs,
    # The demo is made once: a minute or two on two cores. The rest covers the installation of the browser.
    pytest.mark.timeout(400, method="signal"),
]

DEMO_S = 300.0
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The report of ``midwatch demo``."""
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-m", "midwatch", "demo", "--out", str(out)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEMO_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-3000:]}"
    yield out / "report.html"
    shutil.rmtree(out)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's own Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed (pip install -e '.[e2e]')")
    install("chromium:chromium", "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf:fonts-dejavu-core")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


class Seen:
    """The page, and what went on while it was loaded."""

    def __init__(self, browser: Any, report: Path, width: int, scheme: str) -> None:
        self.url = report.as_uri()
        self._context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self._context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.url, wait_until="networkidle")

    def close(self) -> None:
        self._context.close()


@pytest.fixture(params=[(400, "light"), (400, "dark"), (1400, "light"), (1400, "dark")], ids=lambda p: f"{p[0]}-{p[1]}")
def seen(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Seen]:
    seen = Seen(browser, report, *request.param)
    yield seen
    seen.close()


def test_it_says_what_it_found(seen: Seen) -> None:
    assert seen.page.inner_text("h1") == "The weights are bit-identical"
    first, second = [text for text in seen.page.locator("dd").all_inner_texts() if text.startswith("sha256 ")]
    assert first == second
    rows = seen.page.locator("tbody tr:not(.note)").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert not any("WRONG" in row for row in rows)
    assert seen.page.locator(".problem").count() == 0


def test_it_needs_nothing_from_elsewhere(seen: Seen) -> None:
    assert seen.requests == [seen.url]
    assert seen.complaints == []
    assert seen.page.evaluate("performance.getEntriesByType('resource').length") == 0


def test_curves_are_drawn_inside_their_pictures(seen: Seen) -> None:
    pictures = seen.page.evaluate("""
        [...document.querySelectorAll("svg")].map(svg => ({
            box: [svg.viewBox.baseVal.width, svg.viewBox.baseVal.height],
            curves: [...svg.querySelectorAll("polyline")].map(line => ({
                points: [...line.points].map(p => [p.x, p.y]),
                stroke: getComputedStyle(line).stroke,
                length: line.getTotalLength(),
            })),
            marks: [...svg.querySelectorAll(".mark text")].map(text => text.textContent),
        }))
    """)
    loss, progress = pictures
    assert len(loss["curves"]) >= 7  # the undisturbed run, and six attempts with five faults between them
    assert len(progress["curves"]) >= 6
    assert loss["marks"] == ["1", "2", "3", "4", "5"]
    for picture in pictures:
        width, height = picture["box"]
        for curve in picture["curves"]:
            assert all(0 <= x <= width and 0 <= y <= height for x, y in curve["points"])
            assert curve["stroke"].startswith("rgb")
        drawn = [x for curve in picture["curves"] if curve["length"] > 0 for x, _ in curve["points"]]
        assert max(drawn) - min(drawn) > width / 2


def test_it_can_be_read(seen: Seen) -> None:
    wide = seen.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    texts = seen.page.evaluate("""
        [...document.querySelectorAll("h1, h2, p, dt, dd, th, td, li, text.tick")].map(part => {
            const style = getComputedStyle(part), range = document.createRange();
            range.selectNodeContents(part);
            const scale = part.ownerSVGElement ? part.getScreenCTM().a : 1;
            const inner = part.closest(".scroll") ? null : range.getBoundingClientRect();
            return {
                text: part.textContent, size: parseFloat(style.fontSize) * scale,
                ink: part.ownerSVGElement ? style.fill : style.color,
                right: inner ? inner.right : 0, left: inner ? inner.left : 0,
            };
        })
    """)
    paper = luminance(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    for text in texts:
        assert text["size"] >= 9, text
        assert text["left"] >= 0, text
        assert text["right"] <= wide[1], text
        assert contrast(luminance(text["ink"]), paper) >= 4.5, text  # WCAG 2, level AA


def test_curves_stand_out_from_the_paper(seen: Seen) -> None:
    strokes = seen.page.evaluate(
        "[...document.querySelectorAll('polyline.attempt')].map(line => getComputedStyle(line).stroke)"
    )
    paper = luminance(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    for stroke in strokes:
        assert contrast(luminance(stroke), paper) >= 3, stroke  # WCAG 2, level AA for graphics


def luminance(color: str) -> float:
    """Of ``rgb(r, g, b)``, by WCAG 2."""
    parts = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
