"""The dashboard in a real browser, on a real Control: sign in, watch a version go live, press each button, see the audit.

Chromium is Debian's, driven by Playwright; axe looks for what people with other abilities would stumble over.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.keys import KeyFile
from scripted_workers import KEY, ScriptedCluster

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PAGES = ("overview", "versions", "versions?view=lineage", "training", "ledger", "drift", "workers", "capture", "keys", "audit", "settings")  # fmt: skip
NAMES = ("Overview", "Versions", "Training", "Ledger", "Drift and guard", "Workers", "Capture and privacy", "API keys", "Audit", "Settings")  # fmt: skip
DESKTOP, PHONE = {"width": 1360, "height": 900}, {"width": 360, "height": 780}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]
expect = playwright.expect
expect.set_options(timeout=15_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cluster(home: Path) -> Iterator[ScriptedCluster]:
    with ScriptedCluster(home) as cluster:
        yield cluster


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """A page of its own browser profile; whatever it complained of, or asked elsewhere, fails the test in the end."""
    complaints: list[str] = []
    contexts = []

    def open(
        cluster: ScriptedCluster, *, may_complain: bool = False, may_ask: str = "", **options: Any
    ) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, **options})
        contexts.append(context)
        page = context.new_page()
        if not may_complain:
            page.on(
                "console",
                lambda m: m.type in ("error", "warning") and complaints.append(f"console: {m.text}"),
            )
        page.on("pageerror", lambda error: complaints.append(f"page: {error}"))
        hosts = tuple(filter(None, (cluster.url, may_ask)))
        page.on(
            "request",
            lambda request: request.url.startswith(hosts) or complaints.append(f"asked {request.url}"),
        )
        page.goto(f"{cluster.url}/admin/")
        return page

    yield open
    for context in contexts:
        context.close()
    assert complaints == []


def sign_in(page: Any) -> None:
    page.get_by_label("Admin key").fill(KEY)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()


def go(page: Any, name: str) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()


def confirm(page: Any, button: str, *, type: str = "", reason: str = "") -> None:
    """Answer the one question that is asked."""
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    if type:
        expect(dialog.get_by_role("button", name=button)).to_be_disabled()
        dialog.get_by_label(re.compile("^Type ")).fill(type)
    if reason:
        dialog.get_by_label(re.compile("^Reason")).fill(reason)
    dialog.get_by_role("button", name=button).click()
    expect(dialog).to_have_count(0)


def audited(page: Any, action: str, subject: str = "", *, outcome: str = "done") -> None:
    """There is a row of the audit trail for it."""
    go(page, "Audit")
    page.get_by_label("Action").select_option(action)
    row = page.locator("tbody tr").filter(has_text=action.replace("_", " "))
    if subject:
        row = row.filter(has_text=subject)
    expect(row.filter(has_text=outcome).first).to_be_visible()


def train_until_live(page: Any) -> str:
    """Train now, and wait for what comes of it; its version."""
    go(page, "Training")
    page.get_by_role("button", name="Train now").click()
    confirm(page, "Train now")
    go(page, "Versions")
    row = page.locator("tbody tr").filter(has_text="feedc0ffee").first
    expect(row).to_contain_text("live", timeout=60_000)
    version: str = row.get_by_role("link").first.inner_text().strip()
    return version


def test_a_version_goes_from_candidate_over_canary_to_live(cluster: ScriptedCluster, open_page: Callable[..., Any]) -> None:  # fmt: skip
    """What an operator sees after `Train now`, without loading anything again: every step of it, and that it helped."""
    page = open_page(cluster)
    sign_in(page)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    live = page.locator(".tile", has_text="Live draft")
    base = live.get_by_role("link").inner_text().strip()

    go(page, "Training")
    page.get_by_role("button", name="Train now").click()
    confirm(page, "Train now", reason="to see it learn")
    run = page.locator("tbody tr").first
    expect(run).to_contain_text("training")
    run.get_by_role("link").first.click()
    expect(page.locator(".chart-host canvas").first).to_be_visible()
    expect(page.get_by_text("done")).to_be_visible(timeout=30_000)

    go(page, "Versions")
    row = page.locator("tbody tr").filter(has_text="feedc0ffee")
    expect(row).to_contain_text(re.compile("candidate|canary"), timeout=30_000)
    expect(row).to_contain_text("canary", timeout=30_000)
    version = row.get_by_role("link").first.inner_text().strip()
    go(page, "Overview")
    expect(page.get_by_role("heading", name="Canary")).to_be_visible()
    expect(page.get_by_role("heading", name="Canary")).to_have_count(0, timeout=60_000)
    expect(live).to_contain_text(version)
    expect(live).to_contain_text("by loop")

    marks = page.get_by_role("list", name="What happened")
    for mark in ("train", "gate", "canary", "promote", "swap"):
        expect(marks.get_by_text(re.compile(rf"^{mark}\b")).first).to_be_visible()
    chart = page.get_by_role("img", name=re.compile("^Acceptance over time"))
    expect(chart).to_have_attribute("aria-label", re.compile(f"{version} [4-9]"))
    expect(chart).to_have_attribute("aria-label", re.compile(base))

    page.goto(f"{cluster.url}/admin/#/versions/{version}")
    expect(page.get_by_text("✓ Passed:")).to_be_visible()
    expect(
        page.get_by_role("table", name="Saving of decode time at the gate").get_by_role("row")
    ).to_have_count(4)
    expect(page.locator(".history li")).not_to_have_count(0)
    page.goto(f"{cluster.url}/admin/#/versions?view=lineage")
    expect(page.get_by_role("link", name=re.compile(f"^{version}, live, .* parent {base}"))).to_be_visible()
    audited(page, "train", outcome="done")


def test_every_button_asks_once_and_is_audited(
    cluster: ScriptedCluster, open_page: Callable[..., Any]
) -> None:
    """Pause, resume, pin, unpin, roll back, canary, promote, revoke, stop, delete, a setting: done, and in the trail."""
    page = open_page(cluster)
    sign_in(page)

    page.get_by_role("button", name="Pause").click()
    confirm(page, "Pause", reason="maintenance")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    confirm(page, "Resume")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()

    version = train_until_live(page)
    page.get_by_role("link", name=version).first.click()
    page.get_by_role("button", name="Pin", exact=True).click()
    confirm(page, "Pin")
    page.get_by_role("button", name="Unpin").click()
    confirm(page, "Unpin")
    expect(page.get_by_role("button", name="Pin", exact=True)).to_be_visible()
    page.get_by_role("button", name="Roll back").click()
    confirm(page, "Roll back", reason="try")
    expect(page.locator(".facts").first).to_contain_text("rolled back")
    cluster.is_quiet = True  # or the canary is over before anybody can press a button
    page.get_by_role("button", name="Canary").click()
    confirm(page, "Start canary anyway")  # it was rolled back
    expect(page.locator(".facts").first).to_contain_text("canary")
    page.get_by_role("button", name="Promote").click()
    confirm(page, "Promote")
    expect(page.locator(".facts").first).to_contain_text("live")
    cluster.is_quiet = False
    page.get_by_role("button", name="Revoke").click()
    confirm(page, "Revoke for good", type=version)
    expect(page.locator(".facts").first).to_contain_text("revoked")
    expect(page.get_by_role("button", name="Revoke")).to_have_count(0)

    cluster.trainer_waits = True
    go(page, "Training")
    page.get_by_role("button", name="Train now").click()
    confirm(page, "Train now")
    page.locator("tbody tr").filter(has_text="training").get_by_role("link").first.click()
    page.get_by_role("button", name="Stop", exact=True).click()
    confirm(page, "Stop the run")
    expect(page.locator(".facts").first).to_contain_text("stopped")

    go(page, "Capture and privacy")
    page.get_by_label("Request id").fill("req-7")
    page.get_by_role("button", name="Delete", exact=True).last.click()
    confirm(page, "Delete for good")
    expect(page.locator("tbody tr").filter(has_text="request:req-7").filter(has_text="done")).to_be_visible()

    go(page, "Settings")
    field = page.get_by_label("Canary share", exact=False)
    field.fill("7")
    expect(page.get_by_text("At most 0.5.")).to_be_visible()
    expect(page.get_by_role("button", name="Save")).to_be_disabled()
    field.fill("0.2")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("No changes.")).to_be_visible()
    assert cluster.control.loop is not None
    assert cluster.control.loop.learning.rollout.canary_share == 0.2

    for action, subject in (
        ("pause", "maintenance"), ("resume", ""), ("pin", ""), ("unpin", ""), ("roll_back", "try"), ("canary", version),
        ("promote", version), ("revoke", version), ("train", ""), ("forget", ""), ("delete", "request:req-7"),
        ("settings", "canary_share"), ("sign_in", ""),
    ):  # fmt: skip
        audited(page, action, subject)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Admin key")).to_be_visible()


def test_what_is_refused_says_why_and_is_audited(
    cluster: ScriptedCluster, open_page: Callable[..., Any]
) -> None:
    """A wrong key, a second run, going back where nothing was before: the reason stands where it was asked for."""
    page = open_page(cluster, may_complain=True)  # browsers note each answer of 4xx
    page.get_by_label("Admin key").fill("x" * 30)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not the admin key")
    sign_in(page)

    page.get_by_role("button", name="Roll back").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Roll back").click()
    expect(dialog.get_by_role("alert")).to_contain_text("no version before it")
    dialog.get_by_role("button", name="Cancel").click()

    audited(page, "sign_in_failed", outcome="refused")
    audited(page, "roll_back", "no version before it", outcome="refused")


def test_what_a_draft_worker_refuses_does_not_serve_and_says_why(
    cluster: ScriptedCluster, open_page: Callable[..., Any]
) -> None:
    """Broken weights end at the first worker that is asked to load them, with its reason."""
    cluster.refuses = {"01feedc0ffee": "model.safetensors: sha256 differs"}
    page = open_page(cluster)
    sign_in(page)
    page.get_by_role("button", name="Train now").click()
    confirm(page, "Train now")
    go(page, "Versions")
    row = page.locator("tbody tr").filter(has_text="01feedc0ffee")
    expect(row).to_be_visible(timeout=30_000)
    row.get_by_role("link").first.click()

    expect(page.get_by_text("sha256 differs").first).to_be_visible(timeout=30_000)
    expect(page.locator(".facts").first).to_contain_text("rejected")


def test_an_alarm_is_shown_until_it_is_over(cluster: ScriptedCluster, open_page: Callable[..., Any]) -> None:
    """A run that waits for a trainer that is gone."""
    page = open_page(cluster)
    sign_in(page)
    cluster.trainer_waits = True
    page.get_by_role("button", name="Train now").click()
    confirm(page, "Train now")
    cluster.trainer_is_gone = True

    expect(page.get_by_role("alert")).to_contain_text("there is no trainer", timeout=30_000)
    cluster.trainer_is_gone = False
    expect(page.get_by_role("alert")).to_have_count(0, timeout=30_000)


def test_a_key_is_made_shown_once_changed_and_revoked(
    cluster: ScriptedCluster, open_page: Callable[..., Any], home: Path
) -> None:
    """What is shown is the key that opens; afterwards it is nowhere on the page, and the trail has who did what."""
    store = KeyFile(home / "keys.json", recheck_s=0.0)
    page = open_page(cluster)
    sign_in(page)
    go(page, "API keys")
    make = page.get_by_role("region", name="New key")
    make.get_by_label("Name").fill("web")
    make.get_by_label("Tenant").fill("acme")
    make.get_by_label("Requests a minute").fill("60")
    make.get_by_role("button", name="Make key").click()
    shown = make.locator("code.secret")
    expect(shown).to_have_text(re.compile("^pl_"))
    text = shown.inner_text()
    made = store.find(text)
    assert made is not None and (made.owner, made.limits.requests_per_minute) == ("acme", 60)
    row = page.locator("tbody tr").filter(has_text="web")
    expect(row).to_contain_text("60 requests/min")
    make.get_by_role("button", name="I have it").click()
    expect(shown).to_have_count(0)
    assert text not in page.content()

    row.get_by_role("button", name="Change web").click()
    change = page.get_by_role("region", name="Change web")
    change.get_by_label("Requests at once").fill("4")
    change.get_by_role("button", name="Save").click()
    expect(row).to_contain_text("60 requests/min, 4 at once")
    row.get_by_role("button", name="Revoke web").click()
    confirm(page, "Revoke for good")
    expect(row).to_contain_text("revoked")
    assert store.find(text) is None
    for action in ("key_create", "key_change", "key_revoke"):
        audited(page, action, made.id)
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_is_accessible_and_fits(cluster: ScriptedCluster, open_page: Callable[..., Any], scheme: str, size: dict[str, int]) -> None:  # fmt: skip
    """axe finds nothing, nothing is wider than the screen, no errors, nobody else is asked."""
    page = open_page(cluster, viewport=size, color_scheme=scheme, reduced_motion="reduce")
    scan = axe.Axe()
    found = [("sign in", scan.run(page).response["violations"])]
    sign_in(page)
    page.goto(f"{cluster.url}/admin/#/versions")
    link = page.locator("tbody tr").first.get_by_role("link").first
    expect(link).to_be_visible()
    version = link.inner_text().strip()
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")

    for place in (*PAGES, f"versions/{version}"):
        page.goto(f"{cluster.url}/admin/#/{place}")
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("[aria-busy]")).to_have_count(0)
        found.append((place, scan.run(page).response["violations"]))
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], place
        background = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (sum(background[:3]) < 200) == (scheme == "dark"), place

    problems = [
        (place, v["id"], v["nodes"][0]["html"][:120]) for place, violations in found for v in violations
    ]
    assert problems == []


def test_the_scan_would_find_something(cluster: ScriptedCluster, open_page: Callable[..., Any]) -> None:
    """Negative control: a button without a name, and text that can hardly be read."""
    page = open_page(cluster)
    sign_in(page)
    page.evaluate(
        """() => {
          const button = document.createElement("button");
          const text = document.createElement("p");
          text.textContent = "can you read this";
          text.style.color = "#ccc"; text.style.background = "#fff";
          document.querySelector("main").append(button, text);
        }"""
    )

    found = {violation["id"] for violation in axe.Axe().run(page).response["violations"]}

    assert {"button-name", "color-contrast"} <= found


def test_the_theme_can_be_chosen_and_is_kept(cluster: ScriptedCluster, open_page: Callable[..., Any]) -> None:
    """Whatever the system says; also after loading the page again."""
    page = open_page(cluster, color_scheme="light")
    sign_in(page)
    page.get_by_role("button", name="Dark").click()
    page.reload()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()

    background = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert sum(background[:3]) < 200
    expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")


def test_everything_can_be_done_with_the_keyboard(
    cluster: ScriptedCluster, open_page: Callable[..., Any]
) -> None:
    """Skip link, navigation, a question that Escape declines and that gives the focus back."""
    page = open_page(cluster)
    expect(page.get_by_label("Admin key")).to_be_focused()
    page.keyboard.type(KEY)  # the only field has the focus
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()

    page.keyboard.press("Tab")
    focused = "document.activeElement.textContent"
    for _ in range(20):
        if page.evaluate(focused) == "Skip to content":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "Pause":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    assert page.evaluate(focused) == "Cancel"
    page.keyboard.press("Escape")

    expect(dialog).to_have_count(0)
    assert page.evaluate(focused) == "Pause"
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_a_phone_has_a_menu(cluster: ScriptedCluster, open_page: Callable[..., Any]) -> None:
    """All pages are reached from it, and it closes behind one."""
    page = open_page(cluster, viewport=PHONE, has_touch=True)
    sign_in(page)
    menu = page.get_by_role("button", name="Menu")
    for name in NAMES:
        menu.click()
        go(page, name)
        expect(page.get_by_role("navigation", name="Pages")).to_be_hidden()


def test_a_lost_connection_is_said_and_mended(
    cluster: ScriptedCluster, open_page: Callable[..., Any]
) -> None:
    """Figures that stand still must not look alive."""
    page = open_page(cluster, may_complain=True)
    sign_in(page)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    cluster.freeze(14.0)
    expect(page.get_by_text("No connection to control.")).to_be_visible(timeout=30_000)
    expect(page.get_by_text("Connection lost")).to_be_visible()

    expect(page.get_by_text("No connection to control.")).to_have_count(0, timeout=30_000)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()


def test_the_policy_is_strict_and_in_force(cluster: ScriptedCluster, open_page: Callable[..., Any]) -> None:
    """An injected script does not run and no other host is reached: the browser itself forbids it."""
    page = open_page(cluster, may_complain=True, may_ask="http://127.0.0.2:9/")
    sign_in(page)
    policy = page.evaluate("fetch('/admin/').then(answer => answer.headers.get('content-security-policy'))")
    assert "unsafe" not in policy and "default-src" in policy and "frame-ancestors 'none'" in policy

    found = page.evaluate(
        """async () => {
          const seen = [];
          document.addEventListener("securitypolicyviolation", event => seen.push(event.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "window.injected = true";
          document.body.append(script);
          const image = document.createElement("img");
          image.src = "http://127.0.0.2:9/pixel.png";
          document.body.append(image);
          const reached = await fetch("http://127.0.0.2:9/").then(() => true, () => false);
          await new Promise(done => setTimeout(done, 300));
          return { seen, reached, injected: window.injected === true };
        }"""
    )

    assert found["injected"] is False and found["reached"] is False
    assert {"script-src-elem", "img-src", "connect-src"} <= set(found["seen"])


def test_without_learning_the_pages_say_how_to_turn_it_on(home: Path, open_page: Callable[..., Any]) -> None:
    """Empty pages are no errors: they say what to do."""
    with ScriptedCluster(home, learning=False) as cluster:
        page = open_page(cluster)
        sign_in(page)
        expect(page.get_by_text("Learning is off").first).to_be_visible()
        expect(page.get_by_text("learning.enabled=true").first).to_be_visible()
        expect(page.get_by_role("button", name="Train now")).to_have_count(0)
        for place in PAGES:
            page.goto(f"{cluster.url}/admin/#/{place}")
            expect(page.locator("h1")).to_be_visible()
            expect(page.locator("[aria-busy]")).to_have_count(0)
            expect(page.get_by_role("alert")).to_have_count(0)
        page.context.close()  # before the server goes
