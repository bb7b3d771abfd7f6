"""A report in a real browser: Chromium, headless. `make learn` installs it where this is root on Debian or Ubuntu."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from hpcrl.cli.main import main
from hpcrl.observe.metrics import MetricsWriter
from hpcrl.observe.report.live import LiveReport
from hpcrl.rundir.ledger import open_attempt, report_outcome
from tests.observe.browser import KEYS, Browser, browser
from tests.observe.report_material import HOSTILE, made, write_dump, write_evaluation, write_step

pytestmark = pytest.mark.slow
_READY = "return document.querySelectorAll('main > section').length === 7"
_NEXT_FRAME = """
const began = performance.now(), frame = () => new Promise((shown) => requestAnimationFrame(shown));
return (async () => { eval(arguments[0]); await frame(); await frame(); return performance.now() - began; })()
"""
_FLUID_MS = 250
_WIDE = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of reports of one run and of two."""
    root = tmp_path_factory.mktemp("reports")
    for name, steps in (("one", 40), ("two", 30)):
        run = made(root, name, steps)
        write_dump(run, steps, write_step(run, steps, [1.0, 0.0], dropped={"g00000007": 1.0}))
        write_evaluation(run, steps, ["right", HOSTILE])
    for name, runs in (("single", ["one"]), ("both", ["one", "two"])):
        assert main(["report", *runs, "--root", str(root), "-o", str(root / f"{name}.html")]) == 0
    return {name: (root / f"{name}.html").as_uri() for name in ("single", "both")}


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", ["single", "both"])
def test_all_sections_are_there_and_fit(
    window: Browser, pages: dict[str, str], name: str, width: int, tmp_path: Path
) -> None:
    window.open(pages[name], width, 900)
    window.wait(_READY)
    for section in window.run("return [...document.querySelectorAll('section')].map((one) => one.id)"):
        window.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        assert window.wait(f"return document.getElementById('{section}').innerText.length > 20")
    window.run("document.getElementById('curves').scrollIntoView()")
    assert window.wait("return document.querySelectorAll('#curves .uplot canvas').length > 1")
    assert window.run(_WIDE), "the page is wider than its window"
    widths = window.run(
        "return [...document.querySelectorAll('.uses')].map((bar) => [...bar.children].map((part) => part.offsetWidth))"
    )
    assert len(widths) == 1 + (name == "both"), "a bar for each run"
    assert all(max(parts) > 50 for parts in widths)
    assert window.errors() == []
    window.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_what_a_policy_said_stays_text(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["single"])
    window.wait(_READY)
    window.run(
        "const kinds = document.querySelector('#samples select'); kinds.value = 'evaluated'; kinds.dispatchEvent(new Event('change'))"
    )
    texts = window.run("return [...document.querySelectorAll('#samples pre')].map((one) => one.textContent)")
    assert texts.count(HOSTILE) == 3, "an answer, and the ground truth of both groups"
    assert window.run("return document.title") == "quickstart/one"
    assert window.run("return document.querySelectorAll('#samples img').length") == 0


def test_a_hostile_run_stays_text_everywhere(window: Browser, tmp_path: Path) -> None:
    """Names of metrics, sources and hosts, messages and settings are text too, in every section, with all that is folded open."""
    run = made(tmp_path, "hostile", 8)
    report_outcome(run, 2, "failed", HOSTILE, "agent-0")
    open_attempt(run, "1.2", [HOSTILE])
    report_outcome(run, 3, "failed", HOSTILE, "agent-0")
    with MetricsWriter(run, "trainer", 3, 8) as writer:
        for step, value in ((9, 1.0), (10, 2.0)):
            writer.write(step, {f"other/{HOSTILE}": value, f"eval/{HOSTILE}/avg_score": value, f"same/{HOSTILE}": 1.0})
    write_step(run, 10, [1.0, 0.0])
    write_evaluation(run, 10, [HOSTILE])
    for at, runs in enumerate((["hostile"], ["hostile", "hostile2"])):
        if at:
            run.path.with_name("hostile2").symlink_to(run.path)
        page = tmp_path / f"page{at}.html"
        assert main(["report", *runs, "--root", str(tmp_path), "-o", str(page)]) == 0
        window.open(page.as_uri())
        window.wait(_READY)
        window.run("document.querySelectorAll('details').forEach((one) => (one.open = true)); scrollTo(0, 0)")
        assert window.wait(
            "return document.body.textContent.includes(arguments[0])".replace("arguments[0]", repr(f"same/{HOSTILE}"))
        )
        assert window.run("return document.title").startswith("quickstart/hostile")
        assert window.run("return [document.images.length, document.scripts.length]") == [0, 2]
        assert window.errors() == []


_CONTRAST = """
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
const over = ([r, g, b, a], back) => [r, g, b].map((part, at) => part * a + back[at] * (1 - a));
const light = (rgb) => rgb.map((part) => part / 255).map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
const behind = (one) => { const layers = []; for (let at = one; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor)); return layers.reverse().reduce((back, layer) => over(layer, back), arguments[0] ? [0, 0, 0] : [255, 255, 255]); };
return [...document.querySelectorAll('body *')].filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()) && one.checkVisibility() && !one.closest('script, select, [disabled], #tip')).map((one) => {
  const back = behind(one), [text, ground] = [light(over(parse(getComputedStyle(one).color), back)), light(back)];
  return [(Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05), one.className, one.textContent.slice(0, 40)];
}).filter(([contrast]) => contrast < 4.5);
"""


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_the_contrast_of_wcag_aa(window: Browser, pages: dict[str, str], dark: bool) -> None:
    window.emulate("prefers-color-scheme", "dark" if dark else "light")
    window.open(pages["single"])
    window.wait(_READY)
    assert window.run("return matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert window.run(_CONTRAST, dark) == []
    window.emulate("prefers-color-scheme", "light")


def test_everything_is_reached_by_keyboard_and_has_a_name(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["single"])
    window.wait(_READY)
    unnamed = """return [...document.querySelectorAll('button, input, select, canvas, [role=figure], [role=img]')].filter((one) =>
        !one.getAttribute('aria-label') && !one.textContent.trim() && !one.closest('label') && !one.closest('.uplot')).map((one) => one.outerHTML.slice(0, 99))"""
    assert window.run(unnamed) == []
    window.run("document.getElementById('curves').scrollIntoView()")
    assert window.wait("return document.querySelector('#curves .chart').getAttribute('aria-label')").startswith(
        "Reward: "
    )


def test_colours_of_tokens(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["single"])
    window.wait(_READY)
    colours = "return [...document.querySelectorAll('#samples .tokens span')].map((one) => one.style.background).filter(Boolean)"
    assert len(window.run(colours)) == 12
    choose = "const chosen = [...document.querySelectorAll('#samples select')].at(-1); chosen.value = arguments[0]; chosen.dispatchEvent(new Event('change'))"
    for name in ("advantage", "entropy", "mismatch", "version", "mask"):
        window.run(choose, name)
        assert len(window.run(colours)) == 12, name
    window.run(choose, "none")
    assert window.run(colours) == []
    window.run(
        "document.querySelector('#samples .tokens .policy').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    )
    tip = window.run("return document.getElementById('tip').textContent")
    assert "chosen by the policy, trained" in tip
    assert "log-probability: -0.5" in tip


def test_the_timeline_zooms_to_a_step_by_keyboard_alone(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["single"])
    window.wait(_READY)
    shown = "return document.querySelector('#timeline .tools .faint').textContent"
    whole = window.wait(shown)
    assert "steps 1 to 40" in whole
    for _ in range(8):
        window.keys("#timeline canvas", "+")
    window.wait(f"{shown.removesuffix(';')} !== {whole!r}")
    window.keys("#timeline canvas", KEYS["ArrowRight"])
    window.keys("#timeline canvas", KEYS["Home"])
    assert window.wait(f"return document.querySelector('#timeline .tools .faint').textContent === {whole!r}")
    window.run(
        "const steps = document.querySelector('#timeline select'); steps.value = '7'; steps.dispatchEvent(new Event('change'))"
    )
    assert window.wait("return document.querySelector('#timeline .tools .faint').textContent.startsWith('2.12 s')")
    row = window.run("return document.querySelector('#timeline .shares tbody tr').innerText")
    shares = [float(part) for part in row.replace("%", " ").split()[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_curves_in_words_with_what_never_changes_folded(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["single"], 1440, 900)
    window.wait(_READY)
    window.run("document.getElementById('curves').scrollIntoView()")
    titles = "return [...document.querySelectorAll('#curves > div > .charts .chart')].map((one) => one.innerText.split('\\n')[0])"
    assert window.run(titles)[:2] == ["Reward", "Gradient norm"]
    assert window.wait("return document.querySelector('#curves .chart .tags').textContent") == "reward/avg_raw_reward"
    rows = "return [...document.querySelectorAll('#curves details:last-of-type tbody tr')].map((row) => row.innerText.split('\\t'))"
    window.run("[...document.querySelectorAll('#curves details')].at(-1).open = true")
    assert ["0", "Samples that failed", "generate/failed_samples"] in window.wait(
        f"{rows.replace('return ', 'const found = ')}; return found.length ? found : null"
    )
    columns = "return getComputedStyle(document.querySelector('#curves .charts')).gridTemplateColumns.split(' ').length"
    assert window.run(columns) == 4
    window.open(pages["single"], 2200, 900)
    window.wait(_READY)
    assert window.run(columns) == 6


def test_find_smooth_and_wall_time(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["both"])
    window.wait(_READY)
    window.run("document.getElementById('curves').scrollIntoView()")
    window.keys("#curves input[type=search]", "metric_7")
    assert window.wait(
        "return [...document.querySelectorAll('#curves h4 span')].map((one) => one.textContent).join() === 'other/metric_7'"
    )
    assert window.wait("return document.querySelectorAll('#curves .u-series').length === 3")
    window.run(
        "const smooth = document.querySelector('#curves input[type=range]'); smooth.value = 0.5; smooth.dispatchEvent(new Event('input'))"
    )
    assert window.wait("return document.querySelectorAll('#curves .u-series').length === 5")
    window.run(
        "const over = document.querySelector('#curves select'); over.value = 'time'; over.dispatchEvent(new Event('change'))"
    )
    window.run(
        "const over = document.querySelector('#curves .u-over').getBoundingClientRect(); document.querySelector('#curves .u-over').dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: over.left + over.width / 2, clientY: over.top + 9}))"
    )
    assert "at " in window.wait("return document.querySelector('#curves output').textContent")
    assert window.errors() == []


def test_what_differs_between_runs(window: Browser, pages: dict[str, str]) -> None:
    window.open(pages["both"])
    window.wait(_READY)
    rows = "return [...document.querySelectorAll('#configuration tbody tr')].map((row) => row.innerText)"
    assert window.run(rows) == ["trainer.max_steps\t40\t30"]
    window.click("#configuration input[type=checkbox]")
    assert len(window.run(rows)) > 20


def test_a_thousand_steps_and_fifty_thousand_samples_stay_fluid(window: Browser, tmp_path: Path) -> None:
    run, page = made(tmp_path, "long", 1000, metrics=100, ranks=8, replicas=8), tmp_path / "long.html"
    for step in range(1, 1001):
        write_step(run, step, [(step + at) % 50 / 49 for at in range(50)])
    assert main(["report", "long", "--root", str(tmp_path), "-o", str(page)]) == 0
    window.open(page.as_uri())
    window.wait(_READY)
    told = "one.dispatchEvent(new Event('input')); one.dispatchEvent(new Event('change'))"
    actions = {
        "scroll": "scrollBy(0, 400 * (window.turn = -(window.turn || 1)))",
        "zoom": "document.querySelector('#timeline canvas').dispatchEvent(new KeyboardEvent('keydown', {key: '+', bubbles: true}))",
        "move": "document.querySelector('#timeline canvas').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))",
        "find": f"const one = document.querySelector('#curves input[type=search]'); one.value = 'metric_' + (window.turn = (window.turn || 0) + 1); {told}",
        "smooth": f"const one = document.querySelector('#curves input[type=range]'); one.value = 0.1 + one.value % 0.5; {told}",
        "samples": "document.querySelector('#samples button[aria-label=earlier]').click()",
    }
    for name, action in actions.items():
        section = {"zoom": "timeline", "move": "timeline", "samples": "samples"}.get(name, "curves")
        window.run("document.getElementById(arguments[0]).scrollIntoView()", section)
        took = median(window.run(_NEXT_FRAME, action) for _ in range(7))
        print(f"{name}: {took:.0f} ms")
        assert took < _FLUID_MS, name
    assert window.errors() == []


def test_a_live_page_takes_in_what_is_new(window: Browser, tmp_path: Path) -> None:
    run = made(tmp_path, "live", 20)
    live = LiveReport([run], lambda _: lambda ids: f"{ids} ", 0)
    thread = threading.Thread(target=live.serve)
    thread.start()
    try:
        window.open(live.url)
        window.wait(_READY)
        window.run(
            "document.getElementById('timeline').scrollIntoView(); window.kept = document.querySelector('#samples')"
        )
        assert "steps 1 to 20" in window.wait("return document.querySelector('#timeline .tools .faint').textContent")
        with MetricsWriter(run, "trainer", 3, 20) as writer:
            writer.write(21, {"timing/step": 1.0, "other/new": 1.0})
        write_step(run, 21, [1.0, 0.0])
        assert window.wait("return DATA.runs[0].curves.steps.at(-1) === 21")
        assert window.run("return document.querySelectorAll('#samples .sample').length") == 0
        window.click(".live button")
        assert window.wait("return document.querySelectorAll('#samples .sample').length === 2")
        assert "step 21" in window.run("return document.querySelector('.cards').innerText")
        assert window.errors() == []
    finally:
        live.close()
        thread.join()
